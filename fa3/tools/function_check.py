"""`check`: whether a user's score or mask compiles, and its two versions agree. Needs no GPU.

The kernel for sm_90a is compiled as for a call. The method that it calls is compiled once more for
the host and run at sample positions, in a process of its own: some instructions exist on GPUs only,
and the compiler ends the process that asks for one on the host.
"""

import faulthandler
import math
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, cast

import torch
from cutlass.cute.runtime import from_dlpack

from fa3.calls.modifiers import functions_of
from fa3.calls.options import integer, shown
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.primitives.coords import Position
from fa3.problem import HEAD_DIM_UNIT, MAX_HEAD_DIM, AttentionSpec, Problem, Window
from fa3.reference.functions import changed, errors_of, lets_through
from fa3.reference.walker import HostTensor
from fa3.running.compiler import ARCH, compiled, load_kernel
from fa3.scores.masks import Mask, Rows, as_integer
from fa3.scores.sampled import Sampled
from fa3.scores.scores import Score, bind
from fa3.scores.templates import Template, tensors_of

MOST_POSITIONS = 1 << 22
"""Positions that are compared, at most, unless that would leave a head of a sequence fewer than
four. They take about two seconds."""

ROWS_OF_TILE = 8
"""Sampled queries whose ranges a mask is asked for together."""

TOLERANCE = 1e-3
"""How far a score's logit may be from the reference's, relative to 1 or the logit's magnitude."""

PATIENCE = 60
"""Seconds that the method may take on the host."""


class Samples(NamedTuple):
    """Where the halves are compared: everywhere in a grid.

    Fields:
        batch, heads: sizes of the call; all sequences and heads are compared.
        queries, keys: some of each or all, as tensors.
        places: (4, n), int32: the positions, batch first.
        logits: (n,), float32, drawn.
        seqlen_q, seqlen_k: sizes of the call.
    """

    batch: int
    heads: int
    queries: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def of(cls, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> "Samples":
        """The samples of a call: every sequence and head, at the first and last query and key, and
        at as many between them as `MOST_POSITIONS` allows."""
        of_head = max(4, MOST_POSITIONS // (batch * heads))
        # A short side leaves the other one more positions.
        num_q = min(seqlen_q, max(math.isqrt(of_head), of_head // seqlen_k))
        num_k = min(seqlen_k, of_head // num_q)
        queries, keys = (
            torch.linspace(0, length - 1, number, dtype=torch.float64).round().long()
            for length, number in ((seqlen_q, num_q), (seqlen_k, num_k))
        )
        axes = torch.arange(batch), torch.arange(heads), queries, keys
        grid = torch.stack(torch.meshgrid(*(axis.int() for axis in axes), indexing="ij"))
        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(grid[0].numel(), generator=generator)
        return cls(batch, heads, queries, keys, grid.view(4, -1), logits, seqlen_q, seqlen_k)

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every sequence with every head, in the order of the places."""
        return product(range(self.batch), range(self.heads))

    @property
    def extent(self) -> str:
        """Which positions are compared, in words."""
        places = self.places.shape[1]
        everything = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        if places == everything:
            return f"at all {places:,} positions"
        return (
            f"at {places:,} of {everything:,} positions: in every sequence and head, at "
            f"{len(self.queries):,} of {self.seqlen_q:,} queries and {len(self.keys):,} of "
            f"{self.seqlen_k:,} keys"
        )

    def at(self, number: int) -> str:
        """A position in words."""
        batch, head, query, key = self.places[:, number].tolist()
        return (
            f"batch {batch}, head {head}, query {query} of {self.seqlen_q}, key {key} of "
            f"{self.seqlen_k}"
        )


@dataclass(frozen=True)
class FunctionCheck:
    """What a `check` found; it prints as one line.

    Fields:
        name: the class and the method.
        head_dim: of the kernel that was compiled.
        positions: at how many the two versions were compared; 0 if the method runs on GPUs only.
        extent: which positions these are, in words.
    """

    name: str
    head_dim: int
    positions: int
    extent: str

    def __str__(self) -> str:
        compared = f"agrees with reference {self.extent}"
        if not self.positions:
            compared = "was not compared with reference: it has instructions of GPUs only"
        return f"{self.name} compiles for {ARCH} at head_dim {self.head_dim} and {compared}"


def check(
    function: Score | Mask,
    *,
    head_dim: int,
    batch: int = 1,
    heads: int = 1,
    seqlen_q: int = 256,
    seqlen_k: int | None = None,
) -> FunctionCheck:
    """Compile a score or a mask of your own for sm_90a, and compare its two versions. Needs no GPU.

    `score` or `visible` runs on the host, in every sequence and head of a call: at all positions if
    they are at most 4,194,304 in all, or else at some of its queries and keys. It must give what
    `reference` gives there. The ranges of a mask must be true there too. Tensors on a GPU are
    copied to the CPU.

    Args:
        function: an object of a frozen dataclass derived from `fa3.Score` or `fa3.Mask`.
        head_dim: columns of q, k and v.
        batch, heads, seqlen_q, seqlen_k: sizes of a call that the object's tensors fit;
            seqlen_k is seqlen_q if not given.

    Returns:
        what was compared; `print` shows it in one line.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, a method does not compile or raises something,
            the two versions differ, or a range is wrong; the message says where.
        NotImplementedError: the class does not define `reference`.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    given = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    batch, heads, seqlen_q, seqlen_k = (integer(name, one, 1) for name, one in given.items())
    head_dim = integer("head_dim", head_dim, 1)
    if head_dim % HEAD_DIM_UNIT or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}, got {head_dim}"
        )
    function = copy_on_host(function)
    q = torch.empty(batch, seqlen_q, heads, head_dim, dtype=torch.bfloat16)
    score = function if isinstance(function, Score) else None
    mask = function if isinstance(function, Mask) else None
    structure, tensors = functions_of(q, score, mask)
    spec = structure.spec(q.dtype, head_dim, head_dim, Window())
    load_kernel(plan_forward(Problem(spec, batch, seqlen_q, seqlen_k, heads, 1), H200).kernel())
    # The reference goes first: an index that it refuses would be read out of bounds.
    samples = Samples.of(batch, heads, seqlen_q, seqlen_k)
    expected = by_reference(function, samples)
    name = f"{type(function).__name__}.{'visible' if score is None else 'score'}"
    found = by_method(spec, tensors, samples)
    if found is not None:
        check_halves(name, found, expected, samples)
    if mask is not None:
        check_ranges(spec, tensors, expected, samples)
    return FunctionCheck(name, head_dim, 0 if found is None else found.numel(), samples.extent)


def copy_on_host(function: Score | Mask) -> Score | Mask:
    """A copy whose tensors are on the CPU."""
    if not isinstance(function, Score | Mask):
        raise TypeError(f"function must be a fa3.Score or a fa3.Mask, got {shown(function)}")
    tensors = (cast(torch.Tensor, tensor).cpu() for _, tensor in tensors_of(function))
    return cast(Score | Mask, Template.of(function).bind(tensors))


def by_reference(function: Score | Mask, samples: Samples) -> torch.Tensor:
    """The torch half at the samples: new logits, or 1 where a mask lets a key through, else 0."""
    shape = len(samples.queries), len(samples.keys)
    parts, begin = [], 0
    for batch, head in samples.pairs:
        queries, keys = samples.queries[:, None], samples.keys
        at = Position(batch, head, queries, keys, samples.seqlen_q, samples.seqlen_k)
        if isinstance(function, Score):
            logits = samples.logits[begin : begin + len(queries) * len(keys)].view(shape)
            parts.append(changed(function, logits, at).flatten())
        else:
            parts.append(lets_through(function, at, shape).flatten())
        begin += parts[-1].numel()
    return torch.cat(parts).float()


def by_method(spec: AttentionSpec, tensors: tuple, samples: Samples) -> torch.Tensor | None:
    """What kernels call, at the samples, as in `by_reference`; None if it runs on GPUs only.

    Raises:
        ValueError: it does not end, or reads where there is no memory.
        RuntimeError: the compiler fails.
    """
    found = torch.frombuffer(mmap.mmap(-1, 4 * samples.logits.numel()), dtype=torch.float32)
    places, logits, shared = map(from_dlpack, (samples.places, samples.logits, found))
    given = tuple(map(from_dlpack, tensors)) or None, places, samples.seqlen_q, samples.seqlen_k
    sampled = Sampled(spec, (*given, logits, shared))
    with tempfile.TemporaryFile() as log:
        status = exit_status(sampled, log.fileno())
        log.seek(0)
        reason = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    if status == -signal.SIGSEGV:
        raise ValueError("the method reads outside of its tensors where reference does not")
    if status not in (0, -signal.SIGABRT):
        raise RuntimeError(f"the method does not run on the host (status {status}): {reason}")
    return None if status else found


def exit_status(sampled: Sampled, log: int) -> int | None:
    """Run in a process of its own; how it ended, where a negative number is a signal.

    Args:
        log: where it writes its errors.
    """
    process = multiprocessing.get_context("fork").Process(target=run_logged, args=(sampled, log))
    with warnings.catch_warnings():
        # From Python 3.12 on, of threads: the new process runs none but its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    try:
        process.join(PATIENCE)
        if process.is_alive():
            raise ValueError(f"the method does not end within {PATIENCE} s on the host")
    finally:
        # Ctrl-C may end the wait: then nothing else would end the process.
        process.kill()
        process.join()
    return process.exitcode


def run_logged(sampled: Sampled, log: int) -> None:
    """Compile for the host and run, with errors in the log."""
    faulthandler.disable()
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w")
    compiled(sampled, f"--gpu-arch {ARCH}")(*sampled.given)


def check_halves(name: str, found: torch.Tensor, expected: torch.Tensor, samples: Samples) -> None:
    """Raise ValueError where the halves differ.

    Args:
        name: the class and the method.
    """
    differs = ~found.isclose(expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if not differs.any():
        return
    kind, method = name.split(".")
    first = int(differs.nonzero()[0])
    one, other = float(found[first]), float(expected[first])
    values = f"{method} gives {one:.6g}, reference {other:.6g}"
    if method == "visible":
        values = f"{method} says {bool(one)}, reference {bool(other)}"
    else:
        values = f"of the logit {float(samples.logits[first]):.6g} {values}"
    raise ValueError(
        f"{name} and {kind}.reference differ at {int(differs.sum()):,} of {len(found):,} "
        f"positions, first at {samples.at(first)}: {values}"
    )


def check_ranges(spec: AttentionSpec, tensors: tuple, seen: torch.Tensor, samples: Samples) -> None:
    """Raise ValueError if a mask's ranges leave out a key that a query sees, or hold one that a
    query does not see.

    Args:
        seen: which keys `reference` lets through, as floats.
    """
    _, mask, _ = bind(spec, map(HostTensor, tensors))
    function, sizes = mask.function, (samples.seqlen_q, samples.seqlen_k)
    rows_of_keys = seen.bool().view(-1, len(samples.queries), len(samples.keys))
    for (batch, head), visible in zip(samples.pairs, rows_of_keys, strict=True):
        for queries, tile in zip(
            samples.queries.split(ROWS_OF_TILE), visible.split(ROWS_OF_TILE), strict=True
        ):
            rows = Rows(batch, head, int(queries[0]), int(queries[-1]), *sizes)
            with errors_of("mask", function, "key_range or open_range"):
                begin, end = map(as_integer, function.key_range(rows))
                first, last = map(as_integer, function.open_range(rows))
            keys = samples.keys
            outside = tile.any(dim=0) & ((keys < begin) | (keys >= end))
            hidden = ~tile.all(dim=0) & (keys >= first) & (keys < last)
            for wrong, what in (
                (outside, f"key_range gives ({begin}, {end}), but a query sees"),
                (hidden, f"open_range gives ({first}, {last}), but a query does not see"),
            ):
                if wrong.any():
                    raise ValueError(
                        f"{type(function).__name__}.{what} key {int(keys[wrong][0])} for {rows}"
                    )
