"""Segments, the unit of work of every schedule: a tile, some of its key blocks, and which part of
the tile these are.

Everything here is plain arithmetic on the fields, so the same code runs on Python ints (planner,
reference, tests) and on Int32 values inside a kernel.
"""

from typing import NamedTuple

ONLY = 1
"""The number of a `PackedPart` that is a whole tile."""

MOST_PARTS = 256
"""One more than the parts that a tile may have."""

MOST_SLOTS = 1 << 14
"""Parts of all tiles: 32 bits count what they leave in memory, up to 100,000 numbers each."""


class Tile(NamedTuple):
    """Some query rows of one query head of one sequence.

    A tile belongs to a cluster. With c CTAs along M, `m_block` counts groups of c query tiles,
    and the CTA of rank r in the cluster takes query tile `m_block * c + r`. With c CTAs along
    heads, `head` counts groups of c query heads in the same way. In decoding, `head` is a
    key/value head, whose query heads lie in the tile's rows.
    """

    m_block: int
    head: int
    batch: int


class PackedPart(NamedTuple):
    """Which part of its tile a segment is, in one number, which stays in a register.

    Fields:
        number: `num_parts` + MOST_PARTS * (which of them this is + MOST_PARTS * `slot`).
    """

    number: int = ONLY

    @property
    def num_parts(self):
        """Parts of the tile; 1 if it is whole."""
        return self.number % MOST_PARTS

    @property
    def slot(self):
        """Where the part's output and log-sum-exp go, if there are others."""
        return self.number // MOST_PARTS**2

    @property
    def first_slot(self):
        """The slot of the tile's first part; the others follow in the order of their keys."""
        return self.slot - self.number // MOST_PARTS % MOST_PARTS


class Part(NamedTuple):
    """Which part of its tile a segment is; the parts of a tile are found through a record.

    Fields:
        slot: where its result goes, unless it is the only part.
        first_slot: slot of the tile's first part.
        num_parts: how many the tile has.
        record: where the record of the tile's parts goes.
    """

    slot: int
    first_slot: int
    num_parts: int
    record: int


class Segment(NamedTuple):
    """What a cluster does of one tile at once: its key blocks [begin, end).

    Fields:
        begin, end: None for all that the tile touches. In decoding they are counted from the first
            of these.
    """

    tile: Tile
    begin: int | None = None
    end: int | None = None
    part: PackedPart | Part = PackedPart()

    @property
    def is_whole(self):
        """Whether the tile has no other segment."""
        return self.part.num_parts == 1
