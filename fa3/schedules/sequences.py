"""The sequences of a call: their lengths, and where keys are.

`Dense` and `Ragged` are for forward and backward kernels, `MultiSequence` for the forward kernel,
`Cached` for the decode kernel. All turn what they know of a sequence into what masks take. The same
arithmetic runs on Python ints (reference, tests) and on values inside a kernel.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.cache_blocks import CacheTables, Keys
from fa3.primitives.ragged_lengths import RaggedLengths, first_group, key_groups, read_early
from fa3.primitives.tma import DenseRows, RaggedRows
from fa3.primitives.wgmma import ROWS
from fa3.problem import KEYS_OF_GROUP, Window
from fa3.schedules.order import Segment, Tile
from fa3.schedules.shared_tiles import MultiSequenceTile
from fa3.scores.masks import Blocks, Sequence

LONGEST = 2**31 - 2**20
"""Most keys of a sequence: 32 bits must also hold what is added to a key's position."""


def capacity_of(page_size, num_pages=1):
    """Most keys that a sequence may have; on host and in kernels.
    If a page table has room for more than `LONGEST`, its last pages are not used."""
    return page_size * smaller(num_pages, LONGEST // larger(page_size, 1))


class Dense(NamedTuple):
    """Sequences of equal lengths, each one a batch entry of the tensors."""

    seqlen_q: int
    seqlen_k: int
    window: Window

    def sequence(self, segment: Segment) -> Sequence:
        """The segment's sequence, for a mask."""
        return Sequence(self.seqlen_q, self.seqlen_k, self.window)

    def queries(self, segment: Segment) -> DenseRows:
        """Where Q and O rows are; likewise K, V, dK and dV."""
        return DenseRows(segment.tile.batch)

    keys = values_transposed = gradients_of_keys = queries

    def place(self, tile: Tile, segment: Segment, row) -> tuple:
        """Where a row lies in (batch, heads, seqlen_q)."""
        return tile.batch, tile.head, row


class Ragged(NamedTuple):
    """Packed sequences; a segment's record says where its sequence is."""

    window: Window

    def sequence(self, segment: Segment) -> Sequence:
        record = segment.record
        return Sequence(record.seqlen_q, record.seqlen_k, self.window)

    def queries(self, segment: Segment) -> RaggedRows:
        return RaggedRows(segment.record.begin_q, segment.record.seqlen_q)

    def keys(self, segment: Segment) -> RaggedRows:
        return RaggedRows(segment.record.begin_k, segment.record.seqlen_k)

    def values_transposed(self, segment: Segment) -> RaggedRows:
        """Where the keys of V^T are."""
        begin = first_group(segment.record.begin_k, segment.tile.batch)
        return RaggedRows(begin, key_groups(segment.record.seqlen_k), KEYS_OF_GROUP)

    def keys_of_cache(self, segment: Segment, head, first) -> Keys:
        """A head's keys in a cache, from the first readable one."""
        record = segment.record
        return Keys(record.begin_k, head, Int32(0), first, record.seqlen_k - 1)

    def gradients_of_keys(self, segment: Segment) -> RaggedRows:
        # Keys that are not used get 0.
        return RaggedRows(segment.record.begin_k, segment.record.owned_k)

    def place(self, tile: Tile, segment: Segment, row) -> tuple:
        """Where a row lies in (1, heads, total_q)."""
        return 0, tile.head, segment.record.begin_q + row


class MultiSequence(NamedTuple):
    """Packed sequences that share tiles: the rows of all are one line."""

    total_q: int  # rows of q

    def sequence(self, segment: Segment) -> MultiSequenceTile:
        return MultiSequenceTile(self.total_q, segment.record)

    def queries(self, segment: Segment) -> RaggedRows:
        return RaggedRows(0, self.total_q)

    def keys(self, segment: Segment) -> RaggedRows:
        return RaggedRows(segment.record.begin_k, segment.record.seqlen_k)

    def place(self, tile: Tile, segment: Segment, row) -> tuple:
        """Where a row lies in (1, heads, total_q)."""
        return 0, tile.head, row


@dataclass(frozen=True)
class Cached:
    """Sequences whose keys are in a cache, or packed.
    Their lengths, if they differ, are in device memory.

    `read` returns (keys including padding, padding), and with packed queries also the first row and
    the number of queries; a cursor can carry that. To a packed sequence all rows before its first
    key are padding. A sequence with packed queries with more queries than
    `seqlen_q` has none here: it is another kernel's, or the call is wrong. A sequence without
    queries has no keys either, so that hardly anything is read for it.
    """

    num_sequences: int  # sequences of the call
    # (batch,) int32, keys of the sequences, padding included; None if they are packed, or all have
    # `capacity`.
    seqlens: cute.Tensor | None
    seqlen_new: int  # how many keys each has beyond these, if there is room
    tables: CacheTables
    mask: object
    seqlen_q: int  # queries of each sequence; of packed ones the most that one may have
    capacity: int  # most keys of a sequence; longer lengths are cut to it
    window: Window
    tile_n: int
    # Whether the previous kernel may still be running; see `fa3.primitives.ragged_lengths`.
    is_early: bool = False
    # Which rows of q each sequence has, if sequences have different numbers of queries.
    packed: RaggedLengths | None = None
    rows_of_query: int = 1  # rows that a query has in a tile: a key/value head's query heads
    # Which rows of K and V each sequence has, if keys are packed.
    packed_keys: RaggedLengths | None = None

    def read(self, batch) -> tuple:
        if self.packed_keys is None:
            seqlen = self.capacity
            if self.seqlens is not None:
                seqlen = self.count(self.seqlens, batch)
                seqlen = seqlen + smaller(self.seqlen_new, self.capacity - seqlen)
            keys = seqlen, self.count(self.tables.leftpad, batch)
        else:
            begin, length = self.packed_keys.read(batch, self.entry)
            keys = begin + smaller(length, self.capacity), begin
        if self.packed is None:
            return keys
        first, count = self.packed.read(batch, self.entry)
        is_longer = smaller(larger(count - self.seqlen_q, 0), 1)
        return *keys, first, count * (1 - is_longer)

    def queries(self, length: tuple) -> tuple:
        """The first row of a sequence's queries, and their number."""
        return (0, self.seqlen_q) if self.packed is None else length[2:]

    def m_blocks(self, length: tuple):
        """Row blocks of a head; None if all sequences have equally many."""
        if self.packed is None:
            return None
        _, count = self.queries(length)
        return (count * self.rows_of_query + ROWS - 1) // ROWS

    def count(self, table: cute.Tensor | None, batch):
        """A table's number of keys, limited to the cache; 0 without one."""
        if table is None:
            # A cursor carries this value: inside a kernel it must be an Int32.
            return 0 if isinstance(self.capacity, int) else Int32(0)
        return larger(smaller(self.entry(table, batch), self.capacity), 0)

    def entry(self, table: cute.Tensor, batch):
        return read_early(table, batch) if self.is_early else table[batch]

    def sequence(self, length: tuple) -> Sequence:
        """The sequence for a mask: key 0 is the first after padding."""
        seqlen, leftpad, *_ = length
        _, seqlen_q = self.queries(length)
        seqlen_k = larger(seqlen - leftpad, 0)
        if self.packed is not None:
            seqlen_k = seqlen_k * smaller(seqlen_q, 1)
        return Sequence(seqlen_q, seqlen_k, self.window)

    def blocks(self, length: tuple) -> Blocks:
        """Key blocks that the queries of a sequence touch."""
        sequence = self.sequence(length)
        return self.mask.key_blocks(0, sequence.seqlen_q, self.tile_n, sequence)

    def num_blocks(self, length: tuple):
        blocks = self.blocks(length)
        return blocks.end - blocks.begin

    def blocks_at(self, walk, cursor):
        """First and last key block of the segment at a cursor."""
        first = self.blocks(cursor.length).begin
        return first + cursor.block, first + walk.end(cursor) - 1

    def keys(self, tile, length: tuple) -> Keys:
        """The keys of a tile's sequence and head."""
        tables, row, (_, leftpad, *_) = self.tables, tile.batch, length
        if tables.batch_idx is not None:
            # The row is past the last sequence only if lengths change while they are read early.
            row = self.entry(tables.batch_idx, smaller(row, self.num_sequences - 1))
        if tables.page_table is not None:
            row = larger(smaller(row, tables.page_table.shape[0] - 1), 0)
        sequence = self.sequence(length)
        first, _ = self.mask.key_range(0, sequence)
        return Keys(row, tile.head, leftpad, first, sequence.seqlen_k - 1)
