"""What the public functions share: from tensors and options to out and the log-sum-exp.

What follows from a call's shapes, strides, types and options is worked out once and remembered
(`fa3.calls.prepare`). The latest calls are found again without describing their tensors
(`fa3.calls.latest`). Lengths on a GPU are read there only. CPU tensors go to the reference.
"""

import functools
from collections.abc import Sequence

import torch

from fa3.calls import assertions
from fa3.calls.autograd import (
    DifferentiableCall,
    attend_differentiably,
    check_differentiable,
    wants_gradient,
)
from fa3.calls.backward import BackwardCall
from fa3.calls.call import (
    ALIGNMENTS,
    ENDS_Q,
    NAMES_BY_KIND,
    OUT,
    SINKS,
    SLOPES,
    TENSORS,
    USED_Q,
    WITH_GRADIENT,
    K,
    Q,
    Tensors,
    V,
    check_totals,
    describe_tensors,
    have_one_batch,
    lengths_of,
    of_any_lengths,
    places_by_rows,
)
from fa3.calls.dropout import dropout_of
from fa3.calls.eager import is_traced
from fa3.calls.latest import FastPath
from fa3.calls.modifiers import function_names, functions_of, modifier_tensors
from fa3.calls.operands import (
    ALIGNMENT,
    addresses,
    check_writable,
    describe,
    used_queries,
)
from fa3.calls.operators import trace_attention
from fa3.calls.options import (
    FROM_FLASH_ATTENTION_2,
    PACKED,
    PAGED,
    VARLEN_FROM_FLASH_ATTENTION_2,
    Options,
    check_scale,
    integer,
    note_on_order,
    options_of,
)
from fa3.calls.prepare import PreparedAttention, prepare_call, query_step
from fa3.calls.scheduler_metadata import check_metadata
from fa3.calls.values import checked_integers
from fa3.complaints import kind_of

MUST_SAY_LONGEST = PACKED, PAGED  # calls that must say max_seqlen_q and max_seqlen_k


def describe_call(
    tensors: Tensors, options: Options, latest: FastPath
) -> tuple[PreparedAttention, Sequence[int]]:
    """What these tensors and options lead to, and where the tensors begin.

    The next call is compared with this one.
    """
    kind, used_q, names = options.kind, tensors[USED_Q], function_names(options)
    if kind == PACKED and not (used_q is None or isinstance(used_q, torch.Tensor)):
        came, note = kind_of(used_q), note_on_order(used_q, VARLEN_FROM_FLASH_ATTENTION_2)
        raise TypeError(f"seqused_q must be a torch.Tensor, got {came}{note}")
    described = describe_tensors(kind, tensors, names)
    call = of_any_lengths(prepare_call, described, options)
    for place in (OUT, K, V) if call.append is not None else (OUT,):
        if tensors[place] is not None:
            check_writable(call.description.name(TENSORS[place]), tensors[place])
    of_any_length = sum(places_by_rows(kind, tensors), ())
    alignments = *ALIGNMENTS, *[1] * len(names)
    latest.remember(tensors, alignments, of_any_length, call, WITH_GRADIENT[kind])
    return call, addresses(tensors)


ARGUMENTS = (
    "softmax_scale", "window_size", "score", "mask", "rng_state", "max_seqlen_q", "max_seqlen_k",
    "scheduler_metadata", "cache_length", "schedule", "plan",
)  # fmt: skip
"""What calls hand on besides tensors and options, in this order."""


def run_call(
    kind: str,
    tensors: Tensors,
    values: tuple,  # the options, as `options_of` takes them
    arguments: tuple,  # the `ARGUMENTS`; a number in place of cache_seqlens is `cache_length`
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What a public function returns."""
    q, k, v = tensors[:3]
    if is_traced(q):
        named = dict(zip(NAMES_BY_KIND[kind], tensors, strict=True))
        return trace_attention(kind, values, named | dict(zip(ARGUMENTS, arguments, strict=True)))
    (
        softmax_scale, window_size, score, mask, rng_state, longest_q, longest_k, metadata, length,
        schedule, plan,
    ) = arguments  # fmt: skip
    with_gradient, slopes, sinks = WITH_GRADIENT[kind], tensors[SLOPES], tensors[SINKS]
    has_gradient, functions, read, bounds = False, None, None, None
    if with_gradient:
        try:
            has_gradient = wants_gradient(q, k, v, sinks)
        except AttributeError:
            describe_tensors(kind, tensors)  # says what is no tensor
            raise
    everything, of_flash_attention_2 = tensors, softmax_scale
    if not (score is mask is None):
        describe("q", q, ALIGNMENT, bool(with_gradient))
        functions, read = functions_of(q, score, mask)
        everything = *tensors, *read
    if kind in MUST_SAY_LONGEST:
        longest_q = integer("max_seqlen_q", longest_q, 0)
        longest_k = integer("max_seqlen_k", longest_k, 0)
        of_flash_attention_2 = tensors[USED_Q]
    if metadata is not None:
        check_metadata(metadata)
    if kind == PACKED:
        # Nothing that is prepared depends on them.
        bounds, longest_q = (longest_q, longest_k), None
    rest = has_gradient, functions, longest_q, metadata, schedule, plan
    options, returns_lse, deterministic, dropout_p, latest = options_of(
        kind, of_flash_attention_2, window_size, values, rest
    )
    call, begins = latest.find(everything)
    if call is None or (kind == PACKED and not have_one_batch(tensors)):
        call, begins = describe_call(everything, options, latest)
    batch = 0
    if tensors[ENDS_Q] is not None:
        batch = tensors[ENDS_Q].shape[0] - 1
        if metadata is not None and metadata.batch != batch:
            metadata.check(batch=batch)
        check_totals(q, k, v, tensors[OUT], batch, kind == PACKED, call.most_queries)
    if call.overlaps is not None:
        call.overlaps((q.shape[0], k.shape[0], batch, batch + 1), *begins)
    scale, dropout = call.scale, None
    if softmax_scale is not None:
        scale = check_scale(softmax_scale, q.shape[-1], FROM_FLASH_ATTENTION_2)
    if dropout_p or rng_state is not None:
        dropout = dropout_of(dropout_p, rng_state, q)
    if length is None:
        length = call.capacity
    if length is not None or call.has_host_integers or assertions.ASSERTIONS:
        tensors = checked_integers(call.description, tensors, length, bounds, query_step(options))
        if assertions.ASSERTIONS and not (
            call.description.has_cache or options.softcap or call.scales
        ):
            check_scores_of(tensors, scale)
    if not (slopes is sinks is None):
        read = modifier_tensors(slopes, read or (), sinks)
    if not has_gradient:
        out, lse = call.attend(tensors, read or None, scale, dropout, bounds, returns_lse)
        return (out, lse) if returns_lse else out
    check_differentiable(q, k, v, sinks, score, tensors[OUT], options.pack_gqa)
    backward = BackwardCall(call.problem, bounds, scale, deterministic, call.num_sms)
    attend = functools.partial(call.attend, tensors, read or None, scale, dropout, bounds, True)
    lengths = lengths_of(tensors)
    differentiable = DifferentiableCall(attend, backward, lengths, dropout, returns_lse)
    return attend_differentiably(differentiable, q, k, v, *(read or ()))


def check_scores_of(tensors: Tensors, scale: float) -> None:
    """Raise if scores may be so large that the softmax loses them; for FA3_ASSERTIONS=1."""
    q, k = tensors[Q], tensors[K]
    ends_q, ends_k, used_q, used_k = lengths_of(tensors)
    used = None, None
    if ends_q is not None:
        if len(ends_q) == 1:
            return
        used = used_queries(len(q), ends_q, used_q), used_queries(len(k), ends_k, used_k)
    assertions.check_scores(q, k, scale, used)
