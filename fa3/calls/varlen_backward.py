"""The backward pass of `flash_attn_varlen_func` on a GPU: memory and launches.

`fa3.calls.varlen_call` calls `packed_gradients` with what the forward pass took and gave. Four
kernels run: one makes the table of key tiles from the lengths, which the host never reads; the
others are those of `fa3.calls.backward`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.backward import for_tma, natural_statistics
from fa3.calls.devices import gpu_of
from fa3.planning.backward import rows_in_l2
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.planning.ragged_backward import RaggedBackwardPlan
from fa3.primitives.query_tiles import STATISTICS, number_of_packed_tiles
from fa3.problem import REMEMBERED, AttentionSpec, Window
from fa3.reference.backward import BackwardOperands, Gradients, Wanted, gradient_of_sinks
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import PackedLengths
from fa3.running.compiler import load_kernel
from fa3.running.graphs import current_device


@dataclass(frozen=True, slots=True)
class PreparedVarlenBackward:
    """Kernels, in the order in which they run, and what a launch takes of their plan.

    Fields:
        tile_m, tile_n: of the backward kernel's config.
        statistics, sums: float32 that these take for a tile of queries, and `turns` int32.
    """

    tile_table: Callable
    begin: Callable
    main: Callable
    end: Callable
    spec: AttentionSpec
    tile_m: int
    tile_n: int
    statistics: int
    sums: int
    turns: int

    @classmethod
    def of(cls, plan: RaggedBackwardPlan) -> "PreparedVarlenBackward":
        return cls(
            *map(load_kernel, plan.kernels),
            plan.spec,
            plan.config.tile_m,
            plan.config.tile_n,
            plan.statistics_of_tile,
            plan.sums_of_tile,
            plan.turns_of_tile,
        )

    def launch(
        self,
        operands: BackwardOperands,
        lengths: PackedLengths,
        max_seqlen_q: int,
        window: Window,
        tensors: tuple | None,
        softmax_scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the kernels on the current stream of the tensors' GPU.

        Returns:
            dq, dk, dv and the statistics of the rows.
        """
        q, k, v, out, lse, d_out, d_lse = operands
        if q.device.index != current_device():
            with torch.cuda.device(q.device):
                return self.launch(
                    operands, lengths, max_seqlen_q, window, tensors, softmax_scale, dropout
                )
        num_sequences = lengths.batch
        (total_q, heads, _), (total_k, heads_kv, _) = q.shape, k.shape
        tiles = heads * number_of_packed_tiles(total_q, num_sequences, self.tile_m)
        # By themselves: to cut one buffer in two takes torch longer than to allocate another.
        statistics = q.new_empty(tiles * self.statistics, dtype=torch.float32)
        sums = q.new_empty(tiles * self.sums, dtype=torch.float32)
        turns = q.new_empty(tiles * self.turns, dtype=torch.int32) if self.turns else None
        capacity = capacity_of_table(total_k, num_sequences, self.tile_n)
        table = q.new_empty(words_of_table(capacity), dtype=torch.int32)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        # In the order of `TileTableArguments`.
        self.tile_table(
            *lengths, table, total_q, total_k, capacity,
            shift_of_work(max_seqlen_q, self.tile_m), *window, 0, 1, 1,
        )  # fmt: skip
        ends, _, used, _ = lengths
        kept, given = (None, None) if dropout is None else (dropout.kept, dropout.arguments)
        self.begin(out, d_out, lse, d_lse, statistics, sums, ends, used, turns, kept)
        # In the order of `BackwardArguments`.
        self.main(
            q, k, v, d_out, dk, dv, statistics, sums, tensors, softmax_scale, *window,
            rows_in_l2(self.spec, heads // heads_kv),
            min(capacity * heads_kv, gpu_of(q.device).num_sms), table, table, num_sequences, turns,
            given,
        )  # fmt: skip
        self.end(sums, dq, softmax_scale, ends)
        return dq, dk, dv, statistics


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_varlen_backward(
    spec: AttentionSpec, has_used_q: bool, has_used_k: bool, has_d_lse: bool, is_ordered: bool
) -> PreparedVarlenBackward:
    """Load the kernels for the gradients of packed sequences."""
    plan = RaggedBackwardPlan(spec, has_used_q, has_used_k, has_d_lse, is_ordered)
    return PreparedVarlenBackward.of(plan)


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
    dropout: Dropout | None,
) -> Gradients:
    """Compute the gradients of packed sequences on a GPU. There are queries, and keys.

    Args:
        operands: `d_out` and `d_lse` may be laid out in any way; one of them may be None for zeros.
        tensors: those of the spec's scores, mask and sinks.
        wanted: of the sinks nothing is computed unless it is; the others come all together.
        deterministic: whether dQ is to have the same bits every time; the others always have.
        dropout: that of the forward pass, where the spec has it.

    Returns:
        those of q, k, v and the sinks, contiguous. Rows that are not used get 0.
    """
    out, d_out, d_lse = operands.out, operands.d_out, operands.d_lse
    d_out = torch.zeros_like(out) if d_out is None else for_tma(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    operands = operands._replace(d_out=d_out, d_lse=d_lse)
    call = prepare_varlen_backward(
        spec, lengths.seqused_q is not None, lengths.seqused_k is not None, d_lse is not None,
        deterministic,
    )  # fmt: skip
    *found, statistics = call.launch(
        operands, lengths, max_seqlen_q, window, tensors or None, softmax_scale, dropout
    )
    d_sinks = None
    if wanted.sinks:
        tiles = statistics.view(1, operands.q.shape[1], -1, STATISTICS, call.tile_m)
        lse, delta = (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))
        d_sinks = gradient_of_sinks(tensors[-1], *natural_statistics(lse, delta, dropout))
    return Gradients(*found, d_sinks)
