"""Packed sequences on the CPU: each one runs through the plan that it would get as a batch of one.

Their keys may be in a cache. On a GPU all of them run in one launch, by another plan
(`fa3.planning.routes`). Short ones may share tiles (`fa3.schedules.joined`): same tables, same
halves of tiles and key blocks as on a GPU. Every row of a half is multiplied with all keys that the
half sees, so what is not finite in a value reaches rows of other sequences here too. As there,
these rows are computed again, sequence by sequence.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from fa3.planning.planner import plan_forward
from fa3.planning.routes import PackedSizes, Signature
from fa3.primitives.wgmma import ROWS
from fa3.problem import Problem
from fa3.reference.dropout import Dropout
from fa3.reference.forward import steps
from fa3.reference.walker import CPU, SequenceRows, Step, Walker
from fa3.schedules.joined import HALVES, MultiSequenceRecord, MultiSequenceTile, keys_seen
from fa3.schedules.segment import Segment, Tile
from fa3.schedules.sequences import capacity_of
from fa3.scores.intervals import NO_SEQUENCE, RowRecord


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


def execute_joined(
    signature: Signature,
    operands: RaggedOperands,
    # softmax_scale, tensors: as `fa3.reference.walker.Walker` takes them.
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are."""
    q, k, v, out, lse = operands[:5]
    spec, window = signature.spec, signature.window
    rows = records_of_rows(signature, operands.lengths, len(q))
    is_used = torch.tensor([row.is_used for row in rows[: len(q)]], device=CPU)
    results = torch.empty(out.shape, device=CPU), torch.empty(out.shape[1::-1], device=CPU)
    walk = Walker(spec, window, (q, k, v, *results), softmax_scale, tensors)
    walk.run(steps_of_shared_tiles(signature, walk, rows))
    is_marked = is_used[:, None] & ~results[0].isfinite().all(dim=2)
    again = torch.empty_like(out), torch.empty_like(results[1])
    walk = Walker(spec, window, (q, k, v, *again), softmax_scale, tensors)
    sequences = operands.lengths.sequences()
    failed = (x for x in sequences if is_marked[x.q.start : x.q.stop].any())
    attend_alone(walk, failed)
    out[is_used] = torch.where(is_marked[..., None], again[0], results[0].to(out.dtype))[is_used]
    if lse is not None:
        lse[:, is_used] = torch.where(is_marked.T, again[1], results[1])[:, is_used]


def steps_of_shared_tiles(
    signature: Signature, walk: Walker, rows: list[RowRecord]
) -> Iterator[Step]:
    """Yield the work on every half of a tile, for each head, from the records of rows."""
    (_, total_q, heads, _), total_k = walk.q.shape, walk.k.shape[1]
    tile_m, tile_n = signature.shared_config.tile_m, signature.shared_config.tile_n
    for begin in range(0, total_q, ROWS):
        m_block = begin // tile_m
        tile = MultiSequenceTile(total_q, record_of_tile(tile_m, m_block, rows, total_q, total_k))
        end = min(begin + ROWS, total_q)
        begin_k = tile.record.begin_k
        first_key, end_key, *_ = (torch.tensor(rows[begin:end], device=CPU) - begin_k).unbind(1)
        blocks = signature.shared_spec.mask.key_blocks(begin, ROWS, tile_n, tile)
        keys = range(begin_k, begin_k + tile.seqlen_k)
        place = SequenceRows(tile.record.batch, range(total_q), keys)
        for head in range(heads):
            segment = Segment(Tile(begin // ROWS, head, tile.record.batch))
            yield Step(
                segment, place, range(begin, end), head, blocks, tile_n, seen=(first_key, end_key)
            )


def records_of_rows(signature: Signature, lengths: PackedLengths, total_q: int) -> list[RowRecord]:
    """The records of all rows of q, and of rows past the last one up to the end of its tile."""
    unused = RowRecord(0, 0, NO_SEQUENCE, 0)
    window, tile_m = signature.window, signature.shared_config.tile_m
    rows = [unused] * (-(-total_q // tile_m) * tile_m)
    for one in lengths.sequences():
        for query, row in enumerate(one.q):
            first, end = keys_seen(query, one.sequence(window), one.k.start, signature.spec.mask)
            rows[row] = RowRecord(first, end, one.batch, query)
    return rows


def record_of_tile(
    tile_m: int, m_block: int, rows: list[RowRecord], total_q: int, total_k: int
) -> MultiSequenceRecord:
    """The record of a tile from the records of all rows."""
    firsts, ends, whole = [], [], 0
    for half in range(HALVES):
        begin = m_block * tile_m + half * ROWS
        seeing = [row for row in rows[begin : begin + ROWS] if row.first_key < row.end_key]
        firsts.append(min((row.first_key for row in seeing), default=total_k))
        ends.append(max((row.end_key for row in seeing), default=0))
        whole |= all(row.is_used for row in rows[begin : min(begin + ROWS, total_q)]) << half
    return MultiSequenceRecord.of(m_block, tuple(firsts), tuple(ends), whole)
