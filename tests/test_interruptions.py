"""Ctrl-C at any point of a call leaves no counters to later calls that are not zero.

Calls run on stubs of kernels, once for each instruction of fa3's that Python runs on the way, and
are interrupted right before it.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from free_counters import used_counters

import fa3
from fa3.calls import decode, launcher
from fa3.calls.decode import PreparedDecode
from fa3.calls.forward import PreparedCall
from fa3.calls.launcher import Tiles
from fa3.calls.packed_calls import PreparedMultiSequence, PreparedVarlen
from fa3.kernels.decode_launch import DecodeArguments
from fa3.kernels.forward_launch import ForwardArguments
from fa3.kernels.joined_table import MultiSequenceTableArguments
from fa3.kernels.segment_table import SegmentTableArguments
from fa3.kernels.tile_table import TileTableArguments
from fa3.planning.launch import Launch, template_of
from fa3.planning.routes import PackedSizes
from fa3.reference.cache import NO_TABLES
from fa3.reference.varlen import RaggedOperands
from fa3.running import counters, graphs
from fa3.running.counters import StreamCounters

SOURCES = str(Path(fa3.__file__).parent)

Q = torch.zeros(1, 8, 4, 64)
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
OPERANDS = RaggedOperands(*(4 * [Q[0]]), None, ENDS, ENDS, None, None)


@pytest.fixture(autouse=True)
def stream(monkeypatch) -> StreamCounters:
    """The counters of the stream that calls run on."""
    monkeypatch.setattr(counters, "BY_STREAM", {})
    monkeypatch.setattr(counters, "RESERVES", {})
    monkeypatch.setattr(graphs, "LIVE", {})
    for module in (decode, launcher):
        monkeypatch.setattr(module, "current_device", lambda: None)
        monkeypatch.setattr(module, "current_stream", lambda index: 7)
        monkeypatch.setattr(module, "capture_of", lambda stream: None)
    return counters.counters_of(Q.device, 7, None)


# --------------------------------------------------------------------------------------- stubs


def attends(*given) -> None:
    """Takes numbers from counters, and leaves them as it found them."""
    words = ctypes.c_int32 * 5
    assert not any(words.from_address(DecodeArguments(*given).counters))


def marks_rows(*given) -> None:
    """Has counters for its schedule, and marks what is to be computed again."""
    given = ForwardArguments(*given)
    assert not given.schedule_state.any() and not given.marks.any()
    given.marks.fill_(1)


def merges_parts(*given) -> None:
    """Has counters for parts of tiles, which it leaves as it found them, and marks rows."""
    given = ForwardArguments(*given)
    assert not given.part_counters.any() and not given.marks.any()
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


def launch(entry: Callable, arguments: type) -> Launch:
    """The launch of a stub."""
    return Launch(entry, template_of(arguments))


def decodes() -> None:
    call = PreparedDecode(None, launch(attends, DecodeArguments), counters=5, workspace=8)
    call.start(OPERANDS, NO_TABLES, None, 1.0)()


def decodes_packed() -> None:
    call = PreparedDecode(None, launch(attends, DecodeArguments), counters=5, workspace=8)
    call.start(OPERANDS, NO_TABLES, None, 1.0, 0, 8)()


def is_dense() -> None:
    launches = tuple(launch(one, ForwardArguments) for one in (marks_rows, computes_again))
    call = PreparedCall(None, None, (), launches, Tiles(2, 2, num_marks=8, num_counters=4))
    call.launch(Q, Q, Q, Q, None, None, 1.0)


def is_packed(splits: bool = False) -> None:
    whole, split = (
        tuple(launch(one, ForwardArguments) for one in (main, computes_again))
        for main in (marks_rows, merges_parts)
    )
    whole = launch(makes_table, TileTableArguments), *whole
    split = launch(makes_table, SegmentTableArguments), *split
    signature = SimpleNamespace(spec=SimpleNamespace(head_dim_v=64), cache=None)
    call = PreparedVarlen(signature, lambda splits: split if splits else whole, 128, 112, 132)
    call.launch(OPERANDS, PackedSizes(2, 4, 8, 8, 5, 8), None, 1.0, splits=splits)


def is_split_on_the_gpu() -> None:
    is_packed(splits=True)


def shares_tiles() -> None:
    kernels = (
        launch(makes_table, MultiSequenceTableArguments),
        tuple(launch(one, ForwardArguments) for one in (marks_rows, computes_again)),
    )
    call = PreparedMultiSequence(*kernels, 128, 132)
    call.launch(OPERANDS, PackedSizes(2, 4, 8, 8, 5, 5), None, 1.0)


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


@pytest.mark.parametrize(
    "call",
    [
        decodes,
        decodes_packed,
        is_dense,
        is_packed,
        is_split_on_the_gpu,
        shares_tiles,
    ],
)
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
