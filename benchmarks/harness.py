"""How a cell is measured: inputs, check against float32, then timed rounds of all providers.

Two regimes. "steady" is what users get: a second of load first, then blocks of 200 ms one after
the other, so that the power cap sets the clock. "burst" is 60 ms of work after an idle spell, at
full clock. In every round each provider runs one block, in random order; ratios are taken inside
a round.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.meter import Meter
from benchmarks.peers import Call, Provider, Tensors
from benchmarks.shapes import Cell

DATA = ("normal", "scaled", "growing")
"""How inputs are drawn: normal; normal with scores times 8; scores that grow along the keys by
more than lazy rescaling lets pass, in every block."""

GRAPH_BELOW_US = 200
"""Shorter calls are replayed from a CUDA graph, so that no provider's host time shows."""

LEAD_IN_US = 4000
"""Work of the same provider before the clock of a block starts."""

GRAPH_US = 4000
"""Work inside one graph."""

REFERENCE_ROWS = 2048
REFERENCE_SCORES = 1 << 26
ERROR_FACTOR = 2
ERROR_FLOOR = 1e-5


class WrongOutput(Exception):
    """A provider's output is not attention."""


@dataclass(frozen=True, slots=True)
class Regime:
    """When work is measured.

    Fields:
        load_s: seconds of work before the first block.
        idle_s: seconds of idleness before every block.
        block_ms: measured work of one block.
    """

    name: str
    load_s: float
    idle_s: float
    block_ms: float


REGIMES = {
    "burst": Regime("burst", load_s=0, idle_s=0.25, block_ms=60),
    "steady": Regime("steady", load_s=1, idle_s=0, block_ms=200),
}


class Block(NamedTuple):
    """One timed block: microseconds per call, and when it ran on the host's clock."""

    us: float
    calls: int
    begin: float
    end: float


class Errors(NamedTuple):
    """The largest difference from float32, and the most that passes."""

    largest: float
    allowed: float


def draw_inputs(cell: Cell, data: str, sets: int, seed: int = 0) -> list[Tensors]:
    """Draw sets of inputs on the GPU as `DATA` says."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, cell.dtype)

    def normal(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        shape = (cell.batch, seqlen, heads, head_dim)
        return torch.randn(shape, dtype=dtype, device="cuda", generator=generator)

    inputs = []
    for _ in range(sets):
        q = normal(cell.seqlen_q, cell.heads_q, cell.head_dim)
        k = normal(cell.seqlen_k, cell.heads_kv, cell.head_dim)
        v = normal(cell.seqlen_k, cell.heads_kv, cell.head_dim_v)
        if data == "scaled":
            q.mul_(8)
        elif data == "growing":
            # The first column alone adds 8 ln 2 to the scores every 64 keys.
            q[..., 0] = math.sqrt(cell.head_dim)
            steps = torch.arange(cell.seqlen_k, device="cuda") * (8 * math.log(2) / 64)
            k[..., 0] = steps[:, None]
        inputs.append(Tensors(q, k, v))
    return inputs


def hidden(cell: Cell, rows: torch.Tensor) -> torch.Tensor:
    """Which keys each query row may not see."""
    keys = torch.arange(cell.seqlen_k, device=rows.device)
    diagonal = rows[:, None] + cell.seqlen_k - cell.seqlen_q
    beyond = keys > diagonal if cell.causal else torch.zeros_like(keys, dtype=torch.bool)
    if cell.window_left >= 0:
        beyond = beyond | (keys < diagonal - cell.window_left)
    return beyond


def attend_head(
    cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Attention of one head, (seqlen, head_dim) each, with everything in one dtype."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    parts = []
    for first in range(0, cell.seqlen_q, REFERENCE_ROWS):
        rows = torch.arange(first, min(first + REFERENCE_ROWS, cell.seqlen_q), device=q.device)
        scores = (q[rows] @ k.T) * cell.head_dim**-0.5
        scores.masked_fill_(hidden(cell, rows), -math.inf)
        parts.append(scores.softmax(-1) @ v)
    return torch.cat(parts)


def checked_heads(cell: Cell) -> list[tuple[int, int]]:
    """A few (batch, query head) pairs, first and last among them: more of small heads."""
    last = cell.batch * cell.heads_q - 1
    scores = cell.seqlen_q * cell.seqlen_k
    count = min(max(2, REFERENCE_SCORES // scores), 8, last + 1)
    picks = {round(i * last / max(1, count - 1)) for i in range(count)}
    return [divmod(pick, cell.heads_q) for pick in sorted(picks)]


class Reference:
    """What a cell's output should be, on some heads."""

    def __init__(self, cell: Cell, tensors: Tensors) -> None:
        self.heads = checked_heads(cell)
        self.expected = []
        largest = 0.0
        for batch, head in self.heads:
            head_kv = head // (cell.heads_q // cell.heads_kv)
            q = tensors.q[batch, :, head]
            k = tensors.k[batch, :, head_kv]
            v = tensors.v[batch, :, head_kv]
            exact = attend_head(cell, q, k, v, torch.float32)
            same_dtype = attend_head(cell, q, k, v, q.dtype)
            largest = max(largest, (same_dtype - exact).abs().max().item())
            self.expected.append(exact)
        self.allowed = ERROR_FACTOR * largest + ERROR_FLOOR

    def check(self, out: torch.Tensor) -> Errors:
        """Compare an output (batch, seqlen, heads, head_dim).

        Raises:
            WrongOutput: if it is not finite everywhere, or too far from float32.
        """
        if not out.isfinite().all():
            raise WrongOutput("not finite everywhere")
        largest = max(
            (out[batch, :, head] - exact).abs().max().item()
            for (batch, head), exact in zip(self.heads, self.expected, strict=True)
        )
        if largest > self.allowed:
            raise WrongOutput(f"error {largest:.3g}, allowed {self.allowed:.3g}")
        return Errors(largest, self.allowed)


def poison_freed_memory(cell: Cell) -> None:
    """Leave NaN where the next output is likely to be allocated, to unmask unwritten parts."""
    shape = (cell.batch, cell.seqlen_q, cell.heads_q, cell.head_dim_v)
    torch.full(shape, math.nan, dtype=getattr(torch, cell.dtype), device="cuda")


def check_provider(
    provider: Provider, cell: Cell, tensors: Tensors, reference: Reference
) -> Errors:
    """Compile and check everything that a provider may run on a cell; give its worst errors."""
    worst = 0.0
    for call in provider.prepare(cell, tensors).values():
        poison_freed_memory(cell)
        worst = max(worst, reference.check(call()).largest)
    return Errors(worst, reference.allowed)


class EagerRunner:
    """Runs calls from the host one by one, through all sets of inputs in turn."""

    launch = "eager"

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.us = math.nan

    def enqueue(self, count: int) -> int:
        """Enqueue at least this many calls; return how many."""
        for i in range(count):
            self.calls[i % len(self.calls)]()
        return count


class GraphRunner:
    """Replays a CUDA graph of many calls."""

    launch = "graph"

    def __init__(self, calls: list[Call], us: float) -> None:
        self.us = us
        # A replay reads tensors that only the calls may hold.
        self.calls = calls
        rotations = math.ceil(GRAPH_US / (us * len(calls)))
        self.calls_per_graph = rotations * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(rotations):
                for call in calls:
                    call()

    def enqueue(self, count: int) -> int:
        """Enqueue at least this many calls; return how many."""
        replays = math.ceil(count / self.calls_per_graph)
        for _ in range(replays):
            self.graph.replay()
        return replays * self.calls_per_graph


Runner = EagerRunner | GraphRunner


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


def make_runner(calls: list[Call], always_graph: bool = False) -> Runner:
    """Warm calls up, and choose between graph and host by how long they take."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    runner = EagerRunner(calls)
    begin = time.perf_counter()
    runner.enqueue(4)
    torch.cuda.synchronize()
    runner.us = (time.perf_counter() - begin) * 1e6 / 4
    run_block(runner, block_ms=5)
    if runner.us >= GRAPH_BELOW_US and not always_graph:
        return runner
    graph = GraphRunner(calls, runner.us)
    run_block(graph, block_ms=5)
    return graph


class Contender(NamedTuple):
    """A provider ready to be timed on one cell, as its fastest alternative."""

    provider: Provider
    choice: str
    runner: Runner


def choose_runner(provider: Provider, cell: Cell, inputs: list[Tensors]) -> Contender:
    """Build a provider's runners for a cell and keep the fastest."""
    by_set = [provider.prepare(cell, tensors) for tensors in inputs]
    runners = {
        choice: make_runner([calls[choice] for calls in by_set], always_graph=cell.is_decode)
        for choice in by_set[0]
    }
    if len(runners) == 1:
        ((choice, runner),) = runners.items()
        return Contender(provider, choice, runner)
    times = {choice: [] for choice in runners}
    for _ in range(3):
        for choice, runner in runners.items():
            times[choice].append(run_block(runner, block_ms=10).us)
    choice = min(times, key=lambda name: statistics.median(times[name]))
    return Contender(provider, choice, runners[choice])


def run_rounds(
    runners: dict[str, Runner], regime: Regime, rounds: int, shuffle: random.Random
) -> Iterator[tuple[str, Block]]:
    """Run every runner once a round, in random order, and give each block as it is done."""
    names = list(runners)
    loaded_until = time.perf_counter() + regime.load_s
    while time.perf_counter() < loaded_until:
        for runner in runners.values():
            run_block(runner, block_ms=50)
    for _ in range(rounds):
        shuffle.shuffle(names)
        for name in names:
            time.sleep(regime.idle_s)
            yield name, run_block(runners[name], regime.block_ms)


def measure(
    contenders: list[Contender],
    regime: Regime,
    rounds: int,
    shuffle: random.Random,
    meter: Meter,
) -> dict[str, list[Block]]:
    """Time all contenders of a cell in one regime: a list of blocks, one a round, for each."""
    runners = {contender.provider.name: contender.runner for contender in contenders}
    blocks = {name: [] for name in runners}
    # Garbage collection in the middle of a block would show as a stall of the host.
    gc.collect()
    gc.disable()
    try:
        with meter:
            for name, block in run_rounds(runners, regime, rounds, shuffle):
                blocks[name].append(block)
    finally:
        gc.enable()
    return blocks


def host_microseconds(
    call: Callable[[], object], calls: int = 200, rounds: int = 21
) -> list[float]:
    """Time what one call costs the host: enqueue many without waiting, once a round."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return times
