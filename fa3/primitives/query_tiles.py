"""What the backward pass keeps of each tile of queries in global memory, all of it fp32.

`RowStatistics`: each row's log-sum-exp and delta; `fa3.primitives.query_begin` writes them, the
backward kernel loads those of a tile in one run.

`QueryGradients`: the sums of dQ. Many CTAs add to the same rows, one for each tile of keys. In the
backward kernel each warp puts its accumulators into shared memory, from where they are added in
bulk (`add`); `fa3.primitives.query_end` makes dQ of them. Nobody else looks at this memory, so its
layout is free: what a warp has of a tile lies in a row, of 4 elements of each thread after another.

`SumWords`: how far the sums of each tile are, of which `fa3.primitives.first_additions` or
`fa3.primitives.ordered_gradients` makes sure.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives.bulk import add_run, store_run
from fa3.primitives.vectors import QUAD
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

STATISTICS = 2
"""Numbers of a row: its log-sum-exp and its delta."""

UNIT_OF_PIECE = 16
"""Columns of a piece are a multiple of this, which is the smallest swizzled unit."""

PAIR = 2
"""Neighbouring columns of an accumulator that a thread has."""


class QueryTiles(NamedTuple):
    """Numbers the tiles of queries (m_block, head, batch) of sequences of equal lengths."""

    num_m_blocks: Int32
    num_heads: Int32

    def number(self, tile) -> Int64:
        m_block, head, batch = tile
        return Int64(m_block) + self.num_m_blocks * (head + self.num_heads * Int64(batch))

    def at(self, tile_m: int, segment) -> "QueryTiles":
        """The numbers for a segment's sequence."""
        return self

    def at_keys(self, tile_n: int, segment) -> "QueryTiles":
        """The numbers of key tiles for a segment's sequence."""
        return self


class PackedQueryTiles(NamedTuple):
    """Numbers the tiles of queries (m_block, head, batch) of packed sequences.

    Where tiles of each sequence begin follows from its first row alone: at row // tile_m + batch.
    So no two sequences have one in common, and some numbers have no tile.

    Fields:
        of_head: numbers of a head, those of all sequences.
        first: that of the present sequence's first tile in head 0.
    """

    of_head: Int32
    first: Int32

    @classmethod
    def of(cls, total_q, num_sequences, tile_m: int) -> "PackedQueryTiles":
        return cls(number_of_packed_tiles(total_q, num_sequences, tile_m), Int32(0))

    def number(self, tile) -> Int64:
        m_block, head, _ = tile
        return Int64(self.first + m_block) + self.of_head * Int64(head)

    def at(self, tile_m: int, segment) -> "PackedQueryTiles":
        """The numbers for a segment's sequence."""
        return self.of_sequence(tile_m, segment.record.begin_q, segment.record.batch)

    def at_keys(self, tile_n: int, segment) -> "PackedQueryTiles":
        """The numbers of key tiles for a segment's sequence."""
        return self.of_sequence(tile_n, segment.record.begin_k, segment.record.batch)

    def of_sequence(self, tile_m: int, begin_q, batch) -> "PackedQueryTiles":
        """The numbers for a sequence."""
        return self._replace(first=first_packed_tile(tile_m, begin_q, batch))


def first_packed_tile(tile_m: int, begin_q, batch):
    """Where the tiles of a packed sequence begin; it grows with `batch`."""
    return begin_q // tile_m + batch


def number_of_packed_tiles(total_q, num_sequences, tile_m: int):
    """Numbers of a head, on the host or in a kernel."""
    return first_packed_tile(tile_m, total_q, num_sequences)


class RowStatistics(NamedTuple):
    """The statistics of all tiles; `buffer` is (tiles * STATISTICS * tile_m,)."""

    buffer: cute.Tensor
    tiles: QueryTiles | PackedQueryTiles

    def at(self, tile_m: int, segment) -> "RowStatistics":
        """The statistics for a segment's sequence."""
        return self._replace(tiles=self.tiles.at(tile_m, segment))

    def of_tile(self, tile_m: int, tile) -> cute.Tensor:
        """(tile_m, STATISTICS): of each place the log-sum-exp in powers of two, and delta.

        `place_of_row` says which row has a place.

        A row that sees no key, or that is past the last query, has inf and 0, so that its P is 0.
        """
        begin = self.tiles.number(tile) * (STATISTICS * tile_m)
        return cute.make_tensor(
            (self.buffer.iterator + begin).align(16), cute.make_layout((tile_m, STATISTICS))
        )


def place_of_row(row, at_once: int):
    """The place of a row of a tile, on the host or in a kernel.

    A thread's columns of an accumulator are pairs, 8 apart. If it reads 4 rows at once, two pairs
    lie side by side, and next to them those of the next thread.
    """
    if at_once == PAIR:
        return row
    second, first = row // 8 % 2, row % 8
    return row // 16 * 16 + first // PAIR * QUAD + second * PAIR + first % PAIR


class SumWords(NamedTuple):
    """The words of all tiles; `buffer` is (tiles,), int32."""

    buffer: cute.Tensor

    def of_tile(self, tiles: QueryTiles | PackedQueryTiles, tile) -> cute.Pointer:
        """The word of a tile."""
        return self.buffer.iterator + tiles.number(tile)

    @cute.jit
    def clear(self, tiles, tile, thread):
        """Set a tile's word to zero."""
        if thread == 0:
            cute.arch.store(self.of_tile(tiles, tile), Int32(0))


class QueryPieces(NamedTuple):
    """A tile of dQ in pieces of 64 rows, which a warpgroup computes one after another.

    Fields:
        rows, columns: pieces below and beside one another; one of the two is 1.
        width: columns of a piece.
    """

    rows: int
    columns: int
    width: int

    @classmethod
    def of(cls, tile_m: int, columns: int, widest: int) -> "QueryPieces":
        """Pieces of a tile of `tile_m` rows and `columns` columns, as few as can be with at most
        `widest` columns.

        Raises:
            ValueError: there are no such pieces.
        """
        units = columns // UNIT_OF_PIECE
        fits = (n for n in range(1, units + 1) if units % n == 0)
        beside = next(n for n in fits if columns // n <= widest)
        if tile_m % ROWS or (tile_m > ROWS and beside > 1):
            raise ValueError(
                f"tile_m must be {ROWS}, or a multiple of it with {widest} columns or fewer, "
                f"got {tile_m} with {columns} columns"
            )
        return cls(tile_m // ROWS, beside, columns // beside)

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def quads(self) -> int:
        """Groups of 4 elements that a thread has of a piece."""
        return ROWS * self.width // WARPGROUP // QUAD

    @property
    def numbers(self) -> int:
        """Elements of a tile."""
        return self.count * ROWS * self.width

    @property
    def in_flight(self) -> int:
        """Pieces that are in shared memory at once, on their way to the sums.

        As many as divide their number; others would do, and have not been measured.
        """
        return next(n for n in (3, 2, 1) if self.count % n == 0)

    @property
    def numbers_in_flight(self) -> int:
        """Elements of these pieces."""
        return self.in_flight * ROWS * self.width


class QueryGradients(NamedTuple):
    """The sums of all tiles; `buffer` is (tiles * pieces.numbers,)."""

    buffer: cute.Tensor
    tiles: QueryTiles | PackedQueryTiles

    def at(self, tile_m: int, segment) -> "QueryGradients":
        """The sums for a segment's sequence."""
        return self._replace(tiles=self.tiles.at(tile_m, segment))

    def quads_of(self, pieces: QueryPieces, thread, piece, tile) -> cute.Tensor:
        """(4, quads): a thread's elements of one piece of a tile."""
        begin = self.tiles.number(tile) * pieces.numbers
        of_warp = (piece * WARPS + thread // WARP) * (pieces.quads * WARP * QUAD)
        return quads_of_lane(self.buffer.iterator + (begin + of_warp), thread % WARP, pieces.quads)

    @cute.jit
    def add(self, pieces: cutlass.Constexpr, piece, tile, place, memory, is_first):
        """Add a piece in shared memory to the sums, or store it; one thread calls this.

        The piece is still under way when it returns: who wants it done waits for this thread's
        bulk groups.
        """
        numbers = pieces.numbers // pieces.count
        source = (memory.iterator + place * numbers).align(16)
        target = self.quads_of(pieces, 0, piece, tile).iterator
        run = cute.make_tensor(source, cute.make_layout(numbers))
        if is_first:
            store_run(run, target)
        else:
            add_run(run, target)

    @cute.jit
    def clear(self, pieces: cutlass.Constexpr, thread, threads: cutlass.Constexpr, tile):
        """Set a tile to zero; `threads` threads share the work."""
        quads = pieces.numbers // QUAD
        begin = self.quads_of(pieces, 0, 0, tile).iterator
        target = cute.make_tensor(begin, cute.make_layout((QUAD, quads)))
        zeros = cute.make_rmem_tensor(QUAD, Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(-(-quads // threads)):
            quad = thread + i * threads
            if quad < quads:
                cute.autovec_copy(zeros, target[None, quad])


@cute.jit
def stage_piece(pieces: cutlass.Constexpr, acc: cute.Tensor, thread, place, memory: cute.Tensor):
    """Write a warp's accumulators of a piece to its place, for `QueryGradients.add`."""
    first = cute.arch.make_warp_uniform(place * WARPS + thread // WARP) * (WARP * QUAD)
    run = (memory.iterator + first * pieces.quads).align(16)
    cute.autovec_copy(in_quads(acc), quads_of_lane(run, thread % WARP, pieces.quads))


def quads_of_lane(first: cute.Pointer, lane, quads: int) -> cute.Tensor:
    """(4, quads): a lane's elements of those of a warp, which begin at `first`."""
    layout = cute.make_layout((QUAD, quads), stride=(1, QUAD * WARP))
    return cute.make_tensor((first + lane * QUAD).align(16), layout)


def in_quads(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator as (4, quads): of each quad two columns of two rows."""
    return cute.logical_divide(cute.flatten(acc), cute.make_layout(QUAD))
