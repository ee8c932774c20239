"""Segment table: the tile table, and segments of tiles, some split.

`fa3.calls.execution` launches it instead of `fa3.kernels.tile_table` where whole tiles would
leave SMs idle. It reads the lengths from device memory and writes two tables. The first is the tile
table. The second has, like the tables that the host cuts (`fa3.schedules.split`), a column of
segments for each CTA of the forward kernel, which `RaggedSegments` walks.

One CTA does it, for no more sequences than a warp has lanes. Every warp reads all lengths. Then
each thread has a few tiles: it counts the key blocks of each, and prefix sums give the work before
it. From this follow its cuts (`fa3.schedules.stretches`) and, by another prefix sum, its slots. At
last each thread has a column: it finds the first tile there by bisection, and writes segments.
CTAs that wait until the decode kernel gives them its SMs get shorter columns.

Timeline
    ask L2 for lengths | wait | tile table | work | sums | cuts | sums | columns
    The next kernel is launched early and waits in hardware for the end of this one.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.tile_table import MORE_BESIDE_SEGMENTS, TileTable, TileTableArguments
from fa3.primitives import arguments
from fa3.primitives.arithmetic import Divisor, either
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.vectors import store_words, sum_in_warp
from fa3.primitives.wgmma import WARP
from fa3.schedules.order import END
from fa3.schedules.ragged import RECORD, RaggedOrder, TileRecord
from fa3.schedules.split import FIELDS
from fa3.schedules.stretches import BLOCKS_OF_TILE, Rounds, Stretches, TileCut
from fa3.scores.masks import Sequence

CUTTERS = 256
WARPS_OF_CTA = CUTTERS // WARP

MOST_SPLIT_CTAS = CUTTERS - 1
"""CTAs of the forward kernel for which there are threads, and parts of a tile."""

ROOM = 8 * CUTTERS
MOST_SPLIT_TILES = ROOM - 1  # tiles that the kernel has room for

MOST_SEQUENCES = WARP  # sequences that the kernel serves: each warp has a lane for each
MOST_WORK = 1 << 30  # key blocks of all tiles that 32 bits can count and multiply safely


def segment_rows(num_tiles: int) -> int:
    """Segments of a CTA at most, and the end of its column."""
    return num_tiles + 1


@dataclass(frozen=True)
class SegmentTable(KernelBase):
    """The kernel that makes both tables."""

    tiles: TileTable  # the kernel that makes the tile table alone; of tiles of queries

    entry_name: ClassVar[str] = "fa3_segment_table"
    arguments_type: ClassVar[type] = TileTableArguments

    def arguments(self) -> list:
        own = dict.fromkeys(("heads", "rows_of_group"), Int32(0))
        own["segments"] = arguments.int32_vector()
        return [*self.tiles.symbolic(**own), arguments.symbolic_stream()]

    @cute.jit
    def launch(self, call: TileTableArguments, stream):
        heads = Divisor.of(call.heads)
        order = RaggedOrder.of(call.table, heads, call.qhead_per_kvhead, call.rows_of_group)
        tiles = call._replace(segments=None, heads=None, rows_of_group=None)
        self.kernel(tiles, order, call.segments).launch(
            grid=(1, 1, 1), block=(CUTTERS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, call: TileTableArguments, order: RaggedOrder, segments: cute.Tensor):
        smem = SmemAllocator()
        fields = cute.make_layout((ROOM, len(TileCut._fields)))
        cuts = smem.allocate_tensor(Int32, fields, byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS_OF_CTA, 3)), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        tiles = self.tiles
        sequence, place, upto = tiles.read_few(call, lane)
        first = cute.arch.make_warp_uniform(thread // WARP) * WARP
        tiles.write_tiles(call, Int32(0), sequence, upto, place, first, Int32(CUTTERS))
        num_records = cute.arch.shuffle_sync(upto, WARP - 1)
        decode_ctas = delay = Int32(0)
        if call.short_queries > 0:
            share, heads_kv = tiles.share(call, sequence), order.heads.value // order.heads_of_key
            decode_ctas = share.ctas_beside(call.num_ctas, MORE_BESIDE_SEGMENTS)
            delay = share.blocks_beside(decode_ctas, heads_kv)
        if first == 0:
            tiles.write_header(call, num_records, decode_ctas)
        num_tiles = tiles.used(call, num_records) * order.heads.value
        # The decode kernel has the last CTAs at first, unless it has all, and all wait.
        num_late = decode_ctas if decode_ctas < call.num_ctas else Int32(0)
        cute.arch.sync_threads()
        ctas = call.num_ctas - num_late, num_late, delay
        rounds, stretches = self.cut(call, order, num_tiles, ctas, cuts, sums)
        cute.arch.sync_threads()
        if thread < call.num_ctas:
            self.write_column(segments, cuts, rounds, stretches, num_tiles, thread, call.num_ctas)

    @cute.jit
    def blocks_of_tile(
        self, call: TileTableArguments, order: RaggedOrder, index: Int32
    ) -> tuple[Int32, Int32]:
        """Return a tile's first key block and its number of blocks."""
        number, words = order.heads.quotient(index), cute.make_rmem_tensor(RECORD, Int32)
        order.load(words, number)
        record = TileRecord(*(words[i] for i in range(len(TileRecord._fields))))
        _, m_block = order.within(index, number, record)
        tile_m, tile_n = self.tiles.tile_m, self.tiles.tile_n
        lengths = Sequence(record.seqlen_q, record.seqlen_k, call.window)
        blocks = self.tiles.band.key_blocks(m_block * tile_m, tile_m, tile_n, lengths)
        return blocks.begin, blocks.end - blocks.begin

    @cute.jit
    def cut(
        self,
        call: TileTableArguments,
        order: RaggedOrder,
        num_tiles: Int32,
        ctas: tuple,  # those that begin at once, those that begin late, and their delay
        cuts: cute.Tensor,  # receives the `TileCut` of each tile
        sums: cute.Tensor,  # room for three numbers of each warp
    ) -> tuple[Rounds, Stretches]:
        """Cut tiles after rounds of whole ones; return rounds and stretches.
        Each thread has tiles that follow one another."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP, thread // WARP
        tiles_per_thread = (num_tiles + CUTTERS - 1) // CUTTERS
        first = cutlass.min(thread * tiles_per_thread, num_tiles)
        end = cutlass.min(first + tiles_per_thread, num_tiles)
        work = longest = Int32(0)
        for number in cutlass.range(first, end):
            begin, blocks = self.blocks_of_tile(call, order, number)
            cuts[number, 0], cuts[number, 1], cuts[number, 2] = work, begin, blocks
            work += blocks + BLOCKS_OF_TILE
            longest = cutlass.max(longest, blocks)
        upto, longest = sum_in_warp(work), cute.arch.warp_redux_sync(longest, "max")
        if lane == WARP - 1:
            sums[warp, 0], sums[warp, 1] = upto, longest
        cute.arch.sync_threads()
        start, total = upto - work, Int32(0)
        for i in cutlass.range_constexpr(WARPS_OF_CTA):
            total += sums[i, 0]
            start += sums[i, 0] if i < warp else Int32(0)
            longest = cutlass.max(longest, sums[i, 1])
        stretches = Stretches.of(total, longest, num_tiles, *ctas)
        rounds = Rounds(*[Int32(0)] * len(Rounds._fields))
        # Few calls have any: others are spared the divisions.
        if stretches.have_room(longest, num_tiles):
            for number in cutlass.range(first, end):
                cuts[number, 0] += start
            cute.arch.sync_threads()
            rounds = Rounds.of(stretches, longest)
            rounds = rounds.kept(self.work_before(cuts, rounds.num_tiles, num_tiles, total))
            before = self.work_before(cuts, rounds.num_tiles, num_tiles, total)
            rest = total - before, longest, num_tiles - rounds.num_tiles
            stretches, start = rounds.rest(stretches.delay, *rest), -before
            cute.arch.sync_threads()
        num_whole, slots = rounds.num_tiles, Int32(0)
        for number in cutlass.range(first, end):
            work = start + cuts[number, 0]
            cut = stretches.cut(number - num_whole, work, cuts[number, 1], cuts[number, 2])
            if number < num_whole:
                cut = cut._replace(owner=Int32(-1), cuts=Int32(0))
            cut = cut._replace(slot=slots)
            for i in cutlass.range_constexpr(len(TileCut._fields)):
                cuts[number, i] = cut[i]
            slots += cut.slots
        upto = sum_in_warp(slots)
        if lane == WARP - 1:
            sums[warp, 2] = upto
        cute.arch.sync_threads()
        slot = upto - slots
        for i in cutlass.range_constexpr(WARPS_OF_CTA):
            slot += sums[i, 2] if i < warp else Int32(0)
        for number in cutlass.range(first, end):
            cuts[number, len(TileCut._fields) - 1] += slot
        return rounds, stretches

    @cute.jit
    def work_before(self, cuts: cute.Tensor, number: Int32, num_tiles: Int32, total: Int32):
        """The work of all tiles before one, or of all."""
        return cuts[number, 0] if number < num_tiles else total

    @cute.jit
    def write_column(
        self, segments, cuts, rounds, stretches: Stretches, num_tiles, cta, num_columns
    ):
        """Write a CTA's segments.
        First a whole tile in each round. Then some of each tile from the first one that reaches
        its stretch to the last one that begins there."""
        number = Int32(0)
        for i in cutlass.range_constexpr(ROOM.bit_length() - 1):
            half = ROOM >> (i + 1)
            probed = self.read_cut(cuts, number + (half - 1))
            is_before = probed.owner + probed.cuts < cta
            number += half if is_before and number + half <= num_tiles else Int32(0)
        position, goes_on = cta, Int32(1)
        for turn in cutlass.range(rounds.first(cta), rounds.number, unroll=1):
            whole = rounds.tile(turn, cta)
            if whole < num_tiles:
                tile = self.read_cut(cuts, whole)._replace(owner=cta)
                segment = whole, *stretches.segment(tile, cta)
                store_words(segment, segments.iterator + position * FIELDS)
                position += num_columns
        while goes_on > 0:
            tile = self.read_cut(cuts, cutlass.min(number, ROOM - 1))
            goes_on = either(number < num_tiles, either(tile.owner <= cta, 1, 0), 0)
            words = (number, *stretches.segment(tile, cta))
            words = tuple(either(goes_on > 0, word, END) for word in words)
            store_words(words, segments.iterator + position * FIELDS)
            position += num_columns
            number += 1

    def read_cut(self, cuts: cute.Tensor, number: Int32) -> TileCut:
        """What shared memory has of a tile."""
        return TileCut(*(cuts[number, i] for i in range(len(TileCut._fields))))
