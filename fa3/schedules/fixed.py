"""Schedules without a table, in which arithmetic gives each cluster its tiles.

The planner never chooses them. A CUDA graph can capture them without a call before.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fa3.schedules.order import Schedule, TileOrder


@dataclass(frozen=True)
class SingleTile(Schedule):
    """As many clusters as tiles; the GPU's block scheduler starts them in order."""

    order: TileOrder

    name: ClassVar[str] = "single"
    table: ClassVar[None] = None
    is_persistent: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False

    @classmethod
    def make(cls, tiled) -> "SingleTile":
        return cls(tiled.order)

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, state) -> "SingleTile":
        return cls(order)

    @property
    def num_clusters(self):
        return self.order.num_tiles

    def next(self, cursor):
        return self.order.num_tiles


@dataclass(frozen=True)
class StaticPersistent(Schedule):
    """Deal the tiles to the clusters in rounds, odd rounds in reverse.
    The order is longest-first: in one direction only, cluster 0 would get the longest tile of every
    round."""

    order: TileOrder
    num_clusters: int

    name: ClassVar[str] = "static"
    is_searched: ClassVar[bool] = False
    table: ClassVar[None] = None

    @property
    def owners(self) -> np.ndarray:
        turn, place = np.divmod(np.arange(self.order.num_tiles), self.num_clusters)
        return np.where(turn % 2, self.num_clusters - 1 - place, place)

    def next(self, cursor):
        position = cursor % self.num_clusters
        return cursor + 2 * (self.num_clusters - position) - 1
