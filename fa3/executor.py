"""The algorithm on the CPU: walks a plan tile by tile in torch, as the kernel does on the GPU.

Same plan, same tiles in the same order, same key blocks, same running softmax in base 2 with fp32
accumulators and P rounded to the input dtype. What differs from `fa3.kernels.forward` is only
what happens at once: there, the CTAs of a GPU work side by side, a tile's rows are spread over
warpgroups, P V of one block runs beside Q K^T of the next, and the rows of a warp renew the
references of their softmax together; here each row does so by itself.

    for step in steps(plan):                             # watch the walk
        print(step)
    out, lse = execute(plan, q, k, v, softmax_scale)     # run it
"""

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from fa3.masks import KeyBlocks, Sequence
from fa3.planner import Plan
from fa3.primitives.softmax import SLACK
from fa3.schedules import Tile, walk


class Step(NamedTuple):
    """One CTA's work on one tile.

    Fields:
        cluster: the cluster that works on the tile.
        rank: the CTA's rank in its cluster.
        tile: the cluster's tile.
        rows: the CTA's query rows; none when its part of the tile lies past the end.
        blocks: the key blocks it walks, those of all rows of the cluster.
    """

    cluster: int
    rank: int
    tile: Tile
    rows: range
    blocks: KeyBlocks


def steps(plan: Plan) -> Iterator[Step]:
    """Yield a plan's work in rounds: the first tile of every cluster, then the second, and on."""
    schedule, tile_m, cluster_m = plan.schedule, plan.config.tile_m, plan.config.cluster_m
    sequence = sequence_of(plan)
    walks = [walk(schedule, cluster) for cluster in range(schedule.num_clusters)]
    for tiles in zip_longest(*walks):
        for cluster, tile in enumerate(tiles):
            if tile is None:
                continue
            begin = tile.m_block * cluster_m * tile_m
            blocks = plan.problem.spec.mask.key_blocks(
                begin, cluster_m * tile_m, plan.config.tile_n, sequence
            )
            for rank in range(cluster_m):
                rows = range(begin, sequence.seqlen_q)[rank * tile_m : (rank + 1) * tile_m]
                yield Step(cluster, rank, tile, rows, blocks)


def execute(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan on CPU tensors.

    Args:
        plan: the plan of the problem that the tensors pose.
        q: (batch, seqlen_q, num_heads_q, head_dim), bfloat16 or float16.
        k: (batch, seqlen_k, num_heads_kv, head_dim), dtype of q.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), dtype of q.
        softmax_scale: factor of Q K^T before the softmax; positive.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v), dtype of q, contiguous; and the
        log-sum-exp (batch, num_heads_q, seqlen_q), float32, natural logarithm. A row that sees
        no key is 0 with log-sum-exp -inf.
    """
    problem, spec = plan.problem, plan.problem.spec
    out = q.new_empty(problem.batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim_v)
    lse = q.new_empty(problem.batch, problem.num_heads_q, problem.seqlen_q, dtype=torch.float32)
    for step in steps(plan):
        rows = slice(step.rows.start, step.rows.stop)
        batch, head = step.tile.batch, step.tile.head
        of_head_kv = batch, slice(None), head // spec.qhead_per_kvhead
        out[batch, rows, head], lse[batch, head, rows] = attend(
            plan, step, q[batch, rows, head], k[of_head_kv], v[of_head_kv], softmax_scale
        )
    return out, lse


def attend(
    plan: Plan, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one step's output (rows, head_dim_v) and log-sum-exp (rows,), both float32.

    q (rows, head_dim) holds the step's rows; k (seqlen_k, head_dim) and v (seqlen_k, head_dim_v)
    are whole.
    """
    mask, tile_n, blocks = plan.problem.spec.mask, plan.config.tile_n, step.blocks
    sequence = sequence_of(plan)
    ranges = [mask.key_range(row, sequence) for row in step.rows]
    first_key, end_key = torch.tensor(ranges, dtype=torch.int64).view(-1, 2, 1).unbind(1)
    scale_log2 = softmax_scale * math.log2(math.e)

    reference = torch.full((len(step.rows), 1), -torch.inf)
    row_sum = torch.zeros(len(step.rows), 1)
    acc_O = torch.zeros(len(step.rows), v.shape[1])
    for n_block in reversed(range(blocks.begin, blocks.end)):
        scores = q.float() @ key_block(k, n_block, tile_n).float().T
        if not blocks.full_begin <= n_block < blocks.full_end:
            key = n_block * tile_n + torch.arange(tile_n)
            scores = scores.masked_fill((key < first_key) | (key >= end_key), -torch.inf)

        row_max = scores.amax(dim=1, keepdim=True)
        outgrown = (row_max - reference) * scale_log2 > SLACK
        before, reference = reference, torch.where(outgrown, row_max, reference)
        # A row hidden so far has reference -inf; exp2(-inf - 0) is the 0 that it needs.
        scaled = reference.masked_fill(reference == -torch.inf, 0.0) * scale_log2
        correction = torch.exp2(before * scale_log2 - scaled)
        p = torch.exp2(scores * scale_log2 - scaled)
        row_sum = row_sum * correction + p.sum(dim=1, keepdim=True)
        acc_O = acc_O * correction + p.to(v.dtype).float() @ key_block(v, n_block, tile_n).float()

    hidden = row_sum == 0.0
    lse = (reference * scale_log2 + torch.log2(row_sum)) * math.log(2.0)
    return (
        (acc_O / row_sum).masked_fill(hidden, 0.0),
        lse.masked_fill(hidden, -torch.inf).squeeze(1),
    )


def key_block(keys: torch.Tensor, n_block: int, tile_n: int) -> torch.Tensor:
    """Return block `n_block` of k or v; rows past the end are 0, as TMA fills them."""
    block = keys[n_block * tile_n : (n_block + 1) * tile_n]
    return pad(block, (0, 0, 0, tile_n - block.shape[0]))


def sequence_of(plan: Plan) -> Sequence:
    """Return what the mask needs to know of a plan's problem."""
    problem = plan.problem
    return Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
