"""Where few tiles of packed sequences leave SMs idle, and the host knows the lengths: cut tiles.

Whole tiles are taken from a table, longest first, which balances many of them. With few, the SMs
wait for the longest ones: `Cutting` lays out parts of tiles for all SMs instead, as the planner of
dense calls does (`fa3.schedules.split`), if that is predicted to end clearly sooner. It takes the
host 1 to 5 ms, for all layers of a model: it is not tried where there is little to gain.
"""

from typing import Any, NamedTuple

import numpy as np

from fa3.planning.tile_costs import TileCosts
from fa3.primitives.divisor import PlainDivisor
from fa3.schedules.ragged import NUM_RECORDS, RECORD, TABLE_HEADER, RaggedOrder, TileRecord
from fa3.schedules.split import Cuts, KeyRanges, RaggedSplit, last_end
from fa3.scores.masks import Blocks, Sequence

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

    def cut(self, table: np.ndarray, kind) -> RaggedSplit | None:
        """The tiles of a table, cut; None if whole tiles are about as fast.

        Args:
            kind: the `fa3.planning.host_table.TableKind` of the table.
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

    def blocks_of_tiles(self, table: np.ndarray, kind) -> Blocks:
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
        # A sequence's records are behind one another, its last row block first.
        return own + np.where(has_sections, m_block - in_sections, 0)


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
