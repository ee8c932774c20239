"""Stores of O, dK and dV, and of log-sum-exps: through shared memory, or rows from registers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, pipeline

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.fragments import as_rows_and_columns, convert, write_fragment
from fa3.primitives.tma import TmaTensor
from fa3.primitives.vectors import vector_of
from fa3.primitives.wgmma import WARPGROUP


class RowLse(NamedTuple):
    """The log-sum-exps of rows: float32 (batch, heads, seqlen_q), contiguous, or nothing.
    Which of both is known at run time only, so one kernel serves both."""

    tensor: cute.Tensor

    @classmethod
    def at(cls, address: Int64, shape: tuple, is_packed: bool = False) -> "RowLse":
        """Return the tensor (batch, heads, rows) at an address; nothing if that is 0.
        If it is packed, the rows are the same for every sequence."""
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        if is_packed:
            layout = shared_by(shape[0], cute.select(layout, mode=[1, 2]))
        return cls(cute.make_tensor(pointer, layout))

    def is_wanted(self) -> Boolean:
        """Whether there is a tensor to write."""
        return self.tensor.iterator.toint() != 0

    def store(self, at: tuple, lse: Float32, coords: ScoreCoords):
        """Write a row's log-sum-exp, which is wanted, from one of the four threads of the row."""
        store_lse(self.tensor, at, lse, coords)


def shared_by(batch, layout: cute.Layout) -> cute.Layout:
    """A layout with a mode in front, all of whose `batch` entries are the same."""
    return cute.prepend(layout, cute.make_layout(batch, stride=0))


@cute.jit
def store_lse(target: cute.Tensor, at: tuple, lse: Float32, coords: ScoreCoords):
    """Write the log-sum-exp of a row, from one of its four threads."""
    if coords.column == 0:
        target[at] = lse


class RowStore(NamedTuple):
    """The outputs that receive rows and their log-sum-exps."""

    # (seqlen_q, head_dim_v, heads, batch); of packed sequences, whose rows are all in one line,
    # batch is 1.
    out: cute.Tensor
    lse: RowLse  # of (batch, heads, seqlen_q)

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,
        lse: cute.Tensor,
        coords: ScoreCoords,
        places: tuple,  # (batch, head, row) for each of this thread's rows
        is_written: tuple,
    ):
        """Write this thread's row r of an accumulator to places[r] where `is_written[r]`."""
        rows = as_rows_and_columns(acc)
        for r in cutlass.range_constexpr(len(is_written)):
            if is_written[r]:
                batch, head, query = places[r]
                row = rows[r, None]
                converted = cute.make_rmem_tensor(row.shape, self.out.element_type)
                convert(row, converted)
                store_row(converted, self.out[query, None, head, batch], coords.column)
                if self.lse.is_wanted():
                    self.lse.store(places[r], lse[r], coords)


@cute.jit
def store_row(values: cute.Tensor, row: cute.Tensor, column: Int32):
    """Write a thread's part of an accumulator row, in pairs; its first column is `column`.
    `values` may have more columns than the row."""
    pairs = cute.logical_divide(cute.flatten(values), cute.make_layout(2))
    for i in cutlass.range_constexpr(row.shape[0] // 8):
        cute.autovec_copy(pairs[None, i], vector_of(row, 4 * i + column // 2, 2))


@dataclass(frozen=True)
class SlabStore:
    """Stores slabs of 64 rows through this warpgroup's shared memory.
    TMA may still read a slab from shared memory while the warpgroup continues. The next `store`
    waits for TMA before it writes there."""

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
