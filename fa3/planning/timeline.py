"""Timelines: which SM works on which tile when, in microseconds; traces of them for Perfetto.

`Plan.simulate` makes them from the cost model, `fa3.tools.recording` from a run on the GPU.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fa3.schedules import Schedule, Segment, walk

PREDICTED, RECORDED = 1, 2  # process ids in a trace; trace viewers take 0 for the idle process


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

    @property
    def name(self) -> str:
        """The tile and, for a part of a tile, its key blocks."""
        tile, segment = self.segment.tile, self.segment
        name = f"rows {tile.m_block}, head {tile.head}, batch {tile.batch}"
        if not segment.is_whole:
            name += f", key blocks {segment.begin} to {segment.end - 1}"
        return name


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

    def trace_events(self, title: str, lane_name: str, recorded: "Timeline | None" = None) -> dict:
        """Return the Trace Event Format that Perfetto and chrome://tracing open.
        A recording is shown as a second process next to this prediction, of lanes with a name."""
        events = self.events(PREDICTED, lane_name)
        if recorded is not None:
            processes = [
                event("M", "process_name", pid, args={"name": name})
                for pid, name in ((PREDICTED, "predicted"), (RECORDED, "recorded"))
            ]
            events = processes + events + recorded.events(RECORDED, "SM")
        return {"traceEvents": events, "otherData": {"problem": title}}

    def events(self, pid: int, lane_name: str) -> list[dict]:
        """The events of one process: a name for every lane, and the tiles."""
        names = [
            event("M", "thread_name", pid, tid=lane, args={"name": f"{lane_name} {lane}"})
            for lane in range(self.num_lanes)
        ]
        tiles = []
        for span, end in zip(self.spans, self.ends, strict=True):
            head, cost, begin = span.segment.tile.head, span.cost, round(span.start, 3)
            # After rounding to nanoseconds, too, no tile may overlap the next one.
            times = {"tid": span.lane, "ts": begin, "dur": round(round(end, 3) - begin, 3)}
            args = {"key blocks": cost.blocks, "unmasked": cost.full_blocks}
            tiles.append(event("X", span.name, pid, cat=f"head {head}", **times, args=args))
        return names + tiles


def event(phase: str, name: str, pid: int, **fields: object) -> dict[str, object]:
    """An event of a process in a trace."""
    return {"ph": phase, "name": name, "pid": pid, **fields}
