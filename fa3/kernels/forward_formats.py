"""Number formats of the forward kernel: 16 bits, FP8, and FP8 caches.

A format says how blocks of K and V get from the producer's loads to the WGMMAs: as they are loaded,
or converted by further warps of the producer warpgroup. It has the WGMMAs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from cutlass import Float16
from cutlass.cute.nvgpu import warpgroup

from fa3.kernels.forward_launch import BOUNDED, ForwardConfig
from fa3.primitives.attention import Attention, Mmas, NoPingPong, PingPong
from fa3.primitives.block_memory import BlockMemory
from fa3.primitives.fp8_blocks import COLUMNS_OF_HELD_Q
from fa3.primitives.fp8_compute import (
    MOST_REGISTERS,
    PartsAttention,
    attention_of,
)
from fa3.primitives.softmax import LOG2_E, SLACK, RowMax

FIRST_TURN_BARRIER = 1

CONVERTERS = 3  # warps that convert blocks of an FP8 cache


@dataclass(frozen=True)
class SixteenBits:
    """q, k and v in 16 bits: WGMMAs read blocks as loaded."""

    config: ForwardConfig
    dtype: type  # element type of the operands of WGMMAs
    # columns, columns_v: of Q and K, and of V, in shared memory.
    columns: int
    columns_v: int

    converts_q: ClassVar[bool] = False  # whether consumers convert Q

    @property
    def holds_q(self) -> bool:
        """Whether a tile's Q stays in registers.
        Then Q K^T does not read it from shared memory."""
        return False

    @property
    def columns_pv(self) -> int:
        """Columns of V of a product P V."""
        return self.columns_v

    @property
    def converters(self) -> int:
        """Warps that convert blocks, the last of the producer warpgroup."""
        return 0

    @property
    def stages_o_in_v(self) -> bool:
        """Whether O is staged in stages of V."""
        return not (self.config.own_o or self.converters)

    @property
    def memory(self) -> tuple[BlockMemory, BlockMemory]:
        """Blocks of K and of V in shared memory."""
        k, v = (
            BlockMemory.of(self.config.tile_n, columns, self.dtype, self.config.kv_stages)
            for columns in (self.columns, self.columns_v)
        )
        return k, v

    def consumer(self, group, ones) -> tuple[Callable, Mmas, PingPong | NoPingPong]:
        """What makes a tile's attention, the WGMMAs, and this warpgroup's turns."""
        turns = PingPong(FIRST_TURN_BARRIER, self.config.consumers, group)
        source = warpgroup.OperandSource.RMEM if self.holds_q else warpgroup.OperandSource.SMEM
        return Attention, Mmas.of(self.dtype, self.config.tile_n, self.columns_pv, source), turns

    def row_max(self, bound: float) -> RowMax:
        """The row max for natural logits of at most `bound`."""
        if bound * LOG2_E <= SLACK:
            return RowMax.ZERO
        if not self.config.fixed_row_max:
            return RowMax.ONLINE
        if self.dtype is Float16:
            return RowMax.RISING
        return RowMax.ZERO if bound <= BOUNDED else RowMax.FIXED


class Fp8Products(SixteenBits):
    """FP8 operands; v comes as V^T."""

    @property
    def memory(self) -> tuple[BlockMemory, BlockMemory]:
        k, v = super().memory
        return k, v.transposed(self.config.tile_n, self.columns_v)

    def consumer(self, group, ones) -> tuple[Callable, Mmas, PingPong | NoPingPong]:
        """As in 16 bits, but without turns, which cost up to 6%."""
        attention, _ = attention_of(self.config, self.columns_v)
        mmas = Mmas.of(self.dtype, self.config.tile_n, self.columns_pv)
        return partial(attention.of, ones), mmas, NoPingPong()

    @property
    def columns_pv(self) -> int:
        """Half of V's columns, where registers are too few for all."""
        attention, _ = attention_of(self.config, self.columns_v)
        registers = self.config.tile_n // 8 + self.columns_v
        is_half = attention is PartsAttention and registers > MOST_REGISTERS
        return self.columns_v // 2 if is_half else self.columns_v

    def row_max(self, bound: float) -> RowMax:
        return RowMax.LOW if self.config.exact else RowMax.LINEAR


class Fp8Keys(SixteenBits):
    """16-bit q on an FP8 cache: K, V and q become fp16.
    Converting K and V to bf16 would take four times as many instructions: 15% of a call's time."""

    converts_q = True

    @property
    def holds_q(self) -> bool:
        return max(self.columns, self.columns_v) <= COLUMNS_OF_HELD_Q

    @property
    def converters(self) -> int:
        return CONVERTERS

    @property
    def memory(self) -> tuple[BlockMemory, BlockMemory]:
        sizes = self.config.kv_stages, self.config.converted_stages, self.converters
        k, v = (
            BlockMemory.converted(self.config.tile_n, columns, *sizes)
            for columns in (self.columns, self.columns_v)
        )
        return k, v
