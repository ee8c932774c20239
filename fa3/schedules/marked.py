"""Marked: tiles with rows that the launch before has marked, to compute these rows again."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.wgmma import ROWS_OF_WARP, WARP, WARPS
from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import TileOrder
from fa3.schedules.segment import Tile

HEADER = 4
"""Numbers before those of the tiles: whether any is marked, how many of these were taken, and how
many CTAs found none left."""

ANY, TAKEN, DONE = range(3)

MOST_WARPS = 12
"""Warps that share the rows of a tile at most: 192 rows, 16 each."""

ALL_ROWS = (1 << ROWS_OF_WARP) - 1
"""The marks of a warp all of whose rows are marked."""


class Marks(NamedTuple):
    """Marks of a launch: a bit for every tile, and one for every row, by warps.

    To mark takes no answer from memory, so nothing waits for it.

    Fields:
        words: (size,) int32, zero before a call and after it.
        order: numbers the tiles of CTAs.
    """

    words: cute.Tensor
    order: TileOrder

    @property
    def num_groups(self):
        """Numbers that hold the bits of the tiles: 32 each."""
        return (self.order.num_tiles + 31) // 32

    @property
    def size(self):
        """Numbers that the marks take."""
        return HEADER + self.num_groups + self.order.num_tiles * MOST_WARPS

    def group(self, index):
        """Where the bits of 32 tiles are."""
        return HEADER + index

    def rows(self, index, warp):
        """Where the rows of a tile's warp are marked, by the tile's number."""
        return HEADER + self.num_groups + index * MOST_WARPS + warp

    @cute.jit
    def add(self, failed: tuple, tile: Tile, warp: Int32):
        """Mark a warp's rows that failed, and their tile; all threads of the warp call this.

        Args:
            failed: for each row of this thread whether it failed; threads that share a row may
                differ.
            warp: this warp's place among those of the tile.
        """
        mask = Int32(0)
        for r in cutlass.range_constexpr(len(failed)):
            mask = mask | (bit_of_row(r) if failed[r] else Int32(0))
        mask = cute.arch.warp_redux_sync(mask, "or")
        if mask != 0 and cute.arch.lane_idx() == 0:
            index, words = self.order.index(tile), self.words.iterator
            # Several warps share a tile's bit, and CTAs that have parts of a tile its rows.
            of_rows, of_tiles = self.rows(index, warp), self.group(index // 32)
            cute.arch.atomic_or(words + of_rows, mask, sem="relaxed", scope="gpu")
            bit = Int32(1) << (index % 32)
            cute.arch.atomic_or(words + of_tiles, bit, sem="relaxed", scope="gpu")
            self.words[ANY] = 1

    @cute.jit
    def rows_of_group(self, tile: Tile, first_warp: Int32) -> list[Int32]:
        """The marks of the warps of a consumer warpgroup, from its first warp on."""
        index = self.order.index(tile)
        return [self.words[self.rows(index, first_warp + i)] for i in range(WARPS)]

    @cute.jit
    def wipe_out(self, tile: Tile, warp: Int32):
        """Wipe out the marks of a warp's rows."""
        if cute.arch.lane_idx() == 0:
            self.words[self.rows(self.order.index(tile), warp)] = 0


def bit_of_row(r: int) -> Int32:
    """The mark of this thread's row r among the rows of its warp, as WGMMA deals them out."""
    return Int32(1) << (cute.arch.lane_idx() // 4 + r * (ROWS_OF_WARP // 2))


class MarkedCursor(NamedTuple):
    """A CTA's tile, and how many it had before.

    Fields:
        group, before: where the producer looks for marks, and how many there are before that.
    """

    index: int
    count: int
    group: int
    before: int


@dataclass(frozen=True)
class Marked(Dynamic):
    """CTAs take the marked tiles of an order, as they get ready for one.

    Producers look for marks, and tell their consumers. Almost always there is none, which one
    number says. Users do not choose this schedule: it belongs to the second launch of a call whose
    softmax has a reference that does not follow (`fa3.primitives.softmax.Reference`).

    Fields:
        counters: the words of `Marks`.
    """

    @property
    def num_counters(self) -> int:
        return self.marks.size

    @property
    def marks(self) -> Marks:
        return Marks(self.counters, self.order)

    def for_producer(self) -> "MarkedProducer":
        return MarkedProducer(**vars(self))

    def first(self, cluster) -> MarkedCursor:
        """Before this CTA's first tile: the marks are not there yet."""
        zero = cluster * 0
        return MarkedCursor(zero, zero, zero, zero)

    def begin(self, cursor: MarkedCursor) -> MarkedCursor:
        return self.next(cursor)

    def next(self, cursor: MarkedCursor) -> MarkedCursor:
        return cursor._replace(index=self.following(cursor.count), count=cursor.count + 1)


@dataclass(frozen=True)
class MarkedProducer(Marked):
    """The producer's half of `Marked`."""

    @cute.jit
    def next(self, cursor: MarkedCursor) -> MarkedCursor:
        """Take the next marked tile, and put its number into the mailbox."""
        index, group, before = Int32(self.order.num_tiles), cursor.group, cursor.before
        if self.counters[ANY] != 0:
            taken = Int32(0)
            if cute.arch.lane_idx() == 0:
                taken = cute.arch.atomic_add(
                    self.counters.iterator + TAKEN, Int32(1), sem="relaxed", scope="gpu"
                )
            taken = cute.arch.shuffle_sync(taken, 0)
            # Every lane looks at 32 tiles; marks are counted from the first tile on.
            bits, upto = self.look(group)
            count = cute.arch.shuffle_sync(upto, WARP - 1)
            while before + count <= taken and group < self.marks.num_groups:
                before += count
                group += WARP
                bits, upto = self.look(group)
                count = cute.arch.shuffle_sync(upto, WARP - 1)
            if before + count > taken:
                index = self.find(bits, upto, taken - before, group)
        self.tell(cursor.count, index)
        return MarkedCursor(index, cursor.count + 1, group, before)

    @cute.jit
    def look(self, group: Int32) -> tuple[Int32, Int32]:
        """This lane's bits of 32 groups from `group` on, and marks up to this lane's last one."""
        lane = cute.arch.lane_idx()
        bits = Int32(0)
        if group + lane < self.marks.num_groups:
            bits = self.counters[self.marks.group(group + lane)]
        upto = Int32(cute.arch.popc(bits))
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, 1 << i)
            upto = upto + other if lane >= 1 << i else upto
        return bits, upto

    @cute.jit
    def find(self, bits: Int32, upto: Int32, number: Int32, group: Int32) -> Int32:
        """The index of the tile whose mark is this number among those of 32 groups."""
        is_later = cute.arch.vote_ballot_sync(upto > number)
        lane = Int32(cute.arch.popc(~is_later & (is_later - 1)))
        first = upto - cute.arch.popc(bits)
        rest = cute.arch.shuffle_sync(bits, lane)
        for _ in range(number - cute.arch.shuffle_sync(first, lane)):
            rest = rest & (rest - 1)
        return (group + lane) * 32 + Int32(cute.arch.popc(~rest & (rest - 1)))

    @cute.jit
    def finish(self):
        """Once all CTAs have found no tile left, wipe out the marks of tiles."""
        if self.counters[ANY] != 0:
            before = Int32(0)
            if cute.arch.lane_idx() == 0:
                before = cute.arch.atomic_add(
                    self.counters.iterator + DONE, Int32(1), sem="acq_rel", scope="gpu"
                )
            if cute.arch.shuffle_sync(before, 0) == self.num_clusters - 1:
                # The header, too.
                for i in range(cute.arch.lane_idx(), self.marks.group(self.marks.num_groups), WARP):
                    self.counters[i] = 0
