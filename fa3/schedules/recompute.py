"""Recompute schedule: the second launch of a forward call, for marked rows.

The first launch marks rows whose softmax failed, or which what other sequences hold may have
reached (`RecomputeMask`); `fa3.planning.planner.Plan.recompute` plans the second, whose CTAs take
the marked tiles (`RecomputeTiles`).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.vectors import sum_in_warp
from fa3.primitives.wgmma import ROWS_OF_WARP, WARP, WARPS
from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import TileOrder
from fa3.schedules.ragged import RaggedOrder

MARKS_HEADER = 4
"""Words before the tiles' bits: whether any tile is marked (ANY), marked tiles taken (TAKEN), and
CTAs that found none left (DONE)."""

ANY, TAKEN, DONE = range(3)

MOST_WARPS = 12  # most warps of a tile: 192 rows, 16 per warp
ALL_ROWS = (1 << ROWS_OF_WARP) - 1  # the word of a warp with all rows marked


def words_of_marks(num_tiles):
    """Words of int32 that the marks of so many tiles take."""
    return MARKS_HEADER + (num_tiles + 31) // 32 + num_tiles * MOST_WARPS


class RecomputeMask(NamedTuple):
    """The marks of a call: bits of tiles, and of rows.
    Marking reads nothing back from memory, so no warp waits for it."""

    words: cute.Tensor  # (size,) int32, zero before a call and after it
    order: TileOrder | RaggedOrder  # numbers the tiles, one CTA's each

    @property
    def num_groups(self):
        """Words of tile bits, 32 tiles each; a word is a group."""
        return (self.order.num_tiles + 31) // 32

    @property
    def size(self):
        """Words of int32 that the marks take."""
        return words_of_marks(self.order.num_tiles)

    def group(self, index):
        """Index of the word with the bits of 32 tiles."""
        return MARKS_HEADER + index

    def rows(self, index, warp):
        """Index of the word with the row bits of a tile's warp."""
        return MARKS_HEADER + self.num_groups + index * MOST_WARPS + warp

    @cute.jit
    def add(self, failed: tuple, index: Int32, warp: Int32):
        """Mark a warp's rows that failed; all its threads call this.
        `failed` says it of each of this thread's rows; one thread's word is enough."""
        mask = Int32(0)
        for r in cutlass.range_constexpr(len(failed)):
            mask = mask | (bit_of_row(r) if failed[r] else Int32(0))
        mask = cute.arch.warp_redux_sync(mask, "or")
        if mask != 0 and cute.arch.lane_idx() == 0:
            self.add_rows(index, warp, mask)

    def add_row(self, index: Int32, row: Int32):
        """Mark a row, by its place in its tile, and the tile."""
        self.add_rows(index, row // ROWS_OF_WARP, Int32(1) << (row % ROWS_OF_WARP))

    def add_rows(self, index: Int32, warp: Int32, rows: Int32):
        """Mark a warp's rows by bits, and their tile; from one thread."""
        words = self.words.iterator
        # Atomic: warps share their tile's bit, and CTAs with parts of one tile share its rows.
        row_word, tile_word = self.rows(index, warp), self.group(index // 32)
        cute.arch.atomic_or(words + row_word, rows, sem="relaxed", scope="gpu")
        bit = Int32(1) << (index % 32)
        cute.arch.atomic_or(words + tile_word, bit, sem="relaxed", scope="gpu")
        self.words[ANY] = 1

    @cute.jit
    def rows_of_group(self, index: Int32, first_warp: Int32) -> list[Int32]:
        """The row bits of a consumer warpgroup's four warps, from `first_warp` on."""
        return [self.words[self.rows(index, first_warp + i)] for i in range(WARPS)]

    @cute.jit
    def clear(self, index: Int32, warp: Int32):
        """Clear the row bits of a warp."""
        if cute.arch.lane_idx() == 0:
            self.words[self.rows(index, warp)] = 0


def bit_of_row(r: int) -> Int32:
    """The bit of this thread's row r in its warp's word."""
    return Int32(1) << (cute.arch.lane_idx() // 4 + r * (ROWS_OF_WARP // 2))


class RecomputeCursor(NamedTuple):
    """The CTA's present tile, `index`, and how many it had before."""

    index: int
    count: int
    # group, before: the word from which the producer looks on, and marked tiles before it.
    group: int
    before: int


@dataclass(frozen=True)
class RecomputeTiles(Dynamic):
    """Each free CTA takes the next marked tile; `counters` are the marks.

    Producers look for marked tiles and tell their consumers. Almost always there are none: then
    they read one word and leave. Users cannot choose this schedule: it serves calls whose softmax
    has a fixed row max instead of the running one (`fa3.primitives.softmax.RowMax`).
    """

    name: ClassVar[str] = "recompute"
    asks_first: ClassVar[bool] = True

    @property
    def num_counters(self) -> int:
        return self.marks.size

    @property
    def marks(self) -> RecomputeMask:
        return RecomputeMask(self.counters, self.order)

    def first(self, cluster) -> RecomputeCursor:
        """A cursor before the first tile: the marking launch may still run."""
        zero = cluster * 0
        return RecomputeCursor(zero, zero, zero, zero)

    def next(self, cursor: RecomputeCursor) -> RecomputeCursor:
        if self.is_producer:
            return self.take_marked(cursor)
        return cursor._replace(index=self.following(cursor.count), count=cursor.count + 1)

    @cute.jit
    def take_marked(self, cursor: RecomputeCursor) -> RecomputeCursor:
        """Take the next marked tile, and put its number into the mailbox."""
        index, group, before = Int32(self.order.num_tiles), cursor.group, cursor.before
        if self.counters[ANY] != 0:
            taken = cute.arch.shuffle_sync(self.count(TAKEN), 0)
            # Each lane looks at 32 tiles. This CTA's tile is the marked one with rank `taken`.
            bits, upto = self.look(group)
            count = cute.arch.shuffle_sync(upto, WARP - 1)
            while before + count <= taken and group < self.marks.num_groups:
                before += count
                group += WARP
                bits, upto = self.look(group)
                count = cute.arch.shuffle_sync(upto, WARP - 1)
            if before + count > taken:
                index = self.find(bits, upto, taken - before, group)
        self.send(cursor.count, index)
        return RecomputeCursor(index, cursor.count + 1, group, before)

    @cute.jit
    def look(self, group: Int32) -> tuple[Int32, Int32]:
        """This lane's word of 32, and the marked tiles up to it."""
        lane = cute.arch.lane_idx()
        bits = Int32(0)
        if group + lane < self.marks.num_groups:
            bits = self.counters[self.marks.group(group + lane)]
        return bits, sum_in_warp(Int32(cute.arch.popc(bits)))

    @cute.jit
    def find(self, bits: Int32, upto: Int32, number: Int32, group: Int32) -> Int32:
        """The marked tile with number `number` in a group of words."""
        is_later = cute.arch.vote_ballot_sync(upto > number)
        lane = Int32(cute.arch.popc(~is_later & (is_later - 1)))
        first = upto - cute.arch.popc(bits)
        rest = cute.arch.shuffle_sync(bits, lane)
        for _ in range(number - cute.arch.shuffle_sync(first, lane)):
            rest = rest & (rest - 1)
        return (group + lane) * 32 + Int32(cute.arch.popc(~rest & (rest - 1)))

    @cute.jit
    def finish(self):
        """Count this CTA as finished; the last one clears the marks."""
        if self.counters[ANY] != 0:
            before = self.count(DONE, "acq_rel")
            if cute.arch.shuffle_sync(before, 0) == self.num_clusters - 1:
                # From word 0 on, so the header as well.
                for i in range(cute.arch.lane_idx(), self.marks.group(self.marks.num_groups), WARP):
                    self.counters[i] = 0


@dataclass(frozen=True)
class RecomputeRaggedTiles(RecomputeTiles):
    """`RecomputeTiles` for tiles of packed sequences."""

    name: ClassVar[str] = "recompute of packed sequences"
    is_ragged: ClassVar[bool] = True
