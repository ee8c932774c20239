"""Dense attention to test against, and how far a result may be from it."""

import torch

from fa3.problem import NO_BOUND, Window

NO_WINDOW = Window()

MAX_SCORES = 1 << 27
"""Scores that are in memory at once, beside a few tensors of their size: 1 GB in float64."""

FLOOR = 1e-5
"""Error that is always allowed: the PyTorch computation can be exact, as with a single key."""


def visible(seqlen_q: int, seqlen_k: int, window: Window, device="cpu") -> torch.Tensor:
    """Return which keys each query sees, (seqlen_q, seqlen_k) bool, aligned bottom-right."""
    query = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if window.left != NO_BOUND:
        seen &= key >= query - window.left
    if window.right != NO_BOUND:
        seen &= key <= query + window.right
    return seen


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    window: Window = NO_WINDOW,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as it is written down, every step in `dtype`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim).
        v: (batch, seqlen_k, heads_kv, head_dim_v).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and the log-sum-exp (batch, heads_q, seqlen_q)
        with natural logarithm, both of `dtype`; 0 and -inf for a query that sees no key.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(batch, seqlen_q, heads_q, v.shape[3], dtype=dtype)
    lse = q.new_full((batch, heads_q, seqlen_q), -torch.inf, dtype=dtype)
    if 0 in (batch, seqlen_q, heads_q, seqlen_k):
        return out, lse
    group = heads_q // heads_kv
    hidden = ~visible(seqlen_q, seqlen_k, window, q.device)
    heads_at_once = max(1, MAX_SCORES // (batch * seqlen_q * seqlen_k))
    for heads in torch.arange(heads_q, device=q.device).split(heads_at_once):
        kv_heads = heads // group
        scores = torch.einsum(
            "bqhd,bkhd->bhqk", q[:, :, heads].to(dtype) * scale, k[:, :, kv_heads].to(dtype)
        ).masked_fill_(hidden, -torch.inf)
        lse[:, heads] = scores.logsumexp(dim=-1)
        # The softmax of a row without keys is NaN.
        probabilities = scores.softmax(dim=-1).masked_fill_(hidden, 0.0)
        out[:, :, heads] = torch.einsum(
            "bhqk,bkhd->bqhd", probabilities, v[:, :, kv_heads].to(dtype)
        )
    return out, lse


def check_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    window: Window = NO_WINDOW,
    lse_tolerance: float = 1e-4,
) -> None:
    """Assert that out's error is at most twice that of the same computation in out's dtype.

    The error is the largest absolute difference from float64 attention. Finite log-sum-exps must
    be within `lse_tolerance` (and a millionth of their size), infinite ones equal.
    """
    exact, exact_lse = dense(q, k, v, softmax_scale, window)
    rounded, _ = dense(q, k, v, softmax_scale, window, dtype=q.dtype)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} outputs are NaN"
    error, allowed = largest_difference(out, exact), 2 * largest_difference(rounded, exact) + FLOOR
    assert error <= allowed, f"error {error:.3g} is above {allowed:.3g}"
    if lse is not None:
        assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=lse_tolerance)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b|, 0 for empty tensors."""
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
