"""Blocks of an FP8 cache, converted to 16 bits in shared memory.

TMA or cp.async loads a block as e4m3. Converter warps write it in 16 bits, in the layout of blocks
of a 16-bit cache. So the MMA warpgroups do the same as for these. To fp16 two values take one
instruction, to bf16 they would take four. fp16 holds all values of e4m3.

Each lane converts 16 bytes at a time: one chunk of a loaded row, two chunks of a converted row. The
lanes of a warp are spread over rows and chunks so that neither side has bank conflicts.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32, pipeline

from fa3.primitives.cache_blocks import box_bytes
from fa3.primitives.fragments import float_bits, float_of, word_from, words_of
from fa3.primitives.vectors import VECTOR, as_elements, row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP

CHUNK = 16  # bytes of a chunk: what a lane loads at once, and the unit of a swizzle
CHUNKS_AT_ONCE = 8  # chunks that a lane has in registers, which hides what loads take
LARGEST_EXPONENT = 127 + 14  # biased exponent that the largest query of a tile gets in fp16
MOST_SCALED = 120  # exponent of the largest power of two that queries are multiplied by
COLUMNS_OF_HELD_Q = 128  # most columns of a Q that registers hold, if blocks are converted
CONVERTED = Float16  # element type of queries and of blocks that are multiplied

LARGER_SIZES = (
    "{.reg .b32 s; and.b32 s, {$r0}, 0x7fff7fff; add.s16x2 s, s, {$r1}; max.s16x2 {$w0}, s, {$r2};}"
)
"""PTX that compares a word of bf16 with sizes: bits without the sign, plus 128. Infinities and NaN
have negative sizes, so they do not count."""

TO_FP16 = (
    "{.reg .b32 s, l, h; mul.rn.bf16x2 s, {$r0}, {$r1}; shl.b32 l, s, 16; "
    "and.b32 h, s, 0xffff0000; cvt.rn.f16x2.f32 {$w0}, h, l;}"
)
"""PTX that multiplies a word of bf16 by a power of two, and converts it to fp16."""


def swizzle_of(row, width: int):
    """Return what is xored with chunk numbers in rows of `width` bytes."""
    return row // (128 // width) % (width // CHUNK)


@dataclass(frozen=True)
class CacheConverter:
    """Converts blocks of K and V to 16 bits.

    At once a warp converts a piece of a group of rows: 64 bytes, or 32, of 8 rows, or of 16. Groups
    that are left over, if the warps do not divide them, are the first warps'.
    """

    rings: tuple  # `BlockRing`s of K and V; loaded blocks are (tile_n, columns, stages) in e4m3
    # warp, lane: of this thread; the first of the warps is 0.
    warp: Int32
    lane: Int32
    warps: int  # how many convert

    @property
    def states(self) -> tuple:
        """Each ring's first pipeline states: of blocks loaded, and written."""
        new_state, user = pipeline.make_pipeline_state, pipeline.PipelineUserType
        return tuple(
            (
                new_state(user.Consumer, cute.size(ring.loaded, mode=[2])),
                new_state(user.Producer, cute.size(ring.blocks, mode=[2])),
            )
            for ring in self.rings
        )

    @cute.jit
    def convert_next(self, which: cutlass.Constexpr, from_state, to_state):
        """Convert the next block of one ring; return its next states."""
        ring = self.rings[which]
        ring.loading.consumer_wait(from_state)
        self.copy(which, from_state, to_state)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        # Only now: loads may still be on their way when an earlier arrival is seen.
        ring.loading.consumer_release(from_state)
        ring.pipe.producer_commit(to_state)
        from_state.advance()
        to_state.advance()
        return from_state, to_state

    @cute.jit
    def run(self, count, states: tuple) -> tuple:
        """Convert `count` blocks, K one ahead of V; return the next states."""
        k_states, v_states = states
        k_states = self.convert_next(0, *k_states)
        for _ in cutlass.range(count - 1, unroll=1):
            k_states = self.convert_next(0, *k_states)
            v_states = self.convert_next(1, *v_states)
        return k_states, self.convert_next(1, *v_states)

    @cute.jit
    def copy(self, which: cutlass.Constexpr, from_state, to_state):
        """Convert this warp's part of a block, into a stage it acquires."""
        ring = self.rings[which]
        tile_n, columns, _ = (cute.size(ring.loaded, mode=[i]) for i in range(3))
        width = min(box_bytes(columns, 1), 64)  # of a piece
        rows = CHUNK * WARP // width
        groups, rest = divmod(tile_n // rows, self.warps)
        pieces, context = range(0, columns, width), (ring, from_state, to_state)
        begins = tuple((self.warp * groups + i) * rows for i in range(groups))
        self.convert(pieces, begins, *context, acquires=True)
        if cutlass.const_expr(groups == 0):
            # Each warp commits the stage, also one without a group.
            ring.pipe.producer_acquire(to_state)
        if cutlass.const_expr(rest):  # noqa: SIM102, joined both would be traced
            if self.warp < rest:
                left_over = (self.warps * groups + self.warp) * rows
                self.convert(pieces, (left_over,), *context, acquires=False)

    def convert(self, columns: range, begins: tuple, ring, from_state, to_state, acquires: bool):
        """Convert pieces at some columns of groups that begin at some rows."""
        loaded, blocks = ring.loaded, ring.blocks
        places = list(itertools.product(columns, begins))
        for first in range(0, len(places), CHUNKS_AT_ONCE):
            some = places[first : first + CHUNKS_AT_ONCE]
            # All loads come first, which hides what they take.
            chunks = [self.vector(loaded, from_state.index, *place).load() for place in some]
            if first == 0 and acquires:
                ring.pipe.producer_acquire(to_state)
            for place, chunk in zip(some, chunks, strict=True):
                converted = cute.make_rmem_tensor((VECTOR, 2), blocks.element_type)
                converted.store(chunk.to(blocks.element_type).reshape((VECTOR, 2)))
                for i in range(2):
                    target = self.vector(blocks, to_state.index, *place, i)
                    cute.autovec_copy(converted[None, i], target)

    def vector(self, buffer: cute.Tensor, stage, column: int, begin, i: int = 0):
        """This lane's 16 bytes of a piece of a group of rows.
        In 16 bits, vector `i` of its two. Addresses are computed here, not by the buffer's swizzle,
        so that the kernel computes only what depends on lane, warp and stage."""
        tile_n, columns, _ = (cute.size(buffer, mode=[mode]) for mode in range(3))
        size = buffer.element_type.width // 8
        width, loaded_width = box_bytes(columns, size), box_bytes(columns, 1)
        piece = min(loaded_width, 64) // CHUNK  # chunks of a row
        row, chunk = self.lane // piece, size * (self.lane % piece) + i
        if loaded_width == 128:
            # Eight lanes load chunks of rows r and r ^ 5: bit 2 separates the loads of the two
            # rows, bit 0 the stores.
            row = (self.lane // 8) ^ (self.lane // 4 % 2 * 5)
        box, rest = divmod(size * column, width)
        offset = stage * (tile_n * columns * size) + row * width
        offset += ((rest // CHUNK + chunk) ^ swizzle_of(row, width)) * CHUNK
        offset += (box * tile_n + begin) * width
        address, space = buffer.iterator.toint() + offset, cute.AddressSpace.smem
        pointer = cute.make_ptr(buffer.element_type, address, space, assumed_align=CHUNK)
        return cute.make_tensor(pointer, CHUNK // size)


class ConvertedPipeline(pipeline.PipelineAsync):
    """The mbarrier pipeline from warps that write blocks to the MMA warpgroups.
    One lane of a warp arrives for its warp."""

    def producer_commit(self, state):
        with cute.arch.elect_one():
            super().producer_commit(state)

    def consumer_release(self, state):
        with cute.arch.elect_one():
            super().consumer_release(state)


@cute.jit
def convert_rows(
    # (rows, columns) in 16 bits; each 16 bytes have 8 elements of `dtype`, see `fetch_rows`.
    smem: cute.Tensor,
    dtype: cutlass.Constexpr,
    rows: Int32,  # how many of them are rows of Q; the others are 0
    largest: cute.Tensor,  # (4,) int32 in shared memory
    barrier,  # of the warpgroup
    thread,
):
    """Convert a tile's Q to fp16; return the scores' factor.

    Each thread converts what it copied. Rows in bf16 may be too large or too small for fp16, so a
    tile is multiplied by a power of two.
    """
    columns, scale, unscale = cute.size(smem, mode=[1]), Float32(1.0), Float32(1.0)
    if cutlass.const_expr(dtype.width == 8 or dtype is cutlass.BFloat16):
        steps = cute.ceil_div(cutlass.min(rows, ROWS) * (columns // VECTOR), WARPGROUP)
        if cutlass.const_expr(dtype.width != 8):
            most = Float32(0.0)
            for i in cutlass.range(steps, unroll=1):
                values, _ = elements_at(smem, dtype, thread + i * WARPGROUP)
                most = largest_finite(most, values)
            bits = largest_of_warps(float_bits(most), largest, thread, barrier.arrive_and_wait)
            scale, unscale = powers_of_two(bits)
        for i in cutlass.range(steps, unroll=1):
            values, target = elements_at(smem, dtype, thread + i * WARPGROUP)
            converted = cute.make_rmem_tensor(VECTOR, CONVERTED)
            converted.store((values.load() * scale).to(CONVERTED))
            # The tensor may say the type of before: to read it as another would lose its swizzle.
            cute.autovec_copy(cute.recast_tensor(converted, target.element_type), target)
    return unscale


def convert_registers(pieces: list[cute.Tensor], largest_of_threads: Callable) -> Float32:
    """Do what `convert_rows` does, to pieces of a thread's Q in registers.
    `largest_of_threads` returns the largest of a number that each thread has."""
    if pieces[0].element_type is CONVERTED:
        return Float32(1.0)
    words, zeros = list(map(words_of, pieces)), word_from("mov.b32 {$w0}, 0x00800080;")
    sizes = [zeros] * 4  # Four chains, as each step waits for the one before.
    for piece, i in itertools.product(words, range(cute.size(words[0]))):
        sizes = [*sizes[1:], word_from(LARGER_SIZES, piece[i], zeros, sizes[0])]
    for one in sizes[1:]:
        sizes[0] = word_from("max.s16x2 {$w0}, {$r0}, {$r1};", one, sizes[0])
    bits = (cutlass.max(sizes[0] >> 16, sizes[0] & 0xFFFF) - 128) << 16
    scale, unscale = powers_of_two(largest_of_threads(Int32(bits)))
    factors = Uint32(float_bits(scale)) >> 16
    for piece, i in itertools.product(words, range(cute.size(words[0]))):
        piece[i] = word_from(TO_FP16, piece[i], factors << 16 | factors)
    return unscale


def largest_finite(most: Float32, values: cute.Tensor) -> Float32:
    """The largest of a number and of finite magnitudes."""
    for i in range(cute.size(values)):
        size = cute.arch.fmax(values[i], -values[i])
        size = cutlass.select_(size < Float32.inf, size, Float32(0.0))
        most = cute.arch.fmax(most, size)
    return most


def powers_of_two(bits: Int32) -> tuple:
    """Factors that bring Q into fp16, and scores back.
    `bits` are the bits of Q's largest magnitude."""
    excess = cutlass.max((bits >> 23) - LARGEST_EXPONENT, -MOST_SCALED)
    return tuple(float_of((x + 127) << 23) for x in (-excess, excess))


@cute.jit
def elements_at(smem: cute.Tensor, dtype: cutlass.Constexpr, index) -> tuple:
    """A vector of a tile of Q in float32, and its place."""
    row, vector = row_and_vector(index, cute.size(smem, mode=[1]))
    target = vector_of(smem[row, None], vector)
    raw = cute.make_rmem_tensor(VECTOR, dtype)
    cute.autovec_copy(as_elements(target, dtype), raw)
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.store(raw.load().to(Float32))
    return values, target


@cute.jit
def largest_of_warps(number, warp_values, thread, meet: cutlass.Constexpr = cute.arch.sync_threads):
    """The largest of a number that each thread has.
    `warp_values` is int32 in shared memory, one for each warp; `meet` is a barrier of the warps."""
    number = cute.arch.warp_redux_sync(number, "max")
    if thread % WARP == 0:
        warp_values[thread // WARP] = number
    meet()
    for i in cutlass.range_constexpr(cute.size(warp_values)):
        number = cutlass.max(number, warp_values[i])
    return number
