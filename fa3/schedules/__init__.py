"""Schedules: which cluster works on which tiles, and in which order.

A schedule is one class (`order.Schedule`): how the planner makes it for a problem, its clusters'
load, how a kernel walks it, and the checks for one made by hand. `SCHEDULES` lists those that
callers can name.
"""

from fa3.schedules.dynamic import Dynamic
from fa3.schedules.order import Schedule, SingleTile, StaticPersistent
from fa3.schedules.order import Segment as Segment
from fa3.schedules.order import Tile as Tile
from fa3.schedules.order import TileOrder as TileOrder
from fa3.schedules.order import walk as walk
from fa3.schedules.split import SplitTiles, TileList

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
