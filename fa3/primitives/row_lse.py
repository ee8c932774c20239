"""Where kernels write log-sum-exps: the caller's tensor, or nowhere."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64

from fa3.primitives.coords import ScoreCoords


class RowLse(NamedTuple):
    """The log-sum-exps of rows: float32 (batch, heads, seqlen_q), contiguous, or nothing.

    That it may be nothing is known at run time only, so one kernel serves both.
    """

    tensor: cute.Tensor

    @classmethod
    def at(cls, address: Int64, shape: tuple, is_packed: bool = False) -> "RowLse":
        """The tensor at an address; nothing if that is 0.

        Args:
            shape: (batch, heads, rows).
            is_packed: whether the rows are the same for every sequence.
        """
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        if is_packed:
            layout = shared_by(shape[0], cute.select(layout, mode=[1, 2]))
        return cls(cute.make_tensor(pointer, layout))

    def is_wanted(self) -> Boolean:
        """Whether there is a tensor to write."""
        return self.tensor.iterator.toint() != 0

    def store(self, at: tuple, lse: Float32, coords: ScoreCoords):
        """Write a row's log-sum-exp, which is wanted, from one of the four threads of the row."""
        store_lse(self.tensor, at, lse, coords)


def shared_by(batch, layout: cute.Layout) -> cute.Layout:
    """A layout with a mode in front, all of whose `batch` entries are the same."""
    return cute.prepend(layout, cute.make_layout(batch, stride=0))


@cute.jit
def store_lse(target: cute.Tensor, at: tuple, lse: Float32, coords: ScoreCoords):
    """Write the log-sum-exp of a row, from one of its four threads."""
    if coords.column == 0:
        target[at] = lse
