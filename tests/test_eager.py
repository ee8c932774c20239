"""Tensors without memory, and calls that are recorded: refused, where nothing would be computed."""

import contextlib

import pytest
import torch
from full_calls import CALLS, calls_of_q
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from valid_calls import freed

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


def names_of_floats(tensors: dict) -> list[str]:
    """Return the names of the tensors that could have gradients."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOWHERE)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_lie_nowhere(call, kind):
    run, tensors = CALLS[call]
    given = tensors()
    for name, tensor in given.items():
        with pytest.raises(NotImplementedError, match=f"^{name} must lie in memory, got a "):
            run(given | {name: NOWHERE[kind](tensor)})


@pytest.mark.parametrize("call", CALLS)
def test_tangents_are_not_dropped(call):
    run, tensors = CALLS[call]
    given = tensors()
    with forward_ad.dual_level():
        for name in names_of_floats(given):
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            with pytest.raises(NotImplementedError, match=f"^{name} carries a forward-mode tang"):
                run(given | {name: dual})
            run(given)


@pytest.mark.parametrize(
    ("call", "name"),
    [("attend", "alibi_slopes"), ("attend", "score.of_head"), ("combine", "lse_partial")],
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
    for name in names_of_floats(given):
        with pytest.raises(ValueError, match=f"^{name} requires grad"):
            run(given | {name: given[name].clone().requires_grad_()})


# ------------------------------------------------------------------------------------- tracing

TRANSFORMS = {
    "jit": lambda run, q: torch.jit.trace(run, q, check_trace=False),
    "vmap": lambda run, q: torch.func.vmap(run)(q[None]),
    "functionalize": lambda run, q: torch.func.functionalize(run)(q),
    "jvp": lambda run, q: torch.func.jvp(run, (q,), (q,)),
    "grad": lambda run, q: torch.func.grad(lambda q: run(q).sum())(q),
    "grad of others": lambda run, q: torch.func.grad(lambda x: (run(q) * x).sum())(q),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", ["attend", "varlen", "cache", "combine"])
def test_transforms_are_refused(call, transform):
    run, q = calls_of_q()[call]
    complaint = r"torch.jit.trace|under a transform of torch.func|requires grad"
    with pytest.raises((NotImplementedError, ValueError), match=complaint):
        TRANSFORMS[transform](run, q)
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
    "default device": lambda: torch.device("meta"),
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


def test_metadata_is_made_outside_of_graphs():
    run, tensors = CALLS["metadata"]
    given = tensors()
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="a graph is being traced"):
        torch.compile(lambda: run(given), backend="eager", fullgraph=True)()
