"""What dQ's warpgroup of the backward kernel does: dQ = dS K of every block of queries.

The MMA warpgroups write dS of all keys of the tile to shared memory. This one multiplies it by K,
one piece of dQ after another, and writes each to shared memory, from where a warp of the producer's
has it added to the sums in global memory. So nobody else has registers for dQ, and nobody who
multiplies waits for memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.gradient_mmas import columns_of_keys, operand_a, operand_b
from fa3.primitives.query_tiles import QueryPieces, stage_piece
from fa3.primitives.wgmma import ROWS


class QueryGradientOperands(NamedTuple):
    """Views of shared memory, and the WGMMA of a piece of dQ.

    Fields:
        kt: (width, pieces beside one another, keys, stages), columns of K.
        dst: (64, pieces below one another, keys, stages), columns of dS^T.
    """

    mma: cute.TiledMma
    kt: cute.Tensor
    dst: cute.Tensor

    @classmethod
    def of(cls, dtype, config, smem) -> "QueryGradientOperands":
        """The operands for a `BackwardConfig`; `smem` has the buffers of `GradientLayouts`."""
        pieces = config.pieces(cute.size(smem.k, mode=[1]))
        major, shape = OperandMajorMode.MN, (ROWS, pieces.width)
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, major, major, Float32, (1, 1, 1), shape, warpgroup.OperandSource.SMEM
        )
        kt = columns_of_keys(smem.k, pieces.width, config.k_stages)
        return cls(mma, kt, columns_of_keys(smem.ds, ROWS, config.stages))


@dataclass(frozen=True)
class QueryGradientStep:
    """The steps of one tile of keys and one query head.

    Fields:
        config: a `fa3.kernels.backward_launch.BackwardConfig`.
        smem, pipelines: the kernel's buffers, and what delivers dS in them, and pieces of dQ to who
            adds them.
        k_stage: where the tile's K is.
        thread: of the warpgroup.
    """

    config: object
    regs: QueryGradientOperands
    smem: object
    pipelines: object
    k_stage: Int32
    thread: Int32

    @property
    def pieces(self) -> QueryPieces:
        return self.config.pieces(cute.size(self.smem.k, mode=[1]))

    @cute.jit
    def next(self, ds_state, staged_state):
        """dQ of one block of queries."""
        ds, staged = self.pipelines.ds, self.pipelines.staged
        ds.consumer_wait(ds_state)
        for piece in cutlass.range(self.pieces.count, unroll=1):
            acc = self.product(piece, ds_state)
            warpgroup.wait_group(0)
            if piece == self.pieces.count - 1:
                # dS has been read: its room is free before the last piece is written.
                with cute.arch.elect_one():
                    ds.consumer_release(ds_state)
            staged.producer_acquire(staged_state)
            stage_piece(self.pieces, acc, self.thread, staged_state.index, self.smem.staged)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                staged.producer_commit(staged_state)
            staged_state.advance()
        ds_state.advance()
        return ds_state, staged_state

    def product(self, piece, ds_state) -> cute.Tensor:
        """Start a piece of dQ into a fresh accumulator."""
        down, right = (piece, 0) if self.pieces.rows > 1 else (0, piece)
        mma = self.regs.mma
        dst = operand_a(mma, self.regs.dst[None, down, None, ds_state.index])
        kt = operand_b(mma, self.regs.kt[None, right, None, self.k_stage])
        shape = mma.partition_shape_C((ROWS, self.pieces.width))
        acc = cute.make_rmem_tensor(shape, Float32)
        wgmma.issue(mma.op, acc, dst, kt, accumulate=False)
        return acc
