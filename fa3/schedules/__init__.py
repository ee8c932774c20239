"""Tile orders: which cluster works on which tiles, and in which order."""

from fa3.schedules.single_tile import SingleTile
from fa3.schedules.static_persistent import StaticPersistent
from fa3.schedules.tile_list import TileList
from fa3.schedules.tiles import Schedule, Tile, TileOrder, walk

__all__ = ["Schedule", "SingleTile", "StaticPersistent", "Tile", "TileList", "TileOrder", "walk"]
