"""Single schedule: one tile per cluster; the GPU's block scheduler starts the clusters in order."""

from dataclasses import dataclass
from typing import ClassVar

from fa3.schedules.order import Planned, TileOrder
from fa3.schedules.segment import Segment


@dataclass(frozen=True)
class SingleTile(Planned):
    """Launch as many clusters as there are tiles; each works on one tile and exits."""

    order: TileOrder

    name: ClassVar[str] = "single"
    table: ClassVar[None] = None
    is_persistent: ClassVar[bool] = False
    is_searched: ClassVar[bool] = False

    @classmethod
    def make(cls, tiled) -> "SingleTile":
        return cls(tiled.order)

    @classmethod
    def load(cls, rows):
        return rows.greedy

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, table) -> "SingleTile":
        return cls(order)

    @property
    def num_clusters(self):
        return self.order.num_tiles

    def first(self, cluster):
        return cluster

    def next(self, cursor):
        return self.order.num_tiles

    def is_valid(self, cursor):
        return cursor < self.order.num_tiles

    def segment(self, cursor) -> Segment:
        return Segment(self.order.tile(cursor))
