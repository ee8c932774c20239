"""Parts of tiles in the decode kernel: their records and memory, and sums over parts of a row."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives.output_store import RowLse
from fa3.primitives.softmax import LOG2_E, finite
from fa3.primitives.vectors import QUAD, vector_of

RECORD_STRIDE = 8
"""Integers from one record to the next: each record has its own 32-byte sector of memory."""

UNIT = 32  # sizes are rounded up to this many numbers, so that everything is aligned to 128 bytes


def rounded(size):
    return (size + UNIT - 1) // UNIT * UNIT


class WorkspaceSize(NamedTuple):
    """Sizes of a workspace: integers on the host or inside a kernel."""

    num_records: int  # records, one for each tile that may have parts
    num_slots: int  # slots, each for one part
    rows: int  # rows of a tile

    @property
    def numbers_of_records(self):
        """32-bit numbers of the records, which come first."""
        return rounded(self.num_records * RECORD_STRIDE)

    def numbers(self, head_dim_v: int):
        """32-bit numbers that the workspace takes."""
        fixed = self.numbers_of_records + rounded(self.num_slots * self.rows)
        return fixed + self.num_slots * self.rows * head_dim_v


class Workspace(NamedTuple):
    """Parts of tiles in global memory, and the records that locate them."""

    # (num_records, 8) int32: m_block, head, batch, first slot and number of parts of a tile, and
    # where its sequence's queries begin and how many there are if they are packed. With fewer than
    # two parts there is nothing to merge.
    records: cute.Tensor
    lse: cute.Tensor  # (num_slots, rows), natural logarithm
    o: cute.Tensor  # (num_slots, rows, head_dim_v), float32, each part divided by its own row sums

    def clear_record(self, number):
        """Say that a record has nothing to merge."""
        self.records[number, 4] = 0

    @classmethod
    def of(cls, buffer: cute.Tensor, size: WorkspaceSize, head_dim_v: int) -> "Workspace":
        """Lay out a buffer of float32."""
        num_records, num_slots, rows = (Int32(n) for n in size)
        lse = buffer.iterator + rounded(num_records * RECORD_STRIDE)
        o = lse + rounded(num_slots * rows)
        # 16-byte loads and stores need a stride with a known divisor.
        slot = cute.assume(Int64(rows) * head_dim_v, divby=head_dim_v)
        return cls(
            cute.make_tensor(
                cute.recast_ptr(buffer.iterator, dtype=Int32),
                cute.make_layout((num_records, RECORD_STRIDE), stride=(RECORD_STRIDE, 1)),
            ),
            cute.make_tensor(lse.align(16), cute.make_layout((num_slots, rows), stride=(rows, 1))),
            cute.make_tensor(
                o.align(16),
                cute.make_layout((num_slots, rows, head_dim_v), stride=(slot, head_dim_v, 1)),
            ),
        )


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
        """Write a lane's columns of a row, and from its first lane the row's log-sum-exp `at` a
        place.

        `vector` is the index of the columns; a `sink` is a logit that joins the row, or None.
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
