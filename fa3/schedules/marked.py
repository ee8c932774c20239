"""Marked: tiles that the launch before has marked, to compute them again."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean

from fa3.schedules.dynamic import Cursor, Dynamic
from fa3.schedules.tiles import Tile

HEADER = 2
"""Numbers before the marks: whether there are any, and how many CTAs have seen to theirs."""


class Marks(NamedTuple):
    """Marks of all tiles of a launch.

    Fields:
        words: (HEADER + tiles,) int32, zero before a launch.
        num_m_blocks, num_heads: of the problem, in tiles of a CTA.
    """

    words: cute.Tensor
    num_m_blocks: int
    num_heads: int

    def place(self, tile: Tile):
        """Where a tile's mark is, not counting the header."""
        return (tile.batch * self.num_heads + tile.head) * self.num_m_blocks + tile.m_block

    def tile(self, place) -> Tile:
        """The tile whose mark is here; the inverse of `place`."""
        head = place // self.num_m_blocks
        batch = head // self.num_heads
        return Tile(place - head * self.num_m_blocks, head - batch * self.num_heads, batch)

    @cute.jit
    def add_if(self, failed: Boolean, tile: Tile):
        """Mark a tile if it failed for this thread; any number of threads may mark the same one."""
        if failed:
            self.words[HEADER + self.place(tile)] = 1
            self.words[0] = 1


@dataclass(frozen=True)
class Marked(Dynamic):
    """CTAs look for marks in strides, and wipe out those that they find.

    Producers do, and tell their consumers. Almost always there is none, which one number says.
    Users do not choose this schedule: it belongs to the second launch of a call whose softmax has
    a fixed reference (`fa3.primitives.softmax.Reference`).

    Fields:
        counters: the words of `Marks`.
    """

    @property
    def num_counters(self) -> int:
        return HEADER + self.order.num_tiles

    @property
    def marks(self) -> Marks:
        return Marks(self.counters, self.order.num_m_blocks, self.order.num_heads)

    def for_producer(self) -> "MarkedProducer":
        return MarkedProducer(**vars(self))

    def first(self, cluster) -> Cursor:
        """Before this CTA's first tile: the marks are not there yet."""
        return Cursor(cluster - self.num_clusters, cluster * 0)

    def begin(self, cursor: Cursor) -> Cursor:
        return self.next(cursor)

    def tile(self, cursor: Cursor) -> Tile:
        return self.marks.tile(cursor.index)


@dataclass(frozen=True)
class MarkedProducer(Marked):
    """The producer's half of `Marked`."""

    @cute.jit
    def next(self, cursor: Cursor) -> Cursor:
        """Find the next marked tile, and put its number into the mailbox."""
        index, num_tiles = cursor.index + self.num_clusters, self.order.num_tiles
        if self.counters[0] == 0:
            index = num_tiles
        is_marked = False
        while index < num_tiles and not is_marked:
            is_marked = self.counters[HEADER + index] != 0
            if not is_marked:
                index += self.num_clusters
        cute.arch.sync_warp()
        if is_marked:
            self.counters[HEADER + index] = 0
        self.tell(cursor.count, index)
        return Cursor(index, cursor.count + 1)

    @cute.jit
    def finish(self):
        """Once all CTAs have seen to their marks, say that there are none."""
        if cute.arch.lane_idx() == 0 and self.counters[0] != 0:
            self.count_out()
