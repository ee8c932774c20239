"""Timelines: which SM works on which tile when, in microseconds.

`Plan.simulate` makes them from the cost model, `fa3.tools.recording` from a run on the GPU.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa3.schedules import Schedule, Segment, walk


class Cost(NamedTuple):
    """A segment's time in microseconds, its key blocks, and how many of these need no mask."""

    us: float
    blocks: int
    full_blocks: int


class Span(NamedTuple):
    """A segment on a lane, from `start` on, in microseconds."""

    lane: int
    start: float
    segment: Segment
    cost: Cost

    @property
    def end(self) -> float:
        return self.start + self.cost.us


@dataclass(frozen=True)
class Timeline:
    """When and where every segment of a plan runs; time 0 is when the first CTAs start.

    In a simulation a lane is what one cluster occupies: an SM or several. When there are more
    clusters than lanes, the next cluster starts on the first free lane, as on the GPU.

    In a recording (`fa3.tools.recording`) a lane is an SM. There may be gaps, and a tile may begin
    shortly before the previous one ends: its warpgroups take turns.
    """

    spans: tuple[Span, ...]
    num_lanes: int

    @classmethod
    def of(
        cls, schedule: Schedule, num_lanes: int, cost_of: Callable[[Segment], Cost]
    ) -> "Timeline":
        """Simulate a schedule's clusters on at most `num_lanes` lanes."""
        num_lanes = min(schedule.num_clusters, num_lanes)
        free = [(0.0, lane) for lane in range(num_lanes)]
        spans = []
        for cluster in range(schedule.num_clusters):
            now, lane = heapq.heappop(free)
            for segment in walk(schedule, cluster):
                span = Span(lane, now, segment, cost_of(segment))
                spans.append(span)
                now = span.end
            heapq.heappush(free, (now, lane))
        return cls(tuple(spans), num_lanes)

    def stretched(self, us: float) -> "Timeline":
        """The timeline with all times scaled, so that the last segment ends at `us`."""
        factor = us / self.us if self.us else 1.0
        spans = (
            span._replace(
                start=span.start * factor, cost=span.cost._replace(us=span.cost.us * factor)
            )
            for span in self.spans
        )
        return Timeline(tuple(spans), self.num_lanes)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """For every span its end, or the start of the lane's next span if that is earlier."""
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
        return sum(span.cost.blocks for span in self.spans)

    @property
    def full_blocks(self) -> int:
        """Key blocks that need no mask."""
        return sum(span.cost.full_blocks for span in self.spans)

    @property
    def balance(self) -> float:
        """Mean work of a lane over the whole time: 1 when all begin and finish together."""
        return self.mean / self.us if self.us else 1.0
