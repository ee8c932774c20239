"""Segments, the unit of work: a tile, a range of its key blocks, and which part of the tile it is.

Schedules make them; the kernels' producers and consumers and the reference work on them. All of it
is plain arithmetic on the fields, so the same code runs on Python ints (planner, reference, tests)
and on Int32 values inside a kernel.
"""

from typing import Any, NamedTuple

ONLY = 1  # `PackedPart.number` of a whole tile
MOST_PARTS = 256  # a tile has fewer parts than this

MOST_SLOTS = 1 << 14
"""Most parts of all tiles together. A part writes up to 100,000 numbers to the workspace, and 32
bits must index them all."""


class Tile(NamedTuple):
    """A block of query rows of one query head of one sequence.

    One cluster works on a tile. With c CTAs along M, `m_block` counts groups of c query tiles,
    and the CTA of rank r in the cluster takes query tile `m_block * c + r`. With c CTAs along
    heads, `head` counts groups of c query heads in the same way. In decoding, `head` is a
    key/value head, and the tile's rows are its query heads' rows.
    """

    m_block: int
    head: int
    batch: int


class PackedPart(NamedTuple):
    """Which part of its tile a segment is, packed into one integer: it takes one register."""

    # `num_parts` + MOST_PARTS * (index of the part in its tile + MOST_PARTS * `slot`).
    number: int = ONLY

    @property
    def num_parts(self):
        """How many parts the tile has; 1 if it is whole."""
        return self.number % MOST_PARTS

    @property
    def slot(self):
        """The workspace slot for the part's output and log-sum-exp; unused for a whole tile."""
        return self.number // MOST_PARTS**2

    @property
    def first_slot(self):
        """The slot of the tile's first part; its other parts follow in key order."""
        return self.slot - self.number // MOST_PARTS % MOST_PARTS


class Part(NamedTuple):
    """Which part of its tile a segment is, in decoding (split-K)."""

    slot: int  # workspace slot for its result; unused if the tile has one part
    first_slot: int  # slot of the tile's first part
    num_parts: int  # how many parts the tile has
    record: int  # index of the record from which the combine kernel learns of the tile's parts


class Segment(NamedTuple):
    """What a cluster computes in one go: key blocks [begin, end) of one tile."""

    tile: Tile
    # begin, end: None for all key blocks that the tile touches. In decoding, block 0 is the first
    # one that the tile touches.
    begin: Any = None
    end: Any = None
    part: PackedPart | Part = PackedPart()
    # Of packed sequences what their table has of the tile; None without a table.
    record: tuple | None = None
    number: int | None = None  # the tile's number in that table

    @property
    def is_whole(self):
        """Whether the tile has no other segment."""
        return self.part.num_parts == 1
