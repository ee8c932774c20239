"""The public functions: dense, packed, and on a key/value cache.

Each hands its arguments on by name, and `run_call` does the rest. What follows from shapes,
strides, types and options is worked out once and remembered (`fa3.calls.prepare`). The latest calls
are found again without describing their tensors (`fa3.calls.latest`). An argument that several
functions share is described in `flash_attn_func`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active

from fa3.calls import operators
from fa3.calls import values as host_values
from fa3.calls.backward import (
    BackwardCall,
    attend_differentiably,
    check_differentiable,
    wants_gradient,
)
from fa3.calls.call import (
    ALIGNMENTS,
    NO_VALUES,
    WITH_GRADIENT,
    check_totals,
    describe_tensors,
    have_one_batch,
    prepare_without_lengths,
)
from fa3.calls.eager import is_traced
from fa3.calls.latest import FastPath
from fa3.calls.modifiers import dropout_of, functions_of, modifier_tensors
from fa3.calls.operands import ALIGNMENT, check_writable, describe
from fa3.calls.operators import trace_attention
from fa3.calls.options import (
    CACHED,
    DENSE,
    NO_FUNCTIONS,
    NOTE_ON_ORDER,
    PACKED,
    PAGED,
    Options,
    by_either_name,
    check_scale,
    default_pack_gqa,
    integer,
    options_of,
    real,
)
from fa3.calls.prepare import PreparedAttention, prepare_call, query_step
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.calls.values import check_numbers, check_scores
from fa3.complaints import kind_of
from fa3.planning.planner import Plan, ScheduleChoice
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

MUST_SAY_LONGEST = frozenset((PACKED, PAGED))  # calls that must say max_seqlen_q and max_seqlen_k


@operators.registers
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
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
    out: torch.Tensor | None = None,
    schedule: ScheduleChoice = None,
    plan: Plan | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(score(softmax_scale * q k^T) + mask) v.

    Query i stands at key i + seqlen_k - seqlen_q (bottom-right alignment). Several query heads
    may share one key/value head (GQA, MQA): query head h uses key/value head
    h // (heads_q / heads_kv). Runs on the current stream of the tensors' GPU; CPU tensors run
    through `fa3.reference.walker`. q, k, v and sinks may require grad: out and the log-sum-exp are
    then differentiable by them, once.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16; head_dim a multiple of 8
            up to 256. Any strides that are multiples of 16 bytes with a contiguous last dimension.
            Or float8_e4m3fn, without gradients: then head sizes are multiples of 32, and k and v
            are of the same dtype. The output is then bfloat16 or, with such an `out`, float16.
        k: (batch, seqlen_k, heads_kv, head_dim), like q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), like q; head_dim_v may differ from head_dim. In
            FP8 also V^T, in the layout that docs/conventions.md describes.
        softmax_scale: factor of the scores, positive; 1 / sqrt(head_dim) by default.
        causal: hide the keys after a query's own position.
        window_size: keys that a query sees before and after its own position, as (left, right);
            -1 for all. causal sets right to 0, whatever it is.
        softcap: bound of the scores: cap * tanh(score / cap); 0 for none. Applied before
            everything else that changes scores.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32: adds
            -slope |i + seqlen_k - seqlen_q - j| to the score of query i and key j.
        sinks: (heads_q,), float32 or q's dtype: a logit that joins the denominator of its
            head's softmax, and so the log-sum-exp.
        score: a function of scores of your own, see `fa3.Score`; applied last. Has no gradient.
        mask: a mask of your own, see `fa3.Mask`; joined with causal and window_size.
        deterministic: whether dQ must have the same bits every time, for which key tiles wait for
            each other on a GPU. Out, dK and dV always have.
        sm_margin: SMs to leave to other kernels, also in the backward pass.
        return_lse: also return the log-sum-exp. return_attn_probs is FlashAttention-3's name
            for the same.
        out: (batch, seqlen_q, heads_q, head_dim_v) tensor that receives the output, like q, or
            float32; bfloat16 or float16 with q in FP8. Must not share memory with another tensor
            of the call; it may lie between their elements, as halves of one buffer do. Not with
            gradients.
        schedule: the order of the tiles: "single", "static", "list", "dynamic", "split", a class
            of `fa3.schedules` or an object of one, or a function from the list of `fa3.Tile` to
            their order; chosen by the planner if not given. If the planner pairs CTAs, the list
            has a tile for each pair. No order changes a bit of the output; "split" computes parts
            of tiles and adds them up, which changes the last place. A function is called once for
            every shape: pass the same one each time.
        plan: how to run, from `fa3.plan_forward`; chosen by the planner if not given.
        dropout_p: how likely a value's weight is dropped, in [0, 1); what is kept is divided by
            1 - dropout_p. It is rounded to a multiple of 2**-16, and to 0.996 from there on. The
            log-sum-exp is the one without dropout.
        rng_state: (1,), int64, on q's device: the seed of dropout, which `fa3.dropout_mask` takes
            too. By default it is drawn from torch's default generator of the device, in a CUDA
            graph anew at each replay.
        num_splits: 0 or 1, which are the same: the planner decides whether to split.
        pack_gqa: whether the query heads of a key/value head share tiles, in the decode kernel,
            which pays with few queries; chosen by the planner if not given. True is refused with
            gradients, out in float32, dropout, a schedule, a plan, and a score or a mask of yours.
        q_descale, k_descale, v_descale: (batch, heads_kv), float32, positive: what q, k and v in
            FP8 are multiplied by; 1 by default. Any strides, also 0.
        attention_chunk, qv: for compatibility. Only None is supported, and 0 for no chunks.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), of q's dtype, bfloat16 for FP8; with
        return_lse also the log-sum-exp of the scaled scores, (batch, heads_q, seqlen_q), float32,
        natural logarithm. A query that sees no key gives 0 and -inf, or 0 and its head's sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device; a score or mask does
            not compile; a tensor requires grad that would get none.
        NotImplementedError: the combination is not supported; a gradient is wanted that does not
            exist (through a `score`, a second one); a tensor has no memory; a transform of
            torch.func or torch.jit.trace is active.

    Source: Dao et al., FlashAttention (arXiv 2205.14135); Shah et al., FlashAttention-3
        (arXiv 2407.08608); ALiBi: Press et al. (arXiv 2108.12409).
    """
    values = NO_VALUES.copy()
    values["q"], values["k"], values["v"] = q, k, v
    values["out"], values["softmax_scale"] = out, softmax_scale
    # To ask for None takes a third of the time that it takes to store it.
    if not (score is mask is rng_state is None):
        values["score"], values["mask"], values["rng_state"] = score, mask, rng_state
    if not (alibi_slopes is sinks is q_descale is k_descale is v_descale is None):
        values["alibi_slopes"], values["sinks"] = alibi_slopes, sinks
        values["q_descale"], values["k_descale"] = q_descale, k_descale
        values["v_descale"] = v_descale
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, pack_gqa, qv,
        return_attn_probs, deterministic, dropout_p, schedule, plan,
    )  # fmt: skip
    return run_call(DENSE, values, window_size, options)


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

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and out. Of k and v it has
    the rows cu_seqlens_k[b] to cu_seqlens_k[b + 1]. If seqused_q or seqused_k is given, only the
    first seqused_q[b] or seqused_k[b] of them count. Rows that are not used may hold anything, NaN
    included; they get the gradient 0. All else is inside of a sequence as in a batch of
    `flash_attn_func`, where lengths count used rows.

    CPU tensors run through `fa3.reference`; lengths are checked before anything is written. On a
    GPU the host never reads lengths, unless FA3_ASSERTIONS=1 is in the environment when fa3 is
    imported. Then every call waits for the GPU, and none can be captured in a CUDA graph. Once the
    kernels of a call exist, no length causes a compilation. Whatever lengths are, nothing outside
    of the tensors is read or written. If they break the rules below, the result is undefined.

    Args:
        q: (total_q, heads_q, head_dim), as in `flash_attn_func`.
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
        out: (total_q, heads_q, head_dim_v), as in `flash_attn_func`; with page_table as in
            `flash_attn_with_kvcache`. Rows of queries that are not used stay as they are.
        num_splits: 0 or 1. Keys are split for sequences with few queries, where that suits the
            GPU. With 0, keys of long sequences are split too, where few tiles would leave SMs idle
            and no gradient is wanted. With 1, FlashAttention-3's default, they are not, nor with
            scheduler_metadata that was made with 1. With page_table as in
            `flash_attn_with_kvcache`: 1 splits no keys, and a larger number is the number of parts.
        pack_gqa: None or False, which are the same: query heads share tiles where queries are few.
            With page_table None or True. Anything if query heads share no key/value head.
        page_table: (batch, max_pages), int32: the pages of each sequence. Then k and v are a cache
            (num_pages, page_size, heads_kv, head_dim or head_dim_v) of any page size. seqused_k
            says how many keys each sequence has there; cu_seqlens_k must be None. The call is
            `flash_attn_with_kvcache` with cu_seqlens_q, which bounds what it finds there. All keys
            that window_size leaves may be read, also those that a mask of your own hides. dropout_p
            is not supported.
        scheduler_metadata: how to run, from `get_scheduler_metadata` with cu_seqlens_q; whatever
            the lengths are.
        block_table, s_aux: vLLM's names for page_table and sinks; FlashAttention-2 has the first.
        return_softmax_lse: the name that serving engines have for return_lse.
        q_descale, k_descale, v_descale: as in `flash_attn_func`, or with page_table as in
            `flash_attn_with_kvcache`, a row for each sequence.
        softmax_scale and the others: as in `flash_attn_func`. `batch` is the sequence's number.

    Returns:
        out, (total_q, heads_q, head_dim_v), and with return_lse the log-sum-exp,
        (heads_q, total_q), as in `flash_attn_func`. Rows that belong to no query that is used are
        not written: without `out` they hold anything.

    Raises:
        ValueError: as `flash_attn_func`; on the CPU, or with FA3_ASSERTIONS=1, also if cu_seqlens_q
            or cu_seqlens_k do not cut the rows, a length is above its maximum, or seqused_q or
            seqused_k is negative.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        TypeError, NotImplementedError: as `flash_attn_func`.

    Source: as `flash_attn_func`.
    """
    if not (block_table is s_aux is None):
        page_table = by_either_name("page_table", page_table, "block_table", block_table)
        sinks = by_either_name("sinks", sinks, "s_aux", s_aux)
    kind = PACKED
    if page_table is not None:
        check_paged(cu_seqlens_q, cu_seqlens_k, seqused_k, dropout_p, rng_state)
        kind = PAGED
    if pack_gqa is not None:
        pack_gqa = default_pack_gqa(pack_gqa, q, k)
    values = NO_VALUES.copy()
    values["q"], values["k"], values["v"] = q, k, v
    values["out"], values["softmax_scale"], values["page_table"] = out, softmax_scale, page_table
    values["cu_seqlens_q"], values["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_k
    values["seqused_q"], values["seqused_k"] = seqused_q, seqused_k
    values["max_seqlen_q"], values["max_seqlen_k"] = max_seqlen_q, max_seqlen_k
    if not (score is mask is rng_state is None):
        values["score"], values["mask"], values["rng_state"] = score, mask, rng_state
    if not (alibi_slopes is sinks is q_descale is k_descale is v_descale is None):
        values["alibi_slopes"], values["sinks"] = alibi_slopes, sinks
        values["q_descale"], values["k_descale"] = q_descale, k_descale
        values["v_descale"] = v_descale
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, pack_gqa, qv,
        return_attn_probs, deterministic, dropout_p, return_softmax_lse,
    )  # fmt: skip
    return run_call(kind, values, window_size, options, scheduler_metadata)


def check_paged(ends_q, ends_k, used_k, dropout_p, rng_state) -> None:
    """Raise unless a call on pages has seqused_k alone, without dropout."""
    if ends_q is None:
        raise TypeError("cu_seqlens_q must be a torch.Tensor, got NoneType")
    if used_k is None:
        raise ValueError("seqused_k must be given with page_table: the keys of each sequence")
    if ends_k is not None:
        raise ValueError("cu_seqlens_k must be None with page_table: seqused_k says the lengths")
    refused = {"dropout_p": real("dropout_p", dropout_p), "rng_state": rng_state is not None}
    for name, is_asked in refused.items():
        if is_asked:
            raise NotImplementedError(f"{name} is not supported with page_table")


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
    """Append k and v to a cache in place; attend to it.

    Positions and heads are as in `flash_attn_func`, where a sequence's length counts the appended
    tokens.

    The int32 tensors may be on q's GPU or on the CPU. Tensors on the CPU are checked before
    anything is written. Tensors on the GPU are never read by the host, so the call can be captured
    in a CUDA graph. Whatever they hold, nothing outside of the cache is read or written. Lengths
    and paddings are clamped to what the cache can hold. Tokens without a place in it, past its end
    or in a row or page that does not exist, are not appended. A position past the rotary tables
    uses their last row. A sequence whose row, pages or part of k do not exist gets an undefined
    result. Pages and keys that no sequence uses never reach the result, whatever they hold.

    With FA3_ASSERTIONS=1 in the environment when fa3 is imported, tensors on the GPU are checked
    like tensors on the CPU. They are read back before any launch, as in `flash_attn_varlen_func`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16, as in `flash_attn_func`; with
            cu_seqlens_q (total_q, heads_q, head_dim).
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
        rotary_interleaved: whether columns 2i and 2i + 1 turn together; otherwise i and
            i + rotary_dim / 2 do (GPT-NeoX).
        scheduler_metadata: how to run, from `get_scheduler_metadata`.
        num_splits: parts into which the keys of a sequence are cut; by default as suits the GPU.
            The result does not depend on it but for rounding. From 1 on, batch_invariant changes
            nothing: how a sequence is cut then depends on its own length only.
        pack_gqa: the query heads of a key/value head always share its reads: None or True; anything
            if each has a single query head.
        batch_invariant: make the result of a sequence, to the last bit, independent of the other
            sequences, its place among them and their number. May be slower. Takes memory for 32
            parts of a sequence, or for more if these would exceed 512 keys. From 17 query rows of
            a key/value head on, the limit is 2048 keys.
        out: as in `flash_attn_func`, but like q, or bfloat16 if q is FP8. Caches that are appended
            to must not share memory with another tensor of the call either.
        block_table, s_aux: as in `flash_attn_varlen_func`.
        q_descale, k_descale, v_descale: as in `flash_attn_func`, of q, k_cache and v_cache. New
            tokens are divided by them, limited to 448, the largest number in FP8, and rounded.
        return_softmax_lse: FlashAttention-3's name for return_lse.
        softmax_scale and the others: as in `flash_attn_func`.

    Returns:
        out and, with return_lse, the log-sum-exp, as `flash_attn_func`; with cu_seqlens_q in the
        shapes of `flash_attn_varlen_func`.

    Raises:
        ValueError: as `flash_attn_func`; on the CPU, or with FA3_ASSERTIONS=1, also a length, index
            or page that does not fit the cache. Nothing has been appended then.
        RuntimeError: FA3_ASSERTIONS is 1 and a CUDA graph is being captured.
        TypeError, NotImplementedError: as `flash_attn_func`.

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
    if pack_gqa is not None:
        pack_gqa = default_pack_gqa(pack_gqa, q, k_cache)
    values = NO_VALUES.copy()
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        values["seqused_k"] = cache_seqlens
    else:
        values["cache_length"] = cache_seqlens
    values["q"], values["k"], values["v"] = q, k_cache, v_cache
    values["out"], values["softmax_scale"] = out, softmax_scale
    if not (page_table is k is v is None):
        values["page_table"], values["k_new"], values["v_new"] = page_table, k, v
    if not (rotary_cos is rotary_sin is rotary_seqlens is None):
        values["rotary_cos"], values["rotary_sin"] = rotary_cos, rotary_sin
        values["rotary_seqlens"] = rotary_seqlens
    if not (cu_seqlens_q is max_seqlen_q is cu_seqlens_k_new is None):
        values["cu_seqlens_q"], values["max_seqlen_q"] = cu_seqlens_q, max_seqlen_q
        values["cu_seqlens_k_new"] = cu_seqlens_k_new
    if not (cache_batch_idx is cache_leftpad is None):
        values["batch_idx"], values["leftpad"] = cache_batch_idx, cache_leftpad
    if not (alibi_slopes is sinks is q_descale is k_descale is v_descale is None):
        values["alibi_slopes"], values["sinks"] = alibi_slopes, sinks
        values["q_descale"], values["k_descale"] = q_descale, k_descale
        values["v_descale"] = v_descale
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, pack_gqa, qv,
        return_softmax_lse, rotary_interleaved, batch_invariant,
    )  # fmt: skip
    return run_call(CACHED, values, window_size, options, scheduler_metadata)


# ------------------------------------------------------------------------- what they share


def describe_call(
    values: dict[str, Any], options: Options, latest: FastPath
) -> tuple[PreparedAttention, Sequence[int]]:
    """What a call's tensors and options lead to, and tensors' addresses.

    The next call is compared with this one.
    """
    kind, used_q = options.kind, values["seqused_q"]
    if kind == PACKED and not (used_q is None or isinstance(used_q, torch.Tensor)):
        raise TypeError(f"seqused_q must be a torch.Tensor, got {kind_of(used_q)}{NOTE_ON_ORDER}")
    described = describe_tensors(values, options)
    call = prepare_without_lengths(prepare_call, described, options)
    if options.has_gradient:
        check_differentiable(values, options.pack_gqa)
    for name in ("out", "k", "v") if call.append is not None else ("out",):
        if values[name] is not None:
            check_writable(described.name(name), values[name])
    alignments = ALIGNMENTS[kind] | dict.fromkeys(options.functions.names, 1)
    growing = sum(described.names_by_rows, ())
    latest.remember(values, alignments, growing, call, WITH_GRADIENT[kind])
    return call, [values[name].data_ptr() for name in alignments if values[name] is not None]


def run_call(
    kind: str,
    values: dict[str, Any],  # by name, all `NO_VALUES`; more are added
    window_size: Sequence[int],
    passed: tuple,  # what `OPTIONS_OF` names
    metadata: SchedulerMetadata | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What a public function returns."""
    q, k, v = values["q"], values["k"], values["v"]
    slopes, sinks, ends_q = values["alibi_slopes"], values["sinks"], values["cu_seqlens_q"]
    if not (metadata is None or isinstance(metadata, SchedulerMetadata)):
        # Before options are looked up: a tuple may equal metadata, a list has no hash.
        came = kind_of(metadata)
        raise TypeError(f"scheduler_metadata must come from get_scheduler_metadata, got {came}")
    if is_traced(q):
        values |= {"window_size": window_size, "scheduler_metadata": metadata}
        return trace_attention(kind, passed, values)
    score, mask = values["score"], values["mask"]
    has_gradient, functions, read = False, NO_FUNCTIONS, ()
    if WITH_GRADIENT[kind]:
        try:
            has_gradient = wants_gradient(q, k, v, sinks)
        except AttributeError:
            describe_tensors(values, Options(kind=kind))  # says what is no tensor
            raise
    if not (score is mask is None):
        describe("q", q, ALIGNMENT, bool(WITH_GRADIENT[kind]))
        functions, read = functions_of(q, score, mask)
        values |= zip(functions.names, read, strict=True)
    longest_q = values["max_seqlen_q"]
    if kind in MUST_SAY_LONGEST:
        values["max_seqlen_q"] = longest_q = integer("max_seqlen_q", longest_q, 0)
        longest_k = integer("max_seqlen_k", values["max_seqlen_k"], 0)
        if kind == PACKED:
            # Nothing that is prepared depends on them.
            values["longest"], longest_q = (longest_q, longest_k), None
    asked = options_of(kind, window_size, (has_gradient, functions, longest_q, metadata), passed)
    call, begins = asked.latest.find(values)
    if call is None or (kind == PACKED and not have_one_batch(values)):
        call, begins = describe_call(values, asked.options, asked.latest)
    if ends_q is not None:
        batch = ends_q.shape[0] - 1
        if metadata is not None and metadata.batch != batch:
            metadata.check(batch=batch)
        check_totals(values, batch, kind == PACKED, call.most_queries)
    if call.overlaps is not None:
        rows = () if ends_q is None else (q.shape[0], k.shape[0], batch, batch + 1)
        call.overlaps(rows, *begins)
    scale, length = values["softmax_scale"], values["cache_length"]
    scale = call.scale if scale is None else check_scale(scale, q.shape[-1])
    if asked.dropout_p or values["rng_state"] is not None:
        values["dropout"] = dropout = dropout_of(asked.dropout_p, values["rng_state"], q)
        values["arguments_of_dropout"] = dropout.arguments
    if length is None:
        length = call.capacity
    if length is not None or call.has_host_integers or host_values.ASSERTIONS:
        check_numbers(call.description, values, length, query_step(asked.options))
        if host_values.ASSERTIONS and not (
            call.description.has_cache or asked.options.softcap or call.scales
        ):
            check_scores(values, scale)
    if not (slopes is sinks is None):
        read = modifier_tensors(slopes, read, sinks)
    values["softmax_scale"], values["modifiers"] = scale, read or None
    if not has_gradient:
        out, lse = call.attend(values, asked.returns_lse)
        return (out, lse) if asked.returns_lse else out
    if _are_functorch_transforms_active():
        check_differentiable(values, asked.options.pack_gqa)
    # In a third of the time that the class itself takes.
    rest = values["longest"], scale, asked.deterministic, call.prepare_backward
    backward = tuple.__new__(BackwardCall, (call.problem, *rest))
    return attend_differentiably((call, values, backward, asked.returns_lse), q, k, v, *read)
