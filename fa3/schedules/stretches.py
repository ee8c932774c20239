"""Cuts of few tiles into equal stretches of work, one for each CTA, in integers.

`fa3.kernels.segment_table` cuts by them on the GPU. All tiles are laid end to end. Where a stretch
ends inside of a tile, the tile is cut; a cut that would leave a short part moves to the tile's
nearer end. So there are fewer cuts than CTAs, whatever the lengths are, and a tile's cuts depend on
nothing but the work of all tiles before it, and of all. All of it is plain arithmetic: the same
code runs on Python ints (tests) and on Int32 values inside a kernel.
"""

from typing import NamedTuple

from fa3.primitives.arithmetic import either, larger, smaller
from fa3.schedules.segment import MOST_PARTS, ONLY

BLOCKS_OF_TILE = 2
"""Key blocks that take as long as the rest of a tile: its first loads, prologue and epilogue."""

SHORTEST_PART = 3  # key blocks of a part, at least: its begin and end take nearly as long

SHORTEST_STRETCH = 8
"""Work of a stretch, at least. Of less each tile would have many parts, which one CTA merges."""

LEAST_GAIN, LEAST_BLOCKS = 8, 4
"""Tiles are cut if the longest one is longer than a stretch by one part in so many, and by so many
blocks: a merge takes about as long."""


class TileCut(NamedTuple):
    """How a tile is cut."""

    start: int  # work of all tiles before it
    # begin, blocks: its first key block, and how many it has.
    begin: int
    blocks: int
    owner: int  # the CTA that has its first part
    cuts: int  # how many there are in the tile: one less than parts
    slot: int  # the workspace slot of its first part, if it is cut

    @property
    def slots(self):
        """How many slots its parts take."""
        return either(self.cuts > 0, self.cuts + 1, 0)


class Stretches(NamedTuple):
    """Stretches of work."""

    length: int  # of each, in key blocks
    num_ctas: int  # CTAs that have one
    are_cut: int  # 1 if tiles are cut; 0 if each is, as a whole, the CTA's of its number

    @classmethod
    def of(cls, work, longest, num_tiles, num_ctas) -> "Stretches":
        """The stretches of some tiles; less than 2**30 work.
        `work` is of all tiles, each its blocks and `BLOCKS_OF_TILE`; `longest` the longest tile's
        blocks."""
        length = larger((work + num_ctas - 1) // num_ctas, SHORTEST_STRETCH)
        least = larger(length // LEAST_GAIN, LEAST_BLOCKS)
        pays = either(longest - length >= least, 1, 0)
        return cls(length, num_ctas, either(num_tiles > num_ctas, 1, pays))

    def cut(self, number, start, begin, blocks) -> TileCut:
        """Cut the tile with a number; its parts have no slots yet."""
        first = (start + SHORTEST_PART + self.length - 1) // self.length
        last = larger(start + blocks - SHORTEST_PART, 0) // self.length
        owner = either(self.are_cut > 0, smaller(first - 1, self.num_ctas - 1), number)
        cuts = either(self.are_cut > 0, larger(last - first + 1, 0), 0)
        return TileCut(start, begin, blocks, owner, cuts, 0)

    def segment(self, tile: TileCut, cta) -> tuple:
        """First and end key block, and `PackedPart.number`, of what a CTA has of a tile."""
        which = cta - tile.owner
        first = either(which > 0, cta * self.length - tile.start, 0)
        end = either(which < tile.cuts, (cta + 1) * self.length - tile.start, tile.blocks)
        part = tile.cuts + 1 + MOST_PARTS * (which + MOST_PARTS * (tile.slot + which))
        return tile.begin + first, tile.begin + end, either(tile.cuts > 0, part, ONLY)


def most_slots(num_tiles: int, num_ctas: int) -> int:
    """The most slots of so many tiles: each cut adds one, and so does each tile that is cut."""
    return num_ctas + min(num_tiles, num_ctas)
