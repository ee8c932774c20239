"""Forward's epilogue for split tiles and recomputed rows: from registers to global memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.fragments import as_rows_and_columns, convert
from fa3.primitives.packed_rows import store_row
from fa3.primitives.row_lse import RowLse


class RowStore(NamedTuple):
    """The outputs that receive rows and their log-sum-exps."""

    # (seqlen_q, head_dim_v, heads, batch); of packed sequences, whose rows are all in one line,
    # batch is 1.
    out: cute.Tensor
    lse: RowLse  # of (batch, heads, seqlen_q)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        lse: cute.Tensor,
        coords: ScoreCoords,
        places: tuple,
        is_written: tuple,
    ):
        """Write row r of this thread's rows of an accumulator to places[r] where `is_written[r]`.

        Args:
            places: (batch, head, row) for each of this thread's rows.
        """
        rows = as_rows_and_columns(acc)
        for r in cutlass.range_constexpr(len(is_written)):
            if is_written[r]:
                batch, head, query = places[r]
                row = rows[r, None]
                converted = cute.make_rmem_tensor(row.shape, self.out.element_type)
                convert(row, converted)
                store_row(converted, self.out[query, None, head, batch], coords.column)
                if self.lse.is_wanted():
                    self.lse.store(places[r], lse[r], coords)
