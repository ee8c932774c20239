"""`flash_attn_varlen_func` with `page_table`: packed queries whose keys are in pages of a cache.

It is a call on a cache (`fa3.calls.kvcache`) that appends nothing, and has what
`flash_attn_with_kvcache` has no arguments for: `seqused_q`, and scores and masks of the user's.
"""

import re

import torch
from torch.compiler import is_dynamo_compiling

from fa3.calls import assertions
from fa3.calls.eager import is_traced
from fa3.calls.kvcache import prepared_call
from fa3.calls.modifiers import UNMODIFIED, Modifiers
from fa3.calls.operands import check_apart, describe
from fa3.calls.options import as_pair, check_scale, integer
from fa3.calls.prepared_cache import check_total, with_integers_on_device
from fa3.calls.scheduler_metadata import IN_METADATA, PackedMetadata, check_cache_metadata
from fa3.calls.traced import Result
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

OWN_NAMES = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k"}
"""What a call on a cache calls an argument, and what it is here."""


def attend_to_pages(*arguments) -> Result:
    """What `flash_attn_varlen_func` gives with `page_table`.

    Args:
        arguments: as for `run_on_pages`.
    """
    try:
        return run_on_pages(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_dynamo_compiling() or error.__cause__ is not None:
            # torch.compile cannot trace the next line; what it complains of has no other name. What
            # a user's function has raised is in its own words.
            raise
        error.args = tuple(map(in_own_names, error.args))
        raise


def in_own_names(message: object) -> object:
    """A complaint of a call on a cache about what its caller gave it under other names."""
    if not isinstance(message, str):
        return message
    return re.sub(r"\b(k_cache|v_cache|cache_seqlens)\b", lambda m: OWN_NAMES[m[0]], message)


def run_on_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    return_lse: bool,
    score: Score | None,
    mask: Mask | None,
    scheduler_metadata: PackedMetadata | None,
    num_splits: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sm_margin: int,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Result:
    """Attend. Takes the arguments of `flash_attn_varlen_func`, their types checked."""
    calls = known = functions = None
    if scheduler_metadata is not None:
        if seqused_q is not None:
            raise NotImplementedError(
                "scheduler_metadata is not supported with page_table and seqused_q"
            )
        calls, known = check_cache_metadata(scheduler_metadata, True)
    modifiers = UNMODIFIED
    if not (score is mask is None or is_traced(q)):
        describe("q", q)
        modifiers = Modifiers.of(q, 0, 0.0, None, None, score, mask, is_causal=False)
        functions = modifiers.structure
    function_tensors = modifiers.tensors or ()
    # In the order of `CacheTensors`, and of what `prepare_cache_call` takes.
    tensors: tuple[torch.Tensor | None, ...] = (
        q, k, v, None, None, None, None, seqused_k, None, None, page_table, None, cu_seqlens_q,
        None, seqused_q, alibi_slopes, sinks, out,
    )  # fmt: skip
    options = (
        integer("max_seqlen_q", max_seqlen_q, 0), causal, as_pair(window_size), softcap, True,
        num_splits, False, sm_margin, calls, functions,
    )  # fmt: skip
    if is_traced(q):
        raise NotImplementedError("cu_seqlens_q must be None while a graph is traced")
    call = prepared_call(tensors, options, is_packed=True)
    if out is not None and function_tensors:
        check_apart("out", out, modifiers.structure.names, function_tensors)
    scale = check_scale(softmax_scale, call.head_dim)
    if q.shape[0] > call.most_queries:
        check_total(call, q)
    if known is not None:
        longest = max_seqlen_q, call.description.capacity
        known.check_fit(IN_METADATA, call.description.batch, (q.shape[0], known.end_k), longest)
    if call.has_host_integers or assertions.ASSERTIONS:
        tensors = with_integers_on_device(call, tensors, None, known)
    return call.run(tensors, scale, return_lse, known, function_tensors)
