"""Tiles that the GPU splits: their cuts, machine code, tables on a GPU, and calls with them."""

import itertools
import random
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import Mock

import emulated_cta
import numpy as np
import pytest
import torch
from gpu_checks import used_counters
from host_table import TableKind, records_of
from machine_code import report_of
from pairs import combine
from score_problems import Recipe
from varlen_problems import (
    LENGTHS_OF_GRAPHS,
    WRONG_ENDS,
    VarlenProblem,
    attend,
    check_graph,
    check_varlen,
    check_wrong_ends,
    integers,
    make_call,
    on_cache,
    on_pages,
    poison,
    signature_with,
    unused,
)

import fa3
from fa3.calls import execution
from fa3.kernels.forward import Forward
from fa3.kernels.segment_table import CUTTERS, MOST_SPLIT_CTAS, SegmentTable, segment_rows
from fa3.kernels.tile_table import (
    BLOCKS_BESIDE,
    MORE_BESIDE_SEGMENTS,
    OF_QUERIES,
    SLOWER_BESIDE,
    TileTable,
    words_of_table,
)
from fa3.planning.costs import H200
from fa3.planning.launch import Launch
from fa3.planning.routes import CACHE, PackedSizes, splits_on_gpu
from fa3.primitives.arithmetic import PlainDivisor
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.problem import AttentionSpec, Window
from fa3.running.compiler import load_kernel
from fa3.schedules.order import END, ONLY, NumberedPart
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, RECORD, TABLE_HEADER, RaggedOrder
from fa3.schedules.split import FIELDS, RaggedSegments
from fa3.schedules.stretches import (
    BLOCKS_OF_TILE,
    SHORTEST_PART,
    SHORTEST_STRETCH,
    Rounds,
    Stretches,
    most_slots,
)
from fa3.scores.masks import Band, Sequence

TILE_M, TILE_N, NUM_CTAS = 128, 96, 132
ENDS_AND_TOTALS = "cu_seqlens_q", "cu_seqlens_k", "total_q", "total_k"

Segments = list[tuple[int, int, int, int]]


def columns_of(
    blocks: list[tuple[int, int]], num_early: int, num_late: int = 0, delay: int = 0
) -> list[Segments]:
    """The segments of each CTA for tiles with these first key blocks and numbers of blocks, as the
    kernel's threads write them for CTAs that begin at once, and others that begin late."""
    counts = [count for _, count in blocks]
    longest, num_tiles = max(counts, default=0), len(blocks)
    starts = [0, *itertools.accumulate(count + BLOCKS_OF_TILE for count in counts)]
    stretches = Stretches.of(starts[-1], longest, num_tiles, num_early, num_late, delay)
    rounds, whole = Rounds(0, 0, 0, 0, 0), 0
    if stretches.have_room(longest, num_tiles):
        rounds = Rounds.of(stretches, longest)
        rounds = rounds.kept(starts[min(rounds.num_tiles, num_tiles)])
        whole = min(rounds.num_tiles, num_tiles)
        work = starts[-1] - starts[whole]
        stretches = rounds.rest(stretches.delay, work, longest, num_tiles - rounds.num_tiles)
    tiles = [
        stretches.cut(number - whole, starts[number] - starts[whole], *blocks[number])
        for number in range(whole, num_tiles)
    ]
    slots = itertools.accumulate((tile.slots for tile in tiles), initial=0)
    tiles = [tile._replace(slot=slot) for tile, slot in zip(tiles, slots, strict=False)]
    columns = []
    for cta in range(num_early + num_late):
        turns = range(rounds.first(cta), rounds.number)
        numbers = [rounds.tile(turn, cta) for turn in turns]
        column = [(n, blocks[n][0], sum(blocks[n]), ONLY) for n in numbers if n < num_tiles]
        column += [
            (number, *stretches.segment(tile, cta))
            for number, tile in enumerate(tiles, whole)
            if tile.owner <= cta <= tile.owner + tile.cuts
        ]
        columns.append(column)
    return columns


@pytest.mark.parametrize("seed", range(60))
def test_every_block_of_every_tile_is_in_one_segment(seed):
    draw = random.Random(seed)
    longest = draw.choice((3, 20, 300, 3000))
    kinds = draw.choice(((1,), (1, longest), (longest,)))
    count = draw.randint(0, 400)
    blocks = [(draw.randint(0, 50), draw.randint(1, draw.choice(kinds))) for _ in range(count)]
    num_ctas = draw.choice((1, 7, 78, 132, 132, 200))
    num_late = draw.choice((0, num_ctas * 2 // 5))
    delay = draw.choice((1, 30, 500, 1 << 20))
    columns = columns_of(blocks, num_ctas - num_late, num_late, delay)
    segments = [one for column in columns for one in column]
    slots = []
    for number, (begin, count) in enumerate(blocks):
        parts = sorted(one[1:] for one in segments if one[0] == number)
        assert [part[0] for part in parts] == [begin, *(part[1] for part in parts[:-1])]
        assert parts[-1][1] == begin + count
        packed = [NumberedPart(part[2]) for part in parts]
        assert all(one.num_parts == len(parts) for one in packed)
        if len(parts) > 1:
            assert [one.slot - one.first_slot for one in packed] == list(range(len(parts)))
            assert min(end - first for first, end, _ in parts) >= SHORTEST_PART
            slots += [one.slot for one in packed]
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= most_slots(len(blocks), num_ctas)
    # A column is in order of tiles, and all of it is in one stretch.
    for column in columns:
        assert [one[0] for one in column] == sorted({one[0] for one in column})
        assert len(column) < segment_rows(len(blocks))


def test_chunks_are_cut_for_all_ctas():
    """512 queries of eight heads on 32k keys."""
    columns = columns_of([(0, 253 + tile // 8) for tile in range(32)], 132)
    work = [sum(end - first + BLOCKS_OF_TILE for _, first, end, _ in column) for column in columns]
    assert all(columns[:131]) and max(work) <= 67 < 1.05 * sum(work) / 132
    assert max(len(column) for column in columns) == 2


@pytest.mark.parametrize("delay", [0, 60, 90, 127, 150])
@pytest.mark.parametrize("num_late", [12, 17, 53])
def test_ctas_that_begin_late_end_with_the_others(num_late, delay):
    """512 queries of 32 heads on 16k keys, while the decode kernel has some CTAs."""
    columns = columns_of(
        [(0, 125 + tile // 32) for tile in range(128)], 132 - num_late, num_late, delay
    )
    work = [sum(end - first + BLOCKS_OF_TILE for _, first, end, _ in column) for column in columns]
    ends = [one + (delay if cta >= 132 - num_late else 0) for cta, one in enumerate(work) if one]
    has_late = delay + SHORTEST_STRETCH < 128 * 128.5 / (132 - num_late)
    assert (len(ends) > 132 - num_late) == has_late
    assert max(ends) <= sum(ends) / len(ends) + SHORTEST_PART + BLOCKS_OF_TILE


@pytest.mark.parametrize("delay", [200, 230, 257])
def test_whole_tiles_come_in_rounds(delay):
    """1024 queries of 32 heads on 32k keys, while the decode kernel has some CTAs: they take part
    in the second round, and all tiles after it are cut."""
    columns = columns_of([(0, 256 - tile // 32) for tile in range(256)], 102, 30, delay)
    for cta, column in enumerate(columns):
        rounds = [cta, 102 + cta] if cta < 102 else [102 + cta]
        assert [one[0] for one in column if one[3] == ONLY] == rounds
        assert [one[0] for one in column[: len(rounds)]] == rounds
        assert len(column) <= len(rounds) + 2
    work = [sum(end - first + BLOCKS_OF_TILE for _, first, end, _ in column) for column in columns]
    ends = [one + (delay if cta >= 102 else 0) for cta, one in enumerate(work)]
    assert max(ends) <= 1.03 * sum(ends) / len(ends)


def test_tiles_of_full_rounds_are_not_cut():
    """1024 queries of 32 heads on 4k keys: two tiles for nearly all CTAs."""
    columns = columns_of([(0, 32 - tile // 32) for tile in range(256)], 132)
    assert {part for column in columns for *_, part in column} == {ONLY}
    assert [len(column) for column in columns] == [2] * 124 + [1] * 8


def test_tiles_of_unequal_length_come_in_no_rounds():
    columns = columns_of([(0, 200)] * 20 + [(0, 20)] * 300, 132)
    work = [sum(end - first + BLOCKS_OF_TILE for _, first, end, _ in column) for column in columns]
    assert max(work) <= 1.1 * sum(work) / 132


def test_few_blocks_are_not_cut_into_short_parts():
    columns = columns_of([(0, 100)], 132)
    assert sum(map(len, columns)) == -(-(100 + BLOCKS_OF_TILE) // SHORTEST_STRETCH)
    whole = [(0, 9)] * 12
    assert [len(column) for column in columns_of(whole, 132)] == [1] * 12 + [0] * 120


def test_tables_of_all_gpus_have_room():
    """32 bits count what is written, and parts have bits enough, at the bounds of the host."""

    def splits(batch: int, heads: int, queries: int, keys: int) -> bool:
        sizes = PackedSizes(batch, heads, queries, keys, queries, keys)
        return splits_on_gpu(signature, sizes)

    gpu = replace(H200, num_sms=MOST_SPLIT_CTAS)
    signature = signature_with(SPEC, gpu=gpu)
    assert splits(1, 1, 512, (1 << 30) // 5 * 128 - 1024)
    assert not splits(1, 1, 512, (1 << 30) * 128 // 5)
    assert not splits(33, 1, 512, 9000) and not splits(1, 60, 512, 9000)
    signature = replace(signature, call=CACHE, cache=CacheLayout(64))
    assert splits(1, 63, 512, 9000) and not splits(1, 64, 512, 9000)
    assert splits(1, 127, 512, 16384) and not splits(1, 128, 512, 16384)
    assert splits(32, 60, 250, 20_000) and not splits(32, 63, 250, 20_000)
    signature = signature_with(SPEC, gpu=replace(gpu, num_sms=MOST_SPLIT_CTAS + 1))
    assert not splits(1, 1, 512, 9000)
    columns = columns_of([(0, (1 << 30) - 9)], MOST_SPLIT_CTAS)
    parts = [NumberedPart(part) for column in columns for *_, part in column]
    assert [part.num_parts for part in parts] == [255] * 255
    assert max(part.number for part in parts) < 1 << 31 and parts[-1].slot == 254


# ------------------------------------------------------------------------------- machine code

SPEC = AttentionSpec("bfloat16", 128, 128, Band(right=True))


@pytest.mark.compiles
def test_machine_code():
    report = report_of(SegmentTable(TileTable(128, 112, Band(right=True), True, True)))
    assert report.threads == CUTTERS and report.registers <= 64
    # The next kernel is launched at once, and this one waits for the previous one.
    assert report.count("PREEXIT") == report.count("ACQBULK") == 1
    # Records, the header, and segments of whole tiles and of others.
    assert report.count("STG.E.128") == 2 * (RECORD + FIELDS) // 4


@pytest.mark.compiles
def test_machine_code_of_the_forward_kernel_on_pages():
    signature = signature_with(SPEC, has_used_k=True, cache=CacheLayout(16))
    report_of(Forward(SPEC, signature.config, RaggedSegments, cache=signature.cache))


# ------------------------------------------------------------------------------------ tables


class Step(NamedTuple):
    """What tables are made of.

    Fields:
        ends: cu_seqlens_q and cu_seqlens_k.
        totals: rows of q and of k.
        heads: query heads, and key/value heads.
        short: sequences with so many queries or fewer get no tiles.
    """

    ends: tuple[list[int], list[int]]
    totals: tuple[int, int]
    heads: tuple[int, int] = (4, 2)
    window: Window = Window(right=0)
    short: int = 0
    rows_of_group: int = 1 << 17

    @classmethod
    def of(cls, queries: list[int], keys: list[int], *rest, **fields) -> "Step":
        """A step with sequences of these lengths."""
        ends = [list(itertools.accumulate(one, initial=0)) for one in (queries, keys)]
        return cls(ends, (sum(queries), sum(keys)), *rest, **fields)

    @property
    def capacity(self) -> int:
        return number_of_packed_tiles(self.totals[0], len(self.ends[0]) - 1, TILE_M)

    def order(self, table) -> RaggedOrder:
        heads, heads_kv = self.heads
        return RaggedOrder.of(table, PlainDivisor(heads), heads // heads_kv, self.rows_of_group)

    def check(self, table: np.ndarray, columns: list[Segments]) -> None:
        """Compare tables with those of the host, where lengths are right."""
        heads, heads_kv = self.heads
        band = Band.of(self.window)
        sizes = self.short, heads // heads_kv, NUM_CTAS, MORE_BESIDE_SEGMENTS
        kind = TableKind(TILE_M, TILE_N, band, self.window, *sizes)
        queries, keys = (
            RaggedLengths(np.array(ends), None, total)
            for ends, total in zip(self.ends, self.totals, strict=True)
        )
        expected = kind.table(queries, keys)
        # Sums of fp32 and of fp64.
        beside = int(table[CTAS_BESIDE])
        assert abs(beside - int(expected[CTAS_BESIDE])) <= 1
        expected[CTAS_BESIDE] = beside
        count = TABLE_HEADER + RECORD * int(expected[NUM_RECORDS])
        assert table[:count].tolist() == expected[:count].tolist()
        blocks = host_blocks(expected, kind, self.order(table), heads)
        num_late, delays = beside if beside < NUM_CTAS else 0, [0]
        if num_late:
            lengths = [pair.read(np.arange(len(self.ends[0]) - 1))[1] for pair in (queries, keys)]
            is_short = (lengths[0] <= self.short) & (lengths[0] > 0)
            short = kind.short_work(*(one[is_short] for one in lengths))
            share = int(short * heads_kv / num_late * SLOWER_BESIDE) + BLOCKS_BESIDE
            delays = [share - 1, share, share + 1]
        cuts = [columns_of(blocks, NUM_CTAS - num_late, num_late, delay) for delay in delays]
        assert columns in cuts

    def check_parts(self, table: np.ndarray, columns: list[Segments]) -> None:
        """Check that all parts of all tiles are there, whatever the lengths are."""
        found = [one for column in columns for one in column]
        num_tiles = self.heads[0] * int(table[NUM_RECORDS])
        assert 0 < num_tiles <= self.heads[0] * self.capacity
        assert {one[0] for one in found} == set(range(num_tiles))
        for number in range(num_tiles):
            parts = [NumberedPart(one[3]) for one in found if one[0] == number]
            assert {part.num_parts for part in parts} == {len(parts)}


def host_blocks(table: np.ndarray, kind: TableKind, order: RaggedOrder, heads: int) -> list:
    """The first key block of each tile, and how many it has."""
    found = []
    for number, record in enumerate(records_of(table)):
        for head in range(heads):
            m_block = record.m_block
            if max(record.seqlen_k, 1) > order.rows_at_once:
                _, m_block = order.in_groups(number * heads + head, number, record)
            sequence = Sequence(record.seqlen_q, record.seqlen_k, kind.window)
            rows = m_block * kind.tile_m, kind.tile_m
            blocks = kind.band.key_blocks(*rows, kind.tile_n, sequence)
            found.append((int(blocks.begin), int(blocks.end - blocks.begin)))
    return found


def columns_in(segments: list[int]) -> list[Segments]:
    """The segments of each CTA in a table."""
    columns = []
    for column in np.reshape(segments, (-1, NUM_CTAS, FIELDS)).transpose(1, 0, 2).tolist():
        count = [one[0] for one in column].index(END)
        columns.append([tuple(one) for one in column[:count]])
    return columns


def tables_on_cpu(step: Step) -> tuple[np.ndarray, list[Segments]]:
    """The tables that the kernel's Python makes."""
    _, ragged, tile_table, segment_table = emulated_cta.load(
        "fa3.primitives.vectors",
        "fa3.schedules.ragged",
        "fa3.kernels.tile_table",
        "fa3.kernels.segment_table",
    )
    tile_table.TileTable.await_lengths = lambda *_: None
    table = np.full(words_of_table(step.capacity), -7)
    segments = np.full(segment_rows(step.capacity * step.heads[0]) * NUM_CTAS * FIELDS, -7)
    ends = (emulated_cta.Memory(np.array(one)) for one in step.ends)
    memory, ratio = emulated_cta.Memory(table), step.heads[0] // step.heads[1]
    named = dict(zip(ENDS_AND_TOTALS, (*ends, *step.totals), strict=True))
    named |= {"table": memory, "capacity": step.capacity, "shift": 0, "num_ctas": NUM_CTAS}
    named |= {"short_queries": step.short, "qhead_per_kvhead": ratio}
    named["window_left"], named["window_right"] = step.window
    fields = tile_table.TileTableArguments._fields
    call = tile_table.TileTableArguments(**dict.fromkeys(fields) | named)
    order = ragged.RaggedOrder(*vars(step.order(memory)).values())
    tiles = tile_table.TileTable(TILE_M, TILE_N, Band.of(step.window), False, False)
    kernel = segment_table.SegmentTable(tiles).kernel
    emulated_cta.Cta(CUTTERS).run(lambda: kernel(call, order, emulated_cta.Memory(segments)))
    return table, columns_in(segments)


def tables_on_gpu(step: Step, device) -> tuple[np.ndarray, list[Segments]]:
    """The tables that the kernel makes."""
    kernel = SegmentTable(TileTable(TILE_M, TILE_N, Band.of(step.window), False, False))
    heads, heads_kv = step.heads
    size = segment_rows(step.capacity * heads) * NUM_CTAS * FIELDS
    # More than the kernel knows of, to see that it stays inside.
    table, segments = (
        torch.full((count + 64,), -7, dtype=torch.int32, device=device)
        for count in (words_of_table(step.capacity), size)
    )
    ends = (integers(*one, device=device) for one in step.ends)
    values = dict(zip(ENDS_AND_TOTALS, (*ends, *step.totals), strict=True))
    values |= {"table": table[:-64], "segments": segments[:-64]}
    numbers = step.capacity, 0, step.short, heads // heads_kv, NUM_CTAS
    named = dict(zip(OF_QUERIES, numbers, strict=True))
    named |= {"heads": heads, "rows_of_group": step.rows_of_group}
    launch = Launch.of(kernel, step.window, **named)
    execution.launcher(load_kernel(kernel), launch.arguments)(values)
    assert (table[-64:] == -7).all() and (segments[-64:] == -7).all()
    return table[:-64].cpu().numpy(), columns_in(segments[:-64].tolist())


def batches() -> list[tuple[list[int], list[int]]]:
    """Queries and keys of sequences."""
    draw = random.Random(0)
    drawn = []
    for longest in (300, 9000, 60_000):
        for count in (1, 2, 5, 16):
            queries = [draw.choice((0, 1, 100, draw.randint(1, 300))) for _ in range(count)]
            drawn.append((queries, [n + draw.randint(0, longest) for n in queries]))
    mixed = [1024] + [1] * 31, [32768] + [4096] * 31
    return [([512], [32768]), ([700, 300], [9000, 300]), ([1] * 32, [5000] * 32), mixed, *drawn]


WRONG = [*WRONG_ENDS, (0, 300, 0, 300, 0, 300)]


@pytest.mark.parametrize(
    "step",
    [
        Step.of([512], [32768]),
        Step.of([300, 1, 200, 20], [9000, 8000, 5000, 300], short=32),
        Step.of([257, 129], [70_000, 500], window=Window(), rows_of_group=4000),
        Step.of([3, 0], [500, 9], short=32, rows_of_group=100),
        Step.of([512] + [1] * 15, [16384] + [2048] * 15, short=32, heads=(32, 8)),
        Step.of([1700, 300, 2], [33_000, 300, 9000], short=32, heads=(32, 8), rows_of_group=9000),
        Step.of([1024] + [1] * 31, [32768] + [4096] * 31, short=32, heads=(32, 8)),
        Step.of([640, 640], [5000, 4000], heads=(32, 8)),
    ],
)
def test_the_kernel_on_the_cpu(step):
    step.check(*tables_on_cpu(step))


@pytest.mark.parametrize("ends", WRONG)
def test_all_parts_are_written_whatever_the_lengths_are(ends):
    """Of lengths that overlap, some tiles have no room: then they have no part either."""
    step = Step((ends, ends), (300, 300), (4, 2))
    step.check_parts(*tables_on_cpu(step))


def test_all_parts_are_written_on_a_gpu(device):
    for ends in WRONG:
        step = Step((ends, ends), (300, 300), (4, 2))
        step.check_parts(*tables_on_gpu(step, device))


@pytest.mark.parametrize("window", [Window(right=0), Window(), Window(5000, 5)], ids=str)
def test_tables_are_those_of_the_host(window, device):
    """One kernel for each window, and pairs of what it is launched with."""
    for lengths, short, rows_of_group, heads in combine(
        [batches(), (0, 32), (1 << 17, 4000), ((4, 2), (32, 8))]
    ):
        step = Step.of(*lengths, heads, window, short, rows_of_group)
        step.check(*tables_on_gpu(step, device))


# --------------------------------------------------------------------------------------- calls

CHUNK = VarlenProblem((512,), (32768,), group=8, head_dim=128, causal=True)
MIXED = VarlenProblem(
    (300, 1, 0, 200, 3, 1), (9000, 7000, 40, 5000, 900, 4500), heads_kv=2, group=4, head_dim=128,
    causal=True, spare=3,
)  # fmt: skip
# More tiles than SMs, which only a cache may split.
MANY = VarlenProblem(
    (400, 1, 180, 2), (7000, 6000, 3000, 5000), heads_kv=4, group=8, head_dim=128, causal=True
)
PROBLEMS = {
    "chunk": CHUNK,
    "many": MANY,
    "mixed": MIXED,
    "two": VarlenProblem((300, 700), (5000, 9000), heads_kv=2, group=2, causal=True),
    "full": VarlenProblem((200, 300), (7000, 100), heads_kv=3, dtype="float16"),
    "window": VarlenProblem((900, 200), (12000, 7000), group=4, window=(4000, 0), head_dim=128),
    "unequal": VarlenProblem(
        (400,), (8000,), group=2, causal=True, head_dim=192, head_dim_v=128, spare=9
    ),
    "large": VarlenProblem((257,), (5001,), heads_kv=7, group=2, causal=True, head_dim=256),
    "alibi": replace(MIXED, recipe=Recipe(alibi_rank=2)),
    "softcap": replace(MIXED, recipe=Recipe(softcap=20.0, sinks="float32")),
}  # fmt: skip


@pytest.fixture
def splitting(monkeypatch, no_shared_tiles) -> Mock:
    """What launches of split tiles call."""
    found = Mock(wraps=most_slots)
    monkeypatch.setattr(execution, "most_slots", found)
    return found


KEYS = "packed", "cache", 16, 64
"""Where keys are: packed, in a cache, or in pages of so many."""


def check_split(name: str, keys: str | int, splitting: Mock, device) -> None:
    """Assert that a problem's tiles are split, and its results those of dense attention."""
    problem = PROBLEMS[name]
    splitting.reset_mock()
    call = given = make_call(problem, 0, device)
    is_split = keys != "packed" or name != "many"
    if keys == "cache":
        given = on_cache(problem, call, None, 5000)
    elif keys != "packed":
        given = on_pages(problem, call, keys, 5000)
    out, lse = attend(given)
    assert splitting.call_count == is_split
    check_varlen(problem, call, out, lse)
    untouched = unused(problem, len(out), device)
    assert out[untouched].isnan().all() and lse[:, untouched].isnan().all()
    # Parts are added up in their order, whichever is last.
    for _ in range(20):
        again, again_lse = attend(given)
        assert torch.equal(again[~untouched], out[~untouched])
        assert torch.equal(again_lse[:, ~untouched], lse[:, ~untouched])
    assert not used_counters()


@pytest.mark.parametrize("keys", KEYS)
def test_results_are_those_of_dense_attention(keys, splitting, device):
    for name in ("chunk", "many", "mixed"):
        check_split(name, keys, splitting, device)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (name, keys)
        for number, name in enumerate(list(PROBLEMS)[3:])
        for keys in ("packed", KEYS[1 + number % 3])
    ],
)
def test_other_kernels_give_dense_attention(name, keys, splitting, device):
    """Each with packed keys, and with one kind of cache."""
    check_split(name, keys, splitting, device)


def test_neighbours_may_hold_anything(splitting, device):
    call = make_call(MIXED, 0, device)
    poisoned = poison(MIXED, call)
    out, lse = attend(call)
    check_varlen(MIXED, call, out, lse, skipped=poisoned)
    assert splitting.called and not used_counters()


def test_rows_with_a_wrong_reference_are_computed_again(splitting, device):
    """Keys before the last block are so much larger that the fixed row max fails in parts."""
    problem = replace(CHUNK, seqlens_q=(200,), seqlens_k=(9000,))
    call = make_call(problem, 0, device)
    call["k"][100:8000:50] *= 40
    out, lse = attend(call)
    check_varlen(problem, call, out, lse)
    assert splitting.called and not used_counters()


def test_one_split_is_none(splitting, device):
    call = make_call(MIXED, 0, device)
    attend(call | {"num_splits": 1})
    leaves = [call[name].requires_grad_() for name in "qkv"]
    torch.autograd.grad(fa3.flash_attn_varlen_func(**call).float().sum(), leaves)
    assert not splitting.called


def test_wrong_lengths_touch_nothing_outside(splitting, device):
    call = make_call(VarlenProblem((100,) * 3, (2000,) * 3, group=4, causal=True), 0, device)
    check_wrong_ends(call, max_seqlen_k=6000)
    assert splitting.called


def test_wrong_lengths_of_a_cache_touch_nothing_outside(splitting, device):
    problem = VarlenProblem((100,) * 3, (5000,) * 3, heads_kv=3, group=4, causal=True)
    call = on_cache(problem, make_call(problem, 0, device), 16)
    wrong = (2**31 - 1, -5, 5000), (0, 0, 0), (-(2**31), 1 << 20, 9)
    for keys in wrong:
        check_wrong_ends(dict(call), cache_seqlens=integers(*keys, device=device))
    assert splitting.called


def test_a_graph_serves_other_lengths(splitting, device):
    """With sequences that decode, and without any rows."""
    lengths = (
        ((300, 5, 300), (9000, 0, 5000)), ((605, 0, 0), (14000, 0, 0)),
        ((1, 4, 600), (1, 13_999, 0)), ((0, 250, 100), (50, 200, 13_000)), ((0, 0, 0), (0, 0, 0)),
    )  # fmt: skip
    problems = [VarlenProblem(*of_both, group=8, head_dim=128, causal=True) for of_both in lengths]
    options = {"max_seqlen_q": 605, "max_seqlen_k": 14_000}
    check_graph(problems, device, names=LENGTHS_OF_GRAPHS, **options)
    assert splitting.called and not used_counters()
