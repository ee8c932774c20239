"""Decode few rows from an FP8 cache; each warp converts its keys.

A tile has up to 16 rows. Each of the four consumer warps has 16 keys of every block. It has its own
row max, row sums and O, so it waits for no other warp until the end of a segment. There the warps
merge them in shared memory.

Products are MMAs of 16 rows, 8 columns and 16 terms (`mma.sync`). ldmatrix gives a lane four bytes
of an 8x8 matrix of 16 bits. They become operands without a shuffle. With t = lane % 4 and
j = lane // 4, these are the bytes of

    K   columns 4t to 4t + 3 of key j. They are terms 2t, 2t + 1, 2t + 8 and 2t + 9 of a product. Q
        is read in the same order.
    V   columns 2j and 2j + 1 of keys 2t and 2t + 1. Even columns are one operand, odd ones another.
        So a lane has columns 4t to 4t + 3 of each 16 columns of O.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fa3.primitives.attention import Attention
from fa3.primitives.cache_blocks import box_bytes
from fa3.primitives.fp8_blocks import (
    CHUNK,
    CONVERTED,
    convert_registers,
    swizzle_of,
)
from fa3.primitives.fragments import (
    as_rows_and_columns,
    words_of,
)
from fa3.primitives.packed_rows import PackedCoords
from fa3.primitives.softmax import finite
from fa3.primitives.vectors import QUAD, as_elements, vector_of
from fa3.primitives.wgmma import WARPS

MMA_ROWS = 16  # rows of an MMA, its terms, and a warp's keys of a block
MMA_COLUMNS = 8

TO_HALVES = (
    "{.reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; "
    "cvt.rn.f16x2.e4m3x2 {$w1}, h;}"
)
"""PTX that converts bytes 0 and 1 of a word, then bytes 2 and 3."""

TO_COLUMNS = (
    "{.reg .b16 l, h; .reg .b32 p; prmt.b32 p, {$r0}, 0, 0x3120; mov.b32 {l, h}, p; "
    "cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h;}"
)
"""The same for bytes 0 and 2, then bytes 1 and 3."""

MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
    "{ {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };"
)


def two_of(code: str, word: Uint32) -> tuple:
    """Convert a word of e4m3 to two words of fp16."""
    return cute.arch.inline_ptx(code, write_only_types=[Uint32, Uint32], read_only_args=[word])


def multiply(a: list, b: tuple, acc: list) -> tuple:
    """a b^T + acc: four words, two words and four floats."""
    return cute.arch.inline_ptx(
        MULTIPLY, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *acc]
    )


def load_word(vector: cute.Tensor, index) -> Uint32:
    """A word of a vector in shared memory."""
    elements = 32 // vector.element_type.width
    word = cute.make_rmem_tensor(elements, vector.element_type)
    cute.autovec_copy(vector_of(vector, index, elements), word)
    return cute.recast_tensor(word, Uint32)[0]


def accumulator(columns: int, dtype) -> cute.Tensor:
    """A thread's part of 16 rows: four registers for each eight columns."""
    return cute.make_rmem_tensor(((2, 2, columns // MMA_COLUMNS), 1, 1), dtype)


@dataclass(frozen=True)
class KeySlice:
    """A warp's keys of blocks of K or V in shared memory."""

    blocks: cute.Tensor  # (tile_n, columns, stages) of e4m3, swizzled
    address: Int32  # of this lane's row of the first matrices, in stage 0

    @classmethod
    def of(cls, blocks: cute.Tensor, warp) -> "KeySlice":
        width, lane = box_bytes(cute.size(blocks, mode=[1]), 1), cute.arch.lane_idx()
        key = warp * MMA_ROWS + lane % MMA_ROWS
        chunk = lane // MMA_ROWS ^ swizzle_of(key, width)
        return cls(blocks, blocks.iterator.toint() + key * width + chunk * CHUNK)

    def load(self, stage, is_transposed: bool) -> list:
        """This lane's words of each 16 columns, of twice 8 keys."""
        tile_n, columns, _ = (cute.size(self.blocks, mode=[i]) for i in range(3))
        width, words = box_bytes(columns, 1), []
        start = self.address + stage * (tile_n * columns)
        for column in range(0, columns, 2 * CHUNK):
            box, inner = divmod(column, width)
            address = (start ^ inner) + box * tile_n * width
            first, second, third, fourth = load_matrices(address, is_transposed)
            words += [(first, second), (third, fourth)]
        return words


@dataclass(frozen=True)
class WarpFragments:
    """One thread's Q and P in fp16, O, and its keys."""

    q: cute.Tensor  # (4, columns / 16) words
    k: KeySlice
    v: KeySlice
    acc_O: cute.Tensor
    p: cute.Tensor

    @classmethod
    def of(cls, sK: cute.Tensor, sV: cute.Tensor, warp) -> "WarpFragments":
        columns, columns_v = (cute.size(blocks, mode=[1]) for blocks in (sK, sV))
        return cls(
            cute.make_rmem_tensor((4, columns // MMA_ROWS), Uint32),
            KeySlice.of(sK, warp),
            KeySlice.of(sV, warp),
            accumulator(columns_v, Float32),
            accumulator(MMA_ROWS, CONVERTED),
        )

    @cute.jit
    def read_q(self, sQ: cute.Tensor, dtype: cutlass.Constexpr) -> Float32:
        """Read this thread's Q from shared memory, (rows, columns); convert it to fp16.
        Returns the scores' factor. Elements are of `dtype`, as `fetch_rows` leaves them."""
        lane, steps = cute.arch.lane_idx(), cute.size(self.q, mode=[1])
        for i in cutlass.range_constexpr(steps):
            for r in cutlass.range_constexpr(2):
                # As `fetch_rows` writes it: a tensor of another type has no swizzle.
                vector = vector_of(sQ[lane // 4 + r * 8, None], i * 2 + lane % 4 // 2)
                vector = as_elements(vector, dtype)
                if cutlass.const_expr(dtype.width == 8):
                    word = load_word(vector, lane % 2)
                    self.q[r, i], self.q[2 + r, i] = two_of(TO_HALVES, word)
                else:
                    # An MMA would copy registers of a longer load each time.
                    for half in cutlass.range_constexpr(2):
                        self.q[2 * half + r, i] = load_word(vector, lane % 2 * 2 + half)
        read_type = CONVERTED if dtype.width == 8 else dtype
        pieces = [cute.recast_tensor(self.q[None, i], read_type) for i in range(steps)]
        return convert_registers(pieces, lambda bits: cute.arch.warp_redux_sync(bits, "max"))


def coords_of_warp(warp, tile, tile_n: int, qhead_per_kvhead: int) -> PackedCoords:
    """The coordinates of a thread's scores."""
    lane = cute.arch.lane_idx()
    begins, steps = (lane // 4, warp * MMA_ROWS + lane % 4 * 2), ((0, 8), (0, 1, 8, 9))
    return PackedCoords(*begins, *steps, tile_n, tile.batch, tile.head, qhead_per_kvhead)


@dataclass(frozen=True)
class WarpAttention(Attention):
    """The attention of a tile's rows to one warp's keys."""

    neighbours: ClassVar[int] = QUAD

    def wait_for_products(self, pending: int):
        """Do nothing: `mma.sync` is synchronous."""

    @cute.jit
    def issue_qk(self, k_state) -> cute.Tensor:
        """S = Q K^T.
        Each score is two sums, whose MMAs do not wait for each other."""
        words = self.regs.k.load(k_state.index, is_transposed=False)
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
        for i in cutlass.range_constexpr(len(words)):
            q = [self.regs.q[n, i] for n in range(4)]
            for half in cutlass.range_constexpr(2):
                operand = two_of(TO_HALVES, words[i][half])
                sums[i % 2][half] = multiply(q, operand, sums[i % 2][half])
        acc_S = accumulator(MMA_ROWS, Float32)
        for i in cutlass.range_constexpr(8):
            acc_S[i] = sums[0][i // 4][i % 4] + sums[1][i // 4][i % 4]
        return acc_S

    @cute.jit
    def issue_pv(self, v_state, part: cutlass.Constexpr):
        """O += P V."""
        words, p = self.regs.v.load(v_state.index, is_transposed=True), words_of(self.regs.p)
        acc, p = self.regs.acc_O, [p[n] for n in range(4)]
        for i in cutlass.range_constexpr(len(words)):
            low, high = (two_of(TO_COLUMNS, word) for word in words[i])
            for odd in cutlass.range_constexpr(2):
                begin = 4 * (2 * i + odd)
                before = [acc[begin + n] for n in range(4)]
                products = multiply(p, (low[odd], high[odd]), before)
                for n in cutlass.range_constexpr(4):
                    acc[begin + n] = products[n]

    @cute.jit
    def merged(
        self, buffer: cute.Tensor, warp, rows: Int32, meet: cutlass.Constexpr
    ) -> "WarpAttention":
        """The attention of a tile's first `rows` rows to all warps' keys.
        Each warp gets a share of O's columns, a lane four neighbouring ones of each 16. `buffer` is
        in shared memory, float32: (2, lanes, MMAs of O and one more, a lane's 2 rows, warps). The
        last place has row sum and row max. No warp may still read the buffer of an earlier call.
        `meet` waits until all warps have written it."""
        lane, softmax, own = cute.arch.lane_idx(), self.softmax, cute.make_rmem_tensor(2, Float32)
        pairs = cute.logical_divide(cute.flatten(self.regs.acc_O), cute.make_layout(2))
        last, others = cute.size(buffer, mode=[2]) - 1, buffer[None, lane, None, None, None]
        for r in cutlass.range_constexpr(2):
            if lane // 4 + 8 * r < rows:
                for i in cutlass.range_constexpr(last):
                    cute.autovec_copy(pairs[None, 2 * i + r], others[None, i, r, warp])
                own[0], own[1] = softmax.row_sum[r], softmax.row_max[r]
                cute.autovec_copy(own, others[None, last, r, warp])
        meet()
        # Warps may read past the last column. That is not stored.
        width = cute.ceil_div(last, 2 * WARPS) * MMA_ROWS
        shape = (2, 2, width // MMA_COLUMNS), 1, 1
        layout = cute.make_ordered_layout(shape, order=((0, 2, 1), 3, 4))
        acc_O = cute.make_rmem_tensor(layout, Float32)
        acc_O.fill(0.0)
        for r in cutlass.range_constexpr(2):
            if lane // 4 + 8 * r < rows:
                maxima = [others[1, last, r, i] for i in range(WARPS)]
                largest, total = maxima[0], Float32(0.0)
                for i in cutlass.range_constexpr(1, WARPS):
                    largest = cute.arch.fmax(largest, maxima[i])
                row = cute.flatten(as_rows_and_columns(acc_O)[r, None])
                for i in cutlass.range_constexpr(WARPS):
                    # At most 1, and 1 instead of NaN if the scale is 0.
                    factor = (maxima[i] - finite(largest)) * softmax.scale_log2
                    factor = cute.arch.fmin(cute.math.exp2(factor, fastmath=True), Float32(1.0))
                    total += others[0, last, r, i] * factor
                    for n in cutlass.range_constexpr(width // MMA_COLUMNS):
                        cute.autovec_copy(others[None, warp * (width // 8) + n, r, i], own)
                        for c in cutlass.range_constexpr(2):
                            row[n // 2 * 4 + n % 2 + 2 * c] += own[c] * factor
                softmax.row_max[r], softmax.row_sum[r] = largest, total
        coords = replace(self.rules.coords, column=warp * width + lane % 4 * QUAD)
        rules, regs = replace(self.rules, coords=coords), replace(self.regs, acc_O=acc_O)
        return replace(self, regs=regs, rules=rules)


def load_matrices(address, is_transposed: bool) -> tuple:
    """Load four matrices of 8 rows and 16 bytes.
    What is transposed are pairs of bytes."""
    trans = ".trans" * is_transposed
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "[{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
