"""The launcher: runs the forward kernel and recompute, for dense and packed calls alike.

What depends on a call's kind is a value, `Tiles`. The launcher takes counters, memory of parts and
marks for it, and gives back what other calls may take.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fa3.kernels.forward_launch import ForwardArguments
from fa3.planning.launch import Launch, slots
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.part_merge import numbers_of_parts
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS_OF_WARP
from fa3.running.counters import counters_of
from fa3.running.graphs import Capture, capture_of, current_device, current_stream

TENSORS_AND_SCALE = slice(*slots(ForwardArguments, "q", "window_left"))
"""q, k, v, o, lse, modifiers and softmax_scale."""

PARTS = slice(*slots(ForwardArguments, "part_buffer", "marks"))
"""Memory, counters and number of the parts of tiles."""

LAST = slice(*slots(ForwardArguments, "table", "online_max"))
"""table, page_table, overlaps_decode, dropout and descales."""

NUM_CLUSTERS, SCHEDULE_STATE, MARKS, ONLINE_MAX = slots(
    ForwardArguments, "num_clusters", "schedule_state", "marks", "online_max"
)

StreamPlace = tuple[int, Capture | None]
"""The handle of torch's current stream, and the capture that it takes part in."""


def place_on(device: torch.device) -> StreamPlace:
    """Return where launches go on a device, which must be the current one."""
    stream = current_stream(device.index)
    return stream, capture_of(stream)


def with_device(device: torch.device, launch: Callable, *arguments: Any) -> Any:
    """Call a function that launches kernels with this device as the current one."""
    if device.index == current_device():
        return launch(*arguments)
    with torch.cuda.device(device):
        return launch(*arguments)


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


class Tiles(NamedTuple):
    """The tiles of a launch, and what they take besides tensors.

    Fields:
        num_clusters: clusters of the forward kernel.
        num_recompute: clusters of recompute.
        num_marks: counters of the marks; 0 if no row can be marked.
        num_counters: counters that the schedule has for its state; 0 if it has none.
        parts: memory of parts; None if no tile is split.
        table: the tiles of packed sequences; None for dense calls.
        page_table: where packed queries find their keys in a cache with pages.
    """

    num_clusters: int
    num_recompute: int = 0
    num_marks: int = 0
    num_counters: int = 0
    parts: PartMemory | None = None
    table: torch.Tensor | None = None
    page_table: torch.Tensor | None = None


def run_tiles(
    launches: Sequence[Launch],
    tiles: Tiles,
    tensors: tuple,
    state: torch.Tensor | None,
    place: StreamPlace,
    dropout: DropoutArguments | None = None,
    table_launch: tuple[Callable, list] | None = None,
    start_decode: Callable[[torch.Tensor], Callable[[], None]] | None = None,
    recompute_tensors: tuple | None = None,
    descales: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Launch the forward kernel and recompute.

    Args:
        launches: the forward kernel, and recompute if rows can be marked.
        tensors: the `TENSORS_AND_SCALE`.
        state: what the schedule reads, unless it has counters.
        table_launch: the kernel that makes the table, and its arguments.
        start_decode: launches the decode kernel, given the table; returns what merges its parts
            when both kernels have ended.
        recompute_tensors: of recompute, where they differ.
        descales: of FP8 tensors.
    """
    num_clusters, num_recompute, num_marks, num_counters, parts, table, page_table = tiles
    marks = counted = part_counters = merge = overlaps = None
    if num_marks or num_counters or parts is not None:
        # Now: to zero new ones takes a kernel, and none may come between two others.
        counters = counters_of(tensors[0].device, *place)
        if num_counters:
            counted = state = counters.take(num_counters)
        if parts is not None:
            part_counters = counters.take(parts.num_counters)
        if num_marks:
            marks = counters.take(num_marks)
    if table_launch is not None:
        kernel, arguments = table_launch
        kernel(*arguments)
    if table is not None:
        overlaps = 0
        if start_decode is not None:
            # The forward kernel takes the SMs that the decode kernel leaves.
            merge, overlaps = start_decode(table), 1
    kernel, template, _ = launches[0]
    arguments = template.copy()
    arguments[TENSORS_AND_SCALE] = tensors
    arguments[NUM_CLUSTERS] = num_clusters
    arguments[SCHEDULE_STATE] = state
    if parts is not None and part_counters is not None:
        arguments[PARTS] = parts.arguments(tensors[0], part_counters)
    # A kernel that could mark rows wants a tensor also where none is marked.
    arguments[MARKS] = state if template[ONLINE_MAX] else marks
    arguments[LAST] = table, page_table, overlaps, dropout, descales
    kernel(*arguments)
    if merge is not None:
        merge()
    # Counters do not go back if anything was raised: then they need not be zero. The last one comes
    # first, so that the next call takes each for the same purpose.
    if marks is not None:
        kernel, template, _ = launches[1]
        arguments = template.copy()
        arguments[TENSORS_AND_SCALE] = tensors if recompute_tensors is None else recompute_tensors
        arguments[NUM_CLUSTERS] = num_recompute
        arguments[SCHEDULE_STATE] = marks
        overlaps = None if table is None else 0
        arguments[LAST] = table, page_table, overlaps, dropout, None
        kernel(*arguments)
        counters.give_back(marks)
    if part_counters is not None:
        counters.give_back(part_counters)
    if counted is not None:
        counters.give_back(counted)
