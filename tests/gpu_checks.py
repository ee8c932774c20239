"""What GPU tests share: graphs of calls, counters that are in use, and compute-sanitizer."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from fa3.calls.backward import preparation_of
from fa3.calls.execution import decode_alone, packed_call
from fa3.calls.options import LATEST, remembered_options
from fa3.calls.prepare import prepare_call
from fa3.running import memory

Results = TypeVar("Results")


def captured(run: Callable[[], Results], **options) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Return a graph of what a function launches, and what the function returned.
    The function must have run before, so that its kernels are loaded."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = run()
    return graph, results


def forget_prepared_calls() -> None:
    """Have the next call of any kind prepared anew, and its backward pass."""
    kernels = packed_call, decode_alone, preparation_of
    for remembered in (remembered_options, prepare_call, *kernels):
        remembered.cache_clear()
    LATEST.clear()


def used_counters() -> list[str]:
    """Counters that the next call on a stream or in a capture would take, and that are not zero.

    A capture keeps more than counters, such as the tables that its launches read, and those of a
    graph that is gone are kept until the next capture begins.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    places = {f"stream {stream:#x}": one for (_, stream), one in list(memory.BY_STREAM.items())}
    for number, capture in list(memory.LIVE.items()):
        for stream, one in list(capture.memory.items()):
            places[f"capture {number}, stream {stream:#x}"] = one
    return [
        f"{place}: {words.count_nonzero()} of {len(words)}, the first at {words.nonzero()[0, 0]}"
        for place, one in places.items()
        for loan in list(one.free)
        for words in loan.counters.values()
        if words.any()
    ]


def check_sanitized(tool: str, program: str) -> None:
    """Assert that a tool of compute-sanitizer finds nothing in a program, which can import what
    lies beside the tests.
    """
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    # The DSL asks for the GPU's architecture before the driver is initialised.
    options = "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"
    command = "compute-sanitizer", *options, sys.executable, "-c", path + textwrap.dedent(program)
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
