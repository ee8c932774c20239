"""Attention of a warpgroup in FP8, with two-level or one-level sums.

FP8 WGMMAs differ from 16-bit ones in three ways:

- Both operands must be contiguous along the dimension that is summed over, so P V wants V^T. Where
  the caller does not have it, a kernel before this one writes it (`fa3.kernels.transpose`).
- A thread gets S for other keys than it must have as the operand P. In V^T, 16 keys each are in
  the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, the key order. With it the registers of S are the
  operand P as they are.
- FP8 sums have few bits. So P V of some blocks goes to registers of its own, which are then added
  to O in fp32. With sums in one level, an option, the WGMMAs add P V to O.

Sources: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3, permutes keys; DeepSeek-V3
(arXiv 2412.19437), section 3.3.2, sums in two levels.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.attention import Attention
from fa3.primitives.shared_memory import LayoutEnum
from fa3.primitives.softmax import RowMax
from fa3.primitives.wgmma import ROWS

MOST_REGISTERS = 208
"""Registers of two MMA warpgroups for all fragments: of 232, 24 are for other things."""

KEYS_OF_SUM = 512
"""Keys whose P V the WGMMAs sum up before it is added to O, with overlap. They cut off bits, so
sums of values of one sign are too small: by 0.6% with 512 keys, 1.6% with 1024, 3.8% with 2048.
512 are 1% slower than 2048, and 5% under a causal mask (head size 128, with exponentials)."""

ONES = 256  # bytes of shared memory that the WGMMAs of row sums multiply P by

CODES = """{{
.reg .b32 pair<2>, above<2>, factor<2>, minus_16;
mov.b32 factor0, 0x34003400;
mov.b32 factor1, 0x3a003a00;
mov.b32 minus_16, 0x80108010;
cvt.rn.f16x2.f32 pair0, {$r2}, {$r0};
cvt.rn.f16x2.f32 pair1, {$r3}, {$r1};
fma.rn.relu.f16x2 above0, pair0, factor1, minus_16;
fma.rn.relu.f16x2 above1, pair1, factor1, minus_16;
fma.rn.relu.f16x2 pair0, pair0, factor0, above0;
fma.rn.relu.f16x2 pair1, pair1, factor0, above1;
mad.lo.u32 {$w0}, pair1, 256, pair0;
}}"""
"""PTX that makes codes of four scores: max(8 (x + 7), 2 (x + 9), 0) of a score x, in powers of two.
2 (x + 9) is for numbers below 2**-6. What comes in is y = 8 (x + 9), as a subnormal of fp16. The
code is max(0, y / 4 + max(0, 3 y / 4 - 16))."""


@dataclass(frozen=True)
class Fp8Attention(Attention):
    """The attention of a tile in e4m3, with one-level sums."""

    # None with exponentials.
    ones: cute.Tensor | None = None  # what P is multiplied by for row sums, see `fill_ones`
    sums: cute.Tensor | None = None  # row sums of a block

    @classmethod
    def of(cls, ones: cute.Tensor | None, *fields) -> "Fp8Attention":
        """A tile's attention at its beginning; further arguments as in the base."""
        sums = None if ones is None else cute.make_rmem_tensor(((2, 2, 1), 1, 1), Float32)
        return replace(cls(*fields), ones=ones, sums=sums)

    @property
    def accs(self) -> tuple:
        return (self.regs.acc_O,) if self.sums is None else (self.regs.acc_O, self.sums)

    def issue_pv(self, v_state, part: int):
        """Start O += P V, and the row sums of P."""
        self.sum_rows()
        return super().issue_pv(v_state, part)

    def sum_rows(self) -> None:
        """Start the row sums of linear codes, in P V's commit group."""
        if self.sums is not None:
            kinds = Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K
            source = warpgroup.OperandSource.RMEM
            mma = sm90.make_trivial_tiled_mma(*kinds, Float32, (1, 1, 1), (ROWS, 8), source)
            b, p = mma.make_fragment_B(mma.get_slice(0).partition_B(self.ones)), self.operand_p()
            # The same for all keys.
            layout = cute.make_layout((1, 1, cute.size(p, mode=[2])), stride=(0, 0, 0))
            ones = cute.make_tensor(b.iterator, layout)
            wgmma.issue(mma.op, self.sums, p, ones, accumulate=False, ends=False)

    def add(self, fresh, part: int, v_state=None) -> None:
        """Add a block's row sums to the softmax's."""
        if self.sums is not None:
            for r in range(2):
                self.softmax.row_sum[r] = self.softmax.row_sum[r] + self.sums[2 * r]

    def write_p(self, acc_P: cute.Tensor, drawn) -> None:
        """Make P the operand of P V, after the block before."""
        words = self.regs.p
        steps = cute.size(words) // 4
        operand = cute.make_tensor(
            acc_P.iterator, cute.make_layout((2, 2, 2, 2, steps), stride=(1, 4, 2, 8, 16))
        )
        for step in range(steps):
            p = operand[None, None, None, None, step]
            if self.softmax.kind is RowMax.LINEAR:
                packed = [codes_of(*(p[4 * i + j] for j in range(4))) for i in range(4)]
            else:
                values = cute.make_rmem_tensor((2, 2, 2, 2), Float8E4M3FN)
                values.store(p.load().to(Float8E4M3FN))
                packed = cute.recast_tensor(cute.flatten(values), Uint32)
            for i in range(4):
                words[4 * step + i] = packed[i]


@dataclass(frozen=True)
class TwoLevelAttention(Fp8Attention):
    """The same with sums in two levels."""

    # Sums of P V since they were added to O, and of how many blocks.
    fresh: cute.Tensor | None = None
    count: cute.Tensor | None = None

    @classmethod
    def of(cls, *fields) -> "TwoLevelAttention":
        attention = super().of(*fields)
        fresh = cute.make_rmem_tensor(attention.regs.acc_O.layout, Float32)
        count = cute.make_rmem_tensor(1, Int32)
        count.fill(0)
        return replace(attention, fresh=fresh, count=count)

    @property
    def accs(self) -> tuple:
        return *super().accs, self.fresh

    def issue_pv(self, v_state, part: int) -> None:
        """Start P V, which is added to the sums."""
        vt, goes_on = self.regs.vt[None, None, None, v_state.index], self.count[0] > 0
        self.sum_rows()
        wgmma.issue(self.mmas.pv.op, self.fresh, self.operand_p(), vt, goes_on)

    @cute.jit
    def add(self, fresh, part: int, v_state=None):
        """O += P V; in the block loop once every `KEYS_OF_SUM` keys."""
        Fp8Attention.add(self, fresh, part)
        count, acc_O = self.count, self.regs.acc_O
        if cutlass.const_expr(v_state is None):
            acc_O.store(acc_O.load() + self.fresh.load())
        else:
            count[0] += 1
            if count[0] == KEYS_OF_SUM // self.rules.coords.width:
                # V has landed; this wait is here for its branch, around the additions.
                self.wait(self.pipeline_v, v_state)
                count[0] = 0
                acc_O.store(acc_O.load() + self.fresh.load())


class PartsAttention(Fp8Attention):
    """The same with few registers: P V follows the softmax, in parts."""

    overlaps: ClassVar[bool] = False

    @property
    def parts(self) -> int:
        return cute.size(self.regs.acc_O, mode=[2])

    def issue_pv(self, v_state, part: int) -> cute.Tensor:
        """Start P V of part of V's columns, in its own registers."""
        vt = self.regs.vt[None, None, None, v_state.index]
        size, _, steps = (cute.size(vt, mode=[i]) for i in range(3))
        fresh = cute.make_rmem_tensor((*self.regs.acc_O.shape[:2], 1), Float32)
        vt = cute.local_tile(vt, (size, 1, steps), (0, part, 0))
        if part == 0:
            self.sum_rows()
        wgmma.issue(self.mmas.pv.op, fresh, self.operand_p(), vt, accumulate=False)
        return fresh

    def add(self, fresh: cute.Tensor, part: int, v_state=None) -> None:
        """O += P V."""
        acc = self.regs.acc_O[None, None, part]
        acc.store(acc.load() + fresh[None, None, 0].load())
        if part == 0:
            super().add(fresh, part)


@cute.jit
def fill_ones(field: cutlass.Constexpr) -> cute.Tensor:
    """Fill (8, 32) elements of shared memory with 0.25.
    Each of the four threads that share a row has its whole sum, and they are added up."""
    thread, _, _ = cute.arch.thread_idx()
    words = cute.make_tensor(cute.recast_ptr(field.data_ptr(), dtype=Uint32), ONES // 4)
    if thread < ONES // 4:
        words[thread] = Uint32(0x28282828)
    cute.arch.fence_proxy("async.shared", space="cta")
    layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, 8, 32), Float8E4M3FN, 1)
    return field.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]


def attention_of(config: Any, columns_v: int) -> tuple[type[Fp8Attention], int]:
    """The class of a tile's attention, and a thread's registers for fragments."""
    registers = config.tile_n // 2 + config.tile_n // 8 + columns_v // 2
    if config.one_level:
        return Fp8Attention, registers
    if registers + columns_v // 2 <= MOST_REGISTERS:
        return TwoLevelAttention, registers + columns_v // 2
    return PartsAttention, registers


def codes_of(*scores: Float32) -> Uint32:
    """Four scores from `LinearSoftmax` as codes of e4m3, at least 0."""
    return cute.arch.inline_ptx(CODES, write_only_types=[Uint32], read_only_args=list(scores))
