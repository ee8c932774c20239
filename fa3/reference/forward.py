"""The forward pass of a plan on the CPU: its tiles as steps, for the walker.

Same plan, same tiles in the same order, same key blocks as on a GPU. What differs from
`fa3.kernels.forward` is what happens at once: there, the CTAs of a GPU work at the same time, a
tile's rows are spread over warpgroups that skip blocks which none of their rows sees, and P V of
one block overlaps Q K^T of the next. Here the row max is always online, so no tile is recomputed.

    for step in steps(plan):                             # watch the walk
        print(step)
    execute(plan, (q, k, v, out, lse), softmax_scale)    # run it
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch

from fa3.planning.plan import Plan
from fa3.reference.dropout import Dropout
from fa3.reference.walker import HostTensor, SequenceRows, Step, Walker, errors_of
from fa3.schedules import walk
from fa3.scores.masks import Blocks, Intersection
from fa3.scores.scores import bind

NO_BLOCKS = Blocks(0, 0, 0, 0)


def steps(
    plan: Plan,
    # Of the scores, mask and sinks. Without them a mask of the user's cannot say which blocks it
    # hides, and only the window limits the blocks.
    tensors: Iterable[torch.Tensor] = (),
    # Where the rows of the problem's sequences are, if they are no dense batch.
    sequences: Sequence[SequenceRows] | None = None,
) -> Iterator[Step]:
    """Yield a plan's work in rounds: the first tile of every cluster, then the second, and on."""
    problem, schedule, config = plan.problem, plan.schedule, plan.config
    if sequences is None:
        sequences = SequenceRows.dense(problem.batch, problem.seqlen_q, problem.seqlen_k)
    mask = problem.spec.mask
    if tensors or not problem.spec.modifier_types:
        _, mask, _ = bind(problem.spec, map(HostTensor, tensors))
    function = mask.function if isinstance(mask, Intersection) else mask
    num_rows = config.cluster_m * config.tile_m
    walks = [walk(schedule, cluster) for cluster in range(schedule.num_clusters)]
    for cluster, segment in (x for segments in zip_longest(*walks) for x in enumerate(segments)):
        if segment is None:
            continue
        place = sequences[segment.tile.batch]
        sequence, blocks = place.sequence(problem.window), NO_BLOCKS
        begin, head = segment.tile.m_block * num_rows, segment.tile.head * config.cluster_h
        if sequence.seqlen_k:
            with errors_of("mask", function, "key_range or open_range"):
                blocks = mask.at(place.batch, head).key_blocks(
                    begin, num_rows, config.tile_n, sequence
                )
            if schedule.splits:
                blocks = blocks.between(segment.begin, segment.end)
        for rank in range(config.cluster):
            head_rank, row_rank = divmod(rank, config.cluster_m)
            first = row_rank * config.tile_m
            queries = range(begin, sequence.seqlen_q)[first : first + config.tile_m]
            work = place, queries, head + head_rank, blocks
            yield Step(segment, *work, config.tile_n, cluster, rank)


def execute(
    plan: Plan,
    # operands, softmax_scale, tensors, dropout, descales: see `fa3.reference.walker.Walker`.
    operands: tuple[torch.Tensor | None, ...],
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    dropout: Dropout | None = None,
    descales: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Run a plan on the CPU tensors of its problem.
    A row that sees no key gets 0 with log-sum-exp -inf, or with its sink."""
    problem = plan.problem
    call = Walker(
        problem.spec, problem.window, operands, softmax_scale, tensors, dropout, descales=descales
    )
    call.run(steps(plan, call.tensors))
