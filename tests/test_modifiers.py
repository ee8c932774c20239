"""Scores, masks and sinks as arguments of a call: what is made of them, and bad ones."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from problems import make_operands, make_problem
from score_problems import NOTHING, Gate, Modifiers, Span, modifiers_of

import fa3
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

HEADS = 4


def operands() -> tuple[torch.Tensor, ...]:
    return make_operands(make_problem(2, 70, 90, 2, HEADS // 2))


def modifiers(is_causal=False, **arguments) -> Modifiers:
    return modifiers_of(operands()[0], **(NOTHING | arguments), is_causal=is_causal)


def test_nothing_is_unmodified():
    assert modifiers() == ((), None, None, ())


def test_scores_come_in_a_fixed_order_with_their_tensors():
    slopes, sinks, gate = torch.rand(HEADS), torch.rand(HEADS), Gate(torch.rand(HEADS), False)
    span = Span(*torch.zeros(2, HEADS).int())
    found = modifiers(
        softcap=3, alibi_slopes=slopes, sinks=sinks, score=gate, mask=span, is_causal=True
    )
    assert found.scores == tuple(
        map(Template.of, (Softcap(3.0), Alibi(slopes, is_causal=True), gate))
    )
    assert found.mask == Template.of(span)
    assert found.sinks == "float32"
    expected = (slopes, gate.factor, span.begin, span.end, sinks)
    assert all(a is b for a, b in zip(found.tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_of_either_dtype(dtype):
    problem = fa3.Problem.of(*operands(), sinks=torch.zeros(HEADS, dtype=dtype))
    assert problem.spec.sinks == str(dtype)[6:]


# ---------------------------------------------------------------------------------- bad input


class NoDataclass(fa3.Score):
    """Changes nothing."""

    def score(self, logit, at):
        return logit

    def reference(self, logits, at):
        return logits


class FirstKeys(fa3.Mask):
    def visible(self, at):
        return at.key < 3

    def reference(self, at):
        return at.key < 3


@dataclass(frozen=True)
class Holder(NoDataclass):
    value: object


@dataclass(frozen=True)
class HolderMask(FirstKeys):
    value: object


@dataclass(frozen=True)
class WithoutScore(fa3.Score):
    reference = NoDataclass.reference


@dataclass(frozen=True)
class WithoutVisible(fa3.Mask):
    reference = FirstKeys.reference


@dataclass(frozen=True)
class WithoutReference(fa3.Mask):
    visible = FirstKeys.visible


@dataclass
class NotFrozen(NoDataclass):
    pass


@dataclass(frozen=True)
class WrongArguments(WithoutScore):
    def score(self, logit):
        return logit


@dataclass(frozen=True)
class Derived(NoDataclass):
    """A field that the constructor does not take."""

    value: float = dataclasses.field(init=False, default=2.0)


META = torch.zeros(HEADS, device="meta")

BAD = [
    ({"mask": Holder(1)}, TypeError, "mask must be a fa3.Mask, got Holder"),
    ({"score": NoDataclass()}, TypeError, "NoDataclass must be a frozen dataclass"),
    ({"score": Holder([1])}, TypeError, "Holder.value must be a tensor or hashable, got list"),
    ({"score": Holder(((META,),))}, TypeError, ".* got tuple: a tensor must be a field of its own"),
    ({"mask": HolderMask([1])}, TypeError, "HolderMask.value must be a tensor or hashable"),
    ({"score": Holder(META)}, ValueError, "score.value must be on cpu like q, got meta"),
    ({"mask": HolderMask(META)}, ValueError, "mask.value must be on cpu like q, got meta"),
    ({"score": Holder(np.zeros(2))}, TypeError, "Holder.value must be a tensor or hashable"),
    (
        {"score": Holder(torch.zeros(2, dtype=torch.complex64))},
        TypeError,
        "score.value .* got torch.complex64",
    ),
    (
        {"mask": HolderMask(torch.zeros(2, requires_grad=True))},
        ValueError,
        "mask.value requires grad",
    ),
    ({"score": Derived()}, TypeError, "Derived.value must be an argument of its class"),
    ({"score": WithoutScore()}, TypeError, r"WithoutScore must define score\(self, logit, at\)"),
    ({"mask": WithoutVisible()}, TypeError, r"WithoutVisible must define visible\(self, at\)"),
    ({"mask": WithoutReference()}, NotImplementedError, "WithoutReference must define reference"),
    ({"score": NotFrozen()}, TypeError, "NotFrozen must be a frozen dataclass"),
    ({"score": WrongArguments()}, ValueError, r"WrongArguments\.score does not compile: too many"),
]


@pytest.mark.parametrize(("arguments", "error", "complaint"), BAD)
def test_bad_modifiers(arguments, error, complaint):
    with pytest.raises(error, match=f"^{complaint}"):
        fa3.flash_attn_func(*operands(), **arguments)


@dataclass(frozen=True)
class Returning(fa3.Mask):
    """A mask whose methods return, or raise, what it is given."""

    found: object = True
    keys: object = (0, 90)

    def visible(self, at):
        return at.key < 90

    def reference(self, at):
        return self.found(at) if callable(self.found) else self.found

    def key_range(self, rows):
        return self.keys(rows) if callable(self.keys) else self.keys


@dataclass(frozen=True)
class ReturningScore(fa3.Score):
    found: object

    def score(self, logit, at):
        return logit

    def reference(self, logits, at):
        return self.found(logits)


BROKEN = [
    (
        {"mask": Returning(lambda at: at.keys)},
        "mask does not work: Returning.reference raised Attr",
    ),
    ({"mask": Returning(lambda at: [][3])}, "mask does not work: .* IndexError: list index"),
    ({"mask": Returning(lambda at: at.key)}, "mask must have a Returning.reference .* torch.int64"),
    ({"mask": Returning(lambda at: None)}, "mask must have .* a tensor of bools .* got None"),
    (
        {"mask": Returning(lambda at: torch.ones(3, dtype=torch.bool))},
        r"mask must have .* broadcasts to \(queries, keys\), .* got .* with shape \(3,\)",
    ),
    (
        {"mask": Returning(keys=lambda rows: rows.begin)},
        "mask does not work: .*key_range.* Attribute",
    ),
    ({"mask": Returning(keys=(0, 2.5))}, "mask does not work: .*key_range .* TypeError: a bound"),
    ({"score": ReturningScore(lambda x: x.keys)}, "score does not work: .*reference raised Attrib"),
    (
        {"score": ReturningScore(lambda x: x > 0)},
        "score must have .* a tensor of floats .*torch.bool",
    ),
    ({"score": ReturningScore(lambda x: x[:, :1].T)}, "score must have .* broadcasts to"),
]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("arguments", "complaint"), BROKEN)
def test_what_a_function_of_the_users_does_wrong_is_said_of_its_argument(
    arguments, complaint, is_packed
):
    q, k, v = operands()
    lengths = ()
    if is_packed:
        q, k, v = (x[0] for x in (q, k, v))
        ends = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
        lengths = *ends, len(q), len(k)
    call = fa3.flash_attn_varlen_func if is_packed else fa3.flash_attn_func
    with pytest.raises(ValueError, match=f"^{complaint}"):
        call(q, k, v, *lengths, **arguments)


def test_what_a_mask_does_wrong_in_the_backward_pass_is_said_of_it():
    q, k, v = operands()
    calls = []

    def once(at):
        calls.append(at)
        return at.key < 5 if len(calls) == 1 else at.keys

    mask = Returning(once)
    q, k, v = q[:1, :5, :1], k[:1, :5, :1], v[:1, :5, :1]
    out = fa3.flash_attn_func(q.clone().requires_grad_(), k, v, mask=mask)
    with pytest.raises(ValueError, match=r"^mask does not work: Returning\.reference"):
        out.sum().backward()


def test_a_mask_may_return_one_bool():
    given, each = operands(), Returning(lambda at: at.key >= 0)
    found, expected = (fa3.flash_attn_func(*given, mask=mask) for mask in (Returning(), each))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_gradients_may_be_on_if_they_are_not_asked_for(name):
    with torch.no_grad():
        out = fa3.flash_attn_func(*operands(), **{name: torch.ones(HEADS, requires_grad=True)})
    assert not out.requires_grad
