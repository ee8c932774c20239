"""Gradients of calls: what torch's autograd calls and keeps.

`flash_attn_func` and `flash_attn_varlen_func` come here with checked tensors when one of them wants
a gradient. What is kept until the backward pass are the tensors of the call, its output, its
log-sum-exp and the seed of its dropout, no matrix of queries by keys. `fa3.calls.backward` computes
P again from them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from fa3.calls.backward import BackwardCall
from fa3.calls.eager import in_memory
from fa3.calls.operands import FP8_DTYPE
from fa3.reference.backward import BackwardOperands, Gradients, Wanted
from fa3.reference.dropout import Dropout
from fa3.scores.scores import Score

NUM_OPERANDS = len(BackwardOperands._fields)

OF_OUT, OF_LSE = "the gradient of out", "the gradient of the log-sum-exp"
"""What complaints call the gradients that come to a backward pass."""


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


def check_differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    score: Score | None,
    out: torch.Tensor | None,
    pack_gqa: bool | None = None,
) -> None:
    """Raise unless a call that wants a gradient can have one."""
    if q.dtype == FP8_DTYPE:
        raise NotImplementedError("q, k, v and sinks must not require grad with q in FP8")
    if out is score is None and not pack_gqa and not _are_functorch_transforms_active():
        return
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    name = next(
        name for name, tensor in given.items() if tensor is not None and tensor.requires_grad
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


def arrived(
    d_out: torch.Tensor | None, d_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of out and of the log-sum-exp, in memory; None for zeros."""
    return in_memory(OF_OUT, d_out), in_memory(OF_LSE, d_lse)


def no_double_backward(
    name: str, compute: Callable[..., Gradients], *tensors: torch.Tensor | None
) -> Gradients:
    """Compute gradients of these tensors, which have none themselves.

    Torch need not know of it unless someone may ask for a second derivative (`create_graph`). That
    saves the host as much as all of a launch.

    Args:
        name: of the function that they are the gradients of.
    """
    if torch.is_grad_enabled() or _are_functorch_transforms_active():
        return Gradients(*WithoutDerivative.apply(name, compute, *tensors))
    return compute(*tensors)


class WithoutDerivative(torch.autograd.Function):
    """Gradients that cannot be differentiated."""

    @staticmethod
    def forward(
        ctx, name: str, compute: Callable[..., Gradients], *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute them."""
        ctx.name = name
        return tuple(compute(*tensors))

    @staticmethod
    def backward(ctx, *_: torch.Tensor | None):
        raise no_second_derivative(ctx.name)


class DifferentiableCall(NamedTuple):
    """A call, without the tensors that may have a gradient."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]  # gives out and the log-sum-exp
    backward: BackwardCall
    lengths: Sequence[torch.Tensor | None]  # the `PackedLengths`
    dropout: Dropout | None
    returns_lse: bool  # whether the log-sum-exp is wanted: each result costs torch 1 us


class DifferentiableAttention(torch.autograd.Function):
    """Attention, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        call: DifferentiableCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; keep what the backward pass needs.

        Args:
            call: all else in one tuple, since torch looks at each argument.
            tensors: of the spec's scores, mask and sinks, in this order.
        """
        attend, ctx.call, lengths, ctx.dropout, returns_lse = call
        out, lse = attend()
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
        state, *saved = (
            x if x is None else in_memory("a tensor that was saved for backward", x)
            for x in ctx.saved_tensors
        )
        if dropout is not None:
            dropout = dropout._replace(rng_state=state)
        lengths, saved, tensors = saved[:4], saved[4:9], saved[9:]
        wanted = Wanted(*ctx.needs_input_grad[1:4], any(ctx.needs_input_grad[4:]))

        def compute(*read: torch.Tensor | None) -> Gradients:
            operands, tensors = BackwardOperands(*read[:NUM_OPERANDS]), read[NUM_OPERANDS:]
            return call.gradients(operands, lengths, tensors, wanted, dropout)

        read = *saved, *arrived(d_out, d_lse), *tensors
        *grads, d_sinks = no_double_backward(call.function, compute, *read)
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
