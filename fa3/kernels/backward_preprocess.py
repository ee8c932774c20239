"""The preprocess kernel: statistics of rows, and what dQ accumulators start with.

delta = rowsum(dO O) - dLSE is subtracted from dP: dS = P (dP - delta). The accumulator starts with
zeros, or with flags that say that it has no value (`fa3.primitives.dq_accumulator`). The kernel
also sets the backward kernel's counters to zero.

A CTA has a query tile of the first head groups; the backward kernel does the others, by the same
code (`TilePreprocess`). Warps share a tile. All loads of a warp's rows are in flight at once; a few
neighbouring lanes share a row, 16 bytes each.

Timeline of a CTA
    wait for the kernel before | rows of O and dO, all loads in flight | zeros | sums over lanes
    The backward kernel is launched early and waits in hardware for the end of this one.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.kernels.backward_launch import PassArguments, QueryRows
from fa3.kernels.kernel_base import KernelBase
from fa3.primitives.query_tiles import place_of_row, statistics_of_tile
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec
from fa3.schedules.query_index import DenseQueryIndex, PackedQueryIndex, QueryTile

PREPROCESS_THREADS = 256

VECTORS_OF_LANE = 8  # vectors of O and of dO that a lane loads at once: 64 registers


@dataclass(frozen=True)
class TilePreprocess:
    """Preprocesses a warp's part of query tiles.
    Neighbouring lanes share a row, and have several rows below one another."""

    kernel: object  # the `Backward`
    call: QueryRows
    warps: int  # warps that share a tile; `warp` is the number of one of them
    vectors: cute.Tensor  # (8, rows, 2), the rows of O and dO that a lane has loaded
    # Of the rows whose statistics the lane writes; lanes that share rows divide them up.
    lses: cute.Tensor

    @classmethod
    def of(cls, kernel, call: QueryRows, warps: int) -> "TilePreprocess":
        rows = kernel.config.tile_m // warps
        lanes = lanes_of_row(kernel.spec, rows)
        count = rows * lanes // WARP
        vectors = cute.make_rmem_tensor((VECTOR, count, 2), call.out.element_type)
        lses = cute.make_rmem_tensor(max(1, count // lanes), Float32)
        return cls(kernel, call, warps, vectors, lses)

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return lanes_of_row(self.kernel.spec, self.kernel.config.tile_m // self.warps)

    @property
    def count(self) -> int:
        """Rows of a lane."""
        return cute.size(self.vectors, mode=[1])

    def query(self, tile: QueryTile, warp, i):
        """The index in its sequence of the lane's row i."""
        lane = cute.arch.lane_idx()
        tile_m = self.kernel.config.tile_m
        row = warp * (tile_m // self.warps) + lane // self.lanes
        return tile.tile.m_block * tile_m + row + i * (WARP // self.lanes)

    def row_of_lane(self, i: int):
        """The lane's row for the i-th statistics that it writes, see `totals_of_rows`."""
        lane, count, row = cute.arch.lane_idx() % self.lanes, self.count, i
        for step in range(min(self.lanes, self.count).bit_length() - 1):
            count //= 2
            row += lane // (1 << step) % 2 * count
        return row

    @cute.jit
    def load(self, tile: QueryTile, warp):
        """Load a warp's rows of a tile."""
        lane, step = cute.arch.lane_idx(), WARP // self.lanes
        column = cutlass.min(lane % self.lanes, (self.kernel.spec.head_dim_v - 1) // VECTOR)
        first = tile.begin + self.query(tile, warp, 0)
        # Past the last row, that row is read again.
        last = self.call.out.shape[1] - 1
        at = cutlass.max(cutlass.min(first, last), 0)
        steps = (last - at) // step
        for j, tensor in enumerate((self.call.out, self.call.d_out)):
            source = vector_of(tensor[tile.batch, at, tile.tile.head, None], column)
            stride = Int64(tensor.stride[1]) * step
            for i in cutlass.range_constexpr(self.count):
                place = (source.iterator + cutlass.min(Int32(i), steps) * stride).align(16)
                row = cute.make_tensor(place, source.layout)
                cute.autovec_copy(row, self.vectors[None, i, j])
        for i in cutlass.range_constexpr(cute.size(self.lses)):
            row = tile.begin + self.query(tile, warp, self.row_of_lane(i))
            row = cutlass.max(cutlass.min(row, last), 0)
            self.lses[i] = self.call.lse[tile.batch, tile.tile.head, row]

    @cute.jit
    def write(self, tile: QueryTile, warp):
        """Write statistics of the loaded rows, and what their dQ starts with."""
        call, config, flags = self.call, self.kernel.config, self.kernel.dq_flags
        thread, first = warp * WARP + cute.arch.lane_idx(), tile.tile.m_block * config.tile_m
        pieces = self.kernel.pieces
        if call.dq_is_zeroed != 0 and first >= 0 and first < tile.owned:
            self.call.dq(tile.tiles).clear(pieces, thread, self.warps * WARP, tile.tile)
        for i in cutlass.range_constexpr(flags):
            dq = self.call.dq(tile.tiles).one_of(pieces, flags, i)
            dq.clear_flag(tile.tile, thread)
        number = tile.tiles.number(tile.tile)
        statistics = statistics_of_tile(call.statistics, config.tile_m, number)
        totals = self.totals_of_rows()
        if cute.arch.lane_idx() % self.lanes < self.count:
            for i in cutlass.range_constexpr(len(totals)):
                query = self.query(tile, warp, self.row_of_lane(i))
                lse, delta = Float32.inf, Float32(0.0)
                if query >= 0 and query < tile.seqlen_q and self.lses[i] != -Float32.inf:
                    lse, delta = self.statistics(tile, query, self.lses[i], totals[i])
                place = place_of_row(query - first, config.stats_vector)
                statistics[place, 0] = lse
                statistics[place, 1] = delta

    @cute.jit
    def totals_of_rows(self) -> list:
        """The sums of O dO of rows whose statistics a lane writes.
        In each step a lane keeps half of its rows, the later ones if its number has the step's bit,
        and gives the others away. So the sums of all rows take hardly more steps than one."""
        lane = cute.arch.lane_idx() % self.lanes
        is_used = lane * VECTOR < self.kernel.spec.head_dim_v
        sums = []
        for i in cutlass.range_constexpr(self.count):
            o, d_o = (self.vectors[None, i, j].load().to(Float32) for j in range(2))
            total = (o * d_o).reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
            sums.append(total if is_used else Float32(0.0))
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            bit, half = 1 << step, len(sums) // 2
            kept = sent = sums
            if cutlass.const_expr(half > 0):
                is_upper = lane // bit % 2 == 1
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                kept = [b if is_upper else a for a, b in pairs]
                sent = [a if is_upper else b for a, b in pairs]
            received = [cute.arch.shuffle_sync_bfly(x, offset=bit) for x in sent]
            sums = [a + b for a, b in zip(kept, received, strict=True)]
        return sums

    @cute.jit
    def statistics(self, tile: QueryTile, query, lse, total) -> tuple[Float32, Float32]:
        """A query's log-sum-exp and delta, as the backward kernel takes them."""
        lse, delta = lse * LOG2_E, total
        if self.call.has_d_lse != 0:
            delta -= self.call.d_lse[tile.batch, tile.tile.head, tile.begin + query]
        if cutlass.const_expr(self.kernel.spec.has_dropout):
            # The backward kernel then has P / kept, and dS = P / kept (dP or 0) -
            # P / kept (kept delta).
            lse += cute.math.log2(self.call.kept, fastmath=True)
            delta *= self.call.kept
        return lse, delta


def lanes_of_row(spec: AttentionSpec, rows: int) -> int:
    """Lanes that share a row, if a warp has so many rows."""
    vectors = -(-spec.head_dim_v // VECTOR)
    return max(1 << (vectors - 1).bit_length(), WARP // rows)


def warps_of_tile(spec: AttentionSpec, tile_m: int) -> int:
    """Warps that share a tile if each fills its registers."""
    vectors = -(-spec.head_dim_v // VECTOR)
    return max(1, tile_m * (1 << (vectors - 1).bit_length()) // (WARP * VECTORS_OF_LANE))


@dataclass(frozen=True)
class BackwardPreprocess(KernelBase):
    """The preprocess kernel, compiled for one backward kernel."""

    main: Any  # the `Backward`

    entry_name: ClassVar[str] = "fa3_backward_preprocess"
    arguments_type: ClassVar[type] = PassArguments

    def arguments(self) -> list:
        return self.main.arguments()

    @cute.jit
    def launch(self, call: PassArguments, stream):
        rows = call.query_rows(self.main)
        self.kernel(rows, rows.index(self.main.config.tile_m)).launch(
            grid=(rows.num_tiles, 1, 1),
            block=(PREPROCESS_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, call: QueryRows, queries: DenseQueryIndex | PackedQueryIndex):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        ctas, _, _ = cute.arch.grid_dim()
        first = block * PREPROCESS_THREADS + thread
        for i in cutlass.range(first, call.counters.shape[0], ctas * PREPROCESS_THREADS, unroll=1):
            call.counters[i] = 0
        # The last tiles first, so that L2 has the first ones when the backward kernel needs them.
        tile = queries.at(ctas - 1 - block, self.main.config.tile_m)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        warps = PREPROCESS_THREADS // WARP
        rows = TilePreprocess.of(self.main, call, warps)
        rows.load(tile, warp)
        rows.write(tile, warp)
