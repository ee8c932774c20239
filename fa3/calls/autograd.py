"""Gradients of `flash_attn_func`: what torch's autograd calls and keeps.

`flash_attn_func` comes here with checked tensors when one of them wants a gradient. What is kept
until the backward pass are the tensors of the call, its output, its log-sum-exp and the seed of its
dropout, no matrix of queries by keys; `fa3.reference.backward` computes P again from them, and on a
GPU the kernels that `fa3.calls.backward` launches.
"""

import torch
from torch._C import _are_functorch_transforms_active

from fa3.calls.backward import gradients
from fa3.calls.operands import hide_all_keys
from fa3.planning.plan import Plan
from fa3.problem import Problem
from fa3.reference.backward import BackwardOperands, Wanted, execute_backward
from fa3.reference.dropout import Dropout
from fa3.reference.forward import execute
from fa3.scores.scores import Score

NO_DROPOUT = None, 0.0
"""What stands for the seed and the probability of a call without dropout."""


def dropout_again(rng_state: torch.Tensor | None, dropout_p: float) -> Dropout | None:
    """The dropout of a call from what autograd passes on: tensors by themselves."""
    return None if rng_state is None else Dropout(rng_state, dropout_p)


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
    sm_margin: int,
    pack_gqa: bool | None = None,
) -> None:
    """Raise unless a call that wants a gradient can have one.

    Raises:
        ValueError: the caller gives the output's memory, which may be written again before the
            backward pass reads it.
        NotImplementedError: it has a score of the user's, a transform of torch.func is active, or
            the call is on a GPU and wants what its backward pass cannot do yet.
    """
    if (
        out is score is None
        and not (q.is_cuda and sm_margin)
        and not pack_gqa
        and not _are_functorch_transforms_active()
    ):
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
    if q.is_cuda and sm_margin:
        raise NotImplementedError(
            f"{name} requires grad, but the backward pass cannot leave SMs to others yet: pass "
            "sm_margin=0, or use torch.no_grad()"
        )
    if pack_gqa:
        raise NotImplementedError(
            f"{name} requires grad, but pack_gqa=True has no gradient: pass None or False, or use "
            "torch.no_grad()"
        )
    raise NotImplementedError(
        f"{name} requires grad inside of a transform of torch.func, which is not supported: "
        "use torch.no_grad()"
    )


def once(gradients: type[torch.autograd.Function], *given) -> tuple[torch.Tensor | None, ...]:
    """Call a function that computes gradients and has none itself.

    torch need not know of it unless someone may ask for a second derivative (`create_graph`). That
    saves the host as much as all of a launch.
    """
    if torch.is_grad_enabled() or _are_functorch_transforms_active():
        return gradients.apply(*given)
    return gradients.forward(None, *given)


class HostAttention(torch.autograd.Function):
    """Attention of CPU tensors, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        plan: Plan | None,
        problem: Problem,
        softmax_scale: float,
        rng_state: torch.Tensor | None,
        dropout_p: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a plan; without one there is nothing to compute.

        Args:
            rng_state, dropout_p: of `fa3.reference.dropout.Dropout`, or `NO_DROPOUT`.
            tensors: those of the spec's scores, mask and sinks, in this order.

        Returns:
            out and lse of `fa3.reference.forward.execute`.
        """
        if plan is None:
            batch, seqlen_q, heads_q, _ = q.shape
            out = q.new_empty(batch, seqlen_q, heads_q, v.shape[3])
            lse = q.new_empty(batch, heads_q, seqlen_q, dtype=torch.float32)
            hide_all_keys(out, lse, tensors[-1] if problem.spec.sinks else None)
        else:
            dropout = dropout_again(rng_state, dropout_p)
            out, lse = execute(plan, q, k, v, softmax_scale, tensors, dropout=dropout)
        ctx.options = problem, softmax_scale, dropout_p
        ctx.save_for_backward(rng_state, q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx, d_out: torch.Tensor, d_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        # Asked for once: a checkpoint computes them anew each time.
        rng_state, *saved = ctx.saved_tensors
        operands, tensors = saved[:5], saved[5:]
        of_operands, of_tensors = ctx.needs_input_grad[5:8], ctx.needs_input_grad[8:]
        wanted = Wanted(*of_operands, any(of_tensors))
        *gradients, d_sinks = once(
            HostGradients, *ctx.options, rng_state, wanted, *operands, d_out, d_lse, *tensors
        )
        # Of these tensors only sinks have a gradient. They come last.
        of_tensors = (*[None] * (len(tensors) - 1), d_sinks) if tensors else ()
        return *[None] * 5, *gradients, *of_tensors


class HostGradients(torch.autograd.Function):
    """The gradients of `HostAttention`, which have none themselves."""

    @staticmethod
    def forward(
        ctx,
        problem: Problem,
        softmax_scale: float,
        dropout_p: float,
        rng_state: torch.Tensor | None,
        wanted: Wanted,
        *arguments: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute them.

        Args:
            arguments: those of `BackwardOperands`, and those of the spec.
        """
        count = len(BackwardOperands._fields)
        operands, tensors = BackwardOperands(*arguments[:count]), arguments[count:]
        dropout = dropout_again(rng_state, dropout_p)
        return tuple(
            execute_backward(problem, operands, softmax_scale, tensors, wanted, dropout=dropout)
        )

    @staticmethod
    def backward(ctx, *_: torch.Tensor | None):
        raise no_second_derivative("flash_attn_func")


class DeviceAttention(torch.autograd.Function):
    """Attention of tensors on a GPU, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        call: object,
        deterministic: bool,
        softmax_scale: float,
        rng_state: torch.Tensor | None,
        dropout_p: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a `fa3.calls.forward.PreparedCall`.

        Args:
            deterministic: whether dQ is to have the same bits every time.
            rng_state, dropout_p: of `fa3.reference.dropout.Dropout`, or `NO_DROPOUT`.
            tensors: those of the spec's scores, mask and sinks, in this order.

        Returns:
            out and lse.
        """
        out = call.output.allocate(q)
        lse = q.new_empty(*call.lse_shape, dtype=torch.float32)
        if call.launches:
            dropout = dropout_again(rng_state, dropout_p)
            given = None if dropout is None else dropout.arguments
            call.launch(q, k, v, out, lse, tensors or None, softmax_scale, None, given)
        else:
            hide_all_keys(out, lse, tensors[-1] if call.problem.spec.sinks else None)
        ctx.options = call.problem, deterministic, softmax_scale, dropout_p
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rng_state, q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(
        ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        rng_state, *saved = ctx.saved_tensors
        if len(saved) == 5:
            found = once(DeviceGradients, *ctx.options, rng_state, False, *saved, d_out, d_lse)
            return None, None, None, None, None, *found[:3]
        wants_sinks = any(ctx.needs_input_grad[8:])
        *found, d_sinks = once(
            DeviceGradients, *ctx.options, rng_state, wants_sinks, *saved[:5], d_out, d_lse,
            *saved[5:],
        )  # fmt: skip
        # Of these tensors only sinks have a gradient. They come last.
        return *[None] * 5, *found, *[None] * (len(saved) - 6), d_sinks


attend_on_device = super(torch.autograd.Function, DeviceAttention).apply
"""`DeviceAttention.apply` without a look for transforms and what they leave behind, which calls
have refused before; it would take 2 us."""


class DeviceGradients(torch.autograd.Function):
    """The gradients of `DeviceAttention`, which have none themselves."""

    @staticmethod
    def forward(
        ctx,
        problem: Problem,
        deterministic: bool,
        softmax_scale: float,
        dropout_p: float,
        rng_state: torch.Tensor | None,
        wants_sinks: bool,
        *arguments: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute them.

        Args:
            arguments: those of `BackwardOperands`, and those of the spec.
        """
        count = len(BackwardOperands._fields)
        operands, tensors = BackwardOperands(*arguments[:count]), arguments[count:]
        dropout = dropout_again(rng_state, dropout_p)
        return gradients(
            problem, operands, softmax_scale, tensors, wants_sinks, deterministic, dropout
        )

    @staticmethod
    def backward(ctx, *_: torch.Tensor | None):
        raise no_second_derivative("flash_attn_func")


def no_derivative_of_score(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} requires grad, but score has no derivative yet: use torch.no_grad()"
    )


def no_second_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no second derivative: its gradients cannot be differentiated"
    )
