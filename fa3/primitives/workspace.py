"""Parts of tiles and their records in global memory: decode writes them, combine reads them."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

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
