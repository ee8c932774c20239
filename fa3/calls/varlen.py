"""`flash_attn_varlen_func`: packed sequences of different lengths, in one call.

Lengths on a GPU are read there only. What follows from heads, types and options is worked out once
and remembered, whatever totals and sequences are (`fa3.calls.attention`).
"""

import torch

from fa3.calls import operators
from fa3.calls.attention import run_call
from fa3.calls.options import PACKED, PAGED, by_either_name, share_heads
from fa3.calls.scheduler_metadata import SchedulerMetadata
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


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

    CPU tensors run through `fa3.reference.steps`; lengths are checked before anything is written.
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
    kind = PACKED
    if page_table is not None:
        check_paged(cu_seqlens_q, cu_seqlens_k, seqused_k, dropout_p, rng_state)
        kind = PAGED
    tensors = (
        q, k, v, None, None, None, None, seqused_k, None, None, page_table, None, cu_seqlens_q,
        None, seqused_q, cu_seqlens_k, q_descale, k_descale, v_descale, alibi_slopes, sinks, out,
    )  # fmt: skip
    options = (
        causal, softcap, attention_chunk, num_splits, sm_margin, return_lse, return_attn_probs,
        deterministic, dropout_p, return_softmax_lse, qv, pack_gqa,
        pack_gqa is None or share_heads(q, k),
    )  # fmt: skip
    arguments = (
        softmax_scale, window_size, score, mask, rng_state, max_seqlen_q, max_seqlen_k,
        scheduler_metadata, None, None, None,
    )  # fmt: skip
    return run_call(kind, tensors, options, arguments)


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
