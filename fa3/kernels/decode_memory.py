"""Operands, shared memory and pipelines of the decode kernel, and what follows from its fields.

`fa3.kernels.decode` has the launch and the roles.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.utils import hopper_helpers as sm90

from fa3.kernels.decode_launch import TILE_N, DecodeConfig
from fa3.kernels.kernel_base import AttentionKernel
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.primitives.attention import Attention
from fa3.primitives.cache_blocks import CacheLayout, CacheTables, block_pipeline
from fa3.primitives.fp8_blocks import CONVERTED, ConvertedPipeline
from fa3.primitives.output_store import RowLse
from fa3.primitives.packed_rows import clear_rows
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.shared_memory import LayoutEnum, SmemAllocator
from fa3.primitives.tma import TmaTensor
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS
from fa3.problem import FP8, AttentionSpec
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


class DecodeBuffers(NamedTuple):
    """The buffers in shared memory: Q (64, columns, stages), K and V (TILE_N, ...)."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    number: cute.Tensor  # (1,) int32, the number of the consumer's part among the parts of its tile
    # loaded_k, loaded_v: K and V as they are loaded; `k` and `v` unless the cache is FP8.
    loaded_k: cute.Tensor
    loaded_v: cute.Tensor
    largest: cute.Tensor  # (4,) int32, of each warp's share of an FP8 call's Q


class DecodePipelines(NamedTuple):
    """The mbarrier pipelines to the consumer, and from the producer: the same without FP8."""

    k: pipeline.PipelineAsync
    v: pipeline.PipelineAsync
    loaded_k: pipeline.PipelineAsync
    loaded_v: pipeline.PipelineAsync


class Role(enum.Enum):
    """What a warp of a kernel on an FP8 cache does."""

    CONSUMER, CONVERTER, PRODUCER = range(3)


@dataclass(frozen=True)
class GatheredAttention(Attention):
    """Attention on blocks that cp.async wrote."""

    def wait(self, pipe, state):
        pipe.consumer_wait(state)
        # WGMMA sees what cp.async wrote only after a fence.
        cute.arch.fence_proxy("async.shared", space="cta")


def consumer_barrier() -> pipeline.NamedBarrier:
    return pipeline.NamedBarrier(CONSUMER_BARRIER, WARPGROUP)


def publish():
    """Make the warpgroup's writes to shared memory visible to its WGMMAs."""
    cute.arch.fence_proxy("async.shared", space="cta")
    consumer_barrier().arrive_and_wait()


@dataclass(frozen=True)
class DecodeMemory(AttentionKernel):
    """Fields and shared memory of the decode kernel, for one (spec, config, cache, type of cut).

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
        """Whether the CTA that is last to have a part of a tile can merge them all."""
        return self.cut_type is CtaGroups or (
            self.cut_type is StreamK and not self.overlaps_forward
        )

    @property
    def gathers(self) -> bool:
        """Whether the producer gathers rows with cp.async instead of TMA."""
        return self.box == 0

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
        if self.cache.is_fp8:
            return WARP * (self.first_converter + self.converters)
        return WARPGROUP + (WARPGROUP if self.gathers else 2 * WARP)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of consumer threads and of others after setmaxnreg, with an FP8 cache."""
        return (168, 88) if self.config.ctas_of_sm == 2 else (240, 104)

    @property
    def element(self):
        """Element type of what is multiplied."""
        return CONVERTED if self.cache.is_fp8 else self.dtype

    @cute.jit
    def setup_shared_memory(self):
        """Lay out shared memory and initialise the mbarriers."""
        config, row_major = self.config, LayoutEnum.ROW_MAJOR
        shape_qk = (ROWS, TILE_N, self.columns)
        shape_kv = (ROWS, TILE_N, self.columns_v)
        is_fp8, dtype, loaded = self.cache.is_fp8, self.element, self.dtype
        stages, converted = config.kv_stages, config.converted_stages
        if cutlass.const_expr(is_fp8):
            stages, loaded = converted, ELEMENT_TYPES[FP8]
        layouts = (
            sm90.make_smem_layout_a(row_major, shape_qk, dtype, config.q_stages),
            sm90.make_smem_layout_b(row_major, shape_qk, dtype, stages),
            sm90.make_smem_layout_b(row_major, shape_kv, dtype, stages),
            sm90.make_smem_layout_b(row_major, shape_qk, loaded, config.kv_stages),
            sm90.make_smem_layout_b(row_major, shape_kv, loaded, config.kv_stages),
        )
        sizes = [cute.cosize(layout) for layout in layouts]
        loaded_sizes = sizes[3:] if is_fp8 else (0, 0)

        @cute.struct
        class Storage:
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * config.kv_stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * config.kv_stages]
            number: cute.struct.MemRange[Int32, 1]
            largest: cute.struct.MemRange[Int32, WARPS * is_fp8]
            converted_k: cute.struct.MemRange[cutlass.Int64, 2 * converted]
            converted_v: cute.struct.MemRange[cutlass.Int64, 2 * converted]
            q: cute.struct.Align[cute.struct.MemRange[dtype, sizes[0]], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, sizes[2]], 1024]
            loaded_k: cute.struct.Align[cute.struct.MemRange[loaded, loaded_sizes[0]], 1024]
            loaded_v: cute.struct.Align[cute.struct.MemRange[loaded, loaded_sizes[1]], 1024]

        storage = SmemAllocator().allocate(Storage)
        fields = storage.q, storage.k, storage.v, storage.loaded_k, storage.loaded_v
        count = 5 if is_fp8 else 3
        tensors = tuple(
            field.get_tensor(layout.outer, swizzle=layout.inner)
            for field, layout in zip(fields[:count], layouts[:count], strict=True)
        )
        readers = self.converters if is_fp8 else WARPS
        loading = tuple(
            block_pipeline(barriers, loaded, layout, self.gathers, readers)
            for barriers, layout in (
                (storage.barriers_k, layouts[3]),
                (storage.barriers_v, layouts[4]),
            )
        )
        number = largest = storage.number.get_tensor(cute.make_layout(1))
        reading = loading
        if cutlass.const_expr(is_fp8):
            largest = storage.largest.get_tensor(cute.make_layout(WARPS))
            reading = tuple(
                ConvertedPipeline.create(barriers, converted, self.converters)
                for barriers in (storage.converted_k, storage.converted_v)
            )
        # Unless the cache is FP8, K and V are the last two.
        smem = DecodeBuffers(*tensors[:3], number, *tensors[-2:], largest)
        pipelines = DecodePipelines(*reading, *loading)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.gathers and self.columns != self.spec.head_dim):
            # No copy fills K's padding columns. Q is 0 there, but 0 * NaN is not 0.
            thread, _, _ = cute.arch.thread_idx()
            for stage in cutlass.range_constexpr(config.kv_stages):
                if thread < WARPGROUP:
                    clear_rows(smem.loaded_k[None, None, stage], 0, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        return smem, pipelines
