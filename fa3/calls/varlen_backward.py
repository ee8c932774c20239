"""The backward pass of `flash_attn_varlen_func` on a GPU: memory and launches.

`fa3.calls.varlen_call` calls `packed_gradients` with what the forward pass took and gave. Four
kernels run: one makes the table of key tiles from the lengths, which the host never reads; the
others are those of `fa3.calls.backward`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.backward import for_tma
from fa3.planning.backward import rows_in_l2
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.planning.ragged_backward import RaggedBackwardPlan
from fa3.primitives.query_tiles import STATISTICS
from fa3.problem import REMEMBERED, AttentionSpec, Window
from fa3.reference.backward import BackwardOperands, Gradients, Wanted, gradient_of_sinks
from fa3.reference.varlen import PackedLengths
from fa3.running.compiler import load_kernel


@dataclass(frozen=True, slots=True)
class PreparedVarlenBackward:
    """A plan with its kernels loaded, in the order in which they run."""

    plan: RaggedBackwardPlan
    tile_table: Callable
    begin: Callable
    main: Callable
    end: Callable

    def launch(
        self,
        operands: BackwardOperands,
        lengths: PackedLengths,
        max_seqlen_q: int,
        window: Window,
        tensors: tuple | None,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, ...]:
        """Run the kernels on the current stream of the current device.

        Returns:
            dq, dk, dv and the statistics of the rows, (heads, tiles, STATISTICS, tile_m).
        """
        q, k, v, out, lse, d_out, d_lse = operands
        plan, config, num_sequences = self.plan, self.plan.config, lengths.batch
        (total_q, heads, _), (total_k, heads_kv, _) = q.shape, k.shape
        tiles = heads * plan.num_query_tiles(total_q, num_sequences)
        sizes = tiles * plan.statistics_of_tile, tiles * plan.sums_of_tile
        statistics, sums = q.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
        turns = None
        if plan.is_ordered:
            turns = q.new_empty(tiles * plan.turns_of_tile, dtype=torch.int32)
        capacity = capacity_of_table(total_k, num_sequences, config.tile_n)
        table = q.new_empty(words_of_table(capacity), dtype=torch.int32)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # In the order of `TileTableArguments`.
        self.tile_table(
            *lengths, table, total_q, total_k, capacity,
            shift_of_work(max_seqlen_q, config.tile_m), *window, 0,
        )  # fmt: skip
        ends, _, used, _ = lengths
        self.begin(out, d_out, lse, d_lse, statistics, sums, ends, used, turns)
        # In the order of `BackwardArguments`.
        self.main(
            q, k, v, d_out, dk, dv, statistics, sums, tensors, softmax_scale, *window,
            rows_in_l2(plan.spec, heads // heads_kv), capacity * heads_kv, None, table,
            num_sequences, turns,
        )  # fmt: skip
        self.end(sums, dq, softmax_scale, ends)
        return dq, dk, dv, statistics.view(heads, -1, STATISTICS, config.tile_m)


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_varlen_backward(
    spec: AttentionSpec, has_used_q: bool, has_used_k: bool, has_d_lse: bool, is_ordered: bool
) -> PreparedVarlenBackward:
    """Load the kernels for the gradients of packed sequences."""
    plan = RaggedBackwardPlan(spec, has_used_q, has_used_k, has_d_lse, is_ordered)
    return PreparedVarlenBackward(plan, *map(load_kernel, plan.kernels))


def packed_gradients(
    spec: AttentionSpec,
    window: Window,
    operands: BackwardOperands,
    lengths: PackedLengths,
    max_seqlen_q: int,
    tensors: tuple[torch.Tensor, ...],
    softmax_scale: float,
    wanted: Wanted,
    deterministic: bool,
) -> Gradients:
    """Compute the gradients of packed sequences on a GPU. There are queries, and keys.

    Args:
        operands: `d_out` and `d_lse` may be laid out in any way; one of them may be None for zeros.
        tensors: those of the spec's scores, mask and sinks.
        wanted: of the sinks nothing is computed unless it is; the others come all together.
        deterministic: whether dQ is to have the same bits every time; the others always have.

    Returns:
        those of q, k, v and the sinks, contiguous. Rows that are not used get 0.
    """
    q, _, _, out, _, d_out, d_lse = operands
    d_out = torch.zeros_like(out) if d_out is None else for_tma(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    operands = operands._replace(d_out=d_out, d_lse=d_lse)
    given = (*(used is not None for used in lengths[2:]), d_lse is not None)
    with torch.cuda.device(q.device):
        call = prepare_varlen_backward(spec, *given, deterministic)
        *found, statistics = call.launch(
            operands, lengths, max_seqlen_q, window, tensors or None, softmax_scale
        )
    d_sinks = None
    if wanted.sinks:
        lse, delta = (statistics[None, :, :, i].flatten(2) for i in range(STATISTICS))
        d_sinks = gradient_of_sinks(tensors[-1], lse * math.log(2.0), delta)
    return Gradients(*found, d_sinks)
