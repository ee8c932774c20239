"""`check`: whether a user's score or mask compiles and agrees with `reference`.

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
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32
from cutlass.cute.runtime import from_dlpack

from fa3.calls.options import integer, shown
from fa3.kernels.kernel_base import KernelBase
from fa3.planning.costs import H200
from fa3.planning.planner import plan_forward
from fa3.primitives.fragments import Position
from fa3.problem import AttentionSpec, Problem
from fa3.reference.walker import HostTensor, apply_mask, apply_score, naming_argument
from fa3.running.compiler import ARCH, compiled, load_kernel
from fa3.scores.diagnostics import check_class
from fa3.scores.masks import Mask, Rows, as_integer
from fa3.scores.scores import Score, bind
from fa3.scores.templates import Template, tensors_of

MOST_POSITIONS = 1 << 22  # of a call; they take about two seconds

ROWS_OF_TILE = 8  # queries whose ranges a mask is asked for together

TOLERANCE = 1e-3
"""How far a score's logit may be from the reference's, relative to 1 or the logit's magnitude."""

PATIENCE = 60  # seconds that the method may take on the host


@dataclass(frozen=True)
class OnHost(KernelBase):
    """A host function that calls the user's method at every position."""

    spec: AttentionSpec  # has the user's score or else the user's mask, and no other
    operands: tuple = field(compare=False, repr=False)  # the arguments, with tensors of the host

    entry_name = "on_host"

    @property
    def is_storable(self) -> bool:
        return False

    def arguments(self) -> list:
        return list(self.operands)

    @cute.jit
    def __call__(
        self,
        tensors: tuple | None,
        heads: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        logits: cute.Tensor,
        results: cute.Tensor,
    ):
        """Write new logits, or 1 and 0 of a mask, to `results`."""
        scores, mask, _ = bind(self.spec, tensors)
        for i in cutlass.range(cute.size(results)):
            query, row = i // seqlen_k % seqlen_q, i // seqlen_k // seqlen_q
            at = Position(row // heads, row % heads, query, i % seqlen_k, seqlen_q, seqlen_k)
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
    """Compile a score or a mask of your own; compare both versions.

    `score` or `visible` runs on the host at all positions of a call, and must give what `reference`
    gives. The ranges of a mask must be true there too. Tensors on a GPU are copied to the CPU; no
    GPU is needed.

    Args:
        function: an object of a frozen dataclass derived from `fa3.Score` or `fa3.Mask`.
        head_dim: columns of q, k and v.
        batch, heads, seqlen_q, seqlen_k: sizes of a call that the object's tensors fit, with at
            most 4,194,304 positions; seqlen_k is seqlen_q if not given.

    Returns:
        what was compared, in a line; a method that runs on GPUs only is not.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, a method does not compile or raises something,
            the two versions differ, or a range is wrong; the message says where.
        NotImplementedError: the class does not define `reference`.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    named = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    *sizes, head_dim = (integer(*one, 1) for one in (*named.items(), ("head_dim", head_dim)))
    if math.prod(sizes) > MOST_POSITIONS:
        raise ValueError(
            f"{', '.join(named)} must have a product of at most {MOST_POSITIONS}, got {sizes}"
        )
    if not isinstance(function, Score | Mask):
        raise TypeError(f"function must be a fa3.Score or a fa3.Mask, got {shown(function)}")
    base, method = (Score, "score") if isinstance(function, Score) else (Mask, "visible")
    check_class(cast(type, type(function)), base, method)
    on_host = [cast(torch.Tensor, tensor).cpu() for _, tensor in tensors_of(function)]
    function = cast(Score | Mask, Template.of(function).bind(iter(on_host)))
    score = function if isinstance(function, Score) else None
    mask = function if isinstance(function, Mask) else None
    q, k = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads, head_dim)
    problem = Problem.of(q, k, k, score=score, mask=mask)
    load_kernel(plan_forward(problem, H200).kernel())
    name = f"{type(function).__name__}.{method}"
    with torch.device("cpu"):  # whatever the default device is
        logits = 4 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))
        # The reference goes first: an index that it refuses would be read out of bounds.
        expected = by_reference(function, logits)
        result = by_method(problem.spec, on_host, logits)
        if result is not None:
            compare_versions(name, result, expected, logits)
        if mask is not None:
            check_ranges(problem.spec, on_host, expected.bool())
    agrees = f"agrees with reference at all {expected.numel():,} positions"
    if result is None:
        agrees = "was not compared with reference: it has instructions of GPUs only"
    return f"{name} compiles for {ARCH} at head_dim {head_dim} and {agrees}"


def by_reference(function: Score | Mask, logits: torch.Tensor) -> torch.Tensor:
    """Return `reference` at all positions: new logits, or 1 and 0."""
    batch, heads, seqlen_q, seqlen_k = logits.shape
    query, key = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    results = torch.empty_like(logits)
    for pair in product(range(batch), range(heads)):
        at = Position(*pair, query, key, seqlen_q, seqlen_k)
        if isinstance(function, Score):
            results[pair] = apply_score(function, logits[pair], at)
        else:
            results[pair] = apply_mask(function, at, (seqlen_q, seqlen_k))
    return results


def by_method(spec: AttentionSpec, tensors: list, logits: torch.Tensor) -> torch.Tensor | None:
    """Return the method at all positions; None if only GPUs run it.
    Raises ValueError if it does not end, or reads where there is no memory."""
    result = torch.frombuffer(mmap.mmap(-1, 4 * logits.numel()), dtype=torch.float32)
    operands = tuple(map(from_dlpack, tensors)) or None, *logits.shape[1:]
    function = OnHost(spec, (*operands, *map(from_dlpack, (logits.flatten(), result))))
    with tempfile.TemporaryFile() as log:
        status = exit_status(function, log.fileno())
        log.seek(0)
        reason = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    if status == -signal.SIGSEGV:
        raise ValueError("the method reads outside of its tensors where reference does not")
    if status not in (0, -signal.SIGABRT):
        raise RuntimeError(f"the method does not run on the host (status {status}): {reason}")
    return None if status else result.view(logits.shape)


def exit_status(function: OnHost, log: int) -> int | None:
    """Run in a process that logs errors; signals are negative."""
    process = multiprocessing.get_context("fork").Process(target=run_logged, args=(function, log))
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


def run_logged(function: OnHost, log: int) -> None:
    """Compile for the host and run, with errors in the log."""
    faulthandler.disable()
    os.dup2(log, 2)
    sys.stderr = os.fdopen(2, "w")
    compiled(function, f"--gpu-arch {ARCH}")(*function.operands)


def compare_versions(
    name: str, result: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor
) -> None:
    """Raise ValueError where the two versions of a method differ."""
    differs = ~result.isclose(expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if not differs.any():
        return
    kind, method = name.split(".")
    batch, head, query, key = first = tuple(differs.nonzero()[0].tolist())
    logit, one, other = (float(x[first]) for x in (logits, result, expected))
    values = f"{method} says {bool(one)}, reference {bool(other)}"
    if method == "score":
        values = f"of the logit {logit:.6g} score gives {one:.6g}, reference {other:.6g}"
    raise ValueError(
        f"{name} and {kind}.reference differ at {int(differs.sum()):,} of {result.numel():,} "
        f"positions, first at batch {batch}, head {head}, query {query} of {logits.shape[2]}, "
        f"key {key} of {logits.shape[3]}: {values}"
    )


def check_ranges(spec: AttentionSpec, tensors: list, seen: torch.Tensor) -> None:
    """Raise ValueError if a mask's ranges disagree with `reference`."""
    _, mask, _ = bind(spec, map(HostTensor, tensors))
    function, (batch, heads, seqlen_q, seqlen_k) = mask.function, seen.shape
    keys, first_rows = torch.arange(seqlen_k), range(0, seqlen_q, ROWS_OF_TILE)
    for entry, head, row in product(range(batch), range(heads), first_rows):
        tile = seen[entry, head, row : row + ROWS_OF_TILE]
        rows = Rows(entry, head, row, row + len(tile) - 1, seqlen_q, seqlen_k)
        with naming_argument("mask", function, "key_range or open_range"):
            begin, end = map(as_integer, function.key_range(rows))
            first, last = map(as_integer, function.open_range(rows))
        outside = tile.any(dim=0) & ((keys < begin) | (keys >= end))
        hidden = ~tile.all(dim=0) & (keys >= first) & (keys < last)
        for wrong, what in (
            (outside, f"key_range gives ({begin}, {end}), but a query sees"),
            (hidden, f"open_range gives ({first}, {last}), but a query does not see"),
        ):
            if wrong.any():
                key = int(wrong.nonzero()[0])
                raise ValueError(f"{type(function).__name__}.{what} key {key} for {rows}")
