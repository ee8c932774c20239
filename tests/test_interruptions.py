"""Ctrl-C at any point of a call leaves no counters to later calls that are not zero.

Calls run on stubs of kernels, once for each instruction of fa3's that Python runs on the way, and
are interrupted right before it.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_checks import used_counters

import fa3
from fa3.calls import execution
from fa3.calls.execution import PackedCall, attend_by
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import DecodeArguments
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardArguments
from fa3.planning import routes
from fa3.planning.costs import H200
from fa3.planning.decode import DecodePlan
from fa3.planning.planner import plan_forward
from fa3.planning.routes import FORWARD, PACKED, SHARED, SPLIT, PackedSizes, Route, Signature
from fa3.planning.tilings import choose_config
from fa3.problem import AttentionSpec, Problem, Window
from fa3.running import memory
from fa3.running.memory import StreamMemory
from fa3.schedules.recompute import RecomputeRaggedTiles, RecomputeTiles
from fa3.scores.masks import Band

SOURCES = str(Path(fa3.__file__).parent)

GPU = torch.device("cuda", 0)
Q = torch.zeros(1, 8, 4, 64)
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
NAMES = (
    "lse", "seqused_q", "seqused_k", "batch_idx", "leftpad", "page_table", "modifiers", "sinks",
    "descales",
)  # fmt: skip
VALUES = dict.fromkeys("qkvo", Q) | dict.fromkeys(NAMES) | {
    "softmax_scale": 1.0, "seqlen_new": 0, "address_of_lse": 0,
}  # fmt: skip
PACKED_VALUES = dict.fromkeys("qkvo", Q[0]) | {
    "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_k": 0, "longest": (5, 5),
}  # fmt: skip
PACKED_VALUES = VALUES | PACKED_VALUES


@pytest.fixture(autouse=True)
def stream(monkeypatch) -> StreamMemory:
    """The memory of the stream that calls run on."""
    monkeypatch.setattr(memory, "BY_STREAM", {})
    monkeypatch.setattr(memory, "RESERVES", {})
    monkeypatch.setattr(memory, "LIVE", {})
    monkeypatch.setattr(execution, "current_device", lambda: None)
    monkeypatch.setattr(execution, "current_stream", lambda index: 7)
    monkeypatch.setattr(execution, "capture_of", lambda stream: None)
    return memory.memory_of(Q.device, 7, None)


# --------------------------------------------------------------------------------------- stubs


def attends(*given) -> None:
    """Takes numbers from counters, and leaves them as it found them."""
    words = ctypes.c_int32 * 5
    assert not any(words.from_address(DecodeArguments(*given).counters))


def marks_rows(*given) -> None:
    """Has counters for its schedule or for parts of tiles, and marks what is to be computed again.
    It leaves counters of parts as it found them."""
    given = ForwardArguments(*given)
    counters = given.schedule_state if given.part_counters is None else given.part_counters
    assert not counters.any() and not given.marks.any()
    given.marks.fill_(1)


def computes_again(*given) -> None:
    marks = ForwardArguments(*given).schedule_state
    assert marks.all()
    marks.zero_()


def makes_table(*given) -> None:
    """Has tensors of the call's own, which begin with any numbers."""
    for words in given:
        if isinstance(words, torch.Tensor) and words is not ENDS:
            words.zero_()


def stub_of(kernel: object) -> Callable:
    """Return what runs in place of a kernel."""
    if isinstance(kernel, Decode):
        return attends
    if not isinstance(kernel, Forward):
        return makes_table
    computes = kernel.schedule_type in (RecomputeTiles, RecomputeRaggedTiles)
    return computes_again if computes else marks_rows


SPEC = AttentionSpec("bfloat16", 64, 64, Band())
PROBLEM = Problem(SPEC, 1, 8, 8, 4, 1, Window())
SIZES = PackedSizes(2, 4, 8, 8, 5, 5)


def packed(name: str) -> PackedCall:
    """Return calls that take a route."""
    signature = Signature(PACKED, SPEC, Window(), 4, 4, H200)
    call = PackedCall.of(signature, on_gpu=True)
    stubs.setattr(routes, "choose_route", lambda *_: Route(name, 0, ""))
    call.find(SIZES)
    return call


with pytest.MonkeyPatch.context() as stubs:
    stubs.setattr(execution, "load_kernel", stub_of)
    DECODES = attend_by(DecodePlan.of_dense(PROBLEM, H200), GPU)
    CONFIG = replace(choose_config(PROBLEM, H200), fixed_row_max=True)
    DENSE = attend_by(plan_forward(PROBLEM, H200, CONFIG, "dynamic"), GPU)
    ALONE, SPLITS, SHARES = map(packed, (FORWARD, SPLIT, SHARED))


CALLS = {
    "decode": lambda: DECODES(dict(PACKED_VALUES)),
    "dense": lambda: DENSE(dict(VALUES)),
    "packed": lambda: ALONE.attend(dict(PACKED_VALUES)),
    "split on the GPU": lambda: SPLITS.attend(dict(PACKED_VALUES)),
    "shared tiles": lambda: SHARES.attend(dict(PACKED_VALUES)),
}


# --------------------------------------------------------------------------------- interruptions


def run_up_to(call: Callable[[], None], steps: int) -> int:
    """Run a call, interrupted before so many instructions of fa3's; how many it ran."""
    done = 0

    def trace(frame, event, argument):
        nonlocal done
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if done == steps:
                raise KeyboardInterrupt
            done += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return done


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interruption_leaves_no_counters_that_are_used(call, stream):
    call()
    assert stream.free and not used_counters()
    instructions = run_up_to(call, sys.maxsize)
    assert instructions > 100
    for steps in range(instructions):
        with pytest.raises(KeyboardInterrupt):
            run_up_to(call, steps)
        assert not used_counters()
        # The next call finds what its kernels need.
        call()
        assert not used_counters()
