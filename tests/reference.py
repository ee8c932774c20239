"""Dense attention to test against, and how far a result may be from it."""

import torch

import fa3
from fa3.problem import NO_BOUND, Window

NO_WINDOW = Window()

MAX_SCORES = 1 << 27
"""Scores that are in memory at once, beside a few tensors of their size: 1 GB in float64."""

FEW_KEYS = 4
"""Sequences with fewer keys have errors that torch's computation may not have."""

FLOOR = 1e-5
"""Error that is always allowed: the PyTorch computation can be exact, as with a single key."""

TANH_ERROR = 2.0**-11
"""Largest relative error of the `tanh.approx.f32` instruction, by which the kernels cap scores."""


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
    *,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score: fa3.Score | None = None,
    mask: fa3.Mask | None = None,
    **dropout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as it is written down, products in `dtype`; torch can differentiate it.

    What changes the scores between the products, and the softmax after it, is computed in float32
    at least.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim).
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        softcap, alibi_slopes, sinks, score, mask: as for `fa3.flash_attn_func`; of score and mask
            the `reference` is called.
        dropout: arguments of `weights_of`.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) of `dtype` and the log-sum-exp (batch, heads_q,
        seqlen_q) with natural logarithm; 0 and -inf for a query that sees no key, or 0 and its
        head's sink.
    """
    (batch, seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group = max(1, heads_q // max(1, heads_kv))
    is_modified = bool(softcap) or any(x is not None for x in (alibi_slopes, sinks, score))
    seen = visible(seqlen_q, seqlen_k, window, q.device)
    weights = None
    if dropout:
        weights = weights_of(batch, heads_q, seqlen_q, seqlen_k, **dropout)
    outs, lses = [], []
    heads_at_once = max(1, MAX_SCORES // max(1, batch * seqlen_q * seqlen_k))
    for heads in torch.arange(heads_q, device=q.device).split(heads_at_once):
        keys, values = (x[:, :, heads // group].to(dtype) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, :, heads].to(dtype) * scale, keys)
        at = positions(batch, heads, seqlen_q, seqlen_k)
        if is_modified:
            scores = scores.to(torch.promote_types(dtype, torch.float32))
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if alibi_slopes is not None:
            slopes = alibi_slopes.expand(batch, heads_q)[:, heads, None, None]
            distance = (at.query + seqlen_k - seqlen_q - at.key).abs()
            scores = scores - slopes.to(scores.dtype) * distance
        if score is not None:
            scores = score.reference(scores, at)
        is_seen = seen if mask is None else seen & mask.reference(at)
        logits = scores.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            sink = sinks[heads, None, None].to(scores.dtype).expand(batch, -1, seqlen_q, 1)
            logits = torch.cat([logits, sink], dim=3)
        # Rows without a logit are computed from zeros, and replaced.
        is_empty = (logits == -torch.inf).all(dim=3, keepdim=True)
        logits = logits.masked_fill(is_empty, 0.0)
        lses.append(logits.logsumexp(dim=3).masked_fill(is_empty[..., 0], -torch.inf))
        p = logits.softmax(dim=3)[..., :seqlen_k].masked_fill(is_empty, 0.0)
        if weights is not None:
            p = p * weights[:, heads]
        outs.append(torch.einsum("bhqk,bkhd->bqhd", p.to(dtype), values))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


def weights_of(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    rng_state: torch.Tensor,
    first_batch: int = 0,
) -> torch.Tensor:
    """Return what dropout multiplies probabilities by, (batch, heads, seqlen_q, seqlen_k).

    Args:
        first_batch: the number of the first sequence.
    """
    sizes = heads, seqlen_q, seqlen_k
    mask = fa3.dropout_mask(rng_state, dropout_p, first_batch + batch, *sizes)[first_batch:]
    return mask / (1.0 - round(dropout_p * 2**16) / 2**16)


def positions(batch: int, heads: torch.Tensor, seqlen_q: int, seqlen_k: int) -> fa3.Position:
    """Return the positions of scores (batch, heads, queries, keys): fields that broadcast."""
    device = heads.device
    return fa3.Position(
        torch.arange(batch, device=device)[:, None, None, None],
        heads[:, None, None],
        torch.arange(seqlen_q, device=device)[:, None],
        torch.arange(seqlen_k, device=device),
        seqlen_q,
        seqlen_k,
    )


def cap_error(q: torch.Tensor, k: torch.Tensor, softmax_scale: float, softcap: float) -> float:
    """Return by how much `tanh.approx` may shift a score: `TANH_ERROR` of the largest."""
    if not softcap or 0 in (q.numel(), k.numel()):
        return 0.0
    longest_q, longest_k = (t.double().norm(dim=-1).amax().item() for t in (q, k))
    return TANH_ERROR * min(softcap, softmax_scale * longest_q * longest_k)


def check_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    window: Window = NO_WINDOW,
    lse_tolerance: float = 1e-4,
    weight_error: float = 0.0,
    **modifiers,
) -> None:
    """Assert that out's error is at most twice that of the same computation in out's dtype.

    The error is the largest absolute difference from float64 attention. Finite log-sum-exps must
    be within `lse_tolerance` (and a millionth of their size), infinite ones equal. Weights may be
    off by a share of `weight_error` besides. With a softcap
    they may also differ by `cap_error`, and outputs by that share of the largest value, since the
    error of a score is the relative error of its weight. `modifiers` are those of `dense`.
    """
    exact, exact_lse = dense(q, k, v, softmax_scale, window, **modifiers)
    rounded, _ = dense(q, k, v, softmax_scale, window, dtype=q.dtype, **modifiers)
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} outputs are NaN"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tanh_error = cap_error(q, k, scale, modifiers.get("softcap", 0.0))
    error, allowed = largest_difference(out, exact), 2 * largest_difference(rounded, exact) + FLOOR
    if tanh_error + weight_error and v.numel():
        allowed += (tanh_error + weight_error) * v[v.isfinite()].abs().max().item()
    assert error <= allowed, f"error {error:.3g} is above {allowed:.3g}"
    if lse is not None:
        assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
        lse_tolerance = lse_tolerance + tanh_error
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=lse_tolerance)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b|, 0 for empty tensors."""
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
