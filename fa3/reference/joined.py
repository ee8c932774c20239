"""Packed sequences that share tiles, on the CPU: the tiles of `fa3.schedules.joined` as steps.

Same tables, same tiles and halves of tiles, same key blocks as on a GPU. Every row of a half is
multiplied with all keys that the half sees, so what is not finite in a value reaches rows of other
sequences here too. As there, these rows are computed again, sequence by sequence.
"""

from collections.abc import Iterator

import torch

from fa3.planning.ragged import RaggedPlan
from fa3.primitives.wgmma import ROWS
from fa3.problem import Window
from fa3.reference.varlen import PackedLengths, RaggedOperands, attend_alone
from fa3.reference.walker import CPU, SequenceRows, Step, Walker
from fa3.schedules.joined import HALVES, MultiSequenceRecord, MultiSequenceTile, keys_seen
from fa3.schedules.segment import Segment, Tile
from fa3.scores.intervals import NO_SEQUENCE, RowRecord


def execute_joined(
    plan: RaggedPlan,  # of the call's spec
    window: Window,  # keys that a query sees before and after its own position
    operands: RaggedOperands,
    # softmax_scale, tensors: as `fa3.reference.walker.Walker` takes them.
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are."""
    q, k, v, out, lse = operands[:5]
    rows = records_of_rows(plan, operands.lengths, window, len(q))
    is_used = torch.tensor([row.is_used for row in rows[: len(q)]], device=CPU)
    results = torch.empty(out.shape, device=CPU), torch.empty(out.shape[1::-1], device=CPU)
    walk = Walker(plan.spec, window, (q, k, v, *results), softmax_scale, tensors)
    walk.run(steps_of_shared_tiles(plan, walk, rows))
    is_marked = is_used[:, None] & ~results[0].isfinite().all(dim=2)
    again = torch.empty_like(out), torch.empty_like(results[1])
    walk = Walker(plan.spec, window, (q, k, v, *again), softmax_scale, tensors)
    sequences = operands.lengths.sequences()
    failed = (x for x in sequences if is_marked[x.q.start : x.q.stop].any())
    attend_alone(walk, failed)
    out[is_used] = torch.where(is_marked[..., None], again[0], results[0].to(out.dtype))[is_used]
    if lse is not None:
        lse[:, is_used] = torch.where(is_marked.T, again[1], results[1])[:, is_used]


def steps_of_shared_tiles(plan: RaggedPlan, walk: Walker, rows: list[RowRecord]) -> Iterator[Step]:
    """Yield the work on every half of a tile, for each head, from the records of rows."""
    (_, total_q, heads, _), total_k = walk.q.shape, walk.k.shape[1]
    for begin in range(0, total_q, ROWS):
        m_block = begin // plan.shared_config.tile_m
        tile = MultiSequenceTile(total_q, record_of_tile(plan, m_block, rows, total_q, total_k))
        end = min(begin + ROWS, total_q)
        begin_k, tile_n = tile.record.begin_k, plan.shared_config.tile_n
        first_key, end_key, *_ = (torch.tensor(rows[begin:end], device=CPU) - begin_k).unbind(1)
        blocks = plan.shared_spec.mask.key_blocks(begin, ROWS, tile_n, tile)
        keys = range(begin_k, begin_k + tile.seqlen_k)
        place = SequenceRows(tile.record.batch, range(total_q), keys)
        for head in range(heads):
            segment = Segment(Tile(begin // ROWS, head, tile.record.batch))
            yield Step(
                segment, place, range(begin, end), head, blocks, tile_n, seen=(first_key, end_key)
            )


def records_of_rows(
    plan: RaggedPlan, lengths: PackedLengths, window: Window, total_q: int
) -> list[RowRecord]:
    """The records of all rows of q, and of rows past the last one up to the end of its tile."""
    unused = RowRecord(0, 0, NO_SEQUENCE, 0)
    rows = [unused] * (plan.num_shared_tiles(total_q) * plan.shared_config.tile_m)
    for one in lengths.sequences():
        for query, row in enumerate(one.q):
            first, end = keys_seen(query, one.sequence(window), one.k.start, plan.spec.mask)
            rows[row] = RowRecord(first, end, one.batch, query)
    return rows


def record_of_tile(
    plan: RaggedPlan, m_block: int, rows: list[RowRecord], total_q: int, total_k: int
) -> MultiSequenceRecord:
    """The record of a tile from the records of all rows."""
    firsts, ends, whole = [], [], 0
    for half in range(HALVES):
        begin = m_block * plan.shared_config.tile_m + half * ROWS
        seeing = [row for row in rows[begin : begin + ROWS] if row.first_key < row.end_key]
        firsts.append(min((row.first_key for row in seeing), default=total_k))
        ends.append(max((row.end_key for row in seeing), default=0))
        whole |= all(row.is_used for row in rows[begin : min(begin + ROWS, total_q)]) << half
    return MultiSequenceRecord.of(m_block, tuple(firsts), tuple(ends), whole)
