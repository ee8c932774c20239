"""Gradients of `flash_attn_varlen_func`: what torch's autograd calls and keeps.

Kept until the backward pass are the tensors of the call, its output, its log-sum-exp and the seed
of its dropout. `fa3.calls.varlen_call` computes both passes.
"""

import torch

from fa3.calls.autograd import dropout_again, no_second_derivative, once
from fa3.calls.known_lengths import KnownLengths
from fa3.calls.varlen_call import RaggedCall, ragged_gradients
from fa3.problem import AttentionSpec, Window
from fa3.reference.backward import BackwardOperands, Wanted
from fa3.reference.varlen import PackedLengths, RaggedOperands


class PackedAttention(torch.autograd.Function):
    """Attention of packed sequences, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx,
        call: RaggedCall,
        lengths: PackedLengths,
        longest: tuple[int, int],
        known: KnownLengths | None,
        deterministic: bool,
        softmax_scale: float,
        rng_state: torch.Tensor | None,
        dropout_p: float,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a call.

        Args:
            longest: max_seqlen_q and max_seqlen_k.
            known: the lengths, if the host knows them.
            deterministic: whether dQ is to have the same bits every time.
            rng_state, dropout_p: of `fa3.reference.dropout.Dropout`, or `NO_DROPOUT`.
            tensors: those of the spec's scores, mask and sinks, in this order.

        Returns:
            out and lse.
        """
        total_q, heads, _ = q.shape
        out = q.new_empty(total_q, heads, v.shape[2])
        lse = q.new_empty(heads, total_q, dtype=torch.float32)
        operands = RaggedOperands(q, k, v, out, lse, *lengths)
        sizes, dropout = operands.sizes(*longest), dropout_again(rng_state, dropout_p)
        call.attend(operands, sizes, tensors or None, softmax_scale, dropout, True, known)
        ctx.options = call.spec, call.window, longest, deterministic, softmax_scale, dropout_p
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rng_state, *lengths, q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(
        ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        # Asked for once: a checkpoint computes them anew each time.
        (rng_state, *saved), needed = ctx.saved_tensors, ctx.needs_input_grad[8:]
        count = len(PackedLengths._fields)
        lengths, operands, tensors = saved[:count], saved[count : count + 5], saved[count + 5 :]
        wanted = Wanted(*needed[:3], any(needed[3:]))
        *found, d_sinks = once(
            PackedGradients, *ctx.options, rng_state, wanted, *lengths, *operands, d_out, d_lse,
            *tensors,
        )  # fmt: skip
        # Of these tensors only sinks have a gradient. They come last.
        of_tensors = (*[None] * (len(tensors) - 1), d_sinks) if tensors else ()
        return *[None] * 8, *found, *of_tensors


attend_packed = super(torch.autograd.Function, PackedAttention).apply
"""As `fa3.calls.autograd.attend_on_device`."""


class PackedGradients(torch.autograd.Function):
    """The gradients of `PackedAttention`, which have none themselves."""

    @staticmethod
    def forward(
        ctx,
        spec: AttentionSpec,
        window: Window,
        longest: tuple[int, int],
        deterministic: bool,
        softmax_scale: float,
        dropout_p: float,
        rng_state: torch.Tensor | None,
        wanted: Wanted,
        *arguments: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute them.

        Args:
            arguments: those of `PackedLengths`, those of `BackwardOperands`, and those of the spec.
        """
        first = len(PackedLengths._fields)
        last = first + len(BackwardOperands._fields)
        lengths = PackedLengths(*arguments[:first])
        operands = BackwardOperands(*arguments[first:last])
        return ragged_gradients(
            spec, window, operands, lengths, longest, arguments[last:], softmax_scale, wanted,
            deterministic, dropout_again(rng_state, dropout_p),
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *_: torch.Tensor | None):
        raise no_second_derivative("flash_attn_varlen_func")
