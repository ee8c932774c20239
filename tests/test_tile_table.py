"""The machine code of the kernel that makes the table of tiles, and the sizes of the table."""

import pytest

from fa3.kernels.tile_table import AMOUNTS, SORTERS, TileTable
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.running.compiler import compile_kernel
from fa3.schedules.ragged import RECORD, TABLE_HEADER
from fa3.scores.masks import Band
from fa3.tools.cubin import inspect


@pytest.mark.compiles
@pytest.mark.parametrize("has_used", [False, True])
def test_machine_code(has_used):
    compiled = compile_kernel(TileTable(128, 112, Band(right=True), has_used, has_used))
    report = inspect(compiled.cubin)
    assert report.stack_bytes == 0
    assert report.threads == SORTERS and report.registers <= 64
    assert report.count("ACQBULK") == report.count("PREEXIT") == 1
    # Twice through the tiles, to count those of each amount of work and to give them places; by
    # the warp and by the lane.
    assert report.count("ATOMS") == 4
    assert report.count("STG.E.128") == RECORD // 4


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (128,), (129, 0, 127), (1,) * 1000, (4096, 5)])
def test_the_table_has_room_for_every_tile(lengths):
    tiles = sum(-(-length // 128) for length in lengths)
    capacity = capacity_of_table(sum(lengths), len(lengths), 128)
    assert tiles <= capacity
    assert words_of_table(capacity) == TABLE_HEADER + RECORD * capacity >= TABLE_HEADER + RECORD


@pytest.mark.parametrize("seqlen", [0, 1, 128, 128 * AMOUNTS - 1, 128 * AMOUNTS, 1 << 20, 1 << 29])
def test_all_amounts_of_work_are_told_apart_as_far_as_there_is_room(seqlen):
    shift, blocks = shift_of_work(seqlen, 128), -(-seqlen // 128)
    assert blocks >> shift < AMOUNTS
    assert shift == 0 or blocks >> (shift - 1) >= AMOUNTS
