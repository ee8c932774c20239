"""Tiles, the order that numbers them, and what a schedule is.

Everything here is plain arithmetic on the fields, so the same code runs on Python ints (planner,
executor, tests) and on Int32 values inside a kernel: host and device cannot drift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from fa3.primitives.arithmetic import smaller


class Tile(NamedTuple):
    """One unit of work: some query rows of one query head of one sequence.

    A unit belongs to a cluster. With c CTAs along M, `m_block` counts groups of c query tiles,
    and the CTA of rank r in the cluster takes query tile `m_block * c + r`. With c CTAs along
    heads, `head` counts groups of c query heads in the same way.
    """

    m_block: int
    head: int
    batch: int


@dataclass(frozen=True)
class TileOrder:
    """Numbers all tiles: heads in sections, and in a section the last query rows first.

    A section is `heads_per_section` consecutive (batch, head) pairs whose K and V fit in L2
    together. Inside it the row block is the slow index and runs down, so with a causal mask the
    longest tiles come first (LPT), and neighbours in the order share K and V.
    """

    num_m_blocks: int
    num_heads: int
    batch: int
    heads_per_section: int

    @property
    def num_tiles(self):
        return self.num_m_blocks * self.num_heads * self.batch

    def m_blocks(self, count: int | None = None) -> np.ndarray:
        """The m_block of every tile in order, or of the last `count`: what `tile` gives, without
        its arithmetic."""
        count = self.num_tiles if count is None else count
        downwards = np.arange(self.num_m_blocks - 1, -1, -1)
        sections, last = divmod(self.num_heads * self.batch, self.heads_per_section)
        ends = np.repeat(downwards, last)
        section = np.repeat(downwards, self.heads_per_section)
        needed = min(sections, -(-max(0, count - len(ends)) // max(1, len(section))))
        found = np.concatenate((np.tile(section, needed), ends))
        return found[len(found) - count :]

    def tile(self, index) -> Tile:
        """The tile with this number, 0 <= index < num_tiles."""
        section = index // (self.heads_per_section * self.num_m_blocks)
        first_head = section * self.heads_per_section
        heads = smaller(self.heads_per_section, self.num_heads * self.batch - first_head)
        within = index - first_head * self.num_m_blocks
        rank = within // heads
        flat_head = first_head + within - rank * heads
        batch = flat_head // self.num_heads
        return Tile(self.num_m_blocks - 1 - rank, flat_head - batch * self.num_heads, batch)

    def index(self, tile: Tile):
        """The number of a tile; the inverse of `tile`."""
        flat_heads = self.num_heads * self.batch
        flat_head = tile.batch * self.num_heads + tile.head
        first_head = flat_head - flat_head % self.heads_per_section
        heads = smaller(self.heads_per_section, flat_heads - first_head)
        rank = self.num_m_blocks - 1 - tile.m_block
        return first_head * self.num_m_blocks + rank * heads + flat_head - first_head

    def contains(self, tile: Tile) -> bool:
        """Whether this is a tile of the problem."""
        bounds = Tile(self.num_m_blocks, self.num_heads, self.batch)
        return all(0 <= n < bound for n, bound in zip(tile, bounds, strict=True))


class Schedule(Protocol):
    """Which tiles a cluster works on, and in which order.

    Host half: how many clusters to launch, and the table that the device half reads, if any.
    Device half: `first`, `next`, `is_valid`, `tile`; a cursor says where a cluster stands. The
    producer and every consumer of a CTA walk the same tiles. Each calls `next` when the last
    block of its tile is on the way: whatever `next` reads arrives under the work that is left.
    """

    reads_state: ClassVar[bool]
    """Whether the device half reads a tensor of int32."""

    splits: ClassVar[bool]
    """Whether units may be parts of tiles: `tile` gives them key blocks and a slot."""

    num_counters: ClassVar[int]
    """Counters that are zero before a launch and after it; they take the place of a table."""

    shared_words: ClassVar[int]
    """Words of 64 bits that a CTA's warps need in shared memory to agree on a tile."""

    order: TileOrder
    num_clusters: int
    table: object | None

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, state) -> "Schedule": ...

    def connected(self, shared, warps: int, cluster: int, rank) -> "Schedule":
        """The schedule of one CTA, with `shared_words` for its consumers' warps to share.

        Args:
            warps: those of the CTA's consumers.
            cluster: CTAs of a cluster, and `rank` this one's.
        """

    def for_producer(self) -> "Schedule":
        """The producer's half."""

    def first(self, cluster):
        """Where a cluster starts, while the kernel before may still run."""

    def begin(self, cursor):
        """The same, now that it has ended."""

    def next(self, cursor): ...

    def is_valid(self, cursor): ...

    def tile(self, cursor) -> Tile: ...

    def finish(self) -> None:
        """What the producer does when no tile is left."""

    def leave(self) -> None:
        """What all threads do at last."""


class Planned:
    """Base of schedules whose warps all find their tiles by themselves."""

    num_counters: ClassVar[int] = 0
    shared_words: ClassVar[int] = 0

    def connected(self, shared, warps: int, cluster: int, rank):
        return self

    def for_producer(self):
        return self

    def begin(self, cursor):
        return cursor

    def finish(self) -> None:
        pass

    def leave(self) -> None:
        pass


def walk(schedule: Schedule, cluster: int) -> Iterator[Tile]:
    """Yield the tiles of one cluster in the order in which the kernel works on them."""
    cursor = schedule.first(cluster)
    while schedule.is_valid(cursor):
        yield schedule.tile(cursor)
        cursor = schedule.next(cursor)
