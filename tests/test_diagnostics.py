"""Errors in scores and masks of the user's: the message names the method, its line and the cause.

Each class here does not compile, because of the line with the comment that says so.
"""

import inspect
import math
from dataclasses import dataclass, replace

import cutlass.cute as cute
import pytest
import torch
from score_problems import Gate

import fa3
from benchmarks.cubin import compile_kernel
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.primitives.attention import Attention
from fa3.problem import AttentionSpec
from fa3.running.compiler import load_kernel
from fa3.schedules import StaticPersistent
from fa3.scores.diagnostics import explain
from fa3.scores.masks import Band, Intersection
from fa3.scores.templates import Template

pytestmark = pytest.mark.compiles

SPEC = AttentionSpec("bfloat16", 64, 64, Band())


@pytest.fixture(scope="module")
def no_locations():
    """Leave lines to the compiler, which tells them in its errors."""


@dataclass(frozen=True)
class UndefinedName(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        return logit + undefined_name  # noqa: F821  # the line


@dataclass(frozen=True)
class WrongField(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        doubled = logit + logit
        return doubled + at.keys  # the line


@dataclass(frozen=True)
class ReturnsTuple(fa3.Score):
    @cute.jit
    def score(self, logit, at):  # the line
        return logit, at.key


@dataclass(frozen=True)
class ReturnsEarly(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        if at.key > 3:
            return logit  # the line
        return logit + 1.0


@dataclass(frozen=True)
class WithoutJit(fa3.Score):
    def score(self, logit, at):
        if at.key > 3:  # the line
            logit = logit + 1.0
        return logit


def two_away(at):
    return at.distance


@dataclass(frozen=True)
class InHelper(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        return logit + two_away(at)  # the line


@dataclass(frozen=True)
class PythonsMath(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        return math.tanh(logit)  # the line


class Inherits(WrongField):
    pass


@dataclass(frozen=True)
class MaskReturnsTuple(fa3.Mask):
    @cute.jit
    def visible(self, at):  # the line
        return at.key, at.query


@dataclass(frozen=True)
class FirstKeys(fa3.Mask):
    @cute.jit
    def visible(self, at):
        return at.key < 3


@dataclass(frozen=True)
class WrongRow(FirstKeys):
    lengths: torch.Tensor

    def key_range(self, rows):
        return 0, self.lengths[rows.document]  # the line


@dataclass(frozen=True)
class OneNumber(FirstKeys):
    def open_range(self, rows):  # the line
        return rows.seqlen_k


@dataclass(frozen=True)
class NoBound(FirstKeys):
    def key_range(self, rows):  # the line
        return 0, None


def kernel_of(instance) -> Forward:
    template = Template.of(instance)
    if isinstance(instance, fa3.Score):
        spec = replace(SPEC, scores=(template,))
    else:
        spec = replace(SPEC, mask=Intersection(Band(), template))
    return Forward(spec, ForwardConfig(128, 64), StaticPersistent)


def explained(instance) -> ValueError:
    """Compile, and return the error that this must raise."""
    with pytest.raises(ValueError, match=" does not compile: ") as caught:
        compile_kernel(kernel_of(instance))
    return caught.value


def marked_line(kind: type) -> str:
    """Return "file:line: source" of the class's line with the comment."""
    lines, first = inspect.getsourcelines(kind)
    ((number, text),) = [
        (first + i, line.strip()) for i, line in enumerate(lines) if "# the line" in line
    ]
    return f"{__file__}:{number}: {text}"


CASES = [
    (UndefinedName(), "score", "name 'undefined_name' is not defined"),
    (WrongField(), "score", "'Position' object has no attribute 'keys'"),
    (ReturnsTuple(), "score", "score(self, logit, at) must return one number"),
    (ReturnsEarly(), "score", "Early exit (return) is not allowed"),
    (WithoutJit(), "score", "Decorate the function with @jit"),
    (InHelper(), "score", "'Position' object has no attribute 'distance'"),
    (PythonsMath(), "score", "math.tanh"),
    (MaskReturnsTuple(), "visible", "visible(self, at) must return one bool"),
    (WrongRow(torch.zeros(2).int()), "key_range", "'Rows' object has no attribute 'document'"),
    (OneNumber(), "open_range", "open_range(self, rows) must return two integers (begin, end)"),
    (NoBound(), "key_range", "a bound of a range must be an integer, got None"),
]


@pytest.mark.parametrize(
    ("instance", "method", "cause"), CASES, ids=[type(case[0]).__name__ for case in CASES]
)
def test_the_user_s_error_is_found(instance, method, cause):
    error = explained(instance)
    assert error.__cause__ is not None
    message = str(error)
    assert message.startswith(f"{type(instance).__name__}.{method} does not compile: ")
    lines = message.split("\n  ")
    assert marked_line(type(instance)) in lines
    assert cause in message
    assert "fa3/kernels" not in message and "site-packages" not in message
    if isinstance(instance, InHelper):
        # A helper's line stands after the method's.
        assert lines[1] == marked_line(InHelper)
        assert lines[2].endswith(": return at.distance")
    elif isinstance(instance, PythonsMath):
        *_, place, advice = message.splitlines()
        assert "math.tanh(logit)" in place and advice.endswith("use cute.math.tanh")


def test_an_inherited_method_is_named_by_the_class_that_was_used():
    message = str(explained(Inherits()))
    assert message.startswith("Inherits.score does not compile: ")
    assert marked_line(WrongField) in message


def test_a_kernel_that_is_loaded_for_a_call_says_it_too():
    with pytest.raises(ValueError, match=r"^WrongField\.score does not compile: "):
        load_kernel(kernel_of(WrongField()))


def test_errors_from_elsewhere_are_left_alone(monkeypatch):
    kernel = kernel_of(Gate(torch.zeros(2), True))

    def first(*arguments):
        raise RuntimeError("no fault of the user's")

    monkeypatch.setattr(Attention, "first", first)
    with pytest.raises(RuntimeError, match="no fault"):
        compile_kernel(kernel)
    assert explain(ValueError("never raised"), kernel.spec) is None


AT_THE_PROMPT = """
from dataclasses import dataclass

import fa3

@dataclass(frozen=True)
class Typed(fa3.Mask):
    def visible(self, at):
        seen = at.key <= at.query
        if at.key > 10:
            seen = at.key >= 0
        return seen
"""


def test_a_class_without_a_file_is_named():
    names = {"__name__": "__main__"}
    exec(compile(AT_THE_PROMPT, "<stdin>", "exec"), names)
    spec = AttentionSpec("bfloat16", 64, 64, Intersection(Band(), Template.of(names["Typed"]())))
    kernel = Forward(spec, ForwardConfig(128, 64), StaticPersistent)
    with pytest.raises(ValueError, match=r"^Typed\.visible does not compile: its source is not in"):
        compile_kernel(kernel)
