"""Launches for packed sequences: the kernel that makes the table of tiles, then the forward kernel,
and once more for rows whose fixed reference failed.

All that depends on lengths is in one tensor that each call allocates, so calls in several threads,
on several streams and in captured graphs share nothing. Marks of rows are among the counters that
every call has for itself (`fa3.running.counters`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.kernels.forward_launch import NO_PARTS
from fa3.planning.ragged import RaggedPlan, capacity_of_table, shift_of_work, words_of_table
from fa3.problem import Window
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.running.counters import counters_of
from fa3.running.graphs import capture_of, current_device, current_stream
from fa3.schedules.marked import words_of_marks


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """A plan for packed sequences with its kernels loaded.

    Fields:
        tile_table, forward, again: the kernels' entries; `again` is None if no row can fail.
        tile_m, tile_n: of the forward kernel's config.
        num_ctas: CTAs of the forward kernel, one for each SM that it may use.
        rows_of_section: see `fa3.schedules.ragged.RaggedOrder`.
    """

    tile_table: Callable
    forward: Callable
    again: Callable | None
    window: Window
    tile_m: int
    tile_n: int
    num_ctas: int
    rows_of_section: int

    def launch(
        self,
        operands: RaggedOperands,
        max_seqlen_k: int,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU."""
        q, k, v, out, lse, *integers = operands
        if q.device.index != current_device():
            with torch.cuda.device(q.device):
                self.launch(operands, max_seqlen_k, modifiers, scale)
            return
        total_q, heads, _ = q.shape
        capacity = capacity_of_table(total_q, len(operands.cu_seqlens_q) - 1, self.tile_m)
        table = q.new_empty(words_of_table(capacity), dtype=torch.int32)
        # In the order of `TileTableArguments`.
        self.tile_table(
            *integers, table, total_q, k.shape[0], capacity,
            shift_of_work(max_seqlen_k, self.tile_n), *self.window,
        )  # fmt: skip
        # In the order of `ForwardArguments`.
        given = (
            q, k, v, out, 0 if lse is None else lse.data_ptr(), modifiers, scale, *self.window,
            self.rows_of_section, min(self.num_ctas, capacity * heads),
        )  # fmt: skip
        if self.again is None:
            self.forward(*given, None, *NO_PARTS, None, None, table)
            return
        stream = current_stream(q.device.index)
        counters = counters_of(q.device, stream, capture_of(stream))
        marks = counters.take(words_of_marks(capacity * heads))
        self.forward(*given, None, *NO_PARTS, marks, None, table)
        self.again(*given, marks, *NO_PARTS, None, None, table)
        # Not if anything was raised: then they need not be zero.
        counters.give_back(marks)


def prepare(plan: RaggedPlan, window: Window) -> PreparedVarlen:
    """Load the kernels of a plan."""
    config = plan.config
    forward, *again = map(load_kernel, plan.kernels())
    return PreparedVarlen(
        load_kernel(plan.tile_table()), forward, again[0] if again else None, window,
        config.tile_m, config.tile_n, plan.gpu.num_sms, plan.rows_of_section,
    )  # fmt: skip
