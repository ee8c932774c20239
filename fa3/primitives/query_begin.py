"""What the backward kernel needs of a tile of queries before any key comes to it: each row's
log-sum-exp and delta, and zeros for the sums of dQ.

delta = rowsum(dO O) - dLSE is what dP is taken relative to: dS = P (dP - delta). Warps share a
tile. All loads of a warp's rows are in flight at once; a row of O and dO is read by a few
neighbouring lanes, 16 bytes each.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa3.primitives.ordered_gradients import TurnWords
from fa3.primitives.query_tiles import QueryGradients, RowStatistics, place_of_row
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec

MOST_VECTORS = 8
"""Vectors of O and of dO that a lane loads at once: 64 registers."""


@dataclass(frozen=True)
class QueryBegin:
    """Begins tiles of queries, each a `fa3.schedules.query_work.QueryTile`; a warp's part of it.

    Fields:
        spec, config: of the backward kernel.
        call: a `fa3.kernels.backward_launch.BeginArguments`; packed tensors in a batch of one.
        warps: how many share a tile; `warp` is which one of them.
        vectors: (8, count, 2), of the rows of O and dO that a lane has loaded.
        lses: (count,), of these rows.
    """

    spec: AttentionSpec
    config: object
    call: object
    warps: int
    vectors: cute.Tensor
    lses: cute.Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, config, call, warps: int) -> "QueryBegin":
        count = config.tile_m // warps * lanes_of_row(spec, config.tile_m // warps) // WARP
        vectors = cute.make_rmem_tensor((VECTOR, count, 2), call.out.element_type)
        return cls(spec, config, call, warps, vectors, cute.make_rmem_tensor(count, Float32))

    @property
    def rows(self) -> int:
        """Rows of a tile that a warp has."""
        return self.config.tile_m // self.warps

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return lanes_of_row(self.spec, self.rows)

    def query(self, own, warp, i):
        """Which query of a tile's sequence is the lane's number i."""
        row = warp * self.rows + i * (WARP // self.lanes) + cute.arch.lane_idx() // self.lanes
        return own.tile.m_block * self.config.tile_m + row

    @cute.jit
    def load(self, own, warp):
        """Load a warp's rows of a tile."""
        call, lane = self.call, cute.arch.lane_idx()
        column = cutlass.min(lane % self.lanes, (self.spec.head_dim_v - 1) // VECTOR)
        last = call.out.shape[1] - 1
        for i in cutlass.range_constexpr(cute.size(self.lses)):
            # A row that is no query reads another one.
            row = cutlass.max(cutlass.min(own.begin + self.query(own, warp, i), last), 0)
            for j, tensor in enumerate((call.out, call.d_out)):
                source = vector_of(tensor[own.batch, row, own.tile.head, None], column)
                cute.autovec_copy(source, self.vectors[None, i, j])
            self.lses[i] = call.lse[own.batch, own.tile.head, row]

    @cute.jit
    def write(self, own, warp):
        """Write zeros and statistics of the rows that were loaded."""
        call, config, lane, lanes = self.call, self.config, cute.arch.lane_idx(), self.lanes
        thread, first = warp * WARP + lane, own.tile.m_block * config.tile_m
        if first >= 0 and first < own.owned:
            sums = QueryGradients(call.sums, own.tiles)
            sums.clear(
                config.pieces(padded(self.spec.head_dim)), thread, self.warps * WARP, own.tile
            )
        if cutlass.const_expr(call.turns is not None):
            TurnWords(call.turns).clear(own.tiles, own.tile, thread)
        statistics = RowStatistics(call.statistics, own.tiles).of_tile(config.tile_m, own.tile)
        for i in cutlass.range_constexpr(cute.size(self.lses)):
            query = self.query(own, warp, i)
            products = self.of_row(i, 0) * self.of_row(i, 1)
            total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
            if lane % lanes * VECTOR >= self.spec.head_dim_v:
                total = Float32(0.0)
            total = cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=lanes)
            if lane % lanes == 0:
                lse, delta = Float32.inf, Float32(0.0)
                if query >= 0 and query < own.seqlen_q and self.lses[i] != -Float32.inf:
                    lse, delta = self.statistics(own, query, self.lses[i], total)
                place = place_of_row(query - first, config.statistics_at_once)
                statistics[place, 0] = lse
                statistics[place, 1] = delta

    def of_row(self, i: int, j: int):
        """A lane's numbers of its row i of O (0) or dO (1)."""
        return self.vectors[None, i, j].load().to(Float32)

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
    return max(1, tile_m * (1 << (vectors - 1).bit_length()) // (WARP * MOST_VECTORS))
