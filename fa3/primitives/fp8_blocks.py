"""Blocks of an FP8 cache, converted to 16 bits in shared memory for the MMA warpgroups.

TMA or cp.async loads a block as e4m3. Converter warps write it in 16 bits, in the layout of blocks
of a 16-bit cache. So the MMA warpgroups do the same as for these. To fp16 two values take one
instruction, to bf16 they would take four. fp16 holds all values of e4m3.

Each lane converts 16 bytes at a time: one chunk of a loaded row, two chunks of a converted row. The
lanes of a warp are spread over rows and chunks so that neither side has bank conflicts.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, pipeline

from fa3.primitives.attention import BlockStream
from fa3.primitives.cache_blocks import box_bytes
from fa3.primitives.pipelines import thread_pipeline
from fa3.primitives.vectors import VECTOR, as_elements, row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

CHUNK = 16  # bytes of a chunk: what a lane loads at once, and the unit of a swizzle
CHUNKS_AT_ONCE = 8  # chunks that a lane has in registers, which hides what loads take
LARGEST_EXPONENT = 127 + 14  # biased exponent that the largest query of a tile gets in fp16
MOST_SCALED = 120  # exponent of the largest power of two that queries are multiplied by
CONVERTED = Float16  # element type of queries and of blocks that are multiplied


class LanePlace:
    """Where a lane's chunks are among the rows of its warp."""

    def __init__(self, width: int, lane):
        self.width = width  # bytes of a loaded row in its box
        self.rows = 16 if width == 32 else 8  # that a warp converts at once
        if width == 128:
            # Eight lanes load chunks of rows r and r ^ 5: bit 2 separates the loads of the two
            # rows, bit 0 the stores.
            self.row = (lane // 8) ^ (lane // 4 % 2 * 5)
        else:
            self.row = lane // (width // CHUNK)
        self.chunk = lane % (min(width, 64) // CHUNK)  # in 64 bytes of the row

    def swizzle(self, width: int):
        """What the swizzle of rows of `width` bytes adds to the lane's chunks, by exclusive or."""
        return swizzle_of(self.row, width)


def swizzle_of(row, width: int):
    """What the swizzle of rows of `width` bytes does to numbers of chunks, by exclusive or."""
    return row // (128 // width) % (width // CHUNK)


def block_of(tensor: cute.Tensor, offset, layout: cute.Layout) -> cute.Tensor:
    """Elements of a buffer in shared memory from `offset` on, without its swizzle."""
    address = tensor.iterator.toint() + offset * (tensor.element_type.width // 8)
    space = cute.AddressSpace.smem
    pointer = cute.make_ptr(tensor.element_type, address, space, assumed_align=CHUNK)
    return cute.make_tensor(pointer, layout)


@dataclass(frozen=True)
class BlockRewriter:
    """Makes blocks for the MMA warpgroups of loaded blocks of K or of V, with a few warps."""

    ring: Any  # the `BlockRing`; loaded blocks are (tile_n, columns, stages) in e4m3
    # warp, lane: of this thread; the first of the warps is 0.
    warp: Int32
    lane: Int32
    warps: int  # how many rewrite

    @cute.jit
    def rewrite(self, _, states: tuple):
        """Rewrite the next block; return the next states of `loading` and of `writing`."""
        from_state, to_state = states
        self.ring.loading.consumer_wait(from_state)
        self.copy(from_state, to_state)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        # Only now: loads may still be on their way when an earlier arrival is seen.
        self.ring.loading.consumer_release(from_state)
        self.ring.pipe.producer_commit(to_state)
        from_state.advance()
        to_state.advance()
        return from_state, to_state

    def copy(self, from_state, to_state):
        """Rewrite this warp's part of a block; acquire the stage where it is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class BlockConverter(BlockRewriter):
    """Converts blocks of K or of V to 16 bits."""

    @cute.jit
    def copy(self, from_state, to_state):
        for box in cutlass.range_constexpr(self.sizes[1] // self.width):
            for first in cutlass.range_constexpr(0, self.groups, CHUNKS_AT_ONCE // self.halves):
                last = min(first + CHUNKS_AT_ONCE // self.halves, self.groups)
                chunks = self.load(box, first, last, from_state.index)
                if cutlass.const_expr(box + first == 0):
                    self.ring.pipe.producer_acquire(to_state)
                self.store(chunks, box, first, to_state.index)

    @property
    def sizes(self) -> tuple[int, int]:
        """(tile_n, columns)"""
        tile_n, columns, _ = (cute.size(self.ring.loaded, mode=[i]) for i in range(3))
        return tile_n, columns

    @property
    def width(self) -> int:
        return box_bytes(self.sizes[1], 1)

    @property
    def halves(self) -> int:
        """Chunks of a lane in a row of a box."""
        return max(1, self.width // 64)

    @property
    def groups(self) -> int:
        """Groups of rows of a block that each warp converts, one after the other."""
        return self.sizes[0] // (self.warps * LanePlace(self.width, 0).rows)

    def row(self, place: LanePlace, group: int):
        """The lane's row in a group of its warp."""
        return self.warp * (self.groups * place.rows) + place.row + group * place.rows

    @cute.jit
    def load(
        self, box: cutlass.Constexpr, first: cutlass.Constexpr, last: cutlass.Constexpr, stage
    ) -> cute.Tensor:
        """This lane's chunks of groups of a box of a loaded block, (16, groups, halves)."""
        (tile_n, columns), width = self.sizes, self.width
        place = LanePlace(width, self.lane)
        groups = last - first
        chunks = cute.make_rmem_tensor((CHUNK, groups, self.halves), self.ring.loaded.element_type)
        row = self.row(place, first)
        layout = cute.make_layout((CHUNK, groups), stride=(1, place.rows * width))
        for half in cutlass.range_constexpr(self.halves):
            chunk = (4 * half + place.chunk) ^ place.swizzle(width)
            offset = stage * (tile_n * columns) + row * width + chunk * CHUNK
            source = block_of(self.ring.loaded, offset + box * tile_n * width, layout)
            for group in cutlass.range_constexpr(groups):
                cute.autovec_copy(source[None, group], chunks[None, group, half])
        return chunks

    @cute.jit
    def store(self, chunks: cute.Tensor, box: cutlass.Constexpr, first: cutlass.Constexpr, stage):
        """Convert the lane's chunks of groups from `first` on, and write them to a block."""
        (tile_n, columns), width = self.sizes, min(128, 2 * self.width)
        place = LanePlace(self.width, self.lane)
        _, groups, halves = chunks.shape
        row, in_row = self.row(place, first), width // 2
        layout = cute.make_layout(
            (VECTOR, groups, halves), stride=(1, place.rows * in_row, tile_n * in_row)
        )
        targets = []
        for i in cutlass.range_constexpr(2):
            chunk = (2 * place.chunk + i) ^ place.swizzle(width)
            offset = stage * (tile_n * columns) + row * in_row + chunk * VECTOR
            offset = offset + box * halves * tile_n * in_row
            targets.append(block_of(self.ring.blocks, offset, layout))
        for half in cutlass.range_constexpr(halves):
            for group in cutlass.range_constexpr(groups):
                values = cute.make_rmem_tensor((VECTOR, 2), self.ring.blocks.element_type)
                source = chunks[None, group, half].iterator
                pair = cute.make_tensor(source, cute.make_layout((VECTOR, 2)))
                values.store(pair.load().to(self.ring.blocks.element_type))
                for i in cutlass.range_constexpr(2):
                    cute.autovec_copy(values[None, i], targets[i][None, group, half])


@dataclass(frozen=True)
class CacheConverter:
    """Converts blocks of K and V, with a few warps."""

    k: BlockConverter
    v: BlockConverter

    @classmethod
    def of(cls, k, v, *warp_and_lane) -> "CacheConverter":
        """What converts the blocks of two `BlockRing`s."""
        return cls(*(BlockConverter(ring, *warp_and_lane) for ring in (k, v)))

    @cute.jit
    def run(self, begin, end, states: tuple) -> tuple:
        """Convert a tile's blocks from `end - 1` down to `begin`; return the next states."""
        k_states, v_states = states
        stream = BlockStream(lambda n_block: n_block, self.k.rewrite, self.v.rewrite)
        n_block = end - 1
        place, k_states = stream.first(n_block, k_states)
        place, k_states, v_states = stream.rest(begin, n_block, place, k_states, v_states)
        return stream.last(place, k_states, v_states)


@dataclass(frozen=True)
class ConvertedPipeline:
    """The mbarrier pipeline from warps that write blocks to the MMA warpgroups.

    One lane of a warp arrives for its warp.
    """

    pipe: pipeline.PipelineAsync

    @classmethod
    def create(
        cls, barriers, stages: int, warps: int, consumers: int = WARPS
    ) -> "ConvertedPipeline":
        """The pipeline of so many producer and consumer warps; a stage has two mbarriers."""
        return cls(thread_pipeline(barriers, stages, warps, consumers))

    def producer_acquire(self, state):
        self.pipe.producer_acquire(state)

    def producer_commit(self, state):
        with cute.arch.elect_one():
            self.pipe.producer_commit(state)

    def consumer_wait(self, state):
        self.pipe.consumer_wait(state)

    def consumer_release(self, state):
        with cute.arch.elect_one():
            self.pipe.consumer_release(state)


def rewriter_states(loaded_stages: int, stages: int) -> tuple:
    """The first states of a warp that takes loaded blocks and makes others of them."""
    user = pipeline.PipelineUserType
    return (
        pipeline.make_pipeline_state(user.Consumer, loaded_stages),
        pipeline.make_pipeline_state(user.Producer, stages),
    )


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
    """Convert a tile's rows of Q in shared memory to fp16, each thread what it has copied there.

    Rows in bf16 may be too large or too small for fp16, so a tile is multiplied by a power of two.

    Returns:
        what scores are to be multiplied by.
    """
    columns, unscale = cute.size(smem, mode=[1]), Float32(1.0)
    if cutlass.const_expr(dtype.width == 8 or dtype is cutlass.BFloat16):
        scale = Float32(1.0)
        steps = cute.ceil_div(cutlass.min(rows, ROWS) * (columns // VECTOR), WARPGROUP)
        if cutlass.const_expr(dtype.width != 8):
            most = Float32(0.0)
            for i in cutlass.range(steps, unroll=1):
                values, _ = elements_at(smem, dtype, thread + i * WARPGROUP)
                for j in cutlass.range_constexpr(VECTOR):
                    size = cute.arch.fmax(values[j], -values[j])
                    most = cute.arch.fmax(most, size if size < Float32.inf else Float32(0.0))
            bits = largest_of_warps(float_bits(most), largest, thread, barrier.arrive_and_wait)
            excess = cutlass.max((bits >> 23) - LARGEST_EXPONENT, -MOST_SCALED)
            scale, unscale = (float_of((x + 127) << 23) for x in (-excess, excess))
        for i in cutlass.range(steps, unroll=1):
            values, target = elements_at(smem, dtype, thread + i * WARPGROUP)
            converted = cute.make_rmem_tensor(VECTOR, CONVERTED)
            converted.store((values.load() * scale).to(CONVERTED))
            # The tensor may say the type of before: to read it as another would lose its swizzle.
            cute.autovec_copy(cute.recast_tensor(converted, target.element_type), target)
    return unscale


@cute.jit
def elements_at(smem: cute.Tensor, dtype: cutlass.Constexpr, index) -> tuple:
    """Vector number `index` of a tile of Q as float32 in registers, and where it is."""
    row, vector = row_and_vector(index, cute.size(smem, mode=[1]))
    target = vector_of(smem[row, None], vector)
    raw = cute.make_rmem_tensor(VECTOR, dtype)
    cute.autovec_copy(as_elements(target, dtype), raw)
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.store(raw.load().to(Float32))
    return values, target


def float_bits(value: Float32) -> Int32:
    """The bits of a float32."""
    register = cute.make_rmem_tensor(1, Float32)
    register[0] = value
    return cute.recast_tensor(register, Int32)[0]


def float_of(bits: Int32) -> Float32:
    """The float32 of these bits."""
    register = cute.make_rmem_tensor(1, Int32)
    register[0] = bits
    return cute.recast_tensor(register, Float32)[0]


@cute.jit
def largest_of_warps(number, of_warps, thread, meet: cutlass.Constexpr = cute.arch.sync_threads):
    """The largest of a number that each thread has.
    `of_warps` is int32 in shared memory, one for each warp; `meet` is a barrier of the warps."""
    number = cute.arch.warp_redux_sync(number, "max")
    if thread % WARP == 0:
        of_warps[thread // WARP] = number
    meet()
    for i in cutlass.range_constexpr(cute.size(of_warps)):
        number = cutlass.max(number, of_warps[i])
    return number
