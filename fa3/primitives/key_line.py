"""Lines: key tile parts that add to dQ in a fixed order.

In a fixed order, key tiles that begin at the same query block line up there. With few key/value
heads all of them begin at once, and a line of 32 takes long. On a `KeyLine` each part begins at a
place of its own, and the order of additions differs from query block to query block.

    unit          0      1      2      3      4      5      6      7
    key tile 0    a ->   a      a      d ->   d      d      g ->   g
    key tile 1    b ->   b      e ->   e      e      h ->   h
    key tile 2    c ->   f ->   f      f
    order         a b c  f a b  e f a  d e f  d e    h d    g h    g

A part waits only for parts that begin further on, which CTAs take before it: there is no deadlock.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import Divisor, PlainDivisor, either, larger
from fa3.primitives.wgmma import WARP

FRACTION = 1 << 10
"""`KeyLine.distance` is counted in such parts of a unit."""

TILES_OF_LINE = 2 * WARP


class KeyLine(NamedTuple):
    """Key tile parts that reach each query block in a fixed order.

    A set of query heads has a line of units: the last query block of all these heads, then the
    block before it, and so on. A key tile visits the units from 0 on, as many as see it. Its parts
    begin at 0, at a place of its own, and then every `length` units. All parts walk the line in the
    same direction. So those that begin further on come to a unit earlier, whatever their key tile.
    That is the order of their additions to dQ, and CTAs take parts in the same order.
    It has at most `TILES_OF_LINE` key tiles: a lane of a warp looks at two.
    """

    length: Divisor | PlainDivisor  # units of a part, at most
    distance: Int32  # between the first cuts of neighbouring key tiles, times `FRACTION`
    num_tiles: Int32  # key tiles of the sequence
    # Parts of the key tile that has the most; None if the warp finds it, as of packed sequences.
    most_parts: Int32 | None = 0
    heads: Divisor | None = None  # query heads of the set

    @classmethod
    def of(cls, length, num_tiles, *more) -> "KeyLine":
        """The line of key tiles with evenly spread cuts; on the host."""
        return cls(length, length.value * FRACTION // num_tiles, num_tiles, *more)

    def of_sequence(self, num_tiles) -> "KeyLine":
        """The line of a packed sequence with so many key tiles."""
        return self.of(self.length, num_tiles, None, self.heads)

    def first_cut(self, n_block):
        """Where a key tile's second part would begin, sooner for later keys."""
        return self.length.value - n_block * self.distance // FRACTION

    def cut(self, n_block, row):
        """Where a part of a key tile begins."""
        begin = self.first_cut(n_block) + (row - 1) * self.length.value
        return either(row > 0, begin, 0)

    def parts(self, n_block, units):
        """Parts of a key tile that visits so many units."""
        more = units - self.first_cut(n_block) + self.length.value - 1
        return 1 + self.length.quotient(larger(0, more))

    @cute.jit
    def find(self, units_of: cutlass.Constexpr, index) -> tuple[Int32, Int32]:
        """Find a part by its place in the order.
        Returns its key tile, and which of the tile's parts it is. All lanes of a warp call this;
        `units_of` gives the units that a key tile visits."""
        row, left, count = self.most_parts, index, Int32(0)
        tiles = tiles_of_lane()
        parts = [either(n < self.num_tiles, self.parts(n, units_of(n)), 0) for n in tiles]
        if cutlass.const_expr(row is None):
            row = cute.arch.make_warp_uniform(cute.arch.warp_reduction_max(larger(*parts)))
        while left >= count and row > 0:
            left -= count
            row -= 1
            count = Int32(0)
            for i in cutlass.range_constexpr(len(tiles)):
                count += cute.arch.popc(cute.arch.vote_ballot_sync(parts[i] > row))
        n_block, before = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(len(tiles)):
            lanes = cute.arch.vote_ballot_sync(parts[i] > row)
            place = before + cute.arch.popc(lanes & ((Int32(1) << cute.arch.lane_idx()) - 1))
            chosen = cute.arch.vote_ballot_sync((parts[i] > row) & (place == left))
            n_block += either(chosen != 0, cute.arch.popc(chosen - 1) + WARP * i, 0)
            before += cute.arch.popc(lanes)
        return cute.arch.make_warp_uniform(n_block), cute.arch.make_warp_uniform(row)

    def before(self, units_of: Callable, n_block, begin) -> tuple:
        """Where a lane's key tiles come before a part beginning at `begin`.
        Returns for each the first such unit, and where such units end."""
        return tuple(self.tile_before(n, units_of(n), n_block, begin) for n in tiles_of_lane())

    def tile_before(self, n, units, n_block, begin) -> tuple:
        """Where key tile `n` comes before that part."""
        first_cut, length = self.first_cut(n), self.length.value
        rows = self.length.quotient(larger(0, begin - first_cut + length - 1))
        first = first_cut + rows * length
        # Of parts that begin at the same unit, the ones of earlier keys come first.
        first += either((first == begin) & (n >= n_block), length, 0)
        first = either((begin == 0) & (n < n_block), 0, first)
        return first, either(n < self.num_tiles, units, 0)


def tiles_of_lane() -> tuple:
    """The key tiles that a lane looks at."""
    return tuple(cute.arch.lane_idx() + first for first in range(0, TILES_OF_LINE, WARP))


def rank_at(before: tuple, unit):
    """How many parts come to a unit first, by `KeyLine.before`."""
    come = (cute.arch.vote_ballot_sync((first <= unit) & (unit < end)) for first, end in before)
    return sum(map(cute.arch.popc, come))
