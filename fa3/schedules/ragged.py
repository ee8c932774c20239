"""The schedule of packed sequences: a table of tiles that a kernel makes from lengths on the GPU.

`fa3.kernels.tile_table` writes the table, the forward kernel walks it. A record has all that a CTA
must know of a tile, so that no length is read twice. Records are in order of falling work; each
stands for a tile of every query head. CTAs take the next record and head from a counter, which is
the table's first word: longest first, and balanced whatever the lengths are.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.divisor import Divisor
from fa3.schedules.dynamic import Dynamic, DynamicProducer
from fa3.schedules.segment import Segment, Tile

TABLE_HEADER = 8
"""Words before the first record: tiles taken, unused, number of records, unused."""

NUM_RECORDS = 2
"""The word of the header that has the number of records."""

RECORD = 8
"""Words of a record: those of `TileRecord`, and two unused ones."""


class TileRecord(NamedTuple):
    """A tile of a packed sequence, for every query head.

    Fields:
        m_block, batch: the tile: `m_block` counts inside the sequence, `batch` is the sequence.
        begin_q, seqlen_q: the sequence's first row in q, and its number of queries.
        begin_k, seqlen_k: the sequence's first row in k and v, and its number of keys.
    """

    m_block: int
    batch: int
    begin_q: int
    seqlen_q: int
    begin_k: int
    seqlen_k: int


class RaggedCursor(NamedTuple):
    """The CTA's present tile.

    Fields:
        index: its number: record * heads + head.
        count: how many tiles the CTA had before.
        end: number of all tiles.
        head: query head.
        record: the tile's record; anything if `index` is not below `end`.
    """

    index: int
    count: int
    end: int
    head: int
    record: TileRecord


@dataclass(frozen=True)
class RaggedOrder:
    """Numbers the tiles of packed sequences: record by record, and in a record head by head.

    Fields:
        table: int32; how many of its records are used only the GPU knows.
        heads: query heads.
    """

    table: cute.Tensor
    heads: Divisor

    @property
    def num_tiles(self):
        """Tiles that the table has room for."""
        return (self.table.shape[0] - TABLE_HEADER) // RECORD * self.heads.value

    @property
    def num_used(self):
        """Tiles that the table has."""
        return self.table[NUM_RECORDS] * self.heads.value

    def record_and_head(self, index) -> tuple[TileRecord, Int32]:
        """The record of the tile with this number, and its head."""
        number = self.heads.quotient(index)
        words = cute.make_tensor(
            (self.table.iterator + (TABLE_HEADER + number * RECORD)).align(16),
            cute.make_layout(RECORD),
        )
        found = cute.make_rmem_tensor(RECORD, Int32)
        cute.autovec_copy(words, found)
        record = (cute.arch.make_warp_uniform(found[i]) for i in range(len(TileRecord._fields)))
        return TileRecord(*record), index - number * self.heads.value

    def segment(self, index) -> Segment:
        """The tile with this number."""
        return segment_of(index, *self.record_and_head(index))


def segment_of(index, record: TileRecord, head) -> Segment:
    """A tile of packed sequences, as a whole."""
    return Segment(Tile(record.m_block, head, record.batch), record=record, number=index)


@dataclass(frozen=True)
class RaggedTiles(Dynamic):
    """Persistent CTAs take tiles of packed sequences from a table in device memory.

    Fields:
        order: a `RaggedOrder`.
        counters: the table, whose first word counts the tiles taken.
    """

    name: ClassVar[str] = "ragged"
    is_ragged: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    num_counters: ClassVar[int] = 0

    @classmethod
    def on_device(cls, order: RaggedOrder, num_clusters, state) -> "RaggedTiles":
        return cls(order, num_clusters, order.table)

    def for_producer(self) -> "RaggedProducer":
        return RaggedProducer(**vars(self))

    def first(self, cluster) -> RaggedCursor:
        nothing = TileRecord(*(cluster * 0 for _ in TileRecord._fields))
        return RaggedCursor(cluster, cluster * 0, cluster * 0, cluster * 0, nothing)

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        end = cute.arch.make_warp_uniform(self.order.num_used)
        return self.at(cursor.index, cursor.count, end)

    def next(self, cursor: RaggedCursor) -> RaggedCursor:
        return self.at(self.following(cursor.count), cursor.count + 1, cursor.end)

    def at(self, index, count, end) -> RaggedCursor:
        """The cursor at a tile. It reads the record at once, while the present tile is finished."""
        # Past the end the last record is read, never what is behind the table.
        read = cutlass.max(cutlass.min(index, end - 1), 0)
        record, head = self.order.record_and_head(read)
        return RaggedCursor(index, count, end, head, record)

    def is_valid(self, cursor: RaggedCursor):
        return cursor.index < cursor.end

    def segment(self, cursor: RaggedCursor) -> Segment:
        return segment_of(cursor.index, cursor.record, cursor.head)

    def finish(self) -> None:
        """Nothing: every launch has a table of its own."""


@dataclass(frozen=True)
class RaggedProducer(RaggedTiles, DynamicProducer):
    """`RaggedTiles` as the producer warp walks it: takes tiles, and fills the mailbox."""
