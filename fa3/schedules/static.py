"""Static persistent: as many clusters as the GPU holds, each with a fixed share of the tiles."""

from dataclasses import dataclass
from typing import ClassVar

from fa3.schedules.order import Planned, Tile, TileOrder


@dataclass(frozen=True)
class StaticPersistent(Planned):
    """Deal the ordered tiles to `num_clusters` clusters, back and forth.

    Round r gives cluster c the tile r * num_clusters + c when r is even, and runs the other way
    when r is odd. Tiles shrink along the order, so dealing in one direction only would hand
    cluster 0 the longest tile of every round.
    """

    order: TileOrder
    num_clusters: int

    reads_state: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    @property
    def table(self) -> None:
        return None

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, table) -> "StaticPersistent":
        return cls(order, num_clusters)

    def first(self, cluster):
        return cluster

    def next(self, cursor):
        position = cursor % self.num_clusters
        return cursor + 2 * (self.num_clusters - position) - 1

    def is_valid(self, cursor):
        return cursor < self.order.num_tiles

    def tile(self, cursor) -> Tile:
        return self.order.tile(cursor)
