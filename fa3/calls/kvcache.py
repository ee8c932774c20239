"""Attention to a key/value cache: validate, append, attend. CPU tensors go to the reference.

A call is one to three launches: one appends (`kernels.append`), the others attend (`decode`).
Lengths are read on the device only, so a captured CUDA graph goes on decoding as they grow. What
follows from a call's shapes, strides, types and options is worked out once and remembered.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fa3.calls import decode, operators
from fa3.calls.assertions import is_visible
from fa3.calls.cache_call import (
    INTEGERS,
    LENGTHS,
    CacheCall,
    CacheTensors,
    check_tensors,
    check_values,
    values_on_host,
    written_first,
)
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.eager import is_traced
from fa3.calls.modifiers import check_alibi_slopes, check_sinks, check_softcap
from fa3.calls.operands import (
    DTYPES,
    CheckOfAddresses,
    Description,
    Output,
    addresses,
    check_of_addresses,
    check_out,
    check_writable,
    describe_unaligned,
    hide_all_keys,
)
from fa3.calls.options import (
    OptionTypes,
    as_pair,
    check_scale,
    check_window,
    integer,
    reject_unsupported,
)
from fa3.calls.ragged import hide_all_keys_of_packed
from fa3.calls.scheduler_metadata import SchedulerMetadata, check_is_metadata
from fa3.calls.traced import trace_cached
from fa3.kernels.append import MOST_VECTORS, Append, AppendArguments, Rotary
from fa3.planning.gpu import H200
from fa3.primitives.vectors import VECTOR
from fa3.problem import NO_BOUND, REMEMBERED, Window
from fa3.reference.cache import CacheOperands, HostAppend
from fa3.running.compiler import load_kernel

CACHE_OPTIONS = OptionTypes(
    {
        "causal": bool,
        "rotary_interleaved": bool,
        "batch_invariant": bool,
        "return_lse": bool,
        "return_softmax_lse": bool,
        "attention_chunk": int,
        "num_splits": int,
        "sm_margin": int,
        "softcap": float,
    }
)

TENSORS = written_first(CacheTensors._fields)
"""Names of the tensors: of those that appending writes, then of all others."""


@dataclass(frozen=True, slots=True)
class PreparedCacheCall:
    """What a call's description leads to.

    Fields:
        description: of all tensors.
        append: appends and rotates; None if nothing is appended.
        attends: whether there is an output to compute.
        query_step: 1 if each query has a rotary position of its own, 0 if they share one.
        head_dim: columns of q.
        apart: checks that the caches share no memory with other `TENSORS`, if they are written.
    """

    description: CacheCall
    append: Callable | None
    attends: bool
    window: Window
    query_step: int
    output: Output
    lse_shape: tuple[int, ...]
    head_dim: int
    apart: CheckOfAddresses


@operators.WITH_KVCACHE.stands_for
@operators.READ_KVCACHE.stands_for
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
    attention_chunk: int = 0,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a cache, in place, and attend from q to what is then in it.

    Query i of a sequence stands at key i + length - seqlen_q, where the length counts the appended
    tokens (bottom-right alignment). Query head h uses key/value head h // (heads_q / heads_kv).

    The int32 tensors may be on q's GPU or on the CPU. What is on the CPU is checked before
    anything is written. What is on the GPU is never read by the host, so the call can be captured
    in a CUDA graph. Whatever it is, nothing outside of the cache is read or written: lengths and
    paddings are taken as if cut to what the cache can hold, tokens that have no place in it, past
    its end or in a row or page that does not exist, are not appended, and a position beyond the
    rotary tables uses their last row. A sequence whose row, pages or part of k do not exist gets
    an undefined result. Pages and keys that no sequence uses never reach the result, whatever
    they hold.

    With FA3_ASSERTIONS=1 in the environment when fa3 is imported, what is on the GPU is read back
    before anything is launched and checked like what is on the CPU. Every call then waits for the
    GPU, and none can be captured: check one before the capture, and capture without the variable.

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
            after its last token are not used, nor those after 2^31 - 2^20 tokens. Those that a
            window has left behind are not read, but where the table is checked they must exist.
        cu_seqlens_q: (batch + 1,) int32: where the queries of each sequence begin and end in q,
            if sequences have different numbers of them; the last may be below total_q. Rows of no
            sequence are not written. On a GPU, queries beyond max_seqlen_q are left out.
        max_seqlen_q: the most queries of a sequence; must be given with cu_seqlens_q.
        cu_seqlens_k_new: (batch + 1,) int32: where the tokens of each sequence begin and end in k
            and v. Ignored without them.
        softmax_scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        causal: hide the keys after a query's own position.
        window_size: (left, right) keys that a query sees beside its own position; -1 for all.
            causal sets right to 0, whatever it is.
        softcap: bound of the scores: cap * tanh(score / cap); 0 for none.
        rotary_interleaved: whether columns 2i and 2i + 1 turn together; otherwise i and
            i + rotary_dim / 2 do (GPT-NeoX).
        scheduler_metadata: how to run, from `get_scheduler_metadata`.
        num_splits: parts into which the keys of a sequence are cut; by default as suits the GPU.
            The result does not depend on it but for rounding.
        pack_gqa: the query heads of a key/value head always share its reads: None or True.
        sm_margin: SMs to leave to other kernels.
        return_softmax_lse: FlashAttention-3's name for return_lse.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + length - seqlen_q - j| to the score of query i and key j.
        sinks: (heads_q,), float32 or q's dtype: a logit that joins the denominator of its head's
            softmax, and so the log-sum-exp.
        batch_invariant: make the result of a sequence, to the last bit, independent of the other
            sequences, its place among them and their number. May be slower, and takes memory for
            a part of every 512 keys (2048 from 17 query rows of a key/value head on) that the
            cache has room for.
        return_lse: also return the log-sum-exp.
        out: (batch, seqlen_q, heads_q, head_dim_v) tensor that receives the output, like q. It, and
            caches that are appended to, must not share memory with another tensor of the call;
            they may lie between each other's elements, as the halves of one buffer do.
        qv, q_descale, k_descale, v_descale, attention_chunk: in the signature for compatibility;
            anything but their default is not supported.

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
    (
        causal, rotary_interleaved, batch_invariant, return_lse, return_softmax_lse,
        attention_chunk, num_splits, sm_margin, softcap,
    ) = CACHE_OPTIONS.of(
        causal, rotary_interleaved, batch_invariant, return_lse, return_softmax_lse,
        attention_chunk, num_splits, sm_margin, softcap,
    )  # fmt: skip
    if (
        not (qv is pack_gqa is None)
        or not (q_descale is k_descale is v_descale is None)
        or attention_chunk
    ):
        reject_unsupported(
            attention_chunk, pack_gqa, has_packing=True,
            qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
    if max_seqlen_q is not None:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
        if cu_seqlens_q is None:
            raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {max_seqlen_q}")
    return_lse = return_lse or return_softmax_lse
    window_size = as_pair(window_size)
    if k is None and v is None:
        cu_seqlens_k_new = None
    if is_traced(q):
        for name, given in (("cu_seqlens_q", cu_seqlens_q), ("rotary_seqlens", rotary_seqlens)):
            if given is not None:
                raise NotImplementedError(f"{name} must be None while a graph is traced")
        return trace_cached(
            q, k_cache, v_cache, out, return_lse, k, v, rotary_cos, rotary_sin, cu_seqlens_k_new,
            rotary_interleaved, scheduler_metadata, cache_seqlens, cache_batch_idx, cache_leftpad,
            page_table, softmax_scale, causal, window_size, softcap, sm_margin, alibi_slopes,
            sinks, num_splits, batch_invariant,
        )  # fmt: skip
    length = None
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        length, cache_seqlens = integer("cache_seqlens", cache_seqlens, kind=LENGTHS), None
    tensors = CacheTensors(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin,
        cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q,
        rotary_seqlens,
    )  # fmt: skip
    described = tensors.describe()
    if scheduler_metadata is not None:
        check_metadata(
            scheduler_metadata, described, max_seqlen_q, causal, window_size, bool(softcap)
        )
        num_splits, sm_margin = scheduler_metadata.options(num_splits, sm_margin, batch_invariant)
    call = prepare_cache_call(
        described, max_seqlen_q, causal, window_size, rotary_interleaved, num_splits, sm_margin
    )
    scale = check_scale(softmax_scale, call.head_dim)
    check_modifiers(q, call.description.batch, softcap, alibi_slopes, sinks)
    if cache_seqlens is None and length is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k: where it is appended")
        length = call.description.capacity
    if call.append is not None:
        check_written_caches(call, tensors)
    if out is not None:
        check_cache_out(call, out, described, tensors, alibi_slopes, sinks)
    integers = integers_on_device(call, tensors, length)
    if out is None:
        out = call.output.allocate(q)
    lse = q.new_empty(call.lse_shape, dtype=torch.float32) if return_lse else None
    seqlens, batch_idx, leftpad, pages, _, ends_q, _ = integers
    if call.append is not None:
        q, seqlens = append_tokens(call, tensors, integers)
    if call.attends:
        operands = CacheOperands(
            q, k_cache, v_cache, out, lse, seqlens, batch_idx, leftpad, pages, alibi_slopes, sinks,
            ends_q,
        )  # fmt: skip
        decode.attend_with_cache(
            operands, scale, call.window, softcap, num_splits, batch_invariant, sm_margin,
            max_seqlen_q,
        )  # fmt: skip
    elif ends_q is None:
        hide_all_keys(out, lse, sinks)
    elif call.description.batch:
        hide_all_keys_of_packed(out, lse, ends_q, None, sinks)
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------------------------- checks


def check_metadata(
    metadata: SchedulerMetadata,
    described: tuple[Description | None, ...],
    max_seqlen_q: int | None,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool,
) -> None:
    """Raise unless the metadata was made for such a call."""
    check_is_metadata(metadata)
    compare_with_metadata(metadata, described, max_seqlen_q, causal, window_size, has_softcap)


@functools.lru_cache(maxsize=REMEMBERED)
def compare_with_metadata(
    metadata: SchedulerMetadata,
    described: tuple[Description | None, ...],
    max_seqlen_q: int | None,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool,
) -> None:
    """Raise unless the metadata was made for a call of this description."""
    call = CacheCall.of(described, max_seqlen_q)
    check_tensors(call)
    metadata.check(
        batch=call.batch,
        seqlen_q=call.seqlen_q,
        heads_q=call.heads_q,
        heads_kv=call.k_cache.shape[2],
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        dtype=call.q.dtype,
        page_size=call.page_size if call.page_table else None,
        window=check_window(window_size, causal),
        has_softcap=has_softcap,
    )


def check_modifiers(
    q: torch.Tensor,
    batch: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise unless what changes scores fits q."""
    if softcap:
        check_softcap(softcap)
    if alibi_slopes is not None:
        check_alibi_slopes(alibi_slopes, q, batch)
    if sinks is not None:
        check_sinks(sinks, q)


def check_written_caches(call: PreparedCacheCall, tensors: CacheTensors) -> None:
    """Raise unless the call can append to its caches."""
    check_writable("k_cache", tensors.k_cache)
    check_writable("v_cache", tensors.v_cache)
    call.apart(*addresses(written_first(tensors)))


def check_cache_out(
    call: PreparedCacheCall,
    out: torch.Tensor,
    described: tuple[Description | None, ...],
    tensors: CacheTensors,
    *rest: torch.Tensor | None,
) -> None:
    """Raise unless the call can write its output to a tensor of the caller's.

    Args:
        rest: slopes and sinks.
    """
    names = "alibi_slopes", "sinks"
    check_out(
        out, call.output.shape, call.description.q, (*TENSORS, *names),
        (*written_first(described), *map(describe_unaligned, names, rest)),
        (*written_first(tensors), *rest),
    )  # fmt: skip


# -------------------------------------------------------------------------------- preparations


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_cache_call(
    described: tuple[Description | None, ...],
    max_seqlen_q: int | None,
    causal: bool,
    window_size: tuple[int, int],
    rotary_interleaved: bool,
    num_splits: int,
    sm_margin: int,
) -> PreparedCacheCall:
    """Validate a call of this description and load the kernel that appends."""
    call = CacheCall.of(described, max_seqlen_q)
    check_tensors(call)
    window = check_window(window_size, causal)
    if num_splits < 0:
        raise ValueError(f"num_splits must be 0 (chosen for you) or more, got {num_splits}")
    on_gpu = call.q.device.type == "cuda"
    reserve_sms(gpu_of(call.q.device) if on_gpu else H200, sm_margin)
    has_room = 0 not in (*call.k_cache.shape, call.num_sequences, call.capacity)
    append = None
    if has_room and call.k is not None and call.batch:
        kernel = append_kernel(call, rotary_interleaved)
        append = load_kernel(kernel) if on_gpu else HostAppend(kernel)
    return PreparedCacheCall(
        call,
        append,
        has_room and 0 not in (*call.q.shape, call.batch, call.seqlen_q),
        window.tighten(call.seqlen_q, call.capacity),
        int(window != Window()),
        Output.of((*call.q.shape[:-1], call.head_dim_v), call.q),
        (call.heads_q, call.q.shape[0])
        if call.is_packed
        else (call.batch, call.heads_q, call.seqlen_q),
        call.head_dim,
        check_of_addresses(TENSORS, written_first(described), num_written=2),
    )


def append_kernel(call: CacheCall, rotary_interleaved: bool) -> Append:
    """The kernel that appends k and v of this call."""
    tokens, heads_kv = call.k.shape[:-2].numel(), call.k.shape[-2]
    for name, rows in (("k", tokens * heads_kv), ("q", call.q.shape[:-1].numel())):
        if rows * max(call.head_dim, call.head_dim_v) // VECTOR > MOST_VECTORS:
            raise ValueError(f"{name} must have at most {MOST_VECTORS} vectors of 16 bytes")
    rotary = None
    if call.rotary_cos is not None:
        dtype = str(call.rotary_cos.dtype).removeprefix("torch.")
        rotary = Rotary(2 * call.rotary_cos.shape[1], bool(rotary_interleaved), dtype)
    return Append(
        DTYPES[call.q.dtype],
        call.head_dim,
        call.head_dim_v,
        paged=call.page_table is not None,
        batch_indexed=call.cache_batch_idx is not None,
        ragged=call.cu_seqlens_k_new is not None,
        rotary=rotary,
        packed=call.is_packed and rotary is not None,
        turned=call.rotary_seqlens is not None,
    )


# ---------------------------------------------------------------------------------------- runs


def integers_on_device(
    call: PreparedCacheCall, tensors: CacheTensors, length: int | None
) -> tuple[torch.Tensor | None, ...]:
    """Check what the host can see of the int32 tensors, and bring them to q's device.

    Args:
        length: of each sequence; None if cache_seqlens says it.

    Raises:
        ValueError, RuntimeError: see `check_values` and `values_on_host`.
    """
    integers = tensors[-len(INTEGERS) :]
    if length is not None:
        integers = length, *integers[1:]
    for value in integers:
        if value is not None and is_visible(value):
            break
    else:
        return integers
    values = values_on_host(call.description, integers)
    check_values(call.description, values, call.query_step)
    return tuple(
        on_device(name, value, call.description)
        for name, value in zip(INTEGERS, integers, strict=True)
    )


def on_device(name: str, value: int | torch.Tensor | None, call: CacheCall) -> torch.Tensor | None:
    """The value as a tensor on q's device; a number for each sequence.

    Raises:
        RuntimeError: a CUDA graph would copy it from the host again at every replay.
    """
    device = call.q.device
    if isinstance(value, int):
        return torch.full((call.batch,), value, dtype=torch.int32, device=device)
    if value is None or value.device == device:
        return value
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} must be on {device} while a CUDA graph is captured, got {value.device}"
        )
    # From pinned memory the copy would still run when the caller writes the next lengths.
    return (value.clone() if value.is_pinned() else value).to(device, non_blocking=True)


def append_tokens(
    call: PreparedCacheCall, tensors: CacheTensors, integers: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to the caches.

    Returns:
        the queries, rotated if there are rotary tables, and the lengths with the new tokens.
    """
    q, k_cache, v_cache, k, v, cos, sin, *_ = tensors
    seqlens, batch_idx, _, pages, cu_seqlens, ends_q, turns = integers
    total = seqlens.new_empty(call.description.batch)
    rotated = None if cos is None else q.new_empty(q.shape)
    arguments = AppendArguments(
        k, v, k_cache, v_cache, seqlens, total, cu_seqlens, batch_idx, pages,
        None if rotated is None else q, rotated, cos, sin,
        None if rotated is None else ends_q, turns, call.query_step,
    )  # fmt: skip
    call.append(*arguments)
    return q if rotated is None else rotated, total
