"""From S^T and dP^T in registers to P^T and dS^T, for the backward kernel.

Both are accumulators (keys, queries). What is known of a query stands in shared memory, where the
producer put it: a thread reads that of two neighbouring columns at once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.primitives.vectors import vector_of

PAIR = 2
"""Neighbouring columns of a thread."""


@dataclass(frozen=True)
class ColumnStatistics:
    """Log-sum-exps and deltas of a thread's columns.

    Fields:
        numbers: (queries, 2) in shared memory, of `fa3.primitives.query_tiles.RowStatistics`.
        column: the thread's first column; the others are `column_steps` further.
    """

    numbers: cute.Tensor
    column: Int32
    column_steps: tuple[int, ...]

    def pair(self, which: int, j: int) -> cute.Tensor:
        """The log-sum-exps (0) or deltas (1) of columns 2 j and 2 j + 1."""
        values = cute.make_rmem_tensor(PAIR, Float32)
        index = (self.column + self.column_steps[PAIR * j]) // PAIR
        cute.autovec_copy(vector_of(self.numbers[None, which], index, PAIR), values)
        return values

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, scale_log2: Float32):
        """P = exp(score - lse), in place; `scale_log2` is the power of two of a score of 1."""
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1]) // PAIR):
            lse = self.pair(0, j)
            for i in cutlass.range_constexpr(PAIR):
                for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                    exponent = scores[r, PAIR * j + i] * scale_log2 - lse[i]
                    scores[r, PAIR * j + i] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def differentiate(self, p: cute.Tensor, dP: cute.Tensor, factors: tuple):
        """dS = P (dP - delta), in place of P; and times the derivatives of the scores."""
        for j in cutlass.range_constexpr(cute.size(p, mode=[1]) // PAIR):
            delta = self.pair(1, j)
            for i in cutlass.range_constexpr(PAIR):
                c = PAIR * j + i
                for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
                    dS = p[r, c] * (dP[r, c] - delta[i])
                    for k in cutlass.range_constexpr(len(factors)):
                        dS = dS * Float32(factors[k][r, c])
                    p[r, c] = dS
