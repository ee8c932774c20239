"""Query tiles of the backward pass: numbers, statistics of rows, and order.

`statistics_of_tile`: the log-sum-exp and the delta of each row. `fa3.kernels.backward_queries`
writes them; the backward kernel loads the statistics of a tile in one run. The other thing that is
kept of each tile is in `fa3.primitives.dq_accumulator`.

Where key tiles add to dQ in a fixed order, CTAs also take them in this order. At every query block
a key tile waits for the key tile before it. Under a causal mask there are two orders in which it
hardly waits, and head groups alternate between them:

    even head groups   Last keys first, query blocks upwards. CTAs that start together keep a
                       distance of one key tile. But the longest key tiles start last.
    odd head groups    First keys first, query blocks downwards. The longest key tiles start first.
                       CTAs keep the distance with which they start.

A head group has about as many key tiles as there are SMs. So the CTAs start together with an even
group, and end one after another, the shortest key tile first. They start the odd group in this
order, with the longest key tile first, and end together (docs/experiments.md).

Source: Qiang et al., DASH (arXiv 2601.21824): query blocks walked downwards, and the longest key
tiles paired with the shortest.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.primitives.vectors import QUAD

STATISTICS = 2  # numbers of a row: its log-sum-exp and its delta
PAIR = 2  # neighbouring columns of an accumulator that a thread has


class QueryTiles(NamedTuple):
    """Numbers the query tiles (m_block, head, batch) of sequences of equal lengths."""

    tiles_per_head: Int32
    num_heads: Int32

    def number(self, tile) -> Int64:
        m_block, head, batch = tile
        return Int64(m_block) + self.tiles_per_head * (head + self.num_heads * Int64(batch))

    def at(self, tile: int, segment) -> "QueryTiles":
        """The numbers for a segment's sequence, of query or key tiles."""
        return self

    at_keys = at


class PackedQueryTiles(NamedTuple):
    """Numbers the query tiles (m_block, head, batch) of packed sequences.
    The first tile of a sequence follows from its first row alone: row // tile_m + batch. So no two
    sequences share a number, and some numbers have no tile."""

    tiles_per_head: Int32  # numbers of a head, for all sequences
    first: Int32  # the number of the present sequence's first tile in head 0

    @classmethod
    def of(cls, total_q, num_sequences, tile_m: int) -> "PackedQueryTiles":
        return cls(number_of_packed_tiles(total_q, num_sequences, tile_m), Int32(0))

    def number(self, tile) -> Int64:
        m_block, head, _ = tile
        return Int64(self.first + m_block) + self.tiles_per_head * Int64(head)

    def at(self, tile_m: int, segment) -> "PackedQueryTiles":
        """The numbers for a segment's sequence."""
        return self.of_sequence(tile_m, segment.record.begin_q, segment.record.batch)

    def at_keys(self, tile_n: int, segment) -> "PackedQueryTiles":
        """The numbers of key tiles for a segment's sequence."""
        return self.of_sequence(tile_n, segment.record.begin_k, segment.record.batch)

    def of_sequence(self, tile_m: int, begin_q, batch) -> "PackedQueryTiles":
        """The numbers for a sequence."""
        return self._replace(first=number_of_packed_tiles(begin_q, batch, tile_m))


def number_of_packed_tiles(rows, num_sequences, tile_m: int):
    """Numbers of a head's tiles for rows of packed sequences.
    A tile may be partly full only where a sequence ends. A sequence's first tile has the number
    that the rows and the sequences before it give."""
    return rows // tile_m + num_sequences


def statistics_of_tile(buffer: cute.Tensor, tile_m: int, number: Int64) -> cute.Tensor:
    """(tile_m, STATISTICS): log-sum-exp in powers of two, and delta, by `place_of_row`.
    `buffer` has them by the numbers of tiles. A row that sees no key, or that is past the last
    query, has inf and 0, so that its P is 0."""
    begin = number * (STATISTICS * tile_m)
    return cute.make_tensor(
        (buffer.iterator + begin).align(16), cute.make_layout((tile_m, STATISTICS))
    )


def place_of_row(row, at_once: int):
    """The place of a row's statistics in its tile.
    A thread's columns of an accumulator are pairs, 8 apart. If it reads the statistics of 4 rows at
    once, two of its pairs are next to each other, followed by the pairs of the next thread."""
    if at_once == PAIR:
        return row
    second, first = row // 8 % 2, row % 8
    return row // 16 * 16 + first // PAIR * QUAD + second * PAIR + first % PAIR


class QueryWalk(NamedTuple):
    """Query blocks upwards or downwards."""

    blocks: Any  # places of the walk, [begin, end), and of them the ones with unmasked blocks
    # first, step: the query block at place i is first + step * i; None if it is i.
    first: Int32 | None = None
    step: Int32 | None = None

    is_down = False  # it may be down, but not in all launches

    @property
    def may_be_down(self) -> bool:
        """Whether unmasked blocks may come before masked ones."""
        return self.step is not None

    @classmethod
    def of(cls, blocks, is_down) -> "QueryWalk":
        """The walk of `Blocks`, downwards if `is_down` is 1, else upwards."""
        if is_down is None:
            return cls(blocks)
        begin, full_begin, full_end, end = blocks
        shift = is_down * (begin + end - full_begin - full_end)
        places = blocks._replace(full_begin=full_begin + shift, full_end=full_end + shift)
        return cls(places, is_down * (begin + end - 1), 1 - 2 * is_down)

    def at(self, i):
        """The query block at place i of the walk."""
        return i if self.step is None else self.first + self.step * i

    def place(self, i, head) -> tuple:
        """The query block and head at place i; `head` is the first."""
        return self.at(i), head


class LineWalk(NamedTuple):
    """A line's query blocks of all heads, from the last block downwards."""

    blocks: Any  # places of the walk, [begin, end), and of them the ones with unmasked blocks
    last: Int32  # the last query block
    heads: Any  # a `Divisor` by the heads

    is_down = may_be_down = True  # unmasked blocks come before masked ones

    @classmethod
    def of(cls, blocks, heads, begin, end) -> "LineWalk":
        """The walk of places [begin, end); all `Blocks` end with the last."""
        count, full = ((blocks.end - n) * heads.value for n in (blocks.begin, blocks.full_begin))
        places = blocks._replace(begin=0, full_begin=0, full_end=full, end=count)
        return cls(places.walked(begin, end), blocks.end - 1, heads)

    def at(self, i):
        """The query block at place i of the walk."""
        return self.last - self.heads.quotient(i)

    def place(self, i, head) -> tuple:
        """The query block and head at place i; `head` is the first."""
        return self.at(i), head + i - self.heads.quotient(i) * self.heads.value
