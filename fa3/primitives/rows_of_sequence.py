"""Where the rows of one sequence lie in a global tensor, for TMA's loads and stores."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int64

ROWS_END = 2**30  # the row after the last one of every sequence, in a tensor of `ragged_tma_view`
WRAP = 2**34  # WRAP * ROWS_END elements are 2**64: as much as nothing, since addresses have 64 bits


class DenseRows(NamedTuple):
    """Where one sequence's rows lie in a tensor (rows, head_dim, heads, batch)."""

    batch: int

    def of_head(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """(rows, head_dim) of the sequence."""
        return tensor[None, None, head, self.batch]


class RaggedRows(NamedTuple):
    """Where one sequence's rows lie among other rows in a tensor of `ragged_tma_view`."""

    # begin, length: its first row and the number of its rows.
    begin: int
    length: int

    def of_head(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """(rows, head_dim) of the sequence, which end where the tensor's rows end."""
        rows = tensor[None, None, head, self.begin + self.length, ROWS_END]
        return cute.domain_offset((ROWS_END - self.length, 0), rows)


def ragged_tma_view(tensor: cute.Tensor) -> cute.Tensor:
    """A view of (total, heads, head_dim) in which each sequence can end where the rows end.

    (rows, head_dim, heads, ends, back): element (r, c, h, e, ROWS_END) is in row
    r + e - ROWS_END. So row ROWS_END - length + i with e = begin + length is row i of a sequence,
    and the rows after its last one are out of bounds: TMA loads zeros for them and does not store
    them. The last mode goes back by ROWS_END rows, which needs addresses that wrap around. A
    pointer that lies so far before the tensor would do without it, but then TMA faults: for boxes
    that are out of bounds it touches memory where the tensor begins.

    Source of the idea: ragged TMA descriptors of Triton (triton/tools/ragged_tma.py).
    """
    total, heads, head_dim = tensor.shape
    row_stride, head_stride, _ = tensor.layout.stride
    layout = cute.make_layout(
        (ROWS_END, head_dim, heads, total + 1, ROWS_END + 1),
        stride=(row_stride, 1, head_stride, row_stride, WRAP - Int64(row_stride)),
    )
    return cute.make_tensor(tensor.iterator, layout)


def in_batch(tensor: cute.Tensor | None) -> cute.Tensor | None:
    """A tensor of packed sequences in a batch of one."""
    if tensor is None:
        return None
    layout = cute.prepend(tensor.layout, cute.make_layout(1))
    return cute.make_tensor(tensor.iterator, layout)
