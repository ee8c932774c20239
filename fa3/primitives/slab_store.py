"""Forward's epilogue: 64 rows of O from registers through shared memory to global memory."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline

from fa3.primitives.fragments import convert, write_fragment
from fa3.primitives.tma import TmaTensor
from fa3.primitives.wgmma import WARPGROUP


@dataclass(frozen=True)
class SlabStore:
    """Stores slabs of 64 rows through this warpgroup's shared memory.

    TMA may still read a slab from shared memory while the warpgroup continues. The next `store`
    waits for TMA before it writes there.
    """

    tma: TmaTensor
    smem: cute.Tensor
    tiled_mma: cute.TiledMma
    thread: Int32
    group: Int32
    first_barrier: int

    @cute.jit
    def store(self, acc: cute.Tensor, slab: Int32, head: Int32, rows):
        """Write an accumulator to rows [64 slab, 64 slab + 64) of the sequence that has `rows`."""
        is_storing_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        if is_storing_warp:
            self.wait()
        self.meet()
        converted = cute.make_rmem_tensor_like(acc, self.smem.element_type)
        convert(acc, converted)
        target = self.smem[None, None, self.group]
        write_fragment(converted, self.tiled_mma, self.thread, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        if is_storing_warp:
            from_smem, to_gmem = self.tma.tiles_of_head(self.smem, head, rows)
            cute.copy(self.tma.atom, from_smem[None, self.group], to_gmem[None, slab])
            cute.arch.cp_async_bulk_commit_group()

    def meet(self) -> None:
        """Wait for the other warps of this warpgroup."""
        pipeline.NamedBarrier(self.first_barrier + self.group, WARPGROUP).arrive_and_wait()

    def wait(self):
        """Wait until TMA has read the last slab from shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
