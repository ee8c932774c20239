"""Segments of the decode kernel, from the key blocks of sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa3.schedules import stream_k
from fa3.schedules.segment import Segment, Tile
from fa3.schedules.stream_k import Cut
from fa3.scores.masks import Blocks


@dataclass(frozen=True)
class HostLengths:
    """Lengths of sequences as `Walk` takes them, in lists."""

    ranges: Sequence[tuple[int, int]]  # key blocks [begin, end) that a sequence's queries touch
    # Row blocks of a head of each sequence, or 0; None if all have equally many.
    of_rows: Sequence[int] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.ranges)

    def read(self, batch: int) -> tuple[int, ...]:
        rows = () if self.of_rows is None else (self.of_rows[batch],)
        return *self.ranges[batch], *rows

    def blocks(self, length: tuple[int, ...]) -> Blocks:
        begin, end, *_ = length
        return Blocks(begin, begin, begin, end)

    def num_blocks(self, length: tuple[int, ...]) -> int:
        begin, end, *_ = length
        return end - begin

    def m_blocks(self, length: tuple[int, ...]) -> int | None:
        _, _, *rows = length
        return rows[0] if rows else None


def segments(cut: Cut, blocks, *sizes: int, of_rows=None) -> Iterator[tuple[int, Segment]]:
    """Yield (CTA, segment); `sizes` are row blocks of a head, heads and CTAs."""
    yield from stream_k.segments(cut, HostLengths(blocks, of_rows), *sizes)


def records(cut: Cut, blocks, *sizes: int, of_rows=None) -> Iterator[tuple[int, Tile, range]]:
    """Yield (record, tile, slots to merge in this order) for every tile that is cut into parts."""
    for _, segment in segments(cut, blocks, *sizes, of_rows=of_rows):
        part, (first, _) = segment.part, blocks[segment.tile.batch]
        if segment.begin == first and part.num_parts > 1:
            slots = range(part.first_slot, part.first_slot + part.num_parts)
            yield part.record, segment.tile, slots
