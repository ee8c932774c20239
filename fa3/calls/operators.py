"""Operators of torch: what stands in a graph for a call.

torch.compile, torch.export and make_fx see operators of torch only. While one of them traces, a
public function puts an operator of the namespace `fa3` in its place (`trace_attention`). When the
graph runs, the operator calls the function, with tensors in memory. Here are the operators'
signatures, results without their values (fakes), the derivative, and what a traced call does.

| operator | stands for | writes |
|---|---|---|
| `fa3::attention` | the function that it names; has a derivative, except on a cache | |
| `fa3::attention.out` | the same with `out` | out |
| `fa3::backward` | the backward pass of `fa3::attention` | |
| `fa3::append` | `flash_attn_with_kvcache` that appends | the caches; out if not None |
| `fa3::combine` | `flash_attn_combine` | out if not None |

Arguments have the names of `fa3.calls.call.TENSORS`, or the functions'. Scores and masks of the
user's are a name and tensors (`flatten_function`). The log-sum-exp always comes: it
costs next to nothing, and derivatives need it. An output of the caller's does not come again: in
its place is a tensor without elements.
"""

import ast
import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, cast

import torch

from fa3.calls.backward import (
    BackwardCall,
    check_differentiable,
    no_derivative_of_score,
    no_second_derivative,
    preparation_of,
    wants_gradient,
)
from fa3.calls.call import (
    QKV,
    TENSORS,
    AttentionCall,
    check_new_tokens,
    check_tensors,
    check_totals,
    describe_tensors,
    prepare_without_lengths,
    public_name,
)
from fa3.calls.devices import gpu_for_call
from fa3.calls.eager import check_undifferentiated, in_memory
from fa3.calls.modifiers import draw_rng_state, dropout_of, functions_of, modifier_tensors
from fa3.calls.operands import (
    ALIGNMENT,
    DIMENSIONS,
    DTYPES,
    PACKED_DIMENSIONS,
    describe,
    dtype_of_output,
    operand_of,
)
from fa3.calls.options import (
    CACHED,
    DENSE,
    OPTIONS_OF,
    PACKED,
    PAGED,
    Options,
    as_pair,
    check_probability,
    check_scale,
    check_softcap,
    check_window,
    named_options,
)
from fa3.calls.values import check_lengths, is_visible
from fa3.complaints import not_an_object
from fa3.problem import REMEMBERED, Problem, Window
from fa3.reference.backward import BackwardOperands
from fa3.reference.walker import PackedLengths
from fa3.scores.masks import Mask
from fa3.scores.scores import Score
from fa3.scores.templates import Template, TensorType, types_of

Parameters = ParamSpec("Parameters")  # the arguments of a public function

# Options in torch's words. Torch is not told their defaults: it would leave out of a call what has
# its default, and lists of tensors must be in their places for autograd.
LENGTH_ARGUMENTS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None"
)
SCORE_ARGUMENTS = (
    "float? softmax_scale=None, bool causal=False, int window_left=-1, int window_right=-1, "
    "float softcap=0.0, int sm_margin=0, Tensor? alibi_slopes=None, Tensor? sinks=None"
)
MASK = "str? mask=None, Tensor[] mask_tensors=[]"
TRAINING = "bool deterministic=False, float dropout_p=0.0, Tensor? rng_state=None"
CACHE = (
    "SymInt? cache_length=None, Tensor? batch_idx=None, "
    "Tensor? leftpad=None, Tensor? page_table=None, bool batch_invariant=False, "
    "int num_splits=0, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
)
ATTENTION_OPTIONS = (
    f"{LENGTH_ARGUMENTS}, {SCORE_ARGUMENTS}, {MASK}, {TRAINING}, {CACHE}, str? score=None, "
    "Tensor[] score_tensors=[], str? schedule=None, bool? pack_gqa=None"
)
APPEND_OPTIONS = (
    f"{SCORE_ARGUMENTS}, Tensor? seqused_k=None, {CACHE}, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? cu_seqlens_k_new=None, bool rotary_interleaved=True"
)


class Operator:
    """An operator of the namespace `fa3`, which returns so many tensors.
    `arguments` are as torch writes them, but options with a default come last. `fake` takes fake
    tensors by name, and makes results like a call's."""

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
            self.name, lambda *values, **named: fake(**self.by_name(values), **named)
        )

    def __call__(self, **arguments: object) -> Any:
        """Call the operator; options that are left out have their defaults."""
        return self.overload(**(self.defaults | arguments))

    def by_name(self, values: tuple) -> dict[str, Any]:
        return dict(zip(self.arguments, values, strict=False))

    def implemented_by(self, function: Callable) -> None:
        """Have the operator run a function, which takes its arguments by name."""

        def run_without_gradients(*values):
            with torch.no_grad():
                return function(**self.by_name(values))

        torch.library.impl(self.name, ("cpu", "cuda"))(run_without_gradients)


FUNCTIONS: dict[str, tuple[Callable, frozenset[str]]] = {}
"""The public functions that operators stand for, and their arguments."""


def registers(function: Callable[Parameters, object]) -> Callable[Parameters, Any]:
    """Have operators stand for a public function; for decorating it.
    Type checkers check its arguments. What it returns, a tensor or two, they cannot know."""
    FUNCTIONS[function.__name__] = function, frozenset(inspect.signature(function).parameters)
    return function


def run_function(function: str = CACHED, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a public function with an operator's arguments."""
    attend, accepted = FUNCTIONS[function]
    call = as_call({public_name(function, name): value for name, value in arguments.items()})
    call["return_lse"] = True
    out, lse = attend(**{name: call[name] for name in accepted if name in call})
    return (out if call.get("out") is None else out.new_empty(0)), lse


def as_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator as its function takes them."""
    call = dict(arguments)
    call["window_size"] = call.pop("window_left", None), call.pop("window_right", None)
    for kind in ("score", "mask"):
        if kind in call:
            call[kind] = unflatten_function(call[kind], call.pop(f"{kind}_tensors"))
    length = call.pop("cache_length", None)
    if length is not None:
        call["cache_seqlens"] = length
    return call


# ------------------------------------------------------------------------- scores and masks

# An operator takes tensors, numbers and strings. So an object of the user's goes to one as a name
# and its tensors: the name stands for its class and its plain fields, and is given when a graph is
# traced. Names are kept as long as the process lives, as graphs may. They mean nothing to another
# process: one that loads an exported program has to name the same objects first, see `name_of`.

NAMES: dict[Template, str] = {}
TEMPLATES: dict[str, Template] = {}
"""By their names; of tensor fields they have only the names."""
NAMING = threading.Lock()


def flatten_function(
    argument: str, function: object | None, base: type[Score] | type[Mask]
) -> tuple[str | None, list[torch.Tensor]]:
    """The name and the tensors of an object; torch.compile reads along.
    `argument` is what the call knows it as."""
    if function is None:
        return None, []
    kind = type(function)
    if not isinstance(function, base):
        raise not_an_object(argument, function, base)
    if not dataclasses.is_dataclass(function):
        raise TypeError(f"{kind.__name__} must be a frozen dataclass")
    constants, names, tensors = [], [], []
    for field in dataclasses.fields(function):
        value = getattr(function, field.name)
        if isinstance(value, torch.Tensor):
            names.append(field.name)
            tensors.append(value)
        else:
            constants.append((field.name, value))
    return name_of(kind, tuple(constants), tuple(names)), tensors


def name_of(kind: type, constants: tuple[tuple[str, Hashable], ...], tensors: tuple[str, ...]):
    """The name of objects with these plain fields, always the same.
    It is the class's, with a number if the class has objects of other fields. So a process that
    asks for the names in the same order gets the same ones."""
    fields = tuple(TensorType(tensor, "", 0) for tensor in tensors)
    template = Template(kind, constants, tuple(types_of(v) for _, v in constants), fields)
    with NAMING:
        name = NAMES.get(template)
        if name is None:
            name = base = f"{kind.__module__}.{kind.__qualname__}"
            count = 1
            while name in TEMPLATES:
                count += 1
                name = f"{base}#{count}"
            NAMES[template], TEMPLATES[name] = name, template
    return name


# What `torch._dynamo.assume_constant_result` does, without the second that its import takes:
# torch.compile calls the function instead of reading it.
name_of._dynamo_marked_constant = True


def unflatten_function(name: str | None, tensors: Sequence[torch.Tensor]) -> Score | Mask | None:
    """The object with this name and these tensors."""
    if name is None:
        return None
    if name not in TEMPLATES:
        raise ValueError(
            f"{name} is not known here: the graph was traced in another process; trace a call with "
            "such a score or mask first"
        )
    return cast(Score | Mask, TEMPLATES[name].bind(iter(tensors)))


# -------------------------------------------------------------------------------------- fakes


def fake_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: str = CACHED, **rest
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like a public function's.
    What can be wrong besides is said when the graph runs."""
    operand_of(q).check_rank("q", PACKED_DIMENSIONS if function == PACKED else DIMENSIONS)
    *batch, rows, heads, _ = q.shape
    columns_v = v.shape[-3 if v.ndim == k.ndim + 1 else -1]  # V^T has one dimension more
    shape, out = (*batch, rows, heads, columns_v), rest.get("out")
    made = q.new_empty(shape, dtype=dtype_of_output(q.dtype)) if out is None else out.new_empty(0)
    return made, q.new_empty(*batch, heads, rows, dtype=torch.float32)


def fake_combined(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results like `flash_attn_combine`'s."""
    operand_of(out_partial).check_rank("out_partial", ("num_splits", *DIMENSIONS))
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
    """Return results like `run_backward`."""
    like_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    dtype = torch.float32 if fp32_dkv else k.dtype
    dk, dv = (tensor.new_empty(tensor.shape, dtype=dtype) for tensor in (k, v))
    return q.new_empty(q.shape), dk, dv, like_sinks


QKV_ARGUMENTS = "Tensor q, Tensor k, Tensor v"
ATTENTION = Operator(
    "attention", f"str function, {QKV_ARGUMENTS}, {ATTENTION_OPTIONS}", 2, fake_attention
)
ATTENTION_OUT = Operator(
    "attention.out",
    f"str function, {QKV_ARGUMENTS}, Tensor(a!) out, {ATTENTION_OPTIONS}",
    2,
    fake_attention,
)
BACKWARD = Operator(
    "backward",
    f"Tensor? d_out, Tensor? d_lse, {QKV_ARGUMENTS}, Tensor out, Tensor lse, {LENGTH_ARGUMENTS}, "
    f"{SCORE_ARGUMENTS}, {MASK}, {TRAINING}, bool fp32_dkv=False",
    4,
    fake_gradients,
)
APPEND = Operator(
    "append",
    "Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor(c!)? out, Tensor k_new, Tensor v_new, "
    f"{APPEND_OPTIONS}",
    2,
    fake_attention,
)
COMBINE = Operator(
    "combine",
    "Tensor out_partial, Tensor lse_partial, Tensor(a!)? out, ScalarType out_dtype",
    2,
    fake_combined,
)
for operator in (ATTENTION, ATTENTION_OUT, APPEND):
    operator.implemented_by(run_function)
COMBINE.implemented_by(functools.partial(run_function, "flash_attn_combine"))


# -------------------------------------------------------------------------------- derivatives


def keep_operands(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep what the backward pass of `fa3::attention` reads."""
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
    """The gradients of q, k, v and sinks; nothing else has one."""
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


def check_results(call: Mapping[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients in memory; raise unless all results fit q and v."""
    q, v, lse = (call[name] for name in ("q", "v", "lse"))
    *batch, rows, heads, _ = q.shape
    out_is = (*q.shape[:-1], v.shape[-1]), q.dtype
    lse_is = (*batch, heads, rows), torch.float32
    gradients = tuple(in_memory(name, call[name]) for name in ("d_out", "d_lse"))
    described_q = describe("q", q)
    for name, tensor, (shape, dtype), alignment in (
        ("out", call["out"], out_is, ALIGNMENT),
        ("lse", lse, lse_is, torch.float32.itemsize),
        ("d_out", gradients[0], out_is, 1),
        ("d_lse", gradients[1], lse_is, 1),
    ):
        if tensor is not None or name in ("out", "lse"):
            operand = describe(name, tensor, alignment)
            operand.check_dtype(name, dtype)
            operand.check_device(name, "q", described_q)
            operand.check_shape(name, shape, "q and v")
            if name == "out":
                operand.check_layout(name)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    return gradients


def run_backward(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and sinks (empty without sinks).
    Takes the arguments of `fa3::backward`."""
    call = as_call(BACKWARD.defaults | arguments)
    q, k, v, out, lse = (call[name] for name in ("q", "k", "v", "out", "lse"))
    slopes, sinks, softcap = call["alibi_slopes"], call["sinks"], call["softcap"]
    window = check_window(call["window_size"], call["causal"])
    check_softcap(softcap)
    describe("q", q).check_dtype("q", *DTYPES)
    functions, function_tensors = functions_of(q, None, call["mask"])
    dropout = dropout_of(call["dropout_p"], call["rng_state"], q)
    kind, longest, lengths = DENSE, None, None
    if call["cu_seqlens_q"] is not None:
        lengths, kind = tuple(call[name] for name in PackedLengths._fields), PACKED
        longest = call["max_seqlen_q"], call["max_seqlen_k"]
    options = Options(
        window, softcap, has_dropout=dropout is not None, functions=functions, kind=kind
    )
    tensors = call | {"out": None}
    described = describe_tensors(tensors, Options(kind=kind))
    problem = prepare_without_lengths(checked_problem, described, options)
    if longest is not None:
        check_totals(tensors, lengths[0].shape[0] - 1, True)
    d_out, d_lse = check_results(call)
    if longest is not None and is_visible(lengths[0]):
        check_lengths(lengths, (len(q), len(k)), longest)
    scale = check_scale(call["softmax_scale"], q.shape[-1])
    prepare = preparation_of(problem, gpu_for_call(q.device, call["sm_margin"]))
    backward = BackwardCall(problem, longest, scale, call["deterministic"], prepare)
    wanted = sinks is not None, call["fp32_dkv"]
    read = modifier_tensors(slopes, function_tensors, sinks)
    operands = BackwardOperands(q, k, v, out, lse, d_out, d_lse)
    grads = backward.gradients(operands, lengths, read, *wanted, dropout)
    d_sinks = q.new_empty(0) if sinks is None else grads.sinks
    return grads.q, grads.k, grads.v, d_sinks


@functools.lru_cache(maxsize=REMEMBERED)
def checked_problem(call: AttentionCall, options: Options) -> Problem:
    """Validate a call, and return its problem."""
    check_tensors(call)
    return call.problem(options)


BACKWARD.implemented_by(run_backward)

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

ALWAYS_NONE = {
    DENSE: ("plan",),
    PACKED: ("scheduler_metadata",),
    PAGED: ("cu_seqlens_q",),
    CACHED: ("cu_seqlens_q", "rotary_seqlens"),
}
"""Arguments of functions that no operator takes."""


def trace_attention(kind: str, passed: tuple, arguments: dict[str, Any]) -> Result:
    """What a public function gives.
    `passed` are its options, as `fa3.calls.options.options_of` takes them; `arguments` are all
    others, by name."""
    options = named_options(kind, dict(zip(OPTIONS_OF[kind], passed, strict=True)))
    out = arguments["out"]
    window = check_window(as_pair(arguments["window_size"]), options["causal"])
    arguments |= options
    for name in ALWAYS_NONE[kind]:
        if arguments[name] is not None:
            raise NotImplementedError(f"{name} must be None while a graph is traced")
    arguments |= {"function": kind, "window_left": window.left, "window_right": window.right}
    operator = ATTENTION if out is None else ATTENTION_OUT
    if kind == CACHED:
        check_cached(arguments, window)
        operator = operator if arguments["k_new"] is None else APPEND
    else:
        make_differentiable(arguments)
    names = (name for name in operator.arguments if name in arguments)
    made, lse = operator(**{name: arguments[name] for name in names})
    out = made if out is None else out
    return (out, lse) if options["return_lse"] else out


def make_differentiable(arguments: dict[str, Any]) -> None:
    """Change arguments to what `fa3::attention` takes with a possible gradient."""
    schedule, score, mask = arguments["schedule"], arguments["score"], arguments["mask"]
    if not (schedule is None or isinstance(schedule, str)):
        raise NotImplementedError(
            "schedule must be a name like 'list' while a graph is traced: a graph cannot hold "
            "objects"
        )
    arguments["score"], arguments["score_tensors"] = flatten_function("score", score, Score)
    arguments["mask"], arguments["mask_tensors"] = flatten_function("mask", mask, Mask)
    q, k, v, sinks = arguments["q"], arguments["k"], arguments["v"], arguments["sinks"]
    if wants_gradient(q, k, v, sinks):
        check_differentiable(arguments, arguments.get("pack_gqa"))
        arguments |= {"num_splits": 1, "pack_gqa": False}
    refuse_gradients({"alibi_slopes": arguments["alibi_slopes"]})
    for kind in ("score", "mask"):
        for i, tensor in enumerate(arguments[f"{kind}_tensors"]):
            refuse_gradients({f"{kind}'s tensor {i}": tensor})
    check_probability(arguments["dropout_p"])
    if arguments["dropout_p"] and arguments["rng_state"] is None:
        # Drawn by the graph.
        arguments["rng_state"] = draw_rng_state(q.device)


def check_cached(arguments: dict[str, Any], window: Window) -> None:
    """Check arguments of `flash_attn_with_kvcache`, and change them to what operators take."""
    refuse_gradients({public_name(CACHED, name): arguments[name] for name in TENSORS})
    names = "softcap", "num_splits", "sm_margin", "batch_invariant"
    options = Options(window=window, **{name: arguments[name] for name in names})
    metadata, longest_q = arguments["scheduler_metadata"], arguments["max_seqlen_q"]
    if metadata is not None:
        tensors = {name: arguments[name] for name in (*QKV, "page_table")}
        metadata.check_call(AttentionCall(**tensors), options)
        options = metadata.applied_to(options)
        arguments["num_splits"], arguments["sm_margin"] = options.num_splits, options.sm_margin
    if longest_q is not None:
        raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {longest_q}")
    check_new_tokens(arguments)


def refuse_gradients(arguments: Mapping[str, Any]) -> None:
    """Raise if a tensor requires grad that would get none."""
    for name, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            check_undifferentiated(name)
