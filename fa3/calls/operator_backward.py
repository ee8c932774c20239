"""The backward pass of a call by itself: what `fa3::backward` and `fa3::varlen_backward` run.

It takes what the call took and gave, and poses the problem again; autograd outside of graphs keeps
the problem and does not come here (`fa3.calls.autograd`, `fa3.calls.varlen_autograd`).
"""

import torch

from fa3.calls import backward
from fa3.calls.assertions import is_visible
from fa3.calls.autograd import OF_LSE, OF_OUT, arrived, no_derivative_of_score
from fa3.calls.dense import pose
from fa3.calls.devices import sms_of
from fa3.calls.dropout import dropout_of
from fa3.calls.modifiers import Modifiers
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
from fa3.calls.options import check_scale, check_window
from fa3.calls.ragged import (
    Tokens,
    check_integers,
    check_lengths,
    check_totals,
    describe_integers,
    pose_packed,
    tokens_of,
)
from fa3.calls.varlen_call import ragged_gradients
from fa3.reference.backward import BackwardOperands, Wanted, execute_backward
from fa3.reference.varlen import PackedLengths
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


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
    of_q, of_out = Operand(*describe("q", q)), Operand(*describe("out", out))
    check_like_q("out", of_out, of_q, dimensions)
    check_shape("out", of_out, (*q.shape[:-1], v.shape[-1]), "q and the values")
    of_lse = Operand(*describe("the log-sum-exp", lse, lse.element_size()))
    check_dtype("the log-sum-exp", of_lse, torch.float32)
    check_device("the log-sum-exp", of_lse, "q", of_q)
    check_shape("the log-sum-exp", of_lse, (*batch, heads, rows), "q")
    if not lse.is_contiguous():
        raise ValueError(f"the log-sum-exp must be contiguous, got strides {of_lse.stride}")
    d_out, d_lse = arrived(d_out, d_lse)
    for name, gradient, result in ((OF_OUT, d_out, of_out), (OF_LSE, d_lse, of_lse)):
        if gradient is not None:
            operand = Operand(*describe(name, gradient, 1))
            check_dtype(name, operand, result.dtype)
            check_device(name, operand, "q", of_q)
            check_shape(name, operand, tuple(result.shape), "q and the values")
    return d_out, d_lse


def gradients_of_call(
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: Mask | None,
    deterministic: bool,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    score: Score | None = None,
    sm_margin: int = 0,
    **of_forward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and the sinks; of no sinks, a tensor without elements.

    Args:
        d_out, d_lse: gradients of out and lse; None for zeros, but not both.
        out, lse: what `flash_attn_func` gave of the other arguments.
        score: None, since it has no derivative.
        of_forward: how that was run.

    Raises:
        NotImplementedError: there is a score.
    """
    if score is not None:
        raise no_derivative_of_score("out")
    described = (Operand(*describe(name, x)) for name, x in (("q", q), ("k", k), ("v", v)))
    is_causal = check_window(window_size, causal).right == 0
    modifiers = Modifiers.of(
        q, q.shape[0], softcap, alibi_slopes, sinks, None, mask, is_causal, has_backward=True
    )
    dropout = dropout_of(dropout_p, rng_state, q)
    structure = modifiers.structure._replace(has_dropout=dropout is not None)
    problem = pose(*described, causal, window_size, structure)
    d_out, d_lse = check_results(q, v, out, lse, d_out, d_lse)
    scale, tensors = check_scale(softmax_scale, q.shape[3]), modifiers.tensors or ()
    if q.is_cuda:
        operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
        found = backward.gradients(
            problem, operands, scale, tensors, sinks is not None, deterministic, dropout,
            sms_of(q.device, sm_margin),
        )  # fmt: skip
    else:
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
        operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
        found = execute_backward(
            problem.spec, problem.window, operands, scale, tensors, dropout=dropout
        )
    return found.q, found.k, found.v, q.new_empty(0) if sinks is None else found.sinks


def gradients_of_packed_call(
    d_out: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mask: Mask | None,
    deterministic: bool,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    score: Score | None = None,
    sm_margin: int = 0,
    **of_forward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for packed sequences.

    Args:
        d_out, d_lse: gradients of out and lse; None for zeros.
        out, lse: what `flash_attn_varlen_func` gave of the other arguments.
        score: None, since it has no derivative.
        of_forward: how that was run.

    Raises:
        NotImplementedError: there is a score.
    """
    if score is not None:
        raise no_derivative_of_score("out")
    described = tuple(describe(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    lengths = PackedLengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    tokens = [Tokens(*tokens_of(name, x)) for name, x in zip("qkv", described, strict=True)]
    batch = check_integers(describe_integers(lengths), described[0])
    totals = check_totals(q.shape, k.shape, v.shape, batch)
    is_causal = check_window(window_size, causal).right == 0
    modifiers = Modifiers.of(
        q, batch, softcap, alibi_slopes, sinks, None, mask, is_causal, has_backward=True
    )
    dropout = dropout_of(dropout_p, rng_state, q)
    structure = modifiers.structure._replace(has_dropout=dropout is not None)
    posed = pose_packed(*tokens, causal, window_size, structure)
    d_out, d_lse = check_results(q, v, out, lse, d_out, d_lse)
    longest = max_seqlen_q, max_seqlen_k
    if is_visible(cu_seqlens_q):
        check_lengths(lengths, totals, longest)
    operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
    found = ragged_gradients(
        *posed, operands, lengths, longest, modifiers.tensors or (),
        check_scale(softmax_scale, q.shape[2]), Wanted(sinks=sinks is not None), deterministic,
        dropout, sms_of(q.device, sm_margin),
    )  # fmt: skip
    return found.q, found.k, found.v, q.new_empty(0) if sinks is None else found.sinks
