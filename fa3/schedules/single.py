"""One tile per cluster: the GPU's own block scheduler hands the tiles out in order."""

from dataclasses import dataclass
from typing import ClassVar

from fa3.schedules.order import Planned, Tile, TileOrder


@dataclass(frozen=True)
class SingleTile(Planned):
    """Launch as many clusters as there are tiles; each works on one and leaves."""

    order: TileOrder

    reads_state: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    @property
    def table(self) -> None:
        return None

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

    def tile(self, cursor) -> Tile:
        return self.order.tile(cursor)
