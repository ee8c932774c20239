"""Marked: tiles with rows that the launch before has marked, to compute these rows again."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa3.primitives.wgmma import ROWS_OF_WARP
from fa3.schedules.dynamic import Cursor, Dynamic
from fa3.schedules.tiles import Tile

HEADER = 4
"""Numbers before those of the tiles: tiles that are listed, tiles that were taken from the list,
and CTAs that found none left."""

LISTED, TAKEN, DONE = range(3)

MOST_WARPS = 12
"""Warps that share the rows of a tile at most: 192 rows, 16 each."""


class Marks(NamedTuple):
    """Marks of a launch: a list of tiles, and which of their rows.

    Every tile has a place in `words` for an entry of the list, for whether it is listed, and for
    a mask of the rows of each of its warps.

    Fields:
        words: (size,) int32, zero before a call and after it.
        num_m_blocks, num_heads, batch: of the problem, in tiles of a CTA.
    """

    words: cute.Tensor
    num_m_blocks: int
    num_heads: int
    batch: int

    @property
    def num_tiles(self):
        return self.num_m_blocks * self.num_heads * self.batch

    @property
    def size(self):
        """Numbers that the marks take."""
        return HEADER + self.num_tiles * (2 + MOST_WARPS)

    def place(self, tile: Tile):
        """The number of a tile."""
        return (tile.batch * self.num_heads + tile.head) * self.num_m_blocks + tile.m_block

    def tile(self, place) -> Tile:
        """The tile with this number; the inverse of `place`."""
        head = place // self.num_m_blocks
        batch = head // self.num_heads
        return Tile(place - head * self.num_m_blocks, head - batch * self.num_heads, batch)

    def entry(self, position):
        """Where the list has its entry of this position."""
        return HEADER + position

    def flag(self, place):
        """Where it says whether a tile is listed."""
        return HEADER + self.num_tiles + place

    def rows(self, place, warp):
        """Where the rows of a tile's warp are marked."""
        return HEADER + 2 * self.num_tiles + place * MOST_WARPS + warp

    @cute.jit
    def add(self, failed: tuple, tile: Tile, warp: Int32):
        """Mark a warp's rows that failed, and list their tile; all threads of the warp call this.

        Args:
            failed: for each row of this thread whether it failed; threads that share a row may
                differ.
            warp: this warp's place among those of the tile.
        """
        mask = Int32(0)
        for r in cutlass.range_constexpr(len(failed)):
            mask = mask | (bit_of_row(r) if failed[r] else Int32(0))
        if cute.arch.vote_any_sync(mask != 0):
            mask = cute.arch.warp_redux_sync(mask, "or")
            if cute.arch.lane_idx() == 0:
                place = self.place(tile)
                words = self.words.iterator
                # Several CTAs may have parts of a tile.
                cute.arch.atomic_or(
                    words + self.rows(place, warp), mask, sem="relaxed", scope="gpu"
                )
                was_listed = cute.arch.atomic_exch(
                    words + self.flag(place), Int32(1), sem="relaxed", scope="gpu"
                )
                if was_listed == 0:
                    position = cute.arch.atomic_add(
                        words + LISTED, Int32(1), sem="relaxed", scope="gpu"
                    )
                    self.words[self.entry(position)] = place

    @cute.jit
    def take_rows(self, tile: Tile, warp: Int32) -> tuple[Boolean, Boolean]:
        """Whether each row of this thread is marked; wipes out the marks of its warp."""
        at = self.rows(self.place(tile), warp)
        mask = self.words[at]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.words[at] = 0
        return tuple((mask & bit_of_row(r)) != 0 for r in range(2))


def bit_of_row(r: int) -> Int32:
    """The mark of this thread's row r among the rows of its warp, as WGMMA deals them out."""
    return Int32(1) << (cute.arch.lane_idx() // 4 + r * (ROWS_OF_WARP // 2))


@dataclass(frozen=True)
class Marked(Dynamic):
    """CTAs take tiles from the list of those with marked rows.

    They were listed as they were done, so the longest ones come first if they did before.
    Producers take them, and tell their consumers, who wipe out the marks. Almost always the list
    is empty, which one number says. Users do not choose this schedule: it belongs to the second
    launch of a call whose softmax has a reference that does not follow
    (`fa3.primitives.softmax.Reference`).

    Fields:
        counters: the words of `Marks`.
    """

    @property
    def num_counters(self) -> int:
        return self.marks.size

    @property
    def marks(self) -> Marks:
        order = self.order
        return Marks(self.counters, order.num_m_blocks, order.num_heads, order.batch)

    def for_producer(self) -> "MarkedProducer":
        return MarkedProducer(**vars(self))

    def first(self, cluster) -> Cursor:
        """Before this CTA's first tile: the marks are not there yet."""
        return Cursor(cluster * 0, cluster * 0)

    def begin(self, cursor: Cursor) -> Cursor:
        return self.next(cursor)

    def tile(self, cursor: Cursor) -> Tile:
        return self.marks.tile(cursor.index)


@dataclass(frozen=True)
class MarkedProducer(Marked):
    """The producer's half of `Marked`."""

    @cute.jit
    def next(self, cursor: Cursor) -> Cursor:
        """Take the next tile of the list, and put its number into the mailbox."""
        place = Int32(self.order.num_tiles)
        num_listed = self.counters[LISTED]
        if num_listed > 0 and cute.arch.lane_idx() == 0:
            position = cute.arch.atomic_add(
                self.counters.iterator + TAKEN, Int32(1), sem="relaxed", scope="gpu"
            )
            if position < num_listed:
                entry = self.marks.entry(position)
                place = self.counters[entry]
                self.counters[entry] = 0
                self.counters[self.marks.flag(place)] = 0
        place = cute.arch.shuffle_sync(place, 0)
        self.tell(cursor.count, place)
        return Cursor(place, cursor.count + 1)

    @cute.jit
    def finish(self):
        """Once all CTAs have found no tile left, empty the list."""
        if cute.arch.lane_idx() == 0 and self.counters[LISTED] != 0:
            before = cute.arch.atomic_add(
                self.counters.iterator + DONE, Int32(1), sem="relaxed", scope="gpu"
            )
            if before == self.num_clusters - 1:
                for i in cutlass.range_constexpr(HEADER):
                    self.counters[i] = 0
