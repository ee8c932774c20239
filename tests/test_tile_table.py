"""Tables of tiles: machine code, sizes, and tables on a Hopper GPU next to the host's."""

import itertools
import random

import numpy as np
import pytest
import torch
from host_table import TableKind, records_of
from machine_code import report_of
from pairs import combine
from varlen_problems import WRONG_ENDS, ends_of

from benchmarks.cubin import opcode
from fa3.calls.execution import launcher
from fa3.kernels.shared_tile_table import MultiSequenceTable
from fa3.kernels.tile_table import (
    AMOUNTS,
    OF_KEYS,
    OF_QUERIES,
    SORTERS,
    TileTable,
    shift_of_work,
    words_of_table,
)
from fa3.planning.key_split import KeyShares
from fa3.planning.launch import Launch
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import WARP
from fa3.problem import Window
from fa3.running.compiler import load_kernel
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.masks import Band


@pytest.mark.compiles
@pytest.mark.parametrize("has_used", [False, True])
def test_machine_code(has_used):
    report = report_of(
        TileTable(128, 112, Band(right=True), has_used, has_used, has_cache=not has_used)
    )
    assert report.threads == SORTERS and report.registers <= 64
    # The next kernel is launched at once; few sequences and many wait for the previous one.
    assert report.count("PREEXIT") == 1 and report.count("ACQBULK") == 2
    # Of many, twice through the sequences, to count the tiles of each amount of work and to give
    # them places; by the warp and by the lane.
    assert report.count("ATOMS") == 4
    # Records of few and of many, and the header of few.
    assert report.count("STG.E.128") == 3 * RECORD // 4


@pytest.mark.compiles
@pytest.mark.parametrize(("is_of_keys", "has_used"), [(False, True), (True, False)])
def test_few_sequences_are_read_once_and_no_warp_waits(is_of_keys, has_used):
    """Up to the first wait for other warps, which comes behind all code for few sequences."""
    kernel = TileTable(128, 128, Band(right=True), has_used, has_used, is_of_keys=is_of_keys)
    codes = [opcode(text) for text in report_of(kernel).instructions]
    few = codes[: next(i for i, code in enumerate(codes) if code.startswith("BAR"))]
    ends = [i for i, code in enumerate(few) if code == "EXIT"]
    waits, prefetches, loads, stores = (
        [i for i, code in enumerate(few) if code.startswith(start)]
        for start in ("ACQBULK", "CCTL.E.PF2", "LDG", "STG.E.128")
    )
    # The begin and the end of queries and keys, and how many are used.
    num_loads = 4 + 2 * has_used
    of_few = [load for load in loads if load < waits[1]]
    assert len(of_few) == num_loads and waits[0] < min(of_few)
    assert prefetches[0] < waits[0] and len(stores) == 2 * RECORD // 4
    assert max(stores) < waits[1] and ends and not any(c.startswith("ATOMS") for c in few)


@pytest.mark.compiles
def test_machine_code_where_sequences_share_tiles():
    report = report_of(MultiSequenceTable(128, Band(left=True, right=True), True, True))
    assert report.threads == 128 and report.registers <= 64
    assert report.count("ACQBULK") == report.count("PREEXIT") == 1
    # Of a sequence and of a tile, and of a row.
    assert report.count("STG.E.128") == 2 * RECORD // 4 + 1


@pytest.mark.parametrize("lengths", [(0,), (1,), (128,), (129, 0, 127), (1,) * 1000, (4096, 5)])
def test_the_table_has_room_for_every_tile(lengths):
    tiles = sum(-(-length // 128) for length in lengths)
    capacity = number_of_packed_tiles(sum(lengths), len(lengths), 128)
    assert tiles <= capacity
    assert words_of_table(capacity) == TABLE_HEADER + RECORD * capacity >= TABLE_HEADER + RECORD


@pytest.mark.parametrize("used", [None, -(2**31), 2**31 - 1, 7])
@pytest.mark.parametrize("ends", [(-(2**31), 4), (100, -(2**31)), (2**31 - 1, -(2**31)), (5, 30)])
def test_rows_stay_inside_of_the_tensor_whatever_the_lengths_say(ends, used):
    """32 bits, as in the kernel: a difference of two ends may leave them."""
    used = None if used is None else np.array([used], np.int32)
    lengths = RaggedLengths(np.array(ends, np.int32), used, np.int32(200))
    with np.errstate(over="raise"):
        begin, length = lengths.read(0)
    assert 0 <= begin <= begin + length <= 200


@pytest.mark.parametrize("seqlen", [0, 1, 128, 128 * AMOUNTS - 1, 128 * AMOUNTS, 1 << 20, 1 << 29])
def test_all_amounts_of_work_are_told_apart_as_far_as_there_is_room(seqlen):
    shift, blocks = shift_of_work(seqlen, 128), -(-seqlen // 128)
    assert blocks >> shift < AMOUNTS
    assert shift == 0 or blocks >> (shift - 1) >= AMOUNTS


TILE_M, TILE_N, NUM_CTAS = 128, 96, 132


def table_of(
    kernel: TileTable,
    window: Window,
    short: int,
    lengths,
    totals,
    device,
    shift: int = 0,
    of_keys: tuple = (None,) * 3,
):
    """The header of a table made on the GPU, and its records.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k; None for what there is not.
        of_keys: the arguments of `OF_KEYS`.
    """
    capacity = number_of_packed_tiles(totals[0], len(lengths[0]) - 1, kernel.tile_m) * (
        of_keys[1] or 1
    )
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    on_gpu = (None if one is None else one.int().to(device) for one in lengths)
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "total_q", "total_k"
    values = dict(zip(names, (*on_gpu, *totals), strict=True)) | {"table": table}
    numbers = capacity, shift, short, 4, NUM_CTAS, *of_keys
    named = dict(zip((*OF_QUERIES, *OF_KEYS), numbers, strict=True))
    launch = Launch.of(kernel, window, **named)
    launcher(load_kernel(kernel), launch.arguments)(values)
    header, records = table[:TABLE_HEADER].tolist(), table[TABLE_HEADER:].view(-1, RECORD)
    return header, records[: header[NUM_RECORDS]].tolist(), capacity


def batches() -> list[list[int]]:
    draw = random.Random(0)
    drawn = [
        [draw.choice((0, draw.randint(1, longest), longest)) for _ in range(count)]
        for count in (1, 2, 5, 16, 31, WARP)
        for longest in (3, 300, 3000)
    ]
    # More records than a CTA has threads.
    return [[1024] * 16, [0] * WARP, [TILE_M * SORTERS // 20] * WARP, *drawn]


def test_few_sequences_on_a_cache(device):
    window, capacity = Window(right=0), 4000
    kernel = TileTable(TILE_M, TILE_N, Band.of(window), False, True, has_cache=True)
    kind = TableKind(TILE_M, TILE_N, Band.of(window), window, 0, 4, NUM_CTAS)
    for lengths in batches():
        keys = torch.tensor([length + 500 for length in lengths])
        given = ends_of(lengths), None, None, keys
        _, records, _ = table_of(kernel, window, 0, given, (sum(lengths), capacity), device)
        queries = RaggedLengths(given[0].numpy(), None, sum(lengths))
        expected = kind.table(queries, CacheLengths(keys.numpy(), capacity))
        assert records == expected[TABLE_HEADER:].reshape(-1, RECORD)[: len(records)].tolist()
        assert len(records) == expected[NUM_RECORDS]


@pytest.mark.parametrize("shares", [KeyShares(), KeyShares(1, 5), KeyShares(1, 13, 1200)])
def test_key_tiles_of_all_sequences_come_by_their_work(shares, device):
    """Each in its parts."""
    window, of_keys = Window(right=0), (1, shares.block_parts, shares.rise)
    kernel = TileTable(TILE_M, TILE_M, Band.of(window), False, False, is_of_keys=True)
    for lengths in batches():
        given, total = (ends_of(lengths), ends_of(lengths), None, None), sum(lengths)
        _, records, _ = table_of(kernel, window, 0, given, (total, total), device, 0, of_keys)
        tiles = []
        for batch, length in enumerate(lengths):
            count = 0
            for after in range(-(-length // TILE_M)):
                tiles += [(-after, batch, count, parts := shares.parts_of_set(after))]
                count += parts
        # `m_block` counts the parts that follow.
        expected = [(n + i, batch) for _, batch, n, parts in sorted(tiles) for i in range(parts)]
        assert [(left, batch) for left, batch, *_ in records] == expected


def test_all_records_of_lengths_that_overlap_are_written_and_inside(device):
    """As many as there is room for, where they have more tiles than that."""
    window, total = Window(right=0), 300
    kernel = TileTable(TILE_M, TILE_N, Band.of(window), False, False)
    for ends in [(0, 300) * 8, *WRONG_ENDS[1:]]:
        given = torch.tensor(ends), torch.tensor(ends), None, None
        header, records, capacity = table_of(kernel, window, 0, given, (total, total), device)
        assert 0 < header[NUM_RECORDS] == len(records) <= capacity
        for words in records:
            record = TileRecord(*words[: len(TileRecord._fields)])
            assert 0 <= record.batch < len(ends) - 1 and 0 <= record.m_block < record.num_m_blocks
            assert 0 <= record.begin_q <= record.begin_q + record.seqlen_q <= total
            assert 0 <= record.begin_k <= record.begin_k + record.seqlen_k <= total


def many() -> list[list[list[int]]]:
    """Queries and keys of sequences: few, and more than a warp has lanes."""
    draw = random.Random(0)
    equal = [
        *([300, 0, 5, 129, 128, 1000], [17], [0, 0], [3] * 500 + [1 << 20]),
        [draw.randint(0, 2000) for _ in range(1000)],
        [draw.randint(1, 16) for _ in range(8192)],
    ]
    unequal = [
        [[draw.choice((0, 1, draw.randint(0, longest))) for _ in range(count)] for _ in range(2)]
        for longest in (40, 700, 3000)
        for count in (2, 5, 40, 300)
    ]
    return [[one, one] for one in equal] + unequal


WINDOWS = Window(right=0), Window(), Window(200, 5)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_many_sequences_have_every_tile_once_and_the_longest_first(window, device):
    for lengths, other, short in combine([many(), WINDOWS, (0, 1, 32, 128, 1 << 30)]):
        if other == window:
            check_many(lengths, window, short, device)


def check_many(lengths: list[list[int]], window: Window, short: int, device) -> None:
    """Assert that a table has the host's records, sequences with the longest tile first."""
    band, totals = Band.of(window), tuple(map(sum, lengths))
    ends = [ends_of(one) for one in lengths]
    shift = shift_of_work(max(1, *lengths[1]), TILE_N)
    kernel, given = TileTable(TILE_M, TILE_N, band, False, False), (*ends, None, None)
    header, records, _ = table_of(kernel, window, short, given, totals, device, shift)
    kind = TableKind(TILE_M, TILE_N, band, window, short, 4, NUM_CTAS)
    of_host = kind.table(
        *(RaggedLengths(end.numpy(), None, total) for end, total in zip(ends, totals, strict=True))
    )
    found = [TileRecord(*words[: len(TileRecord._fields)]) for words in records]
    assert sorted(found) == sorted(records_of(of_host)) and header[0] == 0
    assert abs(header[CTAS_BESIDE] - int(of_host[CTAS_BESIDE])) <= 1
    # Sequence by sequence, the last rows first, and sequences in order of their longest tile.
    for one, other in itertools.pairwise(found):
        assert one.m_block == (other.m_block + 1 if one.batch == other.batch else 0)
    if window == Window(right=0) and lengths[0] == lengths[1]:
        lasts = [tile for tile in found if tile.m_block == tile.num_m_blocks - 1]
        work = [-(-tile.seqlen_k // TILE_N) >> shift for tile in lasts]
        assert work == sorted(work, reverse=True)
