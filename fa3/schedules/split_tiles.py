"""Stream-K: whole tiles first, then parts of tiles, cut so that all clusters end together.

Source: Osama et al., Stream-K (arXiv 2301.03598).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fa3.schedules.tile_list import deal
from fa3.schedules.tiles import Planned, TileOrder

END = -1
"""Stands behind the last unit of every cluster."""

WHOLE = -1
"""The slot of a unit that is a whole tile: its output goes where it belongs."""

UNIT_FIELDS = 5
"""Integers of a unit in the table: tile number, first key block, end key block, slot, record."""

RECORD_FIELDS = 8
"""Integers of a record, as `fa3.primitives.workspace` lays them out."""

SHORTEST = 2
"""Key blocks of the shortest part: a shorter one costs more than it evens out."""


class Unit(NamedTuple):
    """A part of a tile: its key blocks [first_block, end_block).

    `slot` is where the part's output and log-sum-exp go, and `record` says where those of the
    other parts are; `WHOLE` if there are none.
    """

    m_block: int
    head: int
    batch: int
    first_block: int
    end_block: int
    slot: int
    record: int


class Cursor(NamedTuple):
    """Where a cluster stands in the table, and the unit that stands there."""

    position: int
    index: int
    first_block: int
    end_block: int
    slot: int
    record: int


class KeyRanges(NamedTuple):
    """What a cut goes by.

    Fields:
        first_blocks, end_blocks: key blocks of every tile, by its number.
        unit: what a unit costs beside its blocks, in blocks.
        part: what a part costs more than that, in blocks.
    """

    first_blocks: np.ndarray
    end_blocks: np.ndarray
    unit: float
    part: float


class Pieces(NamedTuple):
    """Parts of tiles, in order: tile number, key blocks [first, end), cluster."""

    tile: np.ndarray
    first: np.ndarray
    end: np.ndarray
    owner: np.ndarray


@dataclass(frozen=True, eq=False)
class SplitTiles(Planned):
    """Each cluster has a column of units in a table, worked on from the top down to `END`.

    Fields:
        table: (rounds, num_clusters, 5) int32, flat in row order: a numpy array on the host, a
            tensor on the device.
        records: (tiles in parts, 8) int32: m_block, head, batch, first slot, parts; host only.
    """

    order: TileOrder
    num_clusters: int
    table: np.ndarray
    records: np.ndarray | None = None

    reads_state: ClassVar[bool] = True
    splits: ClassVar[bool] = True

    @classmethod
    def cut(cls, order: TileOrder, num_clusters: int, ranges: KeyRanges) -> "SplitTiles":
        """Cut the last tiles of an order so that all clusters end at nearly the same time."""
        blocks = ranges.end_blocks - ranges.first_blocks
        whole, dealt, loads = deal_whole_tiles(blocks + ranges.unit, num_clusters, ranges)
        pieces = cut_evenly(blocks[whole:], loads, ranges)
        tiles = np.concatenate((np.arange(whole), whole + pieces.tile))
        first, end = ranges.first_blocks[tiles].copy(), ranges.end_blocks[tiles].copy()
        end[whole:] = first[whole:] + pieces.end
        first[whole:] += pieces.first
        parts = np.bincount(tiles, minlength=order.num_tiles)
        is_part = parts[tiles] > 1
        slots = np.where(is_part, np.cumsum(is_part) - 1, WHOLE)
        owners = np.concatenate((dealt, pieces.owner))
        split = np.flatnonzero(parts > 1)
        of_tile = np.full(order.num_tiles, WHOLE)
        of_tile[split] = np.arange(len(split))
        units = np.stack((tiles, first, end, slots, of_tile[tiles]), axis=1)
        table = cls.table_of(units, owners, num_clusters)
        records = np.zeros((len(split), RECORD_FIELDS), np.int32)
        counts = parts[split]
        for row, tile in enumerate(split.tolist()):
            records[row, :3] = order.tile(tile)
        records[:, 3] = np.cumsum(counts) - counts
        records[:, 4] = counts
        return cls(order, num_clusters, table, records)

    @staticmethod
    def table_of(units: np.ndarray, owners: np.ndarray, num_clusters: int) -> np.ndarray:
        """Put every unit into the column of its owner, in the units' order."""
        by_owner = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=num_clusters)
        rows = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.full((counts.max(initial=0) + 1, num_clusters, UNIT_FIELDS), END, np.int32)
        table[rows, owners[by_owner]] = units[by_owner]
        return table.reshape(-1)

    @property
    def num_slots(self) -> int:
        """Parts of tiles."""
        return int(self.records[:, 4].sum())

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, table) -> "SplitTiles":
        return cls(order, num_clusters, table)

    def first(self, cluster) -> Cursor:
        return self.read(cluster)

    def next(self, cursor: Cursor) -> Cursor:
        return self.read(cursor.position + self.num_clusters)

    def read(self, position) -> Cursor:
        entries = (self.table[position * UNIT_FIELDS + i] for i in range(UNIT_FIELDS))
        return Cursor(position, *(int(n) if isinstance(n, np.integer) else n for n in entries))

    def is_valid(self, cursor: Cursor):
        return cursor.index != END

    def tile(self, cursor: Cursor) -> Unit:
        tile = self.order.tile(cursor.index)
        return Unit(*tile, *cursor[2:])


def deal_whole_tiles(
    times: np.ndarray, num_clusters: int, ranges: KeyRanges
) -> tuple[int, np.ndarray, np.ndarray]:
    """Deal as many whole rounds of tiles as the tiles behind them can even out.

    Returns:
        how many tiles are dealt, the cluster of each, and every cluster's time.
    """
    rounds = len(times) // num_clusters
    while rounds > 0:
        whole = rounds * num_clusters
        owners = deal(times[:whole], num_clusters)
        loads = np.bincount(owners, times[:whole], minlength=num_clusters)
        rest = times[whole:].sum()
        level = (loads.sum() + rest) / num_clusters + ranges.unit + ranges.part
        if rest == 0 or loads.max() + ranges.unit + ranges.part <= level:
            return whole, owners, loads
        rounds -= 1
    return 0, np.empty(0, np.int64), np.zeros(num_clusters)


def cut_evenly(blocks: np.ndarray, loads: np.ndarray, ranges: KeyRanges) -> Pieces:
    """Lay tiles end to end and cut them into a stretch for each cluster (wrap-around rule).

    A stretch may begin and end inside a tile; what a part costs is counted once for each.
    """
    none = np.empty(0, np.int64)
    if not len(blocks):
        return Pieces(none, none, none, none)
    times = blocks + ranges.unit
    level = (loads.sum() + times.sum()) / len(loads) + ranges.unit + ranges.part
    gaps = np.maximum(level - loads - ranges.unit - ranges.part, 0.0)
    cuts = np.cumsum(gaps * (times.sum() / gaps.sum()))[:-1]
    starts = np.cumsum(times) - times
    tile = np.searchsorted(starts, cuts, side="right") - 1
    inside = np.rint(cuts - starts[tile] - ranges.unit).astype(np.int64)
    inside = np.where(inside < SHORTEST, 0, inside)
    inside = np.where(inside > blocks[tile] - SHORTEST, blocks[tile], inside)
    first_block = np.cumsum(blocks) - blocks
    borders = first_block[tile] + inside
    begins = np.union1d(first_block, borders[borders < blocks.sum()])
    ends = np.append(begins[1:], blocks.sum())
    tile = np.searchsorted(first_block, begins, side="right") - 1
    owner = np.searchsorted(borders, begins, side="right")
    return Pieces(tile, begins - first_block[tile], ends - first_block[tile], owner)
