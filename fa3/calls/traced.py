"""Calls while a graph is traced: the operators that stand for them (`fa3.calls.operators`).

Each function here takes what a public function has checked of its options, and gives what that
would give. torch.compile reads these lines, so they look at nothing that a fake tensor has not, and
at no length: what is left to check is checked when the graph runs.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fa3.calls import operators
from fa3.calls.autograd import check_differentiable, wants_gradient
from fa3.calls.dropout import draw_rng_state
from fa3.calls.eager import check_undifferentiated
from fa3.calls.operator_backward import run_backward
from fa3.calls.options import (
    CACHED,
    DENSE,
    PACKED,
    PAGED,
    Options,
    as_pair,
    check_probability,
    check_window,
    named_options,
)
from fa3.calls.user_functions import flatten_function
from fa3.problem import Window
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

operators.BACKWARD.implemented_by(run_backward)

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

ALWAYS_NONE = {
    DENSE: ("plan",),
    PACKED: (
        "scheduler_metadata", "cu_seqlens_q_cpu", "cu_seqlens_k_cpu", "seqused_q_cpu",
        "seqused_k_cpu",
    ),
    PAGED: ("cu_seqlens_q",),
    CACHED: ("cu_seqlens_q", "rotary_seqlens"),
}  # fmt: skip
"""Arguments of functions that no operator takes."""


def trace_attention(
    kind: str,
    window_size: tuple[int, int],
    values: tuple,
    out: torch.Tensor | None,
    **arguments: Any,
) -> Result:
    """What a public function gives.

    Args:
        values: its options, as `fa3.calls.options.options_of` takes them.
        arguments: all others, by name.
    """
    for name in ALWAYS_NONE[kind]:
        if arguments.pop(name, None) is not None:
            raise NotImplementedError(f"{name} must be None while a graph is traced")
    options = named_options(kind, values)
    window = check_window(as_pair(window_size), options["causal"])
    returns_lse = options["return_lse"] or options.get("return_softmax_lse", False)
    returns_lse = returns_lse or options.get("return_attn_probs", False)
    arguments |= options
    arguments["window_left"], arguments["window_right"] = window.left, window.right
    if kind == CACHED:
        made, lse = trace_cached(out, window, arguments)
    else:
        differentiable_arguments(kind, out, arguments)
        made, lse = call_attention(kind, out, arguments)
    out = made if out is None else out
    return (out, lse) if returns_lse else out


def call_attention(
    kind: str, out: torch.Tensor | None, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `fa3::attention` gives; it takes those of the arguments that it has."""
    operator = operators.ATTENTION
    named = {name: arguments[name] for name in operator.arguments if name in arguments}
    if out is None:
        return operator(function=kind, **named)
    return operators.ATTENTION_OUT(function=kind, out=out, **named)


def differentiable_arguments(
    kind: str, out: torch.Tensor | None, arguments: dict[str, Any]
) -> None:
    """Change arguments to what `fa3::attention` takes for a function that may have a gradient.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is not what the function says it is,
            or a gradient is wanted that does not exist.
    """
    schedule = arguments.get("schedule")
    if not (schedule is None or isinstance(schedule, str)):
        raise NotImplementedError(
            "schedule must be a name like 'list' while a graph is traced: a graph cannot hold "
            "objects"
        )
    score, mask = arguments["score"], arguments["mask"]
    arguments["score"], arguments["score_tensors"] = flatten_function("score", score, Score)
    arguments["mask"], arguments["mask_tensors"] = flatten_function("mask", mask, Mask)
    q, k, v, sinks = arguments["q"], arguments["k"], arguments["v"], arguments["sinks"]
    if wants_gradient(q, k, v, sinks):
        check_differentiable(q, k, v, sinks, score, out, arguments.get("pack_gqa"))
        arguments |= {"num_splits": 1} if kind == PACKED else {"pack_gqa": False}
    refuse_gradients({"alibi_slopes": arguments["alibi_slopes"]})
    for kind in ("score", "mask"):
        for i, tensor in enumerate(arguments[f"{kind}_tensors"]):
            refuse_gradients({f"{kind}'s tensor {i}": tensor})
    check_probability(arguments["dropout_p"])
    if arguments["dropout_p"] and arguments["rng_state"] is None:
        # Drawn by the graph.
        arguments["rng_state"] = draw_rng_state(q.device)


def trace_cached(
    out: torch.Tensor | None, window: Window, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What operators give for `flash_attn_with_kvcache`: out, and the log-sum-exp."""
    refuse_gradients(arguments)
    q, k_cache, v_cache = arguments["q"], arguments.pop("k_cache"), arguments.pop("v_cache")
    names = "softcap", "num_splits", "sm_margin", "batch_invariant"
    options = Options(window=window, **{name: arguments[name] for name in names})
    if arguments["metadata"] is not None:
        has_pages = arguments["page_table"] is not None
        arguments["num_splits"], arguments["sm_margin"] = arguments["metadata"].splits_and_margin(
            options, q, k_cache, v_cache, has_pages, q.shape[0], q.shape[1]
        )
    if arguments["max_seqlen_q"] is not None:
        raise ValueError(
            f"max_seqlen_q must be None without cu_seqlens_q, got {arguments['max_seqlen_q']}"
        )
    appended = {name: arguments.pop(name) for name in APPENDED}
    if appended["k"] is None and appended["v"] is None:
        if not (appended["rotary_cos"] is appended["rotary_sin"] is None):
            raise ValueError(
                "rotary_cos and rotary_sin must be None without k and v: nothing is appended"
            )
        return call_attention(CACHED, out, {**arguments, "k": k_cache, "v": v_cache})
    for name, other in (("k", "v"), ("v", "k")):
        if appended[name] is None:
            raise ValueError(f"{name} must be given with {other}")
    arguments |= appended | {"k_cache": k_cache, "v_cache": v_cache, "out": out}
    operator = operators.APPEND
    return operator(**{name: arguments[name] for name in operator.arguments if name in arguments})


APPENDED = ("k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_k_new", "rotary_interleaved")
"""Arguments of `flash_attn_with_kvcache` that only an append reads."""


def trace_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flash_attn_combine` gives."""
    refuse_gradients({"out_partial": out_partial, "lse_partial": lse_partial})
    made, lse = operators.COMBINE(
        out_partial=out_partial, lse_partial=lse_partial, out=out, out_dtype=out_dtype
    )
    return made if out is None else out, lse


def refuse_gradients(arguments: Mapping[str, Any]) -> None:
    """Raise if one of these is a tensor that requires grad, and would get none."""
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            check_undifferentiated(name)
