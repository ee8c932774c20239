"""The algorithm on the CPU: walks a plan tile by tile in torch, as the kernel does on the GPU.

Same plan, same tiles in the same order, same key blocks, same running softmax in base 2 with fp32
accumulators and P rounded to the input dtype. What differs from `fa3.kernels.forward` is what
happens at once: there, the CTAs of a GPU work side by side, a tile's rows are spread over
warpgroups that skip blocks which none of their rows sees, and P V of one block overlaps Q K^T of
the next; and here references follow, also where the kernel takes a fixed one or none, so that no
tile is computed a second time.

    for step in steps(plan):                             # watch the walk
        print(step)
    out, lse = execute(plan, q, k, v, softmax_scale)     # run it
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple, cast

import torch
from torch.nn.functional import pad

from fa3.planning.plan import Plan
from fa3.primitives.coords import Position
from fa3.reference.block_loop import CPU, HostTensor, RunningSoftmax, attend, merge, with_sink
from fa3.reference.dropout import Dropout
from fa3.reference.functions import errors_of, lets_through
from fa3.schedules import Segment, walk
from fa3.schedules.sequences import Dense
from fa3.scores.masks import Blocks, Intersection, Mask, Sequence
from fa3.scores.scores import Score, bind


class Step(NamedTuple):
    """One CTA's work on one tile.

    Fields:
        cluster: the cluster that works on the tile.
        rank: the CTA's rank in its cluster.
        segment: what the cluster works on.
        head: the CTA's query head.
        rows: the CTA's query rows; none when its part of the tile lies past the end.
        blocks: the key blocks it walks, for all rows of the cluster.
    """

    cluster: int
    rank: int
    segment: Segment
    head: int
    rows: range
    blocks: Blocks


def steps(plan: Plan, tensors: Iterable[torch.Tensor] = (), first_batch: int = 0) -> Iterator[Step]:
    """Yield a plan's work in rounds: the first tile of every cluster, then the second, and on.

    `tensors` belong to the scores, mask and sinks. Without them a mask of the user's cannot
    say which blocks it hides, and only the window limits the blocks. `first_batch` is as in
    `execute`.
    """
    mask = plan.problem.spec.mask
    if tensors or not plan.problem.spec.modifier_types:
        _, mask, _ = bind(plan.problem.spec, map(HostTensor, tensors))
    function = mask.function if isinstance(mask, Intersection) else mask
    schedule, config = plan.schedule, plan.config
    sequences = Dense.of(plan.problem)
    rows_of_cluster = config.cluster_m * config.tile_m
    walks = [walk(schedule, cluster) for cluster in range(schedule.num_clusters)]
    for segments in zip_longest(*walks):
        for cluster, segment in enumerate(segments):
            if segment is None:
                continue
            tile = segment.tile
            sequence = sequences.sequence(segment)
            begin = tile.m_block * rows_of_cluster
            head = tile.head * config.cluster_h
            with errors_of("mask", function, "key_range or open_range"):
                blocks = mask.at(first_batch + tile.batch, head).key_blocks(
                    begin, rows_of_cluster, config.tile_n, sequence
                )
            if schedule.splits:
                blocks = blocks.between(segment.begin, segment.end)
            for rank in range(config.cluster):
                of_head, of_rows = divmod(rank, config.cluster_m)
                first = of_rows * config.tile_m
                rows = range(begin, sequence.seqlen_q)[first : first + config.tile_m]
                yield Step(cluster, rank, segment, head + of_head, rows, blocks)


# Whoever computes in 16 bits around a call still gets sums in 32 from it, as from the kernels.
@torch.autocast("cpu", enabled=False)
def execute(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    first_batch: int = 0,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan on CPU tensors.

    Args:
        plan: the plan of the problem that the tensors pose.
        q: (batch, seqlen_q, num_heads_q, head_dim), bfloat16 or float16.
        k: (batch, seqlen_k, num_heads_kv, head_dim), dtype of q.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), dtype of q.
        softmax_scale: factor of Q K^T before the softmax; positive.
        tensors: of the spec's scores, mask and sinks.
        first_batch: what scores, mask and dropout take the first batch entry of q for.
        dropout: where the plan's spec has it.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v), dtype of q, contiguous; and the
        log-sum-exp (batch, num_heads_q, seqlen_q), float32, natural logarithm. A row that sees
        no key is 0 with log-sum-exp -inf, or with its sink.
    """
    problem, spec = plan.problem, plan.problem.spec
    out = q.new_empty(problem.batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim_v)
    lse = q.new_empty(problem.batch, problem.num_heads_q, problem.seqlen_q, dtype=torch.float32)
    scores, mask, sinks = bind(spec, tensors)
    parts: dict[tuple, dict[int, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
    for step in steps(plan, tensors or (), first_batch):
        rows = slice(step.rows.start, step.rows.stop)
        batch, head = step.segment.tile.batch, step.head
        of_head_kv = batch, slice(None), head // problem.qhead_per_kvhead
        softmax = attend_step(
            plan, step, q[batch, rows, head], k[of_head_kv], v[of_head_kv], softmax_scale,
            scores, mask, first_batch, dropout,
        )  # fmt: skip
        if not step.segment.is_whole:
            parts[batch, head, rows.start, rows.stop][step.segment.part.slot] = softmax.finish()
            continue
        sink = None if sinks is None else sinks[head].float()
        out[batch, rows, head], lse[batch, head, rows] = softmax.finish(sink)
    for (batch, head, begin, end), by_slot in parts.items():
        merged = merge([by_slot[slot] for slot in sorted(by_slot)])
        sink = None if sinks is None else sinks[head].float()
        out[batch, begin:end, head], lse[batch, head, begin:end] = with_sink(*merged, sink)
    return out, lse


def attend_step(
    plan: Plan,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    scores: tuple[Score, ...],
    mask,
    first_batch: int,
    dropout: Dropout | None,
) -> RunningSoftmax:
    """Attend the rows of one step to its key blocks.

    q (rows, head_dim) holds the step's rows; k (seqlen_k, head_dim) and v (seqlen_k, head_dim_v)
    are whole; scores and mask are bound to their tensors. `first_batch` is as in `execute`.
    """
    tile_n, blocks = plan.config.tile_n, step.blocks
    batch = first_batch + step.segment.tile.batch
    sequences = Dense.of(plan.problem)
    sequence = sequences.sequence(step.segment)
    query = torch.arange(step.rows.start, step.rows.stop, device=CPU)[:, None]

    def load(n_block: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return key_block(k, n_block, tile_n), key_block(v, n_block, tile_n)

    def seen(n_block: int, at: Position, key: torch.Tensor) -> torch.Tensor | None:
        is_full = blocks.full_begin <= n_block < blocks.full_end
        return None if is_full else visible(mask, at, key, sequence)

    return attend(
        q, (batch, step.head, query), sequence, range(blocks.begin, blocks.end), tile_n, load,
        seen, scores, softmax_scale, v.shape[1], dropout,
    )  # fmt: skip


def visible(mask, at: Position, key: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Which keys of a block the rows see, (rows, keys)."""
    band = mask.band if isinstance(mask, Intersection) else mask
    ranges = [band.key_range(row, sequence) for row in at.query.flatten().tolist()]
    bounds = torch.tensor(ranges, dtype=torch.int64, device=CPU)
    first_key, end_key = bounds.view(-1, 2, 1).unbind(1)
    seen = (key >= first_key) & (key < end_key)
    if isinstance(mask, Intersection):
        # It is bound, and no template any more.
        return seen & lets_through(cast(Mask, mask.function), at, seen.shape)
    return seen


def key_block(keys: torch.Tensor, n_block: int, tile_n: int) -> torch.Tensor:
    """Return block `n_block` of k or v; rows past the end are 0, as TMA fills them."""
    block = keys[n_block * tile_n : (n_block + 1) * tile_n]
    return pad(block, (0, 0, 0, tile_n - block.shape[0]))
