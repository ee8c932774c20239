"""Stores of O, dK, dV and log-sum-exps, from shared memory or registers.

Split tiles of the forward kernel (`PartMerge`): several CTAs share a tile's keys. Each computes a
part, O and log-sum-exps over some key blocks. All but the last CTA write their parts to global
memory; the last adds them to its own and writes the tile's rows of O.

Each warp merges its own 16 rows. The warps that hold the same rows of a tile's parts share one
counter. Each takes a number from it when its part is nearly done. The warp with the last number
keeps its part in registers and waits for the other parts; the others wait for no warp, so there is
no deadlock. Parts are added in slot order, so the result's bits do not depend on which is last.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, pipeline

from fa3.primitives.fragments import ScoreCoords, as_rows_and_columns, convert, write_fragment
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import LOG2_E, finite
from fa3.primitives.tma import TmaTensor
from fa3.primitives.vectors import vector_of
from fa3.primitives.wgmma import ROWS_OF_WARP, WARP, WARPGROUP


class RowLse(NamedTuple):
    """The log-sum-exps of rows: float32 (batch, heads, seqlen_q), contiguous, or nothing.
    Which of both is known at run time only, so one kernel serves both."""

    tensor: cute.Tensor

    @classmethod
    def at(cls, address: Int64, shape: tuple, is_packed: bool = False) -> "RowLse":
        """Return the tensor (batch, heads, rows) at an address, or nothing.
        If it is packed, the rows are the same for every sequence."""
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        if is_packed:
            layout = shared_by(shape[0], cute.select(layout, mode=[1, 2]))
        return cls(cute.make_tensor(pointer, layout))

    def is_wanted(self) -> Boolean:
        """Whether there is a tensor to write."""
        return self.tensor.iterator.toint() != 0


def shared_by(batch, layout: cute.Layout) -> cute.Layout:
    """A layout with a mode in front, of `batch` equal entries."""
    return cute.prepend(layout, cute.make_layout(batch, stride=0))


@cute.jit
def store_lse(target: cute.Tensor, at: tuple, lse: Float32, coords: ScoreCoords):
    """Write the log-sum-exp of a row, from one of its four threads."""
    if coords.column == 0:
        target[at] = lse


class RowStore(NamedTuple):
    """The outputs that receive rows and their log-sum-exps."""

    # (seqlen_q, head_dim_v, heads, batch); of packed sequences, whose rows are all in one line,
    # batch is 1.
    out: cute.Tensor
    lse: RowLse  # of (batch, heads, seqlen_q)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        lse: cute.Tensor,
        coords: ScoreCoords,
        places: tuple,  # (batch, head, row) for each of this thread's rows
        is_written: tuple,
    ):
        """Write this thread's row r of an accumulator to places[r] where `is_written[r]`."""
        rows = as_rows_and_columns(acc)
        for r in cutlass.range_constexpr(len(is_written)):
            if is_written[r]:
                batch, head, query = places[r]
                row = rows[r, None]
                converted = cute.make_rmem_tensor(row.shape, self.out.element_type)
                convert(row, converted)
                store_row(converted, self.out[query, None, head, batch], coords.column)
                if self.lse.is_wanted():
                    store_lse(self.lse.tensor, places[r], lse[r], coords)


@cute.jit
def store_row(values: cute.Tensor, row: cute.Tensor, column: Int32, size: cutlass.Constexpr = 2):
    """Write a thread's part of a row in vectors, from `column` on.
    Four threads have neighbouring ones. `values` may have more columns than the row."""
    vectors = cute.logical_divide(cute.flatten(values), cute.make_layout(size))
    count = cute.size(vectors, mode=[1])
    for i in cutlass.range_constexpr(min(row.shape[0] // (4 * size), count)):
        target = vector_of(row, 4 * i + column // size, size)
        if cutlass.const_expr(4 * size * count >= padded(row.shape[0])):  # noqa: SIM114, joined both would be traced
            cute.autovec_copy(vectors[None, i], target)
        elif column + 4 * size * i < row.shape[0]:
            cute.autovec_copy(vectors[None, i], target)


@dataclass(frozen=True)
class SlabStore:
    """Stores slabs of 64 rows through this warpgroup's shared memory.
    TMA may still read a slab from shared memory while the warpgroup continues. The next `store`
    waits for TMA before it writes there."""

    tma: TmaTensor
    smem: cute.Tensor
    tiled_mma: cute.TiledMma
    thread: Int32
    group: Int32
    first_barrier: int
    place: Int32 | None = None  # of the slab in `smem`; None for `group`

    @cute.jit
    def store(self, acc: cute.Tensor, slab: Int32, head: Int32, rows):
        """Write an accumulator to slab `slab` of the sequence that has `rows`."""
        # Warp 0 stores slabs. It waits until TMA has read the last one.
        is_storing_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        if is_storing_warp:
            self.wait()
        self.meet()
        converted = cute.make_rmem_tensor_like(acc, self.smem.element_type)
        convert(acc, converted)
        place = self.group if self.place is None else self.place
        target = self.smem[None, None, place]
        write_fragment(converted, self.tiled_mma, self.thread, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if is_storing_warp:
            from_smem, to_gmem = self.tma.tiles_of_head(self.smem, head, rows)
            cute.copy(self.tma.atom, from_smem[None, place], to_gmem[None, slab])
            cute.arch.cp_async_bulk_commit_group()

    @property
    def barrier(self) -> pipeline.NamedBarrier:
        """The barrier of this warpgroup."""
        return pipeline.NamedBarrier(self.first_barrier + self.group, WARPGROUP)

    def meet(self) -> None:
        """Wait for the other warps of this warpgroup."""
        self.barrier.arrive_and_wait()

    def wait(self):
        """Wait until TMA has read the last slab from shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class GradientStore:
    """Stores one of dK and dV."""

    tma: TmaTensor | None
    smem: cute.Tensor  # what each MMA warpgroup writes, (64, columns, groups * stages)
    groups: int  # MMA warpgroups
    warpgroups_share_keys: bool  # whether they have columns of the same keys, or each its own keys
    # A named barrier of the warps that write and the warps that wait for it.
    written: pipeline.NamedBarrier

    @property
    def groups_that_store(self) -> int:
        """MMA warpgroups that have columns of the head, not only padding.
        Shared memory has at least 32 columns, of which each of two warpgroups has half."""
        if not self.warpgroups_share_keys:
            return self.groups
        width, columns = cute.size(self.smem, mode=[1]), cute.size(self.tma.coords, mode=[1])
        return min(self.groups, -(-columns // width))

    @cute.jit
    def write(self, acc: cute.Tensor, tiled_mma: cute.TiledMma, thread, group, stage=0):
        """Write a warpgroup's accumulator to its part of the free buffer."""
        converted = cute.make_rmem_tensor_like(acc, self.smem.element_type)
        convert(acc, converted)
        target = self.smem[None, None, stage * self.groups + group]
        write_fragment(converted, tiled_mma, thread, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.written.arrive()

    @cute.jit
    def store(self, n_block, head, rows, stage=0):
        """Copy a tile to global memory; one warp, when all have written.
        Returns when TMA has read the buffer."""
        slabs = 1 if self.warpgroups_share_keys else self.groups
        if cute.arch.lane_idx() == 0:
            for group in cutlass.range_constexpr(self.groups_that_store):
                slab, column = (0, group) if self.warpgroups_share_keys else (group, 0)
                source, target = self.tma.tiles_of_head(self.smem, head, rows, column=column)
                place, row = stage * self.groups + group, n_block * slabs + slab
                cute.copy(self.tma.atom, source[None, place], target[None, row])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


ROWS_OF_THREAD = 2

FLOATS = 4  # float32 numbers that a thread moves at once: two columns of both its accumulator rows

HAS_COME, HAS_LEFT = 1, 1 << 16
"""A warp adds the first to its counter to take a number, the second when its part is written."""


class PartCounter(NamedTuple):
    """Counts CTAs or warps that came to write parts, and have left."""

    place: cute.Pointer  # int32, zero before a launch and after it
    others: Int32  # parts of the tile besides this one

    def take_number(self) -> Int32:
        """Count a nearly done part, in one thread; return its number."""
        return cute.arch.atomic_add(self.place, Int32(HAS_COME), sem="relaxed", scope="gpu")

    def is_last(self, number: Int32) -> Boolean:
        """Whether the part with this number is the last one."""
        return number % HAS_LEFT >= self.others

    def leave(self):
        """Count a part as written. One thread calls this."""
        cute.arch.atomic_add(self.place, Int32(HAS_LEFT), sem="release", scope="gpu")

    @cute.jit
    def await_others(self):
        """Wait until all other parts are in memory."""
        count = Int32(0)
        while count // HAS_LEFT < self.others:
            count = cute.arch.load(self.place, Int32, sem="acquire", scope="gpu")

    def reset(self):
        """Reset the counter for the next launch; one thread calls this."""
        cute.arch.store(self.place, Int32(0), sem="relaxed", scope="gpu")


def numbers_of_parts(num_slots: int, rows: int, columns: int) -> int:
    """float32 numbers in the buffer of all parts."""
    return num_slots * (rows // ROWS_OF_WARP) * (vectors_of(columns) + 1) * WARP * FLOATS


def vectors_of(columns: int) -> int:
    """Vectors of a thread's part of O."""
    return columns * ROWS_OF_WARP // (WARP * FLOATS)


@dataclass(frozen=True)
class PartMerge:
    """The buffers of parts, and the output of merged tiles."""

    # (FLOATS, lanes, vectors + 1, warps, num_slots) float32. Each part's O as threads hold it,
    # divided by the part's own row sums; in the last vector the base-2 log-sum-exps of the thread's
    # rows.
    parts: cute.Tensor
    # (num_slots * warps,) int32, zero between launches; a tile uses its first slot's.
    counters: cute.Tensor
    warps: int  # warps that share a tile
    # part, warp: this CTA's part of a tile, and this warp among the tile's warps, in `at`.
    part: Any = None
    warp: Int32 | None = None

    @classmethod
    def of(
        cls, buffer: cute.Tensor, counters: cute.Tensor, num_slots: Int32, rows: int, columns: int
    ) -> "PartMerge":
        """Lay out a buffer of `numbers_of_parts` float32 for tiles of (rows, columns)."""
        warps = rows // ROWS_OF_WARP
        layout = cute.make_ordered_layout(
            (FLOATS, WARP, vectors_of(columns) + 1, warps, Int64(num_slots)), order=(0, 1, 2, 3, 4)
        )
        return cls(cute.make_tensor(buffer.iterator.align(16), layout), counters, warps)

    def at(self, part, warp: Int32) -> "PartMerge":
        """The merge for one warp of a part of a tile."""
        return replace(self, part=part, warp=warp)

    @cute.jit
    def take_number(self) -> Int32:
        """Take a number when a part is nearly done, in lane 0."""
        number = Int32(0)
        if self.part.num_parts > 1 and cute.arch.lane_idx() == 0:
            number = self.counter.take_number()
        return number

    @property
    def counter(self) -> PartCounter:
        place = self.counters.iterator + (self.part.first_slot * self.warps + self.warp)
        return PartCounter(place, self.part.num_parts - 1)

    def is_last(self, number: Int32) -> Boolean:
        """Whether the part with this number is the last of its tile."""
        return self.counter.is_last(cute.arch.shuffle_sync(number, 0))

    @cute.jit
    def leave(self, acc_O: cute.Tensor, lse: cute.Tensor):
        """Write a part to memory, then count it as written."""
        lane, warp, part = cute.arch.lane_idx(), self.warp, self.part
        vectors = cute.logical_divide(cute.flatten(acc_O), cute.make_layout(FLOATS))
        count = cute.size(vectors, mode=[1])
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(vectors[None, i], self.parts[None, lane, i, warp, part.slot])
        log_sums = cute.make_rmem_tensor(FLOATS, Float32)
        log_sums.fill(0.0)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            log_sums[r] = lse[r] * LOG2_E
        cute.autovec_copy(log_sums, self.parts[None, lane, count, warp, part.slot])
        cute.arch.sync_warp()
        if lane == 0:
            self.counter.leave()

    @cute.jit
    def merge(self, acc_O, lse, sinks: tuple | None, registers: cutlass.Constexpr) -> cute.Tensor:
        """Merge the other parts into this one's acc_O; return the merged log-sum-exps.
        Waits until they are in memory. Two copies of some vectors must fit into `registers`."""
        self.counter.await_others()
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.counter.reset()
        vectors_O = cute.logical_divide(cute.flatten(acc_O), cute.make_layout(FLOATS))
        vectors = cute.size(vectors_O, mode=[1])
        merged_lse = cute.make_rmem_tensor(ROWS_OF_THREAD, Float32)
        step = vectors_at_once(vectors, registers)
        for begin in cutlass.range_constexpr(0, vectors, step):
            mine = cute.local_tile(vectors_O, (FLOATS, step), (0, begin // step))
            self.merge_vectors(mine, begin, lse, merged_lse, sinks)
        return merged_lse

    @cute.jit
    def merge_vectors(self, vectors_O, begin: cutlass.Constexpr, lse, merged_lse, sinks):
        """Merge parts' vectors from `begin` on into `vectors_O`, this part's."""
        lane, warp, part = cute.arch.lane_idx(), self.warp, self.part
        rows = range(ROWS_OF_THREAD)
        # For each row: the largest base-2 log-sum-exp so far, and the sum of exp2(lse - largest).
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        if cutlass.const_expr(sinks is not None):
            for r in rows:
                maximum[r], total[r] = sinks[r], Float32(1.0)
        merged, other = (cute.make_rmem_tensor(vectors_O.shape, Float32) for _ in range(2))
        merged.fill(0.0)
        log_sums = cute.make_rmem_tensor(FLOATS, Float32)
        log_sums.fill(0.0)
        for i in cutlass.range(part.num_parts):
            slot = part.first_slot + i
            if slot == part.slot:
                other.store(vectors_O.load())
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    log_sums[r] = lse[r] * LOG2_E
            else:
                for n in cutlass.range_constexpr(cute.size(vectors_O, mode=[1])):
                    cute.autovec_copy(self.parts[None, lane, begin + n, warp, slot], other[None, n])
                last = cute.size(self.parts, mode=[2]) - 1
                cute.autovec_copy(self.parts[None, lane, last, warp, slot], log_sums)
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                larger = cute.arch.fmax(maximum[r], log_sums[r])
                base = finite(larger)
                correction = cute.math.exp2(maximum[r] - base, fastmath=True)
                weight = cute.math.exp2(log_sums[r] - base, fastmath=True)
                maximum[r], total[r] = larger, total[r] * correction + weight
                row, added = row_of(merged, r), row_of(other, r)
                row.store(row.load() * correction + added.load() * weight)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            hidden = total[r] == 0.0
            inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(total[r])
            row_of(vectors_O, r).store(row_of(merged, r).load() * inverse)
            log2_sum = finite(maximum[r]) + cute.math.log2(total[r], fastmath=True)
            merged_lse[r] = -Float32.inf if hidden else log2_sum * math.log(2.0)


def row_of(vectors: cute.Tensor, r: int) -> cute.Tensor:
    """A thread's part of a row in vectors (FLOATS, count)."""
    pairs = cute.logical_divide(vectors, (cute.make_layout(FLOATS // ROWS_OF_THREAD), None))
    return pairs[(None, r), None]


def vectors_at_once(vectors: int, registers: int) -> int:
    """Vectors to merge at a time.
    Two copies of them must fit in registers next to a whole part."""
    free = (registers - FLOATS * vectors) // (2 * FLOATS)
    return next(n for n in range(vectors, 0, -1) if vectors % n == 0 and n <= free)
