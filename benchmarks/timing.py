"""Times calls on the GPU for the benchmarks, in rounds, by CUDA events.

"steady" is what users get: a while of load first, then blocks of work one after the other, so that
the power cap sets the clock. "burst" is a short block after an idle spell, at full clock. In every
round each call runs one block, in random order.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

Call = Callable[[], object]

GRAPH_BELOW_US = 200
"""Shorter calls are replayed from a CUDA graph, so that no provider's host time shows."""

LEAD_IN_US = 4000  # work of the same provider before the clock of a block starts
GRAPH_US = 4000  # work inside one graph


@dataclass(frozen=True, slots=True)
class Regime:
    """When work is measured."""

    name: str
    load_s: float  # seconds of work before the first block
    idle_s: float  # seconds of idleness before every block
    block_ms: float  # measured work of one block


REGIMES = {
    "burst": Regime("burst", load_s=0, idle_s=0.25, block_ms=60),
    "steady": Regime("steady", load_s=1, idle_s=0, block_ms=200),
}

QUICK = {
    "burst": Regime("burst", load_s=0, idle_s=0.05, block_ms=15),
    "steady": Regime("steady", load_s=0.5, idle_s=0, block_ms=50),
}
"""Shorter: enough for differences of some per cent; too short for joules."""

QUICK_ROUNDS = 3


class Block(NamedTuple):
    """One timed block: microseconds per call, and when it ran on the host's clock."""

    us: float
    calls: int
    begin: float
    end: float


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which a GPU's graphs are captured.
    torch runs a backward pass on the stream of its forward pass, so a graph of the one alone needs
    the other to have run here."""
    return torch.cuda.Stream(device)


class Runner:
    """Runs calls from the host one by one, all sets of inputs in turn, or replays a graph of many.
    `us` are the microseconds of a call, as measured last."""

    launch = "eager"

    def __init__(self, calls: list[Call]) -> None:
        # A replay reads tensors that only the calls may hold.
        self.calls, self.us = calls, math.nan

    def capture(self) -> None:
        """Capture a graph of many calls, which is replayed from now on."""
        self.launch, self.graph = "graph", torch.cuda.CUDAGraph()
        rotations = math.ceil(GRAPH_US / (self.us * len(self.calls)))
        self.calls_per_graph = rotations * len(self.calls)
        with torch.cuda.graph(self.graph, stream=capture_stream(torch.cuda.current_device())):
            for call in rotations * self.calls:
                call()

    def enqueue(self, count: int) -> int:
        """Enqueue at least this many calls; return how many."""
        if self.launch == "eager":
            for i in range(count):
                self.calls[i % len(self.calls)]()
            return count
        replays = math.ceil(count / self.calls_per_graph)
        for _ in range(replays):
            self.graph.replay()
        return replays * self.calls_per_graph


def run_block(runner: Runner, block_ms: float) -> Block:
    """Time about `block_ms` of calls, after a short lead-in of the same calls."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runner.enqueue(math.ceil(LEAD_IN_US / runner.us))
    start.record()
    calls = runner.enqueue(math.ceil(block_ms * 1e3 / runner.us))
    stop.record()
    stop.synchronize()
    end = time.perf_counter()
    elapsed_ms = start.elapsed_time(stop)
    runner.us = elapsed_ms * 1e3 / calls
    return Block(runner.us, calls, end - elapsed_ms / 1e3, end)


def make_runner(calls: list[Call], graph: bool | None = None) -> Runner:
    """Warm calls up, and choose between graph and host: by how long they take, if None."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    runner = Runner(calls)
    begin = time.perf_counter()
    runner.enqueue(4)
    torch.cuda.synchronize()
    runner.us = (time.perf_counter() - begin) * 1e6 / 4
    run_block(runner, block_ms=5)
    if graph is None:
        graph = runner.us < GRAPH_BELOW_US
    if graph:
        runner.capture()
        run_block(runner, block_ms=5)
    return runner


def run_rounds(
    runners: dict[str, Runner], regime: Regime, rounds: int, shuffle: random.Random
) -> Iterator[tuple[str, Block]]:
    """Run every runner once a round, in random order, and give each block as it is done."""
    names = list(runners)
    loaded_until = time.perf_counter() + regime.load_s
    while time.perf_counter() < loaded_until:
        for runner in runners.values():
            run_block(runner, min(regime.block_ms, 50))
    for _ in range(rounds):
        shuffle.shuffle(names)
        for name in names:
            time.sleep(regime.idle_s)
            yield name, run_block(runners[name], regime.block_ms)
