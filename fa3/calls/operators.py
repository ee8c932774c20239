"""Operators of torch: what stands in a graph for a call.

torch.compile, torch.export and make_fx see operators of torch only. While one of them traces, a
public function puts an operator of the namespace `fa3` in its place (`fa3.calls.traced`). When
the graph runs, the operator calls the function, with tensors in memory. Here are the operators'
signatures, results without their values (fakes), and the derivative.

| operator | stands for | writes |
|---|---|---|
| `fa3::attention` | the function that it names; has a derivative, except on a cache | |
| `fa3::attention.out` | the same with `out` | out |
| `fa3::backward` | the backward pass of `fa3::attention` | |
| `fa3::append` | `flash_attn_with_kvcache` that appends | the caches; out if not None |
| `fa3::combine` | `flash_attn_combine` | out if not None |

Arguments have the functions' names; the caches of `fa3::attention` are k and v. Scores and masks of
the user's are a name and tensors (`fa3.calls.user_functions`). The log-sum-exp always comes: it
costs next to nothing, and derivatives need it. An output of the caller's does not come again: in
its place is a tensor without elements.
"""

import ast
import inspect
import re
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
from fa3.calls.options import CACHED, DENSE, PACKED
from fa3.calls.user_functions import unflatten_function

Parameters = ParamSpec("Parameters")
"""The arguments of a public function."""

# Options in torch's words. Torch is not told their defaults: it would leave out of a call what has
# its default, and lists of tensors must be in their places for autograd.
LENGTH_ARGUMENTS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None"
)
SCORES = (
    "float? softmax_scale=None, bool causal=False, int window_left=-1, int window_right=-1, "
    "float softcap=0.0, int sm_margin=0, Tensor? alibi_slopes=None, Tensor? sinks=None"
)
MASK = "str? mask=None, Tensor[] mask_tensors=[]"
TRAINING = "bool deterministic=False, float dropout_p=0.0, Tensor? rng_state=None"
CACHE = (
    "Tensor? cache_seqlens=None, SymInt? cache_length=None, Tensor? cache_batch_idx=None, "
    "Tensor? cache_leftpad=None, Tensor? page_table=None, bool batch_invariant=False, "
    "int num_splits=0"
)
ATTENTION_OPTIONS = (
    f"{LENGTH_ARGUMENTS}, {SCORES}, {MASK}, {TRAINING}, {CACHE}, str? score=None, "
    "Tensor[] score_tensors=[], str? schedule=None, bool? pack_gqa=None"
)
APPEND_OPTIONS = (
    f"{SCORES}, {CACHE}, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? cu_seqlens_k_new=None, bool rotary_interleaved=True"
)


class Operator:
    """An operator of the namespace `fa3`.

    Args:
        arguments: as torch writes them, but options with a default come last.
        num_results: tensors that it returns.
        fake: takes fake tensors by name, and makes results like a call's.
    """

    def __init__(self, name: str, arguments: str, num_results: int, fake: Callable) -> None:
        self.name = f"fa3::{name}"
        options = re.findall(r"(\w+)=([^,]+)", arguments)
        self.defaults = {option: ast.literal_eval(default) for option, default in options}
        schema = re.sub(r"=[^,]+", "", arguments)
        results = ", ".join(["Tensor"] * num_results)
        # Inductor is not to lay out anew what the kernels walk as it lies.
        tags = (torch.Tag.needs_exact_strides,)
        torch.library.define(self.name, f"({schema}) -> ({results})", tags=tags)
        packet, _, overload = name.partition(".")
        self.overload = getattr(getattr(torch.ops.fa3, packet), overload or "default")
        self.arguments = tuple(one.name for one in self.overload._schema.arguments)
        torch.library.register_fake(
            self.name, lambda *given, **named: fake(**self.by_name(given), **named)
        )

    def __call__(self, **arguments: object) -> Any:
        """Call the operator; options that are left out have their defaults."""
        return self.overload(**(self.defaults | arguments))

    def by_name(self, given: tuple) -> dict[str, Any]:
        return dict(zip(self.arguments, given, strict=False))

    def implemented_by(self, function: Callable) -> None:
        """Have the operator run a function, which takes its arguments by name."""

        def run(*given):
            with torch.no_grad():
                return function(**self.by_name(given))

        torch.library.impl(self.name, ("cpu", "cuda"))(run)


FUNCTIONS: dict[str, tuple[Callable, frozenset[str]]] = {}
"""The public functions that operators stand for, and their arguments."""


def registers(function: Callable[Parameters, object]) -> Callable[Parameters, Any]:
    """Have operators stand for a public function; for decorating it.

    Type checkers check its arguments. What it returns, a tensor or two, they cannot know.
    """
    FUNCTIONS[function.__name__] = function, frozenset(inspect.signature(function).parameters)
    return function


def run_attention(function: str = CACHED, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a public function with an operator's arguments."""
    attend, accepted = FUNCTIONS[function]
    call = as_call(arguments)
    if function == CACHED and "k_cache" not in call:
        call["k_cache"], call["v_cache"] = call.pop("k"), call.pop("v")
    accepted = {name: value for name, value in call.items() if name in accepted}
    out, lse = attend(**accepted, return_lse=True)
    return (out if call.get("out") is None else out.new_empty(0)), lse


def run_combine(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `flash_attn_combine` with an operator's arguments."""
    combine, _ = FUNCTIONS["flash_attn_combine"]
    out, lse = combine(**arguments)
    return (out if arguments["out"] is None else out.new_empty(0)), lse


def as_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator as its function takes them."""
    call = dict(arguments)
    call["window_size"] = call.pop("window_left"), call.pop("window_right")
    for kind in ("score", "mask"):
        if kind in call:
            call[kind] = unflatten_function(call[kind], call.pop(f"{kind}_tensors"))
    length = call.pop("cache_length", None)
    if length is not None:
        call["cache_seqlens"] = length
    return call


# -------------------------------------------------------------------------------------- fakes


def fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: str, **rest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like a public function's."""
    names = ("q", "k_cache", "v_cache") if function == CACHED else ("q", "k", "v")
    operands = [Operand(x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v)]
    # What can be seen while a graph is traced, with no guard on a size.
    for name, operand in zip(names, operands, strict=True):
        check_rank(name, operand, PACKED_DIMENSIONS if function == PACKED else DIMENSIONS)
        check_same_kind(name, operand, operands[0])
    check_dtype("q", operands[0], *DTYPES)
    *batch, rows, heads, _ = q.shape
    shape = (*batch, rows, heads, v.shape[-1]) if rest.get("out") is None else (0,)
    return q.new_empty(shape), q.new_empty(*batch, heads, rows, dtype=torch.float32)


def fake_append(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **rest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_with_kvcache`'s."""
    return fake_attention(q, k_cache, v_cache, CACHED, out=rest["out"])


def fake_combined(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_combine`'s."""
    partial = Operand(
        out_partial.shape, out_partial.stride(), out_partial.dtype, out_partial.device
    )
    check_rank("out_partial", partial, ("num_splits", *DIMENSIONS))
    _, *shape = out_partial.shape
    batch, seqlen, heads, _ = shape
    combined = out_partial.new_empty(shape if out is None else 0, dtype=out_dtype)
    return combined, lse_partial.new_empty(batch, heads, seqlen).transpose(1, 2)


def fake_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    fp32_dkv: bool,
    **rest,
) -> tuple[torch.Tensor, ...]:
    """Return results like `fa3.calls.operator_backward`."""
    like_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    dtype = torch.float32 if fp32_dkv else k.dtype
    dk, dv = (tensor.new_empty(tensor.shape, dtype=dtype) for tensor in (k, v))
    return q.new_empty(q.shape), dk, dv, like_sinks


QKV = "Tensor q, Tensor k, Tensor v"
ATTENTION = Operator("attention", f"str function, {QKV}, {ATTENTION_OPTIONS}", 2, fake_attention)
ATTENTION_OUT = Operator(
    "attention.out",
    f"str function, {QKV}, Tensor(a!) out, {ATTENTION_OPTIONS}",
    2,
    fake_attention,
)
BACKWARD = Operator(
    "backward",
    f"Tensor? d_out, Tensor? d_lse, {QKV}, Tensor out, Tensor lse, {LENGTH_ARGUMENTS}, {SCORES}, "
    f"{MASK}, {TRAINING}, bool fp32_dkv=False",
    4,
    fake_gradients,
)
APPEND = Operator(
    "append",
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? out, Tensor k, Tensor v, "
    f"{APPEND_OPTIONS}",
    2,
    fake_append,
)
COMBINE = Operator(
    "combine",
    "Tensor out_partial, Tensor lse_partial, Tensor(a!)? out, ScalarType out_dtype",
    2,
    fake_combined,
)
for operator in (ATTENTION, ATTENTION_OUT, APPEND):
    operator.implemented_by(run_attention)
COMBINE.implemented_by(run_combine)


# -------------------------------------------------------------------------------- derivatives


def keep_operands(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep what the backward pass of `fa3::attention` reads.

    Raises:
        NotImplementedError: a graph that was traced without gradients has a score or a cache.
    """
    options = ATTENTION.by_name(inputs)
    function = options["function"]
    if function == CACHED:
        raise NotImplementedError(f"{function} has no gradient: use torch.no_grad()")
    if options["score"] is not None:
        raise no_derivative_of_score("q, k, v or sinks")
    options = {name: value for name, value in options.items() if name in BACKWARD.arguments}
    mask_tensors = options.pop("mask_tensors")
    ctx.names = tuple(name for name, one in options.items() if isinstance(one, torch.Tensor))
    ctx.save_for_backward(*output, *map(options.pop, ctx.names), *mask_tensors)
    ctx.options = options
    ctx.set_materialize_grads(False)


def gradients_in_graphs(ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple:
    """The gradients of q, k, v and the sinks; nothing else has one."""
    out, lse, *saved = ctx.saved_tensors
    count = len(ctx.names)
    named, mask_tensors = dict(zip(ctx.names, saved, strict=False)), saved[count:]
    d_q, d_k, d_v, d_sinks = BACKWARD(
        d_out=d_out, d_lse=d_lse, out=out, lse=lse, mask_tensors=mask_tensors, **named,
        **ctx.options,
    )  # fmt: skip
    gradients = {
        "q": d_q, "k": d_k, "v": d_v, "sinks": d_sinks if "sinks" in named else None,
        "score_tensors": [], "mask_tensors": [None] * len(mask_tensors),
    }  # fmt: skip
    return tuple(gradients.get(name) for name in ATTENTION.arguments)


def keep_function(ctx, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    """Keep the function that `fa3::backward` belongs to."""
    ctx.function = DENSE if BACKWARD.by_name(inputs)["cu_seqlens_q"] is None else PACKED


def refuse_second_derivative(ctx, *gradients: torch.Tensor):
    raise no_second_derivative(ctx.function)


torch.library.register_autograd(ATTENTION.name, gradients_in_graphs, setup_context=keep_operands)
torch.library.register_autograd(
    BACKWARD.name, refuse_second_derivative, setup_context=keep_function
)
