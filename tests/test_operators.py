"""Operators that stand for calls in graphs: torch's own checks, and what graphs compute."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from full_calls import CALLS
from pairs import pairs
from problems import make_operands, make_problem
from score_problems import Near, Times
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fa3
import fa3.interface
from fa3.calls import operators


def tensors(seqlen: int = 20, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Return q, k and v with two query heads for each key/value head."""
    return make_operands(make_problem(batch, seqlen, seqlen, 2, 2))


def packed(*lengths: int) -> tuple[torch.Tensor, ...]:
    """Return packed q, k and v, and where each sequence ends."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return *(x[0].contiguous() for x in tensors(sum(lengths), 1)), ends


def cache(capacity: int = 40, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Return q and what it appends, a cache of 2 heads, and lengths."""
    q, k, v = tensors(1, batch)
    shape = batch, capacity, 2, 64
    k_cache, v_cache = (torch.randn(shape).to(q.dtype) for _ in range(2))
    return q, k, v, k_cache, v_cache, torch.arange(3, 3 + batch, dtype=torch.int32)


Case = tuple[operators.Operator, dict[str, object]]
"""An operator, and all of its arguments."""


def make_case(operator: operators.Operator, **arguments) -> Case:
    return operator, operator.defaults | arguments


def forward_case(**options) -> Case:
    named = dict(zip("qkv", tensors(), strict=True))
    return make_case(operators.ATTENTION, function=operators.DENSE, causal=True, **named, **options)


def differentiated(make: Callable[[], Case]) -> Case:
    operator, arguments = make()
    sinks = {"sinks": torch.randn(4).requires_grad_()}
    return operator, arguments | {x: arguments[x].requires_grad_() for x in "qkv"} | sinks


def backward_of(attend, arguments: dict[str, object], **options) -> Case:
    named = {name: x for name, x in arguments.items() if name in operators.BACKWARD.arguments}
    q, k, v = (named[name] for name in "qkv")
    out, lse = attend(q, k, v)
    named |= {"out": out, "lse": lse, "d_out": torch.randn_like(out)}
    return make_case(operators.BACKWARD, **named | {"d_lse": torch.randn_like(lse)} | options)


def backward_case(**options) -> Case:
    attend = partial(fa3.flash_attn_func, causal=True, return_lse=True)
    return backward_of(attend, forward_case()[1], **options)


def written_case() -> Case:
    _, arguments = forward_case()
    return operators.ATTENTION_OUT, arguments | {"out": arguments["q"].float()}


def varlen_case() -> Case:
    q, k, v, ends = packed(7, 13)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    named |= {"max_seqlen_q": 13, "max_seqlen_k": 13, "function": operators.PACKED}
    return make_case(operators.ATTENTION, **named)


def varlen_backward_case(**options) -> Case:
    _, arguments = varlen_case()
    ends = arguments["cu_seqlens_q"]
    attend = partial(
        fa3.flash_attn_varlen_func, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=13,
        max_seqlen_k=13, causal=True, return_lse=True,
    )  # fmt: skip
    return backward_of(attend, arguments, **options)


def cache_case(operator=operators.ATTENTION, **options) -> Case:
    q, _, _, k, v, lengths = cache()
    named = {"q": q, "k": k, "v": v, "seqused_k": lengths, "causal": True}
    return make_case(operator, **named, **options or {"function": operators.CACHED})


def append_case() -> Case:
    q, k, v, *_ = cache()
    return cache_case(operators.APPEND, k_new=k, v_new=v, out=torch.empty_like(q))


def combine_case(has_out: bool) -> Case:
    out = torch.empty(2, 20, 4, 64, dtype=torch.bfloat16) if has_out else None
    return make_case(
        operators.COMBINE, out_partial=torch.randn(3, 2, 20, 4, 64),
        lse_partial=torch.randn(3, 2, 20, 4), out=out, out_dtype=torch.bfloat16,
    )  # fmt: skip


CASES = {
    "dense": forward_case,
    "dense, sinks": lambda: forward_case(sinks=torch.randn(4), softcap=5.0),
    "dense, dropout": lambda: forward_case(dropout_p=0.3, rng_state=torch.tensor([7])),
    "dense, differentiated": partial(differentiated, forward_case),
    "dense with out": written_case,
    "dense, backward": backward_case,
    "packed": varlen_case,
    "packed, differentiated": partial(differentiated, varlen_case),
    "packed, backward": varlen_backward_case,
    "cache": cache_case,
    "append with out": append_case,
    "combine": lambda: combine_case(False),
    "combine with out": lambda: combine_case(True),
}


@pytest.mark.compiles
@pytest.mark.parametrize("case", CASES)
def test_torch_finds_the_operators_sound(case):
    operator, arguments = CASES[case]()
    given = tuple(arguments[name] for name in operator.arguments)
    found = torch.library.opcheck(operator.overload, given)
    assert set(found.values()) == {"SUCCESS"}


def test_no_operator_is_left_out():
    checked = {CASES[case]()[0].name for case in CASES}
    assert checked == {o.name for o in vars(operators).values() if hasattr(o, "overload")}


# ------------------------------------------------------------------------ calls, all tensors

GRAPHS = {
    "make_fx": lambda run, given: make_fx(run)(*given),
    "make_fx before dispatch": lambda run, given: make_fx(run, pre_dispatch=True)(*given),
    "make_fx of symbols": lambda run, given: make_fx(run, tracing_mode="symbolic")(*given),
    "export": lambda run, given: torch.export.export(Module(run), given, strict=False).module(),
    "strict export": lambda run, given: torch.export.export(
        Module(run), given, strict=True
    ).module(),
    "compile": lambda run, given: torch.compile(run, backend="aot_eager", fullgraph=True),
}


class Module(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *given):
        return self.run(*given)


def of_tensors(call: str):
    """Return a call as a function of all of its tensors, these, and their names."""
    run, make = CALLS[call]
    named = make()

    def of_given(*given):
        result = run(dict(zip(named, given, strict=True)))
        return torch.mul(result[0] if isinstance(result, tuple) else result, 2)

    return of_given, tuple(named.values()), tuple(named)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "graph"),
    [("attend", graph) for graph in GRAPHS]
    + [(call, graph) for call in ("varlen", "cache", "combine") for graph in ("compile", "export")],
)
def test_a_graph_computes_and_writes_what_the_call_does(call, graph):
    run, given, names = of_tensors(call)
    torch.compiler.reset()
    with torch.no_grad():
        traced = GRAPHS[graph](run, tuple(x.clone() for x in given))
    here, there = ([x.clone() for x in given] for _ in range(2))
    assert torch.equal(traced(*there), run(*here))
    for name, one, other in zip(names, here, there, strict=True):
        # Caches hold NaN where no sequence has a token.
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"{name} differs"


@pytest.mark.parametrize("call", ["attend", "varlen", "cache", "combine"])
@pytest.mark.parametrize("has_out", [True, False])
def test_fakes_lie_as_results_do(call, has_out):
    run, make = CALLS[call]
    given = make()
    if not has_out:
        del given["out"]
    names = {} if call == "combine" else {"return_lse": True}
    found = run(given | names)
    with FakeTensorMode() as mode:
        fakes = run({name: mode.from_tensor(x) for name, x in given.items()} | names)
    for one, fake in zip(found, fakes, strict=True):
        assert isinstance(fake, FakeTensor)
        assert (one.shape, one.stride(), one.dtype) == (fake.shape, fake.stride(), fake.dtype)


# ----------------------------------------------------------------------------------- lengths


def attend_to_itself(q, k, v):
    return fa3.flash_attn_func(q + 1, k, v, causal=True, window_size=(30, 0), return_lse=True)


def attend_inside(q, k, v, ends, longest):
    return fa3.flash_attn_varlen_func(
        q + 1, k, v, ends, ends, longest, longest, causal=True, return_lse=True
    )


def decode(q, k, v, k_cache, v_cache, lengths):
    out, lse = fa3.flash_attn_with_kvcache(
        q + 1, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_lse=True
    )
    return out, lse, k_cache.sum(), v_cache[:, 3].clone()


def packed_of(n: int) -> tuple:
    return *packed(5, 8 * n), 8 * n


LENGTHS = {
    "dense": (attend_to_itself, lambda n: tensors(8 * n + 5, n + 1)),
    "packed": (attend_inside, packed_of),
    "cache": (decode, lambda n: cache(16 * n + 8, n + 1)),
    "cache, a number": (decode, lambda n: (*cache(16 * n + 8)[:5], n)),
}


@pytest.mark.compiles
@pytest.mark.parametrize("call", LENGTHS)
def test_no_length_compiles_a_graph_anew(call):
    run, make = LENGTHS[call]
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    # Sizes that are equal at first are taken to be equal always.
    for n in (6, 4, 7, 9):
        given = make(n)
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
        assert all(map(torch.equal, compiled(*given), run(*copies)))
        for one, other in zip(given, copies, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one, other)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.compiles
def test_inductor():
    """In one graph, since most of the time goes to the compiler of C++."""
    calls = [LENGTHS[name] for name in ("dense", "cache")]

    def run(*given):
        return [x for (call, _), one in zip(calls, given, strict=True) for x in call(*one)]

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for n in (1, 2):
        given = [make(n) for _, make in calls]
        expected = run(*(tuple(x.clone() for x in one) for one in given))
        assert all(map(torch.equal, compiled(*given), expected))


@pytest.mark.compiles
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_does_not_copy_caches(dynamic):
    """It makes neither a clone nor any other tensor of a cache's size."""

    def step(q, k, v, k_cache, v_cache, lengths):
        return fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)

    torch.compiler.reset()
    given = cache(capacity=416, batch=3)
    copies = [x.clone() for x in given]
    expected = step(*copies)
    out, codes = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=dynamic), *given)
    assert torch.equal(out, expected)
    assert all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(given, copies, strict=True)
    )
    (code,) = codes
    body = code[code.index("def call(") : code.index("def get_args(")]
    assert body.count("torch.ops.fa3.append.default(") == 1
    assert not any(word in body for word in ("clone", "copy_", "empty", "as_strided"))


def test_a_call_on_a_cache_has_no_gradient():
    operator, arguments = cache_case()
    arguments["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^flash_attn_with_kvcache has no gradient"):
        operator(**arguments)


# --------------------------------------------------------------------------------- gradients


def is_differentiable(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def gradients(run, inputs: tuple, of_lse: bool = True) -> tuple[torch.Tensor, ...]:
    given = [x.detach().requires_grad_() if is_differentiable(x) else x for x in inputs]
    out, lse = run(*given)
    loss = (out.float() ** 2).sum() + (lse.sin().sum() if of_lse else 0)
    return torch.autograd.grad(loss, list(filter(is_differentiable, given)))


def with_modifiers(q, k, v, sinks):
    slopes, near = torch.full((4,), 0.1), Near(torch.arange(4, dtype=torch.int32))
    return fa3.flash_attn_func(
        q, k, v, 0.2, softcap=8.0, alibi_slopes=slopes, sinks=sinks, mask=near, return_lse=True
    )


def packed_with_modifiers(q, k, v, sinks, ends, used):
    slopes, near = torch.full((4,), 0.1), Near(torch.arange(4, dtype=torch.int32))
    return fa3.flash_attn_varlen_func(
        q, k, v, ends, ends, 40, 40, used, used, 0.2, window_size=(9, 5), deterministic=True,
        alibi_slopes=slopes, sinks=sinks, mask=near, return_lse=True,
    )  # fmt: skip


DIFFERENTIATED = {
    "dense": lambda: (attend_to_itself, tensors()),
    "dense, modifiers": lambda: (with_modifiers, (*tensors(), torch.randn(4))),
    "packed": lambda: (attend_inside, packed_of(4)),
    "packed, modifiers": lambda: (
        packed_with_modifiers,
        (*packed(30, 0, 17)[:3], torch.randn(4), packed(30, 0, 17)[3], torch.arange(3).int() * 8),
    ),
}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:`isinstance")
@pairs(of_lse=(True, False), graph=("compile", "export"), call=tuple(DIFFERENTIATED))
def test_gradients_in_a_graph(call, graph, of_lse):
    run, inputs = DIFFERENTIATED[call]()
    torch.compiler.reset()
    traced = GRAPHS[graph](run, inputs)
    found, expected = (gradients(f, inputs, of_lse) for f in (traced, run))
    assert all(map(torch.equal, found, expected))


@pytest.mark.compiles
@pytest.mark.parametrize("call", ["dense", "packed"])
def test_gradients_of_other_lengths_come_from_the_same_graph(call):
    run, make = LENGTHS[call]
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (2, 5, 4):
        found, expected = (gradients(f, make(n)) for f in (compiled, run))
        assert all(map(torch.equal, found, expected))
    assert counters["stats"]["unique_graphs"] == 1


def attend_inside_in_order(q, k, v, ends, longest):
    return fa3.flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, deterministic=True, return_lse=True
    )


ORDERED = {
    "dense": (
        partial(fa3.flash_attn_func, causal=True, deterministic=True, return_lse=True),
        tensors,
    ),
    "packed": (attend_inside_in_order, lambda n: (*packed(n, 5, n // 2), n)),
}


@pytest.mark.parametrize(
    ("make", "name"), [(forward_case, "flash_attn_func"), (varlen_case, "_varlen_func")]
)
def test_operators_have_no_second_derivative(make, name):
    operator, arguments = differentiated(make)
    out, _ = operator(**arguments)
    (d_q,) = torch.autograd.grad(out.float().square().sum(), arguments["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivative"):
        d_q.float().sum().backward()


# --------------------------------------------------------------------- the user's functions


@pytest.mark.compiles
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_functions_of_the_users(where):
    of_head = torch.rand(4)
    objects = [Times(of_head, 2.0), Times(of_head, 3.0)]

    def run(q, k, v, which, of_head):
        score = objects[which] if where == "outside" else Times(of_head, 3.0 if which else 2.0)
        return fa3.flash_attn_func(q, k, v, score=score)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for which in (0, 1, 0):
        given = *tensors(), which, of_head
        assert torch.equal(compiled(*given), run(*given))
    # Its tensors are no part of the graph.
    of_head.mul_(2)
    assert torch.equal(compiled(*given), run(*given))


def test_a_function_that_another_process_named():
    operator, arguments = forward_case(score="elsewhere.Score")
    with pytest.raises(ValueError, match=r"elsewhere\.Score is not known here"):
        operator(**arguments)


# ------------------------------------------------------------------------------------ refused

REFUSED = {
    "plan": ({"plan": fa3.plan_forward(make_problem())}, NotImplementedError, "plan must be None"),
    "schedule": ({"schedule": list}, NotImplementedError, "schedule must be a name"),
    "score": ({"score": 3}, TypeError, "score must be a fa3.Score, got int"),
    "class": ({"mask": Near}, TypeError, "mask must be a fa3.Mask, got the class Near. Pass an ob"),
    "alibi": ({"alibi_slopes": torch.ones(4).requires_grad_()}, ValueError, "alibi_slopes requ"),
    "window": ({"window_size": (1, 2, 3)}, ValueError, "window_size must be two integers"),
    "packing": ({"pack_gqa": 1}, TypeError, "pack_gqa must be a bool"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_have_is_said_when_it_is_traced(case):
    options, error, complaint = REFUSED[case]
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=complaint):
        fa3.flash_attn_func(*tensors(), **options)


@pytest.mark.parametrize("call", ["dense", "packed"])
def test_a_score_has_no_gradient_in_a_graph_that_was_traced_without(call):
    """The graph is run where gradients are wanted after all; they would be those without it."""
    q, k, v = tensors(20, 1)
    score, lengths = Times(torch.ones(4)), ()
    if call == "packed":
        q, k, v = (x[0].contiguous() for x in (q, k, v))
        ends = torch.tensor([0, 20], dtype=torch.int32)
        lengths = ends, ends, 20, 20
    attend = fa3.flash_attn_varlen_func if call == "packed" else fa3.flash_attn_func
    graph = make_fx(lambda *given: attend(*given, *lengths, score=score))(q, k, v)
    expected = attend(q, k, v, *lengths, score=score)
    assert torch.equal(graph(q, k, v), expected)
    with torch.no_grad():
        assert torch.equal(graph(q.requires_grad_(), k, v), expected)
    with pytest.raises(NotImplementedError, match="requires grad, but score has no derivative"):
        graph(q, k, v)


# ---------------------------------------------------------------------------------------- GPU


def on_gpu(given: tuple, device: torch.device) -> tuple:
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in given)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("call", LENGTHS)
def test_graphs_on_a_gpu(call, mode, device):
    run, make = LENGTHS[call]
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for n in (6, 6, 6, 9, 9):
        given = on_gpu(make(n), device)
        copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in given)
        found, expected = [x.clone() for x in compiled(*given)], run(*copies)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found, list(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["dense", "packed"])
def test_deterministic_gradients_in_a_graph_on_a_gpu(call, device):
    """They have the bits of those outside of it, every time."""
    run, make = ORDERED[call]
    inputs = on_gpu(make(2000), device)
    expected = gradients(run, inputs)
    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(20):
        assert all(map(torch.equal, gradients(compiled, inputs), expected))
