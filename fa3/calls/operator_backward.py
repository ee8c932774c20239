"""The backward pass of a dense call by itself: what the operator `fa3::backward` runs.

It takes what the call took and gave, and poses the problem again; autograd outside of graphs keeps
the problem and does not come here (`fa3.calls.autograd`).
"""

import torch

from fa3.calls import backward
from fa3.calls.dense import pose
from fa3.calls.modifiers import Modifiers
from fa3.calls.operands import Operand, describe
from fa3.calls.options import check_scale, check_window
from fa3.reference.backward import BackwardOperands, execute_backward
from fa3.scores.masks import Mask


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
    **of_forward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and the sinks; of no sinks, a tensor without elements.

    Args:
        d_out, d_lse: gradients of out and lse; None for zeros, but not both.
        out, lse: what `flash_attn_func` gave of the other arguments.
        of_forward: how that was run.
    """
    described = (Operand(*describe(name, x)) for name, x in (("q", q), ("k", k), ("v", v)))
    is_causal = check_window(window_size, causal).right == 0
    modifiers = Modifiers.of(
        q, q.shape[0], softcap, alibi_slopes, sinks, None, mask, is_causal, has_backward=True
    )
    problem = pose(*described, causal, window_size, modifiers.structure)
    scale, tensors = check_scale(softmax_scale, q.shape[3]), modifiers.tensors or ()
    if q.is_cuda:
        operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
        found = backward.gradients(problem, operands, scale, tensors, sinks is not None)
    else:
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
        operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
        found = execute_backward(problem, operands, scale, tensors)
    return found.q, found.k, found.v, q.new_empty(0) if sinks is None else found.sinks
