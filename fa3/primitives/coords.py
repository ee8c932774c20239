"""Query, key, head and batch of a thread's scores, for masks, score functions and epilogues."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.fragments import as_rows_and_columns
from fa3.primitives.wgmma import ROWS


class Position(NamedTuple):
    """The position of one score, as a user's score or mask function sees it.

    `query` and `key` are always inside the sequence: in the padding of a tile they name the last
    one, and 0 if the sequence has none. Query i is aligned with key i + seqlen_k - seqlen_q.
    """

    batch: Int32
    head: Int32
    query: Int32
    key: Int32
    seqlen_q: Int32
    seqlen_k: Int32


@dataclass(frozen=True)
class ScoreCoords:
    """Coordinates of a thread's scores. Score (r, c) belongs to query `row + row_steps[r]` and to
    column `column + column_steps[c]` of a block of `tile_n` keys. Steps are compile-time integers.
    """

    row: Int32
    column: Int32
    row_steps: tuple[int, ...]
    column_steps: tuple[int, ...]
    tile_n: int
    batch: Int32
    head: Int32

    @classmethod
    def of(cls, tiled_mma: cute.TiledMma, thread, tile_shape: tuple[int, int], row_begin, tile):
        """The coordinates of `thread` in an accumulator tile whose first row is `row_begin`."""
        identity = cute.make_identity_tensor(tile_shape)
        first = as_rows_and_columns(tiled_mma.get_slice(0).partition_C(identity))
        row, column = tiled_mma.get_slice(thread).partition_C(identity)[0]
        return cls(
            row_begin + row,
            column,
            tuple(first[r, 0][0] for r in range(cute.size(first, mode=[0]))),
            tuple(first[0, c][1] for c in range(cute.size(first, mode=[1]))),
            tile_shape[1],
            tile.batch,
            tile.head,
        )

    def query(self, r: int):
        """The query of row r."""
        return self.row + self.row_steps[r]

    def first_row(self):
        """The first row of this thread's WGMMA, uniform over the warp."""
        return cute.arch.make_warp_uniform(self.row // ROWS * ROWS)

    def queries(self):
        """The first and the last query among this WGMMA's rows."""
        first = self.first_row()
        return first, first + ROWS - 1

    def head_of(self, r: int):
        """The query head of row r."""
        return self.head

    def first_key(self, n_block):
        """The key of this thread's column 0 in a block; column c is `column_steps[c]` further."""
        return n_block * self.tile_n + self.column

    def position(self, r: int, c: int, n_block, sequence) -> Position:
        """The position of score (r, c) of a block."""
        last_key = cutlass.max(sequence.seqlen_k, 1) - 1
        return Position(
            self.batch,
            self.head_of(r),
            cutlass.min(self.query(r), sequence.seqlen_q - 1),
            cutlass.min(self.first_key(n_block) + self.column_steps[c], last_key),
            sequence.seqlen_q,
            sequence.seqlen_k,
        )


@dataclass(frozen=True)
class TransposedCoords:
    """Coordinates of a thread's part of S^T. Score (r, c) belongs to key `row + row_steps[r]` and
    to column `column + column_steps[c]` of a block of `tile_m` queries. Steps are compile-time
    integers.
    """

    row: Int32
    column: Int32
    row_steps: tuple[int, ...]
    column_steps: tuple[int, ...]
    tile_m: int
    batch: Int32
    head: Int32

    @classmethod
    def of(cls, tiled_mma: cute.TiledMma, thread, shape: tuple[int, int], begins, tile_m, tile):
        """Return the coordinates of `thread` in an accumulator of this shape.

        It begins at the key `begins[0]`, and at the column `begins[1]` of the block; `tile` names
        head and batch.
        """
        coords = ScoreCoords.of(tiled_mma, thread, shape, begins[0], tile)
        column = begins[1] + coords.column
        steps = coords.row_steps, coords.column_steps
        return cls(coords.row, column, *steps, tile_m, tile.batch, tile.head)

    def shifted(self, columns: int) -> "TransposedCoords":
        """The coordinates of as many scores that many columns further in the block."""
        return replace(self, column=self.column + columns)

    def key(self, r: int):
        """The key of row r."""
        return self.row + self.row_steps[r]

    def first_query(self, m_block):
        """The query of this thread's column 0; column c is `column_steps[c]` further."""
        return m_block * self.tile_m + self.column

    def position(self, r: int, c: int, m_block, sequence) -> Position:
        """The position of score (r, c) of a block."""
        last_query, last_key = (
            cutlass.max(seqlen, 1) - 1 for seqlen in (sequence.seqlen_q, sequence.seqlen_k)
        )
        return Position(
            self.batch,
            self.head,
            cutlass.min(self.first_query(m_block) + self.column_steps[c], last_query),
            cutlass.min(self.key(r), last_key),
            sequence.seqlen_q,
            sequence.seqlen_k,
        )
