"""From S^T and dP^T in registers to P^T and dS^T, for the backward kernel.

Both are accumulators (keys, queries). The statistics of queries are in shared memory, where the
producer put them. A thread reads the statistics of 2 or 4 columns at once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.primitives.query_tiles import PAIR, place_of_row
from fa3.primitives.vectors import QUAD, vector_of

LSE, DELTA = 0, 1  # which of a row's statistics


@dataclass(frozen=True)
class ColumnStatistics:
    """Log-sum-exps and deltas of a thread's columns."""

    # (queries, 2) in shared memory, of `fa3.primitives.query_tiles.RowStatistics`.
    numbers: cute.Tensor
    column: Int32  # the thread's first column
    columns: int  # how many it has
    at_once: int  # how many it reads at once, 2 or 4

    def read(self, which: int, i: int) -> cute.Tensor:
        """The log-sum-exps or the deltas of columns [i at_once, (i + 1) at_once), in registers."""
        values = cute.make_rmem_tensor(self.at_once, Float32)
        place = place_of_row(self.column, self.at_once) // self.at_once + i * QUAD
        cute.autovec_copy(vector_of(self.numbers[None, which], place, self.at_once), values)
        return values

    def all(self, which: int) -> "tuple[cute.Tensor, ...] | LateReads":
        """All of them: read now, or each where it is asked for if registers are short."""
        late = LateReads(self, which)
        if self.at_once == PAIR:
            return late
        return tuple(late[i] for i in range(self.columns // self.at_once))

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, lses, scale_log2: Float32):
        """P = exp(score - lse), in place; `scale_log2` is the power of two of a score of 1."""
        for begin in cutlass.range_constexpr(0, self.columns, self.at_once):
            lse = lses[begin // self.at_once]
            for i in cutlass.range_constexpr(self.at_once):
                c = begin + i
                for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                    exponent = scores[r, c] * scale_log2 - lse[i]
                    scores[r, c] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def differentiate(
        self,
        p: cute.Tensor,
        dP: cute.Tensor,
        deltas,
        factors: tuple,
        has_dropout: cutlass.Constexpr,
    ):
        """dS = P (dP - delta), in place of dP; and times the derivatives of the scores.

        Args:
            has_dropout: whether P is negative where it is dropped: then dP counts as 0.
        """
        for begin in cutlass.range_constexpr(0, self.columns, self.at_once):
            delta = deltas[begin // self.at_once]
            for i in cutlass.range_constexpr(self.at_once):
                c = begin + i
                for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
                    if cutlass.const_expr(has_dropout):
                        kept = cute.arch.fmax(p[r, c], 0.0)
                        dS = kept * dP[r, c] - magnitude(p[r, c]) * delta[i]
                    else:
                        dS = p[r, c] * (dP[r, c] - delta[i])
                    for k in cutlass.range_constexpr(len(factors)):
                        dS = dS * Float32(factors[k][r, c])
                    dP[r, c] = dS


@dataclass(frozen=True)
class LateReads:
    """What is read of a thread's columns, each part where it is asked for."""

    statistics: ColumnStatistics
    which: int

    def __getitem__(self, i: int) -> cute.Tensor:
        return self.statistics.read(self.which, i)


def magnitude(x: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
