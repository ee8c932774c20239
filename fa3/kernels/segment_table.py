"""Segment table: the tile table, and parts of its tiles where few would leave SMs idle.

`fa3.calls.packed_calls` launches it instead of `fa3.kernels.tile_table` where the bounds that the
host knows allow only few tiles. It reads the lengths from device memory and writes two tables. The
first is the tile table. The second has, like the tables that the host cuts (`fa3.schedules.split`),
a column of segments for each CTA of the forward kernel, which `RaggedSegments` walks.

One CTA does it, for no more sequences than a warp has lanes. Every warp reads all lengths. Then
each thread has a tile: it counts the tile's key blocks, and prefix sums give the work before it.
From this follow its cuts (`fa3.schedules.stretches`) and, by another prefix sum, its slots. At last
each thread has a column: it finds the first tile there by bisection, and writes segments.

Timeline
    ask L2 for lengths | wait | tile table | work | sums | cuts | sums | columns
    The next kernel is launched early and waits in hardware for the end of this one.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.tile_table import (
    LaneSequence,
    TileTable,
    TileTableArguments,
    sum_in_warp,
)
from fa3.primitives import arguments
from fa3.primitives.divisor import Divisor
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.wgmma import WARP
from fa3.schedules.order import END
from fa3.schedules.ragged import RaggedOrder, TileRecord
from fa3.schedules.split import FIELDS
from fa3.schedules.stretches import BLOCKS_OF_TILE, Stretches, TileCut
from fa3.scores.masks import Sequence

CUTTERS = 256
WARPS_OF_CTA = CUTTERS // WARP

MOST_SPLIT_TILES = CUTTERS - 1
"""Tiles, and CTAs of the forward kernel, for which there are threads and parts enough."""

MOST_SEQUENCES = WARP  # sequences that the kernel serves: each warp has a lane for each
MOST_WORK = 1 << 30  # key blocks of all tiles that 32 bits can count and multiply safely


class SegmentTableArguments(
    namedtuple(
        "SegmentTableArguments",
        (*TileTableArguments._fields, "segments", "heads", "rows_of_section"),
    )
):
    """The arguments of a launch, in this order; the stream comes last.

    After `TileTableArguments` comes `segments`, int32, which receives `segment_rows` segments for
    each of `num_ctas` CTAs at most; then query heads, and `rows_of_section` of `RaggedOrder`.
    """

    __slots__ = ()

    @classmethod
    def symbolic(cls, kernel: "SegmentTable") -> "SegmentTableArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        more = arguments.int32_vector(), Int32(0), Int32(0)
        return cls(*TileTableArguments.symbolic(kernel.tiles), *more)


def segment_rows(num_tiles: int) -> int:
    """Segments of a CTA at most, and the end of its column."""
    return num_tiles + 1


@dataclass(frozen=True)
class SegmentTable(KernelBase):
    """The kernel that makes both tables."""

    tiles: TileTable  # the kernel that makes the tile table alone; of tiles of queries

    entry_name: ClassVar[str] = "fa3_segment_table"
    arguments_type: ClassVar[type] = SegmentTableArguments

    @cute.jit
    def launch(self, call: SegmentTableArguments, stream):
        heads = Divisor.of(call.heads)
        order = RaggedOrder.of(call.table, heads, call.qhead_per_kvhead, call.rows_of_section)
        tiles = TileTableArguments(*call[: len(TileTableArguments._fields)])
        self.kernel(tiles, order, call.segments).launch(
            grid=(1, 1, 1), block=(CUTTERS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, call: TileTableArguments, order: RaggedOrder, segments: cute.Tensor):
        smem = SmemAllocator()
        fields = len(TileCut._fields)
        cuts = smem.allocate_tensor(Int32, cute.make_layout((CUTTERS, fields)), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS_OF_CTA, 3)), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        tiles = self.tiles
        sequence, place, upto = tiles.read_few(call, lane)
        first = cute.arch.make_warp_uniform(thread // WARP) * WARP
        tiles.write_tiles(call, Int32(0), sequence, upto, place, first, Int32(CUTTERS))
        num_records = cute.arch.shuffle_sync(upto, WARP - 1)
        decode_ctas = tiles.ctas_beside(call, sequence)
        if first == 0:
            tiles.write_header(call, num_records, decode_ctas)
        num_tiles = tiles.used(call, num_records) * order.heads.value
        # The decode kernel has the other CTAs, unless it has all, and the forward kernel waits.
        num_ctas = call.num_ctas - decode_ctas
        num_ctas = num_ctas if num_ctas > 0 else call.num_ctas
        begin, blocks = self.blocks_of_tile(call, order, sequence, place, num_tiles)
        cut, stretches = self.cut(begin, blocks, num_tiles, num_ctas, sums)
        for i in cutlass.range_constexpr(fields):
            cuts[thread, i] = cut[i]
        cute.arch.sync_threads()
        if thread < call.num_ctas:
            self.write_column(segments, cuts, stretches, num_tiles, thread, call.num_ctas)

    @cute.jit
    def blocks_of_tile(
        self,
        call: TileTableArguments,
        order: RaggedOrder,
        # sequence, place: of this lane: its sequence, and the place of its first record.
        sequence: LaneSequence,
        place: Int32,
        num_tiles: Int32,
    ) -> tuple[Int32, Int32]:
        """Return the first key block and the number of blocks of this thread's tile, if any."""
        thread, _, _ = cute.arch.thread_idx()
        index = cutlass.max(cutlass.min(thread, num_tiles - 1), 0)
        number, owner = order.heads.quotient(index), Int32(0)
        for i in cutlass.range(call.queries.num_sequences):
            first, count = (cute.arch.shuffle_sync(n, i) for n in (place, sequence.num_tiles))
            owner = i if number >= first and number < first + count else owner
        begin_q, seqlen_q, begin_k, seqlen_k, _, num_m_blocks, first = (
            cute.arch.shuffle_sync(value, owner) for value in (*sequence, place)
        )
        left = first + num_m_blocks - 1 - number
        # Where there is no tile at all, nothing is to be divided by 0.
        num_m_blocks = cutlass.max(num_m_blocks, 1)
        record = TileRecord(left, owner, begin_q, seqlen_q, begin_k, seqlen_k, num_m_blocks)
        _, m_block = order.within(index, number, record)
        tile_m, tile_n = self.tiles.tile_m, self.tiles.tile_n
        lengths = Sequence(seqlen_q, seqlen_k, call.window)
        blocks = self.tiles.band.key_blocks(m_block * tile_m, tile_m, tile_n, lengths)
        count = blocks.end - blocks.begin
        return blocks.begin, count if thread < num_tiles else Int32(0)

    @cute.jit
    def cut(
        self, begin: Int32, blocks: Int32, num_tiles: Int32, num_ctas: Int32, sums: cute.Tensor
    ) -> tuple[TileCut, Stretches]:
        """Cut the tile with this thread's number, for `num_ctas` CTAs.
        `sums` has room for three numbers of each warp."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP, thread // WARP
        work = blocks + BLOCKS_OF_TILE if thread < num_tiles else Int32(0)
        upto, longest = sum_in_warp(work), cute.arch.warp_redux_sync(blocks, "max")
        if lane == WARP - 1:
            sums[warp, 0], sums[warp, 1] = upto, longest
        cute.arch.sync_threads()
        start, total = upto - work, Int32(0)
        for i in cutlass.range_constexpr(WARPS_OF_CTA):
            total += sums[i, 0]
            start += sums[i, 0] if i < warp else Int32(0)
            longest = cutlass.max(longest, sums[i, 1])
        stretches = Stretches.of(total, longest, num_tiles, num_ctas)
        cut = stretches.cut(thread, start, begin, blocks)
        upto = sum_in_warp(cut.slots)
        if lane == WARP - 1:
            sums[warp, 2] = upto
        cute.arch.sync_threads()
        slot = upto - cut.slots
        for i in cutlass.range_constexpr(WARPS_OF_CTA):
            slot += sums[i, 2] if i < warp else Int32(0)
        return cut._replace(slot=slot), stretches

    @cute.jit
    def write_column(
        self,
        segments: cute.Tensor,
        cuts: cute.Tensor,
        stretches: Stretches,
        num_tiles: Int32,
        cta: Int32,
        num_columns: Int32,
    ):
        """Write a CTA's segments: it has some of each tile from the first one that reaches its
        stretch to the last one that begins there."""
        number = Int32(0)
        for i in cutlass.range_constexpr(CUTTERS.bit_length() - 1):
            half = CUTTERS >> (i + 1)
            probed = self.read_cut(cuts, number + (half - 1))
            is_before = probed.owner + probed.cuts < cta
            number += half if is_before and number + half <= num_tiles else Int32(0)
        position, goes_on = cta, Int32(1)
        while goes_on > 0:
            tile = self.read_cut(cuts, cutlass.min(number, CUTTERS - 1))
            words = cute.make_rmem_tensor(FIELDS, Int32)
            words.fill(END)
            goes_on = Int32(0)
            if number < num_tiles and tile.owner <= cta:
                goes_on = Int32(1)
                first, end, part = stretches.segment(tile, cta)
                words[0], words[1], words[2], words[3] = number, first, end, part
            target = (segments.iterator + position * FIELDS).align(16)
            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(FIELDS)))
            position += num_columns
            number += 1

    def read_cut(self, cuts: cute.Tensor, number: Int32) -> TileCut:
        """What shared memory has of a tile."""
        return TileCut(*(cuts[number, i] for i in range(len(TileCut._fields))))
