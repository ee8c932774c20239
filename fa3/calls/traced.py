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
from fa3.calls.dropout import check_probability, draw_rng_state
from fa3.calls.eager import check_undifferentiated
from fa3.calls.operator_backward import run_backward
from fa3.calls.options import check_window
from fa3.calls.user_functions import flatten_function
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

operators.BACKWARD.implemented_by(run_backward)

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

ALWAYS_NONE = {
    operators.DENSE: ("plan",),
    operators.PACKED: (
        "scheduler_metadata", "cu_seqlens_q_cpu", "cu_seqlens_k_cpu", "seqused_q_cpu",
        "seqused_k_cpu",
    ),
    operators.CACHED: ("cu_seqlens_q", "rotary_seqlens"),
}  # fmt: skip
"""Arguments of functions that no operator takes."""


def trace_attention(function: str, return_lse: bool, **arguments: Any) -> Result:
    """What a public function gives.

    Args:
        function: its name.
        arguments: of the function, by name, but for what only says how out is returned.
    """
    for name in ALWAYS_NONE[function]:
        if arguments.pop(name, None) is not None:
            raise NotImplementedError(f"{name} must be None while a graph is traced")
    out = arguments.pop("out")
    window = check_window(arguments.pop("window_size"), arguments["causal"])
    arguments["window_left"], arguments["window_right"] = window.left, window.right
    if function == operators.CACHED:
        made, lse = trace_cached(out, arguments)
    else:
        arguments = differentiable_arguments(out, arguments)
        if out is None:
            made, lse = operators.ATTENTION(function=function, **arguments)
        else:
            made, lse = operators.ATTENTION_OUT(function=function, out=out, **arguments)
    out = made if out is None else out
    return (out, lse) if return_lse else out


def differentiable_arguments(out: torch.Tensor | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `fa3::attention` for a function that may have a gradient.

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
        arguments |= {"num_splits": 1} if "num_splits" in arguments else {"pack_gqa": False}
    refuse_gradients({"alibi_slopes": arguments["alibi_slopes"]})
    for kind in ("score", "mask"):
        for i, tensor in enumerate(arguments[f"{kind}_tensors"]):
            refuse_gradients({f"{kind}'s tensor {i}": tensor})
    check_probability(arguments["dropout_p"])
    if arguments["dropout_p"] and arguments["rng_state"] is None:
        # Drawn by the graph.
        arguments["rng_state"] = draw_rng_state(q.device)
    return arguments


def trace_cached(
    out: torch.Tensor | None, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What operators give for `flash_attn_with_kvcache`: out, and the log-sum-exp."""
    refuse_gradients(arguments)
    appended = {name: arguments.pop(name) for name in APPENDED}
    k_cache, v_cache = arguments.pop("k_cache"), arguments.pop("v_cache")
    if appended["k"] is None and appended["v"] is None:
        if not (appended["rotary_cos"] is appended["rotary_sin"] is None):
            raise ValueError(
                "rotary_cos and rotary_sin must be None without k and v: nothing is appended"
            )
        arguments |= {"function": operators.CACHED, "k": k_cache, "v": v_cache}
        if out is None:
            return operators.ATTENTION(**arguments)
        return operators.ATTENTION_OUT(out=out, **arguments)
    for name, other in (("k", "v"), ("v", "k")):
        if appended[name] is None:
            raise ValueError(f"{name} must be given with {other}")
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    return operators.APPEND(out=out, **arguments, **appended, **caches)


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
