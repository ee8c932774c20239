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
from fa3.schedules.dynamic import SLOTS, Dynamic, DynamicProducer
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

    @classmethod
    def of(cls, words: tuple) -> "TileRecord":
        """The record in a table's words, which all lanes of a warp have loaded."""
        return cls(*map(cute.arch.make_warp_uniform, words[: len(cls._fields)]))


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


class Awaited(NamedTuple):
    """What the producer knows of tiles that come after the present one; none of it has been looked
    at, so that nothing has waited for it.

    Fields:
        index, head: the next tile.
        words: its record.
        taken: how many tiles had been taken when the tile after it was; lane 0 knows.
    """

    index: int
    head: int
    words: tuple
    taken: int


class ProducerCursor(NamedTuple):
    """A `RaggedCursor`, and what has been asked for already."""

    present: RaggedCursor
    awaited: Awaited


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
        return cute.arch.make_warp_uniform(self.table[NUM_RECORDS] * self.heads.value)

    def ask(self, index) -> tuple[tuple, Int32]:
        """Load the record of the tile with this number: its words, and the tile's head."""
        number = self.heads.quotient(index)
        record = (self.table.iterator + (TABLE_HEADER + number * RECORD)).align(16)
        words = cute.make_rmem_tensor(RECORD, Int32)
        cute.autovec_copy(cute.make_tensor(record, cute.make_layout(RECORD)), words)
        return tuple(words[i] for i in range(RECORD)), index - number * self.heads.value

    def segment(self, index) -> Segment:
        """The tile with this number."""
        words, head = self.ask(index)
        return segment_of(index, TileRecord.of(words), head)


def segment_of(index, record: TileRecord, head) -> Segment:
    """A tile of packed sequences, as a whole."""
    return Segment(Tile(record.m_block, head, record.batch), record=record, number=index)


@dataclass(frozen=True)
class RaggedTiles(Dynamic):
    """Persistent CTAs take tiles of packed sequences from a table in device memory.

    The first two tiles of a CTA are those at its number and one round further, so that the
    producer can ask for records and for tiles one tile before it needs them.

    Fields:
        order: a `RaggedOrder`.
        counters: the table, whose first word counts the tiles taken.
    """

    name: ClassVar[str] = "ragged"
    is_ragged: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    num_counters: ClassVar[int] = 0
    told: ClassVar[int] = 2 + len(TileRecord._fields)
    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS

    @classmethod
    def on_device(cls, order: RaggedOrder, num_clusters, state) -> "RaggedTiles":
        return cls(order, num_clusters, order.table)

    def for_producer(self) -> "RaggedProducer":
        return RaggedProducer(**vars(self))

    def first(self, cluster) -> RaggedCursor:
        zero = cluster * 0
        return RaggedCursor(cluster, zero, zero, zero, TileRecord(*(zero for _ in range(6))))

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        end = self.order.num_used
        words, head = self.order.ask(within(cursor.index, end))
        return RaggedCursor(cursor.index, cursor.count, end, head, TileRecord.of(words))

    def next(self, cursor: RaggedCursor) -> RaggedCursor:
        index, head, *record = self.hear(cursor.count)
        return RaggedCursor(index, cursor.count + 1, cursor.end, head, TileRecord(*record))

    def is_valid(self, cursor: RaggedCursor):
        return cursor.index < cursor.end

    def segment(self, cursor: RaggedCursor) -> Segment:
        return segment_of(cursor.index, cursor.record, cursor.head)

    def finish(self) -> None:
        """Nothing: every launch has a table of its own."""


def within(index, end):
    """The number of a tile whose record may be read: past the end that of the last one."""
    return cutlass.max(cutlass.min(index, end - 1), 0)


@dataclass(frozen=True)
class RaggedProducer(RaggedTiles, DynamicProducer):
    """`RaggedTiles` as the producer warp walks it: takes tiles, and fills the mailbox."""

    def begin(self, cursor: RaggedCursor) -> ProducerCursor:
        present, following = super().begin(cursor), cursor.index + self.num_clusters
        return ProducerCursor(present, self.awaited(following, present.end))

    def awaited(self, index, end) -> Awaited:
        """Ask for the record of a tile, and for one more tile."""
        words, head = self.order.ask(within(index, end))
        return Awaited(index, head, words, self.take())

    def next(self, cursor: ProducerCursor) -> ProducerCursor:
        present, (index, head, words, taken) = cursor
        record = TileRecord.of(words)
        self.tell(present.count, index, head, *record)
        present = RaggedCursor(index, present.count + 1, present.end, head, record)
        later = 2 * self.num_clusters + cute.arch.shuffle_sync(taken, 0)
        return ProducerCursor(present, self.awaited(later, present.end))

    def is_valid(self, cursor: ProducerCursor):
        return super().is_valid(cursor.present)

    def segment(self, cursor: ProducerCursor) -> Segment:
        return super().segment(cursor.present)
