"""Short packed sequences that share tiles, on a Hopper GPU: the tables, and attention."""

import random
from dataclasses import replace

import pytest
import torch
from free_counters import used_counters
from pairs import pairs
from score_problems import Recipe
from varlen_problems import (
    VarlenProblem,
    attend,
    check_beside_what_is_not_finite,
    check_call,
    check_varlen,
    integers,
    make_call,
    poison,
    random_short_problem,
)

import fa3
from fa3.planning.gpu import H200
from fa3.planning.joined import JoinedPlan
from fa3.planning.ragged import words_of_table
from fa3.problem import AttentionSpec, Window
from fa3.reference.joined import record_of_tile, records_of_rows
from fa3.reference.varlen import PackedLengths
from fa3.running.compiler import load_kernel
from fa3.schedules.joined import JoinedRecord
from fa3.schedules.ragged import NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.intervals import ROW_RECORD, RowRecord
from fa3.scores.masks import Band

pytestmark = pytest.mark.gpu

SHORT = 32
"""Sequences with fewer keys are checked one by one, and many have but a row or two."""

FAMILIES = 10
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

MIXED = tuple(length for _ in range(40) for length in range(17))
EVEN = (34,) * 300


@pytest.fixture(autouse=True)
def shares_tiles(monkeypatch):
    """Have all sequences that may share tiles do so, however few there are."""
    monkeypatch.setattr(JoinedPlan, "suits", lambda plan, sizes: True)


def check(problem: VarlenProblem, device, seed: int = 0) -> None:
    check_call(problem, device, seed, few_keys=SHORT)


@pytest.mark.parametrize("seed", range(3 * FAMILIES))
def test_random_calls(seed, device):
    """Rows that are not used are NaN, so rows are marked and computed again."""
    longest = (16, 40, 64)[seed % 3]
    check(random_short_problem(seed, DTYPES[seed % 2], seed % FAMILIES, longest), device, seed)
    assert not used_counters()


@pairs(lengths=(MIXED, EVEN), causal=(False, True), head_dim=(64, 128, 256))
def test_many_short_sequences(lengths, causal, head_dim, device):
    problem = VarlenProblem(
        lengths, lengths, heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim,
        causal=causal,
    )  # fmt: skip
    check(problem, device)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (10, 3), "group": 4},
        {"window": (0, 0)},
        {"window": (5, -1)},
        {"window": (-1, 5)},
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"head_dim": 8, "head_dim_v": 40},
        {"group": 1, "heads_kv": 3, "dtype": "float16", "softmax_scale": 0.7},
        {"recipe": Recipe(softcap=5.0, sinks="q"), "causal": True},
        {"recipe": Recipe(softcap=40.0, sinks="float32"), "window": (4, 40)},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_used", [False, True])
def test_options(has_used, options, device):
    """More queries than keys in some sequences, fewer in others."""
    draw = random.Random(0)
    seqlens_q, seqlens_k = ([draw.randint(0, 40) for _ in range(200)] for _ in range(2))
    used = [tuple(draw.randint(-1, 50) for _ in range(200)) for _ in range(2)]
    given = {"heads_kv": 2} | options
    problem = VarlenProblem(tuple(seqlens_q), tuple(seqlens_k), **given)
    if has_used:
        problem = replace(problem, used_q=used[0], used_k=used[1], spare=70)
    check(problem, device)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129])
def test_rows_around_tiles_and_halves(rows, device):
    check(VarlenProblem((1,) * rows, (3,) * rows, heads_kv=1, group=2), device)


def test_few_queries_of_many_keys(device):
    check(VarlenProblem((1, 2, 0, 3) * 50, (200, 1, 90, 255) * 50, causal=True), device)


@pairs(lengths=(MIXED, EVEN), causal=(False, True), head_dim=(64, 128, 256))
def test_what_is_not_finite_does_not_reach_other_sequences(lengths, causal, head_dim, device):
    problem = VarlenProblem(
        lengths, lengths, heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim,
        causal=causal,
    )  # fmt: skip
    check_beside_what_is_not_finite(problem, device)


def test_tiles_without_it_keep_their_bits(device):
    problem = VarlenProblem(EVEN, EVEN, heads_kv=2, causal=True)
    call = make_call(problem, 0, device)
    clean, clean_lse = attend(call)
    call["v"][problem.rows[-1].k.start] = torch.nan
    out, lse = attend(call)
    # Rows of all tiles but the last.
    rows = len(out) // 128 * 128
    assert torch.equal(out[:rows], clean[:rows]) and torch.equal(lse[:, :rows], clean_lse[:, :rows])
    again, _ = attend(call)
    assert torch.equal(out.nan_to_num(), again.nan_to_num())


def test_a_graph_serves_other_lengths(device):
    draw, total = random.Random(0), 200 * 16
    problems = []
    for _ in range(3):
        lengths = tuple(draw.randint(0, 16) for _ in range(200))
        spare = total - sum(lengths)
        problems.append(VarlenProblem(lengths, lengths, spare=spare, causal=True, heads_kv=2))
    call, *others = (make_call(problem, seed, device) for seed, problem in enumerate(problems))
    call["max_seqlen_q"] = call["max_seqlen_k"] = 16
    fa3.flash_attn_varlen_func(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_varlen_func(**call, return_lse=True)
    for problem, values in zip(problems, (dict(call), *others), strict=True):
        for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
            call[name].copy_(values[name].clone())
        poisoned = poison(problem, call, every=50)
        graph.replay()
        check_varlen(problem, call, out, lse, skipped=poisoned)


@pytest.mark.parametrize(
    "ends",
    [(0, 200, 100, 300), (-50, 90, 900, 300), (0, 2**30, -(2**30), 9), (0, 100, -(2**31), 300)],
)
def test_wrong_lengths_touch_nothing_outside(ends, device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    call["cu_seqlens_q"] = call["cu_seqlens_k"] = integers(*ends, device=device)
    call["v"][::7] = torch.nan
    around = torch.full((3 * len(call["q"]), *call["q"].shape[1:]), 7.0, device=device)
    around = around.to(call["q"].dtype)
    out = around[len(call["q"]) : 2 * len(call["q"])]
    fa3.flash_attn_varlen_func(**call, out=out)
    torch.cuda.synchronize()
    assert (around[: len(out)] == 7).all() and (around[2 * len(out) :] == 7).all()
    assert not used_counters()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)])
@pytest.mark.parametrize("has_used", [False, True])
def test_the_tables_are_those_of_the_reference(has_used, window, device):
    draw, window = random.Random(0), Window(*window)
    seqlens_q, seqlens_k = ([draw.randint(0, 30) for _ in range(700)] for _ in range(2))
    problem = VarlenProblem(tuple(seqlens_q), tuple(seqlens_k), spare=90)
    if has_used:
        used = [tuple(draw.randint(-1, 40) for _ in range(700)) for _ in range(2)]
        problem = replace(problem, used_q=used[0], used_k=used[1])
    spec = AttentionSpec("bfloat16", 128, 128, Band.of(window))
    plan = JoinedPlan.of(spec, has_used, has_used, H200)
    call = make_call(problem, 0, device)
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    lengths = PackedLengths(*(call.get(name) for name in names))
    (total_q, total_k), batch = map(len, (call["q"], call["k"])), lengths.batch
    num_tiles = plan.num_tiles(total_q)

    def memory(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32, device=device)

    rows = memory(num_tiles * plan.config.tile_m, ROW_RECORD)
    tiles, table = memory(words_of_table(num_tiles)), memory(words_of_table(batch))
    load_kernel(plan.joined_table())(
        *lengths, rows, tiles, table, total_q, total_k, num_tiles, *window
    )
    on_host = PackedLengths(*(x if x is None else x.cpu() for x in lengths))
    expected = records_of_rows(plan, on_host, window, total_q)
    found = [RowRecord(*words) for words in rows.tolist()]
    # Of a row that is not used nobody reads its place, nor where the keys are that it does not see.
    assert [row for row in found if row.is_used] == [row for row in expected if row.is_used]
    assert [row.is_used for row in found] == [row.is_used for row in expected]
    assert all(row.is_used or row.first_key == row.end_key for row in found)
    header = tiles[:TABLE_HEADER].tolist()
    assert header == [num_tiles if i == NUM_RECORDS else 0 for i in range(TABLE_HEADER)]
    records = tiles[TABLE_HEADER:].view(-1, RECORD).tolist()
    assert [JoinedRecord(*words[:6]) for words in records] == [
        record_of_tile(plan, m_block, expected, total_q, total_k) for m_block in range(num_tiles)
    ]
    records = table[TABLE_HEADER:].view(-1, RECORD).tolist()
    assert [TileRecord(*words[:7]) for words in records] == [
        TileRecord(0, i, of_q.start, len(of_q), of_k.start, len(of_k), 1)
        for i, (of_q, of_k) in enumerate(problem.rows)
    ]
