"""The table of tiles on a Hopper GPU: of few sequences word for word that of the host."""

import random

import pytest
import torch

from fa3.kernels.tile_table import SORTERS, TileTable
from fa3.planning.host_table import TableKind
from fa3.planning.ragged import capacity_of_table, words_of_table
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import WARP
from fa3.problem import Window
from fa3.running.compiler import load_kernel
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.masks import Band

pytestmark = pytest.mark.gpu

TILE_M, TILE_N, NUM_CTAS = 128, 96, 132


def ends_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def table_of(kernel: TileTable, window: Window, short: int, lengths, totals, device):
    """The header of a table made on the GPU, and its records.

    Args:
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k; None for what there is not.
    """
    capacity = capacity_of_table(totals[0], len(lengths[0]) - 1, kernel.tile_m)
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    on_gpu = (None if one is None else one.int().to(device) for one in lengths)
    load_kernel(kernel)(*on_gpu, table, *totals, capacity, 0, *window, short, 4, NUM_CTAS)
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
