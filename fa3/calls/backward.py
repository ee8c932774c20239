"""The backward pass of a call: memory and launches.

`fa3.calls.autograd` and `fa3.calls.operators` come here with what the forward pass took and
gave. On a GPU two kernels run, both launched by one entry: the preprocess kernel and the backward
kernel. For packed sequences a kernel before them makes the table of key tiles from the lengths,
which the host never reads. On the CPU `fa3.reference.backward` computes the same.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.launcher import Prepared
from fa3.calls.operands import ALIGNMENT, used_queries
from fa3.planning.backward import (
    BackwardKernels,
    BackwardPlan,
    BufferLayout,
    PackedRows,
    launch_of_packed,
    shares_of_packed,
)
from fa3.planning.launch import Launch
from fa3.primitives.query_tiles import STATISTICS
from fa3.problem import REMEMBERED, AttentionSpec, Problem, Window
from fa3.reference.backward import (
    BackwardOperands,
    Gradients,
    Wanted,
    execute_backward,
    gradient_of_sinks,
)
from fa3.reference.dropout import Dropout
from fa3.reference.walker import PackedLengths


class PreparedBackward(NamedTuple):
    """A launch without its tensors."""

    prepared: Prepared
    layout: BufferLayout  # of the buffer that the kernels share
    tile_m: int  # queries of a tile
    dkv_dtype: torch.dtype | None  # dtype of dK and dV; the dtype of K and V if None

    @classmethod
    def of(
        cls, kernels: BackwardKernels, launch: Launch, layout: BufferLayout
    ) -> "PreparedBackward":
        """Load the kernels."""
        dtype = torch.float32 if kernels.writes_fp32 else None
        return cls(Prepared.of([launch]), layout, kernels.config.tile_m, dtype)

    def launch(
        self,
        operands: BackwardOperands,
        lengths: PackedLengths | None,  # of packed sequences; None without
        softmax_scale: float,
        tensors: tuple[torch.Tensor, ...],  # of the spec's scores, mask and sinks
        dropout: Dropout | None,
        wants_sinks: bool,
    ) -> Gradients:
        """Run the kernels on the current stream of the tensors' GPU."""
        q, k, v, out, lse, d_out, d_lse = operands
        # Of the log-sum-exp's dtype: to name another one takes torch 0.2 us.
        buffer = lse.new_empty(self.layout.end)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dtype = self.dkv_dtype
        dk = torch.empty_like(k, dtype=dtype, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, dtype=dtype, memory_format=torch.contiguous_format)
        values = {
            "q": q, "k": k, "v": v, "out": out, "lse": lse,
            "d_out": torch.zeros_like(out) if d_out is None else for_tma(d_out),
            "d_lse": lse if d_lse is None else d_lse.contiguous(), "has_d_lse": d_lse is not None,
            "dq": dq, "dk": dk, "dv": dv, "buffer": buffer, "modifiers": tensors or None,
            "softmax_scale": softmax_scale,
            "dropout": None if dropout is None else dropout.arguments,
        }  # fmt: skip
        if lengths is not None:
            values |= lengths._asdict()
        self.prepared.run(values)
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
        statistics = buffer[: self.layout.dq_at]
        tiles = statistics.view(batch, heads, -1, STATISTICS, self.tile_m)
        lse, delta = (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))
        return lse, delta


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_backward(
    problem: Problem, is_ordered: bool, num_sms: int, writes_fp32: bool
) -> PreparedBackward:
    """Plan the backward pass of a problem on so many SMs and load its kernels."""
    plan = BackwardPlan.of(problem, is_ordered, num_sms, writes_fp32)
    return PreparedBackward.of(plan.kernels, plan.launch(num_sms), plan.layout)


kernels_for_packed = functools.lru_cache(maxsize=REMEMBERED)(BackwardKernels)
"""Remembered: the object keeps its constants. Loaded kernels are looked up for each new size."""


RECENT_SIZES = 16
"""Sizes of packed sequences that are remembered: the layers of a step have the same ones."""


@functools.lru_cache(maxsize=RECENT_SIZES)
def prepare_packed(
    problem: tuple[AttentionSpec, Window],
    rows: PackedRows,
    is_ordered: bool,
    num_sms: int,
    has_used: tuple[bool, bool],
    writes_fp32: bool,
) -> PreparedBackward:
    """Plan the backward pass of packed sequences and load its kernels."""
    spec, window = problem
    shares = shares_of_packed(spec, window, rows, is_ordered, num_sms)
    splits = writes_fp32 or shares.parts > 1
    kernels = kernels_for_packed(spec, is_ordered, splits, True, *has_used, writes_fp32)
    launch, layout = launch_of_packed(kernels, window, rows, shares, num_sms)
    return PreparedBackward.of(kernels, launch, layout)


class BackwardCall(NamedTuple):
    """The backward pass of a call, without its tensors."""

    # Of a dense call; of packed sequences the spec and the window.
    problem: Problem | tuple[AttentionSpec, Window]
    # max_seqlen_q and max_seqlen_k of packed sequences; None for a dense call.
    longest: tuple[int, int] | None
    softmax_scale: float
    deterministic: bool  # whether dQ has the same bits every time; dK and dV always have
    num_sms: int  # SMs of a GPU that may be used

    @property
    def function(self) -> str:
        """The public function."""
        return "flash_attn_func" if self.longest is None else "flash_attn_varlen_func"

    def gradients(
        self,
        # `d_out` and `d_lse` are None for zeros, and may be laid out in any way.
        operands: BackwardOperands,
        # The `PackedLengths`; of a dense call they are not read.
        lengths: Sequence[torch.Tensor | None],
        tensors: tuple[torch.Tensor, ...],  # of the spec's scores, mask and sinks, in this order
        wanted: Wanted,  # the gradients that are used; on a GPU q, k and v have theirs together
        dropout: Dropout | None,  # of the forward pass, where the spec has it
    ) -> Gradients:
        """Compute the gradients.

        Returns:
            the gradients of q, k, v and the sinks, contiguous. Rows that see no key or are not
            used get 0, and add nothing if what came for them is finite.
        """
        q, k, _, out, lse, d_out, d_lse = operands
        packed = None if self.longest is None else PackedLengths(*lengths)
        sizes = *q.shape, *k.shape
        if packed is not None:
            sizes = packed.batch, *sizes, *self.longest
        if 0 in sizes or (d_out is d_lse is None):
            return without_keys(operands, packed, tensors[-1] if wanted.sinks else None)
        if q.is_cuda:
            prepared = self.prepared(operands, packed, wanted)
            return prepared.launch(
                operands, packed, self.softmax_scale, tensors, dropout, wanted.sinks
            )
        spec, window = self.problem if packed else (self.problem.spec, self.problem.window)
        operands = operands._replace(
            d_out=torch.zeros_like(out) if d_out is None else d_out,
            d_lse=torch.zeros_like(lse) if d_lse is None else d_lse,
        )
        sequences = packed.sequences() if packed else None
        return execute_backward(
            spec, window, operands, self.softmax_scale, tensors, wanted, dropout, sequences
        )

    def prepared(
        self, operands: BackwardOperands, lengths: PackedLengths | None, wanted: Wanted
    ) -> PreparedBackward:
        """What is launched on a GPU; there are queries, and keys."""
        q, k, *_ = operands
        num_sms = min(self.num_sms, gpu_of(q.device).num_sms)
        if lengths is None:
            return prepare_backward(self.problem, self.deterministic, num_sms, wanted.fp32_dkv)
        (total_q, heads_q, _), (total_k, heads_kv, _) = q.shape, k.shape
        longest_q = min(self.longest[0], total_q)
        has_used = lengths.seqused_q is not None, lengths.seqused_k is not None
        return prepare_packed(
            self.problem, PackedRows(total_q, total_k, lengths.batch, longest_q, heads_q, heads_kv),
            self.deterministic, num_sms, has_used, wanted.fp32_dkv,
        )  # fmt: skip


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
    operands: BackwardOperands, lengths: PackedLengths | None, sinks: torch.Tensor | None
) -> Gradients:
    """The gradients where no query sees a key: only the sinks, if given, may have one."""
    q, k, v, _, lse, _, d_lse = operands
    zeros = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if sinks is None or d_lse is None or (lengths is not None and not lengths.batch):
        return Gradients(*zeros, None if sinks is None else torch.zeros_like(sinks))
    delta = -d_lse
    if lengths is not None:
        is_used = used_queries(len(q), lengths.cu_seqlens_q, lengths.seqused_q)
        delta = torch.where(is_used, delta, 0.0)[None]
        lse = torch.where(is_used, lse, torch.inf)[None]
    return Gradients(*zeros, gradient_of_sinks(sinks, lse, delta))
