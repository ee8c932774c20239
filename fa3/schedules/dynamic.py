"""Dynamic: a cluster takes the next tile of the order when it is ready for one."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.schedules.order import Planned, TileOrder
from fa3.schedules.segment import Segment
from fa3.schedules.single import SingleTile

SLOTS = 2
"""Tile numbers on their way from the producer to the consumers of a CTA."""


class Cursor(NamedTuple):
    """A CTA's tile, and how many it had before."""

    index: int
    count: int


class Mailbox(NamedTuple):
    """How the producer tells the consumers which tile is next; in shared memory.

    Fields:
        numbers: (SLOTS,) int32.
        full, empty: barriers of the slots.
    """

    numbers: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class Dynamic(Planned):
    """As many clusters as the GPU holds take tiles from a counter in device memory.

    The producer fetches while the consumers still work on the tile before, and tells them. Whoever
    leaves last sets the counters back, so that the next launch, or replay of a graph, finds
    zeros. On the host, where nothing takes time, tiles go round.

    Fields:
        counters: (2,) int32 on the device: tiles that were taken, clusters that found none left.
    """

    order: TileOrder
    num_clusters: int
    counters: cute.Tensor | None = None
    mailbox: Mailbox | None = None

    name: ClassVar[str] = "dynamic"
    takes_pairs: ClassVar[bool] = False
    reads_state: ClassVar[bool] = True
    num_counters: ClassVar[int] = 2
    shared_words: ClassVar[int] = 3 * SLOTS
    table: ClassVar[None] = None

    @classmethod
    def make(cls, tiled) -> "Dynamic":
        return cls(tiled.order, tiled.num_clusters)

    @classmethod
    def load(cls, rows):
        return rows.handed_out

    @property
    def simulated(self) -> SingleTile:
        """Who takes which tile follows from time, as when the GPU hands CTAs out."""
        return SingleTile(self.order)

    def check(self, first_blocks, end_blocks) -> None:
        if self.counters is not None or self.mailbox is not None:
            raise ValueError(
                "schedule must have no counters and no mailbox: every launch gets its own"
            )

    @classmethod
    def on_device(cls, order: TileOrder, num_clusters, state) -> "Dynamic":
        return cls(order, num_clusters, state)

    @cute.jit
    def connected(self, shared: cute.Pointer, warps: cutlass.Constexpr) -> "Dynamic":
        """The schedule of a CTA with `warps` consumer warps, and its part of shared memory."""
        full, empty = shared, shared + SLOTS
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(full + slot, 1)
                cute.arch.mbarrier_init(empty + slot, warps)
        numbers = cute.recast_ptr(shared + 2 * SLOTS, dtype=Int32)
        mailbox = Mailbox(cute.make_tensor(numbers, cute.make_layout(SLOTS)), full, empty)
        return replace(self, mailbox=mailbox)

    def for_producer(self) -> "DynamicProducer":
        return DynamicProducer(**vars(self))

    def first(self, cluster) -> Cursor:
        return Cursor(cluster, cluster * 0)

    def next(self, cursor: Cursor) -> Cursor:
        if self.mailbox is None:
            return Cursor(cursor.index + self.num_clusters, cursor.count + 1)
        return Cursor(self.following(cursor.count), cursor.count + 1)

    @cute.jit
    def following(self, count: Int32) -> Int32:
        """Read the next tile's number from the mailbox; all warps of all consumers call this."""
        slot, round_of_slot = count % SLOTS, count // SLOTS
        cute.arch.mbarrier_wait(self.mailbox.full + slot, round_of_slot % 2)
        index = self.mailbox.numbers[slot]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.mailbox.empty + slot)
        return cute.arch.make_warp_uniform(index)

    @cute.jit
    def tell(self, count: Int32, index: Int32):
        """Put a tile's number into the mailbox; one warp of the producer calls this."""
        slot, round_of_slot = count % SLOTS, count // SLOTS
        cute.arch.mbarrier_wait(self.mailbox.empty + slot, (round_of_slot + 1) % 2)
        if cute.arch.lane_idx() == 0:
            self.mailbox.numbers[slot] = index
            cute.arch.mbarrier_arrive(self.mailbox.full + slot)

    def is_valid(self, cursor: Cursor):
        return cursor.index < self.order.num_tiles

    def segment(self, cursor: Cursor) -> Segment:
        return Segment(self.order.tile(cursor.index))


@dataclass(frozen=True)
class DynamicProducer(Dynamic):
    """The producer's half of `Dynamic`."""

    @cute.jit
    def following(self, count: Int32) -> Int32:
        """Take the next tile, and put its number into the mailbox; one warp calls this."""
        index = Int32(0)
        if cute.arch.lane_idx() == 0:
            index = self.num_clusters + cute.arch.atomic_add(
                self.counters.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
        index = cute.arch.shuffle_sync(index, 0)
        self.tell(count, index)
        return index

    @cute.jit
    def finish(self):
        """Count a CTA that found no tile; the last one sets the counters back."""
        if cute.arch.lane_idx() == 0:
            done = self.counters.iterator + 1
            before = cute.arch.atomic_add(done, Int32(1), sem="relaxed", scope="gpu")
            if before == self.num_clusters - 1:
                self.counters[0] = 0
                self.counters[1] = 0
