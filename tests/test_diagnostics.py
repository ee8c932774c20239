"""Errors in scores and masks of the user's: the message names the method, its line and the cause.

Each class before `fa3.check` does not compile, because of the line with the comment that says so.
`fa3.check` also says whether the two halves of a function agree.
"""

import inspect
import math
import multiprocessing
import time
from dataclasses import dataclass
from unittest.mock import Mock

import cutlass
import cutlass.cute as cute
import pytest
import torch
from score_problems import Gate, PrefixLM, kernel_of

import fa3
from benchmarks.cubin import compile_kernel
from fa3.primitives.attention import Attention
from fa3.running.compiler import load_kernel
from fa3.scores.diagnostics import explain
from fa3.tools.function_check import exit_status

pytestmark = pytest.mark.compiles


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

    first = Mock(side_effect=RuntimeError("no fault of the user's"))
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
    kernel = kernel_of(names["Typed"]())
    with pytest.raises(ValueError, match=r"^Typed\.visible does not compile: its source is not in"):
        compile_kernel(kernel)


# ---------------------------------------------------------------------------------------- fa3.check

LENGTHS = torch.tensor([30, 50], dtype=torch.int32)


@pytest.fixture
def on_the_host_alone(monkeypatch):
    """Leave out the kernel for sm_90a, which other tests compile."""
    monkeypatch.setattr("fa3.tools.function_check.load_kernel", lambda kernel: None)


@dataclass(frozen=True)
class OneKeyMore(PrefixLM):
    def reference(self, at):
        return (at.key <= self.length[at.batch]) | (at.key <= at.query)


@dataclass(frozen=True)
class FewKeys(PrefixLM):
    """Takes the first row of a tile for the last one."""

    def key_range(self, rows):
        return 0, cutlass.max(self.length[rows.batch], rows.first + 1)


@dataclass(frozen=True)
class ManyOpen(PrefixLM):
    def open_range(self, rows):
        return 0, rows.last + 1


@dataclass(frozen=True)
class Square(fa3.Score):
    @cute.jit
    def score(self, logit, at):
        return logit * logit

    def reference(self, logits, at):
        return logits.abs()


@dataclass(frozen=True)
class Absolute(Square):
    """Has an instruction that only GPUs have."""

    @cute.jit
    def score(self, logit, at):
        return cute.arch.fmax(logit, -logit)


@dataclass(frozen=True)
class FarAway(fa3.Score):
    table: torch.Tensor

    @cute.jit
    def score(self, logit, at):
        return logit + self.table[at.head + (1 << 33)]

    def reference(self, logits, at):
        return logits + self.table[at.head]


@dataclass(frozen=True)
class Undefined(fa3.Mask):
    @cute.jit
    def visible(self, at):
        return at.key < undefined_name  # noqa: F821

    def reference(self, at):
        return at.key < 3


@pytest.mark.parametrize(
    ("function", "sizes", "positions"),
    [
        (PrefixLM(LENGTHS), {"batch": 2, "seqlen_q": 70, "seqlen_k": 90}, 2 * 70 * 90),
        (Gate(torch.rand(2), True), {"heads": 2, "seqlen_q": 1, "seqlen_k": 1000}, 2 * 1000),
    ],
    ids=lambda one: type(one).__name__,
)
def test_halves_that_agree(function, sizes, positions):
    kind, method = type(function).__name__, "visible" if hasattr(function, "visible") else "score"
    with torch.device("meta"):  # whatever the default device is
        said = fa3.check(function, head_dim=128, **sizes)
    assert said == (
        f"{kind}.{method} compiles for sm_90a at head_dim 128 and agrees with reference at all "
        f"{positions:,} positions"
    )


@dataclass(frozen=True)
class OneHeadWrong(fa3.Mask):
    """One key of one head of one sequence is not hidden in the kernel."""

    @cute.jit
    def visible(self, at):
        return at.key < 100

    def reference(self, at):
        return (at.key < 100) & (at.head * 16 + at.batch != 5 * 16 + 7)


def test_every_sequence_and_head_is_compared(on_the_host_alone):
    complaint = r"^OneHeadWrong\.visible .* first at batch 7, head 5, query 0 of 128, key 0 of 128"
    with pytest.raises(ValueError, match=complaint):
        fa3.check(OneHeadWrong(), head_dim=64, batch=16, heads=16, seqlen_q=128)


def test_what_only_gpus_run_is_not_compared():
    assert "was not compared with reference" in fa3.check(Absolute(), head_dim=64)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (
            OneKeyMore(LENGTHS),
            r"OneKeyMore\.visible and OneKeyMore\.reference differ at 80 of 32,768 positions, "
            r"first at batch 0, head 0, query 0 of 128, key 30 of 128: visible says False, "
            r"reference True$",
        ),
        (FewKeys(LENGTHS), r"FewKeys\.key_range gives \(0, 30\), but a query sees key 30 for Rows"),
        (ManyOpen(LENGTHS), r"ManyOpen\.open_range gives .* a query does not see key \d+ for Rows"),
        (
            Square(),
            r"Square\.score and Square\.reference differ at .* query 0 of 128, key 0 of 128: of "
            r"the logit (-?[\d.]+) score gives [\d.]+, reference [\d.]+$",
        ),
        (FarAway(torch.zeros(1)), "the method reads outside of its tensors where reference does"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_differs_is_named(function, complaint, on_the_host_alone):
    with pytest.raises(ValueError, match=f"^{complaint}"):
        fa3.check(function, head_dim=64, batch=2, seqlen_q=128)


def test_what_does_not_compile_is_named():
    with pytest.raises(
        ValueError, match=r"^Undefined\.visible does not compile: name 'undefined_n"
    ):
        fa3.check(Undefined(), head_dim=64, batch=2, seqlen_q=128)


@pytest.mark.parametrize(
    ("function", "options", "error", "complaint"),
    [
        (Square, {}, TypeError, "function must be a fa3.Score or a fa3.Mask, got the class Square"),
        (fa3.Mask(), {}, TypeError, "Mask must be a frozen dataclass"),
        (Square(), {"head_dim": 65}, ValueError, "q has head_dim 65, .* multiples of 8 up to 256"),
        (Square(), {"head_dim": None}, TypeError, "head_dim must be an integer, got None"),
        (Square(), {"seqlen_k": 0}, ValueError, "seqlen_k must be 1 or more, got 0"),
        (Square(), {"seqlen_q": 4096}, ValueError, ".* product of at most 4194304, got .*4096"),
        (PrefixLM(LENGTHS), {"batch": 3}, ValueError, "mask does not work: .* IndexError: index 2"),
    ],
    ids=["class", "base", "head_dim", "no head_dim", "seqlen_k", "seqlen_q", "batch"],
)
def test_bad_arguments(function, options, error, complaint, on_the_host_alone):
    with pytest.raises(error, match=f"^{complaint}"):
        fa3.check(function, **{"head_dim": 64} | options)


def test_ctrl_c_leaves_no_process(monkeypatch):
    def interrupted(process, timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt
        return join(process)

    kind = multiprocessing.get_context("fork").Process
    join = kind.join
    monkeypatch.setattr(kind, "join", interrupted)
    monkeypatch.setattr("fa3.tools.function_check.run_logged", lambda *_: time.sleep(600))
    with pytest.raises(KeyboardInterrupt):
        exit_status(None, 2)
    assert not multiprocessing.active_children()


def test_a_compiler_that_fails_on_the_host_is_told(monkeypatch, on_the_host_alone):
    fail = Mock(side_effect=OSError("no such target"))
    monkeypatch.setattr("fa3.tools.function_check.compiled", fail)
    message = r"^the method does not run on the host \(status 1\): OSError: no such target$"
    with pytest.raises(RuntimeError, match=message):
        fa3.check(Absolute(), head_dim=64, seqlen_q=8)
