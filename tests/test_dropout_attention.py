"""Dropout on the CPU and on a Hopper GPU: attention, gradients, the mask and its random numbers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_checks import captured
from gradients import check_gradients, check_varlen_gradients
from pairs import pairs, places
from problems import CAUSAL, attend, make_operands, make_problem, poisoned_allocations
from reference import check_attention, visible
from score_problems import Recipe
from torch.fx.experimental.proxy_tensor import make_fx
from varlen_problems import VarlenProblem, check_varlen, make_call

import fa3
from fa3.calls.modifiers import draw_rng_state
from fa3.planning.planner import plan_forward
from fa3.primitives.dropout import PHILOX_ROUNDS, key_steps, philox, threshold_of
from fa3.problem import Problem, Window
from fa3.reference.dropout import Dropout

SEED = 0x3A1F_5C77_90AB_CDEF
STATE = torch.tensor([SEED])

DROPPED = {"dropout_p": 0.3, "rng_state": STATE}

PACKED = (
    VarlenProblem((70, 0, 130), (90, 20, 130), heads_kv=2, group=2, head_dim=32),
    VarlenProblem((100, 50), (100, 80), (90, 50), (64, 70), 7, causal=True),
    VarlenProblem((33, 150), (150, 33), head_dim=64, window=(30, 5), recipe=Recipe(sinks="q")),
)


WINDOWS = (Window(), CAUSAL, Window(40, 20), Window(left=70))
HEAD_DIMS = (64, 96, 128, 192, 256)


def on(where, **changes) -> dict:
    """Arguments of a call with dropout."""
    return DROPPED | {"rng_state": STATE.to(where)} | changes


@pytest.fixture
def dropped(device) -> dict:
    """Arguments of a call with dropout on a GPU."""
    return on(device)


# ----------------------------------------------------------------------------------- attention

PROBLEMS = (
    make_problem(1, 1, 1, 1),
    make_problem(2, 70, 90, 2, head_dim=32),
    make_problem(2, 150, 150, 2, 2, 64, CAUSAL),
    make_problem(1, 130, 300, 1, 3, 128, Window(40, 20)),
    make_problem(1, 300, 100, 2, 1, 40, CAUSAL, "float16", 72),
)


@places(
    "problem,dropout_p",
    cpu=[
        *itertools.product(PROBLEMS, (0.1, 0.9)),
        (make_problem(2, 300, 400, 2, 2, 32, CAUSAL), 0.995),
    ],
    gpu=[
        (make_problem(2, 64, 64, 2, 1, head_dim, window, dtype), 0.3)
        for head_dim, windows, dtype in (
            *((64, WINDOWS, "bfloat16"), (128, WINDOWS, "float16"), (256, WINDOWS, "bfloat16")),
            *((96, [CAUSAL], "bfloat16"), (192, [Window(left=70)], "float16")),
        )
        for window in windows
    ],
)
def test_attention_and_gradients(problem, dropout_p, where):
    check_dropped(problem, dropout_p, (True, True), where)
    if where != "cpu":
        for lengths, group in (((300, 500), 2), ((500, 300), 8), ((1024, 1000), 1)):
            sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "qhead_per_kvhead": group}
            check_dropped(replace(problem, **sizes), dropout_p, (True, False), where)


def check_dropped(problem: Problem, dropout_p: float, weights: tuple, where) -> None:
    """Check attention with dropout, and its gradients."""
    operands, window = make_operands(problem, 0, where), problem.window
    dropout = on(where, dropout_p=dropout_p)
    out, lse = attend(*operands, window, **dropout)
    check_attention(out, lse, *operands, window=window, **dropout)
    if where == "cpu":
        # The log-sum-exp knows nothing of it.
        assert torch.equal(lse, attend(*operands, window)[1])
    check_gradients(*operands, window, weights, **dropout)


RECIPES = [
    Recipe(softcap=2.0),
    Recipe(softcap=20.0),
    Recipe(alibi_rank=2),
    Recipe(sinks="float32"),
    Recipe(softcap=20.0, alibi_rank=2, sinks="q"),
    Recipe(mask="documents"),
]


@places(
    "recipe,deterministic",
    cpu=[(recipe, False) for recipe in RECIPES],
    gpu=zip(RECIPES[1:], itertools.cycle((True, False))),
)
def test_gradients_with_modifiers(recipe, deterministic, where):
    problem = make_problem(2, 100, 140, 2, 2, 32, CAUSAL)
    if where != "cpu":
        problem = make_problem(2, 300, 400, 2, 2, 64, CAUSAL)
    q, k, v = make_operands(problem, 0, where)
    modifiers = recipe.make(problem, q) | on(where, deterministic=deterministic)
    check_gradients(q, k, v, CAUSAL, (True, True), **modifiers)


PACKED_ON_GPU = (
    VarlenProblem((70, 0, 130), (90, 20, 130), heads_kv=2, group=2, head_dim=64),
    VarlenProblem((300, 50), (300, 80), (90, 50), (64, 70), 7, head_dim=128),
    VarlenProblem((600, 1, 257), (600, 1, 257), heads_kv=2, head_dim=128, causal=True),
    VarlenProblem((33, 150), (150, 33), head_dim=256, window=(30, 5)),
    VarlenProblem((20,) * 100, (20,) * 100, causal=True, recipe=Recipe(sinks="q")),
)


@places("problem", cpu=PACKED, gpu=PACKED_ON_GPU)
def test_packed_sequences(problem, where):
    """Short ones too, which share tiles without dropout."""
    call = make_call(problem, 0, where) | on(where)
    with poisoned_allocations():
        out, lse = fa3.flash_attn_varlen_func(**call, return_lse=True)
    check_varlen(problem, call, out, lse)
    check_varlen_gradients(problem, call)


def test_the_seed_comes_from_the_generator_of_torch(where):
    q, k, v = make_operands(make_problem(2, 500, 600, 2, head_dim=128), 0, where)
    get_rng_state = torch.get_rng_state if where == "cpu" else torch.cuda.get_rng_state
    torch.manual_seed(5)
    first, second = (fa3.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    state = draw_rng_state(q.device)
    assert torch.equal(fa3.flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state), first)
    assert torch.equal(fa3.flash_attn_func(q, k, v, dropout_p=0.5), second)
    before = get_rng_state()
    fa3.flash_attn_func(q, k, v)
    fa3.flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state)
    assert torch.equal(get_rng_state(), before)


def test_no_dropout_is_none():
    problem = make_problem(2, 70, 90, 2, head_dim=32)
    inputs = [x.requires_grad_() for x in make_operands(problem)]
    outs = [fa3.flash_attn_func(*inputs, **options) for options in ({}, {"dropout_p": 0})]
    d_out = torch.randn_like(outs[0])
    expected, found = (torch.autograd.grad(out, inputs, d_out) for out in outs)
    assert torch.equal(*outs) and all(map(torch.equal, found, expected))


def test_gradients_do_not_depend_on_the_default_dtype(request):
    inputs = [x.requires_grad_() for x in make_operands(PROBLEMS[1])]
    out = fa3.flash_attn_func(*inputs, **on("cpu"))
    expected = torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    assert all(map(torch.equal, torch.autograd.grad(out, inputs, out.detach()), expected))


def test_a_plan_knows_whether_there_is_dropout():
    problem = make_problem(1, 70, 70, 1)
    q, k, v = make_operands(problem)
    with pytest.raises(ValueError, match="has_dropout False; the call has has_dropout True"):
        fa3.flash_attn_func(q, k, v, plan=plan_forward(problem), **DROPPED)
    spec = replace(problem.spec, has_dropout=True)
    assert "dropout" in str(plan_forward(replace(problem, spec=spec)).explain())


def test_graphs():
    """A graph draws its seed; and another one when it runs again."""
    q, k, v = make_operands(make_problem(2, 70, 90, 2, head_dim=32))
    given = make_fx(lambda q, k, v: fa3.flash_attn_func(q, k, v, **DROPPED))(q, k, v)
    assert torch.equal(given(q, k, v), fa3.flash_attn_func(q, k, v, **DROPPED))
    drawn = make_fx(lambda q, k, v: fa3.flash_attn_func(q, k, v, dropout_p=0.3))(q, k, v)
    assert not torch.equal(drawn(q, k, v), drawn(q, k, v))
    torch.manual_seed(7)
    expected = fa3.flash_attn_func(q, k, v, dropout_p=0.3)
    torch.manual_seed(7)
    assert torch.equal(drawn(q, k, v), expected)


def test_masks_are_those_of_the_cpu(device):
    for dropout_p in (2**-16, 0.1, 0.4979, 0.5, 0.9, 0.999):
        expected = fa3.dropout_mask(STATE, dropout_p, 2, 3, 100, 170)
        found = fa3.dropout_mask(STATE.to(device), dropout_p, 2, 3, 100, 170)
        assert torch.equal(found.cpu(), expected)


def kept_by_forward(sizes: tuple, head_dim: int, device, **call) -> torch.Tensor:
    """Return which keys the forward kernel keeps, (batch, heads, queries, keys).

    All keys weigh the same, and the values of some of them name their keys.
    """
    batch, heads, seqlen_q, seqlen_k = sizes
    q = torch.zeros(batch, seqlen_q, heads, head_dim, dtype=torch.bfloat16, device=device)
    k = torch.zeros(batch, seqlen_k, heads, head_dim, dtype=torch.bfloat16, device=device)
    parts = []
    for begin in range(0, seqlen_k, head_dim):
        v = torch.zeros_like(k)
        named = torch.arange(min(head_dim, seqlen_k - begin), device=device)
        v[:, begin + named, :, named] = 1.0
        out = fa3.flash_attn_func(q, k, v, **call)
        parts.append(out[..., : len(named)].transpose(1, 2) != 0)
    return torch.cat(parts, dim=3)


def kept_by_backward(sizes: tuple, head_dim: int, device, **call) -> torch.Tensor:
    """Return which keys the backward kernel keeps, by dV of gradients that name their queries."""
    batch, heads, seqlen_q, seqlen_k = sizes
    q = torch.zeros(batch, seqlen_q, heads, head_dim, dtype=torch.bfloat16, device=device)
    k = torch.zeros(batch, seqlen_k, heads, head_dim, dtype=torch.bfloat16, device=device)
    v = torch.zeros_like(k).requires_grad_()
    out = fa3.flash_attn_func(q, k, v, **call)
    parts = []
    for begin in range(0, seqlen_q, head_dim):
        d_out = torch.zeros_like(out)
        named = torch.arange(min(head_dim, seqlen_q - begin), device=device)
        d_out[:, begin + named, :, named] = 1.0
        (dv,) = torch.autograd.grad(out, v, d_out, retain_graph=True)
        parts.append(dv[..., : len(named)].permute(0, 2, 3, 1) != 0)
    return torch.cat(parts, dim=2)


LENGTHS = ((1, 1), (64, 128), (200, 333), (333, 200), (513, 513))


@pairs(head_dim=HEAD_DIMS, window=(Window(), CAUSAL))
def test_the_kernels_draw_the_mask(head_dim, window, device, dropped):
    for lengths, dropout_p in itertools.product(LENGTHS, (0.3, 0.5)):
        sizes, call = (2, 3, *lengths), dropped | {"dropout_p": dropout_p}
        expected = fa3.dropout_mask(call["rng_state"], dropout_p, *sizes)
        for kept in (kept_by_forward, kept_by_backward):
            found = kept(sizes, head_dim, device, window_size=tuple(window), **call)
            assert torch.equal(found, expected & visible(*lengths, window, device))


def test_no_schedule_changes_the_mask(device, dropped):
    sizes = (1, 2, 700, 900)
    for schedule in ("single", "static", "list", "dynamic", "split"):
        found = kept_by_forward(sizes, 128, device, schedule=schedule, **dropped)
        assert torch.equal(found, fa3.dropout_mask(dropped["rng_state"], 0.3, *sizes)), schedule


@pytest.mark.parametrize("window", [CAUSAL, Window(40, 20)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fixed_row_max(head_dim, window, device, dropped, always_fixed):
    """Scores that rise far above the first ones: rows are computed again, with the same mask."""
    problem = make_problem(2, 400, 700, 2, 1, head_dim, window)
    q, k, v = make_operands(problem, 0, device)
    k[:, :300] *= 40
    options = {"window_size": tuple(window), "return_lse": True}
    with poisoned_allocations():
        out, lse = fa3.flash_attn_func(q, k, v, **options, **dropped)
    check_attention(out, lse, q, k, v, window=window, lse_tolerance=2e-3, **dropped)


def test_rows_of_which_nothing_is_kept(device, dropped, always_fixed):
    """Their output is 0, and their log-sum-exp what it always is."""
    problem = make_problem(2, 300, 300, 2, head_dim=128, window=CAUSAL)
    q, k, v = make_operands(problem, 0, device)
    for dropout_p in (0.5, 0.9, 0.99):
        call = dropped | {"dropout_p": dropout_p}
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, **call)
        check_attention(out, lse, q, k, v, window=CAUSAL, **call)
        mask = fa3.dropout_mask(call["rng_state"], dropout_p, 2, 2, 300, 300)
        is_empty = ~(mask & visible(300, 300, CAUSAL, device)).any(dim=3)
        assert is_empty.any() and not out.transpose(1, 2)[is_empty].any()


def leaves_on(device) -> list[torch.Tensor]:
    """Return q, k and v that require grad."""
    problem = make_problem(2, 500, 600, 2, head_dim=128)
    return [x.requires_grad_() for x in make_operands(problem, 0, device)]


def test_the_host_waits_for_nothing(device):
    q, k, v = leaves_on(device)
    fa3.flash_attn_func(q, k, v, dropout_p=0.5).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa3.flash_attn_func(q, k, v, dropout_p=0.5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_graph_draws_another_mask_at_each_replay(is_packed, device):
    """The backward pass in it draws that mask again."""
    sizes = 2, 2, 128, 128
    q, k = (torch.zeros(2, 128, 2, 128, device=device).bfloat16() for _ in range(2))
    v = torch.eye(128, device=device).bfloat16()[None, :, None].repeat(2, 1, 2, 1)
    lengths, attend = (), fa3.flash_attn_func
    if is_packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ends = torch.tensor((0, 128, 256), device=device).int()
        lengths, attend = (ends, ends, 128, 128), fa3.flash_attn_varlen_func
    v.requires_grad_()

    def run():
        out = attend(q, k, v, *lengths, dropout_p=0.5)
        (dv,) = torch.autograd.grad(out, v, v.detach())
        return out, dv

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    graph, results = captured(lambda: [x.detach().view(2, 128, 2, 128) for x in run()])
    seen = []
    for _ in range(5):
        graph.replay()
        of_out, of_gradients = (x != 0 for x in results)
        of_out, of_gradients = of_out.transpose(1, 2), of_gradients.permute(0, 2, 3, 1)
        assert of_out.shape == sizes and torch.equal(of_out, of_gradients)
        assert 0.4 < of_out.float().mean() < 0.6
        assert not any(torch.equal(of_out, before) for before in seen)
        seen.append(of_out)


def test_a_graph_reads_the_seed_that_it_is_given(device):
    q, k, v = (x.detach() for x in leaves_on(device))
    state = torch.tensor([1], device=device)
    fa3.flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state)
    graph, out = captured(lambda: fa3.flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state))
    for seed in (1, 2, SEED):
        state.fill_(seed)
        graph.replay()
        expected = fa3.flash_attn_func(q, k, v, dropout_p=0.5, rng_state=state)
        assert torch.equal(out, expected)


# ------------------------------------------------------------------ the mask and its random numbers

# ------------------------------------------------------------------------------------- Philox

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "4dfccaba 190a87f0 c47362ba b6b5242a"),
]  # fmt: skip
"""Counter, key, and what comes of them after seven rounds, of Random123's `kat_vectors`."""


def philox_of_numpy(counter: list, key: list, rounds: int) -> list:
    """Compute Philox4x32 as its paper writes it down, on arrays of uint64."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ k0,
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ k1,
            p0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("words", KNOWN)
def test_known_answers(words):
    counter, key, answer = ([int(word, 16) for word in text.split()] for text in words)
    assert [int(word) for word in philox_of_numpy(counter, key, PHILOX_ROUNDS)] == answer
    keys = [
        tuple((k + s) % 2**32 for k, s in zip(key, steps, strict=True))
        for steps in key_steps(PHILOX_ROUNDS)
    ]
    found = philox(tuple(counter), keys, lambda word, factor: divmod(word * factor, 2**32))
    assert list(found) == answer


def numbers(seed: int, batch: int, head: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the 16-bit numbers of scores, by numpy alone."""
    lane = query % 8 * 4 + key % 8 // 2
    counter = np.broadcast_arrays(head, key // 16 * 16 + lane // 2, batch, query // 16)
    words = np.stack(philox_of_numpy(list(counter), [seed % 2**32, seed >> 32], PHILOX_ROUNDS))
    index = (lane + key // 16 + query // 16) % 2 * 2 + key % 16 // 8
    word = np.take_along_axis(words, index[None], axis=0)[0]
    word = np.where(query % 16 < 8, word, word * np.uint64(0x915F77F5))
    return (word >> (key % 2 * 16).astype(np.uint64)).astype(np.uint32) & 0xFFFF


def is_kept(number: np.ndarray, dropout_p: float) -> np.ndarray:
    """Return which numbers drop nothing."""
    bits, _ = threshold_of(dropout_p)
    threshold = np.array([bits << 16], dtype=np.uint32).view(np.float32)
    return ~((number.astype(np.uint32) << 16).view(np.float32) < threshold)


# ----------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.75])
def test_the_mask_of_numpy(dropout_p):
    found = fa3.dropout_mask(STATE, dropout_p, 2, 3, 70, 90).numpy()
    query, key = np.broadcast_arrays(np.arange(70)[:, None], np.arange(90))
    for batch in range(2):
        for head in range(3):
            expected = is_kept(numbers(SEED, batch, head, query, key), dropout_p)
            assert np.array_equal(found[batch, head], expected)


@pytest.mark.parametrize(
    "dropout_p",
    [1e-9, 2**-16, 0.001, 0.1, 0.25, 0.4979, 0.4981, 0.5, 1 / 3, 0.9, 0.996, 0.9999, 1 - 2**-30],
)
def test_the_threshold_drops_its_share_of_all_numbers(dropout_p):
    dropped = np.count_nonzero(~is_kept(np.arange(2**16, dtype=np.uint32), dropout_p))
    _, kept = threshold_of(dropout_p)
    assert dropped == round((1 - kept) * 2**16)
    assert dropped == min(max(round(dropout_p * 2**16), 1), 0xFF01)


def test_a_threshold_between_the_zeros():
    """Neither zero is less than the other, so one share is not possible."""
    bits, kept = threshold_of(0x7F81 / 2**16)
    assert (bits, kept) == (1, 1 - 0x7F82 / 2**16)
    assert np.count_nonzero(~is_kept(np.arange(2**16, dtype=np.uint32), 0x7F81 / 2**16)) == 0x7F82


def test_positions_near_the_ends_of_32_bits():
    at = fa3.Position(
        2**31 - 1, 2**31 - 1, torch.tensor([2**31 - 2]), torch.tensor([2**31 - 2]), 0, 0
    )
    found = Dropout(STATE, 0.5).keeps(at)
    place = np.array([2**31 - 2])
    assert found.tolist() == is_kept(numbers(SEED, at.batch, at.head, place, place), 0.5).tolist()


# ------------------------------------------------------------------------------ what is refused


def test_the_kernel_of_decoding_has_no_dropout():
    """However few the queries are."""
    q, k, v = make_operands(make_problem(2, 1, 5000, 1, 8, 64))
    with pytest.raises(NotImplementedError, match="pack_gqa must be None or False with dropout_p"):
        fa3.flash_attn_func(q, k, v, pack_gqa=True, **DROPPED)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True, **DROPPED)
    check_attention(out, lse, q, k, v, **DROPPED)
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 5000, 10000]).int()
    packed = (x.flatten(0, 1) for x in (q, k, v))
    found = fa3.flash_attn_varlen_func(*packed, *lengths, 1, 5000, **DROPPED)
    torch.testing.assert_close(found[:, None], out, atol=1e-2, rtol=1e-2)
