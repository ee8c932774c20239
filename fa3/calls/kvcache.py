"""Attention to a key/value cache: the options of a call, and what its tensors lead to.

What follows from a call's shapes, strides, types and options is worked out once and remembered
(`fa3.calls.prepared_cache`). The latest calls are found again without describing their tensors
(`fa3.calls.latest`).
"""

import functools

import torch

from fa3.calls import assertions, operators
from fa3.calls.cache_call import (
    CACHE_ALIGNMENTS,
    LENGTHS,
    OF_TOTAL,
    CacheTensors,
    describe_tensors,
    without_total,
)
from fa3.calls.eager import is_traced
from fa3.calls.latest import FastPath
from fa3.calls.options import (
    Options,
    as_pair,
    by_either_name,
    check_scale,
    check_window,
    integer,
    reject_unsupported,
    share_heads,
)
from fa3.calls.prepared_cache import (
    PreparedCacheCall,
    check_total,
    check_written,
    prepare_cache_call,
    with_integers_on_device,
)
from fa3.calls.scheduler_metadata import (
    IN_METADATA,
    PackedMetadata,
    SchedulerMetadata,
    check_cache_metadata,
)
from fa3.calls.traced import trace_attention
from fa3.problem import NO_BOUND, REMEMBERED, Window

CACHE_OPTIONS = Options(
    "causal", "rotary_interleaved", "batch_invariant", "return_lse", "return_softmax_lse",
    "attention_chunk", "num_splits", "sm_margin", "softcap",
)  # fmt: skip


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
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: SchedulerMetadata | PackedMetadata | None = None,
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
            (num_pages, page_size, heads_kv, head_dim), page_size 1 or more.
        v_cache: like k_cache with head_dim_v, which may differ from head_dim.
        k: (batch, seqlen_new, heads_kv, head_dim), like q: tokens that each sequence gets; with
            cu_seqlens_k_new (total_new, heads_kv, head_dim).
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
        softmax_scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        causal: hide the keys after a query's own position.
        window_size: keys that a query sees before and after its own position, as (left, right);
            -1 for all. causal sets right to 0, whatever it is.
        softcap: bound of the scores: cap * tanh(score / cap); 0 for none.
        rotary_interleaved: whether columns 2i and 2i + 1 turn together; otherwise i and
            i + rotary_dim / 2 do (GPT-NeoX).
        scheduler_metadata: how to run, from `get_scheduler_metadata`; with cu_seqlens_q made for
            the lengths of this call.
        num_splits: parts into which the keys of a sequence are cut; by default as suits the GPU.
            The result does not depend on it but for rounding. From 1 on, batch_invariant changes
            nothing: how a sequence is cut then depends on its own length only.
        pack_gqa: the query heads of a key/value head always share its reads: None or True; anything
            if each has a single query head.
        sm_margin: SMs to leave to other kernels.
        return_softmax_lse: FlashAttention-3's name for return_lse.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + length - seqlen_q - j| to the score of query i and key j.
        sinks: (heads_q,), float32 or q's dtype: a logit that joins the denominator of its head's
            softmax, and so the log-sum-exp.
        batch_invariant: make the result of a sequence, to the last bit, independent of the other
            sequences, its place among them and their number. May be slower, and takes memory for
            32 parts of a sequence and for more where the cache has room for more than 512 keys in
            each (2048 keys in each part from 17 query rows of a key/value head on).
        return_lse: also return the log-sum-exp.
        out: (batch, seqlen_q, heads_q, head_dim_v) tensor that receives the output, like q. It, and
            caches that are appended to, must not share memory with another tensor of the call;
            they may lie between each other's elements, as the halves of one buffer do.
        block_table, s_aux: vLLM's names for page_table and sinks; FlashAttention-2 has the first.
        attention_chunk: 0 or None, which are the same: no chunks.
        qv, q_descale, k_descale, v_descale: in the signature for compatibility; anything but None
            is not supported.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), of q's dtype; with return_lse also the
        log-sum-exp of the scores, (batch, heads_q, seqlen_q), float32, natural logarithm. A query
        that sees no key gives 0 and -inf, or 0 and its head's sink. With cu_seqlens_q
        (total_q, heads_q, head_dim_v) and (heads_q, total_q).

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
    if (
        type(causal), type(rotary_interleaved), type(batch_invariant), type(return_lse),
        type(return_softmax_lse), type(attention_chunk), type(num_splits), type(sm_margin),
        type(softcap),
    ) != CACHE_OPTIONS.types:  # fmt: skip
        (
            causal, rotary_interleaved, batch_invariant, return_lse, return_softmax_lse,
            attention_chunk, num_splits, sm_margin, softcap,
        ) = CACHE_OPTIONS.converted(
            causal, rotary_interleaved, batch_invariant, return_lse, return_softmax_lse,
            attention_chunk, num_splits, sm_margin, softcap,
        )  # fmt: skip
    if (
        not (qv is pack_gqa is None)
        or not (q_descale is k_descale is v_descale is None)
        or attention_chunk
    ):
        reject_unsupported(
            attention_chunk, pack_gqa, has_packing=True, shares_heads=share_heads(q, k_cache),
            qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    return_lse = return_lse or return_softmax_lse
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    is_packed = cu_seqlens_q is not None
    if max_seqlen_q is not None:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
        if not is_packed:
            raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {max_seqlen_q}")
    if k is None and v is None:
        cu_seqlens_k_new = None
    length = known = None
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        length, cache_seqlens = cache_seqlens, None
    if scheduler_metadata is not None:
        scheduler_metadata, known = check_cache_metadata(scheduler_metadata, is_packed)
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin,
        cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q,
        rotary_seqlens, None, alibi_slopes, sinks, out,
    )  # fmt: skip
    options = (
        max_seqlen_q, causal, as_pair(window_size), softcap, rotary_interleaved, num_splits,
        batch_invariant, sm_margin, scheduler_metadata, None,
    )  # fmt: skip
    if is_traced(q):
        named = dict(zip(CacheTensors._fields, tensors, strict=True))
        del named["seqused_q"]
        if scheduler_metadata is not None:
            num_splits, sm_margin = options_of_metadata(
                scheduler_metadata, q, named, check_window(as_pair(window_size), causal),
                softcap, num_splits, sm_margin, batch_invariant,
            )  # fmt: skip
        return trace_attention(
            operators.CACHED, return_lse, **named, cache_length=length, softmax_scale=softmax_scale,
            causal=causal, window_size=as_pair(window_size), softcap=softcap,
            rotary_interleaved=rotary_interleaved, num_splits=num_splits, sm_margin=sm_margin,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    call = prepared_call(tensors, options, is_packed)
    scale = check_scale(softmax_scale, call.head_dim)
    if length is not None:
        length = integer("cache_seqlens", length, kind=LENGTHS)
    elif cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k: where it is appended")
        length = call.description.capacity
    if is_packed and q.shape[0] > call.most_queries:
        check_total(call, q)
    if known is not None:
        longest = max_seqlen_q, call.description.capacity
        known.check_fit(IN_METADATA, call.description.batch, (q.shape[0], known.end_k), longest)
    if length is not None or call.has_host_integers or assertions.ASSERTIONS:
        tensors = with_integers_on_device(call, tensors, length, known)
    return call.run(tensors, scale, return_lse, known)


def options_of_metadata(
    metadata: SchedulerMetadata,
    q: torch.Tensor,
    named: dict[str, torch.Tensor | None],
    window: Window,
    softcap: float,
    num_splits: int,
    sm_margin: int,
    batch_invariant: bool,
) -> tuple[int, int]:
    """num_splits and sm_margin of a call in a graph; raises unless the metadata is the call's."""
    k_cache, v_cache, pages = named["k_cache"], named["v_cache"], named["page_table"]
    metadata.check(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        heads_q=q.shape[2],
        heads_kv=k_cache.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v_cache.shape[3],
        dtype=q.dtype,
        page_size=None if pages is None else k_cache.shape[1],
        window=window,
        has_softcap=bool(softcap),
    )
    return metadata.options(num_splits, sm_margin, batch_invariant)


def prepared_call(
    tensors: tuple[torch.Tensor | None, ...], options: tuple, is_packed: bool
) -> PreparedCacheCall:
    """What these tensors and options lead to. It can write to what it writes to.

    Args:
        tensors: the `CacheTensors`.
        options: of `prepare_cache_call`.
        is_packed: whether queries are.
    """
    latest = latest_cache_call(*options)
    call, begins = latest.find(tensors)
    if call is None:
        described = describe_tensors(tensors)
        call = prepare_cache_call(without_total(described) if is_packed else described, *options)
        check_written(call, tensors)
        latest.remember(tensors, CACHE_ALIGNMENTS, OF_TOTAL if is_packed else (), call)
    elif call.apart is not None:
        call.apart(*begins)
    elif is_packed:
        check_written(call, tensors)
    return call


@functools.lru_cache(maxsize=REMEMBERED)
def latest_cache_call(*options: object) -> FastPath[PreparedCacheCall]:
    """The latest call with these options, which are all of `prepare_cache_call`."""
    return FastPath()
