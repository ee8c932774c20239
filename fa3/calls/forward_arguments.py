"""What calls fill in of the forward kernel's arguments, and the memory of parts of tiles."""

from dataclasses import dataclass

import torch

from fa3.kernels.forward_launch import ForwardArguments
from fa3.planning.launch import slots
from fa3.primitives.part_merge import numbers_of_parts
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS_OF_WARP

TENSORS_AND_SCALE = slice(*slots(ForwardArguments, "q", "window_left"))
"""q, k, v, o, lse, modifiers and softmax_scale."""

PARTS = slice(*slots(ForwardArguments, "part_buffer", "marks"))
"""Memory, counters and number of the parts of tiles."""

NUM_CLUSTERS, SCHEDULE_STATE, MARKS, RECORDING, DROPOUT, ONLINE_MAX = slots(
    ForwardArguments,
    "num_clusters", "schedule_state", "marks", "recording", "dropout", "online_max",
)  # fmt: skip

TABLE, PAGE_TABLE, OVERLAPS_DECODE = slots(
    ForwardArguments, "table", "page_table", "overlaps_decode"
)
"""What only packed sequences have."""


def lse_address(lse: torch.Tensor | None) -> int:
    """Return where kernels write the log-sum-exp; 0 for nowhere."""
    return 0 if lse is None else lse.data_ptr()


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
