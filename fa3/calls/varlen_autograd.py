"""Gradients of `flash_attn_varlen_func`: what torch's autograd calls and keeps.

Kept until the backward pass are the tensors of the call, its output, its log-sum-exp and the seed
of its dropout. `fa3.calls.varlen_call` computes both passes.
"""

import torch

from fa3.calls.autograd import NUM_OPERANDS, arrived, keep_for_backward, kept, of_tensors, once
from fa3.calls.varlen_call import ragged_gradients
from fa3.reference.backward import BackwardOperands, Gradients, Wanted
from fa3.reference.varlen import PackedLengths, RaggedOperands


class PackedAttention(torch.autograd.Function):
    """Attention of packed sequences, differentiable once by q, k, v and the sinks."""

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
            given: the `fa3.calls.varlen_call.RaggedCall`; the tensors of `PackedLengths`;
                max_seqlen_q and max_seqlen_k; the `KnownLengths`, if the host knows them; whether
                dQ is to have the same bits every time; the softmax scale; the `Dropout`, None
                without; whether the log-sum-exp is wanted. In one tuple, since torch looks at each
                argument.
            tensors: of the spec's scores, mask and sinks, in this order.

        Returns:
            out, and the log-sum-exp if it is wanted: each costs torch 1 us.
        """
        call, lengths, longest, known, _, softmax_scale, dropout, wants_lse = given
        total_q, heads, _ = q.shape
        out = q.new_empty(total_q, heads, v.shape[2])
        lse = q.new_empty(heads, total_q, dtype=torch.float32)
        operands = RaggedOperands(q, k, v, out, lse, *lengths)
        sizes = operands.sizes(*longest)
        call.attend(operands, sizes, tensors or None, softmax_scale, dropout, True, known)
        ctx.set_materialize_grads(False)
        keep_for_backward(ctx, given, dropout, *lengths, q, k, v, out, lse, *tensors)
        return (out, lse) if wants_lse else out

    @staticmethod
    def backward(
        ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what `forward` took, in its order."""
        call, _, longest, _, deterministic, softmax_scale, dropout, _ = ctx.given
        saved, dropout = kept(ctx, dropout)
        ends_q, ends_k, used_q, used_k, q, k, v, out, lse, *tensors = saved
        lengths = PackedLengths(ends_q, ends_k, used_q, used_k)
        wanted = Wanted(*ctx.needs_input_grad[1:4], any(ctx.needs_input_grad[4:]))

        def compute(*read: torch.Tensor | None) -> Gradients:
            operands, tensors = BackwardOperands(*read[:NUM_OPERANDS]), read[NUM_OPERANDS:]
            return ragged_gradients(
                call.spec, call.window, operands, lengths, longest, tensors, softmax_scale, wanted,
                deterministic, dropout, call.plan.gpu.num_sms,
            )  # fmt: skip

        read = q, k, v, out, lse, *arrived(d_out, d_lse), *tensors
        *found, d_sinks = once("flash_attn_varlen_func", compute, *read)
        return None, *found, *of_tensors(tensors, d_sinks)


attend_packed = super(torch.autograd.Function, PackedAttention).apply
"""As `fa3.calls.autograd.attend_on_device`."""
