"""Tiles of packed sequences that are cut where the host knows the lengths: which, how, results."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_graphs import captured
from free_counters import used_counters
from pairs import places
from test_known_lengths import (
    cached_call,
    known,
    metadata_of,
    metadata_of_cache,
    on_host,
    records_of,
)
from test_known_lengths_results import CHUNK, made_for, on_cpu, run
from varlen_problems import VarlenProblem, check_varlen, make_call, unused

from fa3 import flash_attn_varlen_func
from fa3.planning.gpu import H200
from fa3.planning.host_table import end_of_longest_first
from fa3.planning.host_table import records_of as arrays_of
from fa3.planning.ragged import RaggedPlan
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import AttentionSpec, Window
from fa3.schedules.segment import PackedPart
from fa3.schedules.split import FIELDS
from fa3.scores.masks import Band, Sequence


def plan_of(head_dim: int, window: Window, l2_bytes: int = H200.l2_bytes, cache=None, **options):
    spec = AttentionSpec("bfloat16", head_dim, head_dim, Band.of(window), **options)
    return RaggedPlan(spec, False, False, replace(H200, l2_bytes=l2_bytes), cache)


def kind_of(heads: tuple[int, int] = (8, 1), head_dim=128, window=Window(right=0), **options):
    return plan_of(head_dim, window, **options).table_kind(window, 0, *heads, True)


def cut(lengths_q, lengths_k, kind):
    """The segments (tile, first block, end block, part) of these lengths, and their table."""
    table = known(VarlenProblem(tuple(lengths_q), tuple(lengths_k)))
    table = table.make(kind)
    split = kind.cut(table)
    return table, split


def tiles_of(table, kind) -> list[tuple]:
    """The (sequence, head, first block, end block) of each tile, as the kernel finds them."""
    found, order = [], kind.cutting.order(table)
    for number, record in enumerate(records_of(table)):
        for head in range(kind.cutting.heads):
            index, m_block, at = number * kind.cutting.heads + head, record.m_block, head
            if max(record.seqlen_k, 1) > order.rows_at_once:
                at, m_block = order.in_sections(index, number, record)
            sequence = Sequence(record.seqlen_q, record.seqlen_k, kind.window)
            rows = m_block * kind.tile_m, kind.tile_m
            blocks = kind.band.key_blocks(*rows, kind.tile_n, sequence)
            found.append((record.batch, at, m_block, blocks.begin, blocks.end))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_block_of_every_tile_is_in_one_segment(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    lengths_q = [draw.randint(0, 900) for _ in range(count)]
    lengths_k = [n + draw.choice((0, draw.randint(0, 20000))) for n in lengths_q]
    heads = draw.choice(((8, 1), (4, 4), (16, 2), (5, 1)))
    window = draw.choice((Window(right=0), Window(), Window(2000, 0)))
    l2_bytes = draw.choice((H200.l2_bytes, 1 << 20))
    kind = kind_of(heads, draw.choice((64, 128)), window, l2_bytes=l2_bytes)
    table, split = cut(lengths_q, lengths_k, kind)
    if split is None:
        return
    tiles = tiles_of(table, kind)
    assert len({tile[:3] for tile in tiles}) == len(tiles)
    segments = split.table.reshape(-1, FIELDS)
    segments = segments[segments[:, 0] >= 0].tolist()
    slots = []
    for index, (*_, begin, end) in enumerate(tiles):
        own = sorted(segment[1:] for segment in segments if segment[0] == index)
        assert [one[0] for one in own] == [begin, *(one[1] for one in own[:-1])]
        assert own[-1][1] == end
        parts = [PackedPart(part) for *_, part in own]
        assert all(part.num_parts == len(own) for part in parts)
        if len(own) > 1:
            assert [part.slot - part.first_slot for part in parts] == list(range(len(own)))
            slots += [part.slot for part in parts]
    assert sorted(slots) == list(range(split.num_slots))
    assert 0 < split.num_clusters <= kind.num_ctas


def test_cutting_was_tried_above():
    kinds = [kind_of(heads) for heads in ((8, 1), (16, 2))]
    assert all(cut((512,), (32768,), kind)[1] is not None for kind in kinds)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "heads"),
    [
        ((512,), (32768,), (8, 1)),
        ((160,), (65536,), (32, 8)),
        ((512, 512), (8192, 16384), (8, 1)),
        ((2048,), (2048,), (8, 1)),
    ],
)
def test_few_tiles_are_cut_for_all_sms(lengths_q, lengths_k, heads):
    kind = kind_of(heads)
    table, split = cut(lengths_q, lengths_k, kind)
    assert split.num_clusters > 0.9 * kind.num_ctas and split.num_slots
    blocks = kind.cutting.blocks_of_tiles(table, kind)
    tile, first, end, _ = split.parts
    work = np.bincount(split.owners, end - first + 1)
    assert work.max() < 0.8 * (blocks.end - blocks.begin + 1).max()
    assert len(tile) > len(blocks.end)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "heads"),
    [
        ((1024,) * 16, (1024,) * 16, (16, 16)),
        ((8192,), (8192,), (32, 8)),
        ((300,) * 5, (300,) * 5, (32, 8)),
        ((128,), (128,), (1, 1)),
        ((0, 0), (7, 0), (8, 1)),
        ((100,), (0,), (8, 1)),
    ],
)
def test_tiles_stay_whole_where_that_is_as_fast(lengths_q, lengths_k, heads):
    assert cut(lengths_q, lengths_k, kind_of(heads))[1] is None


def test_what_is_never_cut():
    window, heads = Window(right=0), (8, 1)
    plan = plan_of(128, window)
    lengths = known(VarlenProblem((512,), (32768,)))
    for short, may_cut in ((0, False), (32, True)):
        kind = plan.table_kind(window, short, *heads, may_cut)
        assert kind.cutting is None and kind.cut(lengths.make(kind)) is None
    for options in ({"has_dropout": True}, {"cache": CacheLayout(64)}):
        other = plan_of(128, window, **options)
        assert other.table_kind(window, 0, *heads, True).cutting is None


def test_records_of_a_table_in_arrays():
    kind = kind_of()
    table, _ = cut((500, 3), (700, 900), kind)
    found = [tuple(map(int, one)) for one in zip(*arrays_of(table), strict=True)]
    assert found == [tuple(one) for one in records_of(table)]


def test_the_end_of_whole_tiles():
    assert end_of_longest_first(np.array([5.0, 1.0]), 4) == 5
    assert end_of_longest_first(np.full(5, 3.0), 4) == 6
    assert end_of_longest_first(np.full(400, 1.0), 4) == 100


def test_who_says_that_tiles_may_be_cut():
    call = make_call(VarlenProblem((300,), (900,), causal=True))
    assert metadata_of(call).lengths.may_cut
    assert not metadata_of(call, num_splits=1).lengths.may_cut
    paged = cached_call((300,), (900,))
    assert not metadata_of_cache(paged).lengths.may_cut


PROBLEMS = {
    "chunk": CHUNK,
    "two": VarlenProblem((300, 700), (5000, 9000), heads_kv=2, group=2, causal=True),
    "full": VarlenProblem((200, 300), (7000, 100), heads_kv=3, dtype="float16"),
    "window": VarlenProblem(
        (900, 200), (12000, 7000), group=4, window=(4000, 0), head_dim=128
    ),
    "unequal": VarlenProblem(
        (400,), (8000,), group=2, causal=True, head_dim=192, head_dim_v=128, spare=9
    ),
    "large": VarlenProblem((257,), (5001,), group=2, causal=True, head_dim=256),
    "used": VarlenProblem(
        (700, 300), (9000, 300), (650, 300), (8000, 300), heads_kv=2, causal=True, head_dim=96,
    ),
}  # fmt: skip


def has_cuts(metadata) -> bool:
    return any(tiles.segments is not None for tiles in metadata.lengths.tables.values())


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_dense_attention(name, device):
    problem = PROBLEMS[name]
    call = make_call(problem, 0, device)
    metadata, plain = made_for(call), run(call)
    assert has_cuts(metadata)
    out, lse = run(call, scheduler_metadata=metadata)
    check_varlen(problem, call, out, lse)
    rows = ~unused(problem, len(out), device)
    torch.testing.assert_close(out[rows], plain[0][rows], rtol=2e-2, atol=2e-2)
    # Parts are added up in their order, whoever is last.
    for _ in range(20):
        again, of_again = run(call, scheduler_metadata=metadata)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(of_again[:, rows], lse[:, rows])
    assert not used_counters()


@pytest.mark.parametrize("seed", range(24))
def test_random_lengths(seed, device):
    draw = random.Random(seed)
    lengths_q = tuple(draw.randint(0, 700) for _ in range(draw.randint(1, 4)))
    lengths_k = tuple(n + draw.choice((0, draw.randint(0, 9000))) for n in lengths_q)
    heads_kv, group = draw.choice(((1, 8), (2, 2), (1, 5)))
    problem = VarlenProblem(
        lengths_q, lengths_k, heads_kv=heads_kv, group=group, causal=seed % 2 == 0,
        head_dim=(64, 128)[seed // 2 % 2], head_dim_v=(64, 128)[seed // 2 % 2],
    )  # fmt: skip
    call = make_call(problem, seed, device)
    out, lse = run(call, scheduler_metadata=made_for(call))
    check_varlen(problem, call, out, lse)
    assert not used_counters()


def test_streams_and_graphs_share_the_segments(device):
    call = make_call(CHUNK, 0, device)
    metadata = made_for(call)
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    torch.cuda.synchronize()
    graph, outs = captured(
        lambda: [flash_attn_varlen_func(**call, scheduler_metadata=metadata) for _ in range(3)]
    )
    streams, found = [torch.cuda.Stream(device) for _ in range(3)], []
    for turn in range(30):
        graph.replay()
        with torch.cuda.stream(streams[turn % 3]):
            found.append(flash_attn_varlen_func(**call, scheduler_metadata=metadata))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (*found, *outs))
    assert not used_counters()


def test_gradients_have_whole_tiles(device):
    problem = VarlenProblem((500,), (9000,), heads_kv=1, group=4, causal=True)
    found = []
    for has_metadata in (False, True):
        call = make_call(problem, 0, device)
        given = {"scheduler_metadata": made_for(call)} if has_metadata else {}
        leaves = [call[name].requires_grad_() for name in "qkv"]
        out = flash_attn_varlen_func(**call, **given, deterministic=True)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert all(map(torch.equal, *found))


@places(
    "problem",
    cpu=[VarlenProblem((300, 40), (900, 40), heads_kv=2, causal=True)],
    gpu=[CHUNK],
)
def test_calls_with_lengths_on_the_host(problem, where):
    """On the CPU results do not depend on it."""
    call = make_call(problem, 0, where)
    given = on_host(on_cpu(call))
    cut = run(call, scheduler_metadata=made_for(call))
    whole = run(call, num_splits=1)
    for num_splits, expected in ((0, cut), (1, whole)):
        assert all(map(torch.equal, run(call, **given, num_splits=num_splits), expected))
    assert where != "cpu" or all(map(torch.equal, cut, whole))
