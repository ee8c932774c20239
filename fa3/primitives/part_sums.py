"""Sums over the parts of a row, each of which has its own log-sum-exp and its own O.

`fa3.kernels.combine` and `fa3.primitives.packed_rows` add up parts in global memory with them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa3.primitives.row_lse import RowLse
from fa3.primitives.softmax import LOG2_E, finite
from fa3.primitives.vectors import QUAD, vector_of


@dataclass(frozen=True)
class Sums:
    """Sums of some lanes over parts of a row; `reference` is the largest log-sum-exp among them."""

    o: cute.Tensor  # sum of exp(lse_i - reference) O_i in this lane's columns
    scalars: cute.Tensor  # the reference, and the sum of exp(lse_i - reference)

    @classmethod
    def create(cls) -> "Sums":
        sums = cls(*(cute.make_rmem_tensor(n, Float32) for n in (QUAD, 2)))
        sums.o.fill(0.0)
        sums.scalars[0], sums.scalars[1] = -Float32.inf, Float32(0.0)
        return sums

    @cute.jit
    def rebase(self, largest: Float32) -> Float32:
        """Raise the reference to `largest` if that is larger; return it, or 0 if it is -inf."""
        self.scalars[0] = cute.arch.fmax(self.scalars[0], largest)
        return finite(self.scalars[0])

    @cute.jit
    def add(self, lse: cute.Tensor, o: cute.Tensor):
        """Add parts: log-sum-exps (n,) and this lane's columns (4, n)."""
        before = self.scalars[0]
        largest = lse[0]
        for i in cutlass.range_constexpr(1, cute.size(lse)):
            largest = cute.arch.fmax(largest, lse[i])
        reference = self.rebase(largest)
        correction = exp(before - reference)
        acc, total = self.o.load() * correction, self.scalars[1] * correction
        for i in cutlass.range_constexpr(cute.size(lse)):
            factor = exp(lse[i] - reference)
            total += factor
            acc = acc + o[None, i].load() * factor
        self.o.store(acc)
        self.scalars[1] = total

    @cute.jit
    def add_sums(self, reference: Float32, total: Float32, o: cute.Tensor):
        """Add other sums: their reference, their sum of exp, and their O."""
        before = self.scalars[0]
        base = self.rebase(reference)
        correction, factor = exp(before - base), exp(reference - base)
        self.o.store(self.o.load() * correction + o.load() * factor)
        self.scalars[1] = self.scalars[1] * correction + total * factor

    @cute.jit
    def store(self, target: cute.Tensor, lse: RowLse, at: tuple, vector, sink):
        """Write a lane's columns of a row, and from its first lane the row's log-sum-exp.

        Args:
            target: the row of O.
            lse: all rows' log-sum-exps, or nothing; the row's is `at` a place.
            vector: the index of the lane's columns.
            sink: a logit that joins the row, or None.
        """
        if cutlass.const_expr(sink is not None):
            nothing = cute.make_rmem_tensor_like(self.o)
            nothing.fill(0.0)
            self.add_sums(Float32(sink), Float32(1.0), nothing)
        total = self.scalars[1]
        hidden = total == 0.0
        inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(total)
        converted = cute.make_rmem_tensor(QUAD, target.element_type)
        converted.store((self.o.load() * inverse).to(target.element_type))
        if vector * QUAD < target.shape[0]:
            cute.autovec_copy(converted, vector_of(target, vector, QUAD))
        if lse.is_wanted() and vector == 0:
            value = self.scalars[0] + cute.math.log(total, fastmath=True)
            lse.tensor[at] = -Float32.inf if hidden else value


def exp(x):
    """exp(x) on the exponential unit (MUFU)."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)
