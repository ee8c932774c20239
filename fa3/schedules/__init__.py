"""Tile orders: which cluster works on which tiles, and in which order."""

from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import Schedule, Tile, TileOrder, walk
from fa3.schedules.single import SingleTile
from fa3.schedules.split import KeyRanges, SplitTiles, Unit
from fa3.schedules.static import StaticPersistent
from fa3.schedules.tile_list import TileList

SCHEDULES = {
    "single": SingleTile,
    "static": StaticPersistent,
    "list": TileList,
    "dynamic": Dynamic,
    "split": SplitTiles,
}
"""Schedules by the names that calls and the command line take."""

__all__ = [
    "SCHEDULES",
    "Dynamic",
    "KeyRanges",
    "Schedule",
    "SingleTile",
    "SplitTiles",
    "StaticPersistent",
    "Tile",
    "TileList",
    "TileOrder",
    "Unit",
    "walk",
]
