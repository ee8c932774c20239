"""Forward's epilogue for split tiles and recomputed rows: from registers to global memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.fragments import as_rows_and_columns, convert
from fa3.primitives.packed_rows import store_row
from fa3.primitives.row_lse import RowLse


class RowStore(NamedTuple):
    """The outputs that receive rows and their log-sum-exps.

    Fields:
        out: (seqlen_q, head_dim_v, heads, batch).
        lse: of (batch, heads, seqlen_q).
    """

    out: cute.Tensor
    lse: RowLse

    @cute.jit
    def store(self, acc: cute.Tensor, lse: cute.Tensor, coords: ScoreCoords, is_written: tuple):
        """Write row r of this thread's rows of an accumulator where `is_written[r]`."""
        rows = as_rows_and_columns(acc)
        for r in cutlass.range_constexpr(len(is_written)):
            query = coords.query(r)
            if is_written[r] and query < self.out.shape[0]:
                row = rows[r, None]
                converted = cute.make_rmem_tensor(row.shape, self.out.element_type)
                convert(row, converted)
                place = self.out[query, None, coords.head, coords.batch]
                store_row(converted, place, coords.column)
                if self.lse.is_wanted():
                    self.lse.store((coords.batch, coords.head, query), lse[r], coords)

    def store_all(self, acc: cute.Tensor, lse: cute.Tensor, coords: ScoreCoords):
        """Write all of this thread's rows."""
        self.store(acc, lse, coords, tuple(Boolean(True) for _ in coords.row_steps))
