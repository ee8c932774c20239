"""Online softmax in base 2 on WGMMA accumulator fragments."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

QUAD = 4
"""Threads of a warp that share the rows of an accumulator."""

SLACK = 8.0
"""Powers of two by which scores may outgrow the reference before sums and O are rescaled."""


@cute.jit
def row_reduce(row: cute.Tensor, op: cutlass.Constexpr) -> Float32:
    """Reduce this thread's part of a row in four independent chains."""
    lanes = [row[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, cute.size(row), 4):
        for j in cutlass.range_constexpr(4):
            lanes[j] = op(lanes[j], row[i + j])
    return op(op(lanes[0], lanes[1]), op(lanes[2], lanes[3]))


@cute.jit
def quad_reduce(value: Float32, op: cutlass.Constexpr) -> Float32:
    """Reduce over the four threads that share a row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def add(a, b):
    return a + b


@cute.jit
def finite(row_max: Float32) -> Float32:
    """The maximum, or 0 for a row hidden so far: exp2(-inf - 0) is the 0 that it needs."""
    return Float32(0.0) if row_max == -Float32.inf else row_max


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of the rows of one thread (FlashAttention-2, section 3.1).

    `row_max` is the reference that scores are taken relative to, in units of raw scores and equal
    over a quad. It follows the true maximum lazily (FlashAttention-4): while no row of the warp
    has outgrown its reference by more than `SLACK` powers of two, nothing is rescaled and no
    value crosses threads. Terms then reach 2**SLACK, which fp32 sums and 16-bit P both hold.
    `row_sum` is this thread's share.
    """

    scale_log2: Float32
    row_max: cute.Tensor
    row_sum: cute.Tensor

    @classmethod
    def create(cls, num_rows: int, scale_log2: Float32) -> "OnlineSoftmax":
        return cls(scale_log2, *(cute.make_rmem_tensor(num_rows, Float32) for _ in range(2)))

    @cute.jit
    def start(self, scores: cute.Tensor):
        """Take the reference from a tile's first block of scores (rows, columns)."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            self.row_max[r] = quad_reduce(
                row_reduce(scores[r, None], cute.arch.fmax), cute.arch.fmax
            )
            self.row_sum[r] = 0.0

    @cute.jit
    def follow(self, scores: cute.Tensor, acc: cute.Tensor, acc_ready: cutlass.Constexpr):
        """Renew the references if a row outgrew its own, rescaling sums and acc (rows, columns).

        Calls `acc_ready()` before it touches acc.
        """
        num_rows = cute.size(scores, mode=[0])
        maxima = [row_reduce(scores[r, None], cute.arch.fmax) for r in range(num_rows)]
        outgrown = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(num_rows):
            outgrown = outgrown or (maxima[r] - self.row_max[r]) * self.scale_log2 > SLACK
        if cute.arch.vote_any_sync(outgrown):
            acc_ready()
            for r in cutlass.range_constexpr(num_rows):
                row_max = quad_reduce(cute.arch.fmax(maxima[r], self.row_max[r]), cute.arch.fmax)
                correction = cute.math.exp2(
                    (self.row_max[r] - finite(row_max)) * self.scale_log2, fastmath=True
                )
                self.row_max[r] = row_max
                self.row_sum[r] = self.row_sum[r] * correction
                acc[r, None].store(acc[r, None].load() * correction)

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, masked: cutlass.Constexpr):
        """Replace scores by exp2(scaled score - scaled reference), and add them to the sums."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            row = scores[r, None]
            reference = self.row_max[r]
            if cutlass.const_expr(masked):
                reference = finite(reference)
            scaled = reference * self.scale_log2
            row.store(cute.math.exp2(row.load() * self.scale_log2 - scaled, fastmath=True))
            self.row_sum[r] = self.row_sum[r] + row_reduce(row, add)

    @cute.jit
    def finish(self, acc: cute.Tensor) -> cute.Tensor:
        """Divide by the row sums; return the rows' log-sum-exp (natural logarithm).

        Rows that saw no key become 0 with log-sum-exp -inf.
        """
        lse = cute.make_rmem_tensor(self.row_sum.layout, Float32)
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            row_sum = quad_reduce(self.row_sum[r], add)
            hidden = row_sum == 0.0
            inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(row_sum)
            log2_sum = self.row_max[r] * self.scale_log2 + cute.math.log2(row_sum, fastmath=True)
            lse[r] = -Float32.inf if hidden else log2_sum * math.log(2.0)
            acc[r, None].store(acc[r, None].load() * inverse)
        return lse
