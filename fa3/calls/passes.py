"""The forward and the backward pass by themselves, with the arguments of FlashAttention-3.

Libraries for context parallelism call them block by block: they merge the outputs of blocks of
keys, and give the backward pass of each block the output and the log-sum-exp of all of them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fa3.calls import operators
from fa3.calls.eager import in_memory, is_traced
from fa3.calls.forward import flash_attn_func
from fa3.calls.kvcache import flash_attn_with_kvcache
from fa3.calls.operands import (
    Operand,
    check_apart,
    check_device,
    check_dtype,
    check_no_overlap,
    check_shape,
    check_writable,
    describe,
)
from fa3.calls.options import as_pair, flag, integer, real
from fa3.calls.scheduler_metadata import PackedMetadata, SchedulerMetadata
from fa3.calls.traced import dropout_options, functions_of, options_of
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.complaints import kind_of
from fa3.problem import NO_BOUND


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `flash_attn_func` of q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or (batch, seqlen, heads, head_dim), where q has
            the first num_heads_q heads, and k and v have half of the others each.
        num_heads_q: must be given with the second shape.
        softmax_scale and the others: as in `flash_attn_func`.

    Returns:
        as `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.
    """
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {kind_of(qkv)}")
    q, k, v = split_heads(qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def split_heads(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[torch.Tensor, ...]:
    """Views of q, k and v in one tensor."""
    if num_heads_q is not None:
        num_heads_q = integer("num_heads_q", num_heads_q, 0)
    shape = tuple(qkv.shape)
    if len(shape) == 5 and shape[2] == 3:
        if num_heads_q not in (None, shape[3]):
            raise ValueError(f"num_heads_q must be {shape[3]} like qkv, or None, got {num_heads_q}")
        return qkv.unbind(dim=2)
    if len(shape) != 4:
        raise ValueError(
            "qkv must have shape (batch, seqlen, 3, heads, head_dim), or with num_heads_q "
            f"(batch, seqlen, heads, head_dim), got {shape}"
        )
    if num_heads_q is None:
        raise ValueError(f"num_heads_q must be given with qkv of 4 dimensions, got shape {shape}")
    heads_kv, rest = divmod(shape[2] - num_heads_q, 2)
    if rest or heads_kv < 0:
        raise ValueError(
            f"num_heads_q must leave k and v the same number of qkv's {shape[2]} heads, got "
            f"{num_heads_q}"
        )
    return qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = NO_BOUND,
    window_size_right: int = NO_BOUND,
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: SchedulerMetadata | PackedMetadata | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the output and the log-sum-exp by the public function that fits the arguments.

    With cu_seqlens_k that is `flash_attn_varlen_func`. With cu_seqlens_q alone, with seqused_k, or
    with arguments for a cache, it is `flash_attn_with_kvcache`, where seqused_k is called
    cache_seqlens. Otherwise it is `flash_attn_func`.

    Args:
        k_new, v_new: k and v of `flash_attn_with_kvcache`.
        out_: out. kv_batch_idx: cache_batch_idx. leftpad_k: cache_leftpad. seqlens_rotary:
            rotary_seqlens.
        q and the others: as in the public functions.

    Returns:
        out, the log-sum-exp, and two empty tensors. FlashAttention-3 has the outputs and
        log-sum-exps of parts there; here parts are merged when the call returns.

    Raises:
        TypeError, ValueError, NotImplementedError: as the public function, or if an argument is
            given that it does not have.
    """
    named: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "qv": qv, "q_descale": q_descale,
        "k_descale": k_descale, "v_descale": v_descale,
        "window_size": (window_size_left, window_size_right), "attention_chunk": attention_chunk,
        "softcap": softcap, "num_splits": num_splits, "pack_gqa": pack_gqa, "sm_margin": sm_margin,
        "return_lse": True, "out": out_,
    }  # fmt: skip
    of_cache = {
        "k_new": k_new, "v_new": v_new, "cu_seqlens_k_new": cu_seqlens_k_new,
        "page_table": page_table, "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k,
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "seqlens_rotary": seqlens_rotary,
    }  # fmt: skip
    if cu_seqlens_k is not None:
        check_absent("with cu_seqlens_k", of_cache)
        named |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        named |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        named |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
        named["scheduler_metadata"] = scheduler_metadata
        out, lse = flash_attn_varlen_func(q, k, v, **named)
    elif any(x is not None for x in (cu_seqlens_q, seqused_k, *of_cache.values())):
        check_absent("without cu_seqlens_k", {"seqused_q": seqused_q, "max_seqlen_k": max_seqlen_k})
        out, lse = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx, cache_leftpad=leftpad_k,
            page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q, rotary_seqlens=seqlens_rotary,
            rotary_interleaved=rotary_interleaved, scheduler_metadata=scheduler_metadata, **named,
        )  # fmt: skip
    else:
        given: dict[str, object] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        given |= {"seqused_q": seqused_q, "scheduler_metadata": scheduler_metadata}
        check_absent("without cu_seqlens_q, cu_seqlens_k and seqused_k", given)
        out, lse = flash_attn_func(q, k, v, **named)
    no_splits = lse.new_empty(0)
    return out, lse, no_splits, no_splits


def check_absent(when: str, arguments: Mapping[str, object]) -> None:
    """Raise if one of these arguments is given."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None {when}")


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = NO_BOUND,
    window_size_right: int = NO_BOUND,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv.

    They are computed in memory of their own, then copied. FlashAttention-3 returns the row sums of
    dout * out; this function returns nothing.

    Args:
        dout: the gradient of out, in any strides.
        out: the output, contiguous in its last dimension. For a block of keys, the output of all
            blocks.
        softmax_lse: the log-sum-exp that belongs to out, contiguous.
        sequed_q, sequed_k: seqused_q and seqused_k, as FlashAttention-3 spells them here.
        dq, dk, dv: like q, k and v, in any strides; they must be given.
        q and the others: as `flash_attn_func` or, with cu_seqlens_q, `flash_attn_varlen_func` took
            them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device.
        NotImplementedError: a tensor does not lie in memory.
    """
    window = as_pair((window_size_left, window_size_right))
    scale = None if softmax_scale is None else real("softmax_scale", softmax_scale)
    is_causal, softcap = flag("is_causal", is_causal), real("softcap", softcap)
    margin = integer("sm_margin", sm_margin, 0)
    named = options_of(scale, is_causal, window, softcap, margin, None, None)
    named |= functions_of(None, None) | dropout_options(0.0, None, q)
    named["deterministic"] = flag("deterministic", deterministic)
    targets: dict[str, tuple[Any, torch.Tensor]] = {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}
    lengths_of = {"cu_seqlens_k": cu_seqlens_k, "sequed_q": sequed_q, "sequed_k": sequed_k}
    with torch.no_grad():
        if not is_traced(q):
            check_targets(targets)
            arrived = in_memory("dout", dout) if isinstance(dout, torch.Tensor) else dout
            results = {"dout": arrived, "out": out, "softmax_lse": softmax_lse}
            check_beside(q, results, {"cu_seqlens_q": cu_seqlens_q} | lengths_of)
        given = dout, None, q, k, v, out, softmax_lse
        if cu_seqlens_q is None:
            longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            check_absent("without cu_seqlens_q", {**lengths_of, **longest})
            *found, _ = operators.BACKWARD.overload(*given, **named, schedule=None, pack_gqa=None)
        else:
            if cu_seqlens_k is None:
                raise ValueError("cu_seqlens_k must be given with cu_seqlens_q")
            lengths = (
                cu_seqlens_q, cu_seqlens_k, integer("max_seqlen_q", max_seqlen_q, 0),
                integer("max_seqlen_k", max_seqlen_k, 0), sequed_q, sequed_k,
            )  # fmt: skip
            *found, _ = operators.VARLEN_BACKWARD.overload(*given, *lengths, **named, num_splits=1)
        for (target, _), gradient in zip(targets.values(), found, strict=True):
            target.copy_(gradient)


def check_beside(
    q: torch.Tensor, results: Mapping[str, Any], lengths: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise unless these are tensors where q is. One on the meta device would have the dispatcher
    compute no gradients at all.

    Args:
        q: checked.
        lengths: may be None.
    """
    given = dict(results) | {name: one for name, one in lengths.items() if one is not None}
    for name, tensor in given.items():
        check_device(name, Operand(*describe(name, tensor, 1)), "q", Operand(*describe("q", q)))


def check_targets(targets: Mapping[str, tuple[Any, torch.Tensor]]) -> None:
    """Raise unless gradients can be written to tensors of the caller's.

    Args:
        targets: by name, what is written, and what it must be like.
    """
    for name, (target, like) in targets.items():
        operand = Operand(*describe(name, target, 1))
        of = name.removeprefix("d")
        model = Operand(*describe(of, like))
        check_dtype(name, operand, model.dtype)
        check_device(name, operand, of, model)
        check_shape(name, operand, tuple(model.shape), of)
        check_no_overlap(name, operand)
        check_writable(name, target)
    (dq, _), (dk, _), (dv, _) = targets.values()
    check_apart("dq", dq, ("dk", "dv"), (dk, dv))
    check_apart("dk", dk, ("dv",), (dv,))
