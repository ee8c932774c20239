"""`flash_attn_varlen_func`: its arguments, results and gradients, and what it remembers.

On a GPU memory is NaN wherever a kernel writes nothing.
"""

import functools
import gc
import itertools
import pickle
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_checks import captured, used_counters
from gradients import NAMES, check_varlen_gradients
from pairs import places
from problems import make_problem
from score_problems import Recipe
from torch.fx.experimental.proxy_tensor import make_fx
from valid_calls import OnGpu
from varlen_problems import (
    LENGTHS_OF_GRAPHS,
    WRONG_ENDS,
    VarlenProblem,
    attend,
    check_beside_what_is_not_finite,
    check_call,
    check_graph,
    check_varlen,
    check_wrong_ends,
    integers,
    make_call,
    random_problem,
    signature_with,
    unused,
)

import fa3
from fa3 import flash_attn_varlen_func
from fa3.calls import attention
from fa3.calls.call import LENGTHS_OF_PACKED
from fa3.calls.execution import Prepared, prepared_for
from fa3.planning.backward import most_keys_unzeroed
from fa3.planning.planner import plan_forward
from fa3.problem import Window

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2)
USED = replace(RAGGED, used_q=(70, 9, 0, 100), used_k=(10, -1, 3, 999), spare=5)


# ---------------------------------------------------------------------------------- arguments


def on_gpu(call: dict) -> dict:
    """Return the call with its integer tensors said to be on a GPU."""
    return {
        name: value.as_subclass(OnGpu) if name.startswith(("cu_seq", "seqused")) else value
        for name, value in call.items()
    }


# -------------------------------------------------------------------------------- on a GPU


@pytest.fixture
def launches(monkeypatch) -> list[dict]:
    """Have calls on CPU tensors launched as if they were on a GPU; return their values."""
    launched, prepare = [], attention.prepare_call

    def prepare_on_gpu(*key):
        packed = (call := prepare(*key)).run.__self__

        def find(sizes):
            route, _ = packed.find(sizes)
            made = prepared_for(sizes, Prepared((), frozenset()), packed.signature, route)
            return route, SimpleNamespace(run=lambda call: launched.append(call | made.numbers))

        return replace(call, run=replace(packed, find=find).attend, has_host_integers=False)

    monkeypatch.setattr(attention, "prepare_call", prepare_on_gpu)
    return launched


def test_lengths_on_a_gpu_are_not_read(launches, monkeypatch):
    for name in ("tolist", "item", "__int__", "__bool__"):
        monkeypatch.setattr(OnGpu, name, lambda *_: pytest.fail("was read"))
    call = on_gpu(make_call(USED))
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    names = "q", "k", "v", *LENGTHS_OF_PACKED
    expected = {name: call[name] for name in names} | {"o": out}
    (values,) = launches
    assert all(values[name] is tensor for name, tensor in expected.items())
    totals = {"total_q": len(call["q"]), "total_k": len(call["k"]), "short_queries": 0}
    expected = totals | {"address_of_lse": lse.data_ptr(), "softmax_scale": 0.125}
    assert expected.items() <= values.items()


def test_metadata_changes_no_bit_and_is_in_no_graph():
    call = make_call(RAGGED)
    _, heads_q, head_dim = call["q"].shape
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q"
    metadata = fa3.get_scheduler_metadata(
        len(call["cu_seqlens_q"]) - 1, max(1, call["max_seqlen_q"]), call["max_seqlen_k"], heads_q,
        call["k"].shape[1], head_dim, call.get("seqused_k"), call["q"].dtype, call["v"].shape[2],
        causal=call["causal"], window_size=call["window_size"], has_softcap=bool(call["softcap"]),
        **{name: call.get(name) for name in names},
    )  # fmt: skip
    out = torch.zeros_like(call["q"])
    found = flash_attn_varlen_func(**call, out=out, scheduler_metadata=metadata).clone()
    assert torch.equal(found, flash_attn_varlen_func(**call, out=out.zero_()))
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    with pytest.raises(NotImplementedError, match=r"^scheduler_metadata must be None while a"):
        make_fx(lambda q: flash_attn_varlen_func(**call | {"q": q}, scheduler_metadata=metadata))(
            call["q"]
        )


def caches() -> dict:
    """Return how much each cache of the package remembers."""
    # The collector does not tell what it leaves out.
    gc.unfreeze()
    found_by_name = {
        f"{found.__module__}.{found.__qualname__}": found.cache_info().currsize
        for found in gc.get_objects()
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("fa3.")
    }
    gc.freeze()
    return found_by_name


def test_no_length_is_remembered(launches):
    draw = random.Random(0)
    memory = torch.zeros(3, 2000, 2, 64).bfloat16()
    slopes = torch.ones(2)

    def call(num_sequences: int, is_new: bool) -> None:
        seqlens_q, seqlens_k = ([draw.randint(0, 50) for _ in range(9)] for _ in range(2))
        ends_q, ends_k = (
            integers(0, *np.cumsum(seqlens).tolist()) for seqlens in (seqlens_q, seqlens_k)
        )
        total_q, total_k = sum(seqlens_q) + draw.randint(0, 9), sum(seqlens_k)
        q, (k, v) = memory[0, :total_q], memory[1:, :total_k]
        flash_attn_varlen_func(
            q, k, v, ends_q[: num_sequences + 1], ends_k[: num_sequences + 1], max(seqlens_q),
            max(seqlens_k), causal=True, alibi_slopes=slopes,
            out=None if is_new else torch.empty_like(q),
        )  # fmt: skip
        launches.clear()

    kinds = list(itertools.product(range(1, 10), (True, False)))
    for kind in kinds:
        call(*kind)
    before = caches()
    for _ in range(2000):
        call(*draw.choice(kinds))
    assert caches() == before and before["fa3.calls.prepare.prepare_call"] > 0


# -------------------------------------------------------------------------------------- results

FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""


@pytest.mark.usefixtures("no_shared_tiles")
@places(
    "seed,family,longest",
    cpu=[(seed, seed // 2, 150) for seed in range(120)],
    gpu=[(seed, seed, 700) for seed in range(FAMILIES)],
)
def test_random_calls(seed, family, longest, where):
    """With gradients; on a GPU three of a family, whose kernels are the same."""
    dtype = ("bfloat16", "float16")[seed % 2]
    for number, length in enumerate((longest,) if where == "cpu" else (longest, 40, 40)):
        other = seed + number * FAMILIES
        problem = random_problem(other, dtype, family, length)
        check_call(problem, where, other)
        if other < 60:
            recipe = problem.recipe._replace(score=None)
            problem = replace(problem, softmax_scale=None, recipe=recipe)
            check_gradients(problem, where, ((1, 1), (1, 0), (0, 1))[other % 3], other)


def check_gradients(problem: VarlenProblem, where, weights=(True, False), seed: int = 0) -> None:
    check_varlen_gradients(problem, make_call(problem, seed, where), weights, seed)


def test_views():
    packed = torch.randn(120, 3, 2, 64).half()
    call = make_call(VarlenProblem((50, 70), (50, 70), heads_kv=2, dtype="float16"))
    call["max_seqlen_k"] = np.int64(1 << 40)  # it may be larger
    call |= dict(zip("qkv", packed.unbind(1), strict=True))
    copies = {name: call[name].clone(memory_format=torch.contiguous_format) for name in "qkv"}
    heads_first = {name: call[name].transpose(0, 1).contiguous().transpose(0, 1) for name in "qkv"}
    out = flash_attn_varlen_func(**call)
    assert torch.equal(out, flash_attn_varlen_func(**call | copies))
    assert torch.equal(out, flash_attn_varlen_func(**call | heads_first))


# ------------------------------------------------------------------------------- what is left alone


@pytest.mark.usefixtures("no_shared_tiles")
@places(
    "causal,head_dim",
    cpu=[(False, 64), (True, 64)],
    gpu=[(False, 64), (False, 128), (True, 128), (True, 256)],
)
def test_what_is_not_finite_does_not_reach_long_neighbours(causal, head_dim, where):
    """Key blocks reach into the next sequence, and rows of a tile into the next one's too. Shared
    tiles are in test_varlen_packing."""
    lengths = (300, 129, 70, 200, 333, 1, 130, 90)
    if where != "cpu":
        lengths = (300, 129, 700, 1, 500, 64, 333, 2000, 95, 128, 257, 640)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, causal=causal
    )
    check_beside_what_is_not_finite(problem, where)


@pytest.mark.parametrize(
    "problem",
    [
        VarlenProblem((), (), recipe=Recipe(sinks="q")),
        VarlenProblem((), (), spare=6, recipe=Recipe(sinks="q")),
        VarlenProblem((0, 0), (3, 0), recipe=Recipe(sinks="q")),
        VarlenProblem((20, 0, 4), (0, 0, 0)),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(9, 3, 99), recipe=Recipe(sinks="q")),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(-4, 3, 2**31 - 1), spare=3),
        VarlenProblem((20, 4), (5, 6), heads_kv=0),
        VarlenProblem((20, 4), (5, 6), used_k=(0, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(problem, causal):
    call = make_call(problem) | {"causal": causal}
    spare = 0 if sum(problem.seqlens_k) else problem.spare
    call |= {name: call[name][spare:] for name in "kv"}
    given = torch.full((len(call["q"]), call["q"].shape[1], 64), 7.0).bfloat16()
    out, lse = attend(call | {"out": given})
    check_varlen(problem, call, out, lse)
    assert (out[unused(problem, len(out))] == 7.0).all()
    leaves = [call[name].requires_grad_() for name in NAMES if call[name] is not None]
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    found = torch.autograd.grad((out, lse), leaves, (out, torch.ones_like(lse)))
    assert all(x.shape == dx.shape for x, dx in zip(leaves, found, strict=True))
    assert not any(dx.any() for dx in found[:3])
    # The log-sum-exp of a row without keys is its head's sink.
    assert all(dx.tolist() == [sum(len(rows.q) for rows in problem.rows)] for dx in found[3:])


@places(
    "causal,head_dim,length",
    cpu=[(False, 128, 50), (True, 64, 50)],
    gpu=[(False, 64, 2000), (True, 128, 2000), (False, 256, 2000)],
)
def test_equal_lengths_have_the_bits_of_a_dense_call(causal, head_dim, length, where):
    """Gradients too; on a GPU only dQ is added up in no fixed order."""
    batch, lengths = 4, (length,) * 4
    problem = VarlenProblem(lengths, lengths, heads_kv=2, head_dim=head_dim, causal=causal)
    call = make_call(problem, 0, where)
    out, lse = attend(call)
    window = Window(right=0) if causal else Window()
    equal = make_problem(batch, length, length, 2, 1, head_dim, window)
    config = signature_with(equal.spec).config
    plan = plan_forward(equal, config=config, schedule="list")
    leaves = [call[name].requires_grad_() for name in "qkv"]
    rows = [x.view(batch, length, -1, head_dim) for x in leaves]
    options = {"window_size": window, "return_lse": True}
    with torch.no_grad():
        expected, expected_lse = fa3.flash_attn_func(*rows, plan=plan, **options)
    assert torch.equal(out, expected.view(out.shape))
    assert torch.equal(lse, expected_lse.transpose(0, 1).reshape(lse.shape))
    d_out, d_lse = torch.randn_like(expected), torch.randn_like(expected_lse)
    given = d_out.flatten(0, 1), d_lse.transpose(0, 1).flatten(1)
    packed = flash_attn_varlen_func(**call, return_lse=True)
    found = torch.autograd.grad(packed, leaves, given)
    dense = fa3.flash_attn_func(*rows, **options)
    expected = torch.autograd.grad(dense, leaves, (d_out, d_lse))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    # Elsewhere the forward passes need not have the same bits, and delta follows from out.
    if where == "cpu" or torch.equal(packed[0], dense[0].flatten(0, 1)):
        assert all(map(torch.equal, found[where != "cpu" :], expected[where != "cpu" :]))


def test_a_graph_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    check_graph(problems, device, max_seqlen_q=305, max_seqlen_k=305)


def test_wrong_lengths_touch_nothing_outside(device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    leaves = [call[name].clone().requires_grad_() for name in "qkv"]
    check_wrong_ends(call)
    for ends in WRONG_ENDS:
        lengths = dict.fromkeys(LENGTHS_OF_GRAPHS, integers(*ends, device=device))
        out = flash_attn_varlen_func(**call | lengths | dict(zip("qkv", leaves, strict=True)))
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        torch.cuda.synchronize()


def test_tensors_of_few_rows(device):
    for rows in (1, 2):
        check_call(VarlenProblem((rows,), (1,), causal=True), device)
        check_call(VarlenProblem((1,), (rows,)), device)


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_whose_reference_fails_are_computed_again(head_dim, device):
    lengths = (700, 0, 130, 1, 64, 333)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, causal=True
    )
    for factor in (1, 8, 40):
        call = make_call(problem, 0, device)
        # Queries of some sequences only, so that some tiles fail in part, some wholly, some not.
        call["q"][::3] *= factor
        for _ in range(2):
            out, lse = attend(call)
            check_varlen(problem, call, out, lse)
        assert not used_counters()


# ---------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_what_is_kept(dropout_p):
    """What the call was given and gave, and no copy; with dropout its seed, and no mask."""
    call = make_call(RAGGED)
    kept = []
    call["q"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = flash_attn_varlen_func(**call, dropout_p=dropout_p, return_lse=True)
    if dropout_p:
        seed = kept.pop(0)
        assert seed.shape == (1,) and seed.dtype == torch.int64
    names = "cu_seqlens_q", "cu_seqlens_k", "q", "k", "v"
    expected = *(call[name] for name in names), *results
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in expected]


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 20), (70, -1)])
def test_lengths_around_tiles(window, head_dim, device):
    """Also around the lengths from which on sums begin with zeros."""
    keys = most_keys_unzeroed(Window(*window))
    tiles = (127, 128, 129, 1, 0, 255, 64, 300, 2, 192, 63, 65)
    around = (keys, keys + 1, 1, keys - 1, 0, keys + 64)
    unlike = (keys + 1, 40, 700, 1, keys, 300)
    for lengths in ((tiles, tiles), (tiles, tiles[::-1]), (around, around), (around, unlike)):
        problem = VarlenProblem(*lengths, None, None, 0, 2, 2, head_dim, window=window)
        check_gradients(problem, device)
        check_call(problem, device)
    if window == (-1, 0):
        check_gradients(VarlenProblem(tiles, tiles, head_dim=head_dim, window=(-1, 100)), device)


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_rows_that_are_not_used(causal, head_dim, device):
    problem = VarlenProblem(
        (70, 9, 300, 130, 500), (200, 50, 333, 64, 700), (70, 0, 150, 999, 64), (0, 50, 3, 64, 100),
        spare=300, causal=causal, heads_kv=2, head_dim=head_dim,
    )  # fmt: skip
    check_gradients(problem, device, (True, True))
    check_gradients(replace(problem, used_q=None), device)
    check_gradients(replace(problem, used_k=None), device)
    check_gradients(replace(problem, used_q=None, used_k=None), device)


def test_more_heads_than_a_grid_has_rows(device):
    """CUDA takes 65,535 CTAs in a grid's second dimension."""
    torch.manual_seed(0)
    heads, ends = 70_000, integers(0, 3, 5, device=device)
    *leaves, d_out = (torch.randn(5, heads, 8, device=device).bfloat16() for _ in range(4))
    for leaf in leaves:
        leaf.requires_grad_()

    def gradients(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        part = [leaf[:, begin:end] for leaf in leaves]
        out = flash_attn_varlen_func(*part, ends, ends, 3, 3, causal=True)
        return torch.autograd.grad(out, leaves, d_out[:, begin:end])

    found = gradients(0, heads)
    for begin, end in ((0, 40_000), (40_000, heads)):
        for all_heads, some in zip(found, gradients(begin, end), strict=True):
            assert torch.equal(all_heads[:, begin:end], some[:, begin:end])


def test_a_graph_of_gradients_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    call, other = (make_call(problem, seed, device) for seed, problem in enumerate(problems))
    call["max_seqlen_q"] = call["max_seqlen_k"] = 305
    leaves = [call[name].requires_grad_() for name in "qkv"]
    d_out = torch.randn_like(call["q"])

    def run(call: dict, inputs: list[torch.Tensor]):
        return torch.autograd.grad(flash_attn_varlen_func(**call), inputs, d_out)

    with torch.cuda.stream(torch.cuda.Stream()):
        run(call, leaves)
    graph, found = captured(lambda: run(call, leaves))
    for values in (dict(call), other):
        with torch.no_grad():
            for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
                call[name].copy_(values[name].clone())
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        alone = {name: values[name].detach().clone().requires_grad_() for name in "qkv"}
        expected = run(values | alone, list(alone.values()))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize(
    ("head_dim", "window"),
    [
        *((128, window) for window in ((-1, -1), (-1, 0), (40, 20), (70, -1))),
        *((64, (-1, 0)), (64, (40, 20)), (256, (-1, 0)), (256, (-1, -1))),
    ],
)
@pytest.mark.parametrize("count", [2, 40])  # with few keys there are lines without a left bound
def test_deterministic_gradients_have_the_same_bits_every_time(count, window, head_dim, device):
    """Keys without queries, and rows that are not used, add nothing in any order."""
    draw = random.Random(0)
    lengths = (1500, 0, 1, *(draw.randint(0, 600) for _ in range(count)), 3000, 127, 128)
    other = (1000, 300, 0, *(draw.randint(0, 600) for _ in range(count)), 2500, 0, 129)
    problem = VarlenProblem(
        lengths, other, None, tuple(count * 2 // 3 for count in other), 200, heads_kv=2, group=2,
        window=window, head_dim=head_dim,
    )  # fmt: skip
    call = make_call(problem, 0, device)
    check_varlen_gradients(problem, call | {"deterministic": True}, (True, False))
    leaves = [call[name].detach().requires_grad_() for name in "qkv"]
    call = call | dict(zip("qkv", leaves, strict=True)) | {"deterministic": True}
    out = flash_attn_varlen_func(**call)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(map(torch.equal, again, first))
