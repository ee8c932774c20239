"""Attention of a warpgroup in FP8: both products take e4m3; O is summed in two levels, or in one.

FP8 WGMMAs differ from 16-bit ones in three ways:

- Both operands must be contiguous along the dimension that is summed over, so P V wants V^T. A
  `ValueTransposer` transposes blocks of V in shared memory.
- A thread holds other keys of P as an operand than it gets of S as sums. In V^T, 16 keys each
  are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, the key order. With it the registers of S
  are the operand P as they are.
- Their sums have few bits. So P V goes to registers of its own, which are added to O in fp32:
  O = O * factor + P V. One instruction for an element rescales O and adds. With sums in one level,
  an option, P V is added to O by the WGMMA; that leaves registers for larger blocks of keys.

Sources: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3, transposes in the kernel;
DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, sums in two levels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.attention import Attention, Fragments
from fa3.primitives.cache_blocks import box_bytes
from fa3.primitives.fp8_blocks import CHUNK, BlockRewriter, swizzle_of
from fa3.primitives.fragments import as_rows_and_columns
from fa3.primitives.wgmma import ROWS

TRANSPOSERS = 2  # warps that transpose blocks of V
MOST_REGISTERS = 208  # for all fragments: of 232, a thread needs 24 for other things

MOST_OF_ONE_LEVEL = 184
"""Registers of S and O, with sums in one level, under which P V may run: ptxas serialises the
WGMMAs at 192, and does not at 160."""

LOADS_AT_ONCE = 2
"""Loads of a transposing warp that are on their way at once: it has 40 registers a thread."""

BYTES_OF_WORD = 4  # values of e4m3 in a register
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # what a byte permutation takes of two registers


def pv_overlaps(tile_n: int, columns_v: int) -> bool:
    """Whether P V runs under the softmax of the next block: S, P, O and P V fit the registers."""
    return tile_n // 2 + tile_n // 8 + columns_v <= MOST_REGISTERS


def columns_at_once(tile_n: int, columns_v: int) -> int:
    """Columns of V that one P V takes: half of them if P, O and P V do not fit the registers."""
    return columns_v if tile_n // 8 + columns_v <= MOST_REGISTERS else columns_v // 2


def fragment_registers(tile_n: int, columns_v: int, one_level: bool) -> int:
    """Registers of a thread for its fragments of S, P, O and, if it is apart and overlaps, P V."""
    is_apart = not one_level and pv_overlaps(tile_n, columns_v)
    return tile_n // 2 + tile_n // 8 + columns_v // (1 if is_apart else 2)


class Fp8Mmas(NamedTuple):
    """The two WGMMAs: S = Q K^T from shared memory, and P V with P in registers."""

    qk: cute.TiledMma
    pv: cute.TiledMma

    @classmethod
    def of(cls, tile_n: int, columns_v: int, one_level: bool) -> "Fp8Mmas":
        """The WGMMAs of 64 rows and a block of `tile_n` keys."""
        kinds = Float8E4M3FN, Float8E4M3FN, OperandMajorMode.K, OperandMajorMode.K, Float32
        one, columns = (1, 1, 1), columns_v if one_level else columns_at_once(tile_n, columns_v)
        qk = sm90.make_trivial_tiled_mma(*kinds, one, (ROWS, tile_n))
        pv = sm90.make_trivial_tiled_mma(*kinds, one, (ROWS, columns), warpgroup.OperandSource.RMEM)
        return cls(qk, pv)

    def fragments(self, sQ: cute.Tensor, sK: cute.Tensor, sVt: cute.Tensor) -> Fragments:
        """Registers, and descriptors of the shared-memory buffers (rows, columns, stages).
        P is in words of four values: single values would be packed at each use."""
        columns_v, tile_n = (cute.size(sVt, mode=[i]) for i in range(2))
        return Fragments(
            self.qk.make_fragment_A(self.qk.get_slice(0).partition_A(sQ)),
            self.qk.make_fragment_B(self.qk.get_slice(0).partition_B(sK)),
            self.pv.make_fragment_B(self.pv.get_slice(0).partition_B(sVt)),
            cute.make_rmem_tensor(self.pv.partition_shape_C((ROWS, columns_v)), Float32),
            cute.make_rmem_tensor(tile_n // BYTES_OF_WORD // 2, Uint32),
        )


@dataclass(frozen=True)
class Fp8Attention(Attention):
    """The attention of one tile's rows with q, k and v in e4m3, and sums in two levels."""

    # What this thread's rows of O are multiplied by when P V is added; zero at first.
    factors: cute.Tensor | None = None

    @classmethod
    def of(cls, *given) -> "Fp8Attention":
        """The attention of a tile that has only begun; the arguments are the base's fields."""
        factors = cute.make_rmem_tensor(2, Float32)
        factors.fill(0.0)
        return cls(*given, factors)

    @property
    def tile_n(self) -> int:
        return 2 * BYTES_OF_WORD * cute.size(self.regs.p)

    @property
    def overlaps(self) -> bool:
        """Whether P V runs under the softmax of the next block."""
        return pv_overlaps(self.tile_n, 2 * cute.size(self.regs.acc_O))

    @property
    def parts(self) -> int:
        """Parts of V's columns of which P V is computed one after the other."""
        return cute.size(self.regs.acc_O, mode=[2])

    def issue_qk(self, k_state) -> cute.Tensor:
        """Start S = Q K^T into a fresh accumulator."""
        acc_S = cute.make_rmem_tensor(self.mmas.qk.partition_shape_C((ROWS, self.tile_n)), Float32)
        k = self.regs.k[None, None, None, k_state.index]
        wgmma.issue(self.mmas.qk.op, acc_S, self.q, k, accumulate=False)
        return acc_S

    def issue_part(self, v_state, part: int) -> cute.Tensor:
        """Start P V of a part of V's columns, into a fresh accumulator."""
        vt = self.regs.vt[None, None, None, v_state.index]
        size, _, steps = (cute.size(vt, mode=[i]) for i in range(3))
        fresh = cute.make_rmem_tensor(self.part_of_O(part).layout, Float32)
        vt = cute.local_tile(vt, (size, 1, steps), (0, part, 0))
        wgmma.issue(self.mmas.pv.op, fresh, as_operand(self.regs.p), vt, accumulate=False)
        return fresh

    def part_of_O(self, part: int) -> cute.Tensor:
        """The registers of O for a part of V's columns."""
        acc_O = self.regs.acc_O
        size, columns = cute.size(acc_O, mode=[0]), cute.size(acc_O) * 2 // self.parts
        layout = cute.make_layout(self.mmas.pv.partition_shape_C((ROWS, columns)))
        return cute.make_tensor(acc_O.iterator + part * size, layout)

    def add(self, fresh: cute.Tensor, part: int) -> None:
        """O = O * factors + P V."""
        acc_O, fresh = as_rows_and_columns(self.part_of_O(part)), as_rows_and_columns(fresh)
        for r in range(cute.size(self.factors)):
            row = acc_O[r, None]
            row.store(row.load() * self.factors[r] + fresh[r, None].load())

    def rescale(self, factors: tuple) -> None:
        """Keep what O is multiplied by when the next P V is added."""
        for r, factor in enumerate(factors):
            self.factors[r] = factor

    @cute.jit
    def rest(self, blocks, k_state, v_state):
        """All blocks after the first, as in 16 bits; without overlap also the first P V."""
        if cutlass.const_expr(not self.overlaps):
            v_state = self.sum_up(v_state)
        return Attention.rest(self, blocks, k_state, v_state)

    @cute.jit
    def next(self, n_block, k_state, v_state, masked: cutlass.Constexpr):
        """S = Q K[n_block]^T and its softmax, with P V[n_block + 1] meanwhile or P V[n_block]."""
        self.wait(self.pipeline_k, k_state)
        acc_S = self.issue_qk(k_state)
        fresh = None
        if cutlass.const_expr(self.overlaps):
            self.wait(self.pipeline_v, v_state)
            fresh = self.issue_part(v_state, 0)
        warpgroup.wait_group(1 if self.overlaps else 0)
        self.pipeline_k.consumer_release(k_state)
        k_state.advance()
        scores = as_rows_and_columns(acc_S)
        shifts = self.rules.apply(scores, n_block, masked)
        factors = self.softmax.follow(scores, shifts)
        self.softmax.exponentiate(scores, True, shifts)
        if cutlass.const_expr(self.overlaps):
            # V has landed; the branch keeps ptxas from waiting for P V before the exponentials.
            if self.softmax.has_summed():
                self.pipeline_v.consumer_wait(v_state)
            warpgroup.wait_group(0)
            self.pipeline_v.consumer_release(v_state)
            v_state.advance()
            self.add(fresh, 0)
        self.rescale(factors)
        self.write_p(acc_S, None)
        if cutlass.const_expr(not self.overlaps):
            v_state = self.sum_up(v_state)
        return k_state, v_state

    @cute.jit
    def last(self, v_state):
        """O = O * factors + P V of the tile's last block, if it is still to be done."""
        if cutlass.const_expr(self.overlaps):
            v_state = self.sum_up(v_state)
        return v_state

    @cute.jit
    def sum_up(self, v_state):
        """O = O * factors + P V of a block, part by part."""
        self.wait(self.pipeline_v, v_state)
        for part in cutlass.range_constexpr(self.parts):
            fresh = self.issue_part(v_state, part)
            warpgroup.wait_group(0)
            self.add(fresh, part)
            if cutlass.const_expr(part + 1 < self.parts):
                # V has landed; the branch keeps ptxas from adding up after the next WGMMAs have
                # begun, which takes registers for both parts.
                self.wait(self.pipeline_v, v_state)
        self.pipeline_v.consumer_release(v_state)
        v_state.advance()
        return v_state

    def write_p(self, acc_P: cute.Tensor, drawn) -> None:
        """Make P the operand of P V, which must be done with the block before."""
        words = self.regs.p
        steps = cute.size(words) // 4
        operand = cute.make_tensor(
            acc_P.iterator, cute.make_layout((2, 2, 2, 2, steps), stride=(1, 4, 2, 8, 16))
        )
        for step in range(steps):
            values = cute.make_rmem_tensor((2, 2, 2, 2), Float8E4M3FN)
            values.store(operand[None, None, None, None, step].load().to(Float8E4M3FN))
            packed = cute.recast_tensor(cute.flatten(values), Uint32)
            for i in range(4):
                words[4 * step + i] = packed[i]


class OneLevelAttention(Fp8Attention):
    """The same with P V added to O by the WGMMA."""

    @property
    def overlaps(self) -> bool:
        """Whether P V runs under the softmax of the next block. At head size 256 it does not:
        ptxas would let WGMMAs wait for each other, for lack of registers."""
        return self.tile_n // 2 + cute.size(self.regs.acc_O) <= MOST_OF_ONE_LEVEL

    def issue_part(self, v_state, part: int) -> None:
        """Start O += P V."""
        vt = self.regs.vt[None, None, None, v_state.index]
        wgmma.issue(self.mmas.pv.op, self.regs.acc_O, as_operand(self.regs.p), vt, accumulate=True)

    def add(self, fresh: None, part: int) -> None:
        """Do nothing: the WGMMA has added P V to O."""

    def rescale(self, factors: tuple) -> None:
        """O = O * factors."""
        acc_O = as_rows_and_columns(self.regs.acc_O)
        for r, factor in enumerate(factors):
            acc_O[r, None].store(acc_O[r, None].load() * factor)


def attention_in_fp8(one_level: bool) -> Callable[..., Fp8Attention]:
    """Makes the attention of a tile, with sums in one level or in two."""
    return OneLevelAttention.of if one_level else Fp8Attention.of


def as_operand(words: cute.Tensor) -> cute.Tensor:
    """View P's words as the A operand ((4, 2, 2), 1, tile_n / 32)."""
    values = cute.recast_ptr(words.iterator, dtype=Float8E4M3FN)
    return cute.make_tensor(values, cute.make_layout(((4, 2, 2), 1, cute.size(words) // 4)))


@dataclass(frozen=True)
class ValueTransposer(BlockRewriter):
    """Transposes blocks of V to (columns, tile_n), with keys in the key order.

    A warp reads 16 keys and 32 columns at once, as four matrices of 8 rows and 16 bytes that are
    transposed in pairs of bytes. Byte permutations part even and odd columns. Lanes from 16 on take
    the two in the other order, so that the 8 rows of a matrix are written without bank conflicts.
    """

    @cute.jit
    def run(self, begin, end, states: tuple) -> tuple:
        """Transpose the `end - begin` blocks of V of a tile; return the next states."""
        for _ in cutlass.range(end - begin, unroll=1):
            states = self.rewrite(None, states)
        return states

    @cute.jit
    def copy(self, from_state, to_state):
        self.writing.producer_acquire(to_state)
        tile_n, columns = (cute.size(self.loaded, mode=[i]) for i in range(2))
        width, length = box_bytes(columns, 1), box_bytes(tile_n, 1)
        matrix, row = self.lane // 8, self.lane % 8
        is_first = self.lane < 16
        one = Int32(EVEN_BYTES) if is_first else Int32(ODD_BYTES)
        other = Int32(ODD_BYTES) if is_first else Int32(EVEN_BYTES)
        key = 8 * (matrix % 2) + row
        column = 16 * (matrix // 2) + 2 * row + (matrix % 2 ^ row // 4)
        block = tile_n * columns
        source = place_in_buffer(self.loaded, from_state.index * block + key * width)
        target = place_in_buffer(self.written, to_state.index * block + column * length)
        swizzle, swizzle_t = swizzle_of(key, width), swizzle_of(column, length)
        for i in cutlass.range_constexpr(tile_n // CHUNK // self.warps):
            piece = self.warp * (tile_n // CHUNK // self.warps) + i
            box, chunk = piece * CHUNK // length, piece * CHUNK % length // CHUNK
            to = target + box * (columns * length) + (chunk ^ swizzle_t) * CHUNK
            for first in cutlass.range_constexpr(0, columns // 32, LOADS_AT_ONCE):
                groups = range(first, min(first + LOADS_AT_ONCE, columns // 32))
                # All loads come first: they take a while.
                loads = []
                for j in groups:
                    chunk_of_v = (j * 32 % width // CHUNK + matrix // 2) ^ swizzle
                    box_of_v = j * 32 // width * tile_n * width
                    address = source + piece * (CHUNK * width) + box_of_v + chunk_of_v * CHUNK
                    loads.append(load_transposed(address))
                for j, words in zip(groups, loads, strict=True):
                    rows = [
                        permuted(words[pair], words[pair + 1], selector)
                        for pair in (0, 2)
                        for selector in (one, other)
                    ]
                    store_matrices(to + j * (32 * length), rows)


def load_transposed(address) -> list[Uint32]:
    """Load four matrices of 8 rows and 16 bytes, transposed in pairs of bytes."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def store_matrices(address, rows: list[Uint32]) -> None:
    """Store four matrices of 8 rows and 16 bytes."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *rows],
    )


def place_in_buffer(tensor: cute.Tensor, offset) -> Int32:
    """The address in shared memory of a byte of a buffer, without its swizzle."""
    return Int32(tensor.iterator.toint()) + offset


def permuted(low, high, selector) -> Uint32:
    """Four bytes of two registers."""
    return Uint32(cute.arch.prmt(low, high, selector))
