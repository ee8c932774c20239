"""How a cell is measured: inputs, check against float32, then timed rounds of all providers.

Regimes and rounds are those of `benchmarks.timing`; ratios are taken inside a round.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.meter import Meter
from benchmarks.peers import Provider, Tensors
from benchmarks.shapes import Cell
from benchmarks.timing import Block, Regime, Runner, make_runner, run_block, run_rounds

DATA = ("normal", "scaled", "growing")
"""How inputs are drawn: normal; normal with scores times 8; scores that grow along the keys by
more than lazy rescaling lets pass, in every block."""

REFERENCE_ROWS = 2048
REFERENCE_SCORES = 1 << 26
ERROR_FACTOR = 2
ERROR_FLOOR = 1e-5


class WrongOutput(Exception):
    """A provider's output is not attention."""


class Errors(NamedTuple):
    """The largest difference from float32, and the most that passes."""

    largest: float
    allowed: float

    @property
    def share(self) -> float:
        return self.largest / self.allowed


def draw_inputs(cell: Cell, data: str, sets: int, seed: int = 0) -> list[Tensors]:
    """Draw sets of inputs on the GPU as `DATA` says."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, cell.dtype)

    inputs = []
    for _ in range(sets):
        q, k, v = (
            torch.randn(shape, dtype=dtype, device="cuda", generator=generator)
            for shape in cell.operand_shapes
        )
        if data == "scaled":
            q.mul_(8)
        elif data == "growing":
            # The first column alone adds 8 ln 2 to the scores every 64 keys.
            q[..., 0] = math.sqrt(cell.head_dim)
            steps = cell.key_places(k.device) * (8 * math.log(2) / 64)
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
    cell: Cell,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of one head, (seqlen, head_dim) each, with everything in one dtype.

    Args:
        weigh: gives what the probabilities of some rows are multiplied by.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    parts = []
    for first in range(0, cell.seqlen_q, REFERENCE_ROWS):
        rows = torch.arange(first, min(first + REFERENCE_ROWS, cell.seqlen_q), device=q.device)
        scores = (q[rows] @ k.T) * cell.head_dim**-0.5
        scores.masked_fill_(hidden(cell, rows), -math.inf)
        p = scores.softmax(-1)
        if weigh is not None:
            p = p * weigh(rows).to(dtype)
        parts.append(p @ v)
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


class PartsReference:
    """What some parts of a batch should give, each judged by a reference of its own.

    Fields:
        parts: places in the first dimension of what a call returns, each with its reference.
    """

    def __init__(self, parts: list[tuple[slice, Reference]]) -> None:
        self.parts = parts

    def check(self, result: torch.Tensor | tuple[torch.Tensor, ...]) -> Errors:
        """Compare what a call returned, as `Reference.check` does; give the worst part's errors."""
        for tensor in result if isinstance(result, tuple) else (result,):
            if not tensor.isfinite().all():
                raise WrongOutput("not finite everywhere")
        errors = [one.check(part_of(result, rows)) for rows, one in self.parts]
        return max(errors, key=lambda error: error.share)


def part_of(
    result: torch.Tensor | tuple[torch.Tensor, ...], rows: slice
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Some rows of what a call returned, as a batch of one."""
    if isinstance(result, tuple):
        return tuple(part_of(tensor, rows) for tensor in result)
    return result[rows].reshape(1, -1, *result.shape[-2:])


def poison_freed_memory(cell: Cell) -> None:
    """Leave NaN where the next results are likely to be allocated, to unmask unwritten parts."""
    dtype = getattr(torch, cell.dtype)
    poisoned = [
        torch.full(shape, math.nan, dtype=dtype, device="cuda") for shape in cell.result_shapes
    ]
    del poisoned


def check_provider(
    provider: Provider, cell: Cell, tensors: Tensors, reference: Reference | PartsReference
) -> Errors:
    """Compile and check everything that a provider may run on a cell; give its worst errors."""
    errors = []
    for call in provider.prepare(cell, tensors).values():
        poison_freed_memory(cell)
        errors.append(reference.check(call()))
    return max(errors, key=lambda error: error.share)


class Contender(NamedTuple):
    """A provider ready to be timed on one cell, as its fastest alternative."""

    provider: Provider
    choice: str
    runner: Runner


def choose_runner(provider: Provider, cell: Cell, inputs: list[Tensors]) -> Contender:
    """Build a provider's runners for a cell and keep the fastest."""
    by_set = [provider.prepare(cell, tensors) for tensors in inputs]
    runners = {
        choice: make_runner(
            [calls[choice] for calls in by_set], True if cell.is_decode else cell.graph
        )
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


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that one call takes beside what its inputs take, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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
