"""Blocks of keys and values out of a cache: where they lie, and how they get to shared memory."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives.tma import TmaTensor
from fa3.primitives.vectors import VECTOR, row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

SMALLEST_BOX = 8
"""Keys that one TMA copy loads at least: the rows of a swizzle."""


@dataclass(frozen=True)
class CacheLayout:
    """What of a cache shapes the code.

    Fields:
        page_size: keys of a page; 0 if those of a sequence lie one after another.
        batch_indexed: whether sequences have an index of their own in the cache.
        left_padded: whether the keys of a sequence begin behind padding.
    """

    page_size: int = 0
    batch_indexed: bool = False
    left_padded: bool = False

    def box(self, tile_n: int) -> int:
        """Keys that one TMA copy loads: those of a block, if pages allow.

        0 if TMA is of no use, and rows are gathered one by one: pages are too small, or their
        first keys are not those of blocks.
        """
        if not self.page_size:
            return tile_n
        box = math.gcd(self.page_size, tile_n)
        return 0 if self.left_padded or box < SMALLEST_BOX else box


class CacheTables(NamedTuple):
    """Where the keys of each sequence are; int32.

    Fields:
        batch_idx: (batch,): index of a sequence in the cache, or in the page table; None if that
            in the batch.
        leftpad: (batch,): how many keys of padding are before a sequence's; None for none.
        page_table: (sequences, pages): where each page of a sequence is; None without pages.
    """

    batch_idx: cute.Tensor | None
    leftpad: cute.Tensor | None
    page_table: cute.Tensor | None


class Keys(NamedTuple):
    """The keys of one head of one sequence, counted from the first behind the padding.

    Fields:
        row: index of the sequence in the cache, or in the page table.
        head: key/value head.
        leftpad: keys of padding before them.
        first, last: those that may be read; last < first if there are none.
    """

    row: Int32
    head: Int32
    leftpad: Int32
    first: Int32
    last: Int32


EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
"""Policies of L2 for the data that a copy touches, as `createpolicy` makes them."""


def block_pipeline(barriers, dtype, layout, gathers: bool) -> pipeline.PipelineAsync:
    """The barriers between the loader of blocks and a warpgroup that reads them.

    Args:
        barriers: two for each stage, in shared memory.
        layout: of the blocks in shared memory, (tile_n, columns, stages).
        gathers: whether `GatheredBlocks` loads them, rather than `TmaBlocks`.
    """
    arguments = {
        "barrier_storage": barriers.data_ptr(),
        "num_stages": cute.size(layout, mode=[2]),
        "defer_sync": True,
    }
    group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
    if gathers:
        return pipeline.PipelineCpAsync.create(
            producer_group=group(agent, WARPGROUP),
            consumer_group=group(agent, WARPGROUP),
            **arguments,
        )
    return pipeline.PipelineTmaAsync.create(
        producer_group=group(agent),
        consumer_group=group(agent, WARPS),
        tx_count=cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, 0))),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        **arguments,
    )


def read_early(tensor: cute.Tensor, coord) -> Int32:
    """Read an integer that the kernel before may still write: past L1, which is not coherent."""
    address = tensor.iterator + cute.crd2idx(coord, tensor.layout)
    return cute.arch.load(address, Int32, sem="relaxed", scope="gpu")


def box_columns(columns: int) -> int:
    """Columns of one TMA box: the swizzle's width."""
    return 64 if columns % 64 == 0 else 32


@dataclass(frozen=True)
class TmaBlocks:
    """Blocks of K or V by TMA, in boxes of some keys and 128 bytes of columns.

    Fields:
        tma: of the cache (seqlen or page_size, head_dim, heads, batch or pages).
        smem: (tile_n, columns, stages), swizzled; boxes lie in it one after another, first along
            the keys.
        page_table: see `CacheTables`.
        policy: what L2 does with the data.
        is_early: whether the kernel before may still be running; see `read_early`.
    """

    tma: TmaTensor
    smem: cute.Tensor
    page_table: cute.Tensor | None
    box: int
    policy: Int64
    is_early: bool = False

    @classmethod
    def descriptor(cls, tensor: cute.Tensor, columns: int, box: int) -> TmaTensor:
        """The descriptor of a cache."""
        shape = (ROWS, box, box_columns(columns))
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, tensor.element_type, 1)
        return TmaTensor.of(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout)

    def partition(self, keys: Keys):
        """(shared memory (box, keys, columns, stage), cache (box, keys, columns, page))."""
        tile_n, columns, stages = (cute.size(self.smem, mode=[i]) for i in range(3))
        box, width = self.box, box_columns(columns)
        boxes = cute.make_layout(
            (box, width, tile_n // box, columns // width, stages),
            stride=(width, 1, box * width, tile_n * width, tile_n * columns),
        )
        coords = self.tma.coords[None, None, keys.head, None]
        if self.page_table is None:
            coords = cute.domain_offset((keys.leftpad, 0, 0), coords)
        return cpasync.tma_partition(
            self.tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(self.smem.iterator, boxes), 0, 2),
            cute.group_modes(cute.flat_divide(coords, (box, width)), 0, 2),
        )

    def loader(self, keys: Keys):
        """A function (places, stage, barrier) that starts to load the block at `find`'s places."""
        to_smem, from_gmem = self.partition(keys)

        @cute.jit
        def load(places, stage, barrier):
            for i in cutlass.range_constexpr(len(places)):
                tile, page = self.on_page(places[i], keys)
                for column in cutlass.range_constexpr(cute.size(to_smem, mode=[2])):
                    cute.copy(
                        self.tma.atom,
                        from_gmem[None, tile, column, page],
                        to_smem[None, i, column, stage],
                        tma_bar_ptr=barrier,
                        cache_policy=self.policy,
                    )

        return load

    def prefetcher(self, keys: Keys):
        """A function (places) that has the block at `find`'s places brought into L2."""
        to_smem, from_gmem = self.partition(keys)

        @cute.jit
        def prefetch(places):
            for i in cutlass.range_constexpr(len(places)):
                tile, page = self.on_page(places[i], keys)
                for column in cutlass.range_constexpr(cute.size(to_smem, mode=[2])):
                    cute.prefetch(self.tma.atom, from_gmem[None, tile, column, page])

        return prefetch

    @cute.jit
    def find(self, n_block, keys: Keys) -> tuple:
        """(first key, page) of each box of a block. Without pages the cache's rows are pages."""
        tile_n = cute.size(self.smem, mode=[0])
        if cutlass.const_expr(self.page_table is None):
            return ((n_block * tile_n, keys.row),)
        page_size, places = self.tma.coords.shape[0], []
        for i in cutlass.range_constexpr(tile_n // self.box):
            key = n_block * tile_n + i * self.box
            nth = cutlass.max(cutlass.min(key, keys.last), 0) // page_size
            if cutlass.const_expr(self.is_early):
                page = read_early(self.page_table, (keys.row, nth))
            else:
                page = self.page_table[keys.row, nth]
            places.append((key, page))
        return tuple(places)

    @cute.jit
    def on_page(self, place: tuple, keys: Keys):
        """(tile of a page, page) of a box.

        A box without a key that may be read is on page -1, where TMA finds zeros: its entry in
        the table may be anything.
        """
        key, page = place
        tile = key // self.box
        if cutlass.const_expr(self.page_table is not None):
            is_readable = key <= keys.last and key + self.box > keys.first
            page = page if is_readable else Int32(-1)
            tile = key % self.tma.coords.shape[0] // self.box
        return tile, page


@dataclass(frozen=True)
class GatheredBlocks:
    """Blocks of K or V row by row, by cp.async of a warpgroup.

    Each warp copies a quarter of a block's rows. Its lanes find them, one each, and tell the
    others.

    Fields:
        cache: (page_size, head_dim, heads, pages).
        smem: (tile_n, columns, stages), swizzled. Columns past head_dim are left as they are.
        page_table: see `CacheTables`.
        thread: of this thread in its warpgroup.
    """

    cache: cute.Tensor
    smem: cute.Tensor
    page_table: cute.Tensor
    thread: Int32

    @property
    def rows_of_warp(self) -> int:
        return cute.size(self.smem, mode=[0]) // WARPS

    def loader(self, keys: Keys):
        """A function (places, stage, barrier) that starts to load the block at `find`'s places."""
        columns, head_dim = cute.size(self.smem, mode=[1]), self.cache.shape[1]
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(), self.cache.element_type, num_bits_per_copy=128
        )
        lane, warp = self.thread % WARP, self.thread // WARP

        @cute.jit
        def load(places, stage, barrier):
            inner, page = places
            for i in cutlass.range_constexpr(self.rows_of_warp * columns // VECTOR // WARP):
                row, vector = row_and_vector(lane + i * WARP, columns)
                source = self.cache[
                    cute.arch.shuffle_sync(inner, row),
                    None,
                    keys.head,
                    cute.arch.shuffle_sync(page, row),
                ]
                target = self.smem[warp * self.rows_of_warp + row, None, stage]
                if vector * VECTOR < head_dim:
                    cute.copy(atom, vector_of(source, vector), vector_of(target, vector))

        return load

    @cute.jit
    def find(self, n_block, keys: Keys) -> tuple:
        """(row of a page, page) of this lane's key; of another one if that may not be read."""
        page_size, _, _, num_pages = self.cache.shape
        lane, warp = self.thread % WARP, self.thread // WARP
        key = n_block * cute.size(self.smem, mode=[0]) + warp * self.rows_of_warp
        key = key + lane % self.rows_of_warp
        key = cutlass.max(cutlass.min(cutlass.max(key, keys.first), keys.last), 0) + keys.leftpad
        nth = key // page_size
        page = self.page_table[keys.row, cutlass.min(nth, self.page_table.shape[1] - 1)]
        page = cutlass.min(cutlass.max(page, 0), num_pages - 1)
        return key - nth * page_size, page
