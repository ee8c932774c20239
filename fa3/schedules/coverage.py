"""Checks that a schedule works on every tile exactly once; for schedules that callers made.

Tables are checked as arrays and not walked: a walk of an arbitrary table might never end.
"""

import numpy as np

from fa3.complaints import shown
from fa3.primitives.arithmetic import LARGEST
from fa3.schedules.order import (
    END,
    MOST_PARTS,
    MOST_SLOTS,
    ONLY,
    PackedPart,
    Schedule,
    Segment,
    TableSchedule,
    TileOrder,
)


def check_schedule(schedule: Schedule, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
    """Raise unless the clusters' segments cover every tile of the schedule's order exactly once.

    There may be more clusters than the GPU holds: no cluster waits for one that has not started.
    The error names the first tile that does not exist, comes twice or is left out. `first_blocks`
    and `end_blocks` are key blocks [first, end) of each tile, by its number.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be one of fa3.schedules, got {shown(schedule)}")
    for name, size in vars(schedule.order).items():
        check_integer(f"order.{name}", size)
    num_tiles, num_clusters = schedule.order.num_tiles, schedule.num_clusters
    check_integer("num_clusters", num_clusters)
    # A walk steps past the last tile by up to two rounds of clusters.
    least, most = min(1, num_tiles), (LARGEST - num_tiles) // 2
    if not least <= num_clusters <= most:
        raise ValueError(
            f"schedule must have num_clusters from {least} to {most} for {num_tiles} tiles, "
            f"got {num_clusters}"
        )
    schedule.check(first_blocks, end_blocks)


def check_integer(name: str, value: object) -> None:
    """Raise TypeError unless the value is a Python int, which is what kernels take."""
    if not isinstance(value, int):
        raise TypeError(f"schedule must have an integer as its {name}, got {shown(value)}")


def entries_of(schedule: TableSchedule) -> np.ndarray:
    """The entries of all clusters, without `END`, as an (entries, fields) int64 array."""
    table, num_clusters, fields = schedule.table, schedule.num_clusters, schedule.fields
    if type(table) is not np.ndarray or table.dtype != np.int32:
        got = table.dtype if isinstance(table, np.ndarray) else type(table).__name__
        raise TypeError(f"schedule must have a numpy array of int32 as its table, got {got}")
    if table.ndim != 1:
        raise ValueError(f"schedule must have a table that is flat, got shape {table.shape}")
    round_size = num_clusters * fields
    if not round_size <= table.size <= LARGEST or table.size % max(1, round_size):
        raise ValueError(
            f"schedule must have a table of whole rounds, each with {fields} numbers for each of "
            f"{num_clusters} clusters, got {table.size} numbers"
        )
    if num_clusters == 0:
        return np.empty((0, fields), np.int64)
    rounds = table.reshape(-1, num_clusters, fields)
    has_ended = rounds[:, :, 0] == END
    if not has_ended[-1].all():
        raise ValueError(
            f"schedule must have END ({END}) after the entries of every cluster, has none for "
            f"cluster {has_ended[-1].argmin()}"
        )
    goes_on = (has_ended[:-1] & ~has_ended[1:]).any(axis=0)
    if goes_on.any():
        raise ValueError(f"schedule has entries after END ({END}) of cluster {goes_on.argmax()}")
    return rounds[~has_ended].astype(np.int64)


def count_segments(order: TileOrder, indices: np.ndarray) -> np.ndarray:
    """Return how many segments each tile has; raise ValueError for a missing or foreign tile."""
    foreign = (indices < 0) | (indices >= order.num_tiles)
    if foreign.any():
        raise ValueError(
            f"schedule has tile number {indices[foreign.argmax()]}, but its order does not have "
            f"it: there are {order.num_tiles}"
        )
    count = np.bincount(indices, minlength=order.num_tiles)
    if not count.all():
        raise ValueError(f"schedule leaves out {order.tile(int(count.argmin()))}")
    return count


def check_tiles(order: TileOrder, indices: np.ndarray) -> None:
    """Raise ValueError unless these are the numbers of all tiles, each once."""
    count = count_segments(order, indices)
    if count.max(initial=0) > 1:
        tile = order.tile(int(count.argmax()))
        raise ValueError(f"schedule has {tile} {count.max()} times")


def check_key_blocks(
    order: TileOrder, segments: np.ndarray, first_blocks: np.ndarray, end_blocks: np.ndarray
) -> None:
    """Raise ValueError unless segments, sorted by tile and block, cover all blocks once."""
    index, first, end, _ = segments.T
    begins_tile = np.diff(index, prepend=-1) != 0
    begin = np.where(begins_tile, first_blocks[index], np.roll(end, 1))
    most = end_blocks[index]
    wrong = (first != begin) | (end <= begin) | (end > most)
    if wrong.any():
        i = wrong.argmax()
        raise ValueError(
            f"schedule has key blocks {first[i]} to {end[i] - 1} of {order.tile(int(index[i]))}, "
            f"where {begin[i]} to at most {most[i] - 1} are left"
        )
    stops = np.roll(begins_tile, -1) & (end < most)
    if stops.any():
        i = stops.argmax()
        raise ValueError(
            f"schedule leaves out key blocks {end[i]} to {most[i] - 1} of "
            f"{order.tile(int(index[i]))}"
        )


def number_parts(index: np.ndarray) -> np.ndarray:
    """Return `PackedPart.number` of segments that are sorted by tile and first key block.
    `index` is the number of each one's tile. All parts of tiles take the slots from 0 on."""
    num_parts = np.bincount(index)[index]
    is_part = num_parts > 1
    which, slot = np.arange(len(index)) - np.searchsorted(index, index), np.cumsum(is_part) - 1
    return np.where(is_part, num_parts + MOST_PARTS * (which + MOST_PARTS * slot), ONLY)


def check_parts(order: TileOrder, num_slots: int, segments: np.ndarray) -> None:
    """Raise unless segments, sorted by tile and block, have the numbers of `number_parts`."""
    index, _, _, part = segments.T
    num_parts = np.bincount(index)
    if num_parts.max(initial=0) >= MOST_PARTS:
        raise ValueError(
            f"schedule cuts {order.tile(int(num_parts.argmax()))} into {num_parts.max()} parts, "
            f"more than {MOST_PARTS - 1}"
        )
    numbers = number_parts(index)
    wrong = part != numbers
    if wrong.any():
        number, begin, end, of_part = segments[wrong.argmax()].tolist()
        raise ValueError(
            f"schedule numbers the parts of {order.tile(number)} inconsistently: must have "
            f"{numbers[wrong.argmax()]} for "
            f"{Segment(order.tile(number), begin, end, PackedPart(of_part))}"
        )
    check_integer("num_slots", num_slots)
    slots = int((numbers != ONLY).sum())
    if slots > MOST_SLOTS:
        raise ValueError(f"schedule has {slots} parts of tiles, more than {MOST_SLOTS}")
    if num_slots != slots:
        raise ValueError(
            f"schedule must have num_slots {slots}, as many as it has parts of tiles, got "
            f"{num_slots}"
        )
