"""Tile table: from the lengths of packed sequences, the tiles of a kernel in their order.

`fa3.calls.varlen_gpu` launches it before the forward kernel, whose tiles are of queries, and
`fa3.calls.varlen_backward` before the backward kernel, whose tiles are of keys. It reads the
lengths from device memory, so that the host need not wait for them, and writes the table that
`RaggedTiles` or `RaggedKeyTiles` walks: a record of every tile, sequence by sequence, those whose
longest tile has most blocks first.

One CTA does it, in time linear in sequences and tiles. A warp takes 32 sequences at a time, each
lane one. They are sorted by counting: the tiles of each amount of work are counted, prefix sums
give each amount its place, and the warps go through the sequences once more: each takes places for
its tiles, and the lanes share the tiles of all 32 to write them there.

Timeline
    clear the counts | wait for the previous kernel | count | prefix sums | write records, header
    The next kernel is launched early and waits in hardware for the end of this one.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.primitives import arguments
from fa3.primitives.dsl import SmemAllocator
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import ROWS, WARP
from fa3.problem import Window
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, TABLE_HEADER, TileRecord, write_record
from fa3.schedules.ragged_keys import KeyTileRecord
from fa3.scores.masks import Band, Sequence

SORTERS = 1024
MORE_BESIDE, MOST_BESIDE = 1.5, 0.4
"""How much more than its share the decode kernel gets of the CTAs, and the largest part of them for
which it has only a part. Measured on an H200 on 2026-11-22: a step of seven chunks of 512 beside 64
sequences that decode took 952-974 us with 1.5, 947-967 with 2 and 984-990 one after the other; of
one chunk beside 64 x 8k 618 us with 0.68 of the CTAs, some 545 one after the other."""

DECODE_TILE_N = 64
"""Keys of a block of the decode kernel."""

BLOCKS_OF_ENDS = 1.5
"""Blocks that take as long as the begin and the end of a tile."""

KEYS_OF_DECODING = 0.4 * 128
"""So many keys of a block of the forward kernel, times 128 queries, take as long as a block of the
decode kernel: 1.45 us for 128, and 0.57 us. Measured on an H200 with heads of 128, 2026-11-22."""

AMOUNTS = SORTERS
"""Amounts of work that are told apart, one for each thread of the prefix sum."""


class TileTableArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last.

    Fields:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end; no
            `cu_seqlens_k` where keys are in a cache.
        seqused_q, seqused_k: (batch,) int32, rows that count; None for all.
        table: int32, receives the header and `capacity` records at most.
        total_q, total_k: rows of q and of k; of a cache, the rows that a sequence has room for.
        capacity: records that the table has room for.
        shift: work is counted in units of 2**shift blocks.
        window_left, window_right: keys seen before and after a query's own; where they are bounded.
        short_queries: sequences with so many queries or fewer get no tiles of queries: another
            kernel attends to them. 0 if this one does.
        qhead_per_kvhead: query heads of a key/value head.
        num_ctas: CTAs that the GPU holds.
    """

    cu_seqlens_q: object
    cu_seqlens_k: object
    seqused_q: object
    seqused_k: object
    table: object
    total_q: int
    total_k: int
    capacity: int
    shift: int
    window_left: int
    window_right: int
    short_queries: int
    qhead_per_kvhead: int
    num_ctas: int

    @classmethod
    def symbolic(cls, kernel: "TileTable") -> "TileTableArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        ends, batch = cute.sym_int(), cute.sym_int()

        def vector(size, exists: bool = True):
            return arguments.compact_tensor("int32", (size,)) if exists else None

        return cls(
            cu_seqlens_q=vector(ends),
            cu_seqlens_k=vector(ends, not kernel.has_cache),
            seqused_q=vector(batch, kernel.has_used_q),
            seqused_k=vector(batch, kernel.has_used_k or kernel.has_cache),
            table=vector(cute.sym_int()),
            **dict.fromkeys(cls._fields[5:], Int32(0)),
        )


class TileTableOperands(NamedTuple):
    """What the table is made of, and where it goes.

    Fields:
        table, capacity, shift, and from short_queries on: see `TileTableArguments`.
    """

    queries: RaggedLengths
    keys: RaggedLengths | CacheLengths
    table: cute.Tensor
    capacity: Int32
    shift: Int32
    window: Window
    short_queries: Int32
    qhead_per_kvhead: Int32
    num_ctas: Int32


class WorkOfBoth(NamedTuple):
    """The work of the forward kernel and of the decode kernel, in the forward kernel's blocks for
    each key/value head."""

    long: Float32
    short: Float32

    def plus(self, other: "WorkOfBoth") -> "WorkOfBoth":
        return WorkOfBoth(self.long + other.long, self.short + other.short)

    @cute.jit
    def ctas_beside(self, num_ctas: Int32) -> Int32:
        """CTAs that the decode kernel is to have while the forward kernel has the others.

        Its pieces are equal, while the forward kernel's CTAs take what is left, and it reads
        slower beside them than alone: so it gets more than its share. Where it has most of the
        work it gets all CTAs, and the forward kernel those that have ended.
        """
        share = MORE_BESIDE * self.short / cutlass.max(self.long + self.short, Float32(1.0))
        count = cutlass.min(Int32(Float32(num_ctas) * share) + 1, num_ctas)
        count = count if share < MOST_BESIDE else num_ctas
        return count if self.short > 0.0 else Int32(0)


@dataclass(frozen=True)
class TileTable:
    """The kernel that makes the table.

    Fields:
        tile_m, tile_n: query rows and keys of a tile or a block.
        band: the mask's band, for which tiles have more or less work.
        has_used_q, has_used_k: whether there are `seqused_q` and `seqused_k`.
        is_of_keys: whether tiles are of keys and blocks of queries. Then also rows of k that are
            not used are in a tile, since they too get a gradient.
        has_cache: whether keys are in a cache, as many as `seqused_k` says.
    """

    tile_m: int
    tile_n: int
    band: Band
    has_used_q: bool
    has_used_k: bool
    is_of_keys: bool = False
    has_cache: bool = False

    entry_name: ClassVar[str] = "fa3_tile_table"
    is_storable: ClassVar[bool] = True

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream."""
        return [*TileTableArguments.symbolic(self), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *given):
        """Launch on `TileTableArguments` and a stream."""
        *given, stream = given
        call = TileTableArguments(*given)
        queries = RaggedLengths(call.cu_seqlens_q, call.seqused_q, call.total_q)
        if cutlass.const_expr(self.has_cache):
            keys = CacheLengths(call.seqused_k, call.total_k)
        else:
            keys = RaggedLengths(call.cu_seqlens_k, call.seqused_k, call.total_k)
        window = Window(call.window_left, call.window_right)
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        operands = TileTableOperands(
            queries, keys, call.table, call.capacity, call.shift, window, call.short_queries,
            call.qhead_per_kvhead, call.num_ctas,
        )  # fmt: skip
        self.kernel(operands).launch(
            grid=(1, 1, 1), block=(SORTERS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, operands: TileTableOperands):
        smem = SmemAllocator()
        places = smem.allocate_tensor(Int32, cute.make_layout(AMOUNTS), byte_alignment=16)
        work_of_warps = smem.allocate_tensor(
            Float32, cute.make_layout((WARP, 2)), byte_alignment=16
        )
        of_warps = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        places[thread] = 0
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        work = self.sort(operands, places, is_counting=True)
        lane, warp = thread % WARP, thread // WARP
        for i in cutlass.range_constexpr(2):
            of_warp = cute.arch.warp_reduction_sum(work[i])
            if lane == 0:
                work_of_warps[warp, i] = of_warp
        cute.arch.sync_threads()
        count, upto = places[thread], self.sum_up(places[thread], of_warps)
        places[thread] = upto - count
        if thread == SORTERS - 1:
            for i in cutlass.range_constexpr(TABLE_HEADER):
                # Negative if lengths are so wrong that 32 bits cannot count the tiles.
                used = cutlass.max(cutlass.min(upto, operands.capacity), 0)
                count_or_0 = used if i == NUM_RECORDS else Int32(0)
                if cutlass.const_expr(i != CTAS_BESIDE):
                    operands.table[i] = count_or_0
        if warp == 0:
            work = WorkOfBoth(
                *(cute.arch.warp_reduction_sum(work_of_warps[lane, i]) for i in range(2))
            )
            if lane == 0:
                operands.table[CTAS_BESIDE] = work.ctas_beside(operands.num_ctas)
        cute.arch.sync_threads()
        self.sort(operands, places, is_counting=False)

    @cute.jit
    def sum_up(self, number: Int32, of_warps: cute.Tensor) -> Int32:
        """The sum of all threads' numbers up to this thread's."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP, thread // WARP
        upto = sum_in_warp(number)
        if lane == WARP - 1:
            of_warps[warp] = upto
        cute.arch.sync_threads()
        of_lane = of_warps[lane]
        before = sum_in_warp(of_lane) - of_lane
        return upto + cute.arch.shuffle_sync(before, warp)

    @cute.jit
    def sort(
        self, operands: TileTableOperands, places: cute.Tensor, is_counting: cutlass.Constexpr
    ):
        """Go through all sequences: count the tiles of each amount of work, or write them.

        Returns:
            the work of this lane's sequences, if it counts.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP, thread // WARP
        queries, keys, table, capacity, shift, window, short_queries, ratio, _ = operands
        work = WorkOfBoth(Float32(0.0), Float32(0.0))
        batch = queries.cu.shape[0] - 1
        first = warp * WARP
        while first < batch:
            of_lane = first + lane
            begin_q, seqlen_q, begin_k, seqlen_k, owned_k = (Int32(0) for _ in range(5))
            if of_lane < batch:
                begin_q, seqlen_q = queries.read(of_lane)
                begin_k, seqlen_k = keys.read(of_lane)
                if cutlass.const_expr(self.is_of_keys):
                    owned_k = keys.owned(of_lane)
            num_tiles = (seqlen_q + self.tile_m - 1) // self.tile_m
            num_tiles = num_tiles if seqlen_q > short_queries else Int32(0)
            if cutlass.const_expr(self.is_of_keys):
                num_tiles = (owned_k + self.tile_n - 1) // self.tile_n
            upto = sum_in_warp(num_tiles)
            sequence = Sequence(seqlen_q, seqlen_k, window)
            if cutlass.const_expr(is_counting and not self.is_of_keys):
                work = work.plus(self.work(num_tiles, sequence, ratio))
            amount = self.amount(num_tiles, sequence, shift)
            place = take_places(places, amount, num_tiles, upto)
            if cutlass.const_expr(not is_counting):
                total = cute.arch.shuffle_sync(upto, WARP - 1)
                step = Int32(0)
                while step < total:
                    number = step + lane
                    owner = owner_of(number, upto)
                    of_owner = [
                        cute.arch.shuffle_sync(value, owner)
                        for value in (
                            begin_q, seqlen_q, begin_k, seqlen_k, num_tiles, upto, place,
                        )
                    ]  # fmt: skip
                    *ends, num_m_blocks, end, first_place = of_owner
                    left = end - 1 - number
                    at = first_place + num_m_blocks - 1 - left
                    record = TileRecord(left, first + owner, *ends, num_m_blocks)
                    if cutlass.const_expr(self.is_of_keys):
                        record = KeyTileRecord(*record, cute.arch.shuffle_sync(owned_k, owner))
                    has_room = at >= 0 and at < capacity
                    write_record(table, at, record, number < total and has_room)
                    step += WARP
            first += SORTERS
        return work

    @cute.jit
    def work(self, num_tiles: Int32, sequence: Sequence, ratio: Int32) -> WorkOfBoth:
        """The work of a sequence, which is the decode kernel's if it has queries but no tiles."""
        last = cutlass.max(num_tiles - 1, 0) * self.tile_m
        ends = [
            self.band.key_blocks(row, self.tile_m, self.tile_n, sequence)
            for row in (Int32(0), last)
        ]
        blocks = [Float32(one.end - one.begin) for one in ends]
        # As if blocks grew evenly from the first tile to the last one.
        long = Float32(num_tiles * ratio) * ((blocks[0] + blocks[1]) * 0.5 + BLOCKS_OF_ENDS)
        of_short = self.band.key_blocks(0, sequence.seqlen_q, DECODE_TILE_N, sequence)
        row_blocks = (sequence.seqlen_q * ratio + ROWS - 1) // ROWS
        row_blocks = row_blocks if num_tiles == 0 else Int32(0)
        short = Float32(row_blocks) * Float32(of_short.end - of_short.begin)
        return WorkOfBoth(long, short * (KEYS_OF_DECODING / self.tile_n))

    def amount(self, num_tiles: Int32, sequence: Sequence, shift: Int32) -> Int32:
        """The index of the amount of work of a sequence's longest tile; the most has index 0."""
        last = cutlass.max(num_tiles - 1, 0)
        if self.is_of_keys:
            blocks = [
                self.band.query_blocks(tile * self.tile_n, self.tile_n, self.tile_m, sequence)
                for tile in (Int32(0), last)
            ]
        else:
            blocks = [
                self.band.key_blocks(tile * self.tile_m, self.tile_m, self.tile_n, sequence)
                for tile in (Int32(0), last)
            ]
        work = cutlass.max(*(one.end - one.begin for one in blocks)) >> shift
        return AMOUNTS - 1 - cutlass.min(work, AMOUNTS - 1)


@cute.jit
def sum_in_warp(number: Int32) -> Int32:
    """The sum of the numbers of all lanes up to this one."""
    lane, upto = cute.arch.lane_idx(), number
    for shift in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(upto, 1 << shift, mask_and_clamp=0)
        upto = upto + below if lane >= 1 << shift else upto
    return upto


@cute.jit
def owner_of(number: Int32, upto: Int32) -> Int32:
    """The first lane whose `upto` is above a number, the last lane if there is none."""
    owner = Int32(0)
    for i in cutlass.range_constexpr(5):
        half = 16 >> i
        of_half = cute.arch.shuffle_sync(upto, owner + half - 1)
        owner = owner + half if of_half <= number else owner
    return owner


@cute.jit
def take_places(places: cute.Tensor, amount: Int32, count: Int32, upto: Int32) -> Int32:
    """The first of the next `count` free places for this lane's amount.

    If all amounts of a warp are equal, as those of many short sequences, it takes its places at
    once: the adds of 32 lanes to one word would wait for each other.

    Args:
        upto: the sum of `count` over the lanes up to this one.
    """
    lane, place = cute.arch.lane_idx(), Int32(0)
    of_first = cute.arch.shuffle_sync(amount, 0)
    total = cute.arch.shuffle_sync(upto, WARP - 1)
    if cute.arch.vote_all_sync(amount == of_first or count == 0):
        if lane == 0:
            place = add_to(places.iterator + amount, total)
        place = cute.arch.shuffle_sync(place, 0) + upto - count
    elif count > 0:
        place = add_to(places.iterator + amount, count)
    return place


def add_to(word: cute.Pointer, number: Int32) -> Int32:
    """Add to a word of shared memory; return what was there."""
    return cute.arch.atomic_add(word, number, sem="relaxed", scope="cta")
