"""`flash_attn_varlen_func`: packed sequences of different lengths, in one call.

Lengths on a GPU are read there only. What follows from heads, types and options is worked out once
and remembered, whatever the lengths are; what follows from lengths is looked at in every call, and
nothing of it is remembered, but for the latest lengths that a call had on the CPU too
(`fa3.calls.known_lengths`). CPU tensors go to the reference.
"""

import functools
from dataclasses import replace

import torch

from fa3.calls import assertions, operators, varlen_gpu
from fa3.calls.assertions import is_visible, read_back
from fa3.calls.autograd import (
    DifferentiableCall,
    attend_differentiably,
    check_differentiable,
    wants_gradient,
)
from fa3.calls.backward import BackwardCall
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.dropout import dropout_of
from fa3.calls.eager import is_traced
from fa3.calls.forward import FORWARD_OPTIONS
from fa3.calls.known_lengths import HostSeqlens
from fa3.calls.latest import FastPath
from fa3.calls.modifiers import UNMODIFIED, Modifiers, ModifierSpec
from fa3.calls.operands import ALIGNMENT, check_apart, check_writable, describe
from fa3.calls.options import (
    VARLEN_FROM_FLASH_ATTENTION_2,
    Options,
    as_pair,
    by_either_name,
    check_scale,
    check_window,
    integer,
    note_on_order,
    reject_unsupported,
    share_heads,
)
from fa3.calls.paged import attend_to_pages
from fa3.calls.ragged import (
    INTEGERS_OF_LENGTHS,
    Integers,
    Tokens,
    are_of_batch,
    check_integers,
    check_lengths,
    check_ragged_out,
    check_totals,
    describe_integers,
    spec_of_packed,
    tokens_of,
    used_queries,
)
from fa3.calls.scheduler_metadata import IN_METADATA, PackedMetadata, check_packed_metadata
from fa3.calls.traced import trace_attention
from fa3.calls.varlen_call import RaggedCall, plan_varlen
from fa3.planning.gpu import H200
from fa3.planning.routes import PackedSizes
from fa3.problem import NO_BOUND, REMEMBERED
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import RaggedOperands
from fa3.scores.masks import Mask
from fa3.scores.scores import Score
from fa3.settings import check_settings

VARLEN_OPTIONS = Options(*FORWARD_OPTIONS.names, "return_softmax_lse")


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
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
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
    scheduler_metadata: PackedMetadata | None = None,
    cu_seqlens_q_cpu: torch.Tensor | None = None,
    cu_seqlens_k_cpu: torch.Tensor | None = None,
    seqused_q_cpu: torch.Tensor | None = None,
    seqused_k_cpu: torch.Tensor | None = None,
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
        q: (total_q, heads_q, head_dim), bfloat16 or float16; head_dim a multiple of 8 up to 256.
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
        softmax_scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        causal: hide the keys after a query's own position.
        window_size: keys that a query sees before and after its own position, as (left, right);
            -1 for all. causal sets right to 0, whatever it is.
        softcap: bound of the scores: cap * tanh(score / cap); 0 for none. Applied before
            everything else that changes scores.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + seqlen_k - seqlen_q - j| to the score of query i and key j of a sequence.
        sinks: (heads_q,), float32 or q's dtype: a logit that joins the denominator of its
            head's softmax, and so the log-sum-exp.
        score: a function of scores of your own, see `fa3.Score`; applied last. Positions count
            inside of a sequence, whose number is `batch`.
        mask: a mask of your own, see `fa3.Mask`; joined with causal and window_size.
        deterministic: give the same bits of dQ every time; all else always has the same.
        sm_margin: SMs to leave to other kernels.
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
            your own hides. dropout_p is not supported, nor seqused_q with scheduler_metadata.
        dropout_p, rng_state: see `flash_attn_func`; queries and keys count inside of a sequence.
        scheduler_metadata: what was planned for these lengths, from `get_scheduler_metadata` with
            cu_seqlens_q. Must be made anew when lengths change, also for a CUDA graph: where the
            lengths are others the result is undefined, but nothing outside of the tensors is read
            or written.
        cu_seqlens_q_cpu, cu_seqlens_k_cpu, seqused_q_cpu, seqused_k_cpu: the same lengths once
            more, on the CPU; those that are given, or none. Then the call plans by itself, and
            calls like it that follow with the same lengths use the plan. Undefined like
            scheduler_metadata where lengths are others. None with page_table.
        block_table, s_aux: vLLM's names for page_table and sinks; FlashAttention-2 has the first.
        attention_chunk: 0 or None, which are the same: no chunks.
        qv, q_descale, k_descale, v_descale: in the signature for compatibility; anything but None
            is not supported.

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
    if (
        type(causal), type(deterministic), type(return_lse), type(return_attn_probs),
        type(attention_chunk), type(num_splits), type(sm_margin), type(softcap),
        type(dropout_p), type(return_softmax_lse),
    ) != VARLEN_OPTIONS.types:  # fmt: skip
        (
            causal, deterministic, return_lse, return_attn_probs, attention_chunk, num_splits,
            sm_margin, softcap, dropout_p, return_softmax_lse,
        ) = VARLEN_OPTIONS.converted(
            causal, deterministic, return_lse, return_attn_probs, attention_chunk, num_splits,
            sm_margin, softcap, dropout_p, return_softmax_lse,
            note=note_on_order(seqused_q, VARLEN_FROM_FLASH_ATTENTION_2),
        )  # fmt: skip
    return_lse = return_lse or return_attn_probs or return_softmax_lse
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    on_host = cu_seqlens_q_cpu, cu_seqlens_k_cpu, seqused_q_cpu, seqused_k_cpu
    if page_table is not None:
        check_paged(cu_seqlens_q, cu_seqlens_k, seqused_k, dropout_p, rng_state, on_host)
        integer("max_seqlen_k", max_seqlen_k, 0)
        if not (qv is q_descale is k_descale is v_descale is pack_gqa is None) or attention_chunk:
            reject_unsupported(
                attention_chunk, pack_gqa, has_packing=True, shares_heads=share_heads(q, k),
                qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            )  # fmt: skip
        return attend_to_pages(
            q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_q, seqused_k, page_table, return_lse,
            score, mask, scheduler_metadata, num_splits, softmax_scale, causal, window_size,
            softcap, sm_margin, alibi_slopes, sinks,
        )  # fmt: skip
    if (
        not (qv is q_descale is k_descale is v_descale is pack_gqa is None)
        or attention_chunk
        or num_splits not in (0, 1)
    ):
        reject_unsupported(
            attention_chunk, pack_gqa, has_packing=False, shares_heads=share_heads(q, k),
            num_splits=num_splits, qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale,
        )  # fmt: skip
    window_size = as_pair(window_size)
    if is_traced(q):
        return trace_attention(
            operators.PACKED, return_lse, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            seqused_q=seqused_q, seqused_k=seqused_k, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, num_splits=num_splits,
            deterministic=deterministic, sm_margin=sm_margin, alibi_slopes=alibi_slopes,
            sinks=sinks, score=score, mask=mask, out=out, dropout_p=dropout_p, rng_state=rng_state,
            scheduler_metadata=scheduler_metadata, cu_seqlens_q_cpu=cu_seqlens_q_cpu,
            cu_seqlens_k_cpu=cu_seqlens_k_cpu, seqused_q_cpu=seqused_q_cpu,
            seqused_k_cpu=seqused_k_cpu,
        )  # fmt: skip
    max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
    max_seqlen_k = integer("max_seqlen_k", max_seqlen_k, 0)
    integers = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    if scheduler_metadata is not None:
        sm_margin = check_packed_metadata(scheduler_metadata, sm_margin)
    tensors = q, k, v, *integers
    latest = latest_packed_call(causal, window_size, softcap, sm_margin)
    tokens, (call, _) = None, latest.find(tensors)
    if call is None or not are_of_batch(integers, batch := cu_seqlens_q.shape[0] - 1):
        call, tokens, batch = None, *describe_packed(q, k, v, integers)
    total_q, total_k = check_totals(q.shape, k.shape, v.shape, batch)
    modifiers = UNMODIFIED
    if softcap or not (alibi_slopes is sinks is score is mask is None):
        is_causal = check_window(window_size, causal).right == 0
        modifiers = Modifiers.of(
            q, batch, softcap, alibi_slopes, sinks, score, mask, is_causal, has_backward=True
        )
    structure, dropout = modifiers.structure, None
    if dropout_p or rng_state is not None:
        dropout = dropout_of(dropout_p, rng_state, q)
        structure = structure._replace(has_dropout=True)
    if call is None or call.structure != structure:
        tokens = tokens or describe_packed(q, k, v, integers)[0]
        call = prepare_varlen(
            *tokens, seqused_q is not None, seqused_k is not None, causal, window_size,
            structure, sm_margin,
        )  # fmt: skip
        latest.remember(tensors, PACKED_ALIGNMENTS, OF_ANY_LENGTH, call, has_backward=True)
    scale = check_scale(softmax_scale, call.spec.head_dim)
    known = None
    if scheduler_metadata is not None or cu_seqlens_q_cpu is not None:
        known = known_lengths(
            scheduler_metadata, on_host, integers, call, q, k, batch, (window_size, causal),
            softcap, num_splits == 0,
        )  # fmt: skip
        if known is not None:
            names = names_of_known(scheduler_metadata)
            known.check_fit(names, batch, (total_q, total_k), (max_seqlen_q, max_seqlen_k))
    elif not (cu_seqlens_k_cpu is seqused_q_cpu is seqused_k_cpu is None):
        raise ValueError("cu_seqlens_q_cpu must be given like cu_seqlens_q, with other lengths")
    if is_visible(cu_seqlens_q):
        check_lengths(integers, (total_q, total_k), (max_seqlen_q, max_seqlen_k))
        if assertions.ASSERTIONS and batch and not softcap:
            used_q = used_queries(total_q, cu_seqlens_q, seqused_q)
            used_k = used_queries(total_k, cu_seqlens_k, seqused_k)
            assertions.check_scores(q, k, scale, (used_q, used_k))
        if known is not None:
            seen = map(read_back, INTEGERS_OF_LENGTHS, integers)
            known.check_same(names_of_known(scheduler_metadata), *seen)
    longest = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)
    sizes = PackedSizes(batch, q.shape[1], total_q, total_k, *longest)
    splits = num_splits == 0
    if scheduler_metadata is not None:
        splits = splits and scheduler_metadata.calls.num_splits == 0
    run = call, integers, sizes, scale, dropout, known, splits
    if wants_gradient(q, k, v, sinks):
        check_differentiable(q, k, v, sinks, score, out)
        problem, num_sms = (call.spec, call.window), call.plan.gpu.num_sms
        backward = BackwardCall(problem, longest, scale, deterministic, num_sms)
        attend = functools.partial(attend_packed, run)
        given = DifferentiableCall(attend, backward, integers, dropout, return_lse)
        return attend_differentiably(given, q, k, v, *(modifiers.tensors or ()))
    if out is not None:
        check_packed_out(out, call, q, (q, k, v, *integers), modifiers)
    out, lse = attend_packed(run, q, k, v, modifiers.tensors, out, return_lse, False)
    return (out, lse) if return_lse else out


PackedRun = tuple[
    RaggedCall, Integers, PackedSizes, float, Dropout | None, HostSeqlens | None, bool
]
"""A call without the tensors that may have a gradient: what it leads to, the `PackedLengths`, the
sizes, the scale, and dropout, `known` and `splits` of `RaggedCall.attend`. A plain tuple: another
one takes the host 0.3 us."""


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
    call, lengths, sizes, scale, dropout, known, splits = run
    total_q, heads = sizes.total_q, sizes.heads
    if out is None:
        # Sizes one by one, here and below: in a tuple they would take torch 0.4 us more.
        out = q.new_empty(total_q, heads, call.spec.head_dim_v)
    lse = q.new_empty(heads, total_q, dtype=torch.float32) if returns_lse else None
    operands = RaggedOperands(q, k, v, out, lse, *lengths)
    call.attend(operands, sizes, tensors, scale, dropout, has_gradients, known=known, splits=splits)
    return out, lse


def check_packed_out(
    out: torch.Tensor,
    call: RaggedCall,
    q: torch.Tensor,
    operands: tuple[torch.Tensor | None, ...],
    modifiers: Modifiers,
) -> None:
    """Raise unless a call can write its output to a tensor of the caller's.

    Args:
        operands: q, k, v and the lengths.
    """
    shape, q_rows = (*q.shape[:2], call.spec.head_dim_v), describe("q", q, ALIGNMENT, True)
    check_ragged_out(out, describe("out", out), shape, q_rows)
    check_writable("out", out)
    names = "q", "k", "v", *INTEGERS_OF_LENGTHS, *modifiers.structure.names
    check_apart("out", out, names, (*operands, *(modifiers.tensors or ())))


PACKED_ALIGNMENTS = (ALIGNMENT,) * 3 + (1,) * 4
"""Bytes to which q, k, v and the integer tensors must be aligned."""

OF_ANY_LENGTH = range(7)
"""All of them: rows and sequences may be more or fewer in each call."""


@functools.lru_cache(maxsize=REMEMBERED)
def latest_packed_call(*options: object) -> FastPath[RaggedCall]:
    """The latest call with these options."""
    return FastPath()


def describe_packed(q, k, v, integers: Integers) -> tuple[tuple[tuple, ...], int]:
    """Look at the tensors of a call one by one.

    Returns:
        the fields of the `Tokens` of q, k and v, and the number of sequences.

    Raises:
        TypeError, ValueError, NotImplementedError: one of them is not what it must be, whatever
            q, k and v are to each other.
    """
    described = (
        describe("q", q, ALIGNMENT, True),
        describe("k", k, ALIGNMENT, True),
        describe("v", v, ALIGNMENT, True),
    )
    lengths_described = describe_integers(integers)
    tokens = tuple(map(tokens_of, "qkv", described))
    return tokens, check_integers(lengths_described, described[0])


LENGTHS_ON_HOST = tuple(f"{name}_cpu" for name in INTEGERS_OF_LENGTHS)
"""The lengths once more, on the CPU."""


def names_of_known(metadata: PackedMetadata | None) -> tuple[str, ...]:
    """The arguments that lengths come from which the host knows: of `INTEGERS_OF_LENGTHS` each."""
    return LENGTHS_ON_HOST if metadata is None else IN_METADATA


def known_lengths(
    metadata: PackedMetadata | None,
    on_host: tuple[torch.Tensor | None, ...],
    integers: Integers,
    call: RaggedCall,
    q: torch.Tensor,
    k: torch.Tensor,
    batch: int,
    window: tuple[tuple[int, int], bool],
    softcap: float,
    may_cut: bool,
) -> HostSeqlens | None:
    """The lengths that the host knows: from metadata, or from tensors on the CPU.

    Args:
        window: window_size and causal.
        may_cut: whether tiles may be cut where lengths are in tensors; metadata says it itself.

    Raises:
        TypeError, ValueError: what is given is not what the call needs.
    """
    if metadata is None:
        for name, one, of_call in zip(LENGTHS_ON_HOST, on_host, integers, strict=True):
            if (one is None) != (of_call is None):
                given = "None" if of_call is None else "given"
                raise ValueError(f"{name} must be {given} like {name.removesuffix('_cpu')}")
        return call.latest.of(LENGTHS_ON_HOST, on_host, batch, may_cut)
    ends_q, ends_k, used_q, used_k = on_host
    if not (ends_q is ends_k is used_q is used_k is None):
        raise ValueError(f"{' and '.join(LENGTHS_ON_HOST)} must be None with scheduler_metadata")
    if metadata.fitting is not call:
        spec = call.spec
        metadata.check(
            has_packed_keys=True,
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            dtype=q.dtype,
            window=check_window(*window),
            has_softcap=bool(softcap),
        )
        if metadata.lengths is not None:
            metadata.lengths.check_used(*integers[2:])
        metadata.fitting = call
    if metadata.calls.batch != batch:
        metadata.check(batch=batch)
    return metadata.lengths


def check_paged(cu_seqlens_q, cu_seqlens_k, seqused_k, dropout_p, rng_state, on_host) -> None:
    """Raise unless a call on pages says how many keys each sequence has, and nothing else of it."""
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q must be a torch.Tensor, got NoneType")
    if seqused_k is None:
        raise ValueError("seqused_k must be given with page_table: the keys of each sequence")
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k must be None with page_table: seqused_k says the lengths")
    refused = {
        "dropout_p": dropout_p or None, "rng_state": rng_state,
        **dict(zip(LENGTHS_ON_HOST, on_host, strict=True)),
    }  # fmt: skip
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(f"{name} is not supported with page_table")


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_varlen(
    q: tuple,
    k: tuple,
    v: tuple,
    has_used_q: bool,
    has_used_k: bool,
    causal: bool,
    window_size: tuple[int, int],
    modifiers: ModifierSpec,
    sm_margin: int,
) -> RaggedCall:
    """Validate what no length changes, and load the kernels. q, k and v are of `Tokens`."""
    check_settings()
    q, k, v = Tokens(*q), Tokens(*k), Tokens(*v)
    spec, window = spec_of_packed(q, k, v, causal, window_size, modifiers)
    is_on_host = q.device.type == "cpu"
    gpu = reserve_sms(H200 if is_on_host else gpu_of(q.device), sm_margin)
    heads = q.shape[0], k.shape[0]
    call = plan_varlen(spec, modifiers, window, *heads, has_used_q, has_used_k, gpu, sm_margin)
    if is_on_host:
        return call
    return replace(call, gpu=varlen_gpu.prepare(call.signature))
