"""The schedule of packed sequences: a table of tiles that a kernel makes from lengths on the GPU.

`fa3.kernels.tile_table` writes the table, the forward kernel walks it. A record has all that a CTA
must know of a tile, so that no length is read twice. A sequence's records are behind one another,
its last rows first; the sequences with most work come first. CTAs take the next tile from a
counter, which is the table's first word: longest first, and balanced whatever the lengths are.

There are as many tiles for each record as there are query heads, so tile i belongs to the sequence
of record i // heads. Inside of a sequence, tiles are in sections of heads whose K and V fit in L2
together, as in `TileOrder`: a section has all row blocks of its heads.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.divisor import Divisor
from fa3.schedules.dynamic import SLOTS, Dynamic, DynamicProducer
from fa3.schedules.segment import Segment, Tile

TABLE_HEADER = 8
"""Words before the first record: tiles taken, unused, number of records, unused."""

NUM_RECORDS = 2
"""The word of the header that has the number of records."""

RECORD = 8
"""Words of a record: those of `TileRecord`, and one unused one."""


class TileRecord(NamedTuple):
    """A tile of a packed sequence, for every query head.

    Fields:
        m_block, batch: the tile: `m_block` counts inside the sequence, `batch` is the sequence.
        begin_q, seqlen_q: the sequence's first row in q, and its number of queries.
        begin_k, seqlen_k: the sequence's first row in k and v, and its number of keys.
        num_m_blocks: row blocks of the sequence.
    """

    m_block: int
    batch: int
    begin_q: int
    seqlen_q: int
    begin_k: int
    seqlen_k: int
    num_m_blocks: int


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
        index: the next tile.
        words: the record of its number.
        taken: how many tiles had been taken when the tile after it was; lane 0 knows.
    """

    index: int
    words: tuple
    taken: int


class ProducerCursor(NamedTuple):
    """A `RaggedCursor`, and what has been asked for already."""

    present: RaggedCursor
    awaited: Awaited


@dataclass(frozen=True)
class RaggedOrder:
    """Numbers the tiles of packed sequences.

    Fields:
        table: int32; how many of its records are used only the GPU knows.
        heads: query heads.
        heads_of_key: query heads that share one key/value head.
        rows_of_section: rows of K and V of one head that fit in L2.
    """

    table: cute.Tensor
    heads: Divisor
    heads_of_key: int
    rows_of_section: int

    @property
    def num_tiles(self):
        """Tiles that the table has room for."""
        return (self.table.shape[0] - TABLE_HEADER) // RECORD * self.heads.value

    @property
    def num_used(self):
        """Tiles that the table has."""
        return cute.arch.make_warp_uniform(self.table[NUM_RECORDS] * self.heads.value)

    def ask(self, index) -> tuple:
        """Load the words of the record that has the number of this tile."""
        first = TABLE_HEADER + self.heads.quotient(index) * RECORD
        record = cute.make_tensor((self.table.iterator + first).align(16), cute.make_layout(RECORD))
        words = cute.make_rmem_tensor(RECORD, Int32)
        cute.autovec_copy(record, words)
        return tuple(words[i] for i in range(RECORD))

    def tile(self, index, words: tuple) -> tuple[Int32, TileRecord]:
        """The head and the record of the tile with this number, from the words that were loaded."""
        found = TileRecord(*map(cute.arch.make_warp_uniform, words[: len(TileRecord._fields)]))
        heads = self.heads.value
        before = found.num_m_blocks - 1 - found.m_block
        number = index - self.heads.quotient(index) * heads + before * heads
        head, m_block = self.place(number, found.num_m_blocks, found.seqlen_k)
        return head, found._replace(m_block=m_block)

    def place(self, number, num_m_blocks, seqlen_k) -> tuple:
        """The head and row block of a sequence's tile with this number."""
        heads = self.heads.value
        fitting = larger(self.rows_of_section // larger(seqlen_k, 1), 1)
        of_section = smaller(fitting * self.heads_of_key, heads)
        section = number // (num_m_blocks * of_section)
        first_head = section * of_section
        of_this = smaller(of_section, heads - first_head)
        rest = number - first_head * num_m_blocks
        rank = rest // of_this
        return first_head + rest - rank * of_this, num_m_blocks - 1 - rank

    def segment(self, index) -> Segment:
        """The tile with this number."""
        return segment_of(index, *self.tile(index, self.ask(index)))


def segment_of(index, head, record: TileRecord) -> Segment:
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
    told: ClassVar[int] = 8
    """The number, the head, and the record up to `seqlen_k`."""

    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS

    @classmethod
    def on_device(cls, order: RaggedOrder, num_clusters, state) -> "RaggedTiles":
        return cls(order, num_clusters, order.table)

    def for_producer(self) -> "RaggedProducer":
        return RaggedProducer(**vars(self))

    def first(self, cluster) -> RaggedCursor:
        zero = cluster * 0
        nothing = TileRecord(*(zero for _ in TileRecord._fields))
        return RaggedCursor(cluster, zero, zero, zero, nothing)

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        end = self.order.num_used
        index = within(cursor.index, end)
        head, record = self.order.tile(index, self.order.ask(index))
        return RaggedCursor(cursor.index, cursor.count, end, head, record)

    def next(self, cursor: RaggedCursor) -> RaggedCursor:
        index, head, *record = self.hear(cursor.count)
        # Consumers have no use for the number of row blocks.
        found = TileRecord(*record, cursor.record.num_m_blocks)
        return RaggedCursor(index, cursor.count + 1, cursor.end, head, found)

    def is_valid(self, cursor: RaggedCursor):
        return cursor.index < cursor.end

    def segment(self, cursor: RaggedCursor) -> Segment:
        return segment_of(cursor.index, cursor.head, cursor.record)

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
        return Awaited(index, self.order.ask(within(index, end)), self.take())

    def next(self, cursor: ProducerCursor) -> ProducerCursor:
        present, (index, words, taken) = cursor
        head, record = self.order.tile(within(index, present.end), words)
        self.tell(present.count, index, head, *record)
        present = RaggedCursor(index, present.count + 1, present.end, head, record)
        later = 2 * self.num_clusters + cute.arch.shuffle_sync(taken, 0)
        return ProducerCursor(present, self.awaited(later, present.end))

    def is_valid(self, cursor: ProducerCursor):
        return super().is_valid(cursor.present)

    def segment(self, cursor: ProducerCursor) -> Segment:
        return super().segment(cursor.present)
