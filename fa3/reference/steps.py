"""Segments of plans as steps for the walker.

Same plan, same tiles in the same order, same key blocks as on a GPU. What differs from
`fa3.kernels` is what happens at once: there, CTAs work at the same time, and P V of one block
overlaps Q K^T of the next. A tile's rows are spread over warpgroups, which skip blocks that none of
their rows sees. Here the row max is always online, so no tile is recomputed. A packed sequence runs
through the plan that it would get as a batch of one, where on a GPU short ones may share tiles. The
walker merges the parts of a tile in the order of its keys, as combine does.

    for step in steps(plan):  # watch the walk
        print(step)
    execute(plan, {"q": q, "k": k, "v": v, "o": out, "lse": lse, "softmax_scale": 0.1})
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fa3.planning.decode import TILE_N, DecodePlan
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.routes import Signature
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.wgmma import ROWS
from fa3.problem import Problem
from fa3.reference.walker import HostTensor, PackedLengths, SequenceRows, Step, Walker, errors_of
from fa3.schedules import walk
from fa3.schedules.sequences import Cached, PackedQueries, capacity_of
from fa3.schedules.stream_k import segments
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
    """Yield a plan's work, cluster by cluster."""
    problem, schedule, config = plan.problem, plan.schedule, plan.config
    if sequences is None:
        sequences = SequenceRows.dense(problem.batch, problem.seqlen_q, problem.seqlen_k)
    mask = problem.spec.mask
    if tensors or not problem.spec.modifier_types:
        _, mask, _ = bind(problem.spec, map(HostTensor, tensors))
    function = mask.function if isinstance(mask, Intersection) else mask
    num_rows = config.cluster_m * config.tile_m
    clusters = range(schedule.num_clusters)
    for cluster, segment in ((c, one) for c in clusters for one in walk(schedule, c)):
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


def execute(plan: Plan, values: Mapping[str, Any]) -> None:
    """Run a plan on the CPU tensors of its problem, which `Walker` names.
    A row that sees no key gets 0 with log-sum-exp -inf, or with its sink."""
    call = Walker(plan.problem.spec, plan.problem.window, values)
    call.run(steps(plan, call.tensors))


def execute_packed(signature: Signature, values: Mapping[str, Any], short_queries: int = 0) -> None:
    """Attend inside of each sequence of CPU tensors.

    Args:
        values: as `Walker` names them, and the `PackedLengths`. Without cu_seqlens_k, k and v are a
            cache.
        short_queries: sequences with so many queries or fewer are left out.
    """
    spec, window = signature.spec, signature.window
    walk = Walker(spec, window, values)
    lengths = PackedLengths(*(values[name] for name in PackedLengths._fields))
    has_cache = lengths.cu_seqlens_k is None
    heads_q, heads_kv = walk.q.shape[2], walk.k.shape[2]
    if has_cache and lengths.seqused_k is not None:
        # The host may not have checked them.
        pages = 1 if walk.page_table is None else walk.page_table.shape[1]
        lengths = lengths._replace(
            cu_seqlens_q=lengths.cu_seqlens_q.clamp(0, len(values["q"])),
            seqused_k=lengths.seqused_k.clamp(0, capacity_of(walk.k.shape[1], pages)),
        )
    for one in lengths.sequences():
        if len(one.q) <= short_queries:
            continue
        if has_cache:
            # Pages before the window may hold anything.
            first, _ = spec.mask.key_range(0, one.sequence(window))
            one = one._replace(first_key=first)
        sizes = 1, len(one.q), len(one.k), heads_kv, heads_q // heads_kv
        plan = plan_forward(Problem(spec, *sizes, window))
        walk.run(steps(plan, walk.tensors, [one]))


def execute_decode(plan: DecodePlan, values: Mapping[str, Any], max_seqlen_k: int) -> None:
    """Run a plan on CPU tensors.

    Args:
        values: as `Walker` names them, the `PackedLengths` and `CacheTables`, and seqlen_new, keys
            that each sequence has in addition to seqused_k. Of packed sequences those are left out
            that have more queries than the plan has room for. Without cu_seqlens_k, k and v are a
            cache, which is full without seqused_k. Without cu_seqlens_q, sequences have equally
            many queries.
        max_seqlen_k: no sequence has more keys.
    """
    ends_q, ends_k, used_q, used_k = map(values.get, PackedLengths._fields)
    sizes, queries, keys = plan.sizes, None, None
    batch = sizes.batch if ends_q is None else len(ends_q) - 1
    if ends_q is not None:
        rows = RaggedLengths(HostTensor(ends_q), host_tensor(used_q), len(values["q"]))
        queries = PackedQueries(rows, sizes.qhead_per_kvhead, ROWS)
    if ends_k is not None:
        keys = RaggedLengths(HostTensor(ends_k), host_tensor(used_k), len(values["k"]))
    tables = CacheTables(*(host_tensor(values[name]) for name in CacheTables._fields))
    sequences = Cached(
        batch, host_tensor(used_k), values["seqlen_new"], tables, plan.spec.mask, sizes.seqlen_q,
        max_seqlen_k, plan.window, TILE_N, packed=queries, packed_keys=keys,
    )  # fmt: skip
    walk = Walker(plan.spec, plan.window, values)
    walk.run(steps_of_decode(plan, sequences))


def host_tensor(tensor: torch.Tensor | None) -> HostTensor | None:
    """A table that the host reads."""
    return None if tensor is None else HostTensor(tensor)


def steps_of_decode(plan: DecodePlan, sequences: Cached) -> Iterator[Step]:
    """Yield a decode plan's work, CTA by CTA."""
    sizes, group, packed = plan.sizes, plan.sizes.qhead_per_kvhead, sequences.packed
    lengths = list(map(sequences.read, range(sequences.num_sequences)))
    work = plan.cut, sequences, sizes.num_m_blocks, sizes.heads_kv, plan.num_ctas
    for cta, segment in segments(*work):
        tile, length = segment.tile, lengths[segment.tile.batch]
        keys, seqlen_k = sequences.keys(tile, length), sequences.sequence(length).seqlen_k
        first, seqlen_q = sequences.queries(length)
        place = SequenceRows(
            tile.batch,
            range(first, first + seqlen_q),
            range(keys.leftpad, keys.leftpad + seqlen_k),
            # Packed rows are one batch entry.
            tile.batch if packed is None else 0,
            keys.row if sequences.packed_keys is None else 0,
            keys.first,
        )
        rows = range(seqlen_q * group)[tile.m_block * ROWS :][:ROWS]
        blocks = Blocks(segment.begin, segment.begin, segment.begin, segment.end)
        yield Step(segment, place, rows, tile.head, blocks, TILE_N, cta, heads=group)
