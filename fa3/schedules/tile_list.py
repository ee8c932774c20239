"""List schedule: a table from the host assigns tiles to clusters.

Tile times come from the cost model (`TiledProblem.times`); `fa3.running.memory` uploads the table.
`balance` and `columns_of_owners` also serve `fa3.schedules.split`.
"""

import heapq
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fa3.complaints import shown
from fa3.schedules.order import (
    END,
    Segment,
    TableCursor,
    TableSchedule,
    Tile,
    TileOrder,
    check_tiles,
    entries_of,
)

MANY_TILES = 2560
"""Up to this many tiles are all assigned one by one, which costs the host 0.2 us each."""

LATE = 1.005  # last cluster's end over the mean end, from which another assignment is tried
STEPS = 8  # with more tiles, the first ones are assigned in at most this many steps of whole rounds

LAST_ROUNDS = 8
"""Rounds after those steps that are assigned one by one; more rounds if their tiles are short."""

TICKS = 1 << 20  # time of the longest tile, in the integer ticks of an assignment


@dataclass(frozen=True, eq=False)
class TileList(TableSchedule):
    """Each cluster has a column of tile numbers."""

    order: TileOrder
    num_clusters: int
    table: np.ndarray

    fields: ClassVar[int] = 1
    name: ClassVar[str] = "list"

    @classmethod
    def make(cls, tiled) -> "TileList":
        return cls.balanced(tiled.order, tiled.num_clusters, tiled.times)

    @classmethod
    def balanced(cls, order: TileOrder, num_clusters: int, times: np.ndarray) -> "TileList":
        """Assign the tiles so that all clusters end about together.
        `times` says how long each tile takes, by its number, in any unit."""
        owners = balance(times, num_clusters)
        table = columns_of_owners(np.arange(order.num_tiles), owners, num_clusters)
        return cls(order, num_clusters, table)

    @classmethod
    def in_order_of(cls, tiled, arrange: Callable[[list[Tile]], Iterable[Tile]]) -> "TileList":
        """Assign tiles in the order of the caller's function.
        Each goes to the first free cluster. Raises TypeError if what it returns, or an element of
        that, has another type, and ValueError if a tile is not one of the problem's, comes twice,
        or is left out."""
        order, num_clusters = tiled.order, tiled.num_clusters
        numbers = {order.tile(number): number for number in range(order.num_tiles)}
        arranged, places = arrange(list(numbers)), []
        if not isinstance(arranged, Iterable):
            raise TypeError(f"schedule must return the tiles in their order, got {shown(arranged)}")
        for position, element in enumerate(arranged):
            tile = as_tile(element, position)
            if tile not in numbers:
                raise ValueError(
                    f"schedule gives {tile} at {position}, which is no tile of the problem: "
                    f"tiles have m_block < {order.num_m_blocks}, head < {order.num_heads}, "
                    f"batch < {order.batch}"
                )
            places.append(numbers[tile])
        indices = np.array(places, np.int64)
        check_tiles(order, indices)
        ticks = in_ticks(tiled.times[indices])
        owners, _ = assign_greedily(ticks, np.zeros(num_clusters, np.int64))
        return cls(order, num_clusters, columns_of_owners(indices, owners, num_clusters))

    @property
    def owners(self) -> np.ndarray:
        """The cluster of every tile, by the tile's number."""
        owners = np.empty(self.order.num_tiles, np.int64)
        owners[self.entries[:, 0]] = super().owners
        return owners

    def check(self, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
        check_tiles(self.order, entries_of(self)[:, 0])

    def segment(self, cursor: TableCursor) -> Segment:
        return Segment(self.order.tile(cursor.entry[0]))


def as_tile(element: object, position: int) -> Tile:
    """An element of a user's order as a `Tile`; or raise TypeError."""
    try:
        return Tile(*map(operator.index, element))
    except TypeError:
        message = f"schedule gives {element!r:.200} at {position}, not a Tile(m_block, head, batch)"
        raise TypeError(message) from None


def columns_of_owners(entries: np.ndarray, owners: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return a table with a column for each cluster, then `END`.
    Entries are (n,) or (n, fields) integers, the table (rounds, num_clusters, ...) int32, flat."""
    # NumPy's stable sort is a radix sort for integers of up to 16 bits.
    by_owner = np.argsort(owners.astype(np.min_scalar_type(num_clusters)), kind="stable")
    counts = np.bincount(owners, minlength=num_clusters)
    rows = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (counts.max(initial=0) + 1, num_clusters, *entries.shape[1:])
    table = np.full(shape, END, np.int32)
    table[rows, owners[by_owner]] = entries[by_owner]
    return table.reshape(-1)


def balance(times: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return each tile's cluster, so that all end about together.

    Greedy: each tile goes to the first free cluster. If there are many tiles, or that ends too
    late, the first ones are assigned in whole rounds. A round's longest tile goes to the cluster
    with the least work: clusters stay within about the longest tile of each other. The last tiles
    even this out: greedily in their order, or longest-first if that order ends too late.
    """
    ticks = in_ticks(times)
    free_at = np.zeros(num_clusters, np.int64)
    mean = ticks.sum() / max(1, num_clusters)
    late = max(mean + ticks.min(initial=TICKS), LATE * mean)
    if len(ticks) <= MANY_TILES:
        owners, end = assign_greedily(ticks, free_at)
        if end <= late or len(ticks) <= num_clusters:
            return owners
    owners = np.empty(len(ticks), np.int64)
    # Whole rounds, so that the tiles after them can even out the rest.
    enough = np.searchsorted(np.cumsum(ticks[::-1]), num_clusters * ticks.max())
    last_tiles = max(int(enough), LAST_ROUNDS * num_clusters)
    rounds = max(0, len(ticks) - last_tiles) // num_clusters
    bounds = np.linspace(0, rounds, min(rounds, STEPS) + 1).astype(int) * num_clusters
    for first, end in itertools.pairwise(bounds.tolist()):
        hands = ticks[first:end].reshape(-1, num_clusters)
        work = hands[::2].sum(axis=0) + hands[1::2, ::-1].sum(axis=0)
        cluster = np.empty(num_clusters, np.int64)
        cluster[np.argsort(-work)] = np.argsort(free_at)
        free_at[cluster] += work
        dealt = owners[first:end].reshape(-1, num_clusters)
        dealt[::2], dealt[1::2] = cluster, cluster[::-1]
    last = ticks[rounds * num_clusters :]
    in_order, end = assign_greedily(last, free_at)
    if end > late:
        longest_first = np.argsort(-last, kind="stable")
        by_length, earlier_end = assign_greedily(last[longest_first], free_at)
        if earlier_end < end:
            in_order[longest_first] = by_length
    owners[rounds * num_clusters :] = in_order
    return owners


def in_ticks(times: np.ndarray) -> np.ndarray:
    """Times as integers; the longest becomes `TICKS`."""
    return np.rint(times * (TICKS / times.max(initial=1e-9))).astype(np.int64)


def assign_greedily(ticks: np.ndarray, free_at: np.ndarray) -> tuple[np.ndarray, int]:
    """Give each unit of work, in order, to the first cluster that is free.
    Returns the cluster of each unit, and when the last cluster is done."""
    # A heap entry is time * num_clusters + cluster: one integer compares faster than a pair.
    num_clusters = len(free_at)
    heap = (free_at * num_clusters + np.arange(num_clusters)).tolist()
    heapq.heapify(heap)
    replace = heapq.heapreplace
    taken = [replace(heap, heap[0] + step) for step in (ticks * num_clusters).tolist()]
    if not taken:
        return np.empty(0, np.int64), int(free_at.max(initial=0))
    return np.array(taken) % num_clusters, max(heap) // num_clusters
