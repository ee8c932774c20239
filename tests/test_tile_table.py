"""The machine code of the kernels that make tables of tiles, and the sizes of a table."""

import itertools

import numpy as np
import pytest
from machine_code import inspect

from fa3.kernels.joined_table import JoinedTable
from fa3.kernels.tile_table import AMOUNTS, SORTERS, TileTable
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.primitives.divisor import PlainDivisor
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.running.compiler import compile_kernel
from fa3.schedules.ragged import RECORD, TABLE_HEADER, RaggedOrder, TileRecord
from fa3.scores.masks import Band
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
@pytest.mark.parametrize("has_used", [False, True])
@pytest.mark.parametrize("is_of_keys", [False, True])
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
@pytest.mark.parametrize("has_used", [False, True])
def test_machine_code_where_sequences_share_tiles(has_used):
    compiled = compile_kernel(JoinedTable(128, Band(left=True, right=True), has_used, has_used))
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
    in_line = [(head, left) for left in reversed(range(num_m_blocks)) for head in range(heads)]
    assert (found == in_line) == (max(seqlen_k, 1) <= order.rows_at_once)
