"""The load of a plan's clusters: their segments' key blocks, and when the last cluster is done.

`fa3.planning.prediction` predicts a time from a `Load`. That is counted from a schedule's actual
segments (`Load.of`), or estimated from a problem's tiles (`RowLoad`), which is faster: the planner
compares these estimates. Segment times come from `fa3.planning.tile_costs`.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fa3.planning.tile_costs import TileCosts
from fa3.planning.tiled import TiledProblem
from fa3.schedules import Schedule, TileOrder
from fa3.schedules.split import SHORTEST, TimedSegments
from fa3.schedules.tile_list import LATE
from fa3.scores import masks

EXACT_ROUNDS = 1
"""Full rounds at the end that a prediction simulates segment by segment, with the partial one."""

CUT_ROUNDS = 1.5
"""Rounds of tiles that a split schedule cuts into parts: all but the last one or two stay whole."""


class Segments(NamedTuple):
    """Segments in the order in which clusters take them; arrays of one length."""

    # full, masked: key blocks without and with the mask applied.
    full: np.ndarray
    masked: np.ndarray
    # The cluster that works on it, if the schedule fixes that; None if each goes to the first free
    # cluster.
    owner: Any = None
    # Number of its tile; None, as the next ones, if no segment is a part of a tile.
    tile: Any = None
    # partial, merging: whether it is a part, and the one that merges.
    partial: Any = None
    merging: Any = None

    @classmethod
    def of(cls, blocks: masks.Blocks, *owner_and_parts: np.ndarray | None) -> "Segments":
        """Segments with these key blocks."""
        full = blocks.full_end - blocks.full_begin
        return cls(full, blocks.end - blocks.begin - full, *owner_and_parts)

    @property
    def num_partial(self) -> int:
        return 0 if self.partial is None else int(self.partial.sum())

    def times(self, tile: TileCosts) -> np.ndarray:
        """Microseconds of every segment at burst clock, without the schedule's overhead."""
        times = tile.us(self.full, self.masked)
        if self.partial is None:
            return times
        return times + self.partial * tile.part_us_if(self.merging)


def segments_of_tiles(tiled: TiledProblem) -> Segments:
    """A segment for each whole tile, in order."""
    return Segments.of(tiled.blocks_of_tiles())


def segments_of(tiled: TiledProblem, schedule: Schedule) -> Segments:
    """The segments of a schedule's clusters."""
    parts = schedule.parts
    if parts is None:
        return Segments.of(tiled.blocks_of_tiles(), schedule.owners)
    blocks = masks.Blocks(*(array[parts.tile] for array in tiled.blocks_of_tiles()))
    # The first part is done last, as tiles are cut, and merges.
    merging = parts.is_part & (parts.first == blocks.begin)
    owner_and_parts = schedule.owners, parts.tile, parts.is_part, merging
    return Segments.of(blocks.between(parts.first, parts.end), *owner_and_parts)


def end_of_last(times: np.ndarray, segments: Segments, tile: TileCosts) -> float:
    """When the last cluster is done, if each segment has its cluster."""
    owner, merging = segments.owner, segments.merging
    if segments.tile is None:
        return float(np.bincount(owner, times).max(initial=0.0))
    timed = TimedSegments(segments.tile, owner, times, segments.partial & ~merging, merging)
    return timed.end(np.zeros(owner.max(initial=-1) + 1), tile.part_us_if(True))


def makespan(times: np.ndarray, lanes: int) -> float:
    """When the last lane is done, if each takes the next segment as soon as it is free.
    Only the last rounds are simulated; the earlier ones count by their mean, since greedy
    assignment evens them out."""
    head = tiles_before(len(times), lanes)
    return greedy_end(times[head:], lanes, float(times[:head].sum()) / lanes)


def tiles_before(count: int, lanes: int) -> int:
    """Segments that are not simulated."""
    return max(0, count // lanes - EXACT_ROUNDS) * lanes


def greedy_end(times: np.ndarray, lanes: int, level: float) -> float:
    """When the last lane is done, if all are free at `level` and then take segments greedily."""
    units = times.tolist()
    free_at = [level + us for us in units[:lanes]]
    heapq.heapify(free_at)
    replace_first = heapq.heapreplace
    for us in units[lanes:]:
        replace_first(free_at, free_at[0] + us)
    return max(free_at, default=level)


class Load(NamedTuple):
    """Times of all segments, in microseconds, without the schedule's overhead per segment."""

    last: float  # when the last cluster is done
    # total, of_blocks: sum over all segments, and over their key blocks alone.
    total: float
    of_blocks: float
    longest: float  # time of the longest segment
    num_segments: int  # how many segments there are
    rounds: int  # segments of the cluster that has the most
    # blocks, blocks_of_parts: key blocks of all segments, and of the parts of tiles.
    blocks: float
    blocks_of_parts: float = 0.0
    num_parts: int = 0  # number of parts of tiles

    @classmethod
    def of(cls, segments: Segments, tile: TileCosts, lanes: int) -> "Load":
        """The load of given segments; the GPU holds `lanes` clusters at a time."""
        times = segments.times(tile)
        if segments.owner is None:
            last, rounds = makespan(times, lanes), -(-len(times) // lanes)
        else:
            last = end_of_last(times, segments, tile)
            rounds = int(np.bincount(segments.owner).max(initial=0))
        blocks = segments.full + segments.masked
        of_parts = 0.0 if segments.partial is None else blocks[segments.partial].sum()
        of_blocks = segments.full.sum() * tile.full_us + segments.masked.sum() * tile.masked_us
        return cls(
            last,
            total=float(times.sum()),
            of_blocks=float(of_blocks),
            longest=float(times.max(initial=0.0)),
            num_segments=len(times),
            rounds=rounds,
            blocks=float(blocks.sum()),
            blocks_of_parts=float(of_parts),
            num_parts=segments.num_partial,
        )


@dataclass(frozen=True)
class RowLoad:
    """The tiles of an order, described by their rows: tiles of the same m_block take equally long.
    Gives the `Load` of whole tiles and estimates the `Load` of parts, without a step for each tile.
    """

    order: TileOrder
    lanes: int  # clusters that the GPU holds at a time
    tile: TileCosts
    times: np.ndarray  # microseconds of a tile, by its m_block
    # blocks, of_blocks: key blocks of all tiles, and the microseconds that they take.
    blocks: float
    of_blocks: float

    @classmethod
    def of(cls, tiled: TiledProblem) -> "RowLoad":
        order, tile = tiled.order, tiled.costs
        rows = Segments.of(tiled.blocks_of_rows)
        times, heads = tile.us(rows.full, rows.masked), order.num_heads * order.batch
        of_blocks = float(times.sum()) - len(times) * tile.tile_us
        blocks = float(rows.full.sum() + rows.masked.sum())
        return cls(order, tiled.lanes, tile, times, blocks * heads, of_blocks * heads)

    @property
    def total(self) -> float:
        return self.of_blocks + self.order.num_tiles * self.tile.tile_us

    def whole(self, last: float) -> Load:
        """The load of whole tiles, if the last cluster is done at `last`."""
        count, longest = self.order.num_tiles, float(self.times.max(initial=0.0))
        rounds = -(-count // self.lanes)
        return Load(last, self.total, self.of_blocks, longest, count, rounds, self.blocks)

    @cached_property
    def in_equal_rounds(self) -> float | None:
        """When the last tile is done, if all tiles take equally long or each cluster has at most
        one; None if neither holds."""
        times, rounds = self.times, -(-self.order.num_tiles // self.lanes)
        longest = float(times.max(initial=0.0))
        return longest * rounds if rounds <= 1 or times.min() == longest else None

    @cached_property
    def greedy(self) -> Load:
        """The load if each tile goes to the first free cluster."""
        last = self.in_equal_rounds
        return self.whole(self.end_of(self.last_rounds) if last is None else last)

    @property
    def balanced(self) -> Load:
        """About the load of a `TileList`: where greedy assignment ends late, the last tiles are
        sorted longest-first."""
        load = self.greedy
        if self.in_equal_rounds is not None or load.last <= LATE * self.total / self.lanes:
            return load
        longest_first = np.sort(self.last_rounds)[::-1]
        return self.whole(min(load.last, self.end_of(longest_first)))

    @cached_property
    def last_rounds(self) -> np.ndarray:
        """Times of the tiles that are simulated."""
        count = self.order.num_tiles
        return self.times[self.order.m_blocks(count - tiles_before(count, self.lanes))]

    def end_of(self, times: np.ndarray) -> float:
        """When the last of these tiles is done; the tiles before them count by their mean."""
        level = (self.total - float(times.sum())) / self.lanes
        return greedy_end(times, self.lanes, level)

    @property
    def cut_evenly(self) -> Load:
        """About the load of `SplitTiles` at best: one stretch per cluster, all equally long.
        A stretch is whole tiles, counted as one segment, then one part. The tiles' prologues and
        epilogues count as key blocks."""
        tile, tiles = self.tile, self.order.num_tiles
        stretches = max(1, min(self.lanes, int(self.blocks) // SHORTEST))
        of_blocks = self.of_blocks + max(0, tiles - stretches) * tile.tile_us
        share_of_parts = min(1.0, CUT_ROUNDS * stretches / max(1, tiles))
        part = tile.tile_us + of_blocks / stretches * share_of_parts + tile.part_us
        whole = tile.tile_us + of_blocks / stretches * (1 - share_of_parts)
        return Load(
            last=whole + part,
            total=stretches * (whole + part),
            of_blocks=of_blocks,
            longest=max(whole, part),
            num_segments=2 * stretches,
            rounds=2,
            blocks=self.blocks,
            blocks_of_parts=self.blocks * share_of_parts,
            num_parts=stretches,
        )
