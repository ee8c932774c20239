"""Whether a schedule works on every tile once; for schedules that did not come from the planner."""

from collections import defaultdict

import numpy as np

from fa3.schedules.split_tiles import Unit
from fa3.schedules.tiles import Schedule, Tile, walk


def check_schedule(schedule: Schedule, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
    """Raise unless the clusters' units are all tiles of the schedule's order, each once.

    Args:
        first_blocks, end_blocks: key blocks of each tile, by its number.

    Raises:
        ValueError: with the first tile that is none, comes twice, or is left out, or of whose key
            blocks some are.
    """
    order = schedule.order
    units: dict[int, list] = defaultdict(list)
    for cluster in range(schedule.num_clusters):
        for unit in walk(schedule, cluster):
            tile = Tile(*unit[:3])
            if not order.contains(tile):
                raise ValueError(f"schedule has {tile} in cluster {cluster}, no tile of its order")
            units[order.index(tile)].append(unit)
    for index in range(order.num_tiles):
        found = units[index]
        if not found:
            raise ValueError(f"schedule leaves out {order.tile(index)}")
        if schedule.splits:
            check_parts(found, int(first_blocks[index]), int(end_blocks[index]))
        elif len(found) > 1:
            raise ValueError(f"schedule has {order.tile(index)} {len(found)} times")


def check_parts(units: list[Unit], first_block: int, end_block: int) -> None:
    """Raise ValueError unless a tile's units are its key blocks, and agree on their slots."""
    units = sorted(units, key=lambda unit: unit.first_block)
    tile, begin = Tile(*units[0][:3]), first_block
    for which, unit in enumerate(units):
        end = unit.end_block
        if unit.first_block != begin or not begin < end <= end_block:
            raise ValueError(
                f"schedule has key blocks {unit.first_block} to {end - 1} of {tile}, where "
                f"{begin} to at most {end_block - 1} are left"
            )
        expected = (len(units), units[0].slot + which, units[0].slot)
        if (unit.num_parts, unit.slot, unit.first_slot) != expected:
            raise ValueError(f"schedule numbers the parts of {tile} inconsistently: {unit}")
        begin = end
    if begin < end_block:
        raise ValueError(f"schedule leaves out key blocks {begin} to {end_block - 1} of {tile}")
