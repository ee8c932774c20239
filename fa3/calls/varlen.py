"""`flash_attn_varlen_func`: packed sequences of different lengths, in one call.

Lengths on a GPU are read there only. What follows from heads, types and options is worked out once
and remembered, whatever the lengths are; what follows from lengths is looked at in every call, and
nothing of it is remembered. CPU tensors go to the reference.
"""

import functools

import torch

from fa3.calls import assertions, operators
from fa3.calls.assertions import is_visible
from fa3.calls.autograd import (
    DifferentiableCall,
    attend_differentiably,
    check_differentiable,
    wants_gradient,
)
from fa3.calls.backward import BackwardCall
from fa3.calls.call import (
    DESCALE_NAMES,
    LENGTHS_OF_PACKED,
    PACKED_ALIGNMENTS,
    AttentionCall,
    Described,
    Integers,
    are_of_batch,
    check_sizes,
    check_tensors,
    check_totals,
    describe_tensors,
    packed_tensors,
    without_lengths,
)
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.dropout import dropout_of
from fa3.calls.eager import is_traced
from fa3.calls.kvcache import attend_to_cache
from fa3.calls.modifiers import function_names, modifier_tensors, with_functions
from fa3.calls.operands import check_out, used_queries
from fa3.calls.operators import trace_attention
from fa3.calls.options import (
    PACKED,
    PAGED,
    VARLEN_FROM_FLASH_ATTENTION_2,
    Checked,
    Options,
    by_either_name,
    check_scale,
    integer,
    note_on_order,
    options_of,
    share_heads,
)
from fa3.calls.packed_calls import PackedCall
from fa3.calls.scales import Scales
from fa3.calls.scheduler_metadata import SchedulerMetadata, check_metadata
from fa3.calls.values import check_lengths
from fa3.complaints import kind_of
from fa3.planning import routes
from fa3.planning.gpu import H200
from fa3.planning.routes import PackedSizes, Signature
from fa3.problem import NO_BOUND, REMEMBERED
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import RaggedOperands
from fa3.scores.masks import Mask
from fa3.scores.scores import Score
from fa3.settings import check_settings


@operators.registers
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    scheduler_metadata: SchedulerMetadata | None = None,
    block_table: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(score(softmax_scale * q k^T) + mask) v inside of each packed sequence.

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and out, and the rows
    cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and v. If seqused_q or seqused_k is given, only the
    first seqused_q[b] or seqused_k[b] of them count. Rows that are not used may hold anything, NaN
    included. Query i of a sequence stands at key i + seqlen_k - seqlen_q, where lengths count used
    rows (bottom-right alignment). Query head h uses key/value head h // (heads_q / heads_kv).

    out and the log-sum-exp are differentiable by q, k, v and sinks, as in `flash_attn_func`. Rows
    that are not used get 0, and their incoming gradients are not read.

    CPU tensors run through `fa3.reference.varlen`; lengths are checked before anything is written.
    On a GPU the host never reads lengths, unless FA3_ASSERTIONS=1 is in the environment when fa3 is
    imported. Then every call waits for the GPU, and none can be captured in a CUDA graph. Once the
    kernels of a call exist, no length causes a compilation. Whatever lengths are, nothing outside
    of the tensors is read or written. If they break the rules below, the result is undefined.

    Args:
        q: (total_q, heads_q, head_dim), bfloat16, float16 or float8_e4m3fn, as in
            `flash_attn_func`; head_dim a multiple of 8 up to 256.
            Any strides that are multiples of 16 bytes with a contiguous last dimension.
        k: (total_k, heads_kv, head_dim), like q.
        v: (total_k, heads_kv, head_dim_v), like q; head_dim_v may differ from head_dim.
        cu_seqlens_q: (batch + 1,), int32, on q's device: 0, then where each sequence ends. The
            last one may be below total_q.
        cu_seqlens_k: like cu_seqlens_q, for k and v.
        max_seqlen_q: no sequence uses more queries; 0 or more.
        max_seqlen_k: no sequence uses more keys. With page_table nothing depends on it: the table
            says how many there may be.
        seqused_q: (batch,), int32, on q's device: how many queries of each sequence are used. What
            is above the sequence's length counts as if cut to it, and on a GPU what is below 0
            counts as 0.
        seqused_k: like seqused_q, for keys.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, score, mask: as in
            `flash_attn_func`. Positions count inside of a sequence, whose number is `batch`.
        deterministic, sm_margin: as in `flash_attn_func`.
        return_lse: also return the log-sum-exp. FlashAttention-3 calls this return_attn_probs,
            serving engines call it return_softmax_lse.
        out: (total_q, heads_q, head_dim_v) tensor that receives the output, like q. Rows of
            queries that are not used stay as they are. Must not share memory with another tensor
            of the call; it may lie between their elements.
        num_splits: 0 or 1. Keys are split for sequences with few queries, where that suits the
            GPU. With 0, keys of long sequences are split too, where few tiles would leave SMs idle
            and no gradient is wanted. With 1, FlashAttention-3's default, they are not, and neither
            with scheduler_metadata that was made with 1. With page_table as in
            `flash_attn_with_kvcache`: 1 splits no keys, and a larger number is the number of parts.
        pack_gqa: None or False, which are the same: query heads share tiles where queries are few.
            With page_table None or True. Anything if query heads share no key/value head.
        page_table: (batch, max_pages), int32: the pages of each sequence. Then k and v are a cache
            (num_pages, page_size, heads_kv, head_dim or head_dim_v) of any page size, seqused_k
            says how many keys each sequence has there, and cu_seqlens_k must be None, as vLLM
            calls it. The call is `flash_attn_with_kvcache` with cu_seqlens_q, which bounds what it
            finds there. All keys that window_size leaves may be read, also those that a mask of
            your own hides. dropout_p is not supported.
        dropout_p, rng_state: see `flash_attn_func`; queries and keys count inside of a sequence.
        scheduler_metadata: how to run, from `get_scheduler_metadata` with cu_seqlens_q; whatever
            the lengths are.
        block_table, s_aux: vLLM's names for page_table and sinks; FlashAttention-2 has the first.
        attention_chunk: 0 or None, which are the same: no chunks.
        q_descale, k_descale, v_descale: for q, k and v in float8_e4m3fn: with page_table as in
            `flash_attn_with_kvcache`, without as in `flash_attn_func`, a row for each sequence.
        qv: in the signature for compatibility; anything but None is not supported.

    Returns:
        out, (total_q, heads_q, head_dim_v), of q's dtype; with return_lse also the log-sum-exp of
        the scaled scores, (heads_q, total_q), float32, natural logarithm. A query that sees no key
        gives 0 and -inf, or 0 and its head's sink. Rows that belong to no query that is used are
        not written: without `out` they hold anything.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device, or a score or mask
            does not compile; on the CPU, or with FA3_ASSERTIONS=1, also if cu_seqlens_q or
            cu_seqlens_k do not cut the rows, a length is above its maximum, or seqused_q or
            seqused_k is negative.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        NotImplementedError: the combination is not supported, a gradient is wanted that does not
            exist (through a `score`, a second one), a tensor does not lie in memory, or a
            transform of torch.func or torch.jit.trace is active.

    Source: Dao et al., FlashAttention (arXiv 2205.14135); Shah et al., FlashAttention-3
        (arXiv 2407.08608); ALiBi: Press et al. (arXiv 2108.12409).
    """
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    kind = PACKED if page_table is None else PAGED
    descales = q_descale, k_descale, v_descale
    given = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, return_attn_probs,
        deterministic, dropout_p, return_softmax_lse, qv, pack_gqa,
        pack_gqa is None or share_heads(q, k),
    )  # fmt: skip
    if is_traced(q):
        return trace_attention(
            kind, window_size, given, q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            seqused_q=seqused_q, seqused_k=seqused_k, softmax_scale=softmax_scale,
            alibi_slopes=alibi_slopes, sinks=sinks, score=score, mask=mask, out=out,
            rng_state=rng_state, scheduler_metadata=scheduler_metadata,
        )  # fmt: skip
    longest = integer("max_seqlen_q", max_seqlen_q, 0), integer("max_seqlen_k", max_seqlen_k, 0)
    if scheduler_metadata is not None:
        check_metadata(scheduler_metadata)
    most_queries = None
    if page_table is not None:
        check_paged(cu_seqlens_q, cu_seqlens_k, seqused_k, dropout_p, rng_state)
        most_queries = longest[0]
    checked = options_of(
        kind, seqused_q, window_size, given, False, (most_queries, scheduler_metadata)
    )
    checked, function_tensors = with_functions(checked, q, score, mask, out)
    if page_table is not None:
        tensors = (
            q, k, v, None, None, None, None, seqused_k, None, None, page_table, None, cu_seqlens_q,
            None, seqused_q, None, *descales, alibi_slopes, sinks, out,
        )  # fmt: skip
        return attend_to_cache(tensors, checked, softmax_scale, None, function_tensors)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    tensors = q, k, v, *lengths, alibi_slopes, sinks, *descales
    return attend_packed_call(
        tensors, function_tensors, out, checked, longest, softmax_scale, rng_state
    )


def attend_packed_call(
    # Q, k, v, the `LENGTHS_OF_PACKED`, alibi_slopes, sinks and descales.
    tensors: tuple[torch.Tensor | None, ...],
    function_tensors: tuple[torch.Tensor, ...],  # of the user's score and mask
    out: torch.Tensor | None,
    checked: Checked,
    longest: tuple[int, int],  # max_seqlen_q and max_seqlen_k
    softmax_scale: float | None,
    rng_state: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What `flash_attn_varlen_func` gives for packed keys."""
    q, k, v, ends_q, ends_k, used_q, used_k, slopes, sinks, *descales = tensors
    integers = ends_q, ends_k, used_q, used_k
    options, returns_lse, deterministic, dropout_p, latest = checked
    call, _ = latest.find(tensors)
    if call is None or not are_of_batch(integers, slopes, batch := ends_q.shape[0] - 1, *descales):
        call, batch = describe_packed(tensors, checked)
    totals = check_totals(q.shape, k.shape, v.shape, batch)
    dropout = dropout_of(dropout_p, rng_state, q)
    scale = check_scale(softmax_scale, q.shape[-1])
    if options.metadata is not None and options.metadata.batch != batch:
        options.metadata.check(batch=batch)
    if is_visible(ends_q):
        check_lengths(integers, totals, longest)
        is_checked = not (options.softcap or call.signature.spec.is_fp8)
        if assertions.ASSERTIONS and batch and is_checked:
            used = used_queries(totals[0], ends_q, used_q), used_queries(totals[1], ends_k, used_k)
            assertions.check_scores(q, k, scale, used)
    (total_q, total_k), (longest_q, longest_k) = totals, longest
    longest = longest_q, longest_k = min(longest_q, total_q), min(longest_k, total_k)
    sizes = PackedSizes(batch, q.shape[1], total_q, total_k, longest_q, longest_k)
    scales = None
    if call.signature.spec.is_fp8:
        scales = Scales.on(q.device, (batch, k.shape[1]), True).of(*descales)
    run = call, integers, sizes, scale, dropout, scales
    read = modifier_tensors(slopes, function_tensors, sinks)
    if wants_gradient(q, k, v, sinks):
        scores = None if options.functions is None else options.functions.scores or None
        check_differentiable(q, k, v, sinks, scores, out)
        spec, window, gpu = call.signature.spec, call.signature.window, call.signature.gpu
        backward = BackwardCall((spec, window), longest, scale, deterministic, gpu.num_sms)
        attend = functools.partial(attend_packed, run)
        differentiable = DifferentiableCall(attend, backward, integers, dropout, returns_lse)
        return attend_differentiably(differentiable, q, k, v, *(read or ()))
    if out is not None:
        names = ("q", "k", "v", *LENGTHS_OF_PACKED, "alibi_slopes", "sinks", *DESCALE_NAMES)
        others = *tensors, *function_tensors
        shape = *q.shape[:2], call.signature.spec.head_dim_v
        names = *names, *function_names(options)
        check_out(out, shape, q, names, others, call.signature.spec.out_dtype)
    out, lse = attend_packed(run, q, k, v, read, out, returns_lse, False)
    return (out, lse) if returns_lse else out


def describe_packed(
    tensors: tuple[torch.Tensor | None, ...], checked: Checked
) -> tuple[PackedCall, int]:
    """What a call on packed keys leads to, and the number of its sequences."""
    used_q = tensors[5]
    if not (used_q is None or isinstance(used_q, torch.Tensor)):
        came, note = kind_of(used_q), note_on_order(used_q, VARLEN_FROM_FLASH_ATTENTION_2)
        raise TypeError(f"seqused_q must be a torch.Tensor, got {came}{note}")
    described = describe_tensors(PACKED, packed_tensors(*tensors))
    batch = check_sizes(described)
    call = prepare_varlen(without_lengths(described), checked.options)
    checked.latest.remember(tensors, PACKED_ALIGNMENTS, range(7), call, (0, 1, 2, 8))
    return call, batch


PackedRun = tuple[
    PackedCall, Integers, PackedSizes, float, Dropout | None, tuple[torch.Tensor, ...] | None
]
"""A call without the tensors that may have a gradient: what it leads to, the `PackedLengths`, the
sizes, the scale, dropout and the scales of FP8 tensors. A plain tuple: another one takes the host
0.3 us."""


def attend_packed(
    run: PackedRun,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: tuple[torch.Tensor, ...] | None,
    out: torch.Tensor | None = None,
    returns_lse: bool = True,
    has_gradients: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write out, or a new tensor; return it with the log-sum-exp, None if it is not wanted."""
    call, lengths, sizes, scale, dropout, scales = run
    total_q, heads = sizes.total_q, sizes.heads
    if out is None:
        # Sizes one by one, here and below: in a tuple they would take torch 0.4 us more.
        dtype = q.dtype if scales is None else torch.bfloat16
        out = q.new_empty(total_q, heads, call.signature.spec.head_dim_v, dtype=dtype)
    lse = q.new_empty(heads, total_q, dtype=torch.float32) if returns_lse else None
    # In half the time that the class itself takes.
    operands = tuple.__new__(RaggedOperands, (q, k, v, out, lse, *lengths))
    call.attend(operands, sizes, tensors, scale, dropout, has_gradients, descales=scales)
    return out, lse


def check_paged(ends_q, ends_k, used_k, dropout_p, rng_state) -> None:
    """Raise unless a call on pages says how many keys each sequence has, and nothing else of it."""
    if ends_q is None:
        raise TypeError("cu_seqlens_q must be a torch.Tensor, got NoneType")
    if used_k is None:
        raise ValueError("seqused_k must be given with page_table: the keys of each sequence")
    if ends_k is not None:
        raise ValueError("cu_seqlens_k must be None with page_table: seqused_k says the lengths")
    for name, given in (("dropout_p", dropout_p or None), ("rng_state", rng_state)):
        if given is not None:
            raise NotImplementedError(f"{name} is not supported with page_table")


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_varlen(described: Described, options: Options) -> PackedCall:
    """Validate what no length changes, and load the kernels.

    Args:
        described: the tensors `without_lengths`.
    """
    check_settings()
    call = AttentionCall.of(described, PACKED)
    check_tensors(call)
    if options.metadata is not None:
        options.metadata.check_call(call, options)
        options = options.metadata.applied_to(options)
    spec, window = call.packed_spec(options)
    on_gpu = call.q.device.type == "cuda"
    gpu = reserve_sms(gpu_of(call.q.device) if on_gpu else H200, options.sm_margin)
    signature = Signature(
        routes.PACKED, spec, window, call.heads_q, call.heads_kv, gpu, options.sm_margin,
        has_used_q=call.seqused_q is not None, has_used_k=call.seqused_k is not None,
        num_splits=options.num_splits,
    )  # fmt: skip
    return PackedCall.of(signature, on_gpu)
