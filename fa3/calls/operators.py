"""Operators of torch: what stands in a graph for a call.

torch.compile, torch.export and make_fx see operators of torch only. While one of them traces, a
public function puts an operator of the namespace `fa3` in its own place (`fa3.calls.traced`); when
the graph runs, the operator calls the function, with tensors that lie in memory. Here are the
operators' signatures, what they give without computing it, and the derivatives.

| operator | stands for | writes |
|---|---|---|
| `fa3::forward` | `flash_attn_func`; has a derivative | |
| `fa3::forward_out` | the same with `out` | out |
| `fa3::backward` | the backward pass of `fa3::forward` | |
| `fa3::varlen_forward` | `flash_attn_varlen_func`; has a derivative | |
| `fa3::varlen_forward_out` | the same with `out` | out |
| `fa3::varlen_backward` | the backward pass of `fa3::varlen_forward` | |
| `fa3::with_kvcache` | `flash_attn_with_kvcache` that appends | the caches; out if given |
| `fa3::read_kvcache` | `flash_attn_with_kvcache` that does not append | out if given |
| `fa3::combine` | `flash_attn_combine` | out if given |

Arguments have the functions' names; scores and masks of the user's are a name and tensors
(`fa3.calls.user_functions`). The log-sum-exp always comes: it costs next to nothing, and
derivatives need it. An output that was given does not come again: in its place is a tensor without
elements.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from fa3.calls.autograd import no_derivative_of_score, no_second_derivative
from fa3.calls.operands import (
    DIMENSIONS,
    DTYPES,
    PACKED_DIMENSIONS,
    Operand,
    check_dtype,
    check_rank,
    check_same_kind,
)
from fa3.calls.user_functions import put_together

Given = ParamSpec("Given")
"""The arguments of a public function."""

OF_SCORES = (
    "float? softmax_scale, bool causal, int window_left, int window_right, float softcap, "
    "int sm_margin, Tensor? alibi_slopes, Tensor? sinks"
)
FUNCTIONS = "str? score, Tensor[] score_tensors, str? mask, Tensor[] mask_tensors"
UNCACHED = f"{OF_SCORES}, {FUNCTIONS}, bool deterministic, float dropout_p, Tensor? rng_state"
DENSE = f"{UNCACHED}, str? schedule, bool? pack_gqa"
PACKED = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"Tensor? seqused_q, Tensor? seqused_k, {UNCACHED}, int num_splits"
)
CACHED = (
    "Tensor? cache_seqlens, SymInt? cache_length, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
    f"Tensor? page_table, {OF_SCORES}, int num_splits, bool batch_invariant"
)
APPENDED = (
    "Tensor k, Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cu_seqlens_k_new, "
    "bool rotary_interleaved"
)
QKV, RESULTS = "Tensor q, Tensor k, Tensor v", "(Tensor, Tensor)"
DIFFERENTIATED = f"Tensor? d_out, Tensor? d_lse, {QKV}, Tensor out, Tensor lse"
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"


class Operator:
    """An operator of the namespace `fa3`.

    Args:
        schema: arguments and results, as torch writes them.
        fake: takes fake tensors by name, and makes results like a call's.
    """

    def __init__(self, name: str, schema: str, fake: Callable) -> None:
        self.name = f"fa3::{name}"
        # Inductor is not to lay out anew what the kernels walk as it lies.
        torch.library.define(self.name, schema, tags=(torch.Tag.needs_exact_strides,))
        self.overload = getattr(torch.ops.fa3, name).default
        self.arguments = tuple(one.name for one in self.overload._schema.arguments)
        torch.library.register_fake(
            self.name, lambda *given, **named: fake(**self.by_name(given), **named)
        )

    def by_name(self, given: tuple) -> dict[str, object]:
        return dict(zip(self.arguments, given, strict=False))

    def runs(self, function: Callable) -> Callable:
        """Have the operator run a function; for decorating it."""

        def run(*given):
            with torch.no_grad():
                return function(**as_call(self.by_name(given)))

        torch.library.impl(self.name, ("cpu", "cuda"))(run)
        return function

    def stands_for(self, function: Callable[Given, object]) -> Callable[Given, Any]:
        """Have the operator run a public function; for decorating it.

        Type checkers check its arguments. What it returns, a tensor or two, they cannot know.
        """

        def run(**call):
            out, lse = function(**call)
            return (out if call.get("out") is None else out.new_empty(0)), lse

        self.runs(run)
        return function


def as_call(arguments: dict[str, object]) -> dict[str, object]:
    """The arguments of an operator as its function takes them."""
    call = dict(arguments)
    if "window_left" in call:
        call["window_size"] = call.pop("window_left"), call.pop("window_right")
        call["return_lse"] = True
    if "score" in call:
        for kind in ("score", "mask"):
            call[kind] = put_together(call[kind], call.pop(f"{kind}_tensors"))
    if "cache_length" in call:
        length = call.pop("cache_length")
        if length is not None:
            call["cache_seqlens"] = length
    return call


# -------------------------------------------------------------------------------------- fakes


def fake_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None, **rest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_func`'s."""
    check_fakes({"q": q, "k": k, "v": v}, DIMENSIONS)
    batch, seqlen_q, heads, _ = q.shape
    return fake_out(q, (batch, seqlen_q, heads, v.shape[3]), out), q.new_empty(
        batch, heads, seqlen_q, dtype=torch.float32
    )


def fake_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None, **rest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_varlen_func`'s."""
    check_fakes({"q": q, "k": k, "v": v}, PACKED_DIMENSIONS)
    total_q, heads, _ = q.shape
    return fake_out(q, (total_q, heads, v.shape[2]), out), q.new_empty(
        heads, total_q, dtype=torch.float32
    )


def fake_cached(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    **rest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_with_kvcache`'s."""
    check_fakes({"q": q, "k_cache": k_cache, "v_cache": v_cache}, DIMENSIONS)
    batch, seqlen_q, heads, _ = q.shape
    return fake_out(q, (batch, seqlen_q, heads, v_cache.shape[3]), out), q.new_empty(
        batch, heads, seqlen_q, dtype=torch.float32
    )


def fake_combined(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_combine`'s."""
    check_rank("out_partial", as_operand(out_partial), ("num_splits", *DIMENSIONS))
    _, *shape = out_partial.shape
    batch, seqlen, heads, _ = shape
    combined = out_partial.new_empty(shape if out is None else 0, dtype=out_dtype)
    return combined, lse_partial.new_empty(batch, heads, seqlen).transpose(1, 2)


def fake_out(q: torch.Tensor, shape: tuple[int, ...], given: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty(shape if given is None else 0)


def check_fakes(tensors: dict[str, torch.Tensor], dimensions: tuple[str, ...]) -> None:
    """Raise for what can be seen while a graph is traced, with no guard on a size."""
    operands = {name: as_operand(tensor) for name, tensor in tensors.items()}
    for name, operand in operands.items():
        check_rank(name, operand, dimensions)
        check_same_kind(name, operand, operands["q"])
    check_dtype("q", operands["q"], *DTYPES)


def as_operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def fake_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    **rest,
) -> tuple[torch.Tensor, ...]:
    """Return results like `fa3.calls.operator_backward`."""
    like_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), like_sinks


FORWARD = Operator("forward", f"({QKV}, {DENSE}) -> {RESULTS}", fake_dense)
FORWARD_OUT = Operator("forward_out", f"({QKV}, Tensor(a!) out, {DENSE}) -> {RESULTS}", fake_dense)
BACKWARD = Operator("backward", f"({DIFFERENTIATED}, {DENSE}) -> {GRADIENTS}", fake_gradients)
VARLEN = Operator("varlen_forward", f"({QKV}, {PACKED}) -> {RESULTS}", fake_packed)
VARLEN_OUT = Operator(
    "varlen_forward_out", f"({QKV}, Tensor(a!) out, {PACKED}) -> {RESULTS}", fake_packed
)
VARLEN_BACKWARD = Operator(
    "varlen_backward", f"({DIFFERENTIATED}, {PACKED}) -> {GRADIENTS}", fake_gradients
)
WITH_KVCACHE = Operator(
    "with_kvcache",
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? out, "
    f"{APPENDED}, {CACHED}) -> {RESULTS}",
    fake_cached,
)
READ_KVCACHE = Operator(
    "read_kvcache",
    f"(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!)? out, {CACHED}) -> {RESULTS}",
    fake_cached,
)
COMBINE = Operator(
    "combine",
    f"(Tensor out_partial, Tensor lse_partial, Tensor(a!)? out, ScalarType out_dtype) -> {RESULTS}",
    fake_combined,
)


# -------------------------------------------------------------------------------- derivatives


def differentiate_by(forward: Operator, backward: Operator, call: str) -> None:
    """Make an operator the derivative of another; it has none itself.

    Args:
        forward: gives out and lse.
        backward: takes their gradients, out, lse and what `forward` takes.
        call: the public function that `forward` stands for.
    """

    def keep(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep what the backward pass reads.

        Raises:
            NotImplementedError: a graph that was traced without gradients has a score.
        """
        options = forward.by_name(inputs)
        if options["score"] is not None:
            raise no_derivative_of_score("q, k, v or sinks")
        mask_tensors = options.pop("mask_tensors")
        ctx.names = tuple(name for name, one in options.items() if isinstance(one, torch.Tensor))
        ctx.save_for_backward(*output, *map(options.pop, ctx.names), *mask_tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)

    def differentiate(ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple:
        """The gradients of q, k, v and the sinks; nothing else has one."""
        out, lse, *saved = ctx.saved_tensors
        count = len(ctx.names)
        named, mask_tensors = dict(zip(ctx.names, saved, strict=False)), saved[count:]
        d_q, d_k, d_v, d_sinks = backward.overload(
            d_out, d_lse, out=out, lse=lse, mask_tensors=mask_tensors, **named, **ctx.options
        )
        gradients = {
            "q": d_q, "k": d_k, "v": d_v, "sinks": d_sinks if "sinks" in named else None,
            "score_tensors": [None] * len(ctx.options["score_tensors"]),
            "mask_tensors": [None] * len(mask_tensors),
        }  # fmt: skip
        return tuple(gradients.get(name) for name in forward.arguments)

    def refuse(ctx, *gradients: torch.Tensor):
        raise no_second_derivative(call)

    torch.library.register_autograd(forward.name, differentiate, setup_context=keep)
    torch.library.register_autograd(backward.name, refuse)


differentiate_by(FORWARD, BACKWARD, "flash_attn_func")
differentiate_by(VARLEN, VARLEN_BACKWARD, "flash_attn_varlen_func")
