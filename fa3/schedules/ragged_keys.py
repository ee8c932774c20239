"""The schedule of the keys of packed sequences: a table of key tiles, which CTAs take in order.

`fa3.kernels.tile_table` writes the table on the GPU, the backward kernel walks it once for each
head group, sequence by sequence. So it can preprocess the queries of later head groups, convert dQ
of earlier ones (`fa3.schedules.query_index`), and Q, dO and dQ of a sequence's heads fit in L2
together.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import Divisor, larger
from fa3.schedules.dynamic import SLOTS
from fa3.schedules.ragged import RaggedCursor, RaggedTiles, TableOrder


class KeyTileRecord(NamedTuple):
    """A key tile of a packed sequence, for every key/value head."""

    # m_block, batch: the tile: `m_block` counts key tiles inside the sequence `batch`.
    m_block: int
    batch: int
    # begin_q, seqlen_q: the sequence's first row in q, and its number of queries.
    begin_q: int
    seqlen_q: int
    # begin_k, seqlen_k: the sequence's first row in k and v, and its number of keys.
    begin_k: int
    seqlen_k: int
    num_m_blocks: int  # tiles of the sequence
    owned_k: int  # its rows in k and v, also those that are not used


@dataclass(frozen=True)
class RaggedKeyOrder(TableOrder):
    """Numbers the key tiles of packed sequences, in head groups. Each has all sequences."""

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
        """The first head of a tile's head group, and the tile's number there.

        There are few head groups: a division would take more registers than the producer has.

        Args:
            end: tiles of all head groups.
        """
        per_group, first_head = larger(self.groups.quotient(end), 1), 0 * end
        while index >= per_group:
            index -= per_group
            first_head += self.heads.value
        return first_head, index


@dataclass(frozen=True)
class RaggedKeyTiles(RaggedTiles):
    """Persistent CTAs take key tiles of packed sequences from a table in device memory."""

    order: RaggedKeyOrder

    name: ClassVar[str] = "ragged keys"
    told: ClassVar[int] = 12
    """The number, the head, the whole record, and two to spare: a multiple of 4."""

    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS
    asks_early: ClassVar[bool] = False
    """In a fixed order CTAs wait for tiles with lower numbers."""

    @property
    def num_given(self):
        """None: CTAs also ask for their first tile, see `fa3.schedules.dynamic.InOrderQueue`."""
        return 0

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        return self.next(cursor._replace(end=self.order.num_used))

    def read(self, cursor: RaggedCursor) -> RaggedCursor:
        """The cursor with its tile's record; past the end the last one's."""
        index = cutlass.max(cutlass.min(cursor.index, cursor.end - 1), 0)
        first_head, number = self.order.locate(index, cursor.end)
        head, record = self.order.tile(number)
        return cursor._replace(head=first_head + head, record=record)
