"""What the forward kernel takes besides a call's tensors where tiles are cut into parts."""

from dataclasses import dataclass

import torch

from fa3.primitives.part_merge import numbers_of_parts
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS_OF_WARP


@dataclass(frozen=True, slots=True)
class PartMemory:
    """The memory of a launch's parts.

    Fields:
        numbers: of float32 that the parts take.
        num_counters: counters of the warps that share tiles.
        num_slots: parts.
    """

    numbers: int
    num_counters: int
    num_slots: int

    @classmethod
    def of(cls, num_slots: int, rows: int, head_dim_v: int) -> "PartMemory":
        """The memory of so many parts.

        Args:
            rows: of a cluster's tile.
        """
        return cls(
            numbers_of_parts(num_slots, rows, padded(head_dim_v)),
            # The kernel wants a tensor also where no tile is split.
            max(1, num_slots * rows // ROWS_OF_WARP),
            num_slots,
        )

    def arguments(self, q: torch.Tensor, counters: torch.Tensor) -> tuple:
        """Memory, counters and number of parts of one launch."""
        return q.new_empty(self.numbers, dtype=torch.float32), counters, self.num_slots
