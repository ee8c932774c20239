"""Tiles whose keys several CTAs share: all but the last to come leave their parts in memory, and
the last adds them to its own.

Warps do this on their own: a warp has 16 rows, and the warps that have the same rows of a tile's
parts count on one counter. Each takes a number when its part is nearly done. Whoever gets the
last one keeps its part in registers and waits until the others have left theirs; those wait for
nobody, so this ends. Parts are added up in the order of their slots: the bits of the result do
not depend on who was last.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.row_store import RowStore
from fa3.primitives.softmax import finite
from fa3.primitives.wgmma import ROWS_OF_WARP, WARP

LOG2_E = math.log2(math.e)

ROWS_OF_THREAD = 2

VECTOR = 4
"""Numbers that a thread moves at once; of an accumulator, two columns of both its rows."""

HAS_COME, HAS_LEFT = 1, 1 << 16
"""What a warp adds to its counter when it takes a number, and when its part is in memory."""


def numbers_of_parts(num_slots: int, rows: int, columns: int) -> int:
    """Numbers of float32 that the parts of tiles take."""
    return num_slots * (rows // ROWS_OF_WARP) * (vectors_of(columns) + 1) * WARP * VECTOR


def vectors_of(columns: int) -> int:
    """Vectors of a thread's part of O."""
    return columns * ROWS_OF_WARP // (WARP * VECTOR)


@dataclass(frozen=True)
class PartMerge:
    """Where parts and merged tiles go.

    Fields:
        parts: (VECTOR, lanes, vectors + 1, warps, num_slots) float32: O as threads hold it,
            normalised by itself, and in the last vector the log-sum-exps of a thread's rows to
            the base of 2.
        counters: (num_slots * warps,) int32, 0 before a launch and after it; those of a tile's
            first slot count.
        warps: warps that share a tile.
        rows: where merged rows go.
    """

    parts: cute.Tensor
    counters: cute.Tensor
    warps: int
    rows: RowStore

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
        """Lay out a buffer of `numbers_of_parts` for tiles of (rows, columns)."""
        warps = rows // ROWS_OF_WARP
        layout = cute.make_ordered_layout(
            (VECTOR, WARP, vectors_of(columns) + 1, warps, Int64(num_slots)), order=(0, 1, 2, 3, 4)
        )
        return cls(
            cute.make_tensor(buffer.iterator.align(16), layout),
            counters,
            warps,
            row_store,
        )

    @cute.jit
    def take_number(self, part, warp: Int32) -> Int32:
        """Say that a part is nearly done; return how many have said so before, in lane 0."""
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
        acc_O: cute.Tensor,
        lse: cute.Tensor,
        coords: ScoreCoords,
        part,
        warp: Int32,
        number: Int32,
        sinks: tuple | None,
        registers: cutlass.Constexpr,
    ):
        """Leave a part, or merge the tile and write it where it belongs if this is the last.

        Args:
            acc_O: an accumulator, normalised by itself, and `lse` its rows' log-sum-exps.
            part: the part.
            warp: this warp's place among those of the tile.
            number: what `take_number` gave.
            sinks: the rows' sinks as powers of two.
            registers: those of a thread that parts may take.
        """
        if cute.arch.shuffle_sync(number, 0) % HAS_LEFT < part.num_parts - 1:
            self.leave(acc_O, lse, part, warp)
        else:
            self.await_others(part, warp)
            merged_lse = self.merge(acc_O, lse, part, warp, sinks, registers)
            self.rows.store_all(acc_O, merged_lse, coords)

    @cute.jit
    def leave(self, acc_O: cute.Tensor, lse: cute.Tensor, part, warp: Int32):
        """Write a part to memory, and say that it is there."""
        lane = cute.arch.lane_idx()
        vectors = cute.logical_divide(cute.flatten(acc_O), cute.make_layout(VECTOR))
        count = cute.size(vectors, mode=[1])
        for i in cutlass.range_constexpr(count):
            cute.autovec_copy(vectors[None, i], self.parts[None, lane, i, warp, part.slot])
        log_sums = cute.make_rmem_tensor(VECTOR, Float32)
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
        """Wait until all other parts are in memory, and set their counter back."""
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
        """Add the other parts to this one in acc_O; return the tile's log-sum-exps."""
        own = cute.logical_divide(cute.flatten(acc_O), cute.make_layout(VECTOR))
        vectors = cute.size(own, mode=[1])
        merged_lse = cute.make_rmem_tensor(ROWS_OF_THREAD, Float32)
        step = vectors_at_once(vectors, registers)
        for begin in cutlass.range_constexpr(0, vectors, step):
            mine = cute.local_tile(own, (VECTOR, step), (0, begin // step))
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
        """Merge vectors from `begin` on of all parts, this one's `own` among them, into `own`."""
        lane = cute.arch.lane_idx()
        rows = range(ROWS_OF_THREAD)
        # Of the scores' sums: the largest so far, and what all count relative to it.
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        if cutlass.const_expr(sinks is not None):
            for r in rows:
                maximum[r], total[r] = sinks[r], Float32(1.0)
        merged, other = (cute.make_rmem_tensor(own.shape, Float32) for _ in range(2))
        merged.fill(0.0)
        log_sums = cute.make_rmem_tensor(VECTOR, Float32)
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
    """A thread's part of a row in vectors (VECTOR, count)."""
    pairs = cute.logical_divide(vectors, (cute.make_layout(VECTOR // ROWS_OF_THREAD), None))
    return pairs[(None, r), None]


def vectors_at_once(vectors: int, registers: int) -> int:
    """Vectors to merge at a time: as many as fit into registers twice beside all of a part."""
    free = (registers - VECTOR * vectors) // (2 * VECTOR)
    return next(n for n in range(vectors, 0, -1) if vectors % n == 0 and n <= free)
