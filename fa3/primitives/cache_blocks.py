"""Loads of key blocks, of caches or packed sequences, into shared memory.

The decode kernel uses TMA and cp.async, the forward kernel TMA from caches only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives.attention import BlockStream
from fa3.primitives.pipelines import thread_pipeline, tma_pipeline
from fa3.primitives.ragged_lengths import read_early
from fa3.primitives.shared_memory import LayoutEnum
from fa3.primitives.tma import TmaTensor
from fa3.primitives.vectors import row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

SMALLEST_BOX = 8  # fewest keys of one TMA copy: the rows of a swizzle


@dataclass(frozen=True)
class CacheLayout:
    """The properties of a cache that a kernel is compiled for."""

    page_size: int = 0  # keys of a page; 0 if a sequence's keys are contiguous
    batch_indexed: bool = False  # whether an index maps sequences of the batch to rows of the cache
    left_padded: bool = False  # whether padding comes before a sequence's keys
    # Whether the keys of sequences are packed, in tensors (rows, heads, head_dim). Then the rest is
    # as it is by default.
    is_packed: bool = False
    # Whether there is a tensor of the sequences' lengths. Without it sequences have all keys that
    # there is room for. Of packed sequences it says how many of the keys count.
    has_seqlens: bool = True
    is_fp8: bool = False  # whether keys and values are float8_e4m3fn, with scales of their own

    @property
    def is_full(self) -> bool:
        """Whether every sequence has all keys that there is room for."""
        return not (self.has_seqlens or self.is_packed)

    def box(self, tile_n: int) -> int:
        """Return a TMA copy's keys: a block, or gcd(page size, block).
        0 if rows are gathered one by one: pages are too small, or left padding shifts blocks."""
        if not self.page_size:
            return tile_n
        box = math.gcd(self.page_size, tile_n)
        return 0 if self.left_padded or box < SMALLEST_BOX else box


class CacheTables(NamedTuple):
    """Tables that locate the keys of each sequence; int32."""

    # (batch,): a sequence's row in the cache or in the page table; None if it is the sequence's
    # index in the batch.
    batch_idx: cute.Tensor | None
    # (batch,): keys of padding before a sequence's own; None without padding.
    leftpad: cute.Tensor | None
    # (sequences, pages): the page numbers of a sequence; None without pages.
    page_table: cute.Tensor | None


class Keys(NamedTuple):
    """The keys of a head of a sequence, counted after the padding."""

    row: Int32  # the sequence's row in the cache, or in the page table; anything if keys are packed
    head: Int32  # key/value head
    leftpad: Int32  # keys of padding before the first; of packed sequences, rows
    # first, last: first and last key that may be read; last < first if there are none.
    first: Int32
    last: Int32


EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
"""L2 cache policies of a copy, encoded as by PTX `createpolicy`."""


def block_pipeline(barriers, dtype, layout, warps: int, gathers: bool) -> pipeline.PipelineAsync:
    """Return the mbarrier pipeline from a producer of blocks to their readers.

    `layout` is (tile_n, columns, stages). `GatheredBlocks` loads the blocks if it `gathers`,
    otherwise `TmaBlocks`.
    """
    if not gathers:
        return tma_pipeline(barriers, dtype, layout, warps)
    stages, kind = cute.size(layout, mode=[2]), pipeline.PipelineCpAsync
    return thread_pipeline(barriers, stages, WARPGROUP, warps * WARP, kind)


def load_block(load: Callable, pipe, place: tuple, state):
    """Load the block at a place once its stage is free."""
    pipe.producer_acquire(state)
    load(place, state.index, pipe.producer_get_barrier(state))
    pipe.producer_commit(state)
    state.advance()
    return state


def box_bytes(columns: int, element_bytes: int) -> int:
    """Bytes of a TMA box's row, its swizzle: 128, 64 or 32."""
    return next(width for width in (128, 64, 32) if columns * element_bytes % width == 0)


def box_columns(columns: int, dtype) -> int:
    """Columns of a TMA box."""
    element_bytes = dtype.width // 8
    return box_bytes(columns, element_bytes) // element_bytes


@dataclass(frozen=True)
class TmaBlocks:
    """Loads blocks of K or V by TMA, in boxes of keys."""

    # Descriptor of the cache (seqlen or page_size, head_dim, heads, batch or pages), or of packed
    # sequences (rows, head_dim, heads). Of these a box may have rows of the next sequence, as it
    # may have what follows a sequence in a cache.
    tma: TmaTensor
    # (tile_n, columns, stages), swizzled; boxes are contiguous, ordered by keys first.
    smem: cute.Tensor
    page_table: cute.Tensor | None  # see `CacheTables`
    box: int
    policy: Int64  # L2 cache policy of the loads
    # Whether the previous kernel may still be running; see `fa3.primitives.ragged_lengths`.
    is_early: bool = False
    # Boxes of keys whose copies are issued without a loop; fewer take fewer registers.
    copies_at_once: int = 8

    @classmethod
    def descriptor(cls, tensor: cute.Tensor, columns: int, box: int) -> TmaTensor:
        """The TMA descriptor of a cache."""
        shape = (ROWS, box, box_columns(columns, tensor.element_type))
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, tensor.element_type, 1)
        return TmaTensor.of(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout)

    @property
    def is_packed(self) -> bool:
        return cute.rank(self.tma.coords) == 3

    def partition(self, keys: Keys):
        """TMA partitions: (smem (box, keys, columns, stage), cache (box, keys, columns, page)); if
        sequences are packed, without pages.
        """
        tile_n, columns, stages = (cute.size(self.smem, mode=[i]) for i in range(3))
        box, width = self.box, box_columns(columns, self.smem.element_type)
        boxes = cute.make_layout(
            (box, width, tile_n // box, columns // width, stages),
            stride=(width, 1, box * width, tile_n * width, tile_n * columns),
        )
        if self.is_packed:
            coords = self.tma.coords[None, None, keys.head]
            coords = cute.domain_offset((keys.leftpad, 0), coords)
        else:
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
        """A function (place, stage, barrier) that starts to load the block at `find`'s place.
        Without a stage and a barrier it prefetches the block into L2."""
        to_smem, from_gmem = self.partition(keys)

        @cute.jit
        def load(place, stage=None, barrier=None):
            for i in cutlass.range(self.boxes, unroll=self.copies_at_once):
                tile, page = self.on_page(place, i)
                for column in cutlass.range_constexpr(cute.size(to_smem, mode=[2])):
                    at = (tile, column) if self.is_packed else (tile, column, page)
                    box = from_gmem[(None, *at)]
                    if cutlass.const_expr(stage is None):
                        cute.prefetch(self.tma.atom, box)
                    else:
                        cute.copy(
                            self.tma.atom,
                            box,
                            to_smem[None, i, column, stage],
                            tma_bar_ptr=barrier,
                            cache_policy=self.policy,
                        )

        return load

    @property
    def boxes(self) -> int:
        """Boxes of keys of a block."""
        return cute.size(self.smem, mode=[0]) // self.box

    @cute.jit
    def find(self, n_block, keys: Keys) -> tuple:
        """(first key of a block, page); a row counts as a page.

        If a block has several boxes, a lane looks up the page of one: the whole warp must call.
        Boxes without a readable key get page -1, for which TMA loads zeros: their page-table
        entries may be invalid.
        """
        first, page = n_block * (self.boxes * self.box), keys.row
        if cutlass.const_expr(self.page_table is not None):
            key = first
            if cutlass.const_expr(self.boxes > 1):
                key += cutlass.min(cute.arch.lane_idx(), self.boxes - 1) * self.box
            nth = cutlass.max(cutlass.min(key, keys.last), 0) // self.tma.coords.shape[0]
            if cutlass.const_expr(self.is_early):
                page = read_early(self.page_table, (keys.row, nth))
            else:
                page = self.page_table[keys.row, nth]
            is_readable = key <= keys.last and key + self.box > keys.first
            page = page if is_readable else Int32(-1)
        return first, page

    def on_page(self, place: tuple, i):
        """(box index in its page, page) of a block's box i."""
        first, page = place
        key = first + i * self.box
        if self.page_table is None:
            return key // self.box, page
        if self.boxes > 1:
            page = cute.arch.shuffle_sync(page, i)
        return key % self.tma.coords.shape[0] // self.box, page


@dataclass(frozen=True)
class GatheredBlocks:
    """Loads blocks of K or V by rows, with cp.async.
    Each warp copies a quarter of a block's rows. Each lane looks up one row and shares its place
    with the warp by shuffles."""

    cache: cute.Tensor  # (page_size, head_dim, heads, pages)
    smem: cute.Tensor  # (tile_n, columns, stages), swizzled. Columns past head_dim are not written.
    page_table: cute.Tensor  # see `CacheTables`
    thread: Int32  # this thread's index in its warpgroup

    @property
    def rows_of_warp(self) -> int:
        return cute.size(self.smem, mode=[0]) // WARPS

    def loader(self, keys: Keys):
        """A function (places, stage, barrier) that starts to load the block at `find`'s places."""
        columns, head_dim = cute.size(self.smem, mode=[1]), self.cache.shape[1]
        dtype, bits = self.cache.element_type, 128
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=bits)
        lane, warp, size = self.thread % WARP, self.thread // WARP, bits // dtype.width

        @cute.jit
        def load(places, stage, barrier):
            inner, page = places
            for i in cutlass.range_constexpr(self.rows_of_warp * columns // size // WARP):
                row, vector = row_and_vector(lane + i * WARP, columns, size)
                source = self.cache[
                    cute.arch.shuffle_sync(inner, row),
                    None,
                    keys.head,
                    cute.arch.shuffle_sync(page, row),
                ]
                target = self.smem[warp * self.rows_of_warp + row, None, stage]
                if vector * size < head_dim:
                    cute.copy(
                        atom, vector_of(source, vector, size), vector_of(target, vector, size)
                    )

        return load

    @cute.jit
    def find(self, n_block, keys: Keys) -> tuple:
        """(row in its page, page) of this lane's key, clamped to readable keys."""
        page_size, _, _, num_pages = self.cache.shape
        lane, warp = self.thread % WARP, self.thread // WARP
        key = n_block * cute.size(self.smem, mode=[0]) + warp * self.rows_of_warp
        key = key + lane % self.rows_of_warp
        key = cutlass.max(cutlass.min(cutlass.max(key, keys.first), keys.last), 0) + keys.leftpad
        nth = key // page_size
        page = self.page_table[keys.row, cutlass.min(nth, self.page_table.shape[1] - 1)]
        page = cutlass.min(cutlass.max(page, 0), num_pages - 1)
        return key - nth * page_size, page


def stream_of_keys(keys: Keys, blocks_k, blocks_v, ring_k, ring_v, is_ahead=True) -> BlockStream:
    """Loads the blocks of some keys into two `BlockRing`s."""
    load_k = partial(load_block, blocks_k.loader(keys), ring_k.loading)
    load_v = partial(load_block, blocks_v.loader(keys), ring_v.loading)
    return BlockStream(partial(blocks_k.find, keys=keys), load_k, load_v, is_ahead)
