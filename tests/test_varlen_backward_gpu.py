"""Gradients of packed sequences on a Hopper GPU, against float64 and against dense calls.

Simplest first: what hangs or fails early says most. Memory is NaN wherever a kernel writes nothing.
"""

import random
from dataclasses import replace

import pytest
import torch
from problems import poisoned_allocations
from score_problems import Recipe
from varlen_gradients import check_varlen_gradients
from varlen_problems import VarlenProblem, integers, make_call, random_problem

import fa3
from fa3.kernels.tile_table import TileTable
from fa3.planning.backward import most_keys_unzeroed
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.problem import NO_BOUND, Window
from fa3.running.compiler import load_kernel
from fa3.schedules.ragged import NUM_RECORDS, RECORD, TABLE_HEADER
from fa3.schedules.ragged_keys import KeyTileRecord
from fa3.scores.masks import Band

pytestmark = pytest.mark.gpu

TILE_M, TILE_N = 64, 128

FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"


def check(problem: VarlenProblem, device, weights=(True, False), seed: int = 0) -> dict:
    return check_varlen_gradients(problem, make_call(problem, seed, device), weights, seed)


def of_size(head_dim: int, **options) -> dict:
    return {"head_dim": head_dim, "head_dim_v": head_dim, **options}


@pytest.mark.parametrize("lengths", [[300, 0, 5, 129, 128, 1000], [17], [0, 0], [3] * 500])
@pytest.mark.parametrize("has_used", [False, True])
def test_the_table_has_every_tile_of_keys_once(has_used, lengths, device):
    total, window = sum(lengths) + 200, Window(right=0)
    capacity = capacity_of_table(total, len(lengths), TILE_N)
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    ends = integers(0, *lengths, device=device).cumsum(0, dtype=torch.int32)
    counts = [length // 2 for length in lengths] if has_used else lengths
    used = integers(*counts, device=device) if has_used else None
    kernel = load_kernel(TileTable(TILE_M, TILE_N, Band.of(window), False, has_used, True))
    shift = shift_of_work(max(lengths), TILE_M)
    kernel(ends, ends, None, used, table, total, total, capacity, shift, *window, 0, 1, 1)
    header, body = table[:TABLE_HEADER].tolist(), table[TABLE_HEADER:]
    records = body.view(-1, RECORD)[: header[NUM_RECORDS]].tolist()
    found = [KeyTileRecord(*words[: len(KeyTileRecord._fields)]) for words in records]
    begins = ends.tolist()
    # Rows behind the last sequence are its own.
    owned = [*lengths[:-1], lengths[-1] + 200]
    expected = [
        KeyTileRecord(
            tile,
            batch,
            begins[batch],
            length,
            begins[batch],
            counts[batch],
            -(-owned[batch] // TILE_N),
            owned[batch],
        )
        for batch, length in enumerate(lengths)
        for tile in range(-(-owned[batch] // TILE_N))
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(64,), (128,), (500, 500), (1, 1, 1)])
def test_few_sequences(lengths, head_dim, device):
    check(VarlenProblem(lengths, lengths, **of_size(head_dim)), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 20), (70, -1), (-1, 100)])
def test_lengths_around_tiles(window, head_dim, device):
    lengths = (127, 128, 129, 1, 0, 255, 64, 300, 2, 192, 63, 65)
    options = of_size(head_dim, heads_kv=2, group=2, window=window)
    check(VarlenProblem(lengths, lengths, **options), device)
    check(VarlenProblem(lengths, lengths[::-1], **options), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_with_and_without_zeros(causal, head_dim, device):
    """Of one call, around the lengths from which on there are zeros; and of unlike lengths."""
    keys = most_keys_unzeroed(Window(right=0 if causal else NO_BOUND))
    lengths = (keys, keys + 1, 1, keys - 1, 0, keys + 64)
    check(VarlenProblem(lengths, lengths, causal=causal, **of_size(head_dim)), device)
    unlike = (keys + 1, 40, 700, 1, keys, 300)
    check(VarlenProblem(lengths, unlike, causal=causal, **of_size(head_dim)), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_queries_or_keys(causal, head_dim, device):
    problem = VarlenProblem(
        (0, 100, 0, 70, 200, 0), (90, 0, 0, 300, 5, 200), causal=causal, **of_size(head_dim)
    )
    check(problem, device, (True, True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_are_not_used(causal, head_dim, device):
    problem = VarlenProblem(
        (70, 9, 300, 130, 500), (200, 50, 333, 64, 700), (70, 0, 150, 999, 64), (0, 50, 3, 64, 100),
        spare=300, causal=causal, heads_kv=2, **of_size(head_dim),
    )  # fmt: skip
    check(problem, device, (True, True))
    check(replace(problem, used_q=None), device)
    check(replace(problem, used_k=None), device)
    check(replace(problem, used_q=None, used_k=None), device)


@pytest.mark.parametrize("seed", range(3 * FAMILIES))
def test_random_calls(seed, device):
    problem = random_problem(seed, DTYPES[seed % 2], seed % FAMILIES, 40 if seed % 3 else 700)
    problem = replace(problem, softmax_scale=None, recipe=problem.recipe._replace(score=None))
    check(problem, device, ((1, 1), (1, 0), (0, 1))[seed % 3], seed)


@pytest.mark.parametrize("head_dims", [(72, 72), (96, 96), (192, 128), (64, 256), (8, 40)])
@pytest.mark.parametrize("group", [1, 3])
def test_head_dims(group, head_dims, device):
    head_dim, head_dim_v = head_dims
    lengths = 200, 0, 33, 500
    check(
        VarlenProblem(
            lengths, lengths, group=group, head_dim=head_dim, head_dim_v=head_dim_v, causal=True
        ),
        device,
    )


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(softcap=20.0, alibi_rank=2, sinks="q"),
        Recipe(sinks="float32"),
        Recipe(mask="documents"),
        Recipe(mask="prefix", alibi_rank=1),
    ],
)
def test_modifiers(recipe, device):
    problem = VarlenProblem(
        (200, 0, 33, 500), (300, 7, 0, 400), (150, 0, 33, 400), spare=70, causal=True, recipe=recipe
    )
    check(problem, device, (True, True))


def test_more_heads_than_a_grid_has_rows(device):
    """CUDA takes 65,535 CTAs in a grid's second dimension."""
    torch.manual_seed(0)
    heads, ends = 70_000, integers(0, 3, 5, device=device)
    *leaves, d_out = (torch.randn(5, heads, 8, device=device).bfloat16() for _ in range(4))
    for leaf in leaves:
        leaf.requires_grad_()

    def gradients(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        part = [leaf[:, begin:end] for leaf in leaves]
        out = fa3.flash_attn_varlen_func(*part, ends, ends, 3, 3, causal=True)
        return torch.autograd.grad(out, leaves, d_out[:, begin:end])

    found = gradients(0, heads)
    for begin, end in ((0, 40_000), (40_000, heads)):
        for all_heads, some in zip(found, gradients(begin, end), strict=True):
            assert torch.equal(all_heads[:, begin:end], some[:, begin:end])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_short_sequences(head_dim, device):
    draw = random.Random(0)
    lengths = tuple(draw.randint(0, 16) for _ in range(1200))
    check(VarlenProblem(lengths, lengths, causal=True, heads_kv=2, **of_size(head_dim)), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_have_the_bits_of_a_dense_call(causal, head_dim, device):
    """Those of dK and dV; only dQ is added up in no fixed order."""
    made = torch.randn(3, 4, 2000, 2, head_dim, device=device).bfloat16()
    q, k, v = (x.requires_grad_() for x in made)
    ends = torch.arange(0, 8001, 2000, dtype=torch.int32, device=device)
    d_out = torch.randn_like(q)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out = fa3.flash_attn_varlen_func(*packed, ends, ends, 2000, 2000, causal=causal)
    dense = fa3.flash_attn_func(q, k, v, causal=causal)
    found = torch.autograd.grad(out, (q, k, v), d_out.flatten(0, 1))
    # The forward passes need not have the same bits, and delta follows from what they gave.
    expected = torch.autograd.grad(dense, (q, k, v), d_out)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    if torch.equal(out.view(dense.shape), dense):
        assert all(map(torch.equal, found[1:], expected[1:]))


def test_a_graph_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    call, other = (make_call(problem, seed, device) for seed, problem in enumerate(problems))
    call["max_seqlen_q"] = call["max_seqlen_k"] = 305
    leaves = [call[name].requires_grad_() for name in "qkv"]
    d_out = torch.randn_like(call["q"])

    def run(call: dict, inputs: list[torch.Tensor]):
        return torch.autograd.grad(fa3.flash_attn_varlen_func(**call), inputs, d_out)

    with torch.cuda.stream(torch.cuda.Stream()):
        run(call, leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(call, leaves)
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


def test_what_is_kept(device):
    """The seed of dropout and what the call was given and gave, and no copy of it."""
    call = make_call(VarlenProblem((100, 33), (100, 33)), 0, device)
    names = "cu_seqlens_q", "cu_seqlens_k", "q", "k", "v"
    call["v"].requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = fa3.flash_attn_varlen_func(**call, dropout_p=0.1, return_lse=True)
    assert kept[0].shape == (1,)
    expected = [x.data_ptr() for x in (*(call[name] for name in names), *results)]
    assert [x.data_ptr() for x in kept[1:]] == expected


@pytest.mark.parametrize("name", ["q", "d_out"])
def test_second_derivatives_are_refused(name, device):
    call = make_call(VarlenProblem((100, 33), (100, 33)), 0, device)
    q = call["q"].requires_grad_()
    out = fa3.flash_attn_varlen_func(**call)
    d_out = torch.randn_like(out).requires_grad_()
    (dq,) = torch.autograd.grad(out, q, d_out, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func has no second deriv"):
        torch.autograd.grad(dq.float().sum(), {"q": q, "d_out": d_out}[name])


@pytest.mark.parametrize("ends", [(0, 200, 100, 300), (-50, 90, 900, 300), (0, 2**30, -(2**30), 9)])
def test_wrong_lengths_end(ends, device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    call["cu_seqlens_q"] = call["cu_seqlens_k"] = integers(*ends, device=device)
    leaves = [call[name].requires_grad_() for name in "qkv"]
    out = fa3.flash_attn_varlen_func(**call)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.synchronize()


def test_strange_gradients_of_out(device):
    """Expanded from a number, and with strides that TMA cannot walk."""
    call = make_call(VarlenProblem((100, 33), (100, 33)), 0, device)
    leaves = [call[name].requires_grad_() for name in "qkv"]
    out = fa3.flash_attn_varlen_func(**call)
    ones = torch.ones_like(out)
    expected = torch.autograd.grad(out, leaves, ones, retain_graph=True)
    wide = torch.ones(*out.shape[:2], out.shape[2] + 4, device=device).to(out.dtype)[..., :-4]
    for d_out in (ones[:1, :1, :1].expand(out.shape), wide):
        with poisoned_allocations():
            found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 20), (70, -1)])
def test_deterministic_gradients_have_the_same_bits_every_time(window, head_dim, device):
    """Keys without queries, and rows that are not used, add nothing in any order."""
    draw = random.Random(0)
    lengths = (1500, 0, 1, *(draw.randint(0, 600) for _ in range(40)), 3000, 127, 128)
    other = (1000, 300, 0, *(draw.randint(0, 600) for _ in range(40)), 2500, 0, 129)
    problem = VarlenProblem(
        lengths, other, None, tuple(count * 2 // 3 for count in other), 200, heads_kv=2, group=2,
        window=window, **of_size(head_dim),
    )  # fmt: skip
    call = make_call(problem, 0, device)
    check_varlen_gradients(problem, call | {"deterministic": True}, (True, False))
    leaves = [call[name].detach().requires_grad_() for name in "qkv"]
    call = call | dict(zip("qkv", leaves, strict=True)) | {"deterministic": True}
    out = fa3.flash_attn_varlen_func(**call)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(map(torch.equal, again, first))
