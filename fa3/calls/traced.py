"""Calls while a graph is traced: the operators that stand for them (`fa3.calls.operators`).

Each function here takes what its public function has checked of its options, and gives what that
would give. torch.compile reads these lines, so they look at nothing that a fake tensor has not, and
at no length: what is left to check is checked when the graph runs.
"""

from collections.abc import Mapping, Sequence

import torch

from fa3.calls import operators
from fa3.calls.autograd import check_differentiable, wants_gradient
from fa3.calls.dropout import check_probability, draw_rng_state
from fa3.calls.eager import check_undifferentiated
from fa3.calls.operator_backward import gradients_of_call, gradients_of_packed_call
from fa3.calls.options import check_window
from fa3.calls.user_functions import take_apart
from fa3.planning.plan import Plan
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

operators.BACKWARD.runs(gradients_of_call)
operators.VARLEN_BACKWARD.runs(gradients_of_packed_call)

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def trace_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    return_lse: bool,
    score: Score | None,
    mask: Mask | None,
    plan: Plan | None,
    schedule: object,
    pack_gqa: bool | None,
    deterministic: bool,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    *options,
) -> Result:
    """What `flash_attn_func` gives.

    Args:
        options: of `options_of`.
    """
    if plan is not None:
        raise NotImplementedError(
            "plan must be None while a graph is traced: a plan is made for one problem, and the "
            "graph may run for others"
        )
    if not (schedule is None or isinstance(schedule, str)):
        raise NotImplementedError(
            "schedule must be a name like 'list' while a graph is traced: a graph cannot hold "
            "objects"
        )
    named, functions = options_of(*options), functions_of(score, mask)
    if check_gradients(q, k, v, out, score, named, functions, pack_gqa):
        pack_gqa = False
    named = named | functions | {"deterministic": deterministic}
    named = named | {"schedule": schedule, "pack_gqa": pack_gqa}
    named |= dropout_options(dropout_p, rng_state, q)
    if out is None:
        out, lse = operators.FORWARD.overload(q, k, v, **named)
    else:
        _, lse = operators.FORWARD_OUT.overload(q, k, v, out, **named)
    return (out, lse) if return_lse else out


def trace_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    return_lse: bool,
    score: Score | None,
    mask: Mask | None,
    deterministic: bool,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    num_splits: int,
    *options,
) -> Result:
    """What `flash_attn_varlen_func` gives.

    Args:
        options: of `options_of`.
    """
    named, functions = options_of(*options), functions_of(score, mask)
    if check_gradients(q, k, v, out, score, named, functions):
        num_splits = 1
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    named = named | functions | {"deterministic": deterministic, "num_splits": num_splits}
    named |= dropout_options(dropout_p, rng_state, q)
    if out is None:
        out, lse = operators.VARLEN.overload(q, k, v, *lengths, **named)
    else:
        _, lse = operators.VARLEN_OUT.overload(q, k, v, out, *lengths, **named)
    return (out, lse) if return_lse else out


def trace_cached(
    tensors: Sequence[torch.Tensor | None],
    options: Sequence,
    cache_length: int | None,
    softmax_scale: float | None,
    return_lse: bool,
) -> Result:
    """What `flash_attn_with_kvcache` gives.

    Args:
        tensors: the `CacheTensors`.
        options: of `prepare_cache_call`.
        cache_length: of each sequence, if cache_seqlens is a number.
    """
    (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, cu_seqlens_k_new, cu_seqlens_q, rotary_seqlens, _, alibi_slopes,
        sinks, out,
    ) = tensors  # fmt: skip
    (
        _, causal, window_size, softcap, rotary_interleaved, num_splits, batch_invariant, sm_margin,
        scheduler_metadata, _,
    ) = options  # fmt: skip
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("rotary_seqlens", rotary_seqlens)):
        if given is not None:
            raise NotImplementedError(f"{name} must be None while a graph is traced")
    refuse_gradients(
        {
            "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v,
            "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "alibi_slopes": alibi_slopes,
            "sinks": sinks,
        }
    )  # fmt: skip
    if scheduler_metadata is not None:
        scheduler_metadata.check(
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            heads_q=q.shape[2],
            heads_kv=k_cache.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v_cache.shape[3],
            dtype=q.dtype,
            page_size=None if page_table is None else k_cache.shape[1],
            window=check_window(window_size, causal),
            has_softcap=bool(softcap),
        )
        num_splits, sm_margin = scheduler_metadata.options(num_splits, sm_margin, batch_invariant)
    named = options_of(softmax_scale, causal, window_size, softcap, sm_margin, alibi_slopes, sinks)
    named |= {
        "cache_seqlens": cache_seqlens,
        "cache_length": cache_length,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "page_table": page_table,
        "num_splits": num_splits,
        "batch_invariant": batch_invariant,
    }
    if k is None and v is None:
        if not (rotary_cos is rotary_sin is None):
            raise ValueError(
                "rotary_cos and rotary_sin must be None without k and v: nothing is appended"
            )
        made, lse = operators.READ_KVCACHE.overload(q, k_cache, v_cache, out, **named)
    else:
        for name, tensor, other in (("k", k, "v"), ("v", v, "k")):
            if tensor is None:
                raise ValueError(f"{name} must be given with {other}")
        made, lse = operators.WITH_KVCACHE.overload(
            q, k_cache, v_cache, out, k, v, rotary_cos, rotary_sin, cu_seqlens_k_new,
            rotary_interleaved, **named,
        )  # fmt: skip
    out = made if out is None else out
    return (out, lse) if return_lse else out


def trace_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flash_attn_combine` gives."""
    refuse_gradients({"out_partial": out_partial, "lse_partial": lse_partial})
    made, lse = operators.COMBINE.overload(out_partial, lse_partial, out, out_dtype)
    return made if out is None else out, lse


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    sm_margin: int,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> dict[str, object]:
    """What all operators take, by name."""
    window = check_window(window_size, causal)
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_left": window.left,
        "window_right": window.right,
        "softcap": softcap,
        "sm_margin": sm_margin,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }


def dropout_options(
    dropout_p: float, rng_state: torch.Tensor | None, q: torch.Tensor
) -> dict[str, object]:
    """Dropout, as operators take it; its seed is drawn by the graph."""
    check_probability(dropout_p)
    if dropout_p and rng_state is None:
        rng_state = draw_rng_state(q.device)
    return {"dropout_p": dropout_p, "rng_state": rng_state}


def functions_of(score: Score | None, mask: Mask | None) -> dict[str, object]:
    """Scores and masks of the user's, as operators take them."""
    score, score_tensors = take_apart("score", score, Score)
    mask, mask_tensors = take_apart("mask", mask, Mask)
    return {
        "score": score, "score_tensors": score_tensors, "mask": mask, "mask_tensors": mask_tensors,
    }  # fmt: skip


def check_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    score: Score | None,
    named: Mapping[str, object],
    functions: Mapping[str, object],
    pack_gqa: bool | None = None,
) -> bool:
    """Whether gradients of a call without a cache are wanted; raise unless it has those.

    Args:
        named, functions: what `options_of` and `functions_of` gave.
    """
    sinks = named["sinks"]
    has_gradient = wants_gradient(q, k, v, sinks)
    if has_gradient:
        check_differentiable(q, k, v, sinks, score, out, pack_gqa)
    refuse_gradients({"alibi_slopes": named["alibi_slopes"], **tensors_of_functions(functions)})
    return has_gradient


def tensors_of_functions(functions: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of scores and masks by what complaints call them."""
    return {
        f"{kind}'s tensor {i}": tensor
        for kind in ("score", "mask")
        for i, tensor in enumerate(functions[f"{kind}_tensors"])
    }


def refuse_gradients(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raise if one of these tensors requires grad, and would get none."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            check_undifferentiated(name)
