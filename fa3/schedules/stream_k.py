"""Where the keys of cached sequences are cut, so that all CTAs of the decode kernel read as much.

A tile is up to 64 query rows of one key/value head of one sequence; it walks the key blocks that
its sequence's queries touch. All blocks stand in one line: sequences one after another, in a
sequence its tiles (heads, in a head the row blocks), in a tile its blocks. The line is cut into
one piece for each CTA, and pieces differ by one block at most. A *segment* is what a CTA does of
one tile at once. If it is the whole tile, its result is final; otherwise it is a *part*, kept in a
slot of the workspace. The parts of a tile lie in consecutive slots, and the segment that begins
the tile leaves a record of them for the kernel that merges: (m_block, head, batch, first slot,
parts).

What may be a segment is the cut: `StreamK` cuts tiles anywhere, `Units` only between units.

Everything but `locate` is plain arithmetic on the fields, so the same code runs on Python ints
(executor, tests) and on values inside a kernel: host and device cannot drift. Those are Int32; only
places in the line are Int64 where the line may be that long.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.wgmma import WARP
from fa3.schedules.segment import Part, Segment, Tile

MOST_ROOM = 2**30
"""More blocks than a tile has."""


def as_int32(number):
    """What follows from places in a long line, in 32 bits: blocks, cut off at `MOST_ROOM`."""
    return Int32(smaller(number, MOST_ROOM)) if isinstance(number, Int64) else number


class Lengths(Protocol):
    """The lengths of the sequences: lists on the host, tensors on the device."""

    num_sequences: int

    def read(self, batch) -> tuple:
        """What is known of a sequence: a tuple of integers."""

    def num_blocks(self, length: tuple):
        """Blocks that a tile of a sequence walks; at least one."""


@dataclass(frozen=True)
class Pieces:
    """`total` blocks in a line, cut into `num_ctas` pieces whose sizes differ by one at most."""

    total: int
    num_ctas: int

    def begin(self, cta):
        """First block of a piece; the end of the piece before."""
        size = self.total // self.num_ctas
        return cta * size + smaller(cta, self.total - size * self.num_ctas)

    def cta_of(self, position):
        """The piece that a block belongs to."""
        size = self.total // self.num_ctas
        longer_ctas = self.total - size * self.num_ctas
        longer = longer_ctas * (size + 1)
        # 1 among the longer pieces, 0 behind them. Then one division will do.
        among = smaller(larger(longer - position, 0), 1)
        behind = 1 - among
        return behind * longer_ctas + (position - behind * longer) // larger(size + among, 1)


@dataclass(frozen=True)
class StreamK:
    """Cut tiles wherever a piece ends: pieces are equal, and a tile has as few parts as can be.

    At most one tile begins in a CTA's piece and does not end there. Its part has slot 2 cta, and
    the CTAs that go on with it count up from there. Records are by tile, or by CTA if those are
    fewer; then a CTA in which no tile begins has to clear its own.
    """

    num_ctas: int
    num_tiles: int

    has_parts: ClassVar[bool] = True

    @property
    def num_slots(self):
        return 2 * self.num_ctas

    @property
    def num_records(self):
        return smaller(self.num_ctas, self.num_tiles)

    @property
    def records_are_by_cta(self):
        return self.num_tiles > self.num_ctas

    def begin(self, block, num_blocks):
        """Where a segment begins that is not to begin before a block of its tile."""
        return block

    def end(self, block, num_blocks, room):
        """Where a segment ends; `room` blocks are left of the piece."""
        return smaller(num_blocks, block + room)

    def part(self, pieces: Pieces, cta, tile_number, tile_begin, block, num_blocks) -> Part:
        first = as_int32(pieces.cta_of(tile_begin))
        last = as_int32(pieces.cta_of(tile_begin + num_blocks - 1))
        by_tile = smaller(self.num_ctas // self.num_tiles, 1)
        record = cta + by_tile * (tile_number - cta)
        return Part(first + cta, 2 * first, last - first + 1, record)


@dataclass(frozen=True)
class Units:
    """Cut tiles into units only; a unit belongs to the piece in which it begins.

    A tile of n blocks has units of max(unit_blocks, ceil(n / num_splits)) blocks.

    Fields:
        num_splits: most units of a tile.
        unit_blocks: fewest blocks of a unit but the last.
        max_parts: most units that any tile of this call may have: slots are laid out by it.
        num_tiles: tiles of this call.
    """

    num_splits: int
    unit_blocks: int
    max_parts: int
    num_tiles: int

    has_parts: ClassVar[bool] = True

    @property
    def num_slots(self):
        return self.num_tiles * self.max_parts

    @property
    def num_records(self):
        return self.num_tiles

    def unit(self, num_blocks):
        """Blocks of a unit."""
        return larger(self.unit_blocks, (num_blocks + self.num_splits - 1) // self.num_splits)

    def begin(self, block, num_blocks):
        unit = self.unit(num_blocks)
        return smaller((block + unit - 1) // unit * unit, num_blocks)

    def end(self, block, num_blocks, room):
        return smaller(num_blocks, block + self.unit(num_blocks))

    def part(self, pieces: Pieces, cta, tile_number, tile_begin, block, num_blocks) -> Part:
        unit, first = self.unit(num_blocks), tile_number * self.max_parts
        return Part(first + block // unit, first, (num_blocks + unit - 1) // unit, tile_number)


@dataclass(frozen=True)
class Whole:
    """Do not cut tiles: a tile belongs to the piece in which it begins."""

    has_parts: ClassVar[bool] = False

    num_slots: ClassVar[int] = 0
    num_records: ClassVar[int] = 0

    def begin(self, block, num_blocks):
        return smaller(block, 1) * num_blocks

    def end(self, block, num_blocks, room):
        return num_blocks

    def part(self, pieces: Pieces, cta, tile_number, tile_begin, block, num_blocks) -> Part:
        return Part(0, 0, 1, 0)


class Place(NamedTuple):
    """A CTA's piece of the line, and the sequence in which it begins.

    Fields:
        batch: the sequence.
        batch_begin: where its blocks begin in the line.
    """

    pieces: Pieces
    batch: int
    batch_begin: int


class Cursor(NamedTuple):
    """Where a CTA stands.

    Fields:
        position: in the line.
        batch, tile, block: the same as a sequence, a tile of it and a block of that.
        length: what `Lengths` knows of the sequence.
        following: the same of the next sequence, read ahead.
    """

    position: int
    batch: int
    tile: int
    block: int
    length: tuple
    following: tuple


@dataclass(frozen=True)
class Walk:
    """The segments of one CTA, in the order in which producer and consumers work on them.

    Fields:
        cut: what may be a segment.
        lengths: the lengths of the sequences.
        num_m_blocks, num_heads: tiles of a sequence.
    """

    cut: StreamK | Units | Whole
    lengths: Lengths
    num_m_blocks: int
    num_heads: int
    cta: int
    place: Place

    @property
    def tiles(self):
        return self.num_m_blocks * self.num_heads

    def first(self) -> Cursor:
        pieces, batch, batch_begin = self.place
        position = pieces.begin(self.cta)
        length = self.lengths.read(batch)
        num_blocks = self.lengths.num_blocks(length)
        tile = (position - batch_begin) // num_blocks
        block = as_int32(position - batch_begin - tile * num_blocks)
        # The length may have changed since the search, if it is read early.
        tile = as_int32(smaller(tile, self.tiles - 1))
        cursor = Cursor(position, batch, tile, block, length, self.read(batch + 1))
        return self.advance(cursor, self.cut.begin(block, num_blocks) - block)

    def is_valid(self, cursor: Cursor):
        return cursor.position < self.place.pieces.begin(self.cta + 1)

    def tile(self, cursor: Cursor) -> Tile:
        head = cursor.tile // self.num_m_blocks
        return Tile(cursor.tile - head * self.num_m_blocks, head, cursor.batch)

    def segment(self, cursor: Cursor) -> Segment:
        num_blocks = self.lengths.num_blocks(cursor.length)
        part = self.cut.part(
            self.place.pieces,
            self.cta,
            cursor.batch * self.tiles + cursor.tile,
            cursor.position - cursor.block,
            cursor.block,
            num_blocks,
        )
        return Segment(self.tile(cursor), cursor.block, self.end(cursor), part)

    def next(self, cursor: Cursor) -> Cursor:
        return self.advance(cursor, self.end(cursor) - cursor.block)

    def end(self, cursor: Cursor):
        """Where the segment at the cursor ends."""
        room = as_int32(self.place.pieces.begin(self.cta + 1) - cursor.position)
        return self.cut.end(cursor.block, self.lengths.num_blocks(cursor.length), room)

    def advance(self, cursor: Cursor, blocks) -> Cursor:
        """Go on by some blocks, at most to the end of the tile."""
        num_blocks = self.lengths.num_blocks(cursor.length)
        block = cursor.block + blocks
        # 1 at the end of a tile and of a sequence, 0 before; a division would take 100 cycles.
        tiles = 1 - smaller(num_blocks - block, 1)
        batches = 1 - smaller(self.tiles - cursor.tile - tiles, 1)
        return Cursor(
            cursor.position + blocks,
            cursor.batch + batches,
            cursor.tile + tiles - batches * self.tiles,
            block - tiles * num_blocks,
            tuple(
                now + batches * (then - now)
                for now, then in zip(cursor.length, cursor.following, strict=True)
            ),
            self.read(cursor.batch + batches + 1),
        )

    def read(self, batch) -> tuple:
        """The length of a sequence, or of the last behind it: there is always one to read."""
        return self.lengths.read(smaller(batch, self.lengths.num_sequences - 1))


# ------------------------------------------------------------------------------------- device


@cute.jit
def locate(lengths: Lengths, tiles, num_ctas, cta, number: cutlass.Constexpr) -> Place:
    """Find the sequence in which the piece of a CTA begins. Every lane of a warp calls this.

    The lanes add up a range of sequences each, and narrow in on the one in question. `number` is
    the type of a place in the line.
    """
    span = Int32(WARP)
    while span < lengths.num_sequences:
        span = span * WARP
    batch, batch_begin, total = Int32(0), number(0), number(-1)
    lane = cute.arch.lane_idx()
    while span > 1:
        share = span // WARP
        begin = batch + lane * share
        blocks = number(0)
        for i in cutlass.range(begin, cutlass.min(begin + share, lengths.num_sequences)):
            blocks += number(tiles) * lengths.num_blocks(lengths.read(i))
        upto = blocks
        for shift in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << shift, mask_and_clamp=0)
            upto = upto + below if lane >= 1 << shift else upto
        if total < 0:
            total = cute.arch.shuffle_sync(upto, WARP - 1)
        target = Pieces(total, num_ctas).begin(cta) - batch_begin
        before = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= target))
        before = cutlass.min(before, WARP - 1)
        batch_begin += cute.arch.shuffle_sync(upto - blocks, before)
        batch = cutlass.min(batch + before * share, lengths.num_sequences - 1)
        span = share
    return Place(Pieces(total, num_ctas), batch, batch_begin)


# ---------------------------------------------------------------------------------------- host


@dataclass(frozen=True)
class HostLengths:
    """Blocks [begin, end) of keys that the queries of each sequence touch."""

    blocks: Sequence[tuple[int, int]]

    @property
    def num_sequences(self) -> int:
        return len(self.blocks)

    def read(self, batch: int) -> tuple[int, int]:
        return self.blocks[batch]

    def num_blocks(self, length: tuple[int, int]) -> int:
        begin, end = length
        return end - begin


def walks(
    cut: StreamK | Units | Whole,
    lengths: HostLengths,
    num_m_blocks: int,
    num_heads: int,
    num_ctas: int,
) -> Iterator[Walk]:
    """Yield the walk of every CTA, as the kernel's CTAs find it."""
    tiles = num_m_blocks * num_heads
    begins = [0]
    for length in lengths.blocks:
        begins.append(begins[-1] + tiles * lengths.num_blocks(length))
    pieces, batch = Pieces(begins[-1], num_ctas), 0
    for cta in range(num_ctas):
        while batch + 1 < len(lengths.blocks) and begins[batch + 1] <= pieces.begin(cta):
            batch += 1
        place = Place(pieces, batch, begins[batch])
        yield Walk(cut, lengths, num_m_blocks, num_heads, cta, place)


def segments(
    cut: StreamK | Units | Whole,
    blocks: Sequence[tuple[int, int]],
    num_m_blocks: int,
    num_heads: int,
    num_ctas: int,
) -> Iterator[tuple[int, Segment]]:
    """Yield every segment with its CTA, CTA by CTA; its key blocks are those of the sequence.

    Args:
        blocks: key blocks [begin, end) that the queries of each sequence touch, at least one.
        num_m_blocks: tiles of query rows of a key/value head.
        num_heads: key/value heads.
    """
    for walk in walks(cut, HostLengths(blocks), num_m_blocks, num_heads, num_ctas):
        cursor = walk.first()
        while walk.is_valid(cursor):
            segment = walk.segment(cursor)
            first, _ = blocks[segment.tile.batch]
            yield (
                walk.cta,
                segment._replace(begin=first + segment.begin, end=first + segment.end),
            )
            cursor = walk.next(cursor)


def records(
    cut: StreamK | Units | Whole,
    blocks: Sequence[tuple[int, int]],
    num_m_blocks: int,
    num_heads: int,
    num_ctas: int,
) -> Iterator[tuple[int, Tile, range]]:
    """Yield (record, tile, slots to merge in this order) of every tile that has parts."""
    for walk in walks(cut, HostLengths(blocks), num_m_blocks, num_heads, num_ctas):
        cursor = walk.first()
        while walk.is_valid(cursor):
            tile, begin, _, part = walk.segment(cursor)
            if begin == 0 and part.num_parts > 1:
                yield part.record, tile, range(part.first_slot, part.first_slot + part.num_parts)
            cursor = walk.next(cursor)
