"""Which SM works on which tile when, in microseconds; a trace of it for Perfetto."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa3.schedules import Schedule, Tile, walk


class Cost(NamedTuple):
    """What a tile or a part of one takes: time, key blocks, and how many of these need no mask."""

    us: float
    blocks: int
    full_blocks: int


class Span(NamedTuple):
    """A tile's stay on a lane, from `start` on, in microseconds."""

    lane: int
    start: float
    tile: Tile
    cost: Cost

    @property
    def end(self) -> float:
        return self.start + self.cost.us


@dataclass(frozen=True)
class Timeline:
    """Every tile of a plan with its place in time; 0 is when the first CTAs start.

    A lane is what holds one cluster: an SM, or several. When there are more clusters than lanes,
    the next cluster starts on the lane that is free first, as the GPU does it.
    """

    spans: tuple[Span, ...]
    num_lanes: int

    @classmethod
    def of(cls, schedule: Schedule, num_lanes: int, cost_of: Callable[[Tile], Cost]) -> "Timeline":
        """Follow a schedule's clusters on at most `num_lanes` lanes."""
        num_lanes = min(schedule.num_clusters, num_lanes)
        free = [(0.0, lane) for lane in range(num_lanes)]
        spans = []
        for cluster in range(schedule.num_clusters):
            now, lane = heapq.heappop(free)
            for tile in walk(schedule, cluster):
                span = Span(lane, now, tile, cost_of(tile))
                spans.append(span)
                now = span.end
            heapq.heappush(free, (now, lane))
        return cls(tuple(spans), num_lanes)

    def stretched(self, us: float) -> "Timeline":
        """The same with every tile slowed alike, so that the last one ends at `us`."""
        factor = us / self.us if self.us else 1.0
        spans = (
            span._replace(
                start=span.start * factor, cost=span.cost._replace(us=span.cost.us * factor)
            )
            for span in self.spans
        )
        return Timeline(tuple(spans), self.num_lanes)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Microseconds of work of every lane."""
        busy = [0.0] * self.num_lanes
        for span in self.spans:
            busy[span.lane] += span.cost.us
        return tuple(busy)

    @property
    def us(self) -> float:
        """When the last tile ends."""
        return max(self.busy, default=0.0)

    @property
    def mean(self) -> float:
        """Mean work of a lane."""
        return sum(self.busy) / max(1, self.num_lanes)

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
        """Mean work of a lane over the most: 1 when all finish together."""
        return self.mean / self.us if self.us else 1.0

    def trace_events(self, title: str, lane_name: str) -> dict:
        """The Trace Event Format that Perfetto and chrome://tracing open."""
        names = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": lane,
                "args": {"name": f"{lane_name} {lane}"},
            }
            for lane in range(self.num_lanes)
        ]
        tiles = [
            {
                "ph": "X",
                "name": f"rows {span.tile.m_block}, head {span.tile.head}, batch {span.tile.batch}",
                "cat": f"head {span.tile.head}",
                "pid": 0,
                "tid": span.lane,
                "ts": round(span.start, 3),
                "dur": round(span.cost.us, 3),
                "args": {"key blocks": span.cost.blocks, "unmasked": span.cost.full_blocks},
            }
            for span in self.spans
        ]
        return {"traceEvents": names + tiles, "otherData": {"problem": title}}
