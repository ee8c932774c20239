"""Attention as it is written down to test against, and how far a result may be from it."""

from typing import NamedTuple

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
    assert out.dtype == q.dtype
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tanh_error = cap_error(q, k, scale, modifiers.get("softcap", 0.0))
    more = 0.0
    if tanh_error + weight_error and v.numel():
        more = (tanh_error + weight_error) * v[v.isfinite()].abs().max().item()
    check_out(out, exact, rounded, more)
    if lse is not None:
        assert lse.shape == exact_lse.shape and lse.dtype == torch.float32
        lse_tolerance = lse_tolerance + tanh_error
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=lse_tolerance)


def check_out(
    out: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor, more: float = 0.0
) -> None:
    """Assert that an error is at most twice that of a computation in 16 bits, and a bit more."""
    assert out.shape == exact.shape
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} outputs are NaN"
    error = largest_difference(out, exact)
    allowed = 2 * largest_difference(rounded, exact) + FLOOR + more
    assert error <= allowed, f"error {error:.3g} is above {allowed:.3g}"


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b|, 0 for empty tensors."""
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


# ------------------------------------------------------------------------------------------- caches


class Expected(NamedTuple):
    """What a call returns, and what it leaves in the cache."""

    out: torch.Tensor
    lse: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def expected(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Expected:
    """Compute a call of `fa3.flash_attn_with_kvcache`; products of attention in `dtype`.

    The given caches stay as they are. What the host cannot check is treated as the function
    promises: lengths cut to the cache, tokens beyond its end dropped.
    """
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    batch, seqlen_q, heads_q, _ = q.shape
    page_size = k_cache.shape[1]
    capacity = page_size * (1 if page_table is None else page_table.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens)
    before = cache_seqlens.clamp(0, capacity).tolist()
    rows = range(batch) if cache_batch_idx is None else cache_batch_idx.tolist()
    leftpads = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    slopes = [None] * batch
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(batch, heads_q).split(1)
    turns_queries = causal or tuple(window_size) != (NO_BOUND, NO_BOUND)

    out = q.new_zeros(batch, seqlen_q, heads_q, v_cache.shape[3], dtype=dtype)
    lse = q.new_full((batch, heads_q, seqlen_q), -torch.inf, dtype=dtype)
    for b, row in enumerate(rows):

        def places(positions, row=row):
            if page_table is None:
                return torch.full_like(positions, row), positions
            return page_table[row, positions // page_size].long(), positions % page_size

        length, queries = before[b], q[b]
        if k is not None:
            new = slice(None) if cu_seqlens_k_new is None else slice(*cu_seqlens_k_new[b : b + 2])
            new_k, new_v = (
                (tokens[b] if cu_seqlens_k_new is None else tokens[new]) for tokens in (k, v)
            )
            kept = min(len(new_k), capacity - length)
            positions = torch.arange(length, length + kept, device=q.device)
            new_k, new_v = new_k[:kept], new_v[:kept]
            if rotary_cos is not None:
                new_k = rotate(new_k, positions, rotary_cos, rotary_sin, rotary_interleaved)
                of_queries = length + torch.arange(seqlen_q, device=q.device) * turns_queries
                queries = rotate(q[b], of_queries, rotary_cos, rotary_sin, rotary_interleaved)
            k_cache[places(positions)] = new_k
            v_cache[places(positions)] = new_v
            length += kept
        visible = torch.arange(min(leftpads[b], length), length, device=q.device)
        (out[b],), (lse[b],) = dense(
            queries[None], k_cache[places(visible)][None], v_cache[places(visible)][None],
            softmax_scale, Window(window_size[0], 0 if causal else window_size[1]), dtype,
            softcap=softcap, alibi_slopes=slopes[b], sinks=sinks,
        )  # fmt: skip
    return Expected(out, lse, k_cache, v_cache)


def rotate(x, positions, cos, sin, interleaved):
    """Turn the first columns of x (tokens, heads, head_dim) to its positions, in float32.

    The products of 16-bit numbers are exact in float32, so with tables of that kind there is one
    rounding to float32 and one to x's dtype, in whichever way it is computed.
    """
    half = cos.shape[1]
    cos, sin = (table[positions].float()[:, None] for table in (cos, sin))
    turned = x.clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].float(), x[..., second].float()
    turned[..., first] = (a * cos - b * sin).to(x.dtype)
    turned[..., second] = (a * sin + b * cos).to(x.dtype)
    return turned


def check_call(arguments: dict, out: torch.Tensor, lse: torch.Tensor, caches: tuple) -> None:
    """Assert that a call gave what it should, and left in the cache what it should.

    Args:
        arguments: of `expected`; its caches are those before the call.
        out, lse: what the call returned.
        caches: k_cache and v_cache after the call.

    The error of out, the largest absolute difference from float64, is at most twice that of the
    same computation in out's dtype, and what `tanh.approx` adds. The cache is right to the last
    bit, but for keys turned by float32 tables, whose products are rounded and may be contracted.
    """
    exact = expected(**arguments)
    rounded = expected(**arguments, dtype=out.dtype)
    assert out.dtype == arguments["q"].dtype
    q, softcap, more = arguments["q"], arguments.get("softcap", 0.0), 0.0
    if softcap and out.is_cuda:
        scale = arguments.get("softmax_scale") or q.shape[-1] ** -0.5
        capped = cap_error(q, exact.k_cache.nan_to_num(), scale, softcap)
        more = capped * exact.v_cache.nan_to_num().abs().max().item()
    check_out(out, exact.out, rounded.out, more)
    assert lse.shape == exact.lse.shape and lse.dtype == torch.float32
    # tanh.approx is exact to 2^-11.
    tolerance = 1e-4 + 2.0**-10 * softcap
    if arguments.get("rotary_cos") is not None:
        # A turned query or key may be rounded to the other side.
        tolerance += 1e-3
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=tolerance)
    check_caches(arguments, exact, caches)


def check_caches(arguments: dict, exact: Expected, caches: tuple) -> None:
    """Assert that the caches are what they should be after a call."""
    cos = arguments.get("rotary_cos")
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        should_be = getattr(exact, name)
        if name == "k_cache" and cos is not None and cos.dtype == torch.float32:
            changed = as_bits(should_be) != as_bits(arguments[name])
            assert torch.equal(as_bits(cache)[~changed], as_bits(should_be)[~changed])
            torch.testing.assert_close(cache, should_be, rtol=2**-7, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(as_bits(cache), as_bits(should_be)), f"{name} is not as expected"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View 16-bit floats as integers: NaN equals itself, and 0 is not -0."""
    return tensor.view(torch.int16)
