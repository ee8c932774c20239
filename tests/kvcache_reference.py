"""`flash_attn_with_kvcache` as it is written down, sequence by sequence, to test against."""

from typing import NamedTuple

import torch
from reference import FLOOR, cap_error, dense, largest_difference

from fa3.problem import NO_BOUND, Window


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
    assert out.shape == exact.out.shape and out.dtype == arguments["q"].dtype
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} outputs are NaN"
    error = largest_difference(out, exact.out)
    allowed = 2 * largest_difference(rounded.out, exact.out) + FLOOR
    q, softcap = arguments["q"], arguments.get("softcap", 0.0)
    if softcap and out.is_cuda:
        scale = arguments.get("softmax_scale") or q.shape[-1] ** -0.5
        capped = cap_error(q, exact.k_cache.nan_to_num(), scale, softcap)
        allowed += capped * exact.v_cache.nan_to_num().abs().max().item()
    assert error <= allowed, f"error {error:.3g} is above {allowed:.3g}"
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
