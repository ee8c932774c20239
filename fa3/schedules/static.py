"""Static schedule: as many persistent clusters as the GPU holds, each with a fixed set of tiles."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fa3.schedules.order import Planned, TileOrder
from fa3.schedules.segment import Segment


@dataclass(frozen=True)
class StaticPersistent(Planned):
    """Deal the ordered tiles to `num_clusters` clusters in rounds, odd rounds in reverse.

    Cluster c takes tile r * num_clusters + c in an even round r; in an odd round the clusters take
    the round's tiles in reverse order. The order is longest-first: in one direction only, cluster
    0 would get the longest tile of every round.
    """

    order: TileOrder
    num_clusters: int

    name: ClassVar[str] = "static"
    is_searched: ClassVar[bool] = False
    table: ClassVar[None] = None

    @classmethod
    def load(cls, rows):
        return rows.snake

    @property
    def owners(self) -> np.ndarray:
        turn, place = np.divmod(np.arange(self.order.num_tiles), self.num_clusters)
        return np.where(turn % 2, self.num_clusters - 1 - place, place)

    def first(self, cluster):
        return cluster

    def next(self, cursor):
        position = cursor % self.num_clusters
        return cursor + 2 * (self.num_clusters - position) - 1

    def is_valid(self, cursor):
        return cursor < self.order.num_tiles

    def segment(self, cursor) -> Segment:
        return Segment(self.order.tile(cursor))
