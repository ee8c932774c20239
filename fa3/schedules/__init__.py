"""Tile orders: which cluster works on which tiles, and in which order."""

from fa3.schedules.dynamic import Dynamic
from fa3.schedules.single_tile import SingleTile
from fa3.schedules.split_tiles import KeyRanges, SplitTiles, Unit
from fa3.schedules.static_persistent import StaticPersistent
from fa3.schedules.tile_list import TileList
from fa3.schedules.tiles import Schedule, Tile, TileOrder, walk

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
