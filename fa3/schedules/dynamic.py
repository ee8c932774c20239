"""Dynamic schedule: free CTAs take the next tile from a queue.

The queue is a counter in device memory (`fa3.running.memory`); the forward kernel walks it, and
the backward kernel `InOrderQueue`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.vectors import QUAD
from fa3.schedules.order import Schedule, Segment, TileOrder

TILES_TAKEN = 0  # place of the counter of tiles that were taken
SLOTS = 2  # slots of the mailbox: the producer may fetch this many tiles ahead of the consumers


class DynamicCursor(NamedTuple):
    """The CTA's present tile, `index`, and how many it had before."""

    index: int
    count: int


class Mailbox(NamedTuple):
    """Shared memory in which the producer tells the consumers the next tile."""

    numbers: cute.Tensor  # (words, SLOTS) int32, what is told of a tile; its number first
    # full, empty: an mbarrier per slot each.
    full: cute.Pointer
    empty: cute.Pointer


@dataclass(frozen=True)
class Dynamic(Schedule):
    """Persistent CTAs take tiles from a counter in device memory.

    The producer takes the next tile while the consumers work on the present one. The last CTA to
    finish resets the counters to 0 for the next launch or graph replay. The host, which has no
    clock, gives cluster c every `num_clusters`-th tile from c on.
    """

    order: TileOrder
    num_clusters: int
    # (2,) int32 on the device: tiles taken, and CTAs that found no tile left.
    counters: cute.Tensor | None = None
    mailbox: Mailbox | None = None
    # Set for the producer warp, which takes tiles and fills the mailbox.
    is_producer: bool | None = None

    name: ClassVar[str] = "dynamic"
    takes_pairs: ClassVar[bool] = False
    reads_state: ClassVar[bool] = True
    num_counters: ClassVar[int] = 2
    # Memory order of a CTA's last addition; all that it asked for before has been waited for.
    order_of_finish: ClassVar[str] = "relaxed"
    # Whether CTAs ask for their first tile, too. So whatever has a lower number is done, or a CTA
    # works on it: tiles may wait for tiles before them. A tile that a CTA has before it runs may
    # come late: other kernels may have its SM, and wait in the same way.
    asks_first: ClassVar[bool] = False
    told: ClassVar[int] = 1  # numbers that the producer tells of a tile: 1, 2 or a multiple of 4
    shared_words: ClassVar[int] = 3 * SLOTS
    table: ClassVar[None] = None

    def check(self, first_blocks, end_blocks) -> None:
        if self.counters is not None or self.mailbox is not None:
            raise ValueError(
                "schedule must have no counters and no mailbox: every launch gets its own"
            )

    @cute.jit
    def connected(self, shared: cute.Pointer, warps: cutlass.Constexpr) -> "Dynamic":
        """The schedule with its mailbox: initializes the mbarriers for `warps` consumer warps."""
        full, empty = shared, shared + SLOTS
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(full + slot, 1)
                cute.arch.mbarrier_init(empty + slot, warps)
        numbers = cute.recast_ptr(shared + 2 * SLOTS, dtype=Int32).align(min(16, 4 * self.told))
        layout = cute.make_layout((self.told, SLOTS))
        return replace(self, mailbox=Mailbox(cute.make_tensor(numbers, layout), full, empty))

    def for_producer(self) -> "Dynamic":
        return replace(self, is_producer=True)

    def first(self, cluster) -> Any:
        return DynamicCursor(cluster, cluster * 0)

    def next(self, cursor: Any) -> Any:
        if self.mailbox is None:
            return DynamicCursor(cursor.index + self.num_clusters, cursor.count + 1)
        return DynamicCursor(self.following(cursor.count), cursor.count + 1)

    def following(self, count: Int32) -> Int32:
        """The next tile's number; the producer warp takes it and tells consumers."""
        if not self.is_producer:
            (index,) = self.recv(count)
            return index
        index = self.num_given + cute.arch.shuffle_sync(self.count(TILES_TAKEN), 0)
        self.send(count, index)
        return index

    @cute.jit
    def recv(self, count: Int32) -> tuple:
        """What the mailbox has of the next tile."""
        slot, round_of_slot = count % SLOTS, count // SLOTS
        cute.arch.mbarrier_wait(self.mailbox.full + slot, round_of_slot % 2)
        numbers = cute.make_rmem_tensor(self.told, Int32)
        cute.autovec_copy(self.mailbox.numbers[None, slot], numbers)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.mailbox.empty + slot)
        return tuple(cute.arch.make_warp_uniform(numbers[i]) for i in range(self.told))

    @cute.jit
    def send(self, count: Int32, *words: Int32):
        """Put at most `told` numbers of a tile into the mailbox.
        One warp of the producer calls this."""
        slot, round_of_slot = count % SLOTS, count // SLOTS
        vectors = [words[i : i + QUAD] for i in range(0, len(words), QUAD)]
        cute.arch.mbarrier_wait(self.mailbox.empty + slot, (round_of_slot + 1) % 2)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(vectors)):
                # No more words than there are: ptxas does not count registers without a value, and
                # a warp that stored some beyond its own was stopped for an illegal instruction.
                numbers = cute.make_rmem_tensor(len(vectors[i]), Int32)
                for j in cutlass.range_constexpr(len(vectors[i])):
                    numbers[j] = vectors[i][j]
                place = self.mailbox.numbers[None, slot].iterator + QUAD * i
                target = cute.make_tensor(place.align(min(16, 4 * self.told)), numbers.layout)
                cute.autovec_copy(numbers, target)
            cute.arch.mbarrier_arrive(self.mailbox.full + slot)

    @property
    def num_given(self):
        """Tiles that CTAs have without asking for them."""
        return 0 if self.asks_first else self.num_clusters

    def begin(self, cursor: Any) -> Any:
        return self.next(cursor) if self.asks_first else cursor

    def is_valid(self, cursor: Any):
        return cursor.index < self.order.num_tiles

    def segment(self, cursor: Any) -> Segment:
        return self.order.segment(cursor.index)

    @cute.jit
    def count(self, place: cutlass.Constexpr, sem: cutlass.Constexpr = "relaxed") -> Int32:
        """Add 1 to a counter; lane 0 gets the value before."""
        before, counter = Int32(0), self.counters.iterator + place
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem=sem, scope="gpu")
        return before

    @cute.jit
    def finish(self):
        """Count this CTA as finished; the last CTA zeroes both counters."""
        if cute.arch.lane_idx() == 0:
            done = self.counters.iterator + 1
            before = cute.arch.atomic_add(done, Int32(1), sem=self.order_of_finish, scope="gpu")
            if before == self.num_clusters - 1:
                self.counters[0] = 0
                self.counters[1] = 0


@dataclass(frozen=True)
class InOrderQueue(Dynamic):
    """`Dynamic` for tiles that wait for tiles before them."""

    asks_first: ClassVar[bool] = True
