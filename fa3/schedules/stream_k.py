"""Split-K for decoding: cuts so that CTAs read equally many blocks.

`fa3.planning.decode` chooses the cut, the kernel reads the sequences' lengths on the device
(`fa3.schedules.sequences.Cached`), and the decode kernel and the reference walk the segments.

A tile is up to 64 query rows of one key/value head of one sequence; it walks the key blocks that
its sequence's queries touch. All blocks form one line: sequence by sequence, in a sequence tile by
tile (head by head, in a head its row blocks), in a tile block by block. A sequence without rows
has one tile with one block, and its result is not used. The line is cut into one piece for each CTA
(`Chunks`); pieces differ by one block at most. A *segment* is a CTA's share of one tile. If that is
the whole tile, its result is final; otherwise it is a *part*, kept in a slot of the workspace. A
tile's parts have consecutive slots, and its first segment writes a record for the
combine kernel, which merges them: (m_block, head, batch, first slot, parts). In launches with few
parts no kernel reads the records: the CTA whose part of a tile comes last merges the parts.

The cut says where a tile may be cut: `StreamK` anywhere, `FixedSplit` between units, `NoSplit`
nowhere. In `CtaGroups` CTAs walk in crews (`CtaGroup`), one CTA for each of some neighbouring
heads, whose rows are next to each other in memory. A crew has one piece of a line of such groups of
heads, and each of its CTAs has one head of every group. There the last CTA always merges.

All but `locate` is plain arithmetic on the fields: the same code runs on Python ints (reference,
tests) and inside a kernel, on Int32; only positions in a long line are Int64.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.primitives.arithmetic import Divisor, PlainDivisor, larger, smaller
from fa3.primitives.vectors import sum_in_warp
from fa3.primitives.wgmma import WARP
from fa3.schedules.order import Part, Segment, Tile

BY_CTA = 2**30
"""Tiles of a `StreamK` whose records are by CTA, if it is not known how many tiles there are."""

MOST_ROOM = 2**30  # more blocks than any tile has

ONE_IDLE_IN = 8
"""Pieces may be so much longer that one crew in so many is idle, if that keeps tiles whole: so few
do not keep memory from being busy."""


def as_int32(number):
    """A number of blocks from long positions: Int32, at most `MOST_ROOM`."""
    return Int32(smaller(number, MOST_ROOM)) if isinstance(number, Int64) else number


@dataclass(frozen=True)
class Chunks:
    """Blocks in a line, cut into nearly equal pieces, one per crew."""

    total: int  # blocks of all pieces
    num_crews: Divisor | PlainDivisor
    end: int  # blocks that there are; with fewer than `total` the last pieces are shorter, or empty

    @classmethod
    def of_tiles(cls, total, num_crews, fewest, most) -> "Chunks":
        """Pieces of whole tiles, if they leave few crews idle.
        All tiles have as many blocks.
        `fewest` and `most` are the blocks of the shortest and of the longest tile."""
        size = num_crews.quotient(total + num_crews.value - 1)
        whole_size = (size + most - 1) // larger(most, 1) * most
        # 1 or 0: tiles differ; too many crews would be idle.
        differ = smaller(most - fewest, 1)
        idle = smaller(larger(ONE_IDLE_IN * (whole_size - size) - whole_size, 0), 1)
        keeps_whole = (1 - differ) * (1 - idle)
        return cls(total + keeps_whole * (whole_size * num_crews.value - total), num_crews, total)

    def begin(self, crew):
        """First block of a crew's piece; the end of the previous piece."""
        size = self.num_crews.quotient(self.total)
        begin = crew * size + smaller(crew, self.total - size * self.num_crews.value)
        return smaller(begin, self.end)

    def crew_of(self, position):
        """The crew whose piece has the block at a position."""
        size = self.num_crews.quotient(self.total)
        longer_crews = self.total - size * self.num_crews.value
        longer = longer_crews * (size + 1)
        # Longer pieces come first: `among` is 1 in them and 0 after. This takes one division only.
        among = smaller(larger(longer - position, 0), 1)
        after = 1 - among
        return after * longer_crews + (position - after * longer) // larger(size + among, 1)


class CtaGroup(NamedTuple):
    """A CTA's place among those that walk together."""

    number: int  # of the crew
    lane: int  # the CTA's place in it
    width: int  # CTAs of a crew

    @property
    def cta(self):
        return self.number * self.width + self.lane


@dataclass(frozen=True)
class AtChunks:
    """Cut tiles wherever a piece ends.
    At most one tile begins in a piece and ends in a later one: its first part has slot 2 * cta, its
    further parts the slots after that."""

    num_ctas: int

    has_parts: ClassVar[bool] = True

    @property
    def num_slots(self):
        return 2 * self.num_ctas

    def part(
        self, pieces: Chunks, crew: CtaGroup, tile_number, tile_begin, block, num_blocks
    ) -> Part:
        """The part of a tile that begins at a block.
        The crews in whose pieces the tile begins and ends follow from where it begins in the line.
        Each lane of a crew has its own slots."""
        first = as_int32(pieces.crew_of(tile_begin))
        last = as_int32(pieces.crew_of(tile_begin + num_blocks - 1))
        slots = 2 * crew.lane * pieces.num_crews.value
        record = self.record(crew, tile_number)
        return Part(slots + first + crew.number, slots + 2 * first, last - first + 1, record)

    def begin(self, block, num_blocks):
        """The first block, from `block` on, where a segment may begin."""
        return block

    def end(self, block, num_blocks, room):
        """The end of the segment at `block`, with `room` blocks left."""
        return smaller(num_blocks, block + room)


@dataclass(frozen=True)
class StreamK(AtChunks):
    """Cut tiles wherever a piece ends: equal pieces, few parts.
    There is a record per tile, or per CTA if CTAs are fewer; then a CTA in whose piece no tile
    begins must clear its record."""

    num_tiles: int

    width: ClassVar[int] = 1
    words: ClassVar[str] = "keys split over all CTAs, merged inside or by combine"

    @property
    def num_records(self):
        return smaller(self.num_ctas, self.num_tiles)

    def record(self, crew: CtaGroup, tile_number):
        by_tile = 1 - smaller(larger(self.num_tiles - self.num_ctas, 0), 1)
        return crew.cta + by_tile * (tile_number - crew.cta)


@dataclass(frozen=True)
class CtaGroups(AtChunks):
    """Cut tiles wherever a piece ends, unless whole tiles balance.
    There are no records: the CTA that merges has a part of the tile."""

    width: int  # CTAs of a crew; divides the key/value heads

    num_records: ClassVar[int] = 0
    words: ClassVar[str] = "keys split over all CTAs, merged inside"

    def record(self, crew: CtaGroup, tile_number):
        return 0


def crew_width(num_heads: int, num_tiles: int, num_ctas: int) -> int:
    """How many heads walk together: one CTA in 16 may idle.
    One where equally long tiles are as many for each CTA: nothing is cut then."""
    if num_tiles % num_ctas:
        for width in range(min(num_heads, num_ctas), 1, -1):
            if num_heads % width == 0 and 16 * (num_ctas % width) <= num_ctas:
                return width
    return 1


@dataclass(frozen=True)
class FixedSplit:
    """Cut tiles between units; a CTA does whole units.
    The CTA in whose piece a unit begins works on all of it.
    A tile of n blocks has units of ceil(n / num_splits) blocks, within bounds."""

    num_splits: int  # most units of a tile, unless they would have more than `longest` blocks
    unit_blocks: int  # fewest blocks of a unit; a tile's last unit may have fewer
    max_parts: int  # most units that any tile of this call may have; each tile has as many slots
    num_tiles: int  # tiles of this call
    longest: int = MOST_ROOM  # most blocks of a unit

    has_parts: ClassVar[bool] = True
    width: ClassVar[int] = 1
    words: ClassVar[str] = "keys split by each sequence's length, merged by combine"

    @property
    def num_slots(self):
        return self.num_tiles * self.max_parts

    @property
    def num_records(self):
        return self.num_tiles

    def unit(self, num_blocks):
        """Blocks of a unit."""
        even = (num_blocks + self.num_splits - 1) // self.num_splits
        return smaller(larger(self.unit_blocks, even), self.longest)

    def begin(self, block, num_blocks):
        unit = self.unit(num_blocks)
        return smaller((block + unit - 1) // unit * unit, num_blocks)

    def end(self, block, num_blocks, room):
        return smaller(num_blocks, block + self.unit(num_blocks))

    def part(
        self, pieces: Chunks, crew: CtaGroup, tile_number, tile_begin, block, num_blocks
    ) -> Part:
        unit, first = self.unit(num_blocks), tile_number * self.max_parts
        return Part(first + block // unit, first, (num_blocks + unit - 1) // unit, tile_number)


@dataclass(frozen=True)
class NoSplit:
    """Cut no tile: the CTA where it begins has all of it."""

    has_parts: ClassVar[bool] = False
    width: ClassVar[int] = 1

    num_slots: ClassVar[int] = 0
    num_records: ClassVar[int] = 0
    words: ClassVar[str] = "whole tiles"

    def begin(self, block, num_blocks):
        return smaller(block, 1) * num_blocks

    def end(self, block, num_blocks, room):
        return num_blocks

    def part(
        self, pieces: Chunks, crew: CtaGroup, tile_number, tile_begin, block, num_blocks
    ) -> Part:
        return Part(0, 0, 1, 0)


Cut = StreamK | CtaGroups | FixedSplit | NoSplit


class Place(NamedTuple):
    """All crews' pieces, and the sequence in which one crew's piece begins."""

    pieces: Chunks
    batch: int  # the sequence
    batch_begin: int  # the position in the line of that sequence's first block


class WalkCursor(NamedTuple):
    """A CTA's position."""

    position: int  # in the line of all blocks
    # batch, tile, block: the same as a sequence, a tile of this sequence, a block of this tile.
    batch: int
    tile: int
    block: int
    length: tuple  # the sequence's length, from `Cached.read`
    following: tuple  # the next sequence's length, read ahead to hide its latency


@dataclass(frozen=True)
class Walk:
    """The segments of one CTA, in the order of working."""

    cut: Cut  # where tiles may be cut
    lengths: Any  # of the sequences, a `fa3.schedules.sequences.Cached`
    # Row blocks per head; if `lengths` know how many each sequence has, the most.
    num_m_blocks: Divisor | PlainDivisor
    num_groups: int  # heads per sequence, in groups of those that walk together
    num_crews: Divisor | PlainDivisor
    crew: Any = None  # the CTA's, a `CtaGroup`
    place: Any = None  # where that crew begins, a `Place`
    number: type = Int32  # the type of a position in the line

    def tiles(self, length: tuple):
        """Tiles of a sequence in the line: one without rows."""
        num_m_blocks, most = self.lengths.m_blocks(length), self.num_m_blocks.value
        if num_m_blocks is None:
            return most * self.num_groups
        return larger(num_m_blocks * self.num_groups, 1)

    def pieces(self, total, fewest, most) -> Chunks:
        """The pieces of a line whose tiles have `fewest` to `most` blocks."""
        if isinstance(self.cut, CtaGroups):
            return Chunks.of_tiles(total, self.num_crews, fewest, most)
        return Chunks(total, self.num_crews, total)

    def first(self) -> WalkCursor:
        pieces, batch, batch_begin = self.place
        position = pieces.begin(self.crew.number)
        length = self.lengths.read(batch)
        num_blocks = self.lengths.num_blocks(length)
        tile = (position - batch_begin) // num_blocks
        block = as_int32(position - batch_begin - tile * num_blocks)
        # A length that is read early may have changed since `locate` read it.
        tile = as_int32(smaller(tile, self.tiles(length) - 1))
        cursor = WalkCursor(position, batch, tile, block, length, self.read(batch + 1))
        return self.advance(cursor, self.cut.begin(block, num_blocks) - block)

    def is_valid(self, cursor: WalkCursor):
        return cursor.position < self.place.pieces.begin(self.crew.number + 1)

    def tile(self, cursor: WalkCursor) -> Tile:
        num_m_blocks, m_blocks = self.lengths.m_blocks(cursor.length), self.num_m_blocks
        if num_m_blocks is not None:
            m_blocks = PlainDivisor(larger(num_m_blocks, 1))
        group = m_blocks.quotient(cursor.tile)
        head = group * self.crew.width + self.crew.lane
        return Tile(cursor.tile - group * m_blocks.value, head, cursor.batch)

    def segment(self, cursor: WalkCursor) -> Segment:
        num_blocks = self.lengths.num_blocks(cursor.length)
        part = self.cut.part(
            self.place.pieces,
            self.crew,
            cursor.batch * (self.num_m_blocks.value * self.num_groups) + cursor.tile,
            cursor.position - cursor.block,
            cursor.block,
            num_blocks,
        )
        return Segment(self.tile(cursor), cursor.block, self.end(cursor), part)

    def next(self, cursor: WalkCursor) -> WalkCursor:
        return self.advance(cursor, self.end(cursor) - cursor.block)

    def end(self, cursor: WalkCursor):
        """The end of the cursor's segment, in blocks of its tile."""
        room = as_int32(self.place.pieces.begin(self.crew.number + 1) - cursor.position)
        return self.cut.end(cursor.block, self.lengths.num_blocks(cursor.length), room)

    def advance(self, cursor: WalkCursor, blocks) -> WalkCursor:
        """The cursor some blocks further on, at most at the tile's end."""
        num_blocks = self.lengths.num_blocks(cursor.length)
        block = cursor.block + blocks
        # `tiles` is 1 at the end of a tile, `batches` 1 at the end of a sequence, else both are 0.
        # A division would take 100 cycles.
        tiles = 1 - smaller(num_blocks - block, 1)
        sequence_tiles = self.tiles(cursor.length)
        batches = 1 - smaller(sequence_tiles - cursor.tile - tiles, 1)
        return WalkCursor(
            cursor.position + blocks,
            cursor.batch + batches,
            cursor.tile + tiles - batches * sequence_tiles,
            block - tiles * num_blocks,
            tuple(
                now + batches * (then - now)
                for now, then in zip(cursor.length, cursor.following, strict=True)
            ),
            self.read(cursor.batch + batches + 1),
        )

    def read(self, batch) -> tuple:
        """The length of a sequence; past the last sequence, the last one's."""
        return self.lengths.read(smaller(batch, self.lengths.num_sequences - 1))

    # --------------------------------------------------------------------------------- device

    @cute.jit
    def locate(self) -> Place:
        """Find the crew's first sequence; every lane calls this.
        A 32-way search: the lanes add up the blocks of equal ranges of sequences, and the range in
        which the piece begins is split again."""
        lengths, number = self.lengths, self.number
        span = cutlass.max(Int32(lengths.num_sequences), 2)
        batch, batch_begin, total, end = Int32(0), number(0), number(-1), number(0)
        lane = cute.arch.lane_idx()
        while span > 1:
            share = (span + WARP - 1) // WARP
            begin = batch + lane * share
            blocks, fewest, most = number(0), Int32(MOST_ROOM), Int32(0)
            for i in cutlass.range(begin, cutlass.min(begin + share, lengths.num_sequences)):
                length = lengths.read(i)
                tile_blocks = lengths.num_blocks(length)
                blocks += number(self.tiles(length)) * tile_blocks
                if cutlass.const_expr(isinstance(self.cut, CtaGroups)):
                    fewest, most = cutlass.min(fewest, tile_blocks), cutlass.max(most, tile_blocks)
            upto = sum_in_warp(blocks)
            if total < 0:
                total, end = self.total(upto, fewest, most)
            target = Chunks(total, self.num_crews, end).begin(self.crew.number) - batch_begin
            before, blocks_before = range_of(target, blocks, upto)
            batch_begin += blocks_before
            batch = cutlass.min(batch + before * share, lengths.num_sequences - 1)
            span = share
        return Place(Chunks(total, self.num_crews, end), batch, batch_begin)

    @cute.jit
    def locate_among_few(self, length: tuple) -> Place:
        """`locate` among at most 32 sequences.
        Each lane has the length of one. There is no loop. If lengths are read early, the compiler
        does not see that all lanes leave a loop together. Then it issues TMA loads by more
        instructions."""
        tile_blocks = self.lengths.num_blocks(length)
        is_one = cute.arch.lane_idx() < self.lengths.num_sequences
        blocks = self.number(self.tiles(length)) * tile_blocks
        # The other lanes have the last sequence's length.
        blocks = blocks if is_one else self.number(0)
        upto = sum_in_warp(blocks)
        total, end = self.total(upto, tile_blocks, tile_blocks)
        pieces = Chunks(total, self.num_crews, end)
        before, batch_begin = range_of(pieces.begin(self.crew.number), blocks, upto)
        return Place(pieces, cutlass.min(before, self.lengths.num_sequences - 1), batch_begin)

    def locate_among_equals(self) -> Place:
        """`locate` by a division, where all sequences have equally many blocks."""
        tile_blocks = self.lengths.num_blocks(self.lengths.read(0))
        sequence_blocks = self.number(self.num_m_blocks.value * self.num_groups) * tile_blocks
        total = sequence_blocks * self.lengths.num_sequences
        pieces = self.pieces(total, tile_blocks, tile_blocks)
        batch = as_int32(pieces.begin(self.crew.number) // sequence_blocks)
        batch = smaller(batch, self.lengths.num_sequences - 1)
        return Place(pieces, batch, batch * sequence_blocks)

    @cute.jit
    def total(self, upto, fewest, most) -> tuple:
        """The blocks of all pieces, and of all sequences."""
        end = cute.arch.shuffle_sync(upto, WARP - 1)
        if cutlass.const_expr(isinstance(self.cut, CtaGroups)):
            fewest = cute.arch.warp_redux_sync(fewest, "min")
            most = cute.arch.warp_redux_sync(most, "max")
        return self.pieces(end, fewest, most).total, end


@cute.jit
def range_of(target, blocks, upto) -> tuple:
    """The lane whose range has the block at `target`.
    Also returns the blocks before that range."""
    before = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= target))
    before = cutlass.min(before, WARP - 1)
    return before, cute.arch.shuffle_sync(upto - blocks, before)


# ---------------------------------------------------------------------------------------- host


def walks(cut: Cut, lengths, num_m_blocks: int, num_heads: int, num_ctas: int) -> Iterator[Walk]:
    """Yield the walk of every CTA, as in the kernel."""
    row_blocks, num_crews = PlainDivisor(num_m_blocks), PlainDivisor(num_ctas // cut.width)
    line = Walk(cut, lengths, row_blocks, num_heads // cut.width, num_crews)
    known = list(map(lengths.read, range(lengths.num_sequences)))
    tile_blocks, begins = list(map(lengths.num_blocks, known)), [0]
    for length, num_blocks in zip(known, tile_blocks, strict=True):
        begins.append(begins[-1] + line.tiles(length) * num_blocks)
    pieces, batch = line.pieces(begins[-1], min(tile_blocks), max(tile_blocks)), 0
    for cta in range(num_ctas):
        crew = CtaGroup(cta // cut.width, cta % cut.width, cut.width)
        while batch + 1 < len(known) and begins[batch + 1] <= pieces.begin(crew.number):
            batch += 1
        yield replace(line, crew=crew, place=Place(pieces, batch, begins[batch]))


def segments(
    cut: Cut, lengths, num_m_blocks: int, num_heads: int, num_ctas: int
) -> Iterator[tuple[int, Segment]]:
    """Yield (CTA, segment) of every segment, CTA by CTA."""
    for walk in walks(cut, lengths, num_m_blocks, num_heads, num_ctas):
        cursor = walk.first()
        while walk.is_valid(cursor):
            segment, first = walk.segment(cursor), lengths.blocks(cursor.length).begin
            blocks = {"begin": first + segment.begin, "end": first + segment.end}
            yield walk.crew.cta, segment._replace(**blocks)
            cursor = walk.next(cursor)
