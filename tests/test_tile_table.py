"""Tables of tiles: machine code, sizes, and tables on a Hopper GPU against those of the host."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_graphs import captured
from free_counters import used_counters
from machine_code import inspect
from pairs import pairs, places
from test_known_lengths import (
    CHUNK,
    cached_call,
    known,
    made_for,
    metadata_of,
    metadata_of_cache,
    on_cpu,
    on_host,
    records_of,
    run,
)
from varlen_problems import VarlenProblem, check_varlen, make_call, unused

from fa3 import flash_attn_varlen_func
from fa3.kernels.joined_table import MultiSequenceTable
from fa3.kernels.tile_table import AMOUNTS, SORTERS, TileTable
from fa3.planning.gpu import H200
from fa3.planning.host_table import TableKind, end_of_longest_first
from fa3.planning.host_table import records_of as arrays_of
from fa3.planning.ragged import RaggedPlan, capacity_of_table, shift_of_work, words_of_table
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.divisor import PlainDivisor
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec, Window
from fa3.running.compiler import compile_kernel, load_kernel
from fa3.schedules.ragged import (
    CTAS_BESIDE,
    NUM_RECORDS,
    RECORD,
    TABLE_HEADER,
    RaggedOrder,
    TileRecord,
)
from fa3.schedules.segment import PackedPart
from fa3.schedules.split import FIELDS
from fa3.scores.masks import Band, Sequence
from fa3.tools.cubin import opcode


@pytest.mark.compiles
@pytest.mark.parametrize("has_used", [False, True])
def test_machine_code(has_used):
    compiled = compile_kernel(
        TileTable(128, 112, Band(right=True), has_used, has_used, has_cache=not has_used)
    )
    report = inspect(compiled.cubin)
    assert report.stack_bytes == 0
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
    instructions = inspect(compile_kernel(kernel).cubin).instructions
    codes = [opcode(text) for text in instructions]
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
    compiled = compile_kernel(MultiSequenceTable(128, Band(left=True, right=True), True, True))
    report = inspect(compiled.cubin)
    assert report.stack_bytes == 0 and report.spill_instructions == 0
    assert report.threads == 128 and report.registers <= 64
    assert report.count("ACQBULK") == report.count("PREEXIT") == 1
    # Of a sequence and of a tile, and of a row.
    assert report.count("STG.E.128") == 2 * RECORD // 4 + 1


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (128,), (129, 0, 127), (1,) * 1000, (4096, 5)])
def test_the_table_has_room_for_every_tile(lengths):
    tiles = sum(-(-length // 128) for length in lengths)
    capacity = capacity_of_table(sum(lengths), len(lengths), 128)
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


@pytest.mark.parametrize("heads_of_key", [1, 3])
@pytest.mark.parametrize("rows_of_section", [1, 1000, 2500, 10**6])
@pytest.mark.parametrize("seqlen_k", [0, 1, 1000])
def test_a_sequence_has_every_tile_once_and_heads_whose_keys_fit_beside_each_other(
    seqlen_k, rows_of_section, heads_of_key
):
    heads, num_m_blocks = 6, 5
    order = RaggedOrder.of(None, PlainDivisor(heads), heads_of_key, rows_of_section)
    tiles = [order.place(i, num_m_blocks, seqlen_k) for i in range(heads * num_m_blocks)]
    assert sorted(tiles) == [(head, m) for head in range(heads) for m in range(num_m_blocks)]
    of_section = min(heads, max(1, rows_of_section // max(1, seqlen_k)) * heads_of_key)
    # The first section has what is left over.
    sections = [-((heads - 1 - head) // of_section) for head, _ in tiles]
    assert sections == sorted(sections)
    for section in set(sections):
        of_this = [
            m_block for _, m_block in itertools.compress(tiles, map(section.__eq__, sections))
        ]
        assert of_this == sorted(of_this, reverse=True)


@pytest.mark.parametrize("heads_of_key", [1, 3])
@pytest.mark.parametrize("rows_of_section", [1, 2000, 2001, 6000])
@pytest.mark.parametrize("seqlen_k", [0, 1, 1000, 1001])
def test_heads_whose_keys_all_fit_lie_as_their_records_do(seqlen_k, rows_of_section, heads_of_key):
    """Then the kernel divides nothing."""
    heads, num_m_blocks = 6, 5
    order = RaggedOrder.of(None, PlainDivisor(heads), heads_of_key, rows_of_section)
    found = [
        order.in_sections(number * heads + head, number, TileRecord(left, 0, 0, 0, 0, seqlen_k, 5))
        for number, left in enumerate(reversed(range(num_m_blocks)))
        for head in range(heads)
    ]
    varlen_view = [(head, left) for left in reversed(range(num_m_blocks)) for head in range(heads)]
    assert (found == varlen_view) == (max(seqlen_k, 1) <= order.rows_at_once)


TILE_M, TILE_N, NUM_CTAS = 128, 96, 132


def ends_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def table_of(
    kernel: TileTable, window: Window, short: int, lengths, totals, device, shift: int = 0
):
    """The header of a table made on the GPU, and its records.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k; None for what there is not.
    """
    capacity = capacity_of_table(totals[0], len(lengths[0]) - 1, kernel.tile_m)
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    on_gpu = (None if one is None else one.int().to(device) for one in lengths)
    load_kernel(kernel)(*on_gpu, table, *totals, capacity, shift, *window, short, 4, NUM_CTAS)
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


@pytest.mark.parametrize("short", [0, 64, 1 << 30])
@pytest.mark.parametrize("has_used", [False, True])
@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(200, 5)], ids=str)
@pytest.mark.parametrize("lengths", batches(), ids=lambda lengths: f"{len(lengths)}x{lengths[-1]}")
def test_few_sequences_have_the_table_of_the_host(lengths, window, has_used, short, device):
    draw, band = random.Random(1), Band.of(window)
    keys = [max(0, length + draw.randint(-100, 500)) for length in lengths]
    ends = [ends_of(lengths), ends_of(keys)]
    used = [None, None]
    if has_used:
        used = [torch.tensor([draw.randint(-2, n + 3) for n in each]) for each in (lengths, keys)]
    totals = sum(lengths), sum(keys)
    kernel = TileTable(TILE_M, TILE_N, band, has_used, has_used)
    header, records, _ = table_of(kernel, window, short, [*ends, *used], totals, device)
    queries, of_keys = (
        RaggedLengths(end.numpy(), None if of_side is None else of_side.numpy(), total)
        for end, of_side, total in zip(ends, used, totals, strict=True)
    )
    kind = TableKind(TILE_M, TILE_N, band, window, short, 4, NUM_CTAS)
    expected = kind.table(queries, of_keys)
    own = expected[:TABLE_HEADER].tolist()
    # Sums of fp32 and of fp64.
    assert abs(header.pop(CTAS_BESIDE) - own.pop(CTAS_BESIDE)) <= 1
    assert header == own
    assert records == expected[TABLE_HEADER:].reshape(-1, RECORD)[: len(records)].tolist()


@pytest.mark.parametrize("lengths", batches(), ids=lambda lengths: f"{len(lengths)}x{lengths[-1]}")
def test_few_sequences_on_a_cache(lengths, device):
    window, capacity = Window(right=0), 4000
    keys = torch.tensor([length + 500 for length in lengths])
    kernel = TileTable(TILE_M, TILE_N, Band.of(window), False, True, has_cache=True)
    given = ends_of(lengths), None, None, keys
    _, records, _ = table_of(kernel, window, 0, given, (sum(lengths), capacity), device)
    kind = TableKind(TILE_M, TILE_N, Band.of(window), window, 0, 4, NUM_CTAS)
    queries = RaggedLengths(given[0].numpy(), None, sum(lengths))
    expected = kind.table(queries, CacheLengths(keys.numpy(), capacity))
    assert records == expected[TABLE_HEADER:].reshape(-1, RECORD)[: len(records)].tolist()
    assert len(records) == expected[NUM_RECORDS]


@pytest.mark.parametrize(
    "ends", [(0, 300) * 8, (0, 2**30, -(2**30), 9), (0, 100, -(2**31), 300), (-50, 90, 900, 300)]
)
def test_all_records_of_lengths_that_overlap_are_written_and_inside(ends, device):
    """As many as there is room for, where they have more tiles than that."""
    window, total = Window(right=0), 300
    kernel = TileTable(TILE_M, TILE_N, Band.of(window), False, False)
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


@pairs(
    lengths=many(),
    window=(Window(right=0), Window(), Window(200, 5)),
    short=(0, 1, 32, 128, 1 << 30),
)
def test_many_sequences_have_every_tile_once_and_the_longest_first(lengths, window, short, device):
    band, totals = Band.of(window), tuple(map(sum, lengths))
    ends = [ends_of(one) for one in lengths]
    shift = shift_of_work(max(1, *lengths[1]), TILE_N)
    kernel, given = TileTable(TILE_M, TILE_N, band, False, False), (*ends, None, None)
    header, records, _ = table_of(kernel, window, short, given, totals, device, shift)
    kind = TableKind(TILE_M, TILE_N, band, window, short, 4, NUM_CTAS)
    of_host = kind.table(
        *(RaggedLengths(end.numpy(), None, total) for end, total in zip(ends, totals, strict=True))
    )
    found, expected = (
        [TileRecord(*words[: len(TileRecord._fields)]) for words in one]
        for one in (records, of_host[TABLE_HEADER:].reshape(-1, RECORD).tolist())
    )
    assert sorted(found) == sorted(expected[: of_host[NUM_RECORDS]]) and header[0] == 0
    assert abs(header[CTAS_BESIDE] - int(of_host[CTAS_BESIDE])) <= 1
    # Sequence by sequence, the last rows first, and sequences in order of their longest tile.
    for one, other in itertools.pairwise(found):
        assert one.m_block == (other.m_block + 1 if one.batch == other.batch else 0)
    if window == Window(right=0) and lengths[0] == lengths[1]:
        lasts = [tile for tile in found if tile.m_block == tile.num_m_blocks - 1]
        work = [-(-tile.seqlen_k // TILE_N) >> shift for tile in lasts]
        assert work == sorted(work, reverse=True)


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
