"""Where the elements of a thread's score fragment lie."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.fragments import as_rows_and_columns


@dataclass(frozen=True)
class ScoreCoords:
    """Coordinates of a thread's scores: query `row + row_steps[r]`, column `column +
    column_steps[c]` of a key block of `tile_n`. The steps are compile-time numbers.
    """

    row: Int32
    column: Int32
    row_steps: tuple[int, ...]
    column_steps: tuple[int, ...]
    tile_n: int

    @classmethod
    def of(cls, tiled_mma: cute.TiledMma, thread, tile_shape: tuple[int, int], row_begin):
        """The coordinates of `thread` in the accumulator tile whose first row is `row_begin`."""
        identity = cute.make_identity_tensor(tile_shape)
        first = as_rows_and_columns(tiled_mma.get_slice(0).partition_C(identity))
        row, column = tiled_mma.get_slice(thread).partition_C(identity)[0]
        return cls(
            row_begin + row,
            column,
            tuple(first[r, 0][0] for r in range(cute.size(first, mode=[0]))),
            tuple(first[0, c][1] for c in range(cute.size(first, mode=[1]))),
            tile_shape[1],
        )
