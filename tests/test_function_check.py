"""`fa3.check`: a user's score or mask compiles, and its two halves agree."""

import multiprocessing
import time
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import pytest
import torch
from score_problems import Gate, PrefixLM

import fa3
from fa3.tools.function_check import exit_status

pytestmark = pytest.mark.compiles

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
    assert fa3.check(function, head_dim=128, **sizes) == (
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
        (Square(), {"seqlen_k": 0}, ValueError, "seqlen_k must be 1 or more, got 0"),
        (Square(), {"seqlen_q": 4096}, ValueError, ".* product of at most 4194304, got .*4096"),
        (PrefixLM(LENGTHS), {"batch": 3}, ValueError, "mask does not work: .* IndexError: index 2"),
    ],
    ids=["class", "base", "head_dim", "seqlen_k", "seqlen_q", "batch"],
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
    def fail(*arguments):
        raise OSError("no such target")

    monkeypatch.setattr("fa3.tools.function_check.compiled", fail)
    message = r"^the method does not run on the host \(status 1\): OSError: no such target$"
    with pytest.raises(RuntimeError, match=message):
        fa3.check(Absolute(), head_dim=64, seqlen_q=8)
