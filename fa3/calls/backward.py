"""The backward pass of `flash_attn_func` on a GPU: memory and launches.

`fa3.calls.autograd` calls `gradients` with what the forward pass took and gave. Two kernels run,
both launched by one entry: statistics of the rows and what the sums of dQ begin with, and the
gradients.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.operands import ALIGNMENT
from fa3.planning.backward import BackwardPlan, numbers_of_key_parts, words_of_key_parts
from fa3.primitives.query_tiles import STATISTICS
from fa3.primitives.vectors import QUAD
from fa3.problem import REMEMBERED, Problem
from fa3.reference.backward import BackwardOperands, Gradients, gradient_of_sinks
from fa3.reference.dropout import Dropout
from fa3.running.compiler import load_kernel
from fa3.running.graphs import current_device

NOT_PACKED = (None,) * 6
"""What a call without packed sequences gives for the last of `PassArguments` but four."""

NOT_SPLIT = (None,) * 4
"""What a call gives for the last four of `PassArguments` where each CTA has key tiles alone."""


@dataclass(frozen=True, slots=True)
class PreparedBackward:
    """What a problem leads to.

    Fields:
        entry: launches the kernels.
        numbers: float32 that these write for each other.
        has_zeros: whether sums begin with zeros.
        num_clusters: CTAs of the backward kernel.
        order: integers that the entry takes: the window, and the order of the tiles.
        places: where in the numbers there is what.
        last: the last of `PassArguments`: `sections_before`, what only packed sequences have, and
            the split of key tiles.
    """

    plan: BackwardPlan
    entry: Callable
    numbers: int
    has_zeros: bool
    num_clusters: int
    order: tuple[int, ...]
    places: tuple[int, ...]
    last: tuple[int | None, ...]

    @classmethod
    def of(cls, plan: BackwardPlan, num_sms: int) -> "PreparedBackward":
        sums_at = plan.numbers_of_statistics
        counters_at = sums_at + plan.numbers_of_sums
        shares = plan.shares
        words_at = counters_at + plan.words_of_counters
        if shares.parts == 1:
            split, numbers = NOT_SPLIT, words_at + plan.num_query_tiles
        else:
            part_counters_at = words_at
            words_at += words_of_key_parts(plan.num_parts)
            parts_at = words_at + -(-plan.num_query_tiles // QUAD) * QUAD
            split = *shares, part_counters_at, parts_at
            numbers = parts_at + numbers_of_key_parts(
                plan.num_parts, plan.problem.spec, plan.config
            )
        order = *plan.problem.window, plan.heads_per_section
        places = sums_at, counters_at, counters_at, words_at
        last = plan.sections_before, *NOT_PACKED, *split
        num_clusters = min(plan.most_ctas, num_sms)
        entry = load_kernel(plan.entry)
        return cls(plan, entry, numbers, plan.has_zeros, num_clusters, order, places, last)

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        softmax_scale: float,
        tensors: tuple | None,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, ...]:
        """Run the kernels on the current stream of q's GPU.

        Returns:
            dq, dk, dv and what the kernels wrote for each other.
        """
        device = q.device
        if device.index != current_device():
            with torch.cuda.device(device):
                return self.launch(q, k, v, out, lse, d_out, d_lse, softmax_scale, tensors, dropout)
        # Of the log-sum-exp's dtype: to name another one takes torch 0.2 us.
        buffer = lse.new_empty(self.numbers)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        has_d_lse = d_lse is not None
        drawn = None if dropout is None else dropout.arguments
        # In the order of `PassArguments`.
        self.entry(
            q, k, v, out, lse, d_out, d_lse if has_d_lse else lse, dq, dk, dv, buffer, tensors,
            softmax_scale, has_d_lse, self.has_zeros, *self.order,
            self.num_clusters, *self.places, drawn, *self.last,
        )  # fmt: skip
        return dq, dk, dv, buffer


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_backward(problem: Problem, is_ordered: bool, num_sms: int) -> PreparedBackward:
    """Plan the backward pass of a problem on so many SMs and load its kernels."""
    return PreparedBackward.of(BackwardPlan.of(problem, is_ordered, num_sms), num_sms)


def gradients(
    problem: Problem,
    operands: BackwardOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...],
    wants_sinks: bool,
    deterministic: bool,
    dropout: Dropout | None,
    num_sms: int,
) -> Gradients:
    """Compute the gradients of a problem posed by tensors on a GPU.

    Args:
        operands: `d_out` and `d_lse` may be laid out in any way, and None for zeros.
        tensors: those of the spec's scores, mask and sinks.
        wants_sinks: whether the gradient of the sinks is wanted.
        deterministic: whether dQ is to have the same bits every time; the others always have.
        dropout: that of the forward pass, where the problem's spec has it.
        num_sms: SMs that may be used, at most those of the GPU.

    Returns:
        those of q, k, v and the sinks, contiguous. A row that sees no key gets 0, and adds nothing
        if what came for it is finite.
    """
    q, k, v, out, lse, d_out, d_lse = operands
    if d_out is None and d_lse is None:
        return no_gradients(operands, torch.zeros_like(tensors[-1]) if wants_sinks else None)
    d_out = torch.zeros_like(out) if d_out is None else for_tma(d_out)
    d_lse = None if d_lse is None else d_lse.contiguous()
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q):
        return without_keys(operands, tensors, wants_sinks)
    call = prepare_backward(problem, deterministic, min(num_sms, gpu_of(q.device).num_sms))
    dq, dk, dv, buffer = call.launch(
        q, k, v, out, lse, d_out, d_lse, softmax_scale, tensors or None, dropout
    )
    d_sinks = None
    if wants_sinks:
        of_sinks = natural_statistics(*of_rows(buffer, call.plan), dropout)
        d_sinks = gradient_of_sinks(tensors[-1], *of_sinks)
    return Gradients(dq, dk, dv, d_sinks)


def for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or its copy if TMA cannot walk it: gradients come laid out in any way."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    unit = ALIGNMENT // tensor.element_size()
    is_fit = tensor.stride(-1) == 1 and tensor.data_ptr() % ALIGNMENT == 0
    for stride in tensor.stride()[:-1]:
        is_fit = is_fit and stride > 0 and stride % unit == 0
    return tensor if is_fit else tensor.clone(memory_format=torch.contiguous_format)


def of_rows(buffer: torch.Tensor, plan: BackwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The statistics of whole tiles, (batch, heads, rows) in any order of the rows.

    The log-sum-exp is infinite where a row sees no key or is no query.

    Args:
        buffer: what the kernels wrote for each other.
    """
    problem, tile_m = plan.problem, plan.config.tile_m
    statistics = buffer[: plan.numbers_of_statistics]
    tiles = statistics.view(problem.batch, problem.num_heads_q, -1, STATISTICS, tile_m)
    lse, delta = (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))
    return lse, delta


def natural_statistics(
    lse: torch.Tensor, delta: torch.Tensor, dropout: Dropout | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exps, natural logarithm, and deltas from the kernels' statistics."""
    lse = lse * math.log(2.0)
    return (lse, delta) if dropout is None else (lse - math.log(dropout.kept), delta / dropout.kept)


def without_keys(
    operands: BackwardOperands, tensors: tuple[torch.Tensor, ...], wants_sinks: bool
) -> Gradients:
    """The gradients where there are no queries or no keys: only the sinks may have one."""
    d_sinks = None
    if wants_sinks:
        d_lse, lse = operands.d_lse, operands.lse
        delta = torch.zeros_like(lse) if d_lse is None else -d_lse
        d_sinks = gradient_of_sinks(tensors[-1], lse, delta)
    return no_gradients(operands, d_sinks)


def no_gradients(operands: BackwardOperands, d_sinks: torch.Tensor | None) -> Gradients:
    """Zeros for q, k and v, contiguous as all gradients are."""
    q, k, v = operands[:3]
    return Gradients(*(x.new_zeros(x.shape) for x in (q, k, v)), d_sinks)
