"""Attention of a warpgroup in FP8, with two-level or one-level sums.

FP8 WGMMAs differ from 16-bit ones in three ways:

- Both operands must be contiguous along the dimension that is summed over, so P V wants V^T. Where
  the caller does not have it, a `ValueTransposer` transposes blocks of V in shared memory.
- A thread holds other keys of P as an operand than it gets of S as sums. In V^T, 16 keys each
  are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, the key order. With it the registers of S
  are the operand P as they are.
- Their sums have few bits. So P V of some blocks goes to registers of its own, which are then added
  to O in fp32. With three MMA warpgroups O is in shared memory, since registers have no room for
  it. With sums in one level, an option, the WGMMAs add P V to O; that leaves registers for larger
  blocks of keys.

Sources: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3, transposes in the kernel;
DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, sums in two levels.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32

from fa3.primitives import wgmma
from fa3.primitives.attention import Attention
from fa3.primitives.cache_blocks import box_bytes
from fa3.primitives.fp8_blocks import CHUNK, BlockRewriter, swizzle_of
from fa3.primitives.vectors import QUAD
from fa3.primitives.wgmma import ROWS, WARPGROUP

MOST_REGISTERS = 208
"""Registers of two MMA warpgroups for all fragments: of 232, 24 are for other things."""

MOST_OF_ONE_LEVEL = 184
"""Registers of S and O, with sums in one level, up to which 232 registers a thread are enough: at
192 ptxas serialises the WGMMAs, and does not at 160."""

KEYS_OF_SUM = 512
"""Keys whose P V the WGMMAs sum up before it is added to O, with overlap. They cut off bits, so
sums of values of one sign are too small: by 0.6% with 512 keys, 1.6% with 1024, 3.8% with 2048.
512 are 1% slower than 2048 with O in registers, and 5% with O in shared memory."""

LOADS_AT_ONCE = {2: 4, 3: 1}
"""Warps that transpose V -> loads of each that are on their way at once. Two have 40 registers a
thread. Three have 24, which leave the MMA warpgroups 240."""

EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # what a byte permutation takes of two registers


class Fp8Attention(Attention):
    """The attention of a tile in e4m3, with one-level sums."""

    @classmethod
    def of(cls, *fields) -> "Fp8Attention":
        """A tile's attention at its beginning; arguments as in the base."""
        return cls(*fields)

    def write_p(self, acc_P: cute.Tensor, drawn) -> None:
        """Make P the operand of P V, after the block before."""
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


@dataclass(frozen=True)
class TwoLevelAttention(Fp8Attention):
    """The same with sums in two levels."""

    # Sums of P V since they were added to O; of how many blocks, and whether they ever were.
    fresh: cute.Tensor | None = None
    counts: cute.Tensor | None = None

    @classmethod
    def of(cls, *fields) -> "TwoLevelAttention":
        attention = cls(*fields)
        fresh = cute.make_rmem_tensor(attention.regs.acc_O.layout, Float32)
        counts = cute.make_rmem_tensor(2, Int32)
        fresh.fill(0.0)
        counts.fill(0)
        return replace(attention, fresh=fresh, counts=counts)

    @property
    def accs(self) -> tuple:
        return self.regs.acc_O, self.fresh

    def issue_pv(self, v_state, part: int) -> None:
        """Start P V, which is added to the sums."""
        vt = self.regs.vt[None, None, None, v_state.index]
        wgmma.issue(self.mmas.pv.op, self.fresh, self.operand_p(), vt, self.counts[0] > 0)

    @cute.jit
    def add(self, fresh, part: int, v_state=None):
        """O += P V; in the block loop once every `KEYS_OF_SUM` keys."""
        counts = self.counts
        if cutlass.const_expr(v_state is None):
            self.add_sums(is_last=True)
        else:
            counts[0] += 1
            if counts[0] == KEYS_OF_SUM // self.rules.coords.width:
                # V has landed; this wait is here for its branch, around the additions.
                self.wait(self.pipeline_v, v_state)
                counts[0] = 0
                self.add_sums(is_last=False)

    def add_sums(self, is_last: bool) -> None:
        """Add the sums to O."""
        self.regs.acc_O.store(self.regs.acc_O.load() + self.fresh.load())


@dataclass(frozen=True)
class SharedAttention(TwoLevelAttention):
    """The same with O in shared memory; `regs.acc_O` has the sums."""

    shared: cute.Tensor | None = None  # O, like its registers

    @classmethod
    def of(cls, sums: cute.Tensor, thread, *fields) -> "SharedAttention":
        """`sums` is the warpgroup's, (64 * columns / 2, 2)."""
        attention = super().of(*fields)
        (*quad, chunks), *ones = attention.regs.acc_O.shape
        # Four registers lie next to four of the neighbouring threads. The halves are far apart.
        stride = (1, 2, (QUAD * WARPGROUP, sums.stride[1])), 0, 0
        layout = cute.make_layout(((*quad, (chunks // 2, 2)), *ones), stride=stride)
        pointer = (sums.iterator + thread * QUAD).align(16)
        shared = cute.make_tensor(pointer, layout)
        return replace(attention, fresh=attention.regs.acc_O, shared=shared)

    @property
    def accs(self) -> tuple:
        return self.fresh, self.shared

    @cute.jit
    def add_sums(self, is_last: cutlass.Constexpr):
        """Add the sums to O, which comes to registers at the end."""
        counts = self.counts
        if cutlass.const_expr(is_last):
            if counts[1] > 0:
                self.add_shared(self.fresh)
        else:
            if counts[1] == 0:
                registers, shared = as_quads(self.fresh), as_quads(self.shared)
                for i in cutlass.range_constexpr(cute.size(registers, mode=[1])):
                    cute.autovec_copy(registers[None, i], shared[None, i])
            else:
                self.add_shared(self.shared)
            counts[1] = 1

    @cute.jit
    def add_shared(self, target: cute.Tensor):
        """Write the sum of registers and O in shared memory."""
        registers, shared, target = (as_quads(x) for x in (self.fresh, self.shared, target))
        for i in cutlass.range_constexpr(cute.size(registers, mode=[1])):
            quad = cute.make_rmem_tensor(QUAD, Float32)
            cute.autovec_copy(shared[None, i], quad)
            quad.store(quad.load() + registers[None, i].load())
            cute.autovec_copy(quad, target[None, i])


def as_quads(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator ((2, 2, N/8), 1, 1) as (4, N/8)."""
    chunks, stride = acc.shape[0][2], acc.stride[0][2]
    return cute.make_tensor(acc.iterator, cute.make_layout((QUAD, chunks), stride=(1, stride)))


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
        fresh = cute.make_rmem_tensor(self.part_of_O(part).layout, Float32)
        vt = cute.local_tile(vt, (size, 1, steps), (0, part, 0))
        wgmma.issue(self.mmas.pv.op, fresh, self.operand_p(), vt, False)
        return fresh

    def part_of_O(self, part: int) -> cute.Tensor:
        """The registers of O for a part of V's columns."""
        acc_O = self.regs.acc_O
        size, columns = cute.size(acc_O, mode=[0]), cute.size(acc_O) * 2 // self.parts
        layout = cute.make_layout(self.mmas.pv.partition_shape_C((ROWS, columns)))
        return cute.make_tensor(acc_O.iterator + part * size, layout)

    def add(self, fresh: cute.Tensor, part: int, v_state=None) -> None:
        """O += P V."""
        acc_O = self.part_of_O(part)
        acc_O.store(acc_O.load() + fresh.load())


def attention_of(config: Any, columns_v: int) -> type[Fp8Attention]:
    """The class of a tile's attention, by the registers of its warpgroups."""
    if config.one_level:
        return Fp8Attention
    if config.consumers == 3:
        return SharedAttention
    has_room = config.tile_n // 2 + config.tile_n // 8 + columns_v <= MOST_REGISTERS
    return TwoLevelAttention if has_room else PartsAttention


def fragment_registers(config: Any, columns_v: int) -> int:
    """A thread's registers for S, P, O and an overlapping P V."""
    is_apart = attention_of(config, columns_v) is TwoLevelAttention
    return config.tile_n // 2 + config.tile_n // 8 + columns_v // (1 if is_apart else 2)


def transposers(config: Any, columns_v: int) -> int:
    """Warps that transpose blocks of V; `config` is a `ForwardConfig`."""
    return 3 if config.one_level and (config.tile_n + columns_v) // 2 > MOST_OF_ONE_LEVEL else 2


@dataclass(frozen=True)
class ValueTransposer(BlockRewriter):
    """Transposes blocks of V to (columns, tile_n), with keys in the key order.

    A warp reads 16 keys and 32 columns at once, as four matrices of 8 rows and 16 bytes that are
    transposed in pairs of bytes. Byte permutations part even and odd columns. Lanes from 16 on take
    the two in the other order, so that the 8 rows of a matrix are written without bank conflicts.
    """

    @cute.jit
    def run(self, count, states: tuple) -> tuple:
        """Transpose so many blocks of V; return the next states."""
        for _ in cutlass.range(count, unroll=1):
            states = self.rewrite(*states)
        return states

    @cute.jit
    def copy(self, from_state, to_state):
        self.ring.pipe.producer_acquire(to_state)
        tile_n, columns = (cute.size(self.ring.loaded, mode=[i]) for i in range(2))
        width, length = box_bytes(columns, 1), box_bytes(tile_n, 1)
        matrix, row = self.lane // 8, self.lane % 8
        is_first = self.lane < 16
        one = Int32(EVEN_BYTES) if is_first else Int32(ODD_BYTES)
        other = Int32(ODD_BYTES) if is_first else Int32(EVEN_BYTES)
        key = 8 * (matrix % 2) + row
        column = 16 * (matrix // 2) + 2 * row + (matrix % 2 ^ row // 4)
        block = tile_n * columns
        # Without the swizzles of the buffers.
        source, target = (Int32(x.iterator.toint()) for x in (self.ring.loaded, self.ring.blocks))
        source += from_state.index * block + key * width
        target += to_state.index * block + column * length
        swizzle, swizzle_t = swizzle_of(key, width), swizzle_of(column, length)
        at_once = LOADS_AT_ONCE[self.warps]
        for piece in cutlass.range(self.warp, tile_n // CHUNK, self.warps, unroll=1):
            box, chunk = piece * CHUNK // length, piece * CHUNK % length // CHUNK
            to = target + box * (columns * length) + (chunk ^ swizzle_t) * CHUNK
            for first in cutlass.range_constexpr(0, columns // 32, at_once):
                groups = range(first, min(first + at_once, columns // 32))
                # All loads come first: they take a while.
                loads = []
                for j in groups:
                    chunk_of_v = (j * 32 % width // CHUNK + matrix // 2) ^ swizzle
                    box_of_v = j * 32 // width * tile_n * width
                    address = source + piece * (CHUNK * width) + box_of_v + chunk_of_v * CHUNK
                    loads.append(load_transposed(address))
                for j, words in zip(groups, loads, strict=True):
                    rows = [
                        Uint32(cute.arch.prmt(words[pair], words[pair + 1], selector))
                        for pair in (0, 2)
                        for selector in (one, other)
                    ]
                    store_matrices(to + j * (32 * length), rows)


def load_transposed(address) -> list[Uint32]:
    """Load four matrices of 8 rows and 16 bytes, byte pairs transposed."""
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
