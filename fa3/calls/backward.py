"""The backward pass of a call, and its autograd function.

On a GPU two kernels run, both launched by one entry: the preprocess kernel and the backward kernel.
For packed sequences a kernel before them makes the table of key tiles from the lengths, which the
host never reads. On the CPU `fa3.reference.backward` computes the same. Until then autograd keeps
the tensors of the call, its output, its log-sum-exp and the seed of its dropout. It keeps no matrix
of queries by keys: P is computed again from them.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from fa3.calls.call import lengths_of
from fa3.calls.eager import in_memory, lie_in_memory
from fa3.calls.execution import Prepared
from fa3.calls.operands import ALIGNMENT, FP8_DTYPE, used_queries
from fa3.calls.options import DENSE, PACKED
from fa3.planning.backward import BackwardPlan, BufferLayout
from fa3.planning.backward_packed import kernels_of_packed, launch_of_packed, shares_of_packed
from fa3.planning.costs import Gpu
from fa3.planning.routes import PackedSizes
from fa3.primitives.query_tiles import STATISTICS
from fa3.problem import REMEMBERED, Problem
from fa3.reference.backward import BackwardOperands, Gradients, execute_backward, gradient_of_sinks
from fa3.reference.dropout import Dropout
from fa3.reference.walker import PackedLengths


class PreparedBackward(NamedTuple):
    """A launch without its tensors."""

    prepared: Prepared
    layout: BufferLayout  # of the buffer that the kernels share
    tile_m: int  # queries of a tile

    def statistics(
        self, buffer: torch.Tensor, lse: torch.Tensor, dropout: Dropout | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-sum-exps and deltas of whole tiles, rows in any order.

        The log-sum-exp is infinite where a row sees no key or is no query.

        Args:
            buffer: what the kernels wrote for each other.
            lse: of the call, (batch, heads, seqlen_q), or (heads, total_q) of packed sequences.
        """
        batch, heads = lse.shape[:-1] if lse.dim() == 3 else (1, lse.shape[0])
        tiles = buffer[: self.layout.dq_at].view(batch, heads, -1, STATISTICS, self.tile_m)
        lse, delta = (tiles[:, :, :, i].flatten(2) for i in range(STATISTICS))
        lse, kept = lse * math.log(2.0), 1.0 if dropout is None else dropout.kept
        return lse - math.log(kept), delta / kept


@functools.lru_cache(maxsize=REMEMBERED)
def preparation_of(problem: Problem, gpu: Gpu) -> Callable[..., PreparedBackward]:
    """`prepare_backward` of a problem and a GPU, remembered.
    A call has this function at hand: to look up a problem anew takes 0.6 us."""
    prepare = functools.partial(prepare_backward, problem, gpu)
    return functools.lru_cache(maxsize=REMEMBERED)(prepare)


def prepare_backward(
    problem: Problem,
    gpu: Gpu,
    is_ordered: bool,
    writes_fp32: bool,
    sizes: PackedSizes | None = None,  # of packed sequences
    *has_used: bool,  # whether these have `seqused_q` and `seqused_k`
) -> PreparedBackward:
    """Plan a problem's backward pass and load its kernels."""
    if sizes is None:
        plan = BackwardPlan.of(problem, gpu, is_ordered, writes_fp32)
        kernels, (launch,), layout = plan.kernels, plan.launches(), plan.layout
    else:
        shares = shares_of_packed(problem, sizes, is_ordered, gpu.num_sms)
        kind = problem.spec, is_ordered, writes_fp32
        kernels = kernels_of_packed(*kind, sizes, shares, *has_used)
        launch, layout = launch_of_packed(kernels, problem, sizes, shares, gpu.num_sms)
    return PreparedBackward(Prepared.of([launch]), layout, kernels.main.config.tile_m)


class BackwardCall(NamedTuple):
    """The backward pass of a call, without its tensors."""

    problem: Problem
    # max_seqlen_q and max_seqlen_k of packed sequences; None for a dense call.
    longest: tuple[int, int] | None
    softmax_scale: float
    deterministic: bool  # whether dQ has the same bits every time; dK and dV always have
    prepare: Callable[..., PreparedBackward] | None = None  # on a GPU, see `preparation_of`

    def gradients(
        self,
        # `d_out` and `d_lse` are None for zeros, and may be laid out in any way.
        operands: BackwardOperands,
        # The `PackedLengths`; of a dense call they are not read.
        lengths: Sequence[torch.Tensor | None],
        tensors: tuple[torch.Tensor, ...],  # of the spec's scores, mask and sinks, in this order
        wants_sinks: bool,
        fp32_dkv: bool,  # whether dK and dV are in fp32
        dropout: Dropout | None,  # of the forward pass, where the spec has it
        # Where kernels write dQ; its rows may lie as TMA takes them.
        dq: torch.Tensor | None = None,
    ) -> Gradients:
        """Compute the gradients, on a GPU on the current stream.

        Returns:
            the gradients of q, k, v and the sinks, contiguous. Rows that see no key or are not
            used get 0, and add nothing if what came for them is finite.
        """
        q, k, v, out, lse, d_out, d_lse = operands
        packed = None if self.longest is None else PackedLengths(*lengths)
        is_empty = packed is not None and 0 in (packed.batch, *self.longest)
        if is_empty or not q.numel() or not k.numel() or (d_out is d_lse is None):
            sinks = tensors[-1] if wants_sinks else None
            return without_keys(operands, packed, sinks, fp32_dkv)
        if not q.is_cuda:
            operands = operands._replace(
                d_out=torch.zeros_like(out) if d_out is None else d_out,
                d_lse=torch.zeros_like(lse) if d_lse is None else d_lse,
            )
            sequences = packed.sequences() if packed else None
            rest = tensors, wants_sinks, fp32_dkv, dropout, sequences
            return execute_backward(self.problem, operands, self.softmax_scale, *rest)
        kind = self.deterministic, fp32_dkv
        if packed is not None:
            totals = total_q, total_k = q.shape[0], k.shape[0]
            longest = min(self.longest[0], total_q), min(self.longest[1], total_k)
            sizes = PackedSizes(packed.batch, q.shape[1], *totals, *longest)
            kind += sizes, packed.seqused_q is not None, packed.seqused_k is not None
        made = self.prepare(*kind)
        # Of the log-sum-exp's dtype: to name another one takes torch 0.2 us.
        buffer = lse.new_empty(made.layout.end)
        if dq is None:
            dtype = torch.float32 if self.problem.spec.has_float32_out else None
            dq = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        dtype = torch.float32 if fp32_dkv else None
        dk = torch.empty_like(k, dtype=dtype, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, dtype=dtype, memory_format=torch.contiguous_format)
        values = {
            "q": q, "k": k, "v": v, "out": out, "lse": lse,
            "d_out": torch.zeros_like(out) if d_out is None else for_tma(d_out),
            "d_lse": lse if d_lse is None else d_lse.contiguous(), "has_d_lse": d_lse is not None,
            "dq": dq, "dk": dk, "dv": dv, "buffer": buffer, "modifiers": tensors or None,
            "softmax_scale": self.softmax_scale,
            "dropout": None if dropout is None else dropout.arguments,
        }  # fmt: skip
        if packed is not None:
            values |= packed._asdict()
        made.prepared.run(values)
        if not wants_sinks:
            return Gradients(dq, dk, dv, None)
        statistics = made.statistics(buffer, lse, dropout)
        return Gradients(dq, dk, dv, gradient_of_sinks(tensors[-1], *statistics))


def for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or a copy with strides that TMA can walk."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    unit = ALIGNMENT // tensor.element_size()
    is_fit = tensor.stride(-1) == 1 and tensor.data_ptr() % ALIGNMENT == 0
    for stride in tensor.stride()[:-1]:
        is_fit = is_fit and stride > 0 and stride % unit == 0
    return tensor if is_fit else tensor.clone(memory_format=torch.contiguous_format)


def without_keys(
    operands: BackwardOperands,
    lengths: PackedLengths | None,
    sinks: torch.Tensor | None,
    fp32_dkv: bool,
) -> Gradients:
    """The gradients if no query sees keys: only sinks may have one."""
    q, k, v, _, lse, _, d_lse = operands
    dtype = torch.float32 if fp32_dkv else k.dtype
    zeros = (q.new_zeros(x.shape, dtype=to) for x, to in ((q, q.dtype), (k, dtype), (v, dtype)))
    if sinks is None or d_lse is None or (lengths is not None and not lengths.batch):
        return Gradients(*zeros, None if sinks is None else torch.zeros_like(sinks))
    delta = -d_lse
    if lengths is not None:
        is_used = used_queries(len(q), lengths.cu_seqlens_q, lengths.seqused_q)
        delta = torch.where(is_used, delta, 0.0)[None]
        lse = torch.where(is_used, lse, torch.inf)[None]
    return Gradients(*zeros, gradient_of_sinks(sinks, lse, delta))


# --------------------------------------------------------------------------------- autograd


def wants_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> bool:
    """Whether what is computed of these tensors has a gradient."""
    # A loop over them would take three times as long.
    return torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )


def check_differentiable(values: Mapping[str, Any], pack_gqa: bool | None) -> None:
    """Raise unless a call that wants a gradient can have one."""
    out, score = values["out"], values["score"]
    if values["q"].dtype == FP8_DTYPE:
        raise NotImplementedError("q, k, v and sinks must not require grad with q in FP8")
    if out is score is None and not pack_gqa and not _are_functorch_transforms_active():
        return
    by_name = {name: values[name] for name in ("q", "k", "v", "sinks")}
    name = next(
        name for name, tensor in by_name.items() if tensor is not None and tensor.requires_grad
    )
    if out is not None:
        raise ValueError(
            f"{name} requires grad, so out must be None: the backward pass reads the output again; "
            "do not pass it, or use torch.no_grad()"
        )
    if score is not None:
        raise no_derivative_of_score(name)
    if pack_gqa:
        raise NotImplementedError(
            f"{name} requires grad, but pack_gqa=True has no gradient: pass None or False, or use "
            "torch.no_grad()"
        )
    raise NotImplementedError(
        f"{name} requires grad inside of a transform of torch.func, which is not supported: "
        "use torch.no_grad()"
    )


class WithoutDerivative(torch.autograd.Function):
    """Gradients that cannot be differentiated."""

    @staticmethod
    def forward(
        ctx, name: str, gradients: Gradients, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the function `name`'s gradients, which were computed of these tensors."""
        ctx.name = name
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *_: torch.Tensor | None):
        raise no_second_derivative(ctx.name)


class DifferentiableAttention(torch.autograd.Function):
    """Attention, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        call: tuple[Any, dict[str, Any], BackwardCall, bool],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; keep what the backward pass needs.

        Args:
            call: all else in one tuple, since torch looks at each argument: a `PreparedAttention`,
                the call's values, its backward pass, and whether the log-sum-exp is wanted, as each
                result costs torch 1 us.
            tensors: of the spec's scores, mask and sinks, in this order.
        """
        prepared, values, ctx.call, returns_lse = call
        lengths, ctx.dropout = lengths_of(values), values["dropout"]
        out, lse = prepared.attend(values, True)
        ctx.set_materialize_grads(False)
        state = None if ctx.dropout is None else ctx.dropout.rng_state
        ctx.save_for_backward(state, *lengths, q, k, v, out, lse, *tensors)
        return (out, lse) if returns_lse else out

    @staticmethod
    def backward(
        ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        call, dropout = ctx.call, ctx.dropout
        # Asked for once: a checkpoint computes them anew each time, and hooks may give others.
        saved = ctx.saved_tensors
        if not lie_in_memory(*saved, d_out, d_lse):
            saved = [in_memory("a tensor that was saved for backward", x) for x in saved]
            d_out = in_memory("the gradient of out", d_out)
            d_lse = in_memory("the gradient of the log-sum-exp", d_lse)
        if dropout is not None:
            dropout = dropout._replace(rng_state=saved[0])
        tensors, wants_sinks = tuple(saved[10:]), any(ctx.needs_input_grad[4:])
        operands = BackwardOperands(*saved[5:10], d_out, d_lse)
        arguments = operands, saved[1:5], tensors, wants_sinks, False, dropout
        # This refuses second derivatives (`create_graph`). If gradients are not recorded, there is
        # no second derivative to refuse, and a node would take the host as long as a launch.
        if torch.is_grad_enabled() or _are_functorch_transforms_active():
            with torch.no_grad():
                results = call.gradients(*arguments)
            function = DENSE if call.longest is None else PACKED
            results = WithoutDerivative.apply(function, results, *operands, *tensors)
        else:
            results = call.gradients(*arguments)
        *grads, d_sinks = results
        # Of scores, mask and sinks only the sinks have one, and they come last.
        grads += [None] * (len(tensors) - 1)
        return None, *grads, *([d_sinks] if tensors else ())


attend_differentiably = super(torch.autograd.Function, DifferentiableAttention).apply
"""`DifferentiableAttention.apply` without a search for transforms and their wrapped tensors, which
calls have refused before; the search would take 2 us."""


def no_derivative_of_score(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} requires grad, but score has no derivative: leave it out or use torch.no_grad()"
    )


def no_second_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no second derivative: its gradients cannot be differentiated"
    )
