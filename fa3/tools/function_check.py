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
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, cast

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32
from cutlass.cute.runtime import from_dlpack

from fa3.calls.options import integer, shown
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.primitives.coords import Position
from fa3.problem import AttentionSpec, Problem
from fa3.reference.walker import HostTensor, changed, errors_of, lets_through
from fa3.running.compiler import ARCH, compiled, load_kernel
from fa3.scores.masks import Mask, Rows, as_integer
from fa3.scores.scores import Score, bind
from fa3.scores.templates import Template, tensors_of

MOST_POSITIONS = 1 << 22
"""Positions that are compared, at most, unless that would leave a head of a sequence fewer than
four. They take about two seconds."""

ROWS_OF_TILE = 8  # sampled queries whose ranges a mask is asked for together

TOLERANCE = 1e-3
"""How far a score's logit may be from the reference's, relative to 1 or the logit's magnitude."""

PATIENCE = 60  # seconds that the method may take on the host


class Samples(NamedTuple):
    """Where the two versions are compared: in every sequence and head of a call."""

    sizes: tuple[int, int, int, int]  # batch, heads, seqlen_q and seqlen_k of the call
    # queries, keys: the places that are compared, as tensors.
    queries: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor  # (4, n), int32: all positions in this grid, batch first
    logits: torch.Tensor  # (n,), float32, drawn

    @classmethod
    def of(cls, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> "Samples":
        """Take the first and last query and key, and as many as `MOST_POSITIONS` allows."""
        most = max(4, MOST_POSITIONS // (batch * heads))
        # A short side leaves the other one more positions.
        num_q = min(seqlen_q, max(math.isqrt(most), most // seqlen_k))
        queries, keys = (
            torch.linspace(0, length - 1, number, dtype=torch.float64).round().long()
            for length, number in ((seqlen_q, num_q), (seqlen_k, min(seqlen_k, most // num_q)))
        )
        axes = torch.arange(batch), torch.arange(heads), queries, keys
        places = torch.cartesian_prod(*(axis.int() for axis in axes)).T.contiguous()
        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(places.shape[1], generator=generator)
        return cls((batch, heads, seqlen_q, seqlen_k), queries, keys, places, logits)

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every sequence with every head, in the order of the places."""
        batch, heads, _, _ = self.sizes
        return product(range(batch), range(heads))

    def at(self, number: int) -> str:
        """Return a position in words."""
        batch, head, query, key = self.places[:, number].tolist()
        _, _, seqlen_q, seqlen_k = self.sizes
        return f"batch {batch}, head {head}, query {query} of {seqlen_q}, key {key} of {seqlen_k}"


@dataclass(frozen=True)
class Sampled:
    """A host function that calls the user's method at every position."""

    spec: AttentionSpec  # has the user's score or else the user's mask, and no other
    operands: tuple = field(compare=False, repr=False)  # the arguments, with tensors of the host

    entry_name = "sampled"
    is_storable = False

    def arguments(self) -> list:
        return list(self.operands)

    @cute.jit
    def __call__(
        self,
        tensors: tuple | None,
        places: cute.Tensor,
        seqlen_q: Int32,
        seqlen_k: Int32,
        logits: cute.Tensor,
        results: cute.Tensor,
    ):
        """Write new logits, or 1 where a mask lets a key through and else 0, to `results`."""
        scores, mask, _ = bind(self.spec, tensors)
        for i in cutlass.range(cute.size(results)):
            batch, head, query, key = (places[j, i] for j in range(4))
            at = Position(batch, head, query, key, seqlen_q, seqlen_k)
            if cutlass.const_expr(len(scores) > 0):
                results[i] = Float32(scores[0].score(logits[i], at))
            else:
                results[i] = Float32(1.0) if Boolean(mask.function.visible(at)) else Float32(0.0)


def check(
    function: Score | Mask,
    *,
    head_dim: int,
    batch: int = 1,
    heads: int = 1,
    seqlen_q: int = 256,
    seqlen_k: int | None = None,
) -> str:
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
        what was compared, in a line; a method that runs on GPUs only is not.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, a method does not compile or raises something,
            the two versions differ, or a range is wrong; the message says where.
        NotImplementedError: the class does not define `reference`.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    batch, heads, seqlen_q, seqlen_k = (integer(name, size, 1) for name, size in sizes.items())
    if not isinstance(function, Score | Mask):
        raise TypeError(f"function must be a fa3.Score or a fa3.Mask, got {shown(function)}")
    on_host = [cast(torch.Tensor, tensor).cpu() for _, tensor in tensors_of(function)]
    function = cast(Score | Mask, Template.of(function).bind(iter(on_host)))
    score = function if isinstance(function, Score) else None
    mask = function if isinstance(function, Mask) else None
    q, k = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads, head_dim)
    problem = Problem.of(q, k, k, score=score, mask=mask)
    load_kernel(plan_forward(problem, H200).kernel())
    # The reference goes first: an index that it refuses would be read out of bounds.
    samples = Samples.of(batch, heads, seqlen_q, seqlen_k)
    expected = by_reference(function, samples)
    name = f"{type(function).__name__}.{'visible' if score is None else 'score'}"
    result = by_method(problem.spec, on_host, samples)
    if result is not None:
        compare_versions(name, result, expected, samples)
    if mask is not None:
        check_ranges(problem.spec, on_host, expected, samples)
    compared, total = len(expected), math.prod(samples.sizes)
    agrees = f"agrees with reference at all {total:,} positions"
    if compared < total:
        agrees = (
            f"agrees with reference at {compared:,} of {total:,} positions: in every sequence and "
            f"head, at {len(samples.queries):,} queries and {len(samples.keys):,} keys"
        )
    if result is None:
        agrees = "was not compared with reference: it has instructions of GPUs only"
    return f"{name} compiles for {ARCH} at head_dim {head_dim} and {agrees}"


def by_reference(function: Score | Mask, samples: Samples) -> torch.Tensor:
    """Return `reference` at the samples: new logits, or 1 where a mask lets a key through."""
    shape = len(samples.queries), len(samples.keys)
    logits = samples.logits.view(-1, *shape)
    parts = []
    for (batch, head), block in zip(samples.pairs, logits, strict=True):
        at = Position(batch, head, samples.queries[:, None], samples.keys, *samples.sizes[2:])
        if isinstance(function, Score):
            parts.append(changed(function, block, at).flatten())
        else:
            parts.append(lets_through(function, at, shape).flatten())
    return torch.cat(parts).float()


def by_method(spec: AttentionSpec, tensors: list, samples: Samples) -> torch.Tensor | None:
    """Return the method at the samples, as `by_reference`; None if it runs on GPUs only.
    Raises ValueError if it does not end, or reads where there is no memory."""
    result = torch.frombuffer(mmap.mmap(-1, 4 * samples.logits.numel()), dtype=torch.float32)
    places, logits, shared = map(from_dlpack, (samples.places, samples.logits, result))
    arguments = tuple(map(from_dlpack, tensors)) or None, places, *samples.sizes[2:]
    sampled = Sampled(spec, (*arguments, logits, shared))
    with tempfile.TemporaryFile() as log:
        status = exit_status(sampled, log.fileno())
        log.seek(0)
        reason = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    if status == -signal.SIGSEGV:
        raise ValueError("the method reads outside of its tensors where reference does not")
    if status not in (0, -signal.SIGABRT):
        raise RuntimeError(f"the method does not run on the host (status {status}): {reason}")
    return None if status else result


def exit_status(sampled: Sampled, log: int) -> int | None:
    """Run in a process of its own that logs errors; a signal is a negative status."""
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
    compiled(sampled, f"--gpu-arch {ARCH}")(*sampled.operands)


def compare_versions(
    name: str, result: torch.Tensor, expected: torch.Tensor, samples: Samples
) -> None:
    """Raise ValueError where the two versions of a method differ."""
    differs = ~result.isclose(expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if not differs.any():
        return
    kind, method = name.split(".")
    first = int(differs.nonzero()[0])
    one, other = float(result[first]), float(expected[first])
    values = f"{method} says {bool(one)}, reference {bool(other)}"
    if method == "score":
        logit = float(samples.logits[first])
        values = f"of the logit {logit:.6g} score gives {one:.6g}, reference {other:.6g}"
    raise ValueError(
        f"{name} and {kind}.reference differ at {int(differs.sum()):,} of {len(result):,} "
        f"positions, first at {samples.at(first)}: {values}"
    )


def check_ranges(spec: AttentionSpec, tensors: list, seen: torch.Tensor, samples: Samples) -> None:
    """Raise ValueError if a mask's ranges miss a key that `reference` sees, or have another."""
    _, mask, _ = bind(spec, map(HostTensor, tensors))
    function, keys = mask.function, samples.keys
    blocks = seen.bool().view(-1, len(samples.queries), len(keys)).split(ROWS_OF_TILE, dim=1)
    for queries, block in zip(samples.queries.split(ROWS_OF_TILE), blocks, strict=True):
        for pair, tile in zip(samples.pairs, block, strict=True):
            rows = Rows(*pair, int(queries[0]), int(queries[-1]), *samples.sizes[2:])
            with errors_of("mask", function, "key_range or open_range"):
                begin, end = map(as_integer, function.key_range(rows))
                first, last = map(as_integer, function.open_range(rows))
            outside = tile.any(dim=0) & ((keys < begin) | (keys >= end))
            hidden = ~tile.all(dim=0) & (keys >= first) & (keys < last)
            for wrong, what in (
                (outside, f"key_range gives ({begin}, {end}), but a query sees"),
                (hidden, f"open_range gives ({first}, {last}), but a query does not see"),
            ):
                if wrong.any():
                    key = int(keys[wrong][0])
                    raise ValueError(f"{type(function).__name__}.{what} key {key} for {rows}")
