"""Before the backward kernel: each row's log-sum-exp and delta, and zeros for the sums of dQ.

delta = rowsum(dO O) - dLSE is what dP is taken relative to: dS = P (dP - delta). A CTA computes the
rows of one tile of queries, which the backward kernel then loads in one run. A row of O and dO is
read by a few neighbouring lanes, 16 bytes each at a time.

Timeline of a CTA
    wait for the kernel before | zeros | rows of O and dO, all loads in flight | sums over lanes
    The backward kernel is launched early and waits in hardware for the end of this one.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa3.kernels.attention_kernel import AttentionKernel
from fa3.kernels.backward_launch import BackwardConfig, BeginArguments, CallSizes
from fa3.primitives import arguments
from fa3.primitives.ordered_gradients import TurnWords
from fa3.primitives.query_tiles import (
    PackedQueryTiles,
    QueryGradients,
    RowStatistics,
    place_of_row,
)
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.problem import AttentionSpec
from fa3.schedules import Dynamic
from fa3.schedules.order import KernelOrder
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork, QueryTile

BEGIN_THREADS = 256


@dataclass(frozen=True)
class BackwardBegin(AttentionKernel):
    """The kernel, compiled for one (spec, config).

    Fields:
        is_ragged: whether sequences are packed.
        has_used_q: whether these have `seqused_q`.
        is_ordered: whether the sums of dQ are added up in a fixed order.
    """

    spec: AttentionSpec
    config: BackwardConfig
    is_ragged: bool = False
    has_used_q: bool = False
    is_ordered: bool = False

    entry_name: ClassVar[str] = "fa3_backward_begin"

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream."""
        sizes = CallSizes.symbolic(self.is_ragged)
        return [*BeginArguments.symbolic(self, sizes), arguments.symbolic_stream()]

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        vectors = -(-self.spec.head_dim_v // VECTOR)
        return max(1 << (vectors - 1).bit_length(), BEGIN_THREADS // self.config.tile_m)

    @cute.jit
    def __call__(self, *given):
        """Launch on `BeginArguments` and a stream."""
        *given, stream = given
        call = BeginArguments(*given)
        if cutlass.const_expr(self.is_ragged):
            total_q, heads, _ = call.out.shape
            lengths = RaggedLengths(call.cu_seqlens_q, call.seqused_q, total_q)
            tiles = PackedQueryTiles.of(total_q, lengths.num_sequences, self.config.tile_m)
            queries = PackedQueryWork(lengths, tiles, heads)
            out, d_out, lse, d_lse = map(in_batch, call[:4])
            call = call._replace(out=out, d_out=d_out, lse=lse, d_lse=d_lse)
        else:
            batch, seqlen_q, heads, _ = call.out.shape
            num_m_blocks = cute.ceil_div(seqlen_q, self.config.tile_m)
            queries = DenseQueryWork(KernelOrder.of(num_m_blocks, heads, batch, 1), seqlen_q)
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        self.kernel(call, queries).launch(
            grid=queries.grid,
            block=(BEGIN_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, call: BeginArguments, queries: DenseQueryWork | PackedQueryWork):
        config = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        # The last tiles first: what the backward kernel needs first is then in L2.
        ctas, _, _ = cute.arch.grid_dim()
        own = queries.at(ctas - 1 - block, config.tile_m)
        begin = own.tile.m_block * config.tile_m
        if begin >= 0 and begin < own.owned:
            sums = QueryGradients(call.sums, own.tiles)
            sums.clear(config.pieces(self.columns), thread, BEGIN_THREADS, own.tile)
        for i in cutlass.range_constexpr(0 if self.is_ragged else Dynamic.num_counters):
            if block == 0 and thread == i:
                call.counters[i] = 0
        if cutlass.const_expr(self.is_ordered):
            TurnWords(call.turns).clear(own.tiles, own.tile, thread)
        statistics = RowStatistics(call.statistics, own.tiles).of_tile(config.tile_m, own.tile)
        rows_at_once = BEGIN_THREADS // self.lanes
        for i in cutlass.range_constexpr(config.tile_m // rows_at_once):
            row = i * rows_at_once + thread // self.lanes
            self.row(call, statistics, own, row, thread % self.lanes)

    @cute.jit
    def row(self, call: BeginArguments, statistics: cute.Tensor, own: QueryTile, row, lane):
        """Write the statistics of a row of the tile."""
        _, head, _ = own.tile
        query = own.tile.m_block * self.config.tile_m + row
        is_query = query >= 0 and query < own.seqlen_q
        row_of_tensor = own.begin + query
        total = Float32(0.0)
        if is_query and lane * VECTOR < self.spec.head_dim_v:
            o, d_o = (
                vector_of(tensor[own.batch, row_of_tensor, head, None], lane)
                for tensor in (call.out, call.d_out)
            )
            products = o.load().to(Float32) * d_o.load().to(Float32)
            total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
        total = cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=self.lanes)
        if lane == 0:
            lse, delta = Float32.inf, Float32(0.0)
            if is_query:
                given = call.lse[own.batch, head, row_of_tensor]
                if given != -Float32.inf:
                    lse, delta = given * LOG2_E, total
                    if call.has_d_lse != 0:
                        delta -= call.d_lse[own.batch, head, row_of_tensor]
                    if cutlass.const_expr(self.spec.has_dropout):
                        # The backward kernel then has P / kept, and dS = P / kept (dP or 0) -
                        # P / kept (kept delta).
                        lse += cute.math.log2(call.kept, fastmath=True)
                        delta *= call.kept
            place = place_of_row(row, self.config.statistics_at_once)
            statistics[place, 0] = lse
            statistics[place, 1] = delta


def in_batch(tensor: cute.Tensor | None) -> cute.Tensor | None:
    """A tensor of packed sequences in a batch of one."""
    if tensor is None:
        return None
    layout = cute.prepend(tensor.layout, cute.make_layout(1))
    return cute.make_tensor(tensor.iterator, layout)
