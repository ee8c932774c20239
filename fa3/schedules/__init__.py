"""Schedules: which cluster works on which tiles, and in which order.

A schedule is one class (`order.Schedule`): how the planner makes it for a problem, its clusters'
load, how a kernel walks it, and the checks for one made by hand. `SCHEDULES` lists those that
callers can name.
"""

from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import (
    Schedule,
    Segment,
    SingleTile,
    StaticPersistent,
    Tile,
    TileOrder,
    walk,
)
from fa3.schedules.split import KeyRanges, SplitTiles, TileList

SCHEDULES: dict[str, type[Schedule]] = {
    kind.name: kind
    for kind in (
        SingleTile,
        StaticPersistent,
        TileList,
        Dynamic,
        SplitTiles,
    )
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
