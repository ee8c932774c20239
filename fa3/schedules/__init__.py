"""Tile orders: which cluster works on which tiles, and in which order."""

from fa3.schedules.single_tile import SingleTile
from fa3.schedules.static_persistent import StaticPersistent
from fa3.schedules.tile_list import TileList
from fa3.schedules.tiles import Schedule, Tile, TileOrder, walk

SCHEDULES = {"single": SingleTile, "static": StaticPersistent, "list": TileList}
"""Schedules by the names that calls and the command line take."""

__all__ = [
    "SCHEDULES",
    "Schedule",
    "SingleTile",
    "StaticPersistent",
    "Tile",
    "TileList",
    "TileOrder",
    "walk",
]
