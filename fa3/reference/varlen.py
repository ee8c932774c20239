"""Packed sequences on the CPU: each one runs through the plan that it would get as a batch of one.

Their keys may be in a cache. On a GPU all of them run in one launch, by another plan
(`fa3.planning.routes`), and short ones may share tiles (`fa3.schedules.joined`).
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from fa3.planning.planner import plan_forward
from fa3.planning.routes import PackedSizes, Signature
from fa3.problem import Problem
from fa3.reference.dropout import Dropout
from fa3.reference.forward import steps
from fa3.reference.walker import SequenceRows, Walker
from fa3.schedules.sequences import capacity_of


class PackedLengths(NamedTuple):
    """Which rows belong to which sequence."""

    # cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end. Without
    # cu_seqlens_k, sequences have their keys in a cache.
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    # seqused_q, seqused_k: (batch,) int32, rows of each sequence that count; all if None.
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens_q.shape[0] - 1

    def sequences(self) -> list[SequenceRows]:
        """Where the rows of each sequence are that count. The tensors are on the CPU."""
        used_q, used_k = (None if x is None else x.tolist() for x in self[2:])
        queries = used_rows(self.cu_seqlens_q.tolist(), used_q)
        if self.cu_seqlens_k is None:
            caches = enumerate(zip(queries, map(range, used_k or ()), strict=True))
            return [SequenceRows(i, *rows, entry_k=i) for i, rows in caches]
        keys = used_rows(self.cu_seqlens_k.tolist(), used_k)
        return list(map(SequenceRows, itertools.count(), queries, keys))


class RaggedOperands(NamedTuple):
    """The tensors of one call, on one device and already validated."""

    q: torch.Tensor  # (total_q, heads_q, head_dim), bfloat16 or float16
    # (total_k, heads_kv, head_dim), dtype of q; or a cache (batch, tokens, ...), which may have
    # pages.
    k: torch.Tensor
    v: torch.Tensor  # like k with head_dim_v
    out: torch.Tensor  # (total_q, heads_q, head_dim_v), receives the output
    lse: torch.Tensor | None  # (heads_q, total_q) float32, receives the log-sum-exp, or None
    # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: of `PackedLengths`.
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
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
    """Return the rows of each sequence that count, from cumulated lengths; all if None."""
    rows = list(itertools.starmap(range, itertools.pairwise(ends)))
    if used is None:
        return rows
    return [one[: max(0, count)] for one, count in zip(rows, used, strict=True)]


def execute_varlen(
    signature: Signature,
    operands: RaggedOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    dropout: Dropout | None = None,
    short_queries: int = 0,
    page_table: torch.Tensor | None = None,
    descales: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are.

    Args:
        signature: of the call.
        operands: without cu_seqlens_k, k and v are a cache.
        softmax_scale, tensors, dropout, page_table, descales: see `fa3.reference.walker.Walker`.
        short_queries: sequences with so many queries or fewer are left out.
    """
    spec, window = signature.spec, signature.window
    walk = Walker(spec, window, operands[:5], softmax_scale, tensors, dropout, page_table, descales)
    walk.rounded_to = walk.q.dtype  # not fp16, as in the decode kernel on an FP8 cache
    if operands.seqused_k is not None and operands.cu_seqlens_k is None:
        # The host may not have checked them.
        pages = 1 if page_table is None else page_table.shape[1]
        operands = operands._replace(
            cu_seqlens_q=operands.cu_seqlens_q.clamp(0, len(operands.q)),
            seqused_k=operands.seqused_k.clamp(0, capacity_of(operands.k.shape[1], pages)),
        )
    sequences = operands.lengths.sequences()
    if operands.cu_seqlens_k is None:
        # Pages before the window may hold anything.
        firsts = (spec.mask.key_range(0, one.sequence(window))[0] for one in sequences)
        sequences = [
            one._replace(first_key=first) for one, first in zip(sequences, firsts, strict=True)
        ]
    long = (one for one in sequences if len(one.q) > short_queries)
    attend_alone(walk, long)


def attend_alone(walk: Walker, sequences: Iterable[SequenceRows]) -> None:
    """Attend inside of sequences with queries, each in tiles of its own."""
    heads_q, heads_kv = walk.q.shape[2], walk.k.shape[2]
    for one in sequences:
        sizes = 1, len(one.q), len(one.k), heads_kv, heads_q // heads_kv
        problem = Problem(walk.spec, *sizes, walk.window)
        walk.run(steps(plan_forward(problem), walk.tensors, [one]))
