"""Operands, shared memory and pipelines of the decode kernel.

`fa3.kernels.decode` has the launch and the roles.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, pipeline
from cutlass.utils import hopper_helpers as sm90

from fa3.kernels.decode_launch import TILE_N, DecodeConfig
from fa3.kernels.kernel_base import AttentionKernel
from fa3.primitives.attention import Attention
from fa3.primitives.block_memory import BlockMemory, BlockRing
from fa3.primitives.cache_blocks import CacheLayout, CacheTables, block_pipeline
from fa3.primitives.fp8_blocks import COLUMNS_OF_HELD_Q, CONVERTED
from fa3.primitives.output_store import RowLse
from fa3.primitives.packed_rows import Workspace, clear_rows
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.shared_memory import LayoutEnum, SmemAllocator
from fa3.primitives.tma import TmaTensor
from fa3.primitives.warp_attention import MMA_COLUMNS
from fa3.primitives.wgmma import WARP, WARPGROUP, WARPS
from fa3.problem import AttentionSpec
from fa3.schedules.stream_k import CtaGroups, StreamK

CONSUMER_BARRIER = 1


class DecodeOperands(NamedTuple):
    """The global tensors."""

    # (batch, rows, heads_q, head_dim); packed queries are the same rows for every sequence.
    q: cute.Tensor
    # k, v: the cache, (seqlen or page_size, head_dim, heads_kv, batch or pages), or packed (rows,
    # head_dim, heads_kv); without TMA descriptors if rows are gathered.
    k: TmaTensor | cute.Tensor
    v: TmaTensor | cute.Tensor
    o: cute.Tensor  # (batch, rows, heads_q, head_dim_v)
    lse: RowLse  # of (batch, heads_q, rows)
    # packed_q, packed_k: which rows sequences have if they are packed, or None.
    packed_q: RaggedLengths | None
    packed_k: RaggedLengths | None
    # (batch,) int32, keys of the sequences, padding included; None if they are packed, or the cache
    # is full.
    seqlens: cute.Tensor | None
    seqlen_new: Int32  # keys that each has beyond these
    tables: CacheTables  # locate the keys of each sequence
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks
    descales: tuple | None  # see `DecodeArguments`
    table: cute.Tensor | None  # says how many CTAs overlap the forward kernel; None without it
    # Address of the counters of tiles with parts: how many CTAs have come, and have left. A tile
    # has its first slot's. 0 if `kernels.combine` merges.
    counters: Int64
    workspace: Workspace | None  # receives parts of tiles; None if tiles are never cut
    softmax_scale: Float32  # factor of Q K^T


class DecodeBuffers(NamedTuple):
    """Shared memory: Q (rows, columns, stages), K and V (TILE_N, ...)."""

    q: cute.Tensor
    k: BlockRing
    v: BlockRing
    sums: cute.Tensor | None  # of warps that share a tile's keys, see `WarpAttention.merged`
    number: cute.Tensor  # (1,) int32, the number of the consumer's part among the parts of its tile
    largest: cute.Tensor | None  # (4,) int32, of each warp's share of Q, if warps convert blocks


@dataclass(frozen=True)
class GatheredAttention(Attention):
    """Attention on blocks that cp.async wrote."""

    def wait(self, pipe, state):
        pipe.consumer_wait(state)
        # WGMMA sees what cp.async wrote only after a fence.
        cute.arch.fence_proxy("async.shared", space="cta")


def consumer_barrier() -> pipeline.NamedBarrier:
    return pipeline.NamedBarrier(CONSUMER_BARRIER, WARPGROUP)


@dataclass(frozen=True)
class DecodeMemory(AttentionKernel):
    """Fields and shared memory of the decode kernel.

    A tile's rows are the `qhead_per_kvhead` query heads of a key/value head at all query positions.
    With `is_long` the key blocks of all tiles together may need 64-bit numbers. With `is_packed`
    sequences have different numbers of queries, one after another; with `has_used_q`
    not all of them count. If the cache's layout is packed, so are the queries. With
    `overlaps_forward` the forward kernel follows, for the other sequences of the call, and runs on
    the SMs that are left.
    """

    spec: AttentionSpec
    config: DecodeConfig
    qhead_per_kvhead: int
    cache: CacheLayout
    cut_type: type
    is_long: bool = False
    is_packed: bool = False
    has_used_q: bool = False
    overlaps_forward: bool = False
    has_fp8_q: bool = False

    def __post_init__(self):
        self.config.validate(self.spec)

    @property
    def box(self) -> int:
        """Keys that one TMA copy loads."""
        return self.cache.box(TILE_N)

    @property
    def may_merge(self) -> bool:
        """Whether a tile's last CTA can merge all of its parts."""
        return self.cut_type is CtaGroups or (
            self.cut_type is StreamK and not self.overlaps_forward
        )

    @property
    def gathers(self) -> bool:
        """Whether the producer gathers rows with cp.async instead of TMA."""
        return self.box == 0

    @property
    def prefetcher(self) -> int:
        """The warp that prefetches; -1 for none."""
        return -1 if self.gathers else WARPS + 1

    @property
    def converts(self) -> bool:
        """Whether warps convert blocks of an FP8 cache in shared memory."""
        return self.cache.is_fp8 and not self.config.keys_by_warp

    @property
    def first_converter(self) -> int:
        """The first warp that converts blocks of an FP8 cache."""
        return 2 * WARPS if self.gathers else WARPS + 2

    @property
    def converters(self) -> int:
        """Warps that convert blocks of an FP8 cache."""
        return WARPS if self.gathers else 2

    @property
    def threads(self) -> int:
        return WARP * (self.first_converter + self.converters * self.converts)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of consumer threads and others, where warps convert blocks."""
        return (184, 72) if self.config.ctas_of_sm == 2 else (240, 104)

    @property
    def holds_q(self) -> bool:
        """Whether a tile's Q stays in registers, for an FP8 cache.
        Then Q K^T does not read it from shared memory, which limits the speed where warps convert
        blocks there. At larger head sizes these have too few registers."""
        few_columns = max(self.columns, self.columns_v) <= COLUMNS_OF_HELD_Q
        return self.config.keys_by_warp or (self.cache.is_fp8 and few_columns)

    @property
    def element(self):
        """Element type of Q in shared memory, and of blocks for WGMMAs."""
        return CONVERTED if self.converts else self.dtype

    def block_memory(self, columns: int) -> BlockMemory:
        """Blocks of K or of V in shared memory."""
        config = self.config
        if self.converts:
            sizes = config.kv_stages, config.converted_stages, self.converters
            return BlockMemory.converted(TILE_N, columns, *sizes)
        dtype = Float8E4M3FN if self.config.keys_by_warp else self.dtype
        return BlockMemory.of(TILE_N, columns, dtype, config.kv_stages)

    @cute.jit
    def setup_shared_memory(self):
        """Lay out shared memory and initialise the mbarriers."""
        config, dtype = self.config, self.element
        blocks_k, blocks_v = map(self.block_memory, (self.columns, self.columns_v))
        rows = config.rows_of_q(self.columns)
        shape, stages = (rows, TILE_N, self.columns), config.q_stages
        sums_layout = cute.make_ordered_layout(
            (2, WARP, self.columns_v // MMA_COLUMNS + 1, 2, WARPS), order=(0, 1, 2, 3, 4)
        )
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, dtype, stages)
        fields_k, fields_v = blocks_k.fields, blocks_v.fields

        @cute.struct
        class Storage:
            barriers_k: fields_k.barriers
            barriers_v: fields_v.barriers
            number: cute.struct.MemRange[Int32, 1]
            largest: cute.struct.MemRange[Int32, WARPS * self.converts]
            loaded_barriers_k: fields_k.loaded_barriers
            loaded_barriers_v: fields_v.loaded_barriers
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            sums: cute.struct.Align[
                cute.struct.MemRange[Float32, cute.cosize(sums_layout) * self.config.keys_by_warp],
                128,
            ]
            k: fields_k.blocks
            v: fields_v.blocks
            loaded_k: fields_k.loaded
            loaded_v: fields_v.loaded

        storage = SmemAllocator().allocate(Storage)
        buffer_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        number = storage.number.get_tensor(cute.make_layout(1))
        largest = storage.largest.get_tensor(cute.make_layout(WARPS)) if self.converts else None
        new_pipeline = partial(block_pipeline, gathers=self.gathers)
        ring_k = blocks_k.ring(storage, "k", new_pipeline, WARPS)
        ring_v = blocks_v.ring(storage, "v", new_pipeline, WARPS)
        buffer = storage.sums.get_tensor(sums_layout) if self.config.keys_by_warp else None
        smem = DecodeBuffers(buffer_q, ring_k, ring_v, buffer, number, largest)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.gathers and self.columns != self.spec.head_dim):
            # No copy fills K's padding columns. Q is 0 there, but 0 * NaN is not 0.
            thread, _, _ = cute.arch.thread_idx()
            for stage in cutlass.range_constexpr(config.kv_stages):
                if thread < WARPGROUP:
                    clear_rows(smem.k.loaded[None, None, stage], 0, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        return smem
