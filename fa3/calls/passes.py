"""The forward and backward pass by themselves, with FlashAttention-3's arguments.

Libraries for context parallelism call them block by block: they merge the outputs of blocks of
keys, and give the backward pass of each block the output and the log-sum-exp of all of them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fa3.calls import operators
from fa3.calls.attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.calls.eager import in_memory, is_traced
from fa3.calls.operands import DTYPES, check_apart, check_writable, describe
from fa3.calls.operators import flatten_function
from fa3.calls.options import as_pair, check_window, converted, flag, integer, real
from fa3.complaints import kind_of
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask


def with_parameters(names: str, *functions: Callable) -> Callable[[Callable], Callable]:
    """Return a decorator: parameters get this order, by position or name.
    Types and defaults are the function's, or else the first other function's that has the
    parameter; None where none has it. Its other parameters are taken by name only."""

    def decorate(function: Callable) -> Callable:
        order, signatures = names.split(), list(map(inspect.signature, (function, *functions)))
        kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
        for name in order:
            known = [one.parameters[name] for one in signatures if name in one.parameters]
            model = known[0] if known else inspect.Parameter(name, kind, default=None)
            parameters.append(model.replace(kind=kind))
        parameters += [
            one
            for one in signatures[0].parameters.values()
            if one.kind is one.KEYWORD_ONLY and one.name not in order
        ]

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
    "rotary_sin": "rotary_sin", "seqlens_rotary": "rotary_seqlens", "seqused_k": "cache_seqlens",
    "cu_seqlens_q": "cu_seqlens_q",
}  # fmt: skip
"""Arguments of a call on a cache, and what `flash_attn_with_kvcache` calls them."""


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
    """Compute output and log-sum-exp by the public function that fits the arguments.

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
    interleaved = arguments.pop("rotary_interleaved", True)
    passed = {name: value for name, value in arguments.items() if value is not None}
    function: Callable[..., Any] = flash_attn_func
    if "cu_seqlens_k" in passed:
        function = flash_attn_varlen_func
    elif passed.keys() & IN_CACHE.keys():
        function = flash_attn_with_kvcache
        passed = {IN_CACHE.get(name, name): value for name, value in passed.items()}
        passed["rotary_interleaved"] = interleaved
    passed |= {"window_size": (window_size_left, window_size_right), "return_lse": True}
    out, lse = function(q, k, v, out=out_, **{"num_splits": 1} | passed)
    no_splits = lse.new_empty(0)
    return out, lse, no_splits, no_splits


def flash_attn_backward(
    d_out: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    d_lse: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    fp32_dkv: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    accumulate_dkv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of attention from its output and log-sum-exp.

    The weights are exp(scores - lse). So k and v may be a part of the keys that belong to out and
    lse: dK and dV are then complete, and dQ is that part's share. Nothing is kept for autograd.
    With cu_seqlens_q sequences are packed, as in `flash_attn_varlen_func`; otherwise tensors are
    as in `flash_attn_func`. Both are differentiable without this function.

    Args:
        d_out: the gradient of out, in any strides; None for zeros.
        out: the output, of q's dtype, contiguous in its last dimension.
        lse: the log-sum-exp that belongs to out, contiguous; (batch, heads_q, seqlen_q), or
            (heads_q, total_q) of packed sequences.
        d_lse: the gradient of lse, float32, in any strides; None for zeros.
        fp32_dkv: return dK and dV in float32, as they are before they are rounded. They suit sums
            over several calls. Must be False if dk and dv are given in 16 bits.
        dq, dk, dv: tensors that receive the gradients, in any strides; dk and dv together. dq is
            like q. dk and dv are like k and v, or both float32.
        accumulate_dkv: add dK and dV to what dk and dv hold, which must be float32 then.
        q and the others: as the forward pass took them.

    Returns:
        the gradients of q, k, v and the sinks: dq, dk and dv if they were passed, and None for no
        sinks. Rows that see no key or are not used get 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.

    Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1, algorithm 2.
    """
    window = check_window(as_pair(window_size), flag("causal", causal))
    named: dict[str, Any] = {
        "d_out": d_out, "d_lse": d_lse, "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "softmax_scale": None if softmax_scale is None else real("softmax_scale", softmax_scale),
        "window_left": window.left, "window_right": window.right, "alibi_slopes": alibi_slopes,
        "softcap": converted("softcap", softcap), "sm_margin": converted("sm_margin", sm_margin),
        "sinks": sinks, "rng_state": rng_state, "dropout_p": converted("dropout_p", dropout_p),
        "deterministic": converted("deterministic", deterministic),
    }  # fmt: skip
    if dropout_p and rng_state is None:
        raise ValueError("rng_state must be given with dropout_p: the seed of the forward pass")
    named["mask"], named["mask_tensors"] = flatten_function("mask", mask, Mask)
    longest: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    lengths: dict[str, Any] = {
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    targets: dict[str, tuple[Any, torch.Tensor]] = {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}
    targets = {name: pair for name, pair in targets.items() if pair[0] is not None}
    accumulate_dkv, fp32_dkv = flag("accumulate_dkv", accumulate_dkv), flag("fp32_dkv", fp32_dkv)
    if (dk is None) != (dv is None):
        absent, other = ("dk", "dv") if dk is None else ("dv", "dk")
        raise ValueError(f"{absent} must be given with {other}, got None")
    if accumulate_dkv and dk is None:
        raise ValueError("dk and dv must be given with accumulate_dkv, got None")
    with torch.no_grad():
        traced = is_traced(q)
        if not traced:
            describe("q", q).check_dtype("q", *DTYPES)
            check_targets(targets, accumulate_dkv)
        if cu_seqlens_q is None:
            for name, value in (lengths | longest).items():
                if value is not None:
                    raise ValueError(f"{name} must be None without cu_seqlens_q")
        else:
            if cu_seqlens_k is None:
                raise ValueError("cu_seqlens_k must be given with cu_seqlens_q")
            named |= {name: integer(name, value, 0) for name, value in longest.items()}
            named |= lengths | {"cu_seqlens_q": cu_seqlens_q}
        if fp32_dkv and dk is not None and dk.dtype != torch.float32:
            raise ValueError(f"fp32_dkv must be False with dk and dv in {dk.dtype}, got True")
        named["fp32_dkv"] = fp32_dkv if dk is None else dk.dtype == torch.float32
        # Outside of a graph the operator itself would take 40 us.
        run = operators.BACKWARD if traced else operators.run_backward
        *grads, d_sinks = run(**named)
        by_name = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        for name, (target, _) in targets.items():
            if accumulate_dkv and name != "dq":
                target.add_(by_name[name])
            else:
                target.copy_(by_name[name])
            by_name[name] = target
    return by_name["dq"], by_name["dk"], by_name["dv"], None if sinks is None else d_sinks


@with_parameters(
    "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q "
    "max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap "
    "deterministic sm_margin",
    flash_attn_backward,
)
def _flash_attn_backward(
    *,
    dout: torch.Tensor,
    q: torch.Tensor,
    softmax_lse: torch.Tensor,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    is_causal: bool = False,
    window_size_left: int = NO_BOUND,
    window_size_right: int = NO_BOUND,
    accumulate_dkv: bool = False,
    **arguments: Any,
) -> None:
    """Write q's, k's and v's gradients into dq, dk and dv.

    FlashAttention-3's arguments of `fa3.flash_attn_backward`. FlashAttention-3 returns the row sums
    of dout * out; this function returns nothing.

    Args:
        dout, softmax_lse: d_out and lse.
        sequed_q, sequed_k: seqused_q and seqused_k, as FlashAttention-3 spells them here.
        dq, dk, dv: must be given.
        q and the others: as in `fa3.flash_attn_backward`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fa3.flash_attn_backward`.
    """
    is_causal = flag("is_causal", is_causal)
    with torch.no_grad():
        if not is_traced(q):
            required: dict[str, Any] = {x: arguments.get(x) for x in ("dq", "dk", "dv")}
            required |= {"dout": in_memory("dout", dout), "softmax_lse": softmax_lse}
            operand = describe("q", q)
            for name, tensor in required.items():
                describe(name, tensor, 1).check_device(name, "q", operand)
        flash_attn_backward(
            dout, q, lse=softmax_lse, causal=is_causal, seqused_q=sequed_q, seqused_k=sequed_k,
            window_size=(window_size_left, window_size_right), accumulate_dkv=accumulate_dkv,
            **arguments,
        )  # fmt: skip


def check_targets(targets: Mapping[str, tuple[Any, torch.Tensor]], accumulates: bool) -> None:
    """Raise unless gradients can be written to tensors of the caller's.
    `targets` has by name what is written, and what it must be like; dk and dv together. If it
    `accumulates`, dk and dv, which are float32 then, are added to."""
    for name, (target, like) in targets.items():
        operand = describe(name, target, 1)
        of = name.removeprefix("d")
        model = describe(of, like)
        if name == "dq":
            operand.check_dtype(name, model.dtype)
        elif accumulates and operand.dtype != torch.float32:
            raise TypeError(
                f"{name} must be torch.float32 with accumulate_dkv, got {operand.dtype}"
            )
        elif operand.dtype not in (model.dtype, torch.float32):
            raise TypeError(
                f"{name} must be {model.dtype} like {of}, or torch.float32, got {operand.dtype}"
            )
        operand.check_device(name, of, model)
        operand.check_shape(name, tuple(model.shape), of)
        operand.check_no_overlap(name)
        check_writable(name, target)
    tensors = {name: target for name, (target, _) in targets.items()}
    if "dk" in tensors and tensors["dk"].dtype != tensors["dv"].dtype:
        raise TypeError(f"dv must be {tensors['dk'].dtype} like dk, got {tensors['dv'].dtype}")
    check_apart(tuple(tensors), tensors)
