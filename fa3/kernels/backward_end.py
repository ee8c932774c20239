"""After the backward kernel: dQ = softmax_scale * its sums, in 16 bits.

A CTA converts one tile of queries. Each warpgroup reads a piece as the backward kernel's warpgroup
held it, so it can leave through shared memory and TMA like any accumulator.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.utils import hopper_helpers as sm90

from fa3.kernels.attention_kernel import AttentionKernel
from fa3.kernels.backward_launch import BackwardConfig, CallSizes, EndArguments
from fa3.primitives import arguments
from fa3.primitives.dsl import LayoutEnum, SmemAllocator
from fa3.primitives.query_tiles import QueryGradients
from fa3.primitives.rows_of_sequence import with_movable_end
from fa3.primitives.slab_store import SlabStore
from fa3.primitives.tma import TmaTensor
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import AttentionSpec
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork, QueryTile

FIRST_BARRIER = 1


@dataclass(frozen=True)
class BackwardEnd(AttentionKernel):
    """The kernel, compiled for one (spec, config); `is_ragged`: whether sequences are packed."""

    spec: AttentionSpec
    config: BackwardConfig
    is_ragged: bool = False

    entry_name: ClassVar[str] = "fa3_backward_end"

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream."""
        sizes = CallSizes.symbolic(self.is_ragged)
        return [*EndArguments.symbolic(self, sizes), arguments.symbolic_stream()]

    @property
    def threads(self) -> int:
        return WARPGROUP * self.config.pieces(self.columns).count

    def smem_layout(self) -> cute.ComposedLayout:
        """Pieces (rows, columns, count) as they leave."""
        pieces = self.config.pieces(self.columns)
        shape = ROWS, ROWS, pieces.width
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, pieces.count)

    @cute.jit
    def __call__(self, *given):
        """Launch on `EndArguments` and a stream."""
        *given, stream = given
        call = EndArguments(*given)
        if cutlass.const_expr(self.is_ragged):
            queries = PackedQueryWork.of(call.dq, call.cu_seqlens_q, None, self.config.tile_m)
            dq = with_movable_end(call.dq)
        else:
            queries = DenseQueryWork.of(call.dq, self.config.tile_m)
            dq = cute.make_tensor(call.dq.iterator, cute.select(call.dq.layout, mode=[1, 3, 2, 0]))
        tma = TmaTensor.of(cpasync.CopyBulkTensorTileS2GOp(), dq, self.smem_layout())
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        self.kernel(call.sums, tma, call.softmax_scale, queries).launch(
            grid=queries.grid,
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, tma: TmaTensor, scale: Float32, queries):
        layout = self.smem_layout()

        @cute.struct
        class Storage:
            pieces: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        storage = SmemAllocator().allocate(Storage)
        smem = storage.pieces.get_tensor(layout.outer, swizzle=layout.inner)
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        # The last tiles first: their sums are still in L2.
        ctas, _, _ = cute.arch.grid_dim()
        own = queries.at(ctas - 1 - block, self.config.tile_m)
        begin = own.tile.m_block * self.config.tile_m
        if begin >= 0 and begin < own.owned:
            self.convert(QueryGradients(sums, own.tiles), own, tma, smem, scale)

    @cute.jit
    def convert(self, sums: QueryGradients, own: QueryTile, tma: TmaTensor, smem, scale: Float32):
        """Write dQ of a tile."""
        pieces = self.config.pieces(self.columns)
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        group = cute.arch.make_warp_uniform(thread_idx // WARPGROUP)
        # Says which elements of a piece a thread holds; nothing is multiplied here.
        major = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, Float32, (1, 1, 1), (ROWS, pieces.width)
        )
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, pieces.width)), Float32)
        sums.load(pieces, acc, thread, group, own.tile)
        acc.store(acc.load() * scale)
        slab, column = own.tile.m_block * pieces.rows, 0
        if cutlass.const_expr(pieces.rows > 1):
            slab += group
        else:
            column = group
        out = SlabStore(tma, smem, mma, thread, group, FIRST_BARRIER)
        out.store(acc, slab, own.tile.head, own.rows, column)
        out.wait()
