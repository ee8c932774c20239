"""Launches for packed sequences: the kernel that makes the table of tiles, then the forward kernel.

All that depends on lengths is in one tensor that each call allocates, so calls in several threads,
on several streams and in captured graphs share nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.devices import gpu_of, reserve_sms
from fa3.planning.ragged import RaggedPlan, capacity_of_table, shift_of_work, words_of_table
from fa3.problem import Window
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.running.graphs import current_device


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """A plan for packed sequences with its kernels loaded.

    Fields:
        tile_table, forward: the kernels' entries.
        tile_m, tile_n: of the forward kernel's config.
    """

    tile_table: Callable
    forward: Callable
    window: Window
    tile_m: int
    tile_n: int
    num_ctas: int

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
        # In the order of `TileTableArguments` and of `ForwardArguments`.
        self.tile_table(
            *integers, table, total_q, k.shape[0], capacity,
            shift_of_work(max_seqlen_k, self.tile_n), *self.window,
        )  # fmt: skip
        self.forward(
            q, k, v, out, 0 if lse is None else lse.data_ptr(), modifiers, scale, *self.window,
            heads, min(self.num_ctas, capacity * heads), table, None, None, 0, None, None,
        )  # fmt: skip


def prepare(plan: RaggedPlan, window: Window) -> PreparedVarlen:
    """Load the kernels of a plan."""
    config = plan.config
    return PreparedVarlen(
        load_kernel(plan.tile_table()), load_kernel(plan.kernel()), window, config.tile_m,
        config.tile_n, plan.num_ctas,
    )  # fmt: skip


def ctas_on(device: torch.device, sm_margin: int) -> int:
    """CTAs of the forward kernel on a GPU of which `sm_margin` SMs are left to other kernels."""
    return reserve_sms(gpu_of(device), sm_margin).num_sms
