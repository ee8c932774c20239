"""Backward's epilogue: dK and dV from registers through shared memory to global memory.

The MMA warpgroups write them where K and V were, and go on to their next tile. A warp of the dQ
warpgroup, which has nothing to do before there are scores of that tile, issues the copies and waits
until TMA has read the buffer.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import pipeline

from fa3.primitives.fragments import convert, write_fragment
from fa3.primitives.tma import TmaTensor


@dataclass(frozen=True)
class GradientStore:
    """Stores one of dK and dV."""

    tma: TmaTensor | None
    smem: cute.Tensor  # what each MMA warpgroup writes, (64, columns, groups * stages)
    groups: int  # MMA warpgroups
    warpgroups_share_keys: bool  # whether they have columns of the same keys, or each its own keys
    # A named barrier of the warps that write and the warps that wait for it.
    written: pipeline.NamedBarrier

    @property
    def groups_that_store(self) -> int:
        """MMA warpgroups with columns of the head; with 16 or fewer the second has only padding.
        Shared memory has at least 32 columns, of which each of two warpgroups has half."""
        if not self.warpgroups_share_keys:
            return self.groups
        width, columns = cute.size(self.smem, mode=[1]), cute.size(self.tma.coords, mode=[1])
        return min(self.groups, -(-columns // width))

    @cute.jit
    def write(self, acc: cute.Tensor, tiled_mma: cute.TiledMma, thread, group, stage=0):
        """Write a warpgroup's accumulator to its part of the buffer, which is not read any more."""
        converted = cute.make_rmem_tensor_like(acc, self.smem.element_type)
        convert(acc, converted)
        target = self.smem[None, None, stage * self.groups + group]
        write_fragment(converted, tiled_mma, thread, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.written.arrive()

    @cute.jit
    def store(self, n_block, head, rows, stage=0):
        """Copy a tile to global memory; one warp calls this when all have written.
        Returns when TMA has read the buffer."""
        slabs = 1 if self.warpgroups_share_keys else self.groups
        if cute.arch.lane_idx() == 0:
            for group in cutlass.range_constexpr(self.groups_that_store):
                slab, column = (0, group) if self.warpgroups_share_keys else (group, 0)
                source, target = self.tma.tiles_of_head(self.smem, head, rows, column=column)
                place, row = stage * self.groups + group, n_block * slabs + slab
                cute.copy(self.tma.atom, source[None, place], target[None, row])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
