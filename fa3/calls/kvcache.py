"""Attention to a key/value cache: `flash_attn_with_kvcache`, and packed queries on pages.

A call appends in one launch (`kernels.append`) and attends in one or more
(`fa3.calls.execution`). Lengths are read on the device only, so a captured CUDA graph goes on
decoding as they grow.
"""

import torch

from fa3.calls import operators
from fa3.calls.attention import run_call
from fa3.calls.options import CACHED, by_either_name, integer, share_heads
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.problem import NO_BOUND


@operators.registers
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: SchedulerMetadata | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a cache, in place, and attend from q to all that is then in it.

    Query i of a sequence stands at key i + length - seqlen_q, where the length counts the appended
    tokens (bottom-right alignment). Query head h uses key/value head h // (heads_q / heads_kv).

    The int32 tensors may be on q's GPU or on the CPU. Tensors on the CPU are checked before
    anything is written. Tensors on the GPU are never read by the host, so the call can be captured
    in a CUDA graph. Whatever they hold, nothing outside of the cache is read or written. Lengths
    and paddings are clamped to what the cache can hold. Tokens without a place in it, past its end
    or in a row or page that does not exist, are not appended. A position past the rotary tables
    uses their last row. A sequence whose row, pages or part of k do not exist gets an undefined
    result. Pages and keys that no sequence uses never reach the result, whatever they hold.

    With FA3_ASSERTIONS=1 in the environment when fa3 is imported, tensors on the GPU are read back
    and checked like tensors on the CPU, before any launch. Every call then waits for the GPU, and
    none can be captured: check one before the capture, and capture without the variable.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16; head_dim a multiple of 8
            up to 256. Strides as in `flash_attn_func`, here and below. With cu_seqlens_q
            (total_q, heads_q, head_dim).
        k_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), like q; with page_table
            (num_pages, page_size, heads_kv, head_dim), page_size 1 or more. Or float8_e4m3fn, with
            q in 16 bits or in float8_e4m3fn; head sizes are multiples of 16 then.
        v_cache: like k_cache with head_dim_v, which may differ from head_dim.
        k: (batch, seqlen_new, heads_kv, head_dim), bfloat16 or float16 like q: tokens that each
            sequence gets; with cu_seqlens_k_new (total_new, heads_kv, head_dim). None if q is FP8.
        v: like k with head_dim_v.
        rotary_cos: (positions, rotary_dim / 2), q's dtype or float32: turns the first rotary_dim
            columns, a multiple of 16, of k and q. Key i that is appended is at position
            cache_seqlens + i; so is query i if causal or window_size is given, and otherwise all
            queries are at position cache_seqlens. Needs k.
        rotary_sin: like rotary_cos.
        rotary_seqlens: (batch,) int32: positions at which the rotary embedding begins in each
            sequence, instead of cache_seqlens.
        cache_seqlens: int or (batch,) int32: tokens of each sequence, without k; all that the
            cache can hold if not given. Must be given with k.
        cache_batch_idx: (batch,) int32: the row of the cache, or of page_table, that is a
            sequence's. Distinct if k is given, or which of the tokens remains is undefined.
        cache_leftpad: (batch,) int32: keys before this one are hidden. Positions stay as they
            are.
        page_table: (batch, max_pages) int32: the pages of each sequence, in order. Entries
            after its last token are not used, nor those after 2^31 - 2^20 tokens. Pages that
            a window hides from all queries are not read, but must exist where the table is checked.
        cu_seqlens_q: (batch + 1,) int32: where the queries of each sequence begin and end in q,
            if sequences have different numbers of them; the last may be below total_q. Rows of no
            sequence are not written. On a GPU, rows of a sequence with more than max_seqlen_q may
            be left out or wrong.
        max_seqlen_q: the most queries of a sequence; must be given with cu_seqlens_q.
        cu_seqlens_k_new: (batch + 1,) int32: where the tokens of each sequence begin and end in k
            and v. Ignored without them.
        softmax_scale, causal, window_size, softcap, sinks, sm_margin: as in `flash_attn_func`.
        rotary_interleaved: whether columns 2i and 2i + 1 turn together; otherwise i and
            i + rotary_dim / 2 do (GPT-NeoX).
        scheduler_metadata: how to run, from `get_scheduler_metadata`.
        num_splits: parts into which the keys of a sequence are cut; by default as suits the GPU.
            The result does not depend on it but for rounding. From 1 on, batch_invariant changes
            nothing: how a sequence is cut then depends on its own length only.
        pack_gqa: the query heads of a key/value head always share its reads: None or True; anything
            if each has a single query head.
        return_softmax_lse: FlashAttention-3's name for return_lse.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + length - seqlen_q - j| to the score of query i and key j.
        batch_invariant: make the result of a sequence, to the last bit, independent of the other
            sequences, its place among them and their number. May be slower, and takes memory for
            32 parts of a sequence and for more where the cache has room for more than 512 keys in
            each (2048 keys in each part from 17 query rows of a key/value head on).
        return_lse: also return the log-sum-exp.
        out: (batch, seqlen_q, heads_q, head_dim_v) tensor that receives the output: bfloat16 if q
            is FP8, otherwise like q. It, and caches that are appended to, must not share memory
            with another tensor of the call; they may lie between each other's elements, as the
            halves of one buffer do.
        block_table, s_aux: vLLM's names for page_table and sinks; FlashAttention-2 has the first.
        attention_chunk: 0 or None, which are the same: no chunks.
        q_descale, k_descale, v_descale: (batch, heads_kv) float32: what q, k_cache and v_cache are
            multiplied by where they are float8_e4m3fn, positive; 1 by default. New tokens are
            divided by them, limited to 448, the largest such number, and rounded. May be expanded
            from fewer elements.
        qv: in the signature for compatibility; anything but None is not supported.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), of q's dtype, or bfloat16 for q in
        float8_e4m3fn; with return_lse also the log-sum-exp of the scores,
        (batch, heads_q, seqlen_q), float32, natural logarithm. A query that sees no key gives 0 and
        -inf, or 0 and its head's sink. With cu_seqlens_q (total_q, heads_q, head_dim_v) and
        (heads_q, total_q).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device; on the CPU, or with
            FA3_ASSERTIONS=1, also a length, index or page that does not fit the cache. Nothing
            has been appended then.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        NotImplementedError: the combination is not supported, a tensor does not lie in memory, or a
            transform of torch.func or torch.jit.trace is active.

    Source: Dao et al., Flash-Decoding; Kwon et al., PagedAttention (arXiv 2309.06180).
    """
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    if max_seqlen_q is not None:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
    if k is None and v is None:
        cu_seqlens_k_new = None
    elif cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k: where it is appended")
    length = None
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        length, cache_seqlens = cache_seqlens, None
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q, rotary_seqlens, None, None,
        q_descale, k_descale, v_descale, alibi_slopes, sinks, out,
    )  # fmt: skip
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, return_softmax_lse,
        rotary_interleaved, batch_invariant, qv, pack_gqa,
        pack_gqa is None or share_heads(q, k_cache),
    )  # fmt: skip
    arguments = (
        softmax_scale, window_size, None, None, None, max_seqlen_q, None, scheduler_metadata,
        length, None, None,
    )  # fmt: skip
    return run_call(CACHED, tensors, options, arguments)
