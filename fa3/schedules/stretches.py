"""Cuts of tiles into stretches of work, one for each CTA, in integers.

`fa3.kernels.segment_table` cuts by them on the GPU. All tiles are laid end to end. Where a stretch
ends inside of a tile, the tile is cut; a cut that would leave a short part moves to the tile's
nearer end. So there are fewer cuts than CTAs, whatever the lengths are, and a tile's cuts depend on
nothing but the work of all tiles before it, and of all. CTAs that begin later have shorter
stretches than the others. All of it is plain arithmetic: the same code runs on Python ints (tests)
and on Int32 values inside a kernel.
"""

from typing import NamedTuple

from fa3.primitives.arithmetic import either, larger, smaller
from fa3.schedules.order import MOST_PARTS, ONLY

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

    length: int  # in key blocks, of a CTA that begins at once
    num_ctas: int  # CTAs that have one
    are_cut: int  # 1 if tiles are cut; 0 if each is, as a whole, the CTA's of its number
    num_early: int = 0  # the first CTAs, which begin at once; others have `delay` less
    delay: int = 0  # key blocks

    @classmethod
    def of(cls, work, longest, num_tiles, num_early, num_late=0, delay=0) -> "Stretches":
        """The stretches of some tiles; less than 2**30 work.
        `work` is of all tiles, each its blocks and `BLOCKS_OF_TILE`; `longest` the longest tile's
        blocks. CTAs that begin so late that they would have hardly any work get none."""
        delay = smaller(delay, (work + num_early - 1) // num_early)
        least = SHORTEST_STRETCH * (num_early + num_late)
        num_late = either(work - delay * num_early < least, 0, num_late)
        num_ctas = num_early + num_late
        length = (work + delay * num_late + num_ctas - 1) // num_ctas
        length = larger(length, SHORTEST_STRETCH)
        least = larger(length // LEAST_GAIN, LEAST_BLOCKS)
        pays = either(longest - length >= least, 1, 0)
        are_cut = either(num_tiles > num_early, 1, pays)
        return cls(length, num_ctas, are_cut, num_early, either(num_late > 0, delay, 0))

    def end(self, cta):
        """Work of a CTA and of all before it."""
        return (cta + 1) * self.length - larger(cta + 1 - self.num_early, 0) * self.delay

    def cta_at(self, work):
        """The CTA that has the block after so much work."""
        early_work = self.num_early * self.length
        late = self.num_early + (work - early_work) // (self.length - self.delay)
        return either(work < early_work, work // self.length, late)

    def cut(self, number, start, begin, blocks) -> TileCut:
        """Cut the tile with a number; its parts have no slots yet."""
        first = self.cta_at(start + SHORTEST_PART - 1)
        last = self.cta_at(larger(start + blocks - SHORTEST_PART, 0))
        owner = either(self.are_cut > 0, smaller(first, self.num_ctas - 1), number)
        cuts = either(self.are_cut > 0, larger(last - first, 0), 0)
        return TileCut(start, begin, blocks, owner, cuts, 0)

    def segment(self, tile: TileCut, cta) -> tuple:
        """First and end key block, and `PackedPart.number`, of what a CTA has of a tile."""
        which = cta - tile.owner
        first = either(which > 0, self.end(cta - 1) - tile.start, 0)
        end = either(which < tile.cuts, self.end(cta) - tile.start, tile.blocks)
        part = tile.cuts + 1 + MOST_PARTS * (which + MOST_PARTS * (tile.slot + which))
        return tile.begin + first, tile.begin + end, either(tile.cuts > 0, part, ONLY)


def most_slots(num_tiles: int, num_ctas: int) -> int:
    """The most slots of so many tiles: each cut adds one, and so does each tile that is cut."""
    return num_ctas + min(num_tiles, num_ctas)
