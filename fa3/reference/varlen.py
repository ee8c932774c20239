"""Packed sequences on the CPU: each one runs through the plan that it would get as a batch of one.

So do their gradients. On a GPU all of them run in one launch, by another plan
(`fa3.planning.ragged`). Short ones may share tiles instead (`fa3.reference.joined`).
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from fa3.planning.joined import PackedSizes
from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.reference.backward import ALL_WANTED, BackwardOperands, Gradients, Wanted, execute_backward
from fa3.reference.dropout import Dropout
from fa3.reference.forward import execute
from fa3.schedules.ragged import NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.scores import bind


class PackedLengths(NamedTuple):
    """Which rows belong to which sequence.

    Fields:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end.
        seqused_q, seqused_k: (batch,) int32, rows of each sequence that count; all if None.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The rows of each sequence that count, in q and in k. They are on the CPU."""
        of_q, of_k = (
            used_rows(ends.tolist(), None if used is None else used.tolist())
            for ends, used in zip(self[:2], self[2:], strict=True)
        )
        for queries, keys in zip(of_q, of_k, strict=True):
            yield slice(queries.start, queries.stop), slice(keys.start, keys.stop)


class RaggedOperands(NamedTuple):
    """The tensors of one call, on one device and already validated.

    Fields:
        q: (total_q, heads_q, head_dim), bfloat16 or float16.
        k: (total_k, heads_kv, head_dim), dtype of q.
        v: (total_k, heads_kv, head_dim_v), dtype of q.
        out: (total_q, heads_q, head_dim_v), receives the output.
        lse: (heads_q, total_q) float32, receives the log-sum-exp, or None.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: of `PackedLengths`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def lengths(self) -> PackedLengths:
        return PackedLengths(*self[5:])

    def sizes(self, max_seqlen_q: int, max_seqlen_k: int) -> PackedSizes:
        """What the host knows of the lengths."""
        (total_q, heads, _), total_k = self.q.shape, self.k.shape[0]
        batch = self.cu_seqlens_q.shape[0] - 1
        longest = min(max_seqlen_q, total_q), min(max_seqlen_k, total_k)
        return PackedSizes(batch, heads, total_q, total_k, *longest)


def used_rows(ends: list[int], used: list[int] | None) -> list[range]:
    """The rows of each sequence that count.

    Args:
        ends: cumulated lengths, from 0 on.
        used: how many rows of each sequence count; None for all.
    """
    rows = list(itertools.starmap(range, itertools.pairwise(ends)))
    if used is None:
        return rows
    return [of_one[: max(0, count)] for of_one, count in zip(rows, used, strict=True)]


def execute_varlen(
    spec: AttentionSpec,
    window: Window,
    operands: RaggedOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    dropout: Dropout | None = None,
    short_queries: int = 0,
    table: np.ndarray | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are.

    Args:
        window: keys that a query sees before and after its own position.
        softmax_scale: factor of Q K^T before the softmax; positive.
        tensors: of the spec's scores, mask and sinks.
        dropout: where the spec has it; counts inside of each sequence.
        short_queries: sequences with so many queries or fewer are left out.
        table: what `fa3.planning.host_table` made; says where sequences are, and their order.
    """
    _, _, _, out, lse = operands[:5]
    sequences = enumerate(operands.lengths.slices()) if table is None else slices_of_table(table)
    for batch, (of_q, of_k) in sequences:
        if of_q.stop - of_q.start <= short_queries:
            continue
        result, of_rows = attend_alone(
            spec, window, operands, of_q, of_k, softmax_scale, tensors, batch, dropout
        )
        out[of_q] = result
        if lse is not None:
            lse[:, of_q] = of_rows


def slices_of_table(table: np.ndarray) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """The sequences that have tiles in a table, and their rows in q and in k."""
    records = table[TABLE_HEADER:].reshape(-1, RECORD)[: table[NUM_RECORDS]]
    for words in records.tolist():
        record = TileRecord(*words[: len(TileRecord._fields)])
        if record.m_block == 0:
            of_q, of_k = (
                slice(begin, begin + length)
                for begin, length in (
                    (record.begin_q, record.seqlen_q), (record.begin_k, record.seqlen_k),
                )
            )  # fmt: skip
            yield record.batch, (of_q, of_k)


def attend_alone(
    spec: AttentionSpec,
    window: Window,
    operands: RaggedOperands,
    of_q: slice,
    of_k: slice,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None,
    batch: int,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend inside of sequence `batch`, whose rows these are; there is a query.

    Returns:
        out (queries, heads_q, head_dim_v) and the log-sum-exp (heads_q, queries).
    """
    q, k, v = operands[:3]
    problem = problem_of_rows(spec, window, q[of_q], k[of_k])
    if problem.seqlen_k:
        of_sequence = q[None, of_q], k[None, of_k], v[None, of_k]
        plan = plan_forward(problem)
        out, lse = execute(plan, *of_sequence, softmax_scale, tensors, batch, dropout)
        return out[0], lse[0]
    _, _, sinks = bind(spec, tensors)
    of_heads = q.new_full(q.shape[1:2], -torch.inf, dtype=torch.float32)
    of_heads = of_heads if sinks is None else sinks.float()
    out = q.new_zeros(problem.seqlen_q, problem.num_heads_q, spec.head_dim_v)
    return out, of_heads[:, None].expand(-1, problem.seqlen_q)


def execute_varlen_backward(
    spec: AttentionSpec,
    window: Window,
    operands: BackwardOperands,
    lengths: PackedLengths,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    wanted: Wanted = ALL_WANTED,
    dropout: Dropout | None = None,
) -> Gradients:
    """Compute the gradients of what `execute_varlen` did; they are 0 in all other rows.

    Args:
        operands: q, k, v, out and lse as `execute_varlen` took and gave them; d_out and d_lse like
            out and lse.
        wanted: of the sinks nothing is computed if there are none.
        dropout: as `execute_varlen` took it.
    """
    q, k, v, out, lse, d_out, d_lse = operands
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) if is_wanted else None
        for x, is_wanted in zip((q, k, v), wanted, strict=False)
    )
    d_sinks = None
    if tensors is not None and spec.sinks:
        # Added up over the sequences before it is rounded.
        tensors = *tensors[:-1], tensors[-1].float()
        d_sinks = torch.zeros_like(tensors[-1]) if wanted.sinks else None
    for batch, (of_q, of_k) in enumerate(lengths.slices()):
        of_sequence = BackwardOperands(
            q[None, of_q], k[None, of_k], v[None, of_k], out[None, of_q], lse[None, :, of_q],
            d_out[None, of_q], d_lse[None, :, of_q],
        )  # fmt: skip
        problem = problem_of_rows(spec, window, q[of_q], k[of_k])
        found = execute_backward(
            problem, of_sequence, softmax_scale, tensors, wanted, batch, dropout
        )
        for target, rows, part in zip((dq, dk, dv), (of_q, of_k, of_k), found, strict=False):
            if target is not None:
                target[rows] = part[0]
        if d_sinks is not None:
            d_sinks += found.sinks
    return Gradients(dq, dk, dv, d_sinks)


def problem_of_rows(
    spec: AttentionSpec, window: Window, q: torch.Tensor, k: torch.Tensor
) -> Problem:
    """The problem that the rows of one sequence pose."""
    (seqlen_q, heads_q, _), (seqlen_k, heads_kv, _) = q.shape, k.shape
    return Problem(spec, 1, seqlen_q, seqlen_k, heads_kv, heads_q // max(1, heads_kv), window)
