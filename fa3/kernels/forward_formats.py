"""Number formats of the forward kernel: 16 bits, products in FP8, and 16 bits on an FP8 cache.

A format says how blocks of K and V get from the producer's loads to the WGMMAs: as they are loaded,
or rewritten by further warps of the producer warpgroup. It has the WGMMAs, scales and registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, pipeline
from cutlass.utils import hopper_helpers as sm90

from fa3.kernels.forward_epilogue import ForwardBuffers, ForwardPipelines
from fa3.kernels.forward_launch import BOUNDED, ForwardConfig
from fa3.primitives.attention import Attention, BlockStream, Mmas, NoPingPong, PingPong
from fa3.primitives.fp8_blocks import BlockConverter
from fa3.primitives.fp8_compute import TRANSPOSERS, Fp8Mmas, ValueTransposer, attention_in_fp8
from fa3.primitives.shared_memory import LayoutEnum
from fa3.primitives.softmax import LOG2_E, SLACK, RowMax
from fa3.primitives.wgmma import REGISTERS, REGISTERS_OF_CONVERTERS, REGISTERS_OF_PAGES, ROWS
from fa3.scores.masks import Blocks

FIRST_TURN_BARRIER = 1

CONVERTERS = 3
"""Warps that convert blocks of an FP8 cache: all of the producer warpgroup but the one that loads.
To bf16 two values take four instructions."""

CHUNKS_AT_ONCE = 4
"""Chunks of 16 bytes that a lane of them has in registers at once, which hides what loads take."""


@dataclass(frozen=True)
class SixteenBits:
    """q, k and v in 16 bits: the WGMMAs read blocks as they are loaded."""

    config: ForwardConfig
    dtype: type  # element type of the operands of WGMMAs
    # columns, columns_v: of Q and K, and of V, in shared memory.
    columns: int
    columns_v: int
    has_cache: bool

    rewriters: ClassVar[int] = 0  # warps that rewrite blocks, the last of the producer warpgroup
    # rewrites_k, rewrites_v: which blocks they rewrite.
    rewrites_k: ClassVar[bool] = False
    rewrites_v: ClassVar[bool] = False

    @property
    def loaded_type(self) -> type:
        """Element type of K and V as they are loaded."""
        return self.dtype

    @property
    def registers(self) -> dict[int, tuple[int, int]]:
        """Consumers -> registers of a thread of the producer warpgroup, and of a consumer."""
        return REGISTERS_OF_PAGES if self.has_cache else REGISTERS

    @property
    def k_stages(self) -> int:
        """Stages of K for the consumers."""
        return self.config.converted_stages if self.rewrites_k else self.config.kv_stages

    @property
    def v_stages(self) -> int:
        """Stages of V for the consumers."""
        return self.config.converted_stages if self.rewrites_v else self.config.kv_stages

    def layouts(self) -> tuple:
        """Shared-memory layouts of K and V for the consumers, and of both as they are loaded."""
        loaded = self.loaded_layouts()
        return *loaded, *loaded

    def loaded_layouts(self) -> tuple:
        """Shared-memory layouts of K and V as they are loaded."""
        kind, stages = self.loaded_type, self.config.kv_stages
        return tuple(self.layout(columns, kind, stages) for columns in self.both_columns)

    @property
    def both_columns(self) -> tuple[int, int]:
        """Columns of K and of V."""
        return self.columns, self.columns_v

    def layout(self, columns: int, dtype: type, stages: int):
        """Layout of blocks of keys, swizzled for WGMMA and TMA."""
        shape = ROWS, self.config.tile_n, columns
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, dtype, stages)

    def rewriter(self, smem: ForwardBuffers, pipelines: ForwardPipelines, warp, lane) -> tuple:
        """What rewrites blocks, by a thread of rewriter `warp`, and its first states."""
        raise NotImplementedError

    def states(self, stages: int) -> tuple:
        """The first states of a warp that rewrites blocks, in stages for the consumers."""
        user = pipeline.PipelineUserType
        return (
            pipeline.make_pipeline_state(user.Consumer, self.config.kv_stages),
            pipeline.make_pipeline_state(user.Producer, stages),
        )

    def consumer(self, group) -> tuple[Callable, Mmas | Fp8Mmas, PingPong | NoPingPong]:
        """What makes a tile's attention, the WGMMAs, and when this warpgroup may issue them."""
        turns = PingPong(FIRST_TURN_BARRIER, self.config.consumers, group)
        return Attention, Mmas.of(self.dtype, self.config.tile_n, self.columns_v), turns

    def scales(self, softmax_scale: Float32, descales: tuple, batch, head_kv) -> tuple:
        """The scale of a tile's scores, and of its values, where it has descales."""
        raise NotImplementedError

    def reference(self, bound: float) -> RowMax:
        """The softmax's reference for scores whose natural logits are at most `bound`."""
        is_fixed = self.config.fixed_reference
        if bound * LOG2_E <= SLACK or (is_fixed and bound <= BOUNDED):
            return RowMax.ZERO
        return RowMax.FIXED if is_fixed else RowMax.ONLINE


class Fp8Products(SixteenBits):
    """q, k and v in FP8: two warps transpose V."""

    rewriters = TRANSPOSERS
    rewrites_v = True

    @property
    def registers(self) -> dict[int, tuple[int, int]]:
        return REGISTERS_OF_PAGES

    def layouts(self) -> tuple:
        k, v = self.loaded_layouts()
        shape = ROWS, self.columns_v, self.config.tile_n
        vt = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, self.v_stages)
        return k, vt, k, v

    def rewriter(self, smem: ForwardBuffers, pipelines: ForwardPipelines, warp, lane) -> tuple:
        buffers = smem.loaded_v, smem.v, pipelines.loaded_v, pipelines.v
        return ValueTransposer(*buffers, warp, lane), self.states(self.v_stages)

    def consumer(self, group) -> tuple[Callable, Mmas | Fp8Mmas, PingPong | NoPingPong]:
        """As in 16 bits, but warpgroups take no turns, which cost up to 6%."""
        one_level = self.config.one_level
        mmas = Fp8Mmas.of(self.config.tile_n, self.columns_v, one_level)
        return attention_in_fp8(one_level), mmas, NoPingPong()

    def scales(self, softmax_scale: Float32, descales: tuple, batch, head_kv) -> tuple:
        scale_k, scale_v, scale_q = (one[batch, head_kv] for one in descales)
        return softmax_scale * scale_q * scale_k, scale_v

    def reference(self, bound: float) -> RowMax:
        return RowMax.EXACT


class Fp8Keys(SixteenBits):
    """q in 16 bits on an FP8 cache: three warps convert K and V to q's type, which is exact."""

    rewriters = CONVERTERS
    rewrites_k = rewrites_v = True

    @property
    def loaded_type(self) -> type:
        return Float8E4M3FN

    @property
    def registers(self) -> dict[int, tuple[int, int]]:
        return REGISTERS_OF_CONVERTERS

    def layouts(self) -> tuple:
        stages = self.config.converted_stages
        converted = (self.layout(columns, self.dtype, stages) for columns in self.both_columns)
        return *converted, *self.loaded_layouts()

    def rewriter(self, smem: ForwardBuffers, pipelines: ForwardPipelines, warp, lane) -> tuple:
        k, v = (
            BlockConverter(*buffers, warp, lane, CONVERTERS, CHUNKS_AT_ONCE)
            for buffers in (
                (smem.loaded_k, smem.k, pipelines.loaded_k, pipelines.k),
                (smem.loaded_v, smem.v, pipelines.loaded_v, pipelines.v),
            )
        )
        stages = self.config.converted_stages
        return CacheConverter(k, v), (self.states(stages), self.states(stages))

    def scales(self, softmax_scale: Float32, descales: tuple, batch, head_kv) -> tuple:
        scale_k, scale_v = (one[batch, head_kv] for one in descales)
        return softmax_scale * scale_k, scale_v


@dataclass(frozen=True)
class CacheConverter:
    """Converts the blocks of a tile."""

    k: BlockConverter
    v: BlockConverter

    @cute.jit
    def run(self, blocks: Blocks, states: tuple) -> tuple:
        """Convert the tile's blocks in the consumers' order; return the next states."""
        k_states, v_states = states
        stream = BlockStream(lambda n_block: n_block, self.k.convert, self.v.convert)
        n_block = blocks.end - 1
        place, k_states = stream.first(n_block, k_states)
        place, k_states, v_states = stream.rest(blocks.begin, n_block, place, k_states, v_states)
        return stream.last(place, k_states, v_states)
