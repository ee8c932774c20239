"""The schedule of packed sequences: a table of tiles, made from lengths.

`fa3.kernels.tile_table` writes the table from lengths on the GPU; the forward kernel walks it. A
record has all that a CTA must know of a tile, so that no length is read twice. A sequence's records
follow one another, its last rows first; the sequences with most work come first. CTAs take the next
tile from a counter, the first word of the table: longest first, and balanced whatever the lengths
are.

There are as many tiles for each record as there are query heads, so tile i belongs to the sequence
of record i // heads. Inside of a sequence, tiles are in head groups whose K and V fit in L2
together, as in `TileOrder`: a head group has all row blocks of its heads.

The backward kernel walks a table of key tiles (`RaggedKeyTiles`), once for each head group,
sequence by sequence. So it can preprocess the queries of later head groups, and convert dQ of
earlier ones (`fa3.schedules.query_index`). Q, dO and dQ of a sequence's heads fit in L2 together.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import Divisor, larger, smaller
from fa3.schedules.dynamic import SLOTS, TILES_TAKEN, Dynamic
from fa3.schedules.order import Segment, Tile

TABLE_HEADER = 8
"""Words before the first record: tiles taken, CTAs that found none left, number of records, CTAs
of the decode kernel, unused."""

NUM_RECORDS = 2  # the word of the header that has the number of records

CTAS_BESIDE = 3
"""The word of the header that says how many CTAs the decode kernel has, which overlaps the forward
kernel; 0 if it has none."""

RECORD = 8  # words of a record: the fields of `TileRecord`, and one that a table of keys uses


class TileRecord(NamedTuple):
    """A tile of a packed sequence, for every query head."""

    # m_block, batch: the tile: `m_block` counts inside the sequence, `batch` is the sequence.
    m_block: int
    batch: int
    # begin_q, seqlen_q: the sequence's first row in q, and its number of queries.
    begin_q: int
    seqlen_q: int
    # begin_k, seqlen_k: the sequence's first row in k and v, and its number of keys. Of a cache,
    # its row there or in the page table.
    begin_k: int
    seqlen_k: int
    num_m_blocks: int  # row blocks of the sequence


class RaggedCursor(NamedTuple):
    """The CTA's present tile."""

    index: int  # its number: record * heads + head
    count: int  # how many tiles the CTA had before
    end: int  # number of all tiles
    head: int  # query head
    record: TileRecord  # the tile's record; anything if `index` is not below `end`
    # Result of the addition that took the next tile, in lane 0 of the producer warp; not read yet,
    # to hide its latency. None for consumers.
    taken: Int32 | None = None


@dataclass(frozen=True)
class TableOrder:
    """Numbers the tiles of a table, record by record, for all heads."""

    table: cute.Tensor  # int32; how many of its records are used only the GPU knows
    heads: Divisor  # heads that a record stands for

    record_type: ClassVar[type] = TileRecord

    @property
    def num_tiles(self):
        """Tiles that the table has room for."""
        return (self.table.shape[0] - TABLE_HEADER) // RECORD * self.heads.value

    @property
    def num_used(self):
        """Tiles that the table has."""
        return cute.arch.make_warp_uniform(self.table[NUM_RECORDS] * self.heads.value)

    @cute.jit
    def taken(self, turn: Int32, num_clusters: Int32, end: Int32) -> Int32:
        """The number of a turn's tile; `end` or more for none.
        CTA c takes the tile of turn c first. Those that wait for SMs until the decode kernel gives
        them back are the last ones, and would hold up the longest tiles: they get the shortest."""
        ctas_beside = self.table[CTAS_BESIDE]
        if turn >= num_clusters - ctas_beside and turn < end and num_clusters <= end:
            turn += end - num_clusters if turn < num_clusters else -ctas_beside
        return turn

    def tile(self, index) -> tuple[Int32, NamedTuple]:
        """The head and the record of the tile with this number."""
        number = self.heads.quotient(index)
        words = cute.make_rmem_tensor(RECORD, Int32)
        self.load(words, number)
        return self.tile_of(index, number, self.record(words))

    def tile_of(self, index, number, record) -> tuple[Int32, NamedTuple]:
        """The same, given the record with this number."""
        return index - number * self.heads.value, record

    def locate(self, index: Int32, end: Int32) -> tuple[Any, Int32]:
        """The first head of a tile's head group, and its number there.
        There is one head group."""
        return 0, index

    def load(self, words: cute.Tensor, number) -> None:
        """Load the words of the record with this number.
        Nothing waits for them until they are used."""
        first = (self.table.iterator + (TABLE_HEADER + number * RECORD)).align(16)
        cute.autovec_copy(cute.make_tensor(first, cute.make_layout(RECORD)), words)

    def record(self, words: cute.Tensor) -> NamedTuple:
        """The record whose words these are."""
        fields = range(len(self.record_type._fields))
        return self.record_type(*(cute.arch.make_warp_uniform(words[i]) for i in fields))

    def segment(self, index) -> Segment:
        """The tile with this number."""
        return segment_of(index, *self.tile(index))


@dataclass(frozen=True)
class RaggedOrder(TableOrder):
    """Numbers packed sequences' tiles of all query heads, in head groups."""

    heads_of_key: int  # query heads that share one key/value head
    rows_of_group: int  # rows of K and V of one head that fit in L2
    rows_at_once: int  # rows of all heads that do

    @classmethod
    def of(cls, table, heads: Divisor, heads_of_key, rows_of_group) -> "RaggedOrder":
        """The order of a table, with what is divided before the launch."""
        at_once = rows_of_group // (heads.value // heads_of_key)
        return cls(table, heads, heads_of_key, rows_of_group, at_once)

    def tile_of(self, index, number, record) -> tuple[Int32, TileRecord]:
        head, m_block = self.within(index, number, record)
        return head, record._replace(m_block=m_block)

    @cute.jit
    def within(self, index: Int32, number: Int32, record: TileRecord) -> tuple[Int32, Int32]:
        """The head and row block of a tile."""
        head, m_block = index - number * self.heads.value, record.m_block
        if larger(record.seqlen_k, 1) > self.rows_at_once:
            head, m_block = self.in_groups(index, number, record)
        return head, m_block

    def in_groups(self, index, number, record) -> tuple:
        """A tile's head and row block, given the record with this number."""
        heads, num_m_blocks = self.heads.value, record.num_m_blocks
        before = num_m_blocks - 1 - record.m_block
        # From here on the number counts the tiles of the sequence.
        number = index - number * heads + before * heads
        fitting = larger(self.rows_of_group // larger(record.seqlen_k, 1), 1)
        heads_of_group = smaller(smaller(fitting, heads) * self.heads_of_key, heads)
        # If one group has fewer heads, it is the first: the tiles at the end, which fill the gaps
        # between CTAs, are then as many as they can be.
        missing = (heads + heads_of_group - 1) // heads_of_group * heads_of_group - heads
        group = (number + missing * num_m_blocks) // (num_m_blocks * heads_of_group)
        end_head = (group + 1) * heads_of_group - missing
        first_head = larger(end_head - heads_of_group, 0)
        heads_here = end_head - first_head
        rest = number - first_head * num_m_blocks
        rank = rest // heads_here
        return first_head + rest - rank * heads_here, num_m_blocks - 1 - rank


def segment_of(index, head, record: TileRecord) -> Segment:
    """A tile of packed sequences, as a whole."""
    return Segment(Tile(record.m_block, head, record.batch), record=record, number=index)


@cute.jit
def write_record(table: cute.Tensor, place: Int32, record: tuple, is_one: cutlass.Boolean):
    """Write a record to a place of a table if `is_one`."""
    words = cute.make_rmem_tensor(RECORD, Int32)
    words.fill(0)
    for i in cutlass.range_constexpr(len(record)):
        words[i] = record[i]
    if is_one:
        target = (table.iterator + (TABLE_HEADER + place * RECORD)).align(16)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(RECORD)))


@dataclass(frozen=True)
class RaggedTiles(Dynamic):
    """Persistent CTAs take packed sequences' tiles from a table in device memory.
    The producer asks for a tile when it begins to load the one before. It does not where tiles wait
    for others (`asks_first`): a CTA keeps that tile while it works on the one before. The last CTA
    to finish resets the counters, as for `Dynamic`; these are the table's, if this launch alone
    walks it."""

    name: ClassVar[str] = "packed sequences"
    is_ragged: ClassVar[bool] = True
    told: ClassVar[int] = 8  # the number, the head, and the record's first six words
    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS
    # Nothing has waited for what the CTA asked for last: it must be counted before.
    order_of_finish: ClassVar[str] = "acq_rel"

    def first(self, cluster) -> RaggedCursor:
        zero = cluster * 0
        kind = self.order.record_type
        nothing = kind(*(zero for _ in kind._fields))
        return RaggedCursor(cluster, zero, zero, zero, nothing)

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        return self.asking(self.first_tile(cursor))

    @cute.jit
    def first_tile(self, cursor: RaggedCursor) -> RaggedCursor:
        # The record of the CTA's own number, nearly always its first tile's, comes with the header.
        # The table has room for it, since there are no more CTAs than it has room for tiles.
        order, words = self.order, cute.make_rmem_tensor(RECORD, Int32)
        first_number = order.heads.quotient(cursor.index)
        order.load(words, first_number)
        end = order.num_used
        index = order.taken(cursor.index, self.num_clusters, end)
        clamped = cutlass.max(cutlass.min(index, end - 1), 0)
        number = order.heads.quotient(clamped)
        if number != first_number:
            order.load(words, number)
        head, record = order.tile_of(clamped, number, order.record(words))
        return cursor._replace(index=index, end=end, head=head, record=record)

    def read(self, cursor: RaggedCursor) -> RaggedCursor:
        """The cursor with its tile's record; past the end the last one's."""
        index = cutlass.max(cutlass.min(cursor.index, cursor.end - 1), 0)
        first_head, number = self.order.locate(index, cursor.end)
        head, record = self.order.tile(number)
        return cursor._replace(head=first_head + head, record=record)

    def next(self, cursor: RaggedCursor) -> RaggedCursor:
        if self.is_producer:
            return self.take_next(cursor)
        index, head, *told = self.recv(cursor.count)
        # Consumers have no use for what they are not told.
        record = told[: len(cursor.record)]
        record = self.order.record_type(*record, *cursor.record[len(record) :])
        return RaggedCursor(index, cursor.count + 1, cursor.end, head, record)

    def take_next(self, cursor: RaggedCursor) -> RaggedCursor:
        """Take the next tile and tell consumers; the producer warp calls this."""
        taken = self.count(TILES_TAKEN) if self.asks_first else cursor.taken
        turn = self.num_given + cute.arch.shuffle_sync(taken, 0)
        index = self.order.taken(turn, self.num_clusters, cursor.end)
        following = self.read(cursor._replace(index=index, count=cursor.count + 1))
        self.send(cursor.count, index, following.head, *following.record[: self.told - 2])
        return self.asking(following)

    def asking(self, cursor: RaggedCursor) -> RaggedCursor:
        """The cursor after an early request for the next tile."""
        if not self.is_producer:
            return cursor
        return cursor._replace(taken=Int32(0) if self.asks_first else self.count(TILES_TAKEN))

    def is_valid(self, cursor: RaggedCursor):
        return cursor.index < cursor.end

    def segment(self, cursor: RaggedCursor) -> Segment:
        return segment_of(cursor.index, cursor.head, cursor.record)


class KeyTileRecord(namedtuple("KeyTileRecord", (*TileRecord._fields, "owned_k"))):
    """A key tile of a packed sequence; `m_block` counts key tiles.
    `owned_k` are the sequence's rows in k and v, also those that are not used."""

    __slots__ = ()


@dataclass(frozen=True)
class RaggedKeyOrder(TableOrder):
    """Numbers packed sequences' key tiles in head groups. Each has all sequences."""

    groups: Divisor  # how many there are; `heads` are the key/value heads of one

    record_type: ClassVar[type] = KeyTileRecord

    @classmethod
    def of(cls, table, heads_kv, heads_per_group) -> "RaggedKeyOrder":
        """The order of a table; head groups have equally many heads."""
        return cls(table, Divisor.of(heads_per_group), Divisor.of(heads_kv // heads_per_group))

    @property
    def num_tiles(self):
        return super().num_tiles * self.groups.value

    @property
    def num_used(self):
        return super().num_used * self.groups.value

    def group_of(self, head: Int32) -> Int32:
        """The head group of a head."""
        return self.heads.quotient(head)

    def tiles_in(self, group) -> Int32:
        """How many tiles a head group has: all have equally many."""
        return self.groups.quotient(self.num_used)

    @cute.jit
    def locate(self, index: Int32, end: Int32) -> tuple[Int32, Int32]:
        # There are few head groups: a division would take more registers than the producer has.
        per_group, first_head = larger(self.groups.quotient(end), 1), 0 * end
        while index >= per_group:
            index -= per_group
            first_head += self.heads.value
        return first_head, index


@dataclass(frozen=True)
class RaggedKeyTiles(RaggedTiles):
    """Persistent CTAs take packed key tiles from a table in device memory."""

    order: RaggedKeyOrder

    told: ClassVar[int] = 12
    """The number, the head, the whole record, and two to spare: a multiple of 4."""

    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS
    asks_first: ClassVar[bool] = True
    """In a fixed order CTAs wait for tiles with lower numbers."""

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        return self.next(cursor._replace(end=self.order.num_used))
