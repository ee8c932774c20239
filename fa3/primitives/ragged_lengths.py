"""Where packed sequences begin and end: read on the GPU, and cut to the tensors that there are."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class RaggedLengths(NamedTuple):
    """Where packed sequences begin and end, in device memory, and what bounds them.

    Fields:
        cu, used: cumulated lengths; rows that count, or None.
        total: rows of the tensor. Whatever the lengths say, no row beyond it is named.
    """

    cu: cute.Tensor
    used: cute.Tensor | None
    total: Int32

    @property
    def num_sequences(self):
        return self.cu.shape[0] - 1

    def begin(self, batch) -> Int32:
        """A sequence's first row."""
        return cutlass.max(cutlass.min(self.cu[batch], self.total), 0)

    def read(self, batch) -> tuple[Int32, Int32]:
        """A sequence's first row and its length."""
        begin = self.begin(batch)
        length = cutlass.min(self.cu[batch + 1], self.total) - begin
        if self.used is not None:
            length = cutlass.min(length, self.used[batch])
        return begin, cutlass.max(length, 0)

    @cute.jit
    def owned(self, batch) -> Int32:
        """Rows from a sequence's first one to that of the next one, or to the tensor's end.

        They count or not; lengths that are right leave none that no sequence owns.
        """
        end = cutlass.min(self.cu[batch + 1], self.total)
        if batch + 1 == self.num_sequences:
            end = self.total
        return cutlass.max(end - self.begin(batch), 0)
