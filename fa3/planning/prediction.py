"""The cost model: predicts a plan's time from load and bytes.

`fa3.planning.costs` has the parameters. A `Load` is counted from the segments of a schedule; the
planner compares whole tiles by the loads of `loads_of_whole_tiles`, without making schedules. A
`Timeline` says which SM works on which tile when: `Plan.simulate` makes it from the cost model,
`fa3.tools.recording` from a run on the GPU.

    T = (compute^2.5 + memory^2.5)^(1/2.5) + launch

    compute   when the last cluster is done. A segment takes tile_us, and full_us or masked_us
              for each of its key blocks; clusters take segments as their schedule says.
    memory    bytes through device memory over its bandwidth. The K and V of a head group
              are read once if they fit into L2, else once for every wave of clusters. Each part of
              a tile reads its own keys, if L2 does not hold the keys of all heads.
    launch    the time of a launch when kernels follow each other, and the schedule's overhead.

Costs are measured at burst clock. Under steady load the power cap lowers the clock. Power grows
with the 2.5th power of the clock, with the share of time in which SMs work on key blocks, and with
memory traffic. With every SM at key blocks all the time and no traffic, compute takes `steady`
times as long.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import AGAIN, Costs, TileCosts
from fa3.planning.tilings import TiledProblem
from fa3.schedules import Schedule, Segment, walk
from fa3.schedules.order import Segments
from fa3.schedules.split import LATE, TileList, end_of_last

EXACT_ROUNDS = 1
"""Full rounds at the end that a prediction simulates segment by segment, with the partial one."""

EXPONENT = 2.5
"""Exponent that joins compute and memory: the higher, the more the larger one alone counts."""

SPREAD_EXPONENT = 3.5
"""`EXPONENT` for lists that spread reads of K and V (`TiledProblem.spreads_reads`)."""

POWER_EXPONENT = 2.5
"""Power at full load grows with this power of the clock. Assumed; only measured with all SMs busy.
"""

APART = 0.6
"""Share of the parts' keys that are read from device memory, where L2 does not hold all keys:
clusters that share keys do not read them at the same time. From 128 queries on 32k keys, 32/8
heads, single CTAs and pairs of heads: 117 and 103.5 us, of which compute takes 101."""


def times_of(segments: Segments, tile: TileCosts) -> np.ndarray:
    """Microseconds of every segment at burst clock, without the schedule's overhead."""
    times = tile.us(segments.full, segments.masked)
    return times + segments.partial * tile.part_us_if(segments.merging)


def greedy_end(times: np.ndarray, lanes: int, level: float = 0.0) -> float:
    """When the last lane ends, if all are free at `level`."""
    units = times.tolist()
    free_at = [level + us for us in units[:lanes]]
    heapq.heapify(free_at)
    replace_first = heapq.heapreplace
    for us in units[lanes:]:
        replace_first(free_at, free_at[0] + us)
    return max(free_at, default=level)


def tiles_before_last(count: int, lanes: int) -> int:
    """How many of `count` segments come before the last, simulated rounds.
    They count by their mean, since greedy assignment evens them out."""
    return max(0, count // lanes - EXACT_ROUNDS) * lanes


class Load(NamedTuple):
    """Times of all segments, in microseconds, without the schedule's overhead per segment."""

    last: float  # when the last cluster is done
    # total, block_us: sum over all segments, and over their key blocks alone.
    total: float
    block_us: float
    longest: float  # time of the longest segment
    num_segments: int  # how many segments there are
    rounds: int  # segments of the cluster that has the most
    # blocks, blocks_of_parts: key blocks of all segments, and of the parts of tiles.
    blocks: float
    blocks_of_parts: float = 0.0
    num_parts: int = 0  # number of parts of tiles

    @classmethod
    def of(cls, segments: Segments, tile: TileCosts, lanes: int) -> "Load":
        """The load of segments; the GPU holds `lanes` clusters at once."""
        times = times_of(segments, tile)
        if segments.owner is None:
            head = tiles_before_last(len(times), lanes)
            last = greedy_end(times[head:], lanes, float(times[:head].sum()) / lanes)
            rounds = -(-len(times) // lanes)
        else:
            last = end_of_last(segments, times, tile.part_us_if(True))
            rounds = int(np.bincount(segments.owner).max(initial=0))
        blocks = segments.full + segments.masked
        block_us = segments.full.sum() * tile.full_us + segments.masked.sum() * tile.masked_us
        return cls(
            last,
            total=float(times.sum()),
            block_us=float(block_us),
            longest=float(times.max(initial=0.0)),
            num_segments=len(times),
            rounds=rounds,
            blocks=float(blocks.sum()),
            blocks_of_parts=float(blocks[segments.partial].sum()),
            num_parts=int(segments.partial.sum()),
        )


def loads_of_whole_tiles(tiled: TiledProblem) -> tuple[Load, Load]:
    """Return the load if tiles go to the first free cluster.
    If that ends late, a `TileList` has the last tiles longest-first."""
    order, lanes = tiled.order, tiled.lanes
    rows = Segments.of(np.arange(order.num_m_blocks), tiled.blocks_of_rows)
    count, heads = order.num_tiles, order.num_heads * order.batch
    # Tiles of the same rows take equally long: there may be too many to look at each.
    times = times_of(rows, tiled.costs)
    head_load = Load.of(rows, tiled.costs, lanes)
    rest = times[order.m_blocks(count - tiles_before_last(count, lanes))]
    total = head_load.total * heads
    level = (total - float(rest.sum())) / lanes
    greedy = head_load._replace(
        last=greedy_end(rest, lanes, level), total=total, block_us=head_load.block_us * heads,
        num_segments=count, rounds=-(-count // lanes), blocks=head_load.blocks * heads,
    )  # fmt: skip
    if greedy.last <= LATE * greedy.total / lanes:
        return greedy, greedy
    longest_first = greedy_end(np.sort(rest)[::-1], lanes, level)
    return greedy, greedy._replace(last=min(greedy.last, longest_first))


def bytes_moved(tiled: TiledProblem, load: Load) -> float:
    """Bytes that a call moves through device memory."""
    problem, gpu, config, order = tiled.problem, tiled.gpu, tiled.config, tiled.order
    spec = problem.spec
    kv_heads = max(1, order.heads_per_group * config.cluster_h // problem.qhead_per_kvhead)
    bytes_of_key = spec.key_bytes
    group_bytes = problem.seqlen_k * bytes_of_key * kv_heads
    waves = order.num_m_blocks * order.heads_per_group * config.cluster / gpu.num_sms
    spilled = max(0, group_bytes - gpu.l2_bytes)
    num_groups = order.num_heads * order.batch / order.heads_per_group
    again = num_groups * max(0.0, waves - 1) * spilled
    all_keys = problem.batch * problem.num_heads_kv * problem.seqlen_k
    if load.num_parts and all_keys * bytes_of_key > gpu.l2_bytes:
        apart = APART * load.blocks_of_parts * config.tile_n
        together = all_keys * load.blocks_of_parts / load.blocks
        again += max(0.0, apart - together) * bytes_of_key
    rows = config.tile_m * config.cluster
    # Partial outputs and their log-sum-exp, in fp32, written and read again.
    partials = load.num_parts * rows * (spec.head_dim_v + 1) * 4 * 2
    return problem.bytes + again + partials


def unit_name(schedule: str, config: ForwardConfig) -> str:
    """The key of a schedule and cluster size in `Costs.unit_us`."""
    return schedule if config.cluster == 1 else f"{schedule} in pairs"


class Prediction(NamedTuple):
    """A plan's predicted time and its components."""

    us: float  # microseconds of a call under steady load
    burst_us: float  # microseconds of a call at burst clock
    compute_us: float  # when the last cluster is done, under steady load
    memory_us: float  # time of the device memory traffic alone
    # A launch when kernels follow each other, and the schedule's overhead per call.
    launch_us: float
    longest_us: float  # the longest segment, under steady load
    waves: float = 1.0  # segments per cluster that the GPU holds
    busy: float = 1.0  # share of the SMs' time, until the last cluster is done, in which they work

    @property
    def mean_us(self) -> float:
        """The geometric mean of times under steady load and in bursts.
        The planner cannot know which of them a call will meet."""
        return (self.us * self.burst_us) ** 0.5

    @property
    def bound(self) -> str:
        """The bottleneck, in a few words."""
        if self.memory_us > self.compute_us:
            return "device memory"
        if self.busy > 0.9:
            return "compute"
        if self.longest_us > 0.9 * self.compute_us:
            return "its longest tile" if self.waves > 0.5 else "too few tiles"
        return "an uneven last wave"


def predict(costs: Costs, tiled: TiledProblem, schedule: str, load: Load) -> Prediction:
    """Predict a plan's time from its tiles, schedule name and load."""
    tile, config, lanes = costs.tile(tiled.key), tiled.config, tiled.lanes
    unit_us = costs.unit_us.get(unit_name(schedule, config), 0.0)
    burst = load.last + load.rounds * unit_us
    per_sm = config.cluster / (tiled.gpu.num_sms * burst) if burst else 0.0
    memory_us = bytes_moved(tiled, load) / costs.bytes_per_us
    busy_share = load.block_us * per_sm
    if burst:
        busy_share += costs.memory_power * min(1.0, memory_us / burst)
    slowdown = max(1.0, tile.steady * busy_share ** (1 / POWER_EXPONENT))
    is_spread = schedule == TileList.name and tiled.spreads_reads
    exponent = SPREAD_EXPONENT if is_spread else EXPONENT
    launch_us = costs.launch_us + costs.call_us.get(schedule, 0.0)
    if config.fixed_row_max:
        launch_us += costs.call_us.get(AGAIN, 0.0)
    return Prediction(
        overlapped_us(burst * slowdown, memory_us, exponent) + launch_us,
        overlapped_us(burst, memory_us, exponent) + launch_us,
        burst * slowdown,
        memory_us,
        launch_us,
        (load.longest + unit_us) * slowdown if load.num_segments else 0.0,
        load.num_segments / lanes,
        (load.total + load.num_segments * unit_us) * per_sm,
    )


def overlapped_us(compute_us: float, memory_us: float, exponent: float) -> float:
    """The time of compute and memory traffic that overlap."""
    return (compute_us**exponent + memory_us**exponent) ** (1 / exponent)


class Span(NamedTuple):
    """A segment on a lane, from `start` on for `us`, in microseconds."""

    lane: int
    start: float
    segment: Segment
    us: float
    # blocks, full_blocks: key blocks, and of these the ones without a mask.
    blocks: int
    full_blocks: int

    @property
    def end(self) -> float:
        return self.start + self.us


@dataclass(frozen=True)
class Timeline:
    """When and where a plan's segments run, from time 0 on.

    In a simulation a lane is what one cluster occupies: an SM or several. When there are more
    clusters than lanes, the next cluster starts on the first free lane, as on the GPU.

    In a recording (`fa3.tools.recording`) a lane is an SM. There may be gaps, and a tile may begin
    shortly before the previous one ends: its warpgroups take turns.
    """

    spans: tuple[Span, ...]
    num_lanes: int

    @classmethod
    def of(
        cls, schedule: Schedule, num_lanes: int, us: float, cost_of: Callable[[Segment], tuple]
    ) -> "Timeline":
        """Simulate a schedule's clusters on at most `num_lanes` lanes.
        `cost_of` gives the last three fields of a segment's `Span`. All times are scaled, so that
        the last segment ends at `us`."""
        num_lanes = min(schedule.num_clusters, num_lanes)
        free = [(0.0, lane) for lane in range(num_lanes)]
        spans = []
        for cluster in range(schedule.num_clusters):
            now, lane = heapq.heappop(free)
            for segment in walk(schedule, cluster):
                span = Span(lane, now, segment, *cost_of(segment))
                spans.append(span)
                now = span.end
            heapq.heappush(free, (now, lane))
        factor = us / (max(free)[0] or 1.0) if free else 1.0
        scaled = (one._replace(start=factor * one.start, us=factor * one.us) for one in spans)
        return cls(tuple(scaled), num_lanes)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """Ends of spans, but none after the lane's next span starts."""
        ends = [span.end for span in self.spans]
        next_start: dict[int, float] = {}
        for i in sorted(range(len(ends)), key=lambda i: self.spans[i].start, reverse=True):
            lane, start, *_ = self.spans[i]
            ends[i] = min(ends[i], next_start.get(lane, ends[i]))
            next_start[lane] = start
        return tuple(ends)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Microseconds of work of each lane."""
        busy = [0.0] * self.num_lanes
        for span, end in zip(self.spans, self.ends, strict=True):
            busy[span.lane] += end - span.start
        return tuple(busy)

    @cached_property
    def us(self) -> float:
        """When the last tile ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def mean(self) -> float:
        """Mean work of a lane that has any."""
        working = [us for us in self.busy if us]
        return sum(working) / max(1, len(working))

    @property
    def blocks(self) -> int:
        """Key blocks of all tiles."""
        return sum(span.blocks for span in self.spans)

    @property
    def full_blocks(self) -> int:
        """Key blocks that need no mask."""
        return sum(span.full_blocks for span in self.spans)

    @property
    def balance(self) -> float:
        """A lane's mean work over the whole time; 1 is the best."""
        return self.mean / self.us if self.us else 1.0
