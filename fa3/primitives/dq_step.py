"""The dQ warpgroup's step in the backward kernel: dQ = dS K of a query block.

The MMA warpgroups write dS for all keys of the tile to shared memory. The dQ warpgroup multiplies
it by K, one piece of dQ after another, and writes each piece to shared memory, from where the
reduce warp adds it to the accumulator. So no other warpgroup needs registers for dQ, and no
warpgroup that multiplies waits for memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.dq_accumulator import DqPieces, stage_piece
from fa3.primitives.gradient_mmas import columns_of_keys, operand_a, operand_b
from fa3.primitives.wgmma import ROWS


class DqOperands(NamedTuple):
    """Views of shared memory, and the WGMMA of a piece of dQ."""

    mma: cute.TiledMma
    kt: cute.Tensor  # (width, pieces in a row, keys, stages), columns of K
    dst: cute.Tensor  # (64, pieces in a column, keys, stages), columns of dS^T

    @classmethod
    def of(cls, dtype, config, smem) -> "DqOperands":
        """The operands for a `BackwardConfig`; `smem` has the buffers of `GradientLayouts`."""
        pieces = config.pieces(cute.size(smem.k, mode=[1]))
        major, shape = OperandMajorMode.MN, (ROWS, pieces.width)
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, major, major, Float32, (1, 1, 1), shape, warpgroup.OperandSource.SMEM
        )
        kt = columns_of_keys(smem.k, pieces.width, config.k_stages)
        return cls(mma, kt, columns_of_keys(smem.ds, ROWS, config.stages))


@dataclass(frozen=True)
class DqStep:
    """The steps of one key tile and one query head."""

    config: object  # a `fa3.kernels.backward_launch.BackwardConfig`
    operands: DqOperands
    # smem, pipelines: the kernel's buffers; pipelines that deliver dS, and pieces of dQ.
    smem: object
    pipelines: object
    k_stage: Int32  # the stage of the tile's K
    thread: Int32  # of the warpgroup

    @property
    def pieces(self) -> DqPieces:
        return self.config.pieces(cute.size(self.smem.k, mode=[1]))

    @cute.jit
    def next(self, ds_state, staged_state):
        """dQ of one query block."""
        ds, staged = self.pipelines.ds, self.pipelines.staged
        ds.consumer_wait(ds_state)
        for piece in cutlass.range(self.pieces.count, unroll=1):
            acc = self.product(piece, ds_state)
            warpgroup.wait_group(0)
            if piece == self.pieces.count - 1:
                # dS has been read: its buffer is free before the last piece is written.
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
        row, column = self.pieces.place(piece)
        mma = self.operands.mma
        dst = operand_a(mma, self.operands.dst[None, row, None, ds_state.index])
        kt = operand_b(mma, self.operands.kt[None, column, None, self.k_stage])
        shape = mma.partition_shape_C((ROWS, self.pieces.width))
        acc = cute.make_rmem_tensor(shape, Float32)
        wgmma.issue(mma.op, acc, dst, kt, accumulate=False)
        return acc
