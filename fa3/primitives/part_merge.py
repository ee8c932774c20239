"""Split tiles of the forward kernel: several CTAs share a tile's keys, and the last one merges.

Each CTA computes a part: O and log-sum-exps over some key blocks. All but the last CTA write their
parts to global memory; the last adds them to its own and writes the tile's rows of O.

Each warp merges its own 16 rows. The warps that hold the same rows of a tile's parts share one
counter, from which each takes a number when its part is nearly done. The warp with the last number
keeps its part in registers and waits for the other parts; the others wait for no warp, so there is
no deadlock. Parts are added in slot order, so the result's bits do not depend on which is last.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.output_store import RowStore
from fa3.primitives.softmax import LOG2_E, finite
from fa3.primitives.wgmma import ROWS_OF_WARP, WARP

ROWS_OF_THREAD = 2

FLOATS = 4  # float32 numbers that a thread moves at once: two columns of both its accumulator rows

HAS_COME, HAS_LEFT = 1, 1 << 16
"""A warp adds the first to its counter to take a number, the second when its part is written."""


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
    rows: RowStore  # stores merged rows

    @classmethod
    def of(
        cls,
        buffer: cute.Tensor,
        counters: cute.Tensor,
        num_slots: Int32,
        rows: int,
        columns: int,
        row_store: RowStore,
    ) -> "PartMerge":
        """Lay out a buffer of `numbers_of_parts` float32 for tiles of (rows, columns)."""
        warps = rows // ROWS_OF_WARP
        layout = cute.make_ordered_layout(
            (FLOATS, WARP, vectors_of(columns) + 1, warps, Int64(num_slots)), order=(0, 1, 2, 3, 4)
        )
        return cls(cute.make_tensor(buffer.iterator.align(16), layout), counters, warps, row_store)

    @cute.jit
    def take_number(self, part, warp: Int32) -> Int32:
        """Take a number when the part is nearly done: how many warps came before. Lane 0 has it."""
        number = Int32(0)
        if part.num_parts > 1 and cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(
                self.counter(part, warp), Int32(HAS_COME), sem="relaxed", scope="gpu"
            )
        return number

    def counter(self, part, warp: Int32) -> cute.Pointer:
        return self.counters.iterator + (part.first_slot * self.warps + warp)

    @cute.jit
    def finish(
        self,
        acc_O: cute.Tensor,  # the part's accumulator, divided by its own row sums
        lse: cute.Tensor,  # its rows' log-sum-exps
        coords: ScoreCoords,
        part,
        warp: Int32,  # this warp's index among the tile's warps
        number: Int32,  # what `take_number` returned
        # places, is_written: of `RowStore.store`.
        places: tuple,
        is_written: tuple,
        sinks: tuple | None,  # the rows' sink logits in base 2
        registers: cutlass.Constexpr,  # registers a thread that parts may take
    ):
        """Write this part to memory; if it is the last one, merge the tile and write its rows."""
        if cute.arch.shuffle_sync(number, 0) % HAS_LEFT < part.num_parts - 1:
            self.leave(acc_O, lse, part, warp)
        else:
            self.await_others(part, warp)
            merged_lse = self.merge(acc_O, lse, part, warp, sinks, registers)
            self.rows.store(acc_O, merged_lse, coords, places, is_written)

    @cute.jit
    def leave(self, acc_O: cute.Tensor, lse: cute.Tensor, part, warp: Int32):
        """Write a part to memory, then count it as written."""
        lane = cute.arch.lane_idx()
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
            cute.arch.atomic_add(
                self.counter(part, warp), Int32(HAS_LEFT), sem="release", scope="gpu"
            )

    @cute.jit
    def await_others(self, part, warp: Int32):
        """Wait until all other parts are in memory, then reset their counter."""
        counter, count = self.counter(part, warp), Int32(0)
        while count // HAS_LEFT < part.num_parts - 1:
            count = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.store(counter, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def merge(
        self,
        acc_O: cute.Tensor,
        lse: cute.Tensor,
        part,
        warp: Int32,
        sinks: tuple | None,
        registers: cutlass.Constexpr,
    ) -> cute.Tensor:
        """Merge the other parts into this one's acc_O; return the merged log-sum-exps."""
        own = cute.logical_divide(cute.flatten(acc_O), cute.make_layout(FLOATS))
        vectors = cute.size(own, mode=[1])
        merged_lse = cute.make_rmem_tensor(ROWS_OF_THREAD, Float32)
        step = vectors_at_once(vectors, registers)
        for begin in cutlass.range_constexpr(0, vectors, step):
            mine = cute.local_tile(own, (FLOATS, step), (0, begin // step))
            self.merge_vectors(mine, begin, lse, merged_lse, part, warp, sinks)
        return merged_lse

    @cute.jit
    def merge_vectors(
        self,
        own: cute.Tensor,
        begin: cutlass.Constexpr,
        lse: cute.Tensor,
        merged_lse: cute.Tensor,
        part,
        warp: Int32,
        sinks: tuple | None,
    ):
        """Merge all parts' vectors from `begin` on into `own`, which holds this part's."""
        lane = cute.arch.lane_idx()
        rows = range(ROWS_OF_THREAD)
        # For each row: the largest base-2 log-sum-exp so far, and the sum of exp2(lse - largest).
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        if cutlass.const_expr(sinks is not None):
            for r in rows:
                maximum[r], total[r] = sinks[r], Float32(1.0)
        merged, other = (cute.make_rmem_tensor(own.shape, Float32) for _ in range(2))
        merged.fill(0.0)
        log_sums = cute.make_rmem_tensor(FLOATS, Float32)
        log_sums.fill(0.0)
        for i in cutlass.range(part.num_parts):
            slot = part.first_slot + i
            if slot == part.slot:
                other.store(own.load())
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    log_sums[r] = lse[r] * LOG2_E
            else:
                for n in cutlass.range_constexpr(cute.size(own, mode=[1])):
                    cute.autovec_copy(self.parts[None, lane, begin + n, warp, slot], other[None, n])
                last = cute.size(self.parts, mode=[2]) - 1
                cute.autovec_copy(self.parts[None, lane, last, warp, slot], log_sums)
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                larger = cute.arch.fmax(maximum[r], log_sums[r])
                reference = finite(larger)
                correction = cute.math.exp2(maximum[r] - reference, fastmath=True)
                weight = cute.math.exp2(log_sums[r] - reference, fastmath=True)
                maximum[r], total[r] = larger, total[r] * correction + weight
                of_row, added = row_of(merged, r), row_of(other, r)
                of_row.store(of_row.load() * correction + added.load() * weight)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            hidden = total[r] == 0.0
            inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(total[r])
            row_of(own, r).store(row_of(merged, r).load() * inverse)
            log2_sum = finite(maximum[r]) + cute.math.log2(total[r], fastmath=True)
            merged_lse[r] = -Float32.inf if hidden else log2_sum * math.log(2.0)


def row_of(vectors: cute.Tensor, r: int) -> cute.Tensor:
    """A thread's part of a row in vectors (FLOATS, count)."""
    pairs = cute.logical_divide(vectors, (cute.make_layout(FLOATS // ROWS_OF_THREAD), None))
    return pairs[(None, r), None]


def vectors_at_once(vectors: int, registers: int) -> int:
    """Vectors to merge at a time: two copies of them must fit in registers next to a whole part."""
    free = (registers - FLOATS * vectors) // (2 * FLOATS)
    return next(n for n in range(vectors, 0, -1) if vectors % n == 0 and n <= free)
