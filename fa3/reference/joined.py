"""Packed sequences that share tiles, on the CPU: the walk of `fa3.planning.joined` in torch.

Same tables, same tiles and halves of tiles, same key blocks as on a GPU. Every row of a half is
multiplied with all keys that the half sees, so what is not finite in a value reaches rows of other
sequences here too. As there, these rows are computed again, sequence by sequence.
"""

import torch

from fa3.planning.joined import JoinedPlan
from fa3.primitives.coords import Position
from fa3.primitives.wgmma import ROWS
from fa3.problem import Window
from fa3.reference.block_loop import CPU, RunningSoftmax, attend
from fa3.reference.forward import key_block
from fa3.reference.varlen import PackedLengths, RaggedOperands, attend_alone
from fa3.schedules.joined import HALVES, JoinedRecord, JoinedTile, keys_seen
from fa3.scores.intervals import NOBODY, RowRecord
from fa3.scores.masks import Sequence
from fa3.scores.scores import bind


@torch.autocast("cpu", enabled=False)
def execute_joined(
    plan: JoinedPlan,
    window: Window,
    operands: RaggedOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are.

    Args:
        plan: of the call's spec.
        window: keys that a query sees before and after its own position.
        softmax_scale: factor of Q K^T before the softmax; positive.
        tensors: of the spec's scores and sinks.
    """
    q, k, _, out, lse = operands[:5]
    _, _, sinks = bind(plan.spec, tensors)
    rows = records_of_rows(plan, operands.lengths, window, len(q))
    batches = torch.tensor([row.batch for row in rows[: len(q)]], device=CPU)
    is_marked = torch.zeros(out.shape[:2], dtype=torch.bool, device=CPU)
    for m_block in range(plan.num_tiles(len(q))):
        tile = JoinedTile(len(q), record_of_tile(plan, m_block, rows, len(q), len(k)))
        for begin in range(m_block * plan.config.tile_m, len(q), ROWS)[:HALVES]:
            half = slice(begin, min(begin + ROWS, len(q)))
            is_used = batches[half] != NOBODY
            used = is_used.nonzero().flatten() + begin
            for head in range(q.shape[1]):
                softmax = attend_half(
                    plan, tile, half, rows[half], operands, head, softmax_scale, tensors
                )
                sink = None if sinks is None else sinks[head].float()
                found, of_rows = softmax.finish(sink)
                out[used, head] = found[is_used].to(out.dtype)
                is_marked[used, head] = ~found[is_used].isfinite().all(dim=1)
                if lse is not None:
                    lse[head, used] = of_rows[is_used]
    sequences = list(operands.lengths.slices())
    for batch in batches[is_marked.any(dim=1)].unique().tolist():
        of_q, of_k = sequences[batch]
        again, of_rows = attend_alone(
            plan.spec, window, operands, of_q, of_k, softmax_scale, tensors, batch
        )
        marked = is_marked[of_q]
        out[of_q] = torch.where(marked[..., None], again, out[of_q])
        if lse is not None:
            lse[:, of_q] = torch.where(marked.T, of_rows, lse[:, of_q])


def attend_half(
    plan: JoinedPlan,
    tile: JoinedTile,
    half: slice,
    rows: list[RowRecord],
    operands: RaggedOperands,
    head: int,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None,
) -> RunningSoftmax:
    """Attend one half of a tile to the key blocks that any of its rows sees.

    Args:
        half: its rows of q, which have the records `rows`.
    """
    q, k, v = operands[:3]
    tile_n, begin = plan.config.tile_n, tile.record.begin_k
    scores, _, _ = bind(plan.spec, tensors)
    head_kv = head // (q.shape[1] // k.shape[1])
    keys, values = (x[begin : begin + tile.seqlen_k, head_kv] for x in (k, v))
    blocks = plan.line.mask.key_blocks(half.start, ROWS, tile_n, tile)
    first, end = (torch.tensor(rows, device=CPU)[:, :2, None] - begin).unbind(1)

    def load(n_block: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return key_block(keys, n_block, tile_n), key_block(values, n_block, tile_n)

    def seen(n_block: int, at: Position, key: torch.Tensor) -> torch.Tensor:
        return (key >= first) & (key < end)

    query = torch.arange(half.start, half.stop, device=CPU)[:, None]
    return attend(
        q[half, head], (tile.record.batch, head, query), tile, range(blocks.begin, blocks.end),
        tile_n, load, seen, scores, softmax_scale, v.shape[2],
    )  # fmt: skip


def records_of_rows(
    plan: JoinedPlan, lengths: PackedLengths, window: Window, total_q: int
) -> list[RowRecord]:
    """The records of all rows of q, and of rows past the last one up to the end of its tile."""
    rows, ends = [], lengths.cu_seqlens_q.tolist()
    for batch, (of_q, of_k) in enumerate(lengths.slices()):
        seqlen_q, seqlen_k = (part.stop - part.start for part in (of_q, of_k))
        sequence = Sequence(seqlen_q, seqlen_k, window)
        for query in range(ends[batch + 1] - of_q.start):
            first, end = keys_seen(query, sequence, of_k.start, plan.spec.mask)
            record = RowRecord(first, end, batch, query)
            rows.append(record if query < seqlen_q else nobody(record))
    behind = range(len(rows), plan.num_tiles(total_q) * plan.config.tile_m)
    return rows + [nobody(RowRecord(0, 0, NOBODY, 0)) for _ in behind]


def nobody(row: RowRecord) -> RowRecord:
    """The record of a row that is not used."""
    return row._replace(first_key=row.end_key, batch=NOBODY)


def record_of_tile(
    plan: JoinedPlan, m_block: int, rows: list[RowRecord], total_q: int, total_k: int
) -> JoinedRecord:
    """The record of a tile from the records of all rows."""
    firsts, ends, whole = [], [], 0
    for half in range(HALVES):
        begin = m_block * plan.config.tile_m + half * ROWS
        seeing = [row for row in rows[begin : begin + ROWS] if row.first_key < row.end_key]
        firsts.append(min((row.first_key for row in seeing), default=total_k))
        ends.append(max((row.end_key for row in seeing), default=0))
        whole |= all(row.is_used for row in rows[begin : min(begin + ROWS, total_q)]) << half
    return JoinedRecord.of(m_block, tuple(firsts), tuple(ends), whole)
