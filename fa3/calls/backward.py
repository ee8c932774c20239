"""The backward pass of a call on a GPU: memory and launches.

`fa3.calls.autograd` calls `gradients` and `fa3.calls.varlen_call` calls `packed_gradients`, with
what the forward pass took and gave. Two kernels run, both launched by one entry: the preprocess
kernel and the backward kernel. For packed sequences a kernel before them makes the table of key
tiles from the lengths, which the host never reads.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.operands import ALIGNMENT
from fa3.kernels.backward_pass import PassArguments
from fa3.planning.backward import (
    BackwardKernels,
    BackwardPlan,
    BackwardSizes,
    shares_of_packed,
    sizes_of_packed,
)
from fa3.planning.key_split import KeyShares
from fa3.planning.launch import slots, template_of
from fa3.primitives.query_tiles import STATISTICS
from fa3.problem import REMEMBERED, AttentionSpec, Problem, Window
from fa3.reference.backward import BackwardOperands, Gradients, Wanted, gradient_of_sinks
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import PackedLengths
from fa3.running.compiler import load_kernel
from fa3.running.graphs import current_device

TENSOR_SLOTS = slice(*slots(PassArguments, "q", "modifiers"))
SCALE, HAS_D_LSE, DROPOUT, MODIFIERS = slots(
    PassArguments, "softmax_scale", "has_d_lse", "dropout", "modifiers"
)
(DQ_AT,) = slots(PassArguments, "dq_at")
LENGTH_SLOTS = slice(*slots(PassArguments, "cu_seqlens_q", "head_parts"))


@dataclass(frozen=True, slots=True)
class PreparedBackward:
    """What a launch takes of kernels and sizes; the tensors are filled in.

    Fields:
        entry: launches the kernels.
        template: the `PassArguments` in order, the tensors still missing.
        buffer_size: 32-bit numbers of the buffer that the kernels share.
        tile_m: queries of a tile.
    """

    entry: Callable
    template: list
    buffer_size: int
    tile_m: int

    @classmethod
    def of(
        cls,
        kernels: BackwardKernels,
        sizes: BackwardSizes,
        shares: KeyShares,
        window: Window,
        num_sms: int,
    ) -> "PreparedBackward":
        """Prepare launches of these sizes on so many SMs; load the kernels."""
        layout = sizes.layout
        head_parts, block_parts = shares if kernels.splits else (None, None)
        template = template_of(
            PassArguments,
            dq_is_zeroed=sizes.dq_is_zeroed,
            window_left=window.left,
            window_right=window.right,
            heads_per_group=sizes.heads_per_group,
            num_clusters=min(sizes.most_ctas, num_sms),
            dq_at=layout.dq_at,
            table_at=layout.table_at,
            counters_at=layout.counters_at,
            dq_flags_at=layout.dq_flags_at,
            groups_preprocessed=sizes.groups_preprocessed,
            capacity=sizes.capacity,
            shift=sizes.shift,
            head_parts=head_parts,
            block_parts=block_parts,
            part_counters_at=layout.part_counters_at,
            parts_at=layout.parts_at,
        )
        entry = load_kernel(kernels.entry)
        return cls(entry, template, layout.end, kernels.config.tile_m)

    def launch(
        self,
        operands: BackwardOperands,
        lengths: PackedLengths | None,
        softmax_scale: float,
        tensors: tuple[torch.Tensor, ...],
        dropout: Dropout | None,
        wants_sinks: bool,
    ) -> Gradients:
        """Run the kernels on the current stream of the tensors' GPU.

        Args:
            lengths: of packed sequences; None without.
            tensors: of the spec's scores, mask and sinks.
        """
        q, k, v, out, lse, d_out, d_lse = operands
        if q.device.index != current_device():
            with torch.cuda.device(q.device):
                return self.launch(operands, lengths, softmax_scale, tensors, dropout, wants_sinks)
        # Of the log-sum-exp's dtype: to name another one takes torch 0.2 us.
        buffer = lse.new_empty(self.buffer_size)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        has_d_lse = d_lse is not None
        d_out = torch.zeros_like(out) if d_out is None else for_tma(d_out)
        d_lse = d_lse.contiguous() if has_d_lse else lse
        arguments = self.template.copy()
        arguments[TENSOR_SLOTS] = q, k, v, out, lse, d_out, d_lse, dq, dk, dv, buffer
        arguments[MODIFIERS] = tensors or None
        arguments[SCALE] = softmax_scale
        arguments[HAS_D_LSE] = has_d_lse
        if dropout is not None:
            arguments[DROPOUT] = dropout.arguments
        if lengths is not None:
            arguments[LENGTH_SLOTS] = lengths
        self.entry(*arguments)
        if not wants_sinks:
            return Gradients(dq, dk, dv, None)
        statistics = natural_statistics(*self.statistics(buffer, lse), dropout)
        return Gradients(dq, dk, dv, gradient_of_sinks(tensors[-1], *statistics))

    def statistics(
        self, buffer: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The statistics of whole tiles, (batch, heads, rows) in any order of the rows.

        The log-sum-exp is infinite where a row sees no key or is no query.

        Args:
            buffer: what the kernels wrote for each other.
            lse: of the call, (batch, heads, seqlen_q), or (heads, total_q) of packed sequences.
        """
        batch, heads = lse.shape[:-1] if lse.dim() == 3 else (1, lse.shape[0])
        statistics = buffer[: self.template[DQ_AT]]
        tiles = statistics.view(batch, heads, -1, STATISTICS, self.tile_m)
        lse, delta = (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))
        return lse, delta


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_backward(problem: Problem, is_ordered: bool, num_sms: int) -> PreparedBackward:
    """Plan the backward pass of a problem on so many SMs and load its kernels."""
    plan = BackwardPlan.of(problem, is_ordered, num_sms)
    return PreparedBackward.of(plan.kernels, plan.sizes, plan.shares, problem.window, num_sms)


kernels_of_packed = functools.lru_cache(maxsize=REMEMBERED)(BackwardKernels)
"""The kernels for packed sequences: one object for all calls, which knows its constants."""


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
        tensors: of the spec's scores, mask and sinks.
        wants_sinks: whether the gradient of the sinks is wanted.
        deterministic: whether dQ is to have the same bits every time; the others always have.
        dropout: of the forward pass, where the problem's spec has it.
        num_sms: SMs that may be used, not more than the GPU has.

    Returns:
        the gradients of q, k, v and the sinks, contiguous. A row that sees no key gets 0, and adds
        nothing if what came for it is finite.
    """
    if operands.d_out is None and operands.d_lse is None:
        return no_gradients(operands, torch.zeros_like(tensors[-1]) if wants_sinks else None)
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q):
        return without_keys(operands, tensors, wants_sinks)
    call = prepare_backward(problem, deterministic, min(num_sms, gpu_of(operands.q.device).num_sms))
    return call.launch(operands, None, softmax_scale, tensors, dropout, wants_sinks)


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
        tensors: of the spec's scores, mask and sinks.
        wanted: of the sinks nothing is computed unless it is; the others come all together.
        deterministic: whether dQ is to have the same bits every time; the others always have.
        dropout: of the forward pass, where the spec has it.
        num_sms: SMs that may be used, not more than the GPU has.

    Returns:
        the gradients of q, k, v and the sinks, contiguous. Rows that are not used get 0.
    """
    q, k = operands.q, operands.k
    num_sms = min(num_sms, gpu_of(q.device).num_sms)
    sizes = q.shape[0], k.shape[0], lengths.batch, max_seqlen_q, q.shape[1], k.shape[1]
    shares = shares_of_packed(spec, window, *sizes, deterministic, num_sms)
    has_used = lengths.seqused_q is not None, lengths.seqused_k is not None
    kernels = kernels_of_packed(spec, deterministic, shares.parts > 1, True, *has_used)
    call = PreparedBackward.of(
        kernels, sizes_of_packed(kernels, window, *sizes, shares), shares, window, num_sms
    )
    return call.launch(operands, lengths, softmax_scale, tensors, dropout, wanted.sinks)


def for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or its copy if TMA cannot walk it: gradients come laid out in any way."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    unit = ALIGNMENT // tensor.element_size()
    is_fit = tensor.stride(-1) == 1 and tensor.data_ptr() % ALIGNMENT == 0
    for stride in tensor.stride()[:-1]:
        is_fit = is_fit and stride > 0 and stride % unit == 0
    return tensor if is_fit else tensor.clone(memory_format=torch.contiguous_format)


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
