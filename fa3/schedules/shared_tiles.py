"""Shared tiles: rows of several short sequences in one tile.

All rows of q are one line, whatever sequences they belong to, and so are all rows of k. A tile is
`tile_m` consecutive rows of q, for every query head; its keys are those that any of its rows sees.
`fa3.kernels.shared_tile_table` writes a record of each tile and one of each row, from lengths that
are on the GPU; `MultiSequenceTiles` walks the tiles, `fa3.scores.masks` masks by rows.

Keys that a row does not see have the weight 0. But 0 times NaN is NaN, so what other sequences hold
could reach a row of the tile. Rows that are not finite are therefore marked, and computed again in
a tile that has rows of one sequence only (`fa3.schedules.recompute.RecomputeRaggedTiles`).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.wgmma import ROWS
from fa3.schedules.ragged import RaggedOrder, RaggedTiles, TableOrder
from fa3.scores.masks import Band, Sequence

HALVES = 2
"""Warpgroups that share a tile. Each walks the keys that its own rows see."""


class MultiSequenceRecord(NamedTuple):
    """A tile with rows of several sequences, for every query head."""

    m_block: int  # the tile's number along the rows of q
    # begin_k, seqlen_k: rows of k and v; outside of them no row of the tile sees a key.
    begin_k: int
    seqlen_k: int
    first_end: int  # keys from `begin_k` on to the last one that the first half of the rows sees
    second_begin: int  # keys from `begin_k` on to the first one that the second half sees
    whole: int  # bit h says that all rows of half h are used

    @classmethod
    def of(cls, m_block, first_keys: tuple, end_keys: tuple, whole) -> "MultiSequenceRecord":
        """Return a tile's record, from the keys that each half sees.
        A half that sees no key has a first key past all keys and the end 0."""
        begin = smaller(*first_keys)
        end = larger(larger(*end_keys), begin)
        first_end, second_begin = larger(end_keys[0], begin), smaller(first_keys[1], end)
        return cls(m_block, begin, end - begin, first_end - begin, second_begin - begin, whole)

    @property
    def batch(self) -> int:
        """Always 0: a shared tile has no single sequence."""
        return 0


class MultiSequenceTile(NamedTuple):
    """What a mask knows of a tile with rows of several sequences."""

    seqlen_q: int  # rows of q, of all tiles
    record: MultiSequenceRecord

    @property
    def seqlen_k(self):
        """Keys of the tile."""
        return self.record.seqlen_k

    def keys_of(self, row_begin, num_rows) -> tuple:
        """Return the keys, [first, end), that a half or all rows see."""
        record, row_last = self.record, row_begin + num_rows - 1
        # 1 where the rows begin or end in the second half, else 0.
        first_half, last_half = ((row // ROWS) % HALVES for row in (row_begin, row_last))
        last_half = larger(last_half, first_half)
        first = first_half * record.second_begin
        return first, record.first_end + last_half * (record.seqlen_k - record.first_end)

    def is_whole(self, half):
        """Whether all rows of a half of the tile are used."""
        return (self.record.whole >> half) % 2 == 1


def keys_seen(query, sequence: Sequence, begin_k, band: Band) -> tuple:
    """Rows of k that a query sees, [first, end)."""
    first, end = band.key_range(query, sequence)
    end = larger(smaller(end, sequence.seqlen_k), 0)
    return begin_k + smaller(larger(first, 0), end), begin_k + end


@dataclass(frozen=True)
class MultiSequenceOrder(RaggedOrder):
    """Numbers shared tiles: the heads of a tile's rows are neighbours."""

    record_type: ClassVar[type] = MultiSequenceRecord

    tile_of = TableOrder.tile_of


@dataclass(frozen=True)
class MultiSequenceTiles(RaggedTiles):
    """Persistent CTAs take shared tiles from a table in device memory."""

    name: ClassVar[str] = "short packed sequences that share tiles"
