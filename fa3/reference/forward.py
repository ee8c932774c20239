"""The algorithm on the CPU: walks a plan tile by tile in torch, as the kernel does on the GPU.

Same plan, same tiles in the same order, same key blocks, same running softmax in base 2 with fp32
accumulators and P rounded to the input dtype. What differs from `fa3.kernels.forward` is what
happens at once: there, the CTAs of a GPU work side by side, a tile's rows are spread over
warpgroups that skip blocks which none of their rows sees, and P V of one block runs beside Q K^T of
the next; and here references follow, also where the kernel takes a fixed one or none, so that no
tile is computed a second time.

    for step in steps(plan):                             # watch the walk
        print(step)
    out, lse = execute(plan, q, k, v, softmax_scale)     # run it
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from fa3.planning.plan import Plan
from fa3.primitives.coords import Position
from fa3.primitives.softmax import SLACK
from fa3.schedules import Segment, walk
from fa3.scores.masks import Blocks, Intersection, Sequence
from fa3.scores.scores import Score, bind


class Step(NamedTuple):
    """One CTA's work on one tile.

    Fields:
        cluster: the cluster that works on the tile.
        rank: the CTA's rank in its cluster.
        segment: what the cluster works on.
        head: the CTA's query head.
        rows: the CTA's query rows; none when its part of the tile lies past the end.
        blocks: the key blocks it walks, those of all rows of the cluster.
    """

    cluster: int
    rank: int
    segment: Segment
    head: int
    rows: range
    blocks: Blocks


class HostTensor:
    """A tensor whose elements are Python numbers, as a mask's ranges read them."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index) -> int | float:
        return self.tensor[index].item()


def steps(plan: Plan, tensors: Iterable[torch.Tensor] = ()) -> Iterator[Step]:
    """Yield a plan's work in rounds: the first tile of every cluster, then the second, and on.

    `tensors` are those of the scores, mask and sinks. Without them a mask of the user's cannot
    say which blocks it hides, and the blocks are those of the window.
    """
    mask = plan.problem.spec.mask
    if tensors or not plan.problem.spec.modifier_types:
        _, mask, _ = bind(plan.problem.spec, map(HostTensor, tensors))
    schedule, config = plan.schedule, plan.config
    sequence = Sequence.of(plan.problem)
    rows_of_cluster = config.cluster_m * config.tile_m
    walks = [walk(schedule, cluster) for cluster in range(schedule.num_clusters)]
    for segments in zip_longest(*walks):
        for cluster, segment in enumerate(segments):
            if segment is None:
                continue
            tile = segment.tile
            begin = tile.m_block * rows_of_cluster
            head = tile.head * config.cluster_h
            blocks = mask.at(tile.batch, head).key_blocks(
                begin, rows_of_cluster, config.tile_n, sequence
            )
            if schedule.splits:
                blocks = blocks.between(segment.begin, segment.end)
            for rank in range(config.cluster):
                of_head, of_rows = divmod(rank, config.cluster_m)
                first = of_rows * config.tile_m
                rows = range(begin, sequence.seqlen_q)[first : first + config.tile_m]
                yield Step(cluster, rank, segment, head + of_head, rows, blocks)


CPU = torch.device("cpu")
"""Where new tensors are, whatever default the caller has set."""


# Whoever computes in 16 bits around a call still gets sums in 32 from it, as from the kernels.
@torch.autocast("cpu", enabled=False)
def execute(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan on CPU tensors.

    Args:
        plan: the plan of the problem that the tensors pose.
        q: (batch, seqlen_q, num_heads_q, head_dim), bfloat16 or float16.
        k: (batch, seqlen_k, num_heads_kv, head_dim), dtype of q.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), dtype of q.
        softmax_scale: factor of Q K^T before the softmax; positive.
        tensors: those of the spec's scores, mask and sinks.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim_v), dtype of q, contiguous; and the
        log-sum-exp (batch, num_heads_q, seqlen_q), float32, natural logarithm. A row that sees
        no key is 0 with log-sum-exp -inf, or with that of its sink.
    """
    problem, spec = plan.problem, plan.problem.spec
    out = q.new_empty(problem.batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim_v)
    lse = q.new_empty(problem.batch, problem.num_heads_q, problem.seqlen_q, dtype=torch.float32)
    scores, mask, sinks = bind(spec, tensors)
    parts = defaultdict(dict)
    for step in steps(plan, tensors or ()):
        rows = slice(step.rows.start, step.rows.stop)
        batch, head = step.segment.tile.batch, step.head
        of_head_kv = batch, slice(None), head // spec.qhead_per_kvhead
        softmax = attend(
            plan, step, q[batch, rows, head], k[of_head_kv], v[of_head_kv], softmax_scale,
            scores, mask,
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


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outputs (rows, head_dim_v) and log-sum-exps (rows,) over parts of the keys."""
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


def with_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a sink join the sums of rows (rows, head_dim_v) and (rows,)."""
    if sink is None:
        return out, lse
    joined = torch.logaddexp(lse, sink)
    return out * torch.exp(lse - joined).nan_to_num(0.0)[:, None], joined


class RunningSoftmax:
    """Softmax of rows that come in blocks of keys, as the kernels keep it; all in float32."""

    def __init__(self, num_rows: int, head_dim_v: int, scale_log2: float):
        self.scale_log2 = scale_log2
        self.reference = torch.full((num_rows, 1), -torch.inf, device=CPU)
        self.row_sum = torch.zeros(num_rows, 1, device=CPU)
        self.acc_O = torch.zeros(num_rows, head_dim_v, device=CPU)

    def add(self, scores: torch.Tensor, v: torch.Tensor) -> None:
        """Take a block's scores (rows, keys) and values (keys, head_dim_v)."""
        row_max = scores.amax(dim=1, keepdim=True)
        outgrown = (row_max - self.reference) * self.scale_log2 > SLACK
        before, self.reference = self.reference, torch.where(outgrown, row_max, self.reference)
        # A row hidden so far has reference -inf; exp2(-inf - 0) is the 0 that it needs.
        scaled = self.reference.masked_fill(self.reference == -torch.inf, 0.0) * self.scale_log2
        correction = torch.exp2(before * self.scale_log2 - scaled)
        p = torch.exp2(scores * self.scale_log2 - scaled)
        self.row_sum = self.row_sum * correction + p.sum(dim=1, keepdim=True)
        self.acc_O = self.acc_O * correction + p.to(v.dtype).float() @ v.float()

    def finish(self, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Give output (rows, head_dim_v) and log-sum-exp (rows,); a sink joins the sums.

        The sink is a number, or one for each row.
        """
        lse = (self.reference * self.scale_log2 + torch.log2(self.row_sum)) * math.log(2.0)
        lse = lse.masked_fill(self.row_sum == 0.0, -torch.inf)
        out = (self.acc_O / self.row_sum).masked_fill(self.row_sum == 0.0, 0.0)
        return with_sink(out, lse.squeeze(1), sink)


def attend(
    plan: Plan,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    scores: tuple[Score, ...],
    mask,
) -> RunningSoftmax:
    """Attend the rows of one step to its key blocks, from the last to the first.

    q (rows, head_dim) holds the step's rows; k (seqlen_k, head_dim) and v (seqlen_k, head_dim_v)
    are whole; scores and mask are bound to their tensors.
    """
    tile_n, blocks = plan.config.tile_n, step.blocks
    sequence = Sequence.of(plan.problem)
    query = torch.arange(step.rows.start, step.rows.stop, device=CPU)[:, None]
    unit = 1.0 if scores else softmax_scale
    softmax = RunningSoftmax(len(step.rows), v.shape[1], unit * math.log2(math.e))
    for n_block in reversed(range(blocks.begin, blocks.end)):
        key = n_block * tile_n + torch.arange(tile_n, device=CPU)
        at = Position(
            step.segment.tile.batch,
            step.head,
            query,
            key.clamp(max=sequence.seqlen_k - 1),
            sequence.seqlen_q,
            sequence.seqlen_k,
        )
        values = q.float() @ key_block(k, n_block, tile_n).float().T
        if scores:
            values = values * softmax_scale
        for score in scores:
            values = score.reference(values, at)
        if not blocks.full_begin <= n_block < blocks.full_end:
            values = values.masked_fill(~visible(mask, at, key, sequence), -torch.inf)
        softmax.add(values, key_block(v, n_block, tile_n))
    return softmax


def visible(mask, at: Position, key: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Which keys of a block the rows see, (rows, keys)."""
    band = mask.band if isinstance(mask, Intersection) else mask
    ranges = [band.key_range(row, sequence) for row in at.query.flatten().tolist()]
    bounds = torch.tensor(ranges, dtype=torch.int64, device=CPU)
    first_key, end_key = bounds.view(-1, 2, 1).unbind(1)
    seen = (key >= first_key) & (key < end_key)
    return seen & mask.function.reference(at) if isinstance(mask, Intersection) else seen


def key_block(keys: torch.Tensor, n_block: int, tile_n: int) -> torch.Tensor:
    """Return block `n_block` of k or v; rows past the end are 0, as TMA fills them."""
    block = keys[n_block * tile_n : (n_block + 1) * tile_n]
    return pad(block, (0, 0, 0, tile_n - block.shape[0]))
