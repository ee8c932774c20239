"""What the sums' warpgroup of the backward kernel does: dQ = dS K of every block of queries.

The MMA warpgroups write dS of all keys of the tile to shared memory. This one multiplies it by K,
one piece of dQ after another, and has each added to the sums in global memory; so nobody else waits
for memory, or has registers for dQ.
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
from fa3.primitives.query_tiles import QueryPieces
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
        smem: the kernel's buffers.
        pipeline: delivers dS.
        k_stage: where the tile's K is.
        sums: `QueryGradients`, or `OrderedGradients`.
        thread: of the warpgroup.
    """

    config: object
    regs: QueryGradientOperands
    smem: object
    pipeline: object
    k_stage: Int32
    sums: object
    thread: Int32

    @property
    def pieces(self) -> QueryPieces:
        return self.config.pieces(cute.size(self.smem.k, mode=[1]))

    @cute.jit
    def next(self, tile, ds_state):
        """dQ of one block of queries."""
        self.pipeline.consumer_wait(ds_state)
        # Not before there is dS: the words of turns may be among what is still to be begun.
        self.sums.enter(self.thread, tile)
        for piece in cutlass.range(self.pieces.count, unroll=1):
            acc = self.product(piece, ds_state)
            warpgroup.wait_group(0)
            if piece == self.pieces.count - 1:
                # dS has been read: its room is free before the last piece is added.
                with cute.arch.elect_one():
                    self.pipeline.consumer_release(ds_state)
            self.sums.add(self.pieces, acc, self.thread, piece, tile, self.smem.sums)
        self.sums.leave(self.pieces, self.thread, tile)
        ds_state.advance()
        return ds_state

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
