"""Packed sequences on a Hopper GPU: the table of tiles, and attention against float64."""

import itertools
import random

import pytest
import torch
from free_counters import used_counters
from varlen_problems import (
    VarlenProblem,
    attend,
    check_beside_what_is_not_finite,
    check_call,
    check_varlen,
    integers,
    make_call,
    random_problem,
)

import fa3
from fa3.calls.forward import PreparedCall
from fa3.kernels.tile_table import TileTable
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.ragged import RaggedPlan, capacity_of_table, shift_of_work, words_of_table
from fa3.problem import AttentionSpec, Problem, Window
from fa3.running.compiler import load_kernel
from fa3.schedules.ragged import NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.masks import Band

pytestmark = pytest.mark.gpu

FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

TILE_M, TILE_N = 128, 96


@pytest.mark.parametrize("seed", range(3 * FAMILIES))
def test_random_calls(seed, device):
    longest = 40 if seed % 3 else 700
    check_call(random_problem(seed, DTYPES[seed % 2], seed % FAMILIES, longest), device, seed)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_tiles(causal, head_dim, device):
    lengths = (127, 128, 129, 1, 0, 255, 64, 300, 2, 192)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim,
        causal=causal,
    )  # fmt: skip
    check_call(problem, device)


@pytest.mark.parametrize("rows", [1, 2])
def test_tensors_of_few_rows(rows, device):
    check_call(VarlenProblem((rows,), (1,), causal=True), device)
    check_call(VarlenProblem((1,), (rows,)), device)


def test_many_short_sequences(device):
    draw = random.Random(0)
    lengths = tuple(draw.randint(0, 16) for _ in range(3000))
    check_call(VarlenProblem(lengths, lengths, causal=True, heads_kv=2), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_have_the_bits_of_a_dense_call(causal, head_dim, device):
    batch, length = 4, 2000
    lengths, sizes = (length,) * batch, {"head_dim": head_dim, "head_dim_v": head_dim}
    problem = VarlenProblem(lengths, lengths, heads_kv=1, group=2, causal=causal, **sizes)
    call = make_call(problem, 0, device)
    out, lse = attend(call)
    window = Window(right=0) if causal else Window()
    spec = AttentionSpec("bfloat16", head_dim, head_dim, Band.of(window))
    dense = Problem(spec, batch, length, length, 1, 2, window)
    q, k, v = (call[name].view(batch, length, -1, head_dim) for name in "qkv")
    expected = torch.full_like(q, torch.nan)
    expected_lse = lse.new_full((batch, 2, length), torch.nan)
    plan = plan_forward(dense, config=RaggedPlan(spec, False, False, H200).config, schedule="list")
    PreparedCall.on_gpu(plan, q.device, expected.shape, expected_lse.shape).launch(
        q, k, v, expected, expected_lse, None, head_dim**-0.5
    )
    assert torch.equal(out, expected.view(out.shape))
    assert torch.equal(lse, expected_lse.transpose(0, 1).reshape(lse.shape))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [1, 8, 40])
def test_rows_whose_reference_fails_are_computed_again(factor, head_dim, device):
    lengths = (700, 0, 130, 1, 64, 333)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim,
        causal=True,
    )  # fmt: skip
    call = make_call(problem, 0, device)
    # Queries of some sequences only, so that some tiles fail in part, some wholly, some not.
    call["q"][::3] *= factor
    for _ in range(2):
        out, lse = attend(call)
        check_varlen(problem, call, out, lse)
    assert not used_counters()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_does_not_reach_long_neighbours(causal, head_dim, device):
    """Key blocks reach into the next sequence, and rows of a tile into the next one's too."""
    lengths = (300, 129, 700, 1, 500, 64, 333, 2000, 95, 128, 257, 640)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim,
        causal=causal,
    )  # fmt: skip
    check_beside_what_is_not_finite(problem, device)


def test_a_graph_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    call, other = (make_call(problem, seed, device) for seed, problem in enumerate(problems))
    call["max_seqlen_q"] = call["max_seqlen_k"] = 305
    fa3.flash_attn_varlen_func(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_varlen_func(**call, return_lse=True)
    for problem, values in zip(problems, (dict(call), other), strict=True):
        for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
            call[name].copy_(values[name].clone())
        graph.replay()
        check_varlen(problem, call, out, lse)


@pytest.mark.parametrize(
    "ends",
    [(0, 200, 100, 300), (-50, 90, 900, 300), (0, 2**30, -(2**30), 9), (0, 100, -(2**31), 300)],
)
def test_wrong_lengths_touch_nothing_outside(ends, device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    call["cu_seqlens_q"] = call["cu_seqlens_k"] = integers(*ends, device=device)
    around = torch.full((3 * len(call["q"]), *call["q"].shape[1:]), 7.0, device=device)
    around = around.to(call["q"].dtype)
    out = around[len(call["q"]) : 2 * len(call["q"])]
    fa3.flash_attn_varlen_func(**call, out=out)
    torch.cuda.synchronize()
    assert (around[: len(out)] == 7).all() and (around[2 * len(out) :] == 7).all()


def lengths_of_tables() -> list[list[int]]:
    draw = random.Random(0)
    return [
        [300, 0, 5, 129, 128, 1000],
        [17],
        [0, 0],
        [draw.randint(0, 2000) for _ in range(1000)],
        [draw.randint(1, 16) for _ in range(8192)],
        [3] * 500 + [1 << 20],
    ]


@pytest.mark.parametrize("short", [0, 1, 128, 1 << 30])
@pytest.mark.parametrize("lengths", lengths_of_tables(), ids=lambda lengths: str(len(lengths)))
def test_the_table_has_every_tile_once_and_the_longest_first(lengths, short, device):
    total, window = sum(lengths), Window(right=0)
    capacity = capacity_of_table(total, len(lengths), TILE_M)
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    ends = integers(0, *lengths, device=device).cumsum(0, dtype=torch.int32)
    shift = shift_of_work(max(lengths), TILE_N)
    kernel = load_kernel(TileTable(TILE_M, TILE_N, Band.of(window), False, False))
    kernel(ends, ends, None, None, table, total, total, capacity, shift, *window, short, 4, 132)
    header, body = table[:TABLE_HEADER].tolist(), table[TABLE_HEADER:]
    records = body.view(-1, RECORD)[: header[NUM_RECORDS]].tolist()
    found = [TileRecord(*words[: len(TileRecord._fields)]) for words in records]
    begins = ends.tolist()
    expected = [
        TileRecord(
            m_block, batch, begins[batch], length, begins[batch], length, -(-length // TILE_M)
        )
        for batch, length in enumerate(lengths)
        if length > short
        for m_block in range(-(-length // TILE_M))
    ]
    assert sorted(found) == sorted(expected) and header[0] == 0
    # Sequence by sequence, the last rows first, and sequences in order of their longest tile.
    for one, other in itertools.pairwise(found):
        assert one.m_block == (other.m_block + 1 if one.batch == other.batch else 0)
    lasts = [tile for tile in found if tile.m_block == tile.num_m_blocks - 1]
    work = [-(-tile.seqlen_k // TILE_N) >> shift for tile in lasts]
    assert work == sorted(work, reverse=True)
