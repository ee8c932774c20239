"""Attention to a key/value cache: what the tensors and options of a call lead to.

What follows from a call's shapes, strides, types and options is worked out once and remembered
(`fa3.calls.prepared_cache`). The latest calls are found again without describing their tensors
(`fa3.calls.latest`). Packed queries of `flash_attn_varlen_func` with pages come here too.
"""

import torch

from fa3.calls import assertions, operators
from fa3.calls.call import (
    ALIGNMENTS,
    LENGTHS,
    NAMES,
    PLACES_OF_TOTAL,
    describe_tensors,
    without_total,
)
from fa3.calls.eager import is_traced
from fa3.calls.known_lengths import HostSeqlens
from fa3.calls.modifiers import function_names
from fa3.calls.operands import check_apart
from fa3.calls.options import (
    CACHED,
    Checked,
    by_either_name,
    check_scale,
    integer,
    options_of,
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
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    if max_seqlen_q is not None:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
    if k is None and v is None:
        cu_seqlens_k_new = None
    length = known = None
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        length, cache_seqlens = cache_seqlens, None
    if scheduler_metadata is not None:
        scheduler_metadata, known = check_cache_metadata(
            scheduler_metadata, cu_seqlens_q is not None
        )
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q, rotary_seqlens, None, None,
        alibi_slopes, sinks, out,
    )  # fmt: skip
    unsupported = None
    if not (qv is q_descale is k_descale is v_descale is pack_gqa is None):
        unsupported = qv, q_descale, k_descale, v_descale, pack_gqa, share_heads(q, k_cache)
    given = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, unsupported,
        rotary_interleaved, batch_invariant, return_softmax_lse,
    )  # fmt: skip
    if is_traced(q):
        named = dict(zip(NAMES[CACHED], tensors, strict=True))
        return trace_attention(
            CACHED,
            window_size,
            given,
            **named,
            cache_length=length,
            softmax_scale=softmax_scale,
            max_seqlen_q=max_seqlen_q,
            metadata=scheduler_metadata,
        )
    of_cache = max_seqlen_q, scheduler_metadata
    checked = options_of(CACHED, None, window_size, given, False, of_cache)
    return attend_to_cache(tensors, checked, softmax_scale, length, known)


def attend_to_cache(
    tensors: tuple[torch.Tensor | None, ...],
    checked: Checked,
    softmax_scale: float | None,
    length: object = None,
    known: HostSeqlens | None = None,
    function_tensors: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append and attend; what the public functions return.

    Args:
        tensors: the `TENSORS`.
        length: a number in place of cache_seqlens.
        known: the lengths, if the host knows them.
        function_tensors: of the user's score and mask.
    """
    q, is_packed = tensors[0], tensors[12] is not None
    call, begins = checked.latest.find(tensors)
    if call is None:
        call = describe_call(tensors, checked, is_packed)
    elif call.apart is not None:
        call.apart(*begins)
    elif is_packed:
        check_written(call, tensors)
    if function_tensors and tensors[-1] is not None:
        check_apart("out", tensors[-1], function_names(checked.options), function_tensors)
    scale = check_scale(softmax_scale, call.head_dim)
    if length is not None:
        length = integer("cache_seqlens", length, kind=LENGTHS)
    elif tensors[7] is None:
        if tensors[3] is not None:
            raise ValueError("cache_seqlens must be given with k: where it is appended")
        length = call.description.capacity
    if is_packed and q.shape[0] > call.most_queries:
        check_total(call, q)
    if known is not None:
        longest = checked.options.max_seqlen_q, call.description.capacity
        known.check_fit(IN_METADATA, call.description.batch, (q.shape[0], known.end_k), longest)
    if length is not None or call.has_host_integers or assertions.ASSERTIONS:
        tensors = with_integers_on_device(call, tensors, length, known)
    return call.run(tensors, scale, checked.returns_lse, known, function_tensors)


def describe_call(
    tensors: tuple[torch.Tensor | None, ...], checked: Checked, is_packed: bool
) -> PreparedCacheCall:
    """What these tensors and options lead to. It can write to what it writes to.

    Args:
        is_packed: whether queries are.
    """
    described = describe_tensors(checked.options.kind, tensors)
    if is_packed:
        described = without_total(described)
    call = prepare_cache_call(described, checked.options)
    check_written(call, tensors)
    checked.latest.remember(tensors, ALIGNMENTS, PLACES_OF_TOTAL if is_packed else (), call)
    return call
