"""Explicit list: Python deals the tiles, the kernel reads its share from device memory."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa3.schedules.tiles import Tile, TileOrder

END = -1
"""Stands behind the last tile of every cluster."""


class Cursor(NamedTuple):
    """Where a cluster stands in the table, and what stands there."""

    position: int
    entry: int


@dataclass(frozen=True, eq=False)
class TileList:
    """Each cluster has a column of tile numbers, worked on from the top down to `END`.

    `table` is the matrix (rounds, num_clusters) of int32, flat in row order: a numpy array on the
    host, a tensor on the device. The next entry is read while the kernel works on the present
    tile, so the read costs nothing.
    """

    order: TileOrder
    num_clusters: int
    table: np.ndarray

    @classmethod
    def balanced(
        cls, order: TileOrder, num_clusters: int, durations: Sequence[float]
    ) -> "TileList":
        """Deal the tiles in order, each to the cluster that is free first.

        Args:
            durations: how long a tile of each m_block takes, in any unit.
        """
        return cls.dealt(order, num_clusters, enumerate(order.m_blocks()), durations)

    @classmethod
    def in_order_of(
        cls,
        order: TileOrder,
        num_clusters: int,
        tiles: Iterable[Tile],
        durations: Sequence[float],
    ) -> "TileList":
        """Deal the tiles as they come, each to the cluster that is free first.

        Raises:
            ValueError: a tile is none of the problem's, comes twice, or is left out.
        """
        place: dict[int, int] = {}
        for position, tile in enumerate(tiles):
            tile = Tile(*tile)
            if not order.contains(tile):
                raise ValueError(f"schedule gives {tile} at {position}, no tile of the problem")
            first = place.setdefault(order.index(tile), position)
            if first != position:
                raise ValueError(f"schedule gives {tile} twice, at {first} and {position}")
        if len(place) < order.num_tiles:
            missing = next(index for index in range(order.num_tiles) if index not in place)
            raise ValueError(f"schedule leaves out {order.tile(missing)}")
        numbered = ((index, order.tile(index).m_block) for index in place)
        return cls.dealt(order, num_clusters, numbered, durations)

    @classmethod
    def dealt(
        cls,
        order: TileOrder,
        num_clusters: int,
        numbered: Iterable[tuple[int, int]],
        durations: Sequence[float],
    ) -> "TileList":
        """Deal (index, m_block) as they come, each to the cluster that is free first."""
        columns: list[list[int]] = [[] for _ in range(num_clusters)]
        free_at = [(0.0, cluster) for cluster in range(num_clusters)]
        for index, m_block in numbered:
            time, cluster = free_at[0]
            columns[cluster].append(index)
            heapq.heapreplace(free_at, (time + durations[m_block], cluster))
        table = np.full((max(map(len, columns), default=0) + 1, num_clusters), END, np.int32)
        for cluster, column in enumerate(columns):
            table[: len(column), cluster] = column
        return cls(order, num_clusters, table.reshape(-1))

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, table) -> "TileList":
        return cls(order, num_clusters, table)

    def first(self, cluster) -> Cursor:
        return self.read(cluster)

    def next(self, cursor: Cursor) -> Cursor:
        return self.read(cursor.position + self.num_clusters)

    def read(self, position) -> Cursor:
        entry = self.table[position]
        return Cursor(position, int(entry) if isinstance(entry, np.integer) else entry)

    def is_valid(self, cursor: Cursor):
        return cursor.entry != END

    def tile(self, cursor: Cursor) -> Tile:
        return self.order.tile(cursor.entry)
