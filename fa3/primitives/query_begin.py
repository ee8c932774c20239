"""What the backward kernel needs of a tile of queries before any key comes to it: each row's
log-sum-exp and delta, and what the sums of dQ begin with: zeros, or a word that there are none.

delta = rowsum(dO O) - dLSE is what dP is taken relative to: dS = P (dP - delta). Warps share a
tile. All loads of a warp's rows are in flight at once; a row of O and dO is read by a few
neighbouring lanes, 16 bytes each.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives.query_tiles import QueryGradients, RowStatistics, SumWords, place_of_row
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec

VECTORS_OF_LANE = 8
"""Vectors of O and of dO that a lane loads at once: 64 registers."""


@dataclass(frozen=True)
class QueryBegin:
    """Begins tiles of queries, each a `fa3.schedules.query_work.QueryTile`; a warp's part of it.

    Neighbouring lanes share a row, and have several rows below one another.

    Fields:
        spec, config: of the backward kernel.
        call: a `fa3.kernels.backward_launch.BeginArguments`; packed tensors in a batch of one.
        warps: how many share a tile; `warp` is which one of them.
        vectors: (8, rows, 2), of the rows of O and dO that a lane has loaded.
        lses: of the rows whose statistics it writes; lanes that share rows divide them up.
    """

    spec: AttentionSpec
    config: object
    call: object
    warps: int
    vectors: cute.Tensor
    lses: cute.Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, config, call, warps: int) -> "QueryBegin":
        rows = config.tile_m // warps
        lanes = lanes_of_row(spec, rows)
        count = rows * lanes // WARP
        vectors = cute.make_rmem_tensor((VECTOR, count, 2), call.out.element_type)
        lses = cute.make_rmem_tensor(max(1, count // lanes), Float32)
        return cls(spec, config, call, warps, vectors, lses)

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return lanes_of_row(self.spec, self.config.tile_m // self.warps)

    @property
    def count(self) -> int:
        """Rows of a lane."""
        return cute.size(self.vectors, mode=[1])

    def query(self, own, warp, i):
        """Which query of a tile's sequence is the lane's number i."""
        lane = cute.arch.lane_idx()
        row = warp * (self.config.tile_m // self.warps) + lane // self.lanes
        return own.tile.m_block * self.config.tile_m + row + i * (WARP // self.lanes)

    def row_of_lane(self, i: int):
        """Which of a lane's rows is the i-th whose statistics it writes: see `totals_of_rows`."""
        lane, count, row = cute.arch.lane_idx() % self.lanes, self.count, i
        for step in range(min(self.lanes, self.count).bit_length() - 1):
            count //= 2
            row += lane // (1 << step) % 2 * count
        return row

    @cute.jit
    def load(self, own, warp):
        """Load a warp's rows of a tile."""
        lane, step = cute.arch.lane_idx(), WARP // self.lanes
        column = cutlass.min(lane % self.lanes, (self.spec.head_dim_v - 1) // VECTOR)
        first = own.begin + self.query(own, warp, 0)
        # A row that is none reads another one.
        last = self.call.out.shape[1] - 1
        at = cutlass.max(cutlass.min(first, last), 0)
        steps = (last - at) // step
        for j, tensor in enumerate((self.call.out, self.call.d_out)):
            source = vector_of(tensor[own.batch, at, own.tile.head, None], column)
            stride = Int64(tensor.stride[1]) * step
            for i in cutlass.range_constexpr(self.count):
                place = (source.iterator + cutlass.min(Int32(i), steps) * stride).align(16)
                row = cute.make_tensor(place, source.layout)
                cute.autovec_copy(row, self.vectors[None, i, j])
        for i in cutlass.range_constexpr(cute.size(self.lses)):
            row = own.begin + self.query(own, warp, self.row_of_lane(i))
            row = cutlass.max(cutlass.min(row, last), 0)
            self.lses[i] = self.call.lse[own.batch, own.tile.head, row]

    @cute.jit
    def write(self, own, warp):
        """Write statistics of the rows that were loaded, and what their sums begin with."""
        call, config = self.call, self.config
        thread, first = warp * WARP + cute.arch.lane_idx(), own.tile.m_block * config.tile_m
        if call.has_zeros != 0 and first >= 0 and first < own.owned:
            sums = QueryGradients(call.sums, own.tiles)
            sums.clear(
                config.pieces(padded(self.spec.head_dim)), thread, self.warps * WARP, own.tile
            )
        if cutlass.const_expr(call.words is not None):
            SumWords(call.words).clear(own.tiles, own.tile, thread)
        statistics = RowStatistics(call.statistics, own.tiles).of_tile(config.tile_m, own.tile)
        totals = self.totals_of_rows()
        if cute.arch.lane_idx() % self.lanes < self.count:
            for i in cutlass.range_constexpr(len(totals)):
                query = self.query(own, warp, self.row_of_lane(i))
                lse, delta = Float32.inf, Float32(0.0)
                if query >= 0 and query < own.seqlen_q and self.lses[i] != -Float32.inf:
                    lse, delta = self.statistics(own, query, self.lses[i], totals[i])
                place = place_of_row(query - first, config.statistics_at_once)
                statistics[place, 0] = lse
                statistics[place, 1] = delta

    @cute.jit
    def totals_of_rows(self) -> list:
        """The sums of O dO over the rows whose statistics a lane writes.

        In each step a lane keeps half of its rows, the later ones if its number has the step's bit,
        and gives the others away. So the sums of all rows take hardly more steps than one.
        """
        lane = cute.arch.lane_idx() % self.lanes
        is_used = lane * VECTOR < self.spec.head_dim_v
        sums = []
        for i in cutlass.range_constexpr(self.count):
            o, d_o = (self.vectors[None, i, j].load().to(Float32) for j in range(2))
            total = (o * d_o).reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
            sums.append(total if is_used else Float32(0.0))
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            bit, half = 1 << step, len(sums) // 2
            kept = given = sums
            if cutlass.const_expr(half > 0):
                is_upper = lane // bit % 2 == 1
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                kept = [b if is_upper else a for a, b in pairs]
                given = [a if is_upper else b for a, b in pairs]
            got = [cute.arch.shuffle_sync_bfly(x, offset=bit) for x in given]
            sums = [a + b for a, b in zip(kept, got, strict=True)]
        return sums

    @cute.jit
    def statistics(self, own, query, lse: Float32, total: Float32) -> tuple[Float32, Float32]:
        """A query's log-sum-exp and delta, as the backward kernel takes them."""
        lse, delta = lse * LOG2_E, total
        if self.call.has_d_lse != 0:
            delta -= self.call.d_lse[own.batch, own.tile.head, own.begin + query]
        if cutlass.const_expr(self.spec.has_dropout):
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
    """Warps that share a tile, if each loads as much as its registers hold."""
    vectors = -(-spec.head_dim_v // VECTOR)
    return max(1, tile_m * (1 << (vectors - 1).bit_length()) // (WARP * VECTORS_OF_LANE))
