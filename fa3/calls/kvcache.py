"""Attention to a key/value cache: validate, append, attend. CPU tensors go to the executor.

A call is one to three launches: one appends (`kernels.append`), the others attend (`decode`).
Lengths are read on the device only, so a captured CUDA graph goes on decoding as they grow. What
follows from a call's shapes, strides, types and options is worked out once and remembered.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa3.calls import decode
from fa3.calls.cache_call import (
    INTEGERS,
    LENGTHS,
    CacheCall,
    check_tensors,
    check_values,
    is_visible,
    values_on_host,
)
from fa3.calls.eager import check_resolved, check_untraced
from fa3.calls.forward import (
    as_pair,
    check_scale,
    check_window,
    gpu_of,
    reject_unsupported,
    reserve_sms,
    tighten,
)
from fa3.calls.modifiers import check_alibi_slopes, check_sinks, check_softcap
from fa3.calls.operands import (
    DIMENSIONS,
    DTYPES,
    CheckOfAddresses,
    Operand,
    addresses,
    check_device,
    check_dtype,
    check_head_dim,
    check_layout,
    check_no_overlap,
    check_of_addresses,
    check_out,
    check_rank,
    check_shape,
    check_writable,
    describe,
    describe_unaligned,
)
from fa3.calls.options import flag, integer, real, shown
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.kernels.append import MOST_VECTORS, Append, Rotary
from fa3.kernels.combine import Combine
from fa3.planning.gpu import H200
from fa3.primitives.vectors import VECTOR
from fa3.problem import NO_BOUND, REMEMBERED, Window
from fa3.reference.cache import CacheOperands, HostAppend
from fa3.reference.forward import merge
from fa3.running.compiler import load_kernel


@dataclass(frozen=True, slots=True)
class PreparedCacheCall:
    """What a call's description leads to.

    Fields:
        append: appends and rotates; None if nothing is appended.
        attend: computes the output; None if there is nothing to compute.
        query_step: 1 if each query has a rotary position of its own, 0 if they share one.
        apart: checks that the caches share no memory with other `TENSORS`, if they are written.
    """

    append: Callable | None
    attend: Callable | None
    window: Window
    query_step: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    apart: CheckOfAddresses


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
    cu_seqlens_q: None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: None = None,
    rotary_seqlens: None = None,
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
            up to 256. Strides as in `flash_attn_func`, here and below.
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
        cache_seqlens: int or (batch,) int32: tokens of each sequence, without k; all that the
            cache can hold if not given. Must be given with k.
        cache_batch_idx: (batch,) int32: the row of the cache, or of page_table, that is a
            sequence's. Distinct if k is given, or which of the tokens remains is undefined.
        cache_leftpad: (batch,) int32: keys before this one are hidden. Positions stay as they
            are.
        page_table: (batch, max_pages) int32: the pages of each sequence, in order. Entries
            behind its last token are not used, nor those behind 2^31 - 2^20 tokens. Those that a
            window has left behind are not read, but where the table is checked they must exist.
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
        qv, cu_seqlens_q, max_seqlen_q, rotary_seqlens, q_descale, k_descale, v_descale,
            attention_chunk: in the signature for compatibility; anything but their default is
            not supported.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), of q's dtype; with return_lse also the
        log-sum-exp of the scores, (batch, heads_q, seqlen_q), float32, natural logarithm. A query
        that sees no key gives 0 and -inf, or 0 and its head's sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device; on the CPU, or with
            FA3_ASSERTIONS=1, also a length, index or page that does not fit the cache. Nothing
            has been appended then.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        NotImplementedError: the combination is not supported, a tensor does not lie in memory, or
            a graph is being traced.

    Source: Dao et al., Flash-Decoding; Kwon et al., PagedAttention (arXiv 2309.06180).
    """
    # All types in one look, since nearly all calls have the right ones.
    if not (
        type(causal) is type(rotary_interleaved) is type(batch_invariant) is bool
        and type(return_lse) is type(return_softmax_lse) is bool
        and type(attention_chunk) is type(num_splits) is type(sm_margin) is int
        and type(softcap) is float
    ):
        causal = flag("causal", causal)
        rotary_interleaved = flag("rotary_interleaved", rotary_interleaved)
        batch_invariant = flag("batch_invariant", batch_invariant)
        return_lse = flag("return_lse", return_lse)
        return_softmax_lse = flag("return_softmax_lse", return_softmax_lse)
        attention_chunk = integer("attention_chunk", attention_chunk, 0)
        num_splits = integer("num_splits", num_splits, 0)
        sm_margin = integer("sm_margin", sm_margin, 0)
        softcap = real("softcap", softcap)
    if (
        not (qv is cu_seqlens_q is max_seqlen_q is rotary_seqlens is pack_gqa is None)
        or not (q_descale is k_descale is v_descale is None)
        or attention_chunk
    ):
        reject_unsupported(
            attention_chunk, pack_gqa, has_packing=True,
            qv=qv, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale,
        )  # fmt: skip
    return_lse = return_lse or return_softmax_lse
    window_size = as_pair(window_size)
    if k is None and v is None:
        cu_seqlens_k_new = None
    lengths = cache_seqlens if isinstance(cache_seqlens, torch.Tensor) else None
    if lengths is None and cache_seqlens is not None:
        cache_seqlens = integer("cache_seqlens", cache_seqlens, kind=LENGTHS)
    tensors = lengths, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new
    call = CacheCall.of(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *tensors)
    check_untraced(q)
    if scheduler_metadata is not None:
        if not isinstance(scheduler_metadata, SchedulerMetadata):
            came = type(scheduler_metadata).__name__
            raise TypeError(f"scheduler_metadata must come from get_scheduler_metadata, got {came}")
        check_metadata(scheduler_metadata, call, causal, window_size, bool(softcap))
        num_splits, sm_margin = scheduler_metadata.options(num_splits, sm_margin, batch_invariant)
    prepared = prepare(call, causal, window_size, rotary_interleaved, num_splits, sm_margin)
    scale = check_scale(softmax_scale, q.shape[-1])
    check_softcap(softcap)
    if alibi_slopes is not None:
        check_alibi_slopes(alibi_slopes, q)
    if sinks is not None:
        check_sinks(sinks, q)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k: where it is appended")
        cache_seqlens = call.capacity
    if prepared.append is not None or out is not None:
        used = k_cache, v_cache, q, k, v, rotary_cos, rotary_sin, *tensors
        if prepared.append is not None:
            check_writable("k_cache", k_cache)
            check_writable("v_cache", v_cache)
            prepared.apart(*addresses(used))
        if out is not None:
            rest = "alibi_slopes", "sinks"
            of_rest = map(describe_unaligned, rest, (alibi_slopes, sinks))
            check_out(
                out, prepared.out_shape, call.q, (*TENSORS, *rest),
                (*in_order_of_tensors(call), *of_rest), (*used, alibi_slopes, sinks),
            )  # fmt: skip
    integers = cache_seqlens, *tensors[1:]
    if any(map(is_visible, integers)):
        check_values(call, values_on_host(call, *integers), prepared.query_step)
        integers = tuple(
            on_device(name, value, call) for name, value in zip(INTEGERS, integers, strict=True)
        )
    seqlens, batch_idx, leftpad, pages, cu_seqlens = integers
    if out is None:
        out = q.new_empty(prepared.out_shape)
    lse = q.new_empty(prepared.lse_shape, dtype=torch.float32) if return_lse else None

    if prepared.append is not None:
        total, rotated = seqlens.new_empty(call.batch), None
        if rotary_cos is not None:
            rotated = q.new_empty(q.shape)
        prepared.append(
            k, v, k_cache, v_cache, seqlens, total, cu_seqlens, batch_idx, pages,
            None if rotated is None else q, rotated, rotary_cos, rotary_sin, prepared.query_step,
        )  # fmt: skip
        q, seqlens = q if rotated is None else rotated, total
    if prepared.attend is not None:
        operands = CacheOperands(
            q, k_cache, v_cache, out, lse, seqlens, batch_idx, leftpad, pages, alibi_slopes, sinks
        )
        prepared.attend(
            operands, scale, prepared.window, softcap, num_splits, batch_invariant, sm_margin
        )
    else:
        out.zero_()
        if lse is not None:
            lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None])
    return (out, lse) if return_lse else out


@functools.lru_cache(maxsize=REMEMBERED)
def prepare(
    call: CacheCall,
    causal: bool,
    window_size: tuple[int, int],
    rotary_interleaved: bool,
    num_splits: int,
    sm_margin: int,
) -> PreparedCacheCall:
    """Validate a call's description and load the kernel that appends."""
    check_tensors(call)
    given = check_window(window_size, causal)
    if num_splits < 0:
        raise ValueError(f"num_splits must be 0 (chosen for you) or more, got {num_splits}")
    on_gpu = call.q.device.type == "cuda"
    reserve_sms(gpu_of(call.q.device) if on_gpu else H200, sm_margin)
    has_room = 0 not in (*call.k_cache.shape, call.num_sequences, call.capacity)
    append = None
    if has_room and call.k is not None and call.batch:
        kernel = append_kernel(call, rotary_interleaved)
        append = load_kernel(kernel) if on_gpu else HostAppend(kernel)
    attend = None
    if has_room and 0 not in call.q.shape:
        attend = decode.attend_with_cache
    return PreparedCacheCall(
        append,
        attend,
        tighten(given, call.seqlen_q, call.capacity),
        int(given != Window()),
        (*call.q.shape[:3], call.head_dim_v),
        (call.batch, call.q.shape[2], call.seqlen_q),
        check_of_addresses(TENSORS, in_order_of_tensors(call), 2),
    )


@functools.lru_cache(maxsize=REMEMBERED)
def check_metadata(
    metadata: SchedulerMetadata,
    call: CacheCall,
    causal: bool,
    window_size: tuple[int, int],
    has_softcap: bool,
) -> None:
    """Raise unless the metadata was made for such a call."""
    check_tensors(call)
    metadata.check(
        batch=call.batch,
        seqlen_q=call.seqlen_q,
        heads_q=call.q.shape[2],
        heads_kv=call.k_cache.shape[2],
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        dtype=call.q.dtype,
        page_size=call.page_size if call.page_table else None,
        window=check_window(window_size, causal),
        has_softcap=has_softcap,
    )


def append_kernel(call: CacheCall, rotary_interleaved: bool) -> Append:
    """The kernel that appends k and v of this call."""
    tokens, heads_kv = call.k.shape[:-2].numel(), call.k.shape[-2]
    for name, rows in (("k", tokens * heads_kv), ("q", call.q.shape[:3].numel())):
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
    )


TENSORS = ("k_cache", "v_cache", "q", "k", "v", "rotary_cos", "rotary_sin", *INTEGERS)
"""Those that appending writes, then all others."""


def in_order_of_tensors(call: CacheCall) -> tuple[Operand | None, ...]:
    """The descriptions of `TENSORS`."""
    return call.k_cache, call.v_cache, call.q, *call[3:]


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


# ------------------------------------------------------------------------------------ combine

MAX_COMBINED_HEAD_DIM = 512
MOST_COMBINED = 1 << 30
"""Parts, and rows of each, that 32 bits count with the steps of a walk over them."""
COMBINE_CTAS = 16
"""CTAs of the kernel that merges, for each SM."""


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    Args:
        out_partial: (num_splits, batch, seqlen, heads, head_dim), float32: outputs, each
            normalised by itself; head_dim a multiple of 8 up to 512.
        lse_partial: (num_splits, batch, seqlen, heads), float32: their log-sum-exps, natural
            logarithm, in any strides. A part with -inf counts nothing; its output must not be NaN.
        out: (batch, seqlen, heads, head_dim) tensor that receives the output; must not share
            memory with the parts.
        out_dtype: of the output: torch.float32, torch.bfloat16 or torch.float16; out's, or
            float32 if there is none.

    Returns:
        out, and the log-sum-exp (batch, seqlen, heads), float32, which lies in memory as
        (batch, heads, seqlen). All parts hidden give 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong shape, layout or device.
        NotImplementedError: a tensor does not lie in memory, or a graph is being traced.

    Source: Dao et al., Flash-Decoding.
    """
    out_operand = None if out is None else describe("out", out)
    if out_dtype is None:
        out_dtype = torch.float32 if out is None else out.dtype
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {shown(out_dtype)}")
    parts = (
        describe("out_partial", out_partial),
        describe("lse_partial", lse_partial, alignment=1),
    )
    check_resolved("lse_partial", lse_partial)
    check_untraced(out_partial)
    call = prepare_combine(*parts, out_operand, out_dtype)
    if out is not None:
        check_writable("out", out)
        names = "out", "out_partial", "lse_partial"
        check = check_of_addresses(names, (out_operand, *parts), 1)
        check(*addresses((out, out_partial, lse_partial)))
    _, batch, seqlen, heads, _ = out_partial.shape
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype)
    lse = out_partial.new_empty(batch, heads, seqlen)
    if call is not None:
        call.kernel(out, lse, None, out_partial, lse_partial, None, 1, 0, 0, call.num_ctas)
    else:
        merged, merged_lse = merge(list(zip(out_partial, lse_partial, strict=True)))
        out.copy_(merged)
        lse.copy_(merged_lse.transpose(1, 2))
    return out, lse.transpose(1, 2)


class PreparedCombine(NamedTuple):
    """The compiled kernel of a merge, and how many CTAs it takes."""

    kernel: Callable
    num_ctas: int


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_combine(
    partial: Operand, lse: Operand, out: Operand | None, out_dtype: torch.dtype
) -> PreparedCombine | None:
    """Validate a merge and load its kernel; None for the CPU, or if there is nothing to merge."""
    check_rank("out_partial", partial, ("num_splits", *DIMENSIONS))
    check_dtype("out_partial", partial, torch.float32)
    if partial.device.type not in ("cpu", "cuda"):
        raise ValueError(f"out_partial must be a CPU or CUDA tensor, got {partial.device}")
    check_layout("out_partial", partial)
    check_head_dim("out_partial", partial, MAX_COMBINED_HEAD_DIM)
    *rows, head_dim = partial.shape
    if rows[0] == 0:
        raise ValueError("out_partial must have a part to merge, got none")
    for what, count in (("parts", rows[0]), ("rows", math.prod(rows[1:]))):
        if count > MOST_COMBINED:
            raise ValueError(f"out_partial must have at most {MOST_COMBINED} {what}, got {count}")
    check_dtype("lse_partial", lse, torch.float32)
    check_shape("lse_partial", lse, tuple(rows), "out_partial")
    check_device("lse_partial", lse, "out_partial", partial)
    if out_dtype not in (torch.float32, *DTYPES):
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    if out is not None:
        check_shape("out", out, tuple(partial.shape[1:]), "out_partial")
        check_layout("out", out)
        check_no_overlap("out", out)
        if out.dtype != out_dtype:
            raise TypeError(f"out must be {out_dtype} like out_dtype, got {out.dtype}")
        check_device("out", out, "out_partial", partial)
    if partial.device.type == "cpu" or 0 in rows:
        return None
    element = str(out_dtype).removeprefix("torch.")
    kernel = load_kernel(Combine(element, head_dim, None, True, None))
    most = COMBINE_CTAS * gpu_of(partial.device).num_sms
    return PreparedCombine(kernel, min(math.prod(rows[1:]), most))
