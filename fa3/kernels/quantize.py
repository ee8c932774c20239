"""Quantize: rounds q, k and v to e4m3, with scales.

All rows that share a scale are a *unit*: of q the rows of a group of heads, of k and v of one head.
The same number of CTAs visits each unit twice. At first each writes the largest magnitude of its
rows. In the second visit it waits until all have, divides by the scale and rounds. That comes so
soon that L2 still has the rows:

    first visits of the first `ahead` units
    second visit of unit 0, first visit of unit `ahead`, second visit of unit 1, ...
    second visits of the last units

First visits wait for nothing, and CTAs start in the order of their numbers: no deadlock.

Optional, in both visits: K loses its mean, which comes with the launch, and Q and K are rotated.
Optional: V is written as V^T in the key order (`fa3.primitives.fp8_compute`). Then a thread's four
vectors are four keys that follow each other in that order, and it writes words of four keys.

Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), section 3.3, for the rotation.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32

from fa3.kernels.kernel_base import KernelBase
from fa3.primitives import arguments
from fa3.primitives.fp8_blocks import largest_of_warps
from fa3.primitives.fragments import float_bits, float_of
from fa3.primitives.ragged_lengths import RaggedLengths, key_groups
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.vectors import VECTOR, vector_of
from fa3.primitives.wgmma import WARP
from fa3.problem import FP8, KEYS_OF_GROUP

QUANTIZE_THREADS = 256
VECTORS_AT_ONCE = 4  # vectors that a thread loads at once, of other rows each

MOST = 448.0  # the largest number in e4m3
LEAST_SCALE = 2.0**-40  # so that a product of three scales does not vanish in fp32

FIRST_VISITS = 512
"""CTAs of first visits that come before second visits: about half of those that run at once."""

HASH = 0x9E3779B1
"""A vector's number + 1, times this: in the upper 8 bits, which of its columns are negated."""


def mixed_columns(columns: int) -> int:
    """Columns that a rotation mixes: the largest power of two dividing them."""
    return columns & -columns


def visits(rows: int, columns: int, units: int) -> tuple[int, int]:
    """CTAs of a visit, and first visits that come first."""
    ctas = -(-rows * columns // (QUANTIZE_THREADS * VECTORS_AT_ONCE * VECTOR)) or 1
    return ctas, min(units, 1 + FIRST_VISITS // ctas)


class QuantizeArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    # q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) if packed.
    q: object
    k: object
    v: object
    # q8, k8, v8: like q, k and v, in e4m3; written.
    q8: object
    k8: object
    v8: object  # or (batch, heads, head_dim, groups of 16 keys, 16), V^T
    descales: tuple  # of q, k and v: (batch, heads_kv) float32; written
    # (units, CTAs of a visit) int32, zero: the largest magnitudes, see `visits`; their bits + 1.
    largest: object
    means: object  # (batch, heads_kv, head_dim) float32, which k loses; or None
    # cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 if sequences are packed, otherwise None.
    cu_seqlens_q: object
    cu_seqlens_k: object
    ahead: int  # see `visits`

    @classmethod
    def symbolic(cls, kernel: "Quantize") -> "QuantizeArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        batch = () if kernel.is_packed else (cute.sym_int(),)
        seqlen, heads = cute.sym_int(), cute.sym_int()
        q = *batch, cute.sym_int(), cute.sym_int(), kernel.head_dim
        k, v = ((*batch, seqlen, heads, size) for size in (kernel.head_dim, kernel.head_dim_v))
        types = [*itertools.product((kernel.dtype, FP8), (q, k, v))]
        if kernel.transposes_v:
            types[-1] = FP8, (*batch, heads, kernel.head_dim_v, cute.sym_int(), KEYS_OF_GROUP)
        return cls(
            *itertools.starmap(arguments.tma_tensor, types),
            arguments.symbolic_descales(3),
            arguments.compact_tensor("int32", (cute.sym_int(), cute.sym_int())),
            arguments.strided_tensor("float32", 3, kernel.has_means),
            *(arguments.int32_vector(exists=kernel.is_packed) for _ in range(2)),
            **arguments.scalars(cls),
        )


@dataclass(frozen=True)
class Quantize(KernelBase):
    """The quantize kernel."""

    dtype: str  # element type of q, k and v
    head_dim: int  # columns of q and k
    head_dim_v: int  # columns of v
    group: int  # query heads of a key/value head
    is_packed: bool  # whether sequences are packed
    has_means: bool  # whether K loses its mean
    is_rotated: bool  # whether Q and K are rotated
    transposes_v: bool  # whether V^T is written

    entry_name: ClassVar[str] = "fa3_quantize"
    arguments_type: ClassVar[type] = QuantizeArguments

    @cute.jit
    def launch(self, call: QuantizeArguments, stream):
        self.kernel(call).launch(
            grid=(2 * cute.size(call.largest), 1, 1),
            block=(QUANTIZE_THREADS, 1, 1),
            stream=stream,
            # So many CTAs run on an SM, which hides latency, that no register spills.
            min_blocks_per_mp=5 if self.is_rotated or self.has_means else 8,
            preferred_smem_carveout=10,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, call: QuantizeArguments):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        units, ctas = call.largest.shape
        visit, cta = block // ctas, block % ctas
        # From the first second visit on; both visits in turns until no first visits are left.
        turn, turns = visit - call.ahead, 2 * (units - call.ahead)
        is_first, unit = turn < 0, visit
        if turn >= turns:
            unit = visit - units
        elif turn >= 0:
            is_first = turn % 2 == 1
            unit = turn // 2 + (call.ahead if is_first else 0)
        smem = SmemAllocator().allocate_tensor(Int32, cute.make_layout(QUANTIZE_THREADS // WARP))
        kind = unit // (units // 3)
        for i in cutlass.range_constexpr(3):
            if kind == i:
                self.visit(call, i, unit, cta, is_first, smem)

    @cute.jit
    def visit(self, call: QuantizeArguments, kind: cutlass.Constexpr, unit, cta, is_first, smem):
        """Visit a unit of q, k or v (`kind` 0, 1 or 2)."""
        descales, (units, ctas) = call.descales[kind], call.largest.shape
        nth = unit - kind * (units // 3)
        batch, head = nth // descales.shape[1], nth % descales.shape[1]
        means = call.means[batch, head, None] if self.has_means and kind == 1 else None
        largest = call.largest.iterator + unit * ctas
        is_transposed = self.transposes_v and kind == 2
        ends = call.cu_seqlens_q if kind == 0 else call.cu_seqlens_k
        place = batch, head, self.group if kind == 0 else 1
        rows = rows_of_unit(call[kind], ends, None, *place)
        if cutlass.const_expr(is_transposed):
            written = call.v8[batch, head, None, None, None]
        else:
            written = rows_of_unit(call[3 + kind], ends, None, *place)
        vectors = UnitVectors.of(rows, means, self.is_rotated and kind < 2, is_transposed)
        blocks = cute.ceil_div(rows.shape[0][0] * rows.shape[0][1], vectors.height)
        # Loaded before the wait of a second visit, which takes a while.
        raw = cute.make_rmem_tensor((VECTOR, VECTORS_AT_ONCE), rows.element_type)
        vectors.load(rows, cta, blocks, raw)
        if is_first:
            most = Float32(0.0)
            for block in cutlass.range(cta, blocks, ctas, unroll=1):
                for j in cutlass.range_constexpr(VECTORS_AT_ONCE):
                    values = vectors.values(raw[None, j])
                    for i in cutlass.range_constexpr(VECTOR):
                        most = cute.arch.fmax(most, cute.arch.fmax(values[i], -values[i]))
                vectors.load(rows, block + ctas, blocks, raw)
            bits = largest_of_warps(float_bits(most), smem, vectors.thread)
            if vectors.thread == 0:
                cute.arch.store(largest + cta, bits + 1, sem="relaxed", scope="gpu")
        else:
            bits = Int32(0)
            for i in cutlass.range(vectors.thread, ctas, QUANTIZE_THREADS, unroll=1):
                stored = Int32(0)
                while stored == 0:
                    stored = cute.arch.load(largest + i, Int32, sem="relaxed", scope="gpu")
                bits = cutlass.max(bits, stored - 1)
            bits = largest_of_warps(bits, smem, vectors.thread)
            scale = cute.arch.fmax(float_of(bits) / MOST, Float32(LEAST_SCALE))
            factor = Float32(1.0) / scale
            for block in cutlass.range(cta, blocks, ctas, unroll=1):
                if cutlass.const_expr(is_transposed):
                    vectors.write_transposed(rows, block, raw, written, factor)
                else:
                    for j in cutlass.range_constexpr(VECTORS_AT_ONCE):
                        # The conversion limits what is too large.
                        rounded = cute.make_rmem_tensor(VECTOR, written.element_type)
                        values = vectors.values(raw[None, j]).load()
                        rounded.store((values * factor).to(written.element_type))
                        cute.autovec_copy(rounded, vectors.vector_in(written, block, j))
                vectors.load(rows, block + ctas, blocks, raw)
            if cta == 0 and vectors.thread == 0:
                # `rotate` does not keep lengths.
                norm = mixed_columns(vectors.columns) ** -0.5 if vectors.is_rotated else 1.0
                descales[batch, head] = scale * Float32(norm)


def rows_of_unit(
    tensor: cute.Tensor,  # (batch, seqlen, heads, columns), or packed
    ends: cute.Tensor | None,  # cu_seqlens of packed sequences
    used: cute.Tensor | None,  # and how many rows of each count
    batch,
    head,  # the unit's number
    heads: int = 1,  # of a unit
) -> cute.Tensor:
    """The rows of a unit, ((heads, seqlen), columns)."""
    if ends is None:
        sequence_rows, seqlen = tensor[batch, None, None, None], tensor.shape[1]
    else:
        begin, seqlen = RaggedLengths(ends, used, tensor.shape[0]).read(batch)
        sequence_rows = cute.domain_offset((begin, 0, 0), tensor)
    head_rows = cute.domain_offset((0, head * heads, 0), sequence_rows)
    token, step, _ = head_rows.stride
    shape, stride = ((heads, seqlen), head_rows.shape[2]), ((step, token), 1)
    return cute.make_tensor(head_rows.iterator, cute.make_layout(shape, stride=stride))


@dataclass(frozen=True)
class UnitVectors:
    """A thread's vectors of a unit: the same columns of some rows.
    Past the last row it has that row again, which changes nothing."""

    columns: int
    thread: Int32
    vector: Int32  # the vector of a row
    # What rows lose, (8,) float32; None for nothing.
    means: cute.Tensor | None
    is_rotated: bool
    is_transposed: bool  # whether the rows' transpose is written

    @classmethod
    def of(cls, rows, means, is_rotated: bool, is_transposed: bool) -> "UnitVectors":
        thread, _, _ = cute.arch.thread_idx()
        columns = rows.shape[1]
        vector, lost = thread % (columns // VECTOR), None
        if is_transposed:
            # Eight lanes have 32 keys of four vectors: 64 bytes of a row, 32 of a column.
            vector = thread // WARP % (columns // 32) * 4 + thread % WARP // 8
        if means is not None:
            lost = cute.make_rmem_tensor(VECTOR, Float32)
            lost.store(vector_of(means, vector).load())
        return cls(columns, thread, vector, lost, is_rotated, is_transposed)

    @property
    def height(self) -> int:
        """Rows of a block, all that a CTA holds at once."""
        if self.is_transposed:
            return QUANTIZE_THREADS // WARP // (self.columns // 32) * 32
        return VECTORS_AT_ONCE * (QUANTIZE_THREADS // (self.columns // VECTOR))

    def vector_in(self, rows: cute.Tensor, block, i: int) -> cute.Tensor:
        """Vector i of this thread in a block of rows."""
        last = rows.shape[0][0] * rows.shape[0][1] - 1
        if self.is_transposed:
            group = self.group(rows, block)
            index = group * KEYS_OF_GROUP + self.thread % 4 * 2 + (i % 2 + i // 2 * 8)
        else:
            index = block * self.height + i * (self.height // VECTORS_AT_ONCE)
            index += self.thread // (self.columns // VECTOR)
        return vector_of(rows[cutlass.min(index, last), None], self.vector)

    def group(self, rows: cute.Tensor, block):
        """This thread's group of keys in a block, or the last group."""
        part = self.thread // WARP // (self.columns // 32)
        group = block * (self.height // KEYS_OF_GROUP) + part * 2 + self.thread // 4 % 2
        return cutlass.min(group, key_groups(rows.shape[0][1]) - 1)

    @cute.jit
    def write_transposed(
        self, rows, block, raw: cute.Tensor, written: cute.Tensor, factor: Float32 | None = None
    ):
        """Write this thread's keys of V^T, (columns, groups, 16), in the key order.
        Past the last key is that key again. Without a factor they are in e4m3 already."""
        group = self.group(rows, block)
        for column in cutlass.range_constexpr(VECTOR):
            rounded = cute.make_rmem_tensor(VECTORS_AT_ONCE, written.element_type)
            if cutlass.const_expr(factor is None):
                codes = cute.recast_tensor(rounded, Uint8)
                for i in cutlass.range_constexpr(VECTORS_AT_ONCE):
                    codes[i] = cute.recast_tensor(raw, Uint8)[column, i]
            else:
                values = cute.make_rmem_tensor(VECTORS_AT_ONCE, Float32)
                for i in cutlass.range_constexpr(VECTORS_AT_ONCE):
                    values[i] = raw[column, i].to(Float32)
                rounded.store((values.load() * factor).to(written.element_type))
            keys = written[self.vector * VECTOR + column, group, None]
            cute.autovec_copy(rounded, vector_of(keys, self.thread % 4, VECTORS_AT_ONCE))

    @cute.jit
    def load(self, rows: cute.Tensor, block, blocks, raw: cute.Tensor):
        """Load this thread's vectors of a block of rows, if it exists."""
        if block < blocks:
            for i in cutlass.range_constexpr(VECTORS_AT_ONCE):
                cute.autovec_copy(self.vector_in(rows, block, i), raw[None, i])

    @cute.jit
    def values(self, vector: cute.Tensor) -> cute.Tensor:
        """A vector as float32, less the means, and rotated."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        values.store(vector.load().to(Float32))
        if cutlass.const_expr(self.means is not None):
            values.store(values.load() - self.means.load())
        if cutlass.const_expr(self.is_rotated):
            self.rotate(values)
        return values

    @cute.jit
    def rotate(self, values: cute.Tensor):
        """Negate some columns, then apply a Hadamard matrix to blocks of them."""
        negated = Uint32(self.vector + 1) * Uint32(HASH) >> 24
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = -values[i] if negated >> i & 1 == 1 else values[i]
        for step in (1, 2, 4):
            for i in cutlass.range_constexpr(VECTOR):
                if cutlass.const_expr(i & step == 0):
                    a, b = values[i], values[i + step]
                    values[i], values[i + step] = a + b, a - b
        lanes = mixed_columns(self.columns) // VECTOR
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            is_second = self.thread >> step & 1 == 1
            for i in cutlass.range_constexpr(VECTOR):
                other = cute.arch.shuffle_sync_bfly(values[i], offset=1 << step)
                values[i] = other - values[i] if is_second else values[i] + other
