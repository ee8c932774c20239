"""The table of tiles of packed sequences whose lengths the host knows, like
`fa3.kernels.tile_table`, in numpy; and parts of its tiles, where few tiles would leave SMs idle.

`fa3.calls.known_lengths` has it made once for all calls with the same lengths, and copies it to the
GPU; the forward kernel walks it (`fa3.schedules.ragged`). The lengths are those that
`fa3.primitives.ragged_lengths` reads on a GPU, with arrays in place of tensors.

Whole tiles are taken from the table, longest first, which balances many of them. With few, the SMs
wait for the longest ones: `Cutting` lays out parts of tiles for all SMs instead, as the planner of
dense calls does (`fa3.schedules.split`), if that is predicted to end clearly sooner. It takes the
host 1 to 5 ms, for all layers of a model: it is not tried where there is little to gain.
"""

from typing import Any, NamedTuple

import numpy as np

from fa3.kernels.tile_table import (
    BLOCKS_OF_ENDS,
    DECODE_TILE_N,
    KEYS_OF_DECODING,
    MORE_BESIDE,
    MOST_BESIDE,
)
from fa3.planning.tile_costs import TileCosts
from fa3.primitives.divisor import PlainDivisor
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import ROWS
from fa3.problem import Window
from fa3.schedules.ragged import (
    CTAS_BESIDE,
    NUM_RECORDS,
    RECORD,
    TABLE_HEADER,
    RaggedOrder,
    TileRecord,
)
from fa3.schedules.split import Cuts, KeyRanges, RaggedSplit, last_end
from fa3.scores.masks import Band, Blocks, Sequence

MOST_ROUNDS = 8
"""Tiles for each SM up to which cutting is tried."""

LEAST_GAIN = 0.1
"""Share of the time of whole tiles that cutting must save at least."""

LEAST_US = 5.0
"""Microseconds that it must save at least."""


class Cutting(NamedTuple):
    """What tiles are cut by.

    Fields:
        heads, head_dim_v: query heads, and columns of their output.
        qhead_per_kvhead: query heads that share one key/value head.
        rows_of_section: of `RaggedOrder`.
        costs: of a tile.
    """

    heads: int
    head_dim_v: int
    qhead_per_kvhead: int
    rows_of_section: int
    costs: TileCosts

    def cut(self, table: np.ndarray, kind: "TableKind") -> RaggedSplit | None:
        """The tiles of a table, cut; None if whole tiles are about as fast.

        Args:
            kind: of the table.
        """
        num_tiles, num_ctas = int(table[NUM_RECORDS]) * self.heads, kind.num_ctas
        if not 0 < num_tiles <= MOST_ROUNDS * num_ctas:
            return None
        ranges = KeyRanges.of(self.blocks_of_tiles(table, kind), self.costs)
        times = ranges.end_blocks - ranges.first_blocks + ranges.unit + ranges.masks
        whole = end_of_longest_first(times, num_ctas)
        least = max(LEAST_GAIN * whole, LEAST_US / self.costs.full_us)
        if whole - times.sum() / num_ctas < least:
            return None
        split: Any = RaggedSplit.cut(self.order(table), num_ctas, ranges)
        return split if whole - end_of_split(split, ranges) >= least else None

    def order(self, table: np.ndarray) -> Any:
        """The `RaggedOrder` of a table on the host, where it divides as usual."""
        heads: Any = PlainDivisor(self.heads)
        return RaggedOrder.of(table, heads, self.qhead_per_kvhead, self.rows_of_section)

    def blocks_of_tiles(self, table: np.ndarray, kind: "TableKind") -> Blocks:
        """The key blocks of every tile, by its number, in arrays."""
        records = records_of(table)
        sequence = Sequence(records.seqlen_q, records.seqlen_k, kind.window)
        record_blocks = kind.band.key_blocks(
            records.m_block * kind.tile_m, kind.tile_m, kind.tile_n, sequence
        )
        tile_numbers = self.records_of_tiles(records, self.order(table))
        return Blocks(
            *(np.broadcast_to(n, records.batch.shape)[tile_numbers] for n in record_blocks)
        )

    def records_of_tiles(self, records: Any, order: RaggedOrder) -> np.ndarray:
        """Which record has the row block of a tile, by the tile's number.

        Args:
            records: a `TileRecord` of arrays.
        """
        own = np.repeat(np.arange(len(records.batch)), self.heads)
        if np.maximum(records.seqlen_k, 1).max() <= order.rows_at_once:
            return own
        m_block, num_m_blocks, walked = (
            field[own] for field in (records.m_block, records.num_m_blocks, records.seqlen_k)
        )
        head = np.arange(len(own)) % self.heads
        number = (num_m_blocks - 1 - m_block) * self.heads + head
        _, in_sections = order.place(number, num_m_blocks, walked)
        has_sections = np.maximum(walked, 1) > order.rows_at_once
        # A sequence's records follow one another, its last row block first.
        return own + np.where(has_sections, m_block - in_sections, 0)


class TableKind(NamedTuple):
    """What a table depends on besides lengths.

    Fields:
        tile_m, tile_n, band: of a `fa3.kernels.tile_table.TileTable`.
        window, short_queries, qhead_per_kvhead, num_ctas: of `TileTableArguments`.
        cutting: what tiles are cut by where that pays; None if they stay whole.
    """

    tile_m: int
    tile_n: int
    band: Band
    window: Window
    short_queries: int
    qhead_per_kvhead: int
    num_ctas: int
    cutting: Cutting | None = None

    def cut(self, table: np.ndarray) -> RaggedSplit | None:
        """The tiles of a table that `table` has made, cut; None if they stay whole."""
        return None if self.cutting is None else self.cutting.cut(table, self)

    def table(self, queries: RaggedLengths, keys: RaggedLengths | CacheLengths) -> np.ndarray:
        """The table, int32, with room for what is in it: one record at least.

        Sequences are in order of the key blocks of their longest tile, and of their number where
        that is the same. The kernel on the GPU tells fewer amounts of work apart, and puts equal
        ones in any order.
        """
        at = np.arange(queries.num_sequences)
        begin_q, seqlen_q = queries.read(at)
        begin_k, seqlen_k = keys.read(at)
        num_tiles = (seqlen_q + self.tile_m - 1) // self.tile_m
        num_tiles[seqlen_q <= self.short_queries] = 0
        sequence = Sequence(seqlen_q, seqlen_k, self.window)
        # Of the first and of the last tile of each sequence, at once: numpy takes its time by call.
        rows = np.zeros((2, len(at)), np.int64)
        rows[1] = np.maximum(num_tiles - 1, 0) * self.tile_m
        blocks = self.blocks(rows, self.tile_m, self.tile_n, sequence)
        order = np.argsort(-blocks.max(0), kind="stable")
        order = order[num_tiles[order] > 0]
        tiles = num_tiles[order]
        end = np.cumsum(tiles)
        number = int(end[-1]) if len(end) else 0
        owner = np.repeat(order, tiles)
        table = np.zeros(TABLE_HEADER + RECORD * max(number, 1), np.int32)
        records = table[TABLE_HEADER:].reshape(-1, RECORD)[:number].T
        left = np.repeat(end, tiles) - 1 - np.arange(number)
        owner_values = (
            values[owner] for values in (begin_q, seqlen_q, begin_k, seqlen_k, num_tiles)
        )
        # In the order of `TileRecord`, which has a word less than its place.
        for row, values in zip(records, (left, owner, *owner_values), strict=False):
            row[:] = values
        table[NUM_RECORDS] = number
        table[CTAS_BESIDE] = self.ctas_beside(num_tiles, seqlen_q, seqlen_k, blocks)
        return table

    def blocks(self, row: np.ndarray, num_rows, tile_n: int, sequence: Sequence) -> np.ndarray:
        """How many key blocks rows touch, sequence by sequence."""
        found = self.band.key_blocks(row, num_rows, tile_n, sequence)
        return np.broadcast_to(found.end - found.begin, row.shape)

    def ctas_beside(
        self,
        num_tiles: np.ndarray,
        seqlen_q: Any,
        seqlen_k: Any,
        blocks: np.ndarray,
    ) -> int:
        """CTAs of the decode kernel: `DecodeShare.ctas_beside`, which says why.

        Args:
            blocks: of the first and of the last tile of each sequence.
        """
        is_short = (num_tiles == 0) & (seqlen_q > 0)
        if not is_short.any():
            return 0
        ratio = self.qhead_per_kvhead
        long = float((num_tiles * ratio * (blocks.sum(0) / 2 + BLOCKS_OF_ENDS)).sum())
        seqlen_q, seqlen_k = seqlen_q[is_short], seqlen_k[is_short]
        row_blocks = (seqlen_q * ratio + ROWS - 1) // ROWS
        short_sequence = Sequence(seqlen_q, seqlen_k, self.window)
        read = self.blocks(0 * row_blocks, seqlen_q, DECODE_TILE_N, short_sequence)
        short = float((row_blocks * read).sum()) * (KEYS_OF_DECODING / self.tile_n)
        share = MORE_BESIDE * short / max(long + short, 1.0)
        if share >= MOST_BESIDE:
            return self.num_ctas
        return min(int(self.num_ctas * share) + 1, self.num_ctas)


def records_of(table: np.ndarray) -> Any:
    """The records of a table, a `TileRecord` of arrays."""
    words = table[TABLE_HEADER:].reshape(-1, RECORD)[: table[NUM_RECORDS]].astype(np.int64)
    return TileRecord(*words.T[: len(TileRecord._fields)])


def end_of_longest_first(times: np.ndarray, num_ctas: int) -> float:
    """About when the last CTA is done, if each takes the longest tile that is left."""
    # Some CTA has at least n tiles that are no shorter than the one with number n * num_ctas.
    in_rounds = np.sort(times)[::-1][::num_ctas]
    return float(max(times.sum() / num_ctas, (in_rounds * np.arange(1, len(in_rounds) + 1)).max()))


def end_of_split(split: RaggedSplit, ranges: KeyRanges) -> float:
    """When the last CTA is done with its segments."""
    tile, first, end, _ = split.parts
    begin = ranges.first_blocks[tile]
    cuts = Cuts(tile, first - begin, end - begin, split.owners)
    blocks = ranges.end_blocks - ranges.first_blocks
    return last_end(cuts, blocks, np.zeros(split.num_clusters), ranges)
