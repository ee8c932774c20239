"""Tensors without memory, and calls that are recorded: refused, where nothing would be computed."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from kvcache_problems import CacheProblem, make_call
from problems import make_operands, make_problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fa3

# By torch's own rules for forward mode, when the first dual level is entered.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


class Wrapper(torch.Tensor):
    """A tensor that only refers to another one, as those of quantisation and sharding do."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError(f"nobody computes with these: {function}")


class Plain(torch.Tensor):
    """A tensor with another name."""


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like this one."""
    with FakeTensorMode():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def part_of_fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return one that does not begin where its memory would."""
    with FakeTensorMode():
        memory = torch.empty(64 + tensor.stride(0) * len(tensor), dtype=tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), 64)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor whose memory was given back, as FSDP does."""
    memory = tensor.new_empty(64 + tensor.stride(0) * len(tensor))
    view = memory.as_strided(tensor.shape, tensor.stride(), 64)
    memory.untyped_storage().resize_(0)
    return view


NOWHERE = {
    "wrapper": Wrapper,
    "part of a wrapper": lambda x: Wrapper(torch.cat((x, x))[len(x) :]),
    "fake": fake,
    "part of a fake": part_of_fake,
    "functional": torch._to_functional_tensor,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": freed,
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@dataclass(frozen=True)
class Shift(fa3.Score):
    by: torch.Tensor

    def reference(self, logits, at):
        return logits + self.by[at.head]


@dataclass(frozen=True)
class Only(fa3.Mask):
    head: torch.Tensor

    def reference(self, at):
        return at.head == self.head[at.head]


def attention() -> dict:
    """Return the tensors of a call that has all of them."""
    q, k, v = make_operands(make_problem(1, 20, 20, 2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.empty_like(q),
        "alibi_slopes": torch.ones(2),
        "sinks": torch.ones(2),
        "score.by": torch.ones(2),
        "mask.head": torch.arange(2).int(),
    }


def attend(tensors: dict):
    tensors = dict(tensors)
    score, mask = Shift(tensors.pop("score.by")), Only(tensors.pop("mask.head"))
    return fa3.flash_attn_func(**tensors, score=score, mask=mask)


def packed() -> dict:
    """Return the tensors of a call on packed sequences that has all of them."""
    tensors = attention()
    tensors |= {name: tensors[name][0].clone() for name in ("q", "k", "v", "out")}
    ends, used = (torch.tensor(counts, dtype=torch.int32) for counts in ([0, 8, 20], [8, 12]))
    lengths = {name: ends.clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return tensors | lengths | {name: used.clone() for name in ("seqused_q", "seqused_k")}


def attend_packed(tensors: dict):
    tensors = dict(tensors, max_seqlen_q=12, max_seqlen_k=12)
    score, mask = Shift(tensors.pop("score.by")), Only(tensors.pop("mask.head"))
    return fa3.flash_attn_varlen_func(**tensors, score=score, mask=mask)


def cached() -> dict:
    """Return the tensors of a call on a cache that has all of them."""
    problem = CacheProblem(
        (20, 3), 2, (2, 1), ragged=True, page_size=16, rotary=(32, True, "float32"),
        leftpads=(1, 0), batch_idx=(1, 0), rows=3, alibi=1, sinks="float32",
    )  # fmt: skip
    call = make_call(problem)
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    return tensors | {"out": torch.empty_like(call["q"])}


def combined() -> dict:
    return {
        "out_partial": torch.ones(2, 1, 4, 2, 64),
        "lse_partial": torch.ones(2, 1, 4, 2),
        "out": torch.ones(1, 4, 2, 64),
    }


def lengths() -> dict:
    return {
        "cache_seqlens": torch.tensor([20, 3], dtype=torch.int32),
        "cu_seqlens_k_new": torch.tensor([0, 1, 2], dtype=torch.int32),
        "cache_leftpad": torch.tensor([1, 0], dtype=torch.int32),
    }


CALLS = {
    "attend": (attend, attention),
    "varlen": (attend_packed, packed),
    "cache": (lambda tensors: fa3.flash_attn_with_kvcache(**tensors), cached),
    "combine": (lambda tensors: fa3.flash_attn_combine(**tensors), combined),
    "metadata": (
        lambda tensors: fa3.get_scheduler_metadata(2, 1, 64, 2, 2, 64, **tensors),
        lengths,
    ),
}
ARGUMENTS = [(call, name) for call, (_, tensors) in CALLS.items() for name in tensors()]
WITH_FLOATS = [
    (call, name)
    for call, (_, tensors) in CALLS.items()
    for name, tensor in tensors().items()
    if tensor.is_floating_point()
]


@pytest.mark.parametrize("call", CALLS)
def test_all_tensors_are_right_as_they_are(call):
    run, tensors = CALLS[call]
    run(tensors())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOWHERE)
@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_tensors_that_lie_nowhere(call, name, kind):
    run, tensors = CALLS[call]
    given = tensors()
    with pytest.raises(NotImplementedError, match=f"^{name} must lie in memory, got a "):
        run(given | {name: NOWHERE[kind](given[name])})


@pytest.mark.parametrize(("call", "name"), WITH_FLOATS)
def test_tangents_are_not_dropped(call, name):
    run, tensors = CALLS[call]
    given = tensors()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match=f"^{name} carries a forward-mode tangent"):
            run(given | {name: dual})
        run(given)


@pytest.mark.parametrize(
    ("call", "name"),
    [("attend", "alibi_slopes"), ("attend", "score.by"), ("combine", "lse_partial")],
)
def test_what_is_negated_later_is_not_read_as_it_lies(call, name):
    run, tensors = CALLS[call]
    given = tensors()
    negated = torch.complex(given[name], given[name]).conj().imag
    assert negated.is_neg()
    with pytest.raises(ValueError, match=f"^{name} is a lazily negated view"):
        run(given | {name: negated})
    run(given | {name: negated.resolve_neg()})


@pytest.mark.parametrize("call", ["attend", "varlen", "cache", "combine"])
def test_gradients_of_every_tensor_are_refused(call):
    run, tensors = CALLS[call]
    given = tensors()
    for name in (name for of_call, name in WITH_FLOATS if of_call == call):
        with pytest.raises(ValueError, match=f"^{name} requires grad"):
            run(given | {name: given[name].clone().requires_grad_()})


# ------------------------------------------------------------------------------------- tracing

RECORDERS = {
    "make_fx": lambda run, q: make_fx(run)(q),
    "make_fx before dispatch": lambda run, q: make_fx(run, pre_dispatch=True)(q),
    "make_fx of fakes": lambda run, q: make_fx(run, tracing_mode="fake")(q),
    "make_fx of symbols": lambda run, q: make_fx(run, tracing_mode="symbolic")(q),
    "jit": lambda run, q: torch.jit.trace(run, q, check_trace=False),
    "export": lambda run, q: torch.export.export(Module(run), (q,), strict=False),
    "vmap": lambda run, q: torch.func.vmap(run)(q[None]),
    "functionalize": lambda run, q: torch.func.functionalize(run)(q),
    "jvp": lambda run, q: torch.func.jvp(run, (q,), (q,)),
    "grad": lambda run, q: torch.func.grad(lambda q: run(q).sum())(q),
    "grad of others": lambda run, q: torch.func.grad(lambda x: (run(q) * x).sum())(q),
    "fake mode": lambda run, q: under(FakeTensorMode(), run, q),
    "fake mode that takes others": lambda run, q: under(
        FakeTensorMode(allow_non_fake_inputs=True), run, q
    ),
}


class Module(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, q):
        return self.run(q)


def under(mode, run, *tensors):
    with mode:
        return run(*tensors)


def calls_of_q() -> dict:
    """Return functions of one tensor for each call that launches something."""
    found = {}
    for call, first in (
        ("attend", "q"),
        ("varlen", "q"),
        ("cache", "q"),
        ("combine", "out_partial"),
    ):
        run, tensors = CALLS[call]
        rest = tensors()
        q = rest.pop(first)
        found[call] = outputs_of(run, first, rest), q
    return found


def outputs_of(run, first: str, rest: dict):
    """Return a function from one tensor of a call to the call's output."""

    def of_first(tensor):
        result = run(rest | {first: tensor})
        return result[0] if isinstance(result, tuple) else result

    return of_first


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("call", ["attend", "varlen", "cache", "combine"])
def test_what_is_recorded_is_refused(call, recorder):
    run, q = calls_of_q()[call]
    complaint = r"being traced|must lie in memory|requires grad"
    with pytest.raises((NotImplementedError, ValueError), match=complaint):
        RECORDERS[recorder](run, q)
    run(q)


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


HARMLESS = {
    "profiler": torch.profiler.profile,
    "flops": lambda: FlopCounterMode(display=False),
    "a mode of the user's": Counts,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "default device": lambda: torch.device("cpu"),
    "forward mode": forward_ad.dual_level,
    "nothing": contextlib.nullcontext,
}


@pytest.mark.parametrize("mode", HARMLESS)
@pytest.mark.parametrize("call", ["attend", "varlen", "cache", "combine"])
def test_other_modes_are_none_of_our_business(call, mode):
    run, q = calls_of_q()[call]
    expected = run(q).clone()
    with HARMLESS[mode]():
        assert torch.equal(run(q), expected)


def test_a_vmap_of_other_tensors():
    run, q = calls_of_q()["attend"]
    twice = torch.func.vmap(lambda x: run(q) * x)(torch.tensor([1.0, 2.0]))
    assert torch.equal(twice[1], 2 * run(q))


@pytest.mark.parametrize(
    "change",
    [lambda x: torch.nn.Parameter(x, requires_grad=False), lambda x: x.as_subclass(Plain)],
    ids=["parameter", "subclass"],
)
@pytest.mark.parametrize("call", CALLS)
def test_subclasses_with_memory(call, change):
    run, tensors = CALLS[call]
    given = tensors()
    first, second = run(given), run({name: change(tensor) for name, tensor in given.items()})
    if isinstance(first, tuple):
        first, second = first[0], second[0]
    assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_function_that_must_be_one_graph_is_told_why_it_cannot(call):
    run, tensors = CALLS[call]
    given = tensors()
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="a graph is being traced"):
        torch.compile(lambda: run(given), backend="eager", fullgraph=True)()


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_function_breaks_its_graph_around_a_call():
    q, k, v = make_operands(make_problem(1, 20, 20, 2))

    def function(q, k, v):
        return fa3.flash_attn_func(q + 1, k, v, causal=True) * 2

    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(q, k, v), function(q, k, v))
    q.requires_grad_()
    of_q, expected = (torch.autograd.grad(f(q, k, v).sum(), q) for f in (compiled, function))
    assert torch.equal(*of_q, *expected)
