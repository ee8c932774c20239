"""Tiles whose keys several CTAs share: each leaves its part, and the last to come merges them.

Warps do this on their own: a warp has 16 rows, and the warps that have the same rows of the other
parts count on one counter. Whoever comes last, parts are added up in the order of their slots, so
the bits of the result do not depend on it. Nobody waits for anybody.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.fragments import convert
from fa3.primitives.packed_rows import store_row
from fa3.primitives.softmax import finite
from fa3.primitives.vectors import vector_of
from fa3.primitives.workspace import Workspace

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class PartMerge:
    """Where parts and merged tiles go.

    Fields:
        workspace: the parts, and a record of every tile that has some.
        arrivals: (records * warps,) int32; 0 before a launch and after it.
        warps: warps that share a tile.
        out: (seqlen_q, head_dim_v, heads, batch).
        lse: (batch, heads, seqlen_q), or None.
    """

    workspace: Workspace
    arrivals: cute.Tensor
    warps: int
    out: cute.Tensor
    lse: cute.Tensor | None

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        lse: cute.Tensor,
        coords: ScoreCoords,
        unit,
        row_begin: Int32,
        warp: Int32,
        sinks: tuple | None,
    ):
        """Leave a part, O normalised by itself (rows, columns) with its log-sum-exps, and merge
        the tile if it was the last.

        Args:
            unit: the part, with `slot` and `record`.
            row_begin: the tile's first row.
            warp: this warp's place among those of the tile.
            sinks: the rows' sinks as powers of two.
        """
        num_rows = cute.size(lse)
        for r in cutlass.range_constexpr(num_rows):
            row = coords.query(r) - row_begin
            store_row(acc[r, None], self.workspace.o[unit.slot, row, None], coords.column)
            if coords.column == 0:
                self.workspace.lse[unit.slot, row] = lse[r]
        first, count = (self.workspace.records[unit.record, i] for i in (3, 4))
        if self.is_last(unit.record * self.warps + warp, count):
            for r in cutlass.range_constexpr(num_rows):
                sink = None if sinks is None else sinks[r]
                row = coords.query(r) - row_begin
                self.merge_row(acc[r, None], coords, r, row, (first, count), sink)

    @cute.jit
    def is_last(self, index: Int32, count: Int32):
        """Publish what this warp wrote; return whether all the others of `count` have come."""
        lane = cute.arch.lane_idx()
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        before = Int32(0)
        if lane == 0:
            counter = self.arrivals.iterator + index
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            if before == count - 1:
                self.arrivals[index] = 0
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.fence_acq_rel_gpu()
        return before == count - 1

    @cute.jit
    def merge_row(
        self,
        merged: cute.Tensor,
        coords: ScoreCoords,
        r: cutlass.Constexpr,
        row: Int32,
        slots: tuple,
        sink: Float32 | None,
    ):
        """Merge this thread's part of row r of the tile, into `merged` and to where it belongs."""
        first, count = slots
        # Of the scores' sums: the largest so far, and what all count relative to it.
        maximum, total = -Float32.inf, Float32(0.0)
        if cutlass.const_expr(sink is not None):
            maximum, total = sink, Float32(1.0)
        merged.fill(0.0)
        loaded = cute.make_rmem_tensor_like(merged)
        loaded.fill(0.0)
        # Two parts at a time are on their way from L2.
        for i in cutlass.range(count, unroll=2):
            log2_sum = self.workspace.lse[first + i, row] * LOG2_E
            load_row(self.workspace.o[first + i, row, None], coords.column, loaded)
            larger = cute.arch.fmax(maximum, log2_sum)
            reference = finite(larger)
            correction = cute.math.exp2(maximum - reference, fastmath=True)
            weight = cute.math.exp2(log2_sum - reference, fastmath=True)
            maximum, total = larger, total * correction + weight
            merged.store(merged.load() * correction + loaded.load() * weight)
        reference = finite(maximum)
        hidden = total == 0.0
        inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(total)
        merged.store(merged.load() * inverse)
        query, head = coords.query(r), coords.head_of(r)
        if query < self.out.shape[0]:
            converted = cute.make_rmem_tensor_like(merged, self.out.element_type)
            convert(merged, converted)
            store_row(converted, self.out[query, None, head, coords.batch], coords.column)
            if cutlass.const_expr(self.lse is not None):
                log_sum = (reference + cute.math.log2(total, fastmath=True)) * math.log(2.0)
                self.store_lse(-Float32.inf if hidden else log_sum, coords, r)

    @cute.jit
    def store_lse(self, log_sum: Float32, coords: ScoreCoords, r: cutlass.Constexpr):
        """Write the log-sum-exp of row r; one thread of the four that share it does."""
        if coords.column == 0:
            self.lse[coords.batch, coords.head_of(r), coords.query(r)] = log_sum


@cute.jit
def load_row(row: cute.Tensor, column: Int32, values: cute.Tensor):
    """Read what `store_row` wrote."""
    pairs = cute.logical_divide(cute.flatten(values), cute.make_layout(2))
    for i in cutlass.range_constexpr(row.shape[0] // 8):
        cute.autovec_copy(vector_of(row, 4 * i + column // 2, 2), pairs[None, i])
