"""The backward pass of a call by itself: what `fa3::backward` runs.

It takes what the call took and gave, and poses the problem again; autograd outside of graphs keeps
the problem and does not come here (`fa3.calls.autograd`).
"""

from typing import Any, NamedTuple

import torch

from fa3.calls.assertions import is_visible
from fa3.calls.autograd import NO_LENGTHS, OF_LSE, OF_OUT, arrived
from fa3.calls.backward import BackwardCall
from fa3.calls.call import (
    Call,
    check_sizes,
    check_tensors,
    check_totals,
    describe_tensors,
    without_lengths,
)
from fa3.calls.devices import sms_of
from fa3.calls.dropout import dropout_of
from fa3.calls.modifiers import functions_of, modifier_tensors
from fa3.calls.operands import (
    DIMENSIONS,
    PACKED_DIMENSIONS,
    Operand,
    check_device,
    check_dtype,
    check_like_q,
    check_shape,
    describe,
)
from fa3.calls.operators import as_call
from fa3.calls.options import DENSE, PACKED, Options, check_scale, check_softcap, check_window
from fa3.calls.values import check_lengths
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.reference.backward import BackwardOperands, Wanted
from fa3.reference.varlen import PackedLengths
from fa3.scores.masks import Mask


def check_results(
    q: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients as they lie in memory; raise unless all are of a call with this q and v.

    Args:
        q, v: checked, dense or packed.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the tensor.
    """
    dimensions = DIMENSIONS if q.ndim == len(DIMENSIONS) else PACKED_DIMENSIONS
    *batch, rows, heads, _ = q.shape
    q_operand, out_operand = Operand(*describe("q", q)), Operand(*describe("out", out))
    check_like_q("out", out_operand, q_operand, dimensions)
    check_shape("out", out_operand, (*q.shape[:-1], v.shape[-1]), "q and the values")
    lse_operand = Operand(*describe("the log-sum-exp", lse, lse.element_size()))
    check_dtype("the log-sum-exp", lse_operand, torch.float32)
    check_device("the log-sum-exp", lse_operand, "q", q_operand)
    check_shape("the log-sum-exp", lse_operand, (*batch, heads, rows), "q")
    if not lse.is_contiguous():
        raise ValueError(f"the log-sum-exp must be contiguous, got strides {lse_operand.stride}")
    d_out, d_lse = arrived(d_out, d_lse)
    for name, gradient, result in ((OF_OUT, d_out, out_operand), (OF_LSE, d_lse, lse_operand)):
        if gradient is not None:
            operand = Operand(*describe(name, gradient, 1))
            check_dtype(name, operand, result.dtype)
            check_device(name, operand, "q", q_operand)
            check_shape(name, operand, tuple(result.shape), "q and the values")
    return d_out, d_lse


class BackwardOptions(NamedTuple):
    """Options of a backward pass, as `flash_attn_func` takes them.

    Fields:
        fp32_dkv: whether dK and dV are fp32.
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND)
    softcap: float = 0.0
    sm_margin: int = 0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: Mask | None = None
    deterministic: bool = False
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    fp32_dkv: bool = False


def run_backward(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients that `fa3::backward` gives, of its arguments."""
    call = as_call(arguments)
    operands = BackwardOperands(*(call[name] for name in BackwardOperands._fields))
    options = BackwardOptions(*(call[name] for name in BackwardOptions._fields))
    if call["cu_seqlens_q"] is None:
        return gradients_of_call(operands, options)
    lengths = PackedLengths(*(call[name] for name in PackedLengths._fields))
    return gradients_of_call(operands, options, lengths, call["max_seqlen_q"], call["max_seqlen_k"])


def gradients_of_call(
    operands: BackwardOperands,
    options: BackwardOptions,
    lengths: PackedLengths | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and the sinks; of no sinks, a tensor without elements.

    Args:
        operands: what the forward pass took and gave; d_out and d_lse are None for zeros.
        lengths, max_seqlen_q, max_seqlen_k: of packed sequences.
    """
    q, k, v, out, lse, d_out, d_lse = operands
    window = check_window(options.window_size, options.causal)
    check_softcap(options.softcap)
    describe("q", q)
    functions, function_tensors = functions_of(q, None, options.mask)
    dropout = dropout_of(options.dropout_p, options.rng_state, q)
    asked = Options(window, options.softcap, has_dropout=dropout is not None, functions=functions)
    slopes, sinks = options.alibi_slopes, options.sinks
    tensors: tuple[torch.Tensor | None, ...] = (q, k, v, *[None] * 13, slopes, sinks, None)
    problem: Problem | tuple[AttentionSpec, Window]
    longest = None
    if lengths is None:
        described = describe_tensors(DENSE, tensors)
        problem = Call.of(described, DENSE).problem(asked)
    else:
        longest = max_seqlen_q, max_seqlen_k
        ends_q, ends_k, used_q, used_k = lengths
        tensors = (
            *tensors[:7],
            used_k,
            *[None] * 4,
            ends_q,
            None,
            used_q,
            ends_k,
            slopes,
            sinks,
            None,
        )
        described = describe_tensors(PACKED, tensors)
        totals = check_totals(q.shape, k.shape, v.shape, check_sizes(described))
        call = Call.of(without_lengths(described), PACKED)
        check_tensors(call)
        problem = call.packed_spec(asked)
    d_out, d_lse = check_results(q, v, out, lse, d_out, d_lse)
    if lengths is not None and is_visible(lengths.cu_seqlens_q):
        check_lengths(lengths, totals, longest)
    scale = check_scale(options.softmax_scale, q.shape[-1])
    num_sms = sms_of(q.device, options.sm_margin)
    backward = BackwardCall(problem, longest, scale, options.deterministic, num_sms)
    wanted = Wanted(sinks=sinks is not None, fp32_dkv=options.fp32_dkv)
    read = modifier_tensors(slopes, function_tensors, sinks) or ()
    operands = operands._replace(d_out=d_out, d_lse=d_lse)
    grads = backward.gradients(operands, lengths or NO_LENGTHS, read, wanted, dropout)
    d_sinks = q.new_empty(0) if sinks is None else grads.sinks
    if options.fp32_dkv:
        # Where no key is seen, they are zeros of the dtype of K and V.
        grads = grads._replace(k=grads.k.float(), v=grads.v.float())
    return grads.q, grads.k, grads.v, d_sinks
