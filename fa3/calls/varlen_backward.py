"""The backward pass of `flash_attn_varlen_func` on a GPU: memory and launches.

`fa3.calls.varlen_call` calls `packed_gradients` with what the forward pass took and gave. Three
kernels run, all launched by one entry: one makes the table of key tiles from the lengths, which the
host never reads; the others are those of `fa3.calls.backward`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.backward import NOT_SPLIT, for_tma, natural_statistics
from fa3.calls.devices import gpu_of
from fa3.planning.backward import (
    begins_inside,
    ctas_that_end,
    numbers_of_key_parts,
    rows_in_l2,
    words_of_counters,
    words_of_key_parts,
)
from fa3.planning.key_split import KeyShares
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.planning.ragged_backward import (
    RaggedBackwardPlan,
    sections_of_heads,
    shares_of_packed,
)
from fa3.primitives.query_tiles import STATISTICS, number_of_packed_tiles
from fa3.primitives.vectors import QUAD
from fa3.problem import REMEMBERED, AttentionSpec, Window
from fa3.reference.backward import BackwardOperands, Gradients, Wanted, gradient_of_sinks
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import PackedLengths
from fa3.running.compiler import load_kernel
from fa3.running.graphs import current_device

HAS_ZEROS = True
"""All sums of packed sequences begin with zeros."""


@dataclass(frozen=True, slots=True)
class PreparedVarlenBackward:
    """Kernels, in the order in which they run, and what a launch takes of their plan.

    Fields:
        entry: launches them.
        tile_m, tile_n: of the backward kernel's config.
        statistics, sums: float32 that these take for a tile of queries, and `words` int32.
        rows_in_l2: queries whose Q, dO and dQ fit into L2 together.
        numbers_of_part: float32 that the sums of dK and dV of a part of a key tile take.
    """

    entry: Callable
    tile_m: int
    tile_n: int
    statistics: int
    sums: int
    words: int
    rows_in_l2: int
    numbers_of_part: int

    @classmethod
    def of(cls, plan: RaggedBackwardPlan) -> "PreparedVarlenBackward":
        return cls(
            load_kernel(plan.entry),
            plan.config.tile_m,
            plan.config.tile_n,
            plan.statistics_of_tile,
            plan.sums_of_tile,
            plan.words_of_tile,
            rows_in_l2(plan.spec),
            numbers_of_key_parts(1, plan.spec, plan.config),
        )

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        lengths: PackedLengths,
        max_seqlen_q: int,
        window: Window,
        tensors: tuple | None,
        softmax_scale: float,
        dropout: Dropout | None,
        shares: KeyShares,
        num_sms: int,
    ) -> tuple[torch.Tensor, ...]:
        """Run the kernels on the current stream of the tensors' GPU.

        Args:
            shares: how CTAs share key tiles, as the kernels were loaded for.
            num_sms: CTAs at most.

        Returns:
            dq, dk, dv and what the kernels wrote for each other.
        """
        if q.device.index != current_device():
            with torch.cuda.device(q.device):
                return self.launch(
                    q, k, v, out, lse, d_out, d_lse, lengths, max_seqlen_q, window, tensors,
                    softmax_scale, dropout, shares, num_sms,
                )  # fmt: skip
        num_sequences = lengths.batch
        total_k, heads_kv, _ = k.shape
        tiles, longest_q = self.num_tiles(q, num_sequences), min(max_seqlen_q, q.shape[0])
        fitting = self.rows_in_l2 // max(1, longest_q)
        heads = heads_kv * shares.head_parts
        tiles_of_head = total_k // self.tile_n * shares.block_parts
        sections = sections_of_heads(heads, tiles_of_head, fitting)
        is_inside = begins_inside(total_k / max(1, num_sequences), window)
        capacity = capacity_of_table(total_k, num_sequences, self.tile_n)
        most_ctas = max(capacity * heads_kv * shares.parts, ctas_that_end(tiles))
        sums_at = tiles * self.statistics
        table_at = sums_at + tiles * self.sums
        counters_at = table_at + words_of_table(capacity)
        words_at = counters_at + words_of_counters(sections)
        split, numbers = NOT_SPLIT, words_at + tiles * self.words
        if shares.parts > 1:
            num_parts = number_of_packed_tiles(total_k, num_sequences, self.tile_n)
            num_parts *= heads_kv * shares.parts
            part_counters_at = words_at
            words_at += words_of_key_parts(num_parts)
            parts_at = words_at + -(-tiles * self.words // QUAD) * QUAD
            split = *shares, part_counters_at, parts_at
            numbers = parts_at + num_parts * self.numbers_of_part
        # Of the log-sum-exp's dtype: to name another one takes torch 0.2 us.
        buffer = lse.new_empty(numbers)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        has_d_lse = d_lse is not None
        drawn = None if dropout is None else dropout.arguments
        # In the order of `PassArguments`.
        self.entry(
            q, k, v, out, lse, d_out, d_lse if has_d_lse else lse, dq, dk, dv, buffer, tensors,
            softmax_scale, has_d_lse, HAS_ZEROS, *window, heads // sections * shares.block_parts,
            min(most_ctas, num_sms), sums_at, table_at, counters_at,
            words_at, drawn, 1 if is_inside else sections, capacity,
            shift_of_work(max_seqlen_q, self.tile_m), *lengths, *split,
        )  # fmt: skip
        return dq, dk, dv, buffer

    def num_tiles(self, q: torch.Tensor, num_sequences: int) -> int:
        """Tiles of queries of all heads."""
        total_q, heads, _ = q.shape
        return heads * number_of_packed_tiles(total_q, num_sequences, self.tile_m)

    def of_rows(self, buffer: torch.Tensor, q: torch.Tensor, num_sequences: int):
        """As `fa3.calls.backward.of_rows`, of one batch."""
        statistics = buffer[: self.num_tiles(q, num_sequences) * self.statistics]
        tiles = statistics.view(1, q.shape[1], -1, STATISTICS, self.tile_m)
        return (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_varlen_backward(
    spec: AttentionSpec, has_used_q: bool, has_used_k: bool, is_ordered: bool, splits: bool
) -> PreparedVarlenBackward:
    """Load the kernels for the gradients of packed sequences."""
    plan = RaggedBackwardPlan(spec, has_used_q, has_used_k, is_ordered, splits)
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
    num_sms: int,
) -> Gradients:
    """Compute the gradients of packed sequences on a GPU. There are queries, and keys.

    Args:
        operands: `d_out` and `d_lse` may be laid out in any way; one of them may be None for zeros.
        tensors: those of the spec's scores, mask and sinks.
        wanted: of the sinks nothing is computed unless it is; the others come all together.
        deterministic: whether dQ is to have the same bits every time; the others always have.
        dropout: that of the forward pass, where the spec has it.
        num_sms: SMs that may be used, at most those of the GPU.

    Returns:
        those of q, k, v and the sinks, contiguous. Rows that are not used get 0.
    """
    q, k, v, out, lse, d_out, d_lse = operands
    d_out = torch.zeros_like(out) if d_out is None else for_tma(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    sizes = q.shape[0], k.shape[0], lengths.batch, max_seqlen_q, q.shape[1], k.shape[1]
    num_sms = min(num_sms, gpu_of(q.device).num_sms)
    shares = shares_of_packed(spec, window, *sizes, deterministic, num_sms)
    has_used = lengths.seqused_q is not None, lengths.seqused_k is not None
    call = prepare_varlen_backward(spec, *has_used, deterministic, shares.parts > 1)
    *found, buffer = call.launch(
        q, k, v, out, lse, d_out, d_lse, lengths, max_seqlen_q, window, tensors or None,
        softmax_scale, dropout, shares, num_sms,
    )  # fmt: skip
    d_sinks = None
    if wanted.sinks:
        of_sinks = natural_statistics(*call.of_rows(buffer, q, lengths.batch), dropout)
        d_sinks = gradient_of_sinks(tensors[-1], *of_sinks)
    return Gradients(*found, d_sinks)
