"""What a plan does over time: which SM works on which tile when, counted in key blocks.

The clock ticks once for every key block that a cluster attends to. That leaves out prologues,
epilogues and memory, so it is a picture of the balance of work and not a prediction of time.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa3.executor import steps
from fa3.kernels.forward import SMEM_CAPACITY
from fa3.planner import Plan
from fa3.problem import NO_BOUND, Problem, Window
from fa3.schedules import SingleTile, Tile


class Span(NamedTuple):
    """A tile's stay on a lane: `blocks` key blocks from tick `start`, `full_blocks` unmasked."""

    lane: int
    start: int
    blocks: int
    full_blocks: int
    tile: Tile


@dataclass(frozen=True)
class Timeline:
    """Every tile of a plan with its place in time.

    A lane is what holds one cluster: an SM, or cluster_m of them. When there are more clusters
    than lanes, the next cluster starts on the lane that is free first, as the GPU does it.
    """

    spans: tuple[Span, ...]
    num_lanes: int

    @classmethod
    def of(cls, plan: Plan) -> "Timeline":
        """The timeline of a plan."""
        work: list[list] = [[] for _ in range(plan.schedule.num_clusters)]
        for step in steps(plan):
            if step.rank == 0:
                work[step.cluster].append(step)
        num_lanes = min(len(work), plan.gpu.num_sms // plan.config.cluster_m)
        free = [(0, lane) for lane in range(num_lanes)]
        spans = []
        for tiles in work:
            now, lane = heapq.heappop(free)
            for step in tiles:
                begin, full_begin, full_end, end = map(int, step.blocks)
                spans.append(Span(lane, now, end - begin, full_end - full_begin, step.tile))
                now += end - begin
            heapq.heappush(free, (now, lane))
        return cls(tuple(spans), num_lanes)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Key blocks of every lane."""
        blocks = [0] * self.num_lanes
        for span in self.spans:
            blocks[span.lane] += span.blocks
        return tuple(blocks)

    @property
    def blocks(self) -> int:
        """Key blocks of all tiles."""
        return sum(self.work)

    @property
    def full_blocks(self) -> int:
        """Key blocks that need no mask."""
        return sum(span.full_blocks for span in self.spans)

    @property
    def balance(self) -> float:
        """Mean work of a lane over the most: 1 when all finish together."""
        return self.blocks / self.num_lanes / max(self.work)


def trace_events(plan: Plan, timeline: Timeline) -> dict:
    """A timeline in the Trace Event Format that Perfetto and chrome://tracing open.

    One microsecond stands for one key block.
    """
    lanes = "SM" if plan.config.cluster_m == 1 else "cluster"
    names = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": lane,
            "args": {"name": f"{lanes} {lane}"},
        }
        for lane in range(timeline.num_lanes)
    ]
    tiles = [
        {
            "ph": "X",
            "name": f"rows {span.tile.m_block}, head {span.tile.head}, batch {span.tile.batch}",
            "cat": f"head {span.tile.head}",
            "pid": 0,
            "tid": span.lane,
            "ts": span.start,
            "dur": span.blocks,
            "args": {"key blocks": span.blocks, "unmasked": span.full_blocks},
        }
        for span in timeline.spans
    ]
    return {"traceEvents": names + tiles, "otherData": {"problem": describe_problem(plan.problem)}}


def describe_problem(problem: Problem) -> str:
    """A problem in one line."""
    spec = problem.spec
    heads = counted(problem.num_heads_q, "head")
    if spec.qhead_per_kvhead > 1:
        heads = f"{problem.num_heads_q} query heads on {problem.num_heads_kv} key/value heads"
    return (
        f"{problem.batch} x {problem.seqlen_q:,} queries on {problem.seqlen_k:,} keys, {heads}, "
        f"head_dim {spec.head_dim}, {spec.dtype}, {describe_window(problem.window)}"
    )


def counted(number: int, noun: str) -> str:
    """A number of things: "1 tile", "1,024 tiles"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def describe_window(window: Window) -> str:
    """A window in a few words."""
    if window == (NO_BOUND, NO_BOUND):
        return "no mask"
    if window == (NO_BOUND, 0):
        return "causal"
    left, right = ("all" if bound == NO_BOUND else f"{bound:,}" for bound in window)
    return f"window of {left} keys to the left and {right} to the right"


def describe(plan: Plan, timeline: Timeline) -> str:
    """A plan in a few sentences: problem, CTA, grid and order, work and balance."""
    problem, config, order = plan.problem, plan.config, plan.schedule.order
    spec = problem.spec
    lane = "an SM" if config.cluster_m == 1 else f"a cluster of {config.cluster_m} SMs"
    clusters = "" if config.cluster_m == 1 else f" in clusters of {config.cluster_m}"
    kind = "CTA" if isinstance(plan.schedule, SingleTile) else "persistent CTA"
    heads = order.num_heads * order.batch
    sections = -(-heads // order.heads_per_section)
    together = counted(heads, "head") + " together"
    if sections > 1:
        together = f"{heads:,} heads in {sections} sections that share L2"
    o_buffer = "O in a buffer of its own" if config.own_o else "O staged where Q was"
    least, most, mean = min(timeline.work), max(timeline.work), timeline.blocks / timeline.num_lanes
    sentences = {
        "Problem": f"{describe_problem(problem)}: {problem.flops / 1e9:,.1f} GFLOP on at least "
        f"{problem.bytes / 1e6:,.1f} MB.",
        "CTA": f"{config.tile_m} query rows against blocks of {config.tile_n} keys; "
        f"{config.threads} threads in 1 producer and {config.consumers} consumer warpgroups.",
        "Memory": f"{counted(config.q_stages, 'stage')} of Q, {config.kv_stages} of K and of V, "
        f"{o_buffer}: {config.smem_bytes(spec):,} of {SMEM_CAPACITY:,} bytes.",
        "Grid": f"{counted(plan.grid, kind)}{clusters} on {plan.gpu.num_sms} SMs, for "
        f"{counted(order.num_tiles, 'tile')}.",
        "Order": f"{type(plan.schedule).__name__}; {together}, last query rows first.",
        "Work": f"{counted(timeline.blocks, 'key block')}, {timeline.full_blocks:,} of them "
        "unmasked.",
        "Balance": f"{least:,} to {most:,} key blocks for {lane}, mean {mean:,.1f}: "
        f"{timeline.balance:.1%}.",
    }
    return "\n".join(f"{name:8} {sentence}" for name, sentence in sentences.items())
