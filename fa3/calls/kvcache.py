"""Attention to a key/value cache: `flash_attn_with_kvcache`, and packed queries on pages.

What follows from a call's shapes, strides, types and options is worked out once and remembered. The
latest calls are found again without describing their tensors (`fa3.calls.latest`). A call appends
in one launch (`kernels.append`) and attends in one or more (`fa3.calls.packed_calls`). Lengths are
read on the device only, so a captured CUDA graph goes on decoding as they grow. CPU tensors go to
the reference.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch

from fa3.calls import assertions, operators
from fa3.calls.assertions import is_visible
from fa3.calls.call import (
    ALIGNMENTS,
    LENGTHS,
    MOST_RAGGED_ROWS,
    NAMES_BY_KIND,
    OF_INTEGERS,
    PLACES_OF_TOTAL,
    AttentionCall,
    Described,
    check_cache_counts,
    check_tensors,
    describe_tensors,
    without_total,
)
from fa3.calls.decode import PreparedDecode
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.eager import is_traced
from fa3.calls.modifiers import function_names, modifier_tensors
from fa3.calls.operands import (
    DTYPES,
    CheckOfAddresses,
    Operand,
    Output,
    addresses,
    check_apart,
    check_of_addresses,
    check_out,
    check_writable,
    describe,
    hide_all_keys,
    hide_all_keys_of_packed,
)
from fa3.calls.operators import trace_attention
from fa3.calls.options import (
    CACHED,
    Checked,
    Options,
    by_either_name,
    check_scale,
    integer,
    options_of,
    share_heads,
)
from fa3.calls.packed_calls import PackedCall, prepare_on_cache
from fa3.calls.scales import Scales
from fa3.calls.scheduler_metadata import SchedulerMetadata, check_metadata
from fa3.calls.values import check_values, values_on_host
from fa3.kernels.append import MOST_VECTORS, Append, AppendArguments, Rotary
from fa3.planning.gpu import H200
from fa3.planning.routes import PackedSizes
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.vectors import VECTOR
from fa3.problem import NO_BOUND, REMEMBERED, Window
from fa3.reference.cache import NO_TABLES, HostAppend
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.settings import check_settings


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
    length = None
    if not (cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor)):
        length, cache_seqlens = cache_seqlens, None
    if scheduler_metadata is not None:
        check_metadata(scheduler_metadata)
    tensors = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q, rotary_seqlens, None, None,
        q_descale, k_descale, v_descale, alibi_slopes, sinks, out,
    )  # fmt: skip
    given = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, return_softmax_lse,
        rotary_interleaved, batch_invariant, qv, pack_gqa,
        pack_gqa is None or share_heads(q, k_cache),
    )  # fmt: skip
    if is_traced(q):
        named = dict(zip(NAMES_BY_KIND[CACHED], tensors, strict=True))
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
    return attend_to_cache(tensors, checked, softmax_scale, length)


def attend_to_cache(
    tensors: tuple[torch.Tensor | None, ...],  # the `TENSORS`
    checked: Checked,
    softmax_scale: float | None,
    length: object = None,  # a number in place of cache_seqlens
    function_tensors: tuple[torch.Tensor, ...] = (),  # of the user's score and mask
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append and attend; what the public functions return."""
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
    scale = call.head_dim**-0.5
    if softmax_scale is not None:
        scale = check_scale(softmax_scale, call.head_dim)
    if length is not None:
        length = integer("cache_seqlens", length, kind=LENGTHS)
    elif tensors[7] is None:
        if tensors[3] is not None:
            raise ValueError("cache_seqlens must be given with k: where it is appended")
        length = call.description.capacity
    if is_packed and q.shape[0] > call.most_queries:
        check_total(call, q)
    if length is not None or call.has_host_integers or assertions.ASSERTIONS:
        tensors = with_integers_on_device(call, tensors, length)
    return call.run(tensors, scale, checked.returns_lse, function_tensors)


def describe_call(
    tensors: tuple[torch.Tensor | None, ...], checked: Checked, is_packed: bool
) -> "PreparedCacheCall":
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


arguments_of_append = itemgetter(*AppendArguments._fields)  # picks them from values by name


@dataclass(frozen=True, slots=True)
class PreparedCacheCall:
    """What a call's description leads to, whatever the total of packed queries is."""

    description: AttentionCall  # of all tensors
    append: Callable | None  # appends and rotates; None if nothing is appended
    # The kernels that attend; None if there are no keys, or no queries to attend from.
    attends: PreparedDecode | PackedCall | None
    query_step: int  # 1 if each query has a rotary position of its own, 0 if they share one
    output: Output
    lse_shape: tuple[int, ...] | None  # None for packed queries, whose total it has
    head_dim: int  # columns of q
    most_queries: int  # rows of packed queries that 32 bits count
    has_rotated_in_out: bool  # whether rotated queries may be in the output's memory
    has_host_integers: bool  # whether an int32 tensor is on the CPU
    # Checks that what is written shares no memory with other tensors; None if nothing of the
    # caller's is written, and for packed queries.
    apart: CheckOfAddresses | None
    scales: Scales | None  # None unless the cache is FP8

    def run(
        self,
        tensors: tuple[torch.Tensor | None, ...],  # the `TENSORS`, the int32 ones on q's device
        softmax_scale: float,
        return_lse: bool,
        function_tensors: tuple[torch.Tensor, ...] = (),  # the tensors of the user's score and mask
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Append, and attend; what `flash_attn_with_kvcache` returns."""
        (
            q, k_cache, v_cache, _, _, _, _, seqlens, batch_idx, leftpad, pages, _, ends_q, _,
            used_q, _, scale_q, scale_k, scale_v, slopes, sinks, out,
        ) = tensors  # fmt: skip
        rotated = lse = None
        if out is None:
            out = self.output.allocate(q)
            if self.has_rotated_in_out:
                rotated = out
        if return_lse:
            lse_shape = self.lse_shape or (self.description.heads_q, q.shape[0])
            lse = q.new_empty(*lse_shape, dtype=torch.float32)
        seqlen_new, descales = 0, None
        if self.scales is not None:
            descales = self.scales.of(scale_q, scale_k, scale_v)
        if self.append is not None:
            q, seqlens, seqlen_new = self.append_tokens(tensors, rotated, descales)
        if self.attends is not None and (ends_q is None or q.shape[0]):
            # In half the time that the class itself takes.
            operands = tuple.__new__(
                RaggedOperands, (q, k_cache, v_cache, out, lse, ends_q, None, used_q, seqlens)
            )
            tables = NO_TABLES
            if not (batch_idx is leftpad is pages is None):
                tables = CacheTables(batch_idx, leftpad, pages)
            modifiers = modifier_tensors(slopes, function_tensors, sinks)
            if isinstance(self.attends, PackedCall):
                longest = self.description.seqlen_q, self.description.capacity
                sizes = PackedSizes(self.description.batch, *q.shape[1::-1], 0, *longest)
                self.attends.attend(operands, sizes, modifiers, softmax_scale, tables=tables)
            else:
                of_call = operands, tables, modifiers, softmax_scale, seqlen_new
                self.attends.attend(*of_call, descales=descales)
        elif ends_q is None:
            hide_all_keys(out, lse, sinks)
        elif self.description.batch:
            hide_all_keys_of_packed(out, lse, ends_q, used_q, sinks)
        return (out, lse) if return_lse else out

    def append_tokens(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        rotated: torch.Tensor | None,  # where rotated queries may go; None for memory of their own
        # Of keys and values in an FP8 cache; queries are in 16 bits.
        descales: tuple[torch.Tensor, ...] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Append k and v to the caches.

        Returns:
            the queries, rotated if there are rotary tables; the lengths, with the new tokens if
            sequences get different numbers of them, or have different numbers of queries; keys that
            each sequence has beyond those.
        """
        (
            q, k_cache, v_cache, k, v, cos, sin, seqlens, batch_idx, _, pages, ends_new, ends_q,
            turns, _, _, _, _, _, _, _, _,
        ) = tensors  # fmt: skip
        total, seqlen_new = None, 0
        if ends_new is ends_q is None:
            seqlen_new = k.shape[1]
        else:
            total = seqlens.new_empty(seqlens.shape[0])
        if cos is not None and rotated is None:
            rotated = q.new_empty(*q.shape)
        has_rotary = cos is not None
        values = {
            "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "seqlens": seqlens,
            "new_seqlens": total, "cu_seqlens": ends_new, "batch_idx": batch_idx,
            "page_table": pages, "q": q if has_rotary else None,
            "rotated": rotated if has_rotary else None, "cos": cos, "sin": sin,
            "cu_seqlens_q": ends_q if has_rotary else None, "rotary_seqlens": turns,
            "query_step": self.query_step, "descales": descales,
        }  # fmt: skip
        self.append(*arguments_of_append(values))
        return q if cos is None else rotated, seqlens if total is None else total, seqlen_new


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_cache_call(described: Described, options: Options) -> PreparedCacheCall:
    """Validate calls of this description, and load their kernels.

    Args:
        described: the tensors; of packed queries `without_total`.
    """
    check_settings()
    call = AttentionCall.of(described, options.kind, options.max_seqlen_q)
    check_tensors(call)
    if options.metadata is not None:
        options.metadata.check_call(call, options)
        options = options.metadata.applied_to(options)
    if options.num_splits < 0:
        raise ValueError(f"num_splits must be 0 (chosen for you) or more, got {options.num_splits}")
    on_gpu = call.q.device.type == "cuda"
    reserve_sms(gpu_of(call.q.device) if on_gpu else H200, options.sm_margin)
    has_room = 0 not in (*call.k.shape, call.num_sequences, call.capacity)
    append = attends = None
    if has_room and call.k_new is not None and call.batch:
        kernel = append_kernel(call, options.rotary_interleaved)
        append = load_kernel(kernel) if on_gpu else HostAppend(kernel)
    if has_room and 0 not in (*call.q.shape, call.batch, call.seqlen_q):
        attends = prepare_on_cache(call, options)
    apart = scales = None
    if call.has_fp8_cache:
        scales = Scales.on(call.q.device, (call.batch, call.heads_kv), call.has_fp8_q)
    if not call.is_packed and not (call.out is append is None):
        written = ("out",) if append is None else ("out", call.name("k"), call.name("v"))
        apart = check_of_addresses(NAMES_BY_KIND[options.kind], described, written)
    most = LARGEST if append is None else MOST_VECTORS // max(1, vectors_of_row(call, call.heads_q))
    return PreparedCacheCall(
        call,
        append,
        attends,
        int(options.window != Window()),
        Output.of(call.out_shape, call.q, call.is_packed),
        None if call.is_packed else (call.batch, call.heads_q, call.seqlen_q),
        call.head_dim,
        min(most, MOST_RAGGED_ROWS) if isinstance(attends, PackedCall) else most,
        has_rotated_in_out(call),
        any(operand is not None and operand.device.type == "cpu" for operand in call[OF_INTEGERS]),
        apart,
        scales,
    )


def has_rotated_in_out(call: AttentionCall) -> bool:
    """Whether rotated queries may be in the output's memory, which has the same shape.

    The decode kernel writes a row of O where it has read this row of Q, or when all that read it
    have. Where queries are packed, the forward kernel may attend to them too: it reads Q twice, and
    when it computes failed rows once more, O has been written.
    """
    return call.rotary_cos is not None and not call.is_packed and call.head_dim == call.head_dim_v


def check_vectors(call: AttentionCall) -> None:
    """Raise if the kernel that appends cannot count what it copies and turns."""
    for name, operand in (("k", call.k_new), ("q", call.q)):
        *rows, heads, _ = operand.shape
        if math.prod(rows) * vectors_of_row(call, heads) > MOST_VECTORS:
            raise ValueError(f"{name} must have at most {MOST_VECTORS} vectors of 16 bytes")


def vectors_of_row(call: AttentionCall, heads: int) -> int:
    """Vectors of 16 bytes in a row of heads."""
    return heads * max(call.head_dim, call.head_dim_v) // VECTOR


def append_kernel(call: AttentionCall, rotary_interleaved: bool) -> Append:
    """The kernel that appends k and v of this call."""
    check_vectors(call)
    rotary = None
    if call.rotary_cos is not None:
        dtype = str(call.rotary_cos.dtype).removeprefix("torch.")
        rotary = Rotary(2 * call.rotary_cos.shape[1], bool(rotary_interleaved), dtype)
    return Append(
        DTYPES[call.k_new.dtype],
        call.head_dim,
        call.head_dim_v,
        paged=call.page_table is not None,
        batch_indexed=call.cache_batch_idx is not None,
        ragged=call.cu_seqlens_k_new is not None,
        rotary=rotary,
        packed=call.is_packed and rotary is not None,
        turned=call.rotary_seqlens is not None,
        # The decode kernel adds equal numbers by itself. Where queries are packed, the table of the
        # forward kernel's tiles is made of lengths too (`fa3.calls.packed_calls`).
        writes_lengths=call.is_packed or call.cu_seqlens_k_new is not None,
        fp8=call.has_fp8_cache,
    )


# ------------------------------------------------------------------------------------- checks


def check_total(call: PreparedCacheCall, q: torch.Tensor) -> None:
    """Raise for packed queries with more rows than `most_queries`."""
    description = call.description._replace(q=Operand(*describe("q", q)))
    check_cache_counts(description)
    rows = description.q.shape[0]
    if isinstance(call.attends, PackedCall) and rows > MOST_RAGGED_ROWS:
        raise ValueError(
            f"q must have at most {MOST_RAGGED_ROWS} rows where a sequence may have many queries, "
            f"got {rows}"
        )
    check_vectors(description)


def check_written(call: PreparedCacheCall, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Raise unless the call can write to its output, if it is given, and append to its caches."""
    q, k_cache, v_cache, *_, out = tensors
    if call.append is not None:
        check_writable("k_cache", k_cache)
        check_writable("v_cache", v_cache)
    if call.apart is not None:
        if out is not None:
            check_writable("out", out)
        call.apart(*addresses(tensors))
        return
    # The total of packed queries, and so of their output, is another one in every call.
    names = NAMES_BY_KIND[call.description.kind]
    if out is not None:
        check_out(out, call.output.shape_beside(q.shape), q, names[:-1], tensors[:-1])
    if call.append is not None:
        check_apart("k_cache", k_cache, ("q", *names[2:-1]), (q, *tensors[2:-1]))
        check_apart("v_cache", v_cache, ("q", *names[3:-1]), (q, *tensors[3:-1]))


# ------------------------------------------------------------------------- the int32 tensors


def with_integers_on_device(
    call: PreparedCacheCall,
    tensors: tuple[torch.Tensor | None, ...],
    length: int | None,  # of each sequence; None if cache_seqlens says it
) -> tuple[torch.Tensor | None, ...]:
    """The `TENSORS` with the int32 ones on q's device; checks what the host can see of them."""
    integers = tensors[OF_INTEGERS]
    if length is not None:
        integers = length, *integers[1:]
    if not any(value is not None and is_visible(value) for value in integers):
        return tensors
    description = call.description._replace(q=Operand(*describe("q", tensors[0])))
    values = values_on_host(description, integers)
    check_values(description, values, call.query_step)
    names = NAMES_BY_KIND[description.kind][OF_INTEGERS]
    on_gpu = (on_device(name, x, description) for name, x in zip(names, integers, strict=True))
    return *tensors[: OF_INTEGERS.start], *on_gpu, *tensors[OF_INTEGERS.stop :]


def on_device(
    name: str, value: int | torch.Tensor | None, call: AttentionCall
) -> torch.Tensor | None:
    """The value as a tensor on q's device; a number for each sequence."""
    device = call.q.device
    if isinstance(value, int):
        return torch.full((call.batch,), value, dtype=torch.int32, device=device)
    if value is None or value.device == device:
        return value
    if torch.cuda.is_current_stream_capturing():
        # The graph would copy it from the host again at every replay.
        raise RuntimeError(
            f"{name} must be on {device} while a CUDA graph is captured, got {value.device}"
        )
    # From pinned memory the copy would still run when the caller writes the next lengths.
    return (value.clone() if value.is_pinned() else value).to(device, non_blocking=True)
