"""Gradients of `flash_attn_func`: what torch's autograd calls and keeps.

`flash_attn_func` comes here with checked tensors when one of them wants a gradient. What is kept
until the backward pass are the tensors of the call, its output, its log-sum-exp and the seed of its
dropout, no matrix of queries by keys; `fa3.reference.backward` computes P again from them, and on a
GPU the kernels that `fa3.calls.backward` launches.
"""

from collections.abc import Callable, Sequence

import torch
from torch._C import _are_functorch_transforms_active

from fa3.calls.backward import gradients
from fa3.calls.devices import gpu_of
from fa3.calls.eager import in_memory
from fa3.calls.operands import hide_all_keys
from fa3.reference.backward import BackwardOperands, Gradients, Wanted, execute_backward
from fa3.reference.dropout import Dropout
from fa3.reference.forward import execute
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
    """Raise unless a call that wants a gradient can have one.

    Raises:
        ValueError: the caller gives the output's memory, which may be written again before the
            backward pass reads it.
        NotImplementedError: it has a score of the user's or pack_gqa=True, or a transform of
            torch.func is active.
    """
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


def keep_for_backward(
    ctx, given: tuple, dropout: Dropout | None, *tensors: torch.Tensor | None
) -> None:
    """Keep until the backward pass what it needs; the seed of dropout is one of the tensors."""
    ctx.given = given
    ctx.save_for_backward(*(() if dropout is None else (dropout.rng_state,)), *tensors)


def kept(ctx, dropout: Dropout | None) -> tuple[tuple, Dropout | None]:
    """The tensors that a call kept, and its dropout with the seed that was among them."""
    # Asked for once: a checkpoint computes them anew each time, and hooks may give others.
    tensors = tuple(in_memory("a tensor that was saved for backward", x) for x in ctx.saved_tensors)
    if dropout is None:
        return tensors, None
    return tensors[1:], dropout._replace(rng_state=tensors[0])


def arrived(
    d_out: torch.Tensor | None, d_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of out and of the log-sum-exp as they lie in memory; None for zeros.

    Raises:
        NotImplementedError: one lies nowhere, or carries a tangent.
    """
    return in_memory(OF_OUT, d_out), in_memory(OF_LSE, d_lse)


def once(name: str, compute: Callable[..., Gradients], *tensors: torch.Tensor | None) -> Gradients:
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


def of_tensors(tensors: Sequence[torch.Tensor], d_sinks: torch.Tensor | None) -> tuple:
    """The gradients of the tensors of a spec's scores, mask and sinks: only the sinks have one, and
    they come last."""
    return (*[None] * (len(tensors) - 1), d_sinks) if tensors else ()


class HostAttention(torch.autograd.Function):
    """Attention of CPU tensors, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        given: tuple,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a plan.

        Args:
            given: the plan, None if there is nothing to compute; the problem; the softmax scale;
                the `Dropout`, None without.
            tensors: of the spec's scores, mask and sinks, in this order.

        Returns:
            out and lse, contiguous.
        """
        plan, problem, softmax_scale, dropout = given
        batch, seqlen_q, heads_q, _ = q.shape
        out = q.new_empty(batch, seqlen_q, heads_q, v.shape[3])
        lse = q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float32)
        if plan is None:
            hide_all_keys(out, lse, tensors[-1] if problem.spec.sinks else None)
        else:
            execute(plan, (q, k, v, out, lse), softmax_scale, tensors, dropout)
        keep_for_backward(ctx, given, dropout, q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx, d_out: torch.Tensor, d_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        _, problem, softmax_scale, dropout = ctx.given
        (q, k, v, out, lse, *tensors), dropout = kept(ctx, dropout)
        wanted = Wanted(*ctx.needs_input_grad[1:4], any(ctx.needs_input_grad[4:]))

        def compute(*read: torch.Tensor) -> Gradients:
            operands, tensors = BackwardOperands(*read[:NUM_OPERANDS]), read[NUM_OPERANDS:]
            spec, window = problem.spec, problem.window
            return execute_backward(spec, window, operands, softmax_scale, tensors, wanted, dropout)

        read = q, k, v, out, lse, *arrived(d_out, d_lse), *tensors
        *found, d_sinks = once("flash_attn_func", compute, *read)
        return None, *found, *of_tensors(tensors, d_sinks)


class DeviceAttention(torch.autograd.Function):
    """Attention of tensors on a GPU, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        given: tuple,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run a call.

        Args:
            given: the `fa3.calls.forward.PreparedCall`; whether dQ is to have the same bits every
                time; the softmax scale; the `Dropout`, None without; whether the log-sum-exp is
                wanted. In one tuple, since torch looks at each argument.
            tensors: of the spec's scores, mask and sinks, in this order.

        Returns:
            out, and the log-sum-exp if it is wanted: each costs torch 1 us.
        """
        call, _, softmax_scale, dropout, wants_lse = given
        out = call.output.allocate(q)
        lse = q.new_empty(*call.lse_shape, dtype=torch.float32)
        if call.launches:
            drawn = None if dropout is None else dropout.arguments
            call.launch(q, k, v, out, lse, tensors or None, softmax_scale, None, drawn)
        else:
            hide_all_keys(out, lse, tensors[-1] if call.problem.spec.sinks else None)
        ctx.set_materialize_grads(False)
        keep_for_backward(ctx, given, dropout, q, k, v, out, lse, *tensors)
        return (out, lse) if wants_lse else out

    @staticmethod
    def backward(
        ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        call, deterministic, softmax_scale, dropout, _ = ctx.given
        (q, k, v, out, lse, *tensors), dropout = kept(ctx, dropout)
        wants_sinks = bool(tensors) and any(ctx.needs_input_grad[4:])

        def compute(*read: torch.Tensor | None) -> Gradients:
            operands, tensors = BackwardOperands(*read[:NUM_OPERANDS]), read[NUM_OPERANDS:]
            gpu = gpu_of(q.device) if call.plan is None else call.plan.gpu
            return gradients(
                call.problem, operands, softmax_scale, tensors, wants_sinks, deterministic, dropout,
                gpu.num_sms,
            )  # fmt: skip

        read = q, k, v, out, lse, *arrived(d_out, d_lse), *tensors
        *found, d_sinks = once("flash_attn_func", compute, *read)
        return None, *found, *of_tensors(tensors, d_sinks)


attend_on_device = super(torch.autograd.Function, DeviceAttention).apply
"""`DeviceAttention.apply` without a search for transforms and their wrapped tensors, which calls
have refused before; the search would take 2 us."""


def no_derivative_of_score(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} requires grad, but score has no derivative: leave it out or use torch.no_grad()"
    )


def no_second_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no second derivative: its gradients cannot be differentiated"
    )
