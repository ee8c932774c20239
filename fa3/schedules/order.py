"""Tiles, segments, the order that numbers tiles (`TileOrder`), and schedules' interface.

`fa3.planning.tilings` makes the order from problem, GPU and config; schedules are made from it, and
the forward kernel and the reference walk them. All of it is plain arithmetic on the fields: the
same code runs on Python ints (planner, reference, tests) and on Int32 values inside a kernel.

At the end are two schedules without a table, in which arithmetic gives each cluster its tiles. The
planner never chooses them. A CUDA graph can capture them without a call before. `check_schedule`
checks a schedule that a caller made. Tables are checked as arrays and not walked: a walk of an
arbitrary table might never end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
import numpy as np

from fa3.complaints import check_type, shown
from fa3.primitives.arithmetic import LARGEST, Divisor, smaller
from fa3.scores.masks import Blocks

ONLY = 1  # `NumberedPart.number` of a whole tile
MOST_PARTS = 256  # a tile has fewer parts than this

MOST_SLOTS = 1 << 14
"""Most parts of all tiles together. A part writes up to 100,000 numbers to the workspace, and 32
bits must index them all."""


class Tile(NamedTuple):
    """A block of query rows of one query head of one sequence.

    One cluster works on a tile. With c CTAs along M, `m_block` counts groups of c query tiles,
    and the CTA of rank r in the cluster takes query tile `m_block * c + r`. With c CTAs along
    heads, `head` counts groups of c query heads in the same way. In decoding, `head` is a
    key/value head, and the tile's rows are its query heads' rows.
    """

    m_block: int
    head: int
    batch: int


class NumberedPart(NamedTuple):
    """Which part of its tile a segment is, in one integer."""

    # `num_parts` + MOST_PARTS * (index of the part in its tile + MOST_PARTS * `slot`).
    number: int = ONLY

    @property
    def num_parts(self):
        """How many parts the tile has; 1 if it is whole."""
        return self.number % MOST_PARTS

    @property
    def slot(self):
        """The slot for the part's output and log-sum-exp; unused for whole tiles."""
        return self.number // MOST_PARTS**2

    @property
    def first_slot(self):
        """The slot of the tile's first part; others follow in key order."""
        return self.slot - self.number // MOST_PARTS % MOST_PARTS


class Part(NamedTuple):
    """Which part of its tile a segment is, in decoding (split-K)."""

    slot: int  # workspace slot for its result; unused if the tile has one part
    first_slot: int  # slot of the tile's first part
    num_parts: int  # how many parts the tile has
    record: int  # index of the record from which the combine kernel learns of the tile's parts


class Segment(NamedTuple):
    """What a cluster computes at once: key blocks `[begin, end)` of a tile."""

    tile: Tile
    # begin, end: None for all key blocks that the tile touches. In decoding, block 0 is the first
    # one that the tile touches.
    begin: Any = None
    end: Any = None
    part: NumberedPart | Part = NumberedPart()
    # Of packed sequences what their table has of the tile; None without a table.
    record: tuple | None = None
    number: int | None = None  # the tile's number in that table

    @property
    def is_whole(self):
        """Whether the tile has no other segment."""
        return self.part.num_parts == 1


@dataclass(frozen=True)
class TileOrder:
    """Numbers all tiles, by head groups, the last query rows first.

    A head group is `heads_per_group` consecutive (batch, head) pairs whose K and V fit in L2
    together. Inside it the row block is the slow index and runs down: with a causal mask the
    longest tiles come first (longest-first), and neighbours in the order share K and V.
    """

    num_m_blocks: int
    num_heads: int
    batch: int
    heads_per_group: int

    @property
    def num_tiles(self):
        return self.num_m_blocks * self.num_heads * self.batch

    def m_blocks(self, count: int | None = None) -> np.ndarray:
        """The m_block of every tile in order, or of the last `count`.
        Faster than calling `tile` for each."""
        count = self.num_tiles if count is None else count
        downwards = np.arange(self.num_m_blocks - 1, -1, -1)
        groups, last = divmod(self.num_heads * self.batch, self.heads_per_group)
        ends = np.repeat(downwards, last)
        group = np.repeat(downwards, self.heads_per_group)
        needed = min(groups, -(-max(0, count - len(ends)) // max(1, len(group))))
        numbers = np.concatenate((np.tile(group, needed), ends))
        return numbers[len(numbers) - count :]

    def in_smaller_groups(self, most: int, last: int) -> np.ndarray:
        """All tile numbers, by groups of `most` heads; the last has `last`.
        Only at the end must the longest tiles be early."""
        head = np.arange(self.num_heads * self.batch)
        first_head = head - head % self.heads_per_group
        heads = np.minimum(self.heads_per_group, len(head) - first_head)
        ranks = np.arange(self.num_m_blocks)[:, None]
        numbers = first_head * (self.num_m_blocks - 1) + head + ranks * heads
        cut = -(-max(0, len(head) - last) // most) * most
        few = numbers[:, :cut].reshape(self.num_m_blocks, cut // most, most).swapaxes(0, 1)
        return np.concatenate((few.ravel(), numbers[:, cut:].ravel()))

    def tile(self, index) -> Tile:
        """The tile with this number, 0 <= index < num_tiles."""
        group = self.group_of_tile(index)
        first_head = group * self.heads_per_group
        heads = smaller(self.heads_per_group, self.num_heads * self.batch - first_head)
        within = index - first_head * self.num_m_blocks
        rank = self.rank_of(within, heads)
        flat_head = first_head + within - rank * heads
        batch = self.batch_of(flat_head)
        return Tile(self.num_m_blocks - 1 - rank, flat_head - batch * self.num_heads, batch)

    def group_of_tile(self, index):
        return index // (self.heads_per_group * self.num_m_blocks)

    def rank_of(self, within, heads):
        """The row block, from below, of a tile `within` a head group."""
        return within // heads

    def batch_of(self, flat_head):
        return flat_head // self.num_heads

    def index(self, tile: Tile):
        """The number of a tile; the inverse of `tile`."""
        flat_heads = self.num_heads * self.batch
        flat_head = tile.batch * self.num_heads + tile.head
        first_head = flat_head - flat_head % self.heads_per_group
        heads = smaller(self.heads_per_group, flat_heads - first_head)
        rank = self.num_m_blocks - 1 - tile.m_block
        return first_head * self.num_m_blocks + rank * heads + flat_head - first_head

    def segment(self, index) -> Segment:
        """The tile with this number, as a whole."""
        return Segment(self.tile(index))


@dataclass(frozen=True)
class KernelOrder(TileOrder):
    """The order inside a kernel, with prepared divisors."""

    tiles_of_group: Divisor  # tiles of all head groups but the last
    # heads_of_group, heads_of_last: heads of all head groups but the last, and of the last.
    heads_of_group: Divisor
    heads_of_last: Divisor
    heads: Divisor  # `num_heads`

    @classmethod
    def of(cls, num_m_blocks, num_heads, batch, heads_per_group) -> "KernelOrder":
        """Prepare the divisions; on the host."""
        last = (num_heads * batch - 1) % heads_per_group + 1
        divisors = heads_per_group * num_m_blocks, heads_per_group, last, num_heads
        return cls(num_m_blocks, num_heads, batch, heads_per_group, *map(Divisor.of, divisors))

    def group_of_tile(self, index):
        return self.tiles_of_group.quotient(index)

    def tiles_in(self, group):
        """How many tiles a head group has."""
        full = self.tiles_of_group.value
        return smaller(self.num_tiles - group * full, full)

    @cute.jit
    def rank_of(self, within, heads):
        rank = self.heads_of_group.quotient(within)
        if heads != self.heads_per_group:
            rank = self.heads_of_last.quotient(within)
        return rank

    def batch_of(self, flat_head):
        return self.heads.quotient(flat_head)


class Segments(NamedTuple):
    """All segments of a schedule as arrays, each cluster's in order."""

    tile: np.ndarray  # number of its tile
    # full, masked: key blocks without and with the mask applied.
    full: np.ndarray
    masked: np.ndarray
    owner: np.ndarray | None  # its cluster; None if each goes to the first free cluster
    # partial, merging: whether it is a part of its tile, and the part that merges.
    partial: np.ndarray
    merging: np.ndarray

    @classmethod
    def of(cls, tile, blocks: Blocks, owner=None, partial=None, merging=None) -> "Segments":
        """Segments with these key blocks, in arrays; whole tiles without `partial`, `merging`."""
        full, whole = blocks.full_end - blocks.full_begin, np.zeros(len(tile), bool)
        kinds = (whole if one is None else one for one in (partial, merging))
        return cls(tile, full, blocks.end - blocks.begin - full, owner, *kinds)


class Schedule:
    """Base of all schedules: which tiles a cluster works on, in order.

    Host half: makes the schedule for a problem, and gives the load of its clusters, their number
    and the table, if any, that the device half reads. Device half: `first`, `next`, `is_valid` and
    `segment`; a cursor is a cluster's position, here the number of its tile. The producer and every
    consumer of a CTA walk the same segments. Each calls `next` once the last key block of its
    segment is under way, so the remaining work hides the latency of what `next` reads.
    """

    order: TileOrder
    num_clusters: int
    table: np.ndarray | None

    name: ClassVar[str]  # its name in calls and on the command line

    takes_pairs: ClassVar[bool] = True  # whether a cluster may be two CTAs
    is_searched: ClassVar[bool] = True  # whether the planner may choose it, unasked
    reads_state: ClassVar[bool] = False  # whether the device half reads a table or counters, int32
    splits: ClassVar[bool] = False  # whether segments may be parts of tiles
    is_ragged: ClassVar[bool] = False  # whether tiles are of packed sequences, from a GPU's table
    num_counters: ClassVar[int] = 0  # counters instead of a table; 0 before and after a launch
    # 64-bit words of shared memory in which the producer tells the consumers the next tile.
    shared_words: ClassVar[int] = 0
    # The cluster of every segment, in order; None if each goes to the first free cluster.
    owners: Any = None

    # ------------------------------------------------------------------------------------- host
    @classmethod
    def make(cls, tiled):
        """Make the schedule of a `fa3.planning.tilings.TiledProblem`."""
        return cls(tiled.order, tiled.num_clusters)

    def segments(self, blocks: Blocks) -> Segments:
        """All segments in arrays, given each tile's key blocks, by its number."""
        return Segments.of(np.arange(self.order.num_tiles), blocks, self.owners)

    def check(self, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
        """Raise unless its clusters work on every tile exactly once.

        The arguments are key blocks [first, end) of each tile, by its number."""

    # ----------------------------------------------------------------------------------- device
    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, state):
        """The schedule inside a kernel; `state` is the table or the counters."""
        return cls(order, num_clusters, *((state,) if cls.reads_state else ()))

    def connected(self, shared, warps: int):
        """A CTA's schedule for `warps` consumer warps; `shared` points to `shared_words`."""
        return self

    def for_producer(self):
        """The schedule as the producer warp walks it."""
        return self

    def first(self, cluster) -> Any:
        """The cursor at a cluster's start; the previous kernel may still run."""
        return cluster

    def begin(self, cursor):
        """The cursor at the first tile; the previous kernel has ended."""
        return cursor

    def next(self, cursor) -> Any:
        raise NotImplementedError

    def is_valid(self, cursor):
        return cursor < self.order.num_tiles

    def segment(self, cursor) -> Segment:
        return self.order.segment(cursor)

    def finish(self) -> None:
        """Clean up; the producer calls this when no tile is left."""


END = -1  # marks the end of a cluster's column in a table


class TableCursor(NamedTuple):
    """A cluster's position in a table, and the entry there."""

    position: int
    entry: tuple


class TableSchedule(Schedule):
    """Base of schedules in tables; equal if their tables are equal.

    Each cluster works on its column, from the top down to `END`. The table is a (rounds,
    num_clusters, fields) int32 matrix, flat: a numpy array on the host, a tensor on the device. The
    kernel reads the next entry while it works on the present one, which hides the read's latency.
    On the host the table cannot be written to: what was checked of it, and what other plans have
    of it, stays so.
    """

    fields: ClassVar[int]  # numbers of an entry; the first one is the number of its tile

    reads_state: ClassVar[bool] = True

    def __post_init__(self):
        numbers = self.table
        if type(numbers) is np.ndarray and not numbers.dtype.hasobject:
            # Memory of bytes: it has no other view, and cannot be made writeable again.
            table = np.frombuffer(numbers.tobytes(), numbers.dtype).reshape(numbers.shape)
            object.__setattr__(self, "table", table)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        ours, theirs = ({**vars(one)} for one in (self, other))
        same = np.array_equal(ours.pop("table"), theirs.pop("table"))
        return same and ours == theirs

    def __hash__(self) -> int:
        return hash((type(self), self.order, self.num_clusters))

    @property
    def entries(self) -> np.ndarray:
        """The entries of all clusters, round by round, (entries, fields)."""
        return self.table.reshape(-1, self.fields)[self.has_entry]

    @property
    def has_entry(self) -> np.ndarray:
        """Which of its (rounds * num_clusters) places have an entry."""
        return self.table[:: self.fields] != END

    @property
    def owners(self) -> np.ndarray:
        """The cluster of every entry."""
        return np.flatnonzero(self.has_entry) % self.num_clusters

    def first(self, cluster) -> TableCursor:
        return self.read(cluster)

    def next(self, cursor: TableCursor) -> TableCursor:
        return self.read(cursor.position + self.num_clusters)

    def read(self, position) -> TableCursor:
        entry = (self.table[position * self.fields + i] for i in range(self.fields))
        numbers = (int(n) if isinstance(n, np.integer) else n for n in entry)
        return TableCursor(position, tuple(numbers))

    def is_valid(self, cursor: TableCursor):
        return cursor.entry[0] != END


def walk(schedule: Schedule, cluster: int) -> Iterator[Segment]:
    """Yield one cluster's segments in the kernel's order."""
    cursor = schedule.first(cluster)
    while schedule.is_valid(cursor):
        yield schedule.segment(cursor)
        cursor = schedule.next(cursor)


@dataclass(frozen=True)
class SingleTile(Schedule):
    """One cluster per tile; the GPU's block scheduler starts them in order."""

    order: TileOrder

    name: ClassVar[str] = "single"
    table: ClassVar[None] = None
    is_searched: ClassVar[bool] = False

    @classmethod
    def make(cls, tiled) -> "SingleTile":
        return cls(tiled.order)

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, state) -> "SingleTile":
        return cls(order)

    @property
    def num_clusters(self):
        return self.order.num_tiles

    def next(self, cursor):
        return self.order.num_tiles


@dataclass(frozen=True)
class StaticPersistent(Schedule):
    """Deal the tiles to the clusters in rounds, odd rounds in reverse.
    The order is longest-first: in one direction only, cluster 0 would get the longest tile of every
    round."""

    order: TileOrder
    num_clusters: int

    name: ClassVar[str] = "static"
    is_searched: ClassVar[bool] = False
    table: ClassVar[None] = None

    @property
    def owners(self) -> np.ndarray:
        turn, place = np.divmod(np.arange(self.order.num_tiles), self.num_clusters)
        return np.where(turn % 2, self.num_clusters - 1 - place, place)

    def next(self, cursor):
        position = cursor % self.num_clusters
        return cursor + 2 * (self.num_clusters - position) - 1


def check_schedule(schedule: Schedule, first_blocks: np.ndarray, end_blocks: np.ndarray) -> None:
    """Raise unless the clusters' segments cover every tile exactly once.

    There may be more clusters than the GPU holds: no cluster waits for one that has not started.
    The error names the first tile that does not exist, comes twice or is left out. `first_blocks`
    and `end_blocks` are key blocks [first, end) of each tile, by its number.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be one of fa3.schedules, got {shown(schedule)}")
    for name, size in vars(schedule.order).items():
        check_type(f"schedule.order.{name}", size, int)
    num_tiles, num_clusters = schedule.order.num_tiles, schedule.num_clusters
    check_type("schedule.num_clusters", num_clusters, int)
    # A walk steps past the last tile by up to two rounds of clusters.
    least, most = min(1, num_tiles), (LARGEST - num_tiles) // 2
    if not least <= num_clusters <= most:
        raise ValueError(
            f"schedule must have num_clusters from {least} to {most} for {num_tiles} tiles, "
            f"got {num_clusters}"
        )
    schedule.check(first_blocks, end_blocks)


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


def check_tiles(order: TileOrder, indices: np.ndarray, may_repeat: bool = False) -> None:
    """Raise ValueError unless these are all tile numbers, once unless they `may_repeat`."""
    foreign = (indices < 0) | (indices >= order.num_tiles)
    if foreign.any():
        raise ValueError(
            f"schedule has tile number {indices[foreign.argmax()]}, but its order does not have "
            f"it: there are {order.num_tiles}"
        )
    count = np.bincount(indices, minlength=order.num_tiles)
    if not count.all():
        raise ValueError(f"schedule leaves out {order.tile(int(count.argmin()))}")
    if count.max(initial=0) > 1 and not may_repeat:
        tile = order.tile(int(count.argmax()))
        raise ValueError(f"schedule has {tile} {count.max()} times")


def number_parts(index: np.ndarray) -> np.ndarray:
    """Return `NumberedPart.number` of segments sorted by tile and first key block.
    `index` is the number of each one's tile. All parts of tiles take the slots from 0 on."""
    num_parts = np.bincount(index)[index]
    is_part = num_parts > 1
    number, slot = np.arange(len(index)) - np.searchsorted(index, index), np.cumsum(is_part) - 1
    return np.where(is_part, num_parts + MOST_PARTS * (number + MOST_PARTS * slot), ONLY)


def check_parts(
    order: TileOrder, segments: np.ndarray, first_blocks: np.ndarray, end_blocks: np.ndarray
) -> None:
    """Raise ValueError unless segments cover all key blocks once.
    They must have the numbers of `number_parts`."""
    segments = segments[np.lexsort((segments[:, 1], segments[:, 0]))]
    index, first, end, part = segments.T
    begins_tile = np.diff(index, prepend=-1) != 0
    begin = np.where(begins_tile, first_blocks[index], np.roll(end, 1))
    tile_end, ends_tile = end_blocks[index], np.roll(begins_tile, -1)
    wrong = (first != begin) | (end <= begin) | (end > tile_end) | (ends_tile & (end < tile_end))
    if wrong.any():
        i = wrong.argmax()
        raise ValueError(
            f"schedule has key blocks {first[i]} to {end[i] - 1} of "
            f"{order.tile(int(index[i]))}, where {begin[i]} to {tile_end[i] - 1} are left"
        )
    num_parts, numbers = np.bincount(index), number_parts(index)
    if num_parts.max(initial=0) >= MOST_PARTS:
        raise ValueError(
            f"schedule cuts {order.tile(int(num_parts.argmax()))} into {num_parts.max()} parts, "
            f"more than {MOST_PARTS - 1}"
        )
    wrong = part != numbers
    if wrong.any():
        i = wrong.argmax()
        raise ValueError(
            f"schedule numbers the parts of {order.tile(int(index[i]))} inconsistently: the one "
            f"from key block {first[i]} on must have {numbers[i]}, got {part[i]}"
        )
    slots = int((numbers != ONLY).sum())
    if slots > MOST_SLOTS:
        raise ValueError(f"schedule has {slots} parts of tiles, more than {MOST_SLOTS}")
