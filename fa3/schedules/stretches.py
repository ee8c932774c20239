"""Cuts tiles into stretches of work, one for each CTA, in integers.

`fa3.kernels.segment_table` cuts by them on the GPU. All tiles are laid end to end. Where a stretch
ends inside of a tile, the tile is cut; a cut that would leave a short part moves to the tile's
nearer end. So there are fewer cuts than CTAs, whatever the lengths are. A tile's cuts depend on the
work of all tiles before it, and of all tiles, alone. CTAs that begin later have shorter stretches
than the others. Where stretches are longer than a tile, CTAs have whole tiles first, in rounds:
CTAs that begin tiles of a head together read its keys together, so that L2 serves them. All of it
is plain arithmetic: the same code runs on Python ints (tests) and on Int32 values inside a kernel.
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
"""Tiles are cut if the longest one is longer than a stretch by one part in so many of a CTA's work,
and by so many blocks: a merge takes about as long."""

MOST_DELAY = 1 << 22  # 32 bits hold it for all CTAs

LEAST_REST, PART_OF_TILE = 24, 4
"""After rounds of whole tiles stretches have so many key blocks at least, or one part of a tile in
so many. Of shorter ones a tile has many parts, which one CTA merges: 512 queries on 16k keys with
15 sequences of 2k took 228 us on an H100 after a round, with 15 blocks, and 219 without."""


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
    def of(cls, work, longest, num_tiles, num_early, num_late=0, delay=0, before=0) -> "Stretches":
        """The stretches of some tiles; less than 2**30 work.
        `work` is of all tiles, each its blocks and `BLOCKS_OF_TILE`; `longest` the longest tile's
        blocks. CTAs that begin so late that they would have hardly any work get none. A `delay`
        below 0 says that the others begin late. `before` is what a CTA has before its stretch."""
        delay = smaller(delay, MOST_DELAY)
        least = SHORTEST_STRETCH * (num_early + num_late)
        num_late = either(work - delay * num_early < least, 0, num_late)
        num_ctas = num_early + num_late
        length = (work + delay * num_late + num_ctas - 1) // num_ctas
        length = larger(length, SHORTEST_STRETCH)
        least = larger((before + length) // LEAST_GAIN, LEAST_BLOCKS)
        pays = either(longest - length >= least, 1, 0)
        are_cut = either(num_tiles > num_early, 1, pays)
        return cls(length, num_ctas, are_cut, num_early, either(num_late > 0, delay, 0))

    def have_room(self, longest, num_tiles):
        """Whether there may be rounds of tiles of at most `longest` blocks."""
        return (self.length > longest) & (num_tiles > self.num_early)

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
        """A CTA's key blocks of a tile, and its `NumberedPart.number`."""
        number = cta - tile.owner
        first = either(number > 0, self.end(cta - 1) - tile.start, 0)
        end = either(number < tile.cuts, self.end(cta) - tile.start, tile.blocks)
        part = tile.cuts + 1 + MOST_PARTS * (number + MOST_PARTS * (tile.slot + number))
        return tile.begin + first, tile.begin + end, either(tile.cuts > 0, part, ONLY)


class Rounds(NamedTuple):
    """Rounds of whole tiles before all stretches: a tile for each CTA."""

    number: int  # of rounds
    skipped: int  # rounds in which CTAs that begin late have no tile
    # num_early, num_late: CTAs that begin at once, and that begin late.
    num_early: int
    num_late: int
    tile_work: int  # work of the longest tile

    @classmethod
    def of(cls, stretches: Stretches, longest) -> "Rounds":
        """The rounds that fit stretches whose longest tile has `longest` blocks."""
        tile_work = longest + BLOCKS_OF_TILE
        num_early, num_late = stretches.num_early, stretches.num_ctas - stretches.num_early
        room = larger(stretches.length - smaller(tile_work // PART_OF_TILE, LEAST_REST), 0)
        late_room = either(num_late > 0, larger(room - stretches.delay, 0), 0)
        skipped = room // tile_work - late_room // tile_work
        return cls(room // tile_work, skipped, num_early, num_late, tile_work)

    @property
    def num_tiles(self):
        """Tiles of all rounds."""
        return self.number * self.num_early + (self.number - self.skipped) * self.num_late

    def kept(self, work) -> "Rounds":
        """These rounds if their tiles are about equal, else none."""
        full = self.num_tiles * self.tile_work
        kept = either(work < full - full // LEAST_GAIN, 0, 1)
        return self._replace(number=kept * self.number, skipped=kept * self.skipped)

    def rest(self, delay, work, longest, num_tiles) -> Stretches:
        """The stretches of the tiles after all rounds; arguments as for `Stretches.of`."""
        delay, before = delay - self.skipped * self.tile_work, self.number * self.tile_work
        ctas = self.num_early, self.num_late
        return Stretches.of(work, longest, num_tiles, *ctas, delay, before)

    def tile(self, turn, cta):
        """The number of a CTA's tile in a round."""
        return turn * self.num_early + larger(turn - self.skipped, 0) * self.num_late + cta

    def first(self, cta):
        """The first round of a CTA."""
        return either(cta < self.num_early, 0, self.skipped)


def most_slots(num_tiles: int, num_ctas: int) -> int:
    """The most slots of tiles: one per cut and per cut tile."""
    return num_ctas + min(num_tiles, num_ctas)
