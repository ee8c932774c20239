"""The forward and the backward pass by themselves, with the arguments of FlashAttention-3.

Libraries for context parallelism call them block by block: they merge the outputs of blocks of
keys, and give the backward pass of each block the output and the log-sum-exp of all of them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
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
from fa3.calls.options import as_pair, check_window, converted, flag, integer, real
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.complaints import kind_of
from fa3.problem import NO_BOUND


def with_parameters(names: str, *functions: Callable) -> Callable[[Callable], Callable]:
    """Give a function parameters in this order, which it takes by name; for decorating it.

    Types and defaults are the function's, or else the first other function's that has the
    parameter; None where none has it.
    """

    def decorate(function: Callable) -> Callable:
        order, signatures = names.split(), list(map(inspect.signature, (function, *functions)))
        kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
        for name in order:
            known = [one.parameters[name] for one in signatures if name in one.parameters]
            model = known[0] if known else inspect.Parameter(name, kind, default=None)
            parameters.append(model.replace(kind=kind))

        @functools.wraps(function)
        def call(*values: object, **named: object) -> object:
            if len(values) > len(order):
                raise TypeError(f"{function.__name__} takes {len(order)} arguments by position")
            return function(**dict(zip(order, values, strict=False)), **named)

        vars(call)["__signature__"] = signatures[0].replace(parameters=parameters)
        return call

    return decorate


@with_parameters(
    "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap "
    "deterministic num_heads_q sm_margin return_attn_probs",
    flash_attn_func,
)
def flash_attn_qkvpacked_func(
    *, qkv: torch.Tensor, num_heads_q: int | None = None, **options: Any
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
    return flash_attn_func(q, k, v, **options)


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


IN_CACHE = {
    "k_new": "k", "v_new": "v", "cu_seqlens_k_new": "cu_seqlens_k_new", "page_table": "page_table",
    "kv_batch_idx": "cache_batch_idx", "leftpad_k": "cache_leftpad", "rotary_cos": "rotary_cos",
    "rotary_sin": "rotary_sin", "seqlens_rotary": "rotary_seqlens",
}  # fmt: skip
"""Arguments of a call on a cache, and what `flash_attn_with_kvcache` calls them."""


LENGTH_NAMES = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k",
    "scheduler_metadata",
)  # fmt: skip
"""Arguments that a dense call does not have."""

OF_PACKED_CACHE = ("cu_seqlens_q", "seqused_k")
"""With these alone, keys are in a cache."""


@with_parameters(
    "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
    "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin",
    flash_attn_func,
    flash_attn_with_kvcache,
)
def _flash_attn_forward(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_: torch.Tensor | None = None,
    window_size_left: int = NO_BOUND,
    window_size_right: int = NO_BOUND,
    **arguments: Any,
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
    lengths = {name: arguments.pop(name, None) for name in LENGTH_NAMES}
    cached = {name: arguments.pop(name, None) for name in IN_CACHE}
    interleaved = arguments.pop("rotary_interleaved", True)
    arguments |= {"window_size": (window_size_left, window_size_right), "return_lse": True}
    arguments |= {"out": out_, "num_splits": arguments.pop("num_splits", 1)}
    if lengths["cu_seqlens_k"] is not None:
        check_absent("with cu_seqlens_k", cached)
        out, lse = flash_attn_varlen_func(q, k, v, **lengths, **arguments)
    elif any(x is not None for x in (*cached.values(), *map(lengths.get, OF_PACKED_CACHE))):
        named = {IN_CACHE[name]: value for name, value in cached.items()}
        named |= {name: lengths.pop(name) for name in ("max_seqlen_q", "scheduler_metadata")}
        ends_q, used_k = map(lengths.pop, OF_PACKED_CACHE)
        check_absent("without cu_seqlens_k", lengths)
        out, lse = flash_attn_with_kvcache(
            q, k, v, cu_seqlens_q=ends_q, cache_seqlens=used_k, rotary_interleaved=interleaved,
            **named, **arguments,
        )  # fmt: skip
    else:
        check_absent("without cu_seqlens_q, cu_seqlens_k and seqused_k", lengths)
        out, lse = flash_attn_func(q, k, v, **arguments)
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
    *,
    accumulate_dkv: bool = False,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv.

    They are computed in memory of their own, then copied. FlashAttention-3 returns the row sums of
    dout * out; this function returns nothing.

    Float32 dk and dv receive the sums before they are rounded to 16 bits. With accumulate_dkv they
    are added to what is there, as context parallelism adds up the gradients of blocks of queries.

    Args:
        dout: the gradient of out, in any strides.
        out: the output, contiguous in its last dimension. For a block of keys, the output of all
            blocks.
        softmax_lse: the log-sum-exp that belongs to out, contiguous.
        sequed_q, sequed_k: seqused_q and seqused_k, as FlashAttention-3 spells them here.
        dq, dk, dv: like q, k and v, in any strides; they must be given. dk and dv may both be
            float32.
        accumulate_dkv: whether to add dK and dV to dk and dv, which are float32 then.
        q and the others: as `flash_attn_func` or, with cu_seqlens_q, `flash_attn_varlen_func` took
            them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has a wrong value, shape, layout or device.
        NotImplementedError: a tensor does not lie in memory.
    """
    window = check_window(as_pair((window_size_left, window_size_right)), False)
    scale = None if softmax_scale is None else real("softmax_scale", softmax_scale)
    is_causal, softcap = flag("is_causal", is_causal), converted("softcap", softcap)
    margin = converted("sm_margin", sm_margin)
    named: dict[str, Any] = {
        "d_out": dout, "d_lse": None, "q": q, "k": k, "v": v, "out": out, "lse": softmax_lse,
        "softmax_scale": scale, "causal": is_causal, "window_left": window[0],
        "window_right": window[1], "softcap": softcap, "sm_margin": margin,
        "deterministic": converted("deterministic", deterministic),
    }  # fmt: skip
    accumulate_dkv = flag("accumulate_dkv", accumulate_dkv)
    targets: dict[str, tuple[Any, torch.Tensor]] = {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}
    lengths_of = {"cu_seqlens_k": cu_seqlens_k, "sequed_q": sequed_q, "sequed_k": sequed_k}
    with torch.no_grad():
        if not is_traced(q):
            check_targets(targets, accumulate_dkv)
            arrived = in_memory("dout", dout) if isinstance(dout, torch.Tensor) else dout
            results = {"dout": arrived, "out": out, "softmax_lse": softmax_lse}
            check_beside(q, results, {"cu_seqlens_q": cu_seqlens_q} | lengths_of)
        if cu_seqlens_q is None:
            longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            check_absent("without cu_seqlens_q", {**lengths_of, **longest})
        else:
            if cu_seqlens_k is None:
                raise ValueError("cu_seqlens_k must be given with cu_seqlens_q")
            named |= {
                "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": integer("max_seqlen_q", max_seqlen_q, 0),
                "max_seqlen_k": integer("max_seqlen_k", max_seqlen_k, 0),
                "seqused_q": sequed_q, "seqused_k": sequed_k,
            }  # fmt: skip
        named["fp32_dkv"] = dk is not None and dk.dtype == torch.float32
        *grads, _ = operators.BACKWARD(**named)
        for (name, (target, _)), gradient in zip(targets.items(), grads, strict=True):
            if accumulate_dkv and name != "dq":
                target.add_(gradient)
            else:
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


def check_targets(targets: Mapping[str, tuple[Any, torch.Tensor]], accumulates: bool) -> None:
    """Raise unless gradients can be written to tensors of the caller's.

    Args:
        targets: by name, what is written, and what it must be like.
        accumulates: whether dk and dv, which are float32 then, are added to.
    """
    for name, (target, like) in targets.items():
        operand = Operand(*describe(name, target, 1))
        of = name.removeprefix("d")
        model = Operand(*describe(of, like))
        if name == "dq":
            check_dtype(name, operand, model.dtype)
        elif accumulates and operand.dtype != torch.float32:
            raise TypeError(
                f"{name} must be torch.float32 with accumulate_dkv, got {operand.dtype}"
            )
        elif operand.dtype not in (model.dtype, torch.float32):
            raise TypeError(
                f"{name} must be {model.dtype} like {of}, or torch.float32, got {operand.dtype}"
            )
        check_device(name, operand, of, model)
        check_shape(name, operand, tuple(model.shape), of)
        check_no_overlap(name, operand)
        check_writable(name, target)
    (dq, _), (dk, _), (dv, _) = targets.values()
    if dk.dtype != dv.dtype:
        raise TypeError(f"dv must be {dk.dtype} like dk, got {dv.dtype}")
    check_apart("dq", dq, ("dk", "dv"), (dk, dv))
    check_apart("dk", dk, ("dv",), (dv,))
