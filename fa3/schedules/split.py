"""Schedules in host tables: whole tiles (`TileList`), and parts of tiles (`SplitTiles`).

Tile times come from the cost model (`TiledProblem.times`); `fa3.running.memory` uploads the table.
Stream-K: all clusters end together. Tiles are laid end to end and cut into a stretch for each
cluster (`fill_clusters`). Where that leaves clusters idle, long tiles are cut into parts next to
whole short tiles (`give_parts`). The forward kernel merges the parts.
Source: Osama et al., Stream-K (arXiv 2301.03598).
"""

import bisect
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fa3.complaints import shown
from fa3.primitives.arithmetic import larger
from fa3.schedules.order import (
    END,
    ONLY,
    NumberedPart,
    Segment,
    Segments,
    TableCursor,
    TableSchedule,
    Tile,
    TileOrder,
    check_parts,
    check_tiles,
    entries_of,
    number_parts,
)
from fa3.schedules.ragged import RaggedOrder, TileRecord, segment_of
from fa3.scores.masks import Blocks

MANY_TILES = 2560
"""Up to this many tiles are all assigned one by one, which costs the host 0.2 us each."""

LATE = 1.005  # last cluster's end over the mean end, from which another assignment is tried
STEPS = 8  # with more tiles, the first ones are assigned in at most this many steps of whole rounds

LAST_ROUNDS = 8
"""Rounds after those steps that are assigned one by one; more rounds if their tiles are short."""

LAST_WAVES = 2
"""Waves of tiles in the last head group where others are smaller, or half of a whole group if that
is more. With half a group head size 128 is 1.5% faster than with a whole one. At 256 half a group
is one wave, and 1.5% slower."""

TICKS = 1 << 20  # time of the longest tile, in the integer ticks of an assignment


@dataclass(frozen=True, eq=False)
class TileList(TableSchedule):
    """Each cluster has a column of tile numbers."""

    order: TileOrder
    num_clusters: int
    table: np.ndarray

    fields: ClassVar[int] = 1
    name: ClassVar[str] = "list"

    @classmethod
    def make(cls, tiled) -> "TileList":
        order, tiles = tiled.order, None
        if tiled.spreads_reads:
            whole = order.heads_per_group
            few = max(1, tiled.heads_at_once // tiled.config.cluster_h)
            in_waves = -(-LAST_WAVES * tiled.lanes // order.num_m_blocks)
            last = max(few, whole // 2, min(whole, in_waves))
            tiles = order.in_smaller_groups(few, last)
        return cls.balanced(order, tiled.num_clusters, tiled.times, tiles)

    @classmethod
    def balanced(
        cls, order: TileOrder, num_clusters: int, times: np.ndarray, tiles: np.ndarray | None = None
    ) -> "TileList":
        """Assign the tiles so that all clusters end about together.
        `times` says how long each tile takes, by its number, in any unit; `tiles` in which sequence
        they come, if not by number."""
        tiles = np.arange(order.num_tiles) if tiles is None else tiles
        owners = balance(times[tiles], num_clusters)
        return cls(order, num_clusters, columns_of_owners(tiles, owners, num_clusters))

    @classmethod
    def in_order_of(cls, tiled, arrange: Callable[[list[Tile]], Iterable[Tile]]) -> "TileList":
        """Assign tiles in the order of the caller's function.
        Each goes to the first free cluster. Raises TypeError if the result or an element has the
        wrong type; ValueError if a tile is foreign, comes twice or is left out."""
        order, num_clusters = tiled.order, tiled.num_clusters
        numbers = {order.tile(number): number for number in range(order.num_tiles)}
        arranged, places = arrange(list(numbers)), []
        if not isinstance(arranged, Iterable):
            raise TypeError(f"schedule must return the tiles in their order, got {shown(arranged)}")
        for position, element in enumerate(arranged):
            tile = as_tile(element, position)
            if tile not in numbers:
                raise ValueError(
                    f"schedule gives {tile} at {position}, which is no tile of the problem: "
                    f"tiles have m_block < {order.num_m_blocks}, head < {order.num_heads}, "
                    f"batch < {order.batch}"
                )
            places.append(numbers[tile])
        indices = np.array(places, np.int64)
        check_tiles(order, indices)
        ticks = in_ticks(tiled.times[indices])
        owners, _ = assign_greedily(ticks, np.zeros(num_clusters, np.int64))
        return cls(order, num_clusters, columns_of_owners(indices, owners, num_clusters))

    @property
    def owners(self) -> np.ndarray:
        """The cluster of every tile, by the tile's number."""
        owners = np.empty(self.order.num_tiles, np.int64)
        owners[self.entries[:, 0]] = super().owners
        return owners

    def check(self, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
        check_tiles(self.order, entries_of(self)[:, 0])

    def segment(self, cursor: TableCursor) -> Segment:
        return Segment(self.order.tile(cursor.entry[0]))


def as_tile(element: object, position: int) -> Tile:
    """An element of a user's order as a `Tile`; or raise TypeError."""
    try:
        return Tile(*map(operator.index, element))
    except TypeError:
        message = f"schedule gives {element!r:.200} at {position}, not a Tile(m_block, head, batch)"
        raise TypeError(message) from None


def columns_of_owners(entries: np.ndarray, owners: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return a table with a column for each cluster, then `END`.
    Entries are (n,) or (n, fields) integers, the table (rounds, num_clusters, ...) int32, flat."""
    # NumPy's stable sort is a radix sort for integers of up to 16 bits.
    by_owner = np.argsort(owners.astype(np.min_scalar_type(num_clusters)), kind="stable")
    counts = np.bincount(owners, minlength=num_clusters)
    rows = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (counts.max(initial=0) + 1, num_clusters, *entries.shape[1:])
    table = np.full(shape, END, np.int32)
    table[rows, owners[by_owner]] = entries[by_owner]
    return table.reshape(-1)


def balance(times: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return each tile's cluster, so that all end about together.

    Greedy: each tile goes to the first free cluster. If there are many tiles, or that ends too
    late, the first ones are assigned in whole rounds. A round's longest tile goes to the cluster
    with the least work: clusters stay within about the longest tile of each other. The last tiles
    even this out: greedily in their order, or longest-first if that order ends too late.
    """
    ticks = in_ticks(times)
    free_at = np.zeros(num_clusters, np.int64)
    mean = ticks.sum() / max(1, num_clusters)
    late = max(mean + ticks.min(initial=TICKS), LATE * mean)
    if len(ticks) <= MANY_TILES:
        owners, end = assign_greedily(ticks, free_at)
        if end <= late or len(ticks) <= num_clusters:
            return owners
    owners = np.empty(len(ticks), np.int64)
    # Whole rounds, so that the tiles after them can even out the rest.
    enough = np.searchsorted(np.cumsum(ticks[::-1]), num_clusters * ticks.max())
    last_tiles = max(int(enough), LAST_ROUNDS * num_clusters)
    rounds = max(0, len(ticks) - last_tiles) // num_clusters
    bounds = np.linspace(0, rounds, min(rounds, STEPS) + 1).astype(int) * num_clusters
    for first, end in itertools.pairwise(bounds.tolist()):
        hands = ticks[first:end].reshape(-1, num_clusters)
        work = hands[::2].sum(axis=0) + hands[1::2, ::-1].sum(axis=0)
        cluster = np.empty(num_clusters, np.int64)
        cluster[np.argsort(-work)] = np.argsort(free_at)
        free_at[cluster] += work
        dealt = owners[first:end].reshape(-1, num_clusters)
        dealt[::2], dealt[1::2] = cluster, cluster[::-1]
    last = ticks[rounds * num_clusters :]
    by_order, end = assign_greedily(last, free_at)
    if end > late:
        longest_first = np.argsort(-last, kind="stable")
        by_length, earlier_end = assign_greedily(last[longest_first], free_at)
        if earlier_end < end:
            by_order[longest_first] = by_length
    owners[rounds * num_clusters :] = by_order
    return owners


def in_ticks(times: np.ndarray) -> np.ndarray:
    """Times as integers; the longest becomes `TICKS`."""
    return np.rint(times * (TICKS / times.max(initial=1e-9))).astype(np.int64)


def assign_greedily(ticks: np.ndarray, free_at: np.ndarray) -> tuple[np.ndarray, int]:
    """Give each unit of work, in order, to the first free cluster.
    Returns the cluster of each unit, and when the last cluster is done."""
    # A heap entry is time * num_clusters + cluster: one integer compares faster than a pair.
    num_clusters = len(free_at)
    heap = (free_at * num_clusters + np.arange(num_clusters)).tolist()
    heapq.heapify(heap)
    replace = heapq.heapreplace
    taken = [replace(heap, heap[0] + step) for step in (ticks * num_clusters).tolist()]
    if not taken:
        return np.empty(0, np.int64), int(free_at.max(initial=0))
    return np.array(taken) % num_clusters, max(heap) // num_clusters


FIELDS = 4
"""Integers of a segment in the table: tile, first and end key block, `NumberedPart.number`."""

MERGE_US = 3.5
"""Microseconds that the part of a tile takes in addition that is done last, and merges all. The cut
arranges that this is the first: it ends with its cluster, when the others' results are there."""

LEAVE_US = 1.0
"""The same for a part whose result is left in memory. Both from a fit of 64 cuts that were timed
(docs/experiments.md). Predictions multiply both by a factor that is fitted for each tile
(`TileCosts`). The cut must not: fitting it would change the plans that it is fitted to."""

TRIES = 4  # steps of the search for the level, the time up to which clusters are filled
PACKINGS = 5  # steps of the search for a lower level, at which tiles are packed instead
SHORTEST = 2  # key blocks of the shortest part: a shorter one costs more than it evens out


class KeyRanges(NamedTuple):
    """The tiles to cut, and what a cut costs."""

    # first_blocks, end_blocks: key blocks [first, end) of every tile, by its number.
    first_blocks: np.ndarray
    end_blocks: np.ndarray
    unit: float  # overhead of a segment (prologue, epilogue), in the time of a key block
    # merge, leave: further overhead of a tile's first part, and of any other, in the same unit.
    merge: float
    leave: float
    # What masked blocks add to each tile, in the same unit; its last part has them.
    masks: np.ndarray


def end_of_last(
    segments: Segments, times: np.ndarray, merge: float, loads: np.ndarray | None = None
) -> float:
    """When the last cluster is done, given how long each segment takes.
    A part that merges is its cluster's last segment. It waits for the other parts of its tile; the
    merge takes `merge` of its time. `loads` is what each cluster has done before."""
    tile, _, _, owner, partial, merging = segments
    if loads is None:
        loads = np.zeros(owner.max(initial=-1) + 1)
    in_columns = np.argsort(owner, kind="stable")
    sums, done = np.bincount(owner, times, minlength=len(loads)), np.cumsum(times[in_columns])
    ends = np.empty(len(tile))
    ends[in_columns] = done + (loads + sums - np.cumsum(sums))[owner[in_columns]]
    leaves, others_done = partial & ~merging, np.zeros(int(tile.max(initial=0)) + 1)
    np.maximum.at(others_done, tile[leaves], ends[leaves])
    merged = others_done[tile[merging]] + merge
    return float(max((loads + sums).max(initial=0.0), merged.max(initial=0.0)))


@dataclass(frozen=True, eq=False)
class SplitTiles(TableSchedule):
    """Each cluster has a column of segments."""

    order: TileOrder
    num_clusters: int
    table: np.ndarray

    fields: ClassVar[int] = FIELDS
    splits: ClassVar[bool] = True
    name: ClassVar[str] = "split"

    @classmethod
    def make(cls, tiled) -> "SplitTiles":
        """Cut a tiled problem for all clusters, by its tiles' costs."""
        blocks, costs = tiled.blocks_of_tiles(), tiled.costs
        overheads = (us / costs.full_us for us in (costs.tile_us, MERGE_US, LEAVE_US))
        masked = blocks.end - blocks.begin - (blocks.full_end - blocks.full_begin)
        masks = masked * (costs.masked_us / costs.full_us - 1)
        ranges = KeyRanges(blocks.begin, blocks.end, *overheads, masks)
        return cls.cut(tiled.order, tiled.lanes, ranges)

    @classmethod
    def cut(cls, order: TileOrder, num_clusters: int, ranges: KeyRanges) -> "SplitTiles":
        """Cut the last tiles so that clusters end almost together."""
        blocks = ranges.end_blocks - ranges.first_blocks
        whole, dealt, loads = balance_whole_tiles(blocks + ranges.unit, num_clusters)
        cuts = cut_evenly(blocks[whole:], loads, ranges._replace(masks=ranges.masks[whole:]))
        tile, first, end, owner = cuts.T
        tiles = np.concatenate((np.arange(whole), whole + tile))
        begin = ranges.first_blocks[tiles]
        first = begin + np.concatenate((np.zeros(whole, np.int64), first))
        end = begin + np.concatenate((blocks[:whole], end))
        part = number_parts(tiles)
        segments = np.stack((tiles, first, end, part), axis=1)
        # Clusters that get nothing are not launched.
        used, owners = np.unique(np.concatenate((dealt, owner)), return_inverse=True)
        table = columns_of_owners(segments, owners, len(used))
        return cls(order, len(used), table)

    @property
    def num_slots(self) -> int:
        """How many parts of tiles there are."""
        return int((self.entries[:, 3] != ONLY).sum())

    def segments(self, blocks: Blocks) -> Segments:
        tile, first, end, part = self.entries.astype(np.int64).T
        visited = Blocks(*(array[tile] for array in blocks))
        partial = part != ONLY
        # The first part is done last, as tiles are cut, and merges.
        merging = partial & (first == visited.begin)
        return Segments.of(tile, visited.between(first, end), self.owners, partial, merging)

    def check(self, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
        segments = entries_of(self)
        check_tiles(self.order, segments[:, 0], may_repeat=True)
        check_parts(self.order, segments, first_blocks, end_blocks)

    def segment(self, cursor: TableCursor) -> Segment:
        index, first_block, end_block, part = cursor.entry
        return Segment(self.order.tile(index), first_block, end_block, NumberedPart(part))


class RaggedSegmentsCursor(NamedTuple):
    """A CTA's position in the segment table, the segment and tile record."""

    position: int
    entry: tuple
    head: int  # query head
    record: TileRecord  # the tile's record; anything at the end


@dataclass(frozen=True, eq=False)
class RaggedSegments(SplitTiles):
    """`SplitTiles` for packed sequences; `fa3.kernels.segment_table` writes the table.
    A segment names its tile by its number in the table of all tiles (`fa3.schedules.ragged`), where
    its record is."""

    order: RaggedOrder

    name: ClassVar[str] = "packed sequences, tiles split on the GPU"
    is_ragged: ClassVar[bool] = True

    def first(self, cluster) -> RaggedSegmentsCursor:
        """A cursor before the first segment, which may not be written yet."""
        zero = cluster * 0
        record = TileRecord(*(zero for _ in TileRecord._fields))
        return RaggedSegmentsCursor(cluster, (zero,) * FIELDS, zero, record)

    def begin(self, cursor: RaggedSegmentsCursor) -> RaggedSegmentsCursor:
        return self.read(cursor.position)

    def read(self, position) -> RaggedSegmentsCursor:
        cursor = super().read(position)
        return RaggedSegmentsCursor(*cursor, *self.order.tile(larger(cursor.entry[0], 0)))

    def segment(self, cursor: RaggedSegmentsCursor) -> Segment:
        index, first_block, end_block, part = cursor.entry
        whole = segment_of(index, cursor.head, cursor.record)
        return whole._replace(begin=first_block, end=end_block, part=NumberedPart(part))


def balance_whole_tiles(times: np.ndarray, num_clusters: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Assign whole tiles: the most rounds whose imbalance others can even out.
    Returns how many tiles are assigned, the cluster of each, and every cluster's time in blocks."""
    rounds = len(times) // num_clusters
    while rounds > 0:
        whole = rounds * num_clusters
        owners = balance(times[:whole], num_clusters)
        loads = np.bincount(owners, times[:whole], minlength=num_clusters)
        rest = times[whole:].sum()
        if rest == 0 or loads.max() <= (loads.sum() + rest) / num_clusters:
            return whole, owners, loads
        rounds -= 1
    return 0, np.empty(0, np.int64), np.zeros(num_clusters)


def cut_evenly(blocks: np.ndarray, loads: np.ndarray, ranges: KeyRanges) -> np.ndarray:
    """Cut the tiles so that all clusters end together.
    Tiles are laid end to end, or packed if that ends earlier. Cuts are rows, in order: tile number,
    key blocks [first, end) of it, cluster."""
    cuts = cut_in_line(blocks, loads, ranges)
    low = (loads.sum() + (blocks + ranges.unit + ranges.masks).sum()) / len(loads)
    high = soonest = last_end(cuts, blocks, loads, ranges)
    if high <= low:
        return cuts
    lengths, clusters, masks = blocks.tolist(), loads.tolist(), ranges.masks.tolist()
    for _ in range(PACKINGS):
        level = (low + high) / 2
        pieces = give_parts(lengths, clusters, masks, ranges, level)
        if pieces is None:
            low = level
            continue
        packed = in_order(pieces)
        end = last_end(packed, blocks, loads, ranges)
        # A last part that comes after whole tiles of its cluster may keep a merge waiting.
        if end < soonest:
            cuts, soonest = packed, end
        high = min(level, end)
    return cuts


def in_order(pieces: list[int]) -> np.ndarray:
    """Cuts, a flat list, as rows in the order of tiles."""
    cuts = np.array(pieces, np.int64).reshape(-1, 4)
    return cuts[np.lexsort((cuts[:, 1], cuts[:, 0]))]


def last_end(cuts: np.ndarray, blocks: np.ndarray, loads: np.ndarray, ranges: KeyRanges) -> float:
    """When the last cluster is done."""
    tile, first, end, owner = cuts.T
    is_last, leaves, count = end == blocks[tile], first > 0, end - first
    merges = ~leaves & ~is_last
    masks = ranges.masks[tile] * is_last
    times = count + ranges.unit + leaves * ranges.leave + merges * ranges.merge + masks
    segments = Segments(tile, count, masks, owner, leaves | merges, merges)
    return end_of_last(segments, times, ranges.merge, loads)


def cut_in_line(blocks: np.ndarray, loads: np.ndarray, ranges: KeyRanges) -> np.ndarray:
    """Cut the tiles, laid end to end, into one stretch per cluster."""
    lengths, clusters = blocks.tolist(), loads.tolist()
    low = (loads.sum() + blocks.sum() + ranges.unit * len(blocks)) / len(loads)
    level, high, pieces = low + ranges.leave + SHORTEST, None, None
    tries = 0
    while tries < TRIES or pieces is None:
        filled, left = fill_clusters(lengths, clusters, ranges, level)
        if left > 0:
            low = level
        else:
            high, pieces = level, filled
        # Shares the tiles left over (positive) or the unused room (negative) among the clusters.
        level += left / len(clusters)
        level = low + SHORTEST if high is None else min(max(level, (3 * low + high) / 4), high)
        tries += 1
    return in_order(pieces)


def fill_clusters(
    lengths: list[int], loads: list[float], ranges: KeyRanges, level: float
) -> tuple[list[int], float]:
    """Fill one cluster after another up to a level.

    Where the room is too small for a part, it takes whole tiles from the end of the order: under
    a causal mask these are the shortest. Returns the cuts as a flat list; and the time of the tiles
    left over or, if none are, minus the clusters' unused room.
    """
    unit, merge = ranges.unit, ranges.merge
    # Parts but the first are there a merge before the level.
    first_part, later_part = unit + merge, unit + ranges.leave + merge
    pieces, tile, begin, last, spare = [], 0, 0, len(lengths) - 1, 0.0
    for owner, load in enumerate(loads):
        room = level - load
        while tile <= last:
            rest = lengths[tile] - begin
            cost = rest + (later_part if begin else unit)
            if cost > room:
                break
            pieces += (tile, begin, begin + rest, owner)
            room -= cost - merge if begin else cost
            tile, begin = tile + 1, 0
        if tile <= last:
            part_cost = later_part if begin else first_part
            fitting = min(int(room - part_cost), rest - SHORTEST)
            if fitting >= SHORTEST:
                pieces += (tile, begin, begin + fitting, owner)
                begin, room = begin + fitting, room - fitting - part_cost
            else:
                while last > tile and lengths[last] + unit <= room:
                    pieces += (last, 0, lengths[last], owner)
                    last, room = last - 1, room - lengths[last] - unit
        spare += max(room, 0.0)
    if tile > last:
        return pieces, -spare
    return pieces, sum(lengths[tile : last + 1]) - begin + unit * (last + 1 - tile)


def give_parts(
    lengths: list[int], loads: list[float], masks: list[float], ranges: KeyRanges, level: float
) -> list[int] | None:
    """Give each cluster at most one part, and whole tiles.

    Of a tile that does not fit below the level, each part but the last fills a cluster, up to a
    merge before the level unless it merges. Last parts and whole tiles then go to the other
    clusters, each time the longest that fits. Returns the cuts as a flat list; None if some tiles
    are left over.
    """
    unit, merge = ranges.unit, ranges.merge
    first_part, later_part = unit + merge, unit + ranges.leave + merge
    pieces, items = [], []
    # The most room last; clusters that are launched first get what fills them.
    free = sorted(range(len(loads)), key=loads.__getitem__)[::-1]
    for tile, length in enumerate(lengths):
        begin, cost = 0, length + unit + masks[tile]
        while free and cost > level - loads[free[-1]]:
            owner = free.pop()
            room = level - loads[owner] - (later_part if begin else first_part)
            blocks = min(int(room), length - begin - SHORTEST)
            if blocks < SHORTEST:
                return None
            pieces += (tile, begin, begin + blocks, owner)
            begin += blocks
            cost = length - begin + later_part + masks[tile]
        items.append((cost, tile, begin, length))
    items.sort()
    costs = [item[0] for item in items]
    while items:
        if not free:
            return None
        owner = free.pop()
        room = level - loads[owner]
        while fitting := bisect.bisect_right(costs, room):
            cost, tile, begin, end = items.pop(fitting - 1)
            del costs[fitting - 1]
            room -= cost - merge if begin else cost
            pieces += (tile, begin, end, owner)
    return pieces
