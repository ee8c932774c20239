"""Tile orders: which cluster works on which tiles, and in which order.

A schedule is one file with one class: how it is made for a problem, what its clusters have to do,
how a kernel walks it, and what is checked of one that was made by hand (`order.Schedule`). Here it
gets its line in `SCHEDULES`.
"""

from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import Schedule, TileOrder, walk
from fa3.schedules.segment import Segment, Tile
from fa3.schedules.single import SingleTile
from fa3.schedules.split import KeyRanges, SplitTiles
from fa3.schedules.static import StaticPersistent
from fa3.schedules.tile_list import TileList

SCHEDULES = {
    kind.name: kind for kind in (SingleTile, StaticPersistent, TileList, Dynamic, SplitTiles)
}
"""Schedules by the names that calls and the command line take."""

__all__ = [
    "SCHEDULES",
    "Dynamic",
    "KeyRanges",
    "Schedule",
    "Segment",
    "SingleTile",
    "SplitTiles",
    "StaticPersistent",
    "Tile",
    "TileList",
    "TileOrder",
    "walk",
]
