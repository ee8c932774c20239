"""Where calls put what they fill in of the forward kernel's arguments."""

import torch

from fa3.kernels.forward_launch import ForwardArguments
from fa3.planning.launch import slots

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
