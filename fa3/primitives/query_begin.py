"""What the backward kernel needs of a tile of queries before any key comes to it: each row's
log-sum-exp and delta, and zeros for the sums of dQ.

delta = rowsum(dO O) - dLSE is what dP is taken relative to: dS = P (dP - delta). Warps share a
tile, and each does its rows in parts: all loads of a part are in flight at once. A row of O and dO
is read by a few neighbouring lanes, 16 bytes each.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.primitives.ordered_gradients import TurnWords
from fa3.primitives.query_tiles import QueryGradients, RowStatistics, place_of_row
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec

VECTORS_AT_ONCE = 8
"""Vectors of O and of dO that a lane loads at once, at most: 64 registers."""


@dataclass(frozen=True)
class QueryBegin:
    """Begins tiles of queries; a warp's part of it.

    Fields:
        spec, config: of the backward kernel.
        call: a `fa3.kernels.backward_launch.BeginArguments`; packed tensors in a batch of one.
        warp, warps: which one this is of those that share a tile.
    """

    spec: AttentionSpec
    config: object
    call: object
    warp: Int32
    warps: int

    @property
    def rows(self) -> int:
        """Rows of a tile that a warp has."""
        return self.config.tile_m // self.warps

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        vectors = -(-self.spec.head_dim_v // VECTOR)
        return max(1 << (vectors - 1).bit_length(), WARP // self.rows)

    @property
    def parts(self) -> int:
        """In how many parts a warp does its rows."""
        return -(-self.rows * self.lanes // (WARP * VECTORS_AT_ONCE))

    @cute.jit
    def all(self, own):
        """Begin a tile, a `fa3.schedules.query_work.QueryTile`."""
        self.clear(own)
        for part in cutlass.range_constexpr(self.parts):
            self.write_statistics(own, part)

    @cute.jit
    def clear(self, own):
        """Write the zeros of a tile."""
        lane = cute.arch.lane_idx()
        first = own.tile.m_block * self.config.tile_m
        if first >= 0 and first < own.owned:
            sums = QueryGradients(self.call.sums, own.tiles)
            pieces = self.config.pieces(padded(self.spec.head_dim))
            sums.clear(pieces, self.warp * WARP + lane, self.warps * WARP, own.tile)
        if cutlass.const_expr(self.call.turns is not None):
            TurnWords(self.call.turns).clear(own.tiles, own.tile, self.warp * WARP + lane)

    @cute.jit
    def write_statistics(self, own, part):
        """Write the statistics of a part of a tile's rows."""
        call, (m_block, head, _) = self.call, own.tile
        lane, lanes, dtype = cute.arch.lane_idx(), self.lanes, call.out.element_type
        statistics = RowStatistics(call.statistics, own.tiles).of_tile(self.config.tile_m, own.tile)
        count = min(VECTORS_AT_ONCE, self.rows * lanes // WARP)
        first = self.warp * self.rows + part * (count * WARP // lanes) + lane // lanes
        column = cutlass.min(lane % lanes, (self.spec.head_dim_v - 1) // VECTOR)
        o, d_o = (cute.make_rmem_tensor((VECTOR, count), dtype) for _ in range(2))
        lses = cute.make_rmem_tensor(count, Float32)
        last = call.out.shape[1] - 1
        for i in cutlass.range_constexpr(count):
            query = m_block * self.config.tile_m + first + i * (WARP // lanes)
            # A row that is no query reads another one.
            row = cutlass.max(cutlass.min(own.begin + query, last), 0)
            for tensor, vectors in ((call.out, o), (call.d_out, d_o)):
                source = vector_of(tensor[own.batch, row, head, None], column)
                cute.autovec_copy(source, vectors[None, i])
            lses[i] = call.lse[own.batch, head, row]
        for i in cutlass.range_constexpr(count):
            query = m_block * self.config.tile_m + first + i * (WARP // lanes)
            products = o[None, i].load().to(Float32) * d_o[None, i].load().to(Float32)
            total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
            if lane % lanes * VECTOR >= self.spec.head_dim_v:
                total = Float32(0.0)
            total = cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=lanes)
            if lane % lanes == 0:
                lse, delta = Float32.inf, Float32(0.0)
                if query >= 0 and query < own.seqlen_q and lses[i] != -Float32.inf:
                    lse, delta = self.statistics(own, query, lses[i], total)
                place = place_of_row(
                    query - m_block * self.config.tile_m, self.config.statistics_at_once
                )
                statistics[place, 0] = lse
                statistics[place, 1] = delta

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
