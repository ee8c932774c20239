"""Tile table: the tiles of packed sequences in their order.

`fa3.calls.execution` launches it before the forward kernel, whose tiles are of queries, and
`fa3.calls.backward` before the backward kernel, whose tiles are of keys. It reads the
lengths from device memory, so that the host need not wait for them, and writes the table that
`RaggedTiles` or `RaggedKeyTiles` walks: a record of every tile, sequence by sequence, those whose
longest tile has most blocks first.

A warp takes 32 sequences at a time, each lane one. If there are no more, every warp has them all,
and none waits for another: it compares them with each other, which gives each its place, and writes
32 records. It reads lengths once, and nothing else comes between that and its stores.

More sequences are one CTA's, in time linear in sequences and tiles. They are sorted by counting:
the tiles of each amount of work are counted, prefix sums give each amount its place, and the warps
go through the sequences once more: each takes places for its tiles, and the lanes share the tiles
of all 32 to write them there.

Timeline
    few     ask L2 for lengths | wait for the previous kernel | places | write records, header
    many    clear the counts, ask | wait | count | prefix sums | write records, header
    The next kernel is launched early and waits in hardware for the end of this one.
"""

from dataclasses import dataclass
from operator import add
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.kernels.kernel_base import KernelBase
from fa3.primitives import arguments
from fa3.primitives.arithmetic import PlainDivisor, larger
from fa3.primitives.gradient_parts import find_part, parts_of_last
from fa3.primitives.key_line import KeyLine
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.vectors import sum_in_warp
from fa3.primitives.wgmma import ROWS, WARP
from fa3.problem import Window
from fa3.schedules.ragged import (
    CTAS_BESIDE,
    NUM_RECORDS,
    RECORD,
    TABLE_HEADER,
    KeyTileRecord,
    TileRecord,
    write_record,
)
from fa3.scores.masks import Band, Sequence

SORTERS = 1024
MORE_BESIDE, MOST_BESIDE = 1.5, 0.4
"""How much more than its share of the CTAs the decode kernel gets, and the most of them where it
has only a part. Measured on an H200 on 2026-11-22: a step of seven chunks of 512 with 64 sequences
that decode took 952-974 us with 1.5, 947-967 with 2 and 984-990 one after the other; of one chunk
with 64 x 8k 618 us with 0.68 of the CTAs, some 545 one after the other."""

DECODE_TILE_N = 64  # keys of a block of the decode kernel
BLOCKS_OF_ENDS = 1.5  # blocks that take as long as the begin and the end of a tile

KEYS_OF_DECODING = 0.4 * 128
"""So many keys of a block of the forward kernel, times 128 queries, take as long as a block of the
decode kernel: 1.45 us for 128, and 0.57 us. Measured on an H200 with heads of 128, 2026-11-22."""

MORE_BESIDE_SEGMENTS, SLOWER_BESIDE, BLOCKS_BESIDE = 2.5, 1.2, 4
"""Where the segment table gives less work to the CTAs that the decode kernel has first: how much
more than its share that kernel gets, up to the same part of all CTAs; how much longer it is taken
to have them, and key blocks more. Too much work for these CTAs holds up all others, too little
costs little. Measured on an H100 on 2026-11-27: 512 queries on 16k keys with 15 sequences of 2k
took 221 us, 232 with 1.5 and 1.1."""

AT_ONCE = 8  # lanes that `place_among` asks at once
AMOUNTS = SORTERS  # amounts of work that are told apart, one for each thread of the prefix sum


OF_QUERIES = "capacity", "shift", "short_queries", "qhead_per_kvhead", "num_ctas"
OF_KEYS = "is_by_work", "block_parts", "rise"
OF_LINES = "line_length", "line_heads"
"""Numbers that tables of queries have, and besides these tables of keys, and of lines."""


class TileTableArguments(NamedTuple):
    """The arguments of kernels that make tables; then the stream.
    What a kind of tables does not have is None."""

    # cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end; no
    # `cu_seqlens_k` where keys are in a cache.
    cu_seqlens_q: object
    cu_seqlens_k: object
    # seqused_q, seqused_k: (batch,) int32, rows that count; None for all.
    seqused_q: object
    seqused_k: object
    # Where sequences share tiles: (tiles * tile_m, ROW_RECORD) int32, receives the records of rows.
    rows: object
    tiles: object  # int32, receives a header and the records of shared tiles
    # Int32, receives the header and `capacity` records at most; where sequences share tiles, a
    # header's place and the records of sequences, by their number.
    table: object
    # total_q, total_k: rows of q and of k; of a cache, the rows that a sequence has room for.
    total_q: int
    total_k: int
    num_tiles: int | None  # shared tiles that the rows of q take
    capacity: int | None  # records that the table has room for
    shift: int | None  # work is counted in units of 2**shift blocks
    # window_left, window_right: keys seen before and after a query's own; where they are bounded.
    window_left: int
    window_right: int
    # Sequences with so many queries or fewer get no tiles of queries: another kernel attends to
    # them. 0 if this one does.
    short_queries: int | None
    qhead_per_kvhead: int | None  # query heads of a key/value head
    num_ctas: int | None  # CTAs that the GPU holds
    # Of keys: 1 if tiles of up to 32 sequences come by their work, 0 if a sequence's come together.
    is_by_work: int | None
    # block_parts, rise: of keys, see `KeySplit`; a tile has as many records as it has parts.
    block_parts: int | None
    rise: int | None
    # line_length, line_heads: units of a part of a line, and its query heads, see `KeyLine`.
    line_length: int | None
    line_heads: int | None
    # Int32, receives `segment_rows` segments for each of `num_ctas` CTAs at most.
    segments: object
    # heads, rows_of_group: query heads, and as in `RaggedOrder`.
    heads: int | None
    rows_of_group: int | None

    @classmethod
    def symbolic(cls, kernel: Any, has_cache: bool = False, **own: object) -> "TileTableArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        ends, batch, vector = cute.sym_int(), cute.sym_int(), arguments.int32_vector
        own |= {
            "cu_seqlens_q": vector(ends),
            "cu_seqlens_k": vector(ends, not has_cache),
            "seqused_q": vector(batch, kernel.has_used_q),
            "seqused_k": vector(batch, kernel.has_used_k or has_cache),
            "table": vector(),
        }
        return cls(**dict.fromkeys(cls._fields) | arguments.scalars(cls) | own)

    @property
    def queries(self) -> RaggedLengths:
        return RaggedLengths(self.cu_seqlens_q, self.seqused_q, self.total_q)

    @property
    def keys(self) -> Any:
        if self.cu_seqlens_k is None:
            return CacheLengths(self.seqused_k, self.total_k)
        return RaggedLengths(self.cu_seqlens_k, self.seqused_k, self.total_k)

    @property
    def window(self) -> Window:
        return Window(self.window_left, self.window_right)


class DecodeShare(NamedTuple):
    """The work of forward and decode kernel, for each key/value head.
    It counts in blocks of the forward kernel."""

    long: Float32
    short: Float32

    @cute.jit
    def ctas_beside(self, num_ctas: Int32, more: cutlass.Constexpr = MORE_BESIDE) -> Int32:
        """CTAs for the decode kernel while the forward kernel has the others.

        Its pieces are equal, while the forward kernel's CTAs take what is left, and it reads
        slower next to them than alone: so it gets more than its share. Where it has most of the
        work it gets all CTAs, and the forward kernel those that have ended.
        """
        share = more * self.short / cutlass.max(self.long + self.short, Float32(1.0))
        count = cutlass.min(Int32(Float32(num_ctas) * share) + 1, num_ctas)
        if cutlass.const_expr(more != MORE_BESIDE):
            count = cutlass.min(count, Int32(Float32(num_ctas) * MOST_BESIDE) + 1)
        count = count if share < MOST_BESIDE * (more / MORE_BESIDE) else num_ctas
        return count if self.short > 0.0 else Int32(0)

    def blocks_beside(self, num_ctas: Int32, heads_kv: Int32) -> Int32:
        """Key blocks that a forward CTA has time for while decode runs.
        The decode kernel has so many CTAs."""
        blocks = self.short * Float32(heads_kv) / Float32(cutlass.max(num_ctas, 1))
        return Int32(blocks * SLOWER_BESIDE) + BLOCKS_BESIDE


class LaneSequence(NamedTuple):
    """What a lane knows of its sequence; 0 if it has none."""

    # begin_q, seqlen_q, begin_k, seqlen_k: as in a `TileRecord`.
    begin_q: Int32
    seqlen_q: Int32
    begin_k: Int32
    seqlen_k: Int32
    owned_k: Int32  # rows of k from the first one to the next sequence's; if tiles are of keys
    num_tiles: Int32  # the sequence's; parts of tiles if these are of keys


@dataclass(frozen=True)
class TileTable(KernelBase):
    """The kernel that makes the table."""

    # tile_m, tile_n: query rows and keys of a tile or a block.
    tile_m: int
    tile_n: int
    band: Band  # the mask's band, for which tiles have more or less work
    # has_used_q, has_used_k: whether there are `seqused_q` and `seqused_k`.
    has_used_q: bool
    has_used_k: bool
    # Whether tiles are of keys and blocks of queries. Then also rows of k that are not used are in
    # a tile, since they too get a gradient.
    is_of_keys: bool = False
    has_cache: bool = False  # whether keys are in a cache, as many as `seqused_k` says
    has_lines: bool = False  # whether key tiles have parts of lines, see `KeyLine`

    entry_name: ClassVar[str] = "fa3_tile_table"
    arguments_type: ClassVar[type] = TileTableArguments

    def symbolic(self, **own: object) -> TileTableArguments:
        """Types of the arguments, and of more that another kernel has."""
        names = *OF_QUERIES, *OF_KEYS * self.is_of_keys, *OF_LINES * self.has_lines
        own |= dict.fromkeys(names, Int32(0))
        return TileTableArguments.symbolic(self, self.has_cache, **own)

    def arguments(self) -> list:
        return [*self.symbolic(), arguments.symbolic_stream()]

    @cute.jit
    def launch(self, call: TileTableArguments, stream):
        num_ctas = Int32(1)
        if call.queries.num_sequences <= WARP:
            num_ctas = (call.capacity + SORTERS - 1) // SORTERS
        self.kernel(call).launch(
            grid=(num_ctas, 1, 1), block=(SORTERS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, call: TileTableArguments):
        smem = SmemAllocator()
        places = smem.allocate_tensor(Int32, cute.make_layout(AMOUNTS), byte_alignment=16)
        work_of_warps = smem.allocate_tensor(
            Float32, cute.make_layout((WARP, 2)), byte_alignment=16
        )
        warp_sums = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=16)
        cute.arch.griddepcontrol_launch_dependents()
        if call.queries.num_sequences <= WARP:
            self.write_few(call)
        else:
            self.write_many(call, places, work_of_warps, warp_sums)

    def await_lengths(self, call: TileTableArguments, batch: Int32) -> None:
        """Wait for the previous kernel; meanwhile L2 loads what is read."""
        call.queries.prefetch(batch)
        call.keys.prefetch(batch)
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def write_few(self, call: TileTableArguments):
        """Write the table of no more sequences than a warp has lanes.
        There are any number of CTAs, with a warp for each 32 records that there is room for."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = cute.arch.make_warp_uniform(block * (SORTERS // WARP) + thread // WARP) * WARP
        if first < call.capacity:
            # Lengths that overlap, which is wrong, may have more tiles than all warps have lanes.
            lanes = (call.capacity + WARP - 1) & -WARP
            lane_sequence, place, upto = self.read_few(call, cute.arch.lane_idx())
            self.write_tiles(call, Int32(0), lane_sequence, upto, place, first, lanes, True)
            if first == 0:
                num_tiles, decode_ctas = cute.arch.shuffle_sync(upto, WARP - 1), Int32(0)
                if call.short_queries > 0:
                    decode_ctas = self.share(call, lane_sequence).ctas_beside(call.num_ctas)
                self.write_header(call, num_tiles, decode_ctas)

    @cute.jit
    def read_few(self, call: TileTableArguments, lane: Int32) -> tuple:
        """Return this lane's sequence, its first record, and tiles up to here.
        All sequences fit in a warp."""
        self.await_lengths(call, lane)
        lane_sequence = self.read(call, lane)
        num_tiles, num_sequences = lane_sequence.num_tiles, call.queries.num_sequences
        upto = sum_in_warp(num_tiles)
        amount = self.amount(call, lane_sequence)
        return lane_sequence, place_among(amount, num_tiles, num_sequences), upto

    def share(self, call: TileTableArguments, lane_sequence: LaneSequence) -> DecodeShare:
        """The work of the sequences of a warp's lanes."""
        work = self.work(call, lane_sequence)
        return DecodeShare(*(cute.arch.warp_reduction_sum(part) for part in work))

    @cute.jit
    def write_header(self, call: TileTableArguments, num_tiles: Int32, decode_ctas: Int32):
        """Write the header of a table; one warp calls this."""
        words = [Int32(0)] * TABLE_HEADER
        words[NUM_RECORDS], words[CTAS_BESIDE] = self.used(call, num_tiles), decode_ctas
        is_one = cute.arch.lane_idx() == 0
        write_record(call.table, Int32(-TABLE_HEADER // RECORD), tuple(words), is_one)

    def used(self, call: TileTableArguments, num_tiles: Int32) -> Int32:
        """Records of the table; 0 if 32 bits cannot count the tiles.
        Then lengths are wrong."""
        return cutlass.max(cutlass.min(num_tiles, call.capacity), 0)

    @cute.jit
    def write_many(
        self,
        call: TileTableArguments,
        places: cute.Tensor,  # room for a number of each amount of work
        # work_of_warps, warp_sums: room for two numbers of each warp, and for one.
        work_of_warps: cute.Tensor,
        warp_sums: cute.Tensor,
    ):
        """Write the table of any number of sequences; one CTA calls this."""
        thread, _, _ = cute.arch.thread_idx()
        places[thread] = 0
        self.await_lengths(call, thread)
        cute.arch.sync_threads()
        work = self.sort(call, places, is_counting=True)
        lane, warp = thread % WARP, thread // WARP
        for i in cutlass.range_constexpr(2):
            warp_sum = cute.arch.warp_reduction_sum(work[i])
            if lane == 0:
                work_of_warps[warp, i] = warp_sum
        cute.arch.sync_threads()
        count, upto = places[thread], self.sum_up(places[thread], warp_sums)
        places[thread] = upto - count
        if thread == SORTERS - 1:
            for i in cutlass.range_constexpr(TABLE_HEADER):
                count_or_0 = self.used(call, upto) if i == NUM_RECORDS else Int32(0)
                if cutlass.const_expr(i != CTAS_BESIDE):
                    call.table[i] = count_or_0
        if warp == 0:
            work = DecodeShare(
                *(cute.arch.warp_reduction_sum(work_of_warps[lane, i]) for i in range(2))
            )
            if lane == 0:
                call.table[CTAS_BESIDE] = work.ctas_beside(call.num_ctas)
        cute.arch.sync_threads()
        self.sort(call, places, is_counting=False)

    @cute.jit
    def sum_up(self, number: Int32, warp_sums: cute.Tensor) -> Int32:
        """The sum of all threads' numbers up to this thread's."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % WARP, thread // WARP
        upto = sum_in_warp(number)
        if lane == WARP - 1:
            warp_sums[warp] = upto
        cute.arch.sync_threads()
        lane_sum = warp_sums[lane]
        before = sum_in_warp(lane_sum) - lane_sum
        return upto + cute.arch.shuffle_sync(before, warp)

    @cute.jit
    def sort(self, call: TileTableArguments, places: cute.Tensor, is_counting: cutlass.Constexpr):
        """Count the tiles of each amount of work, or write them.
        Returns the work of this lane's sequences, if it counts."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        work = DecodeShare(Float32(0.0), Float32(0.0))
        first = thread - lane
        while first < call.queries.num_sequences:
            lane_sequence = self.read(call, first + lane)
            num_tiles = lane_sequence.num_tiles
            upto = sum_in_warp(num_tiles)
            if cutlass.const_expr(is_counting and not self.is_of_keys):
                work = DecodeShare(*map(add, work, self.work(call, lane_sequence)))
            amount = self.amount(call, lane_sequence)
            place = take_places(places, amount, num_tiles, upto)
            if cutlass.const_expr(not is_counting):
                self.write_tiles(call, first, lane_sequence, upto, place, Int32(0), Int32(WARP))
            first += SORTERS
        return work

    @cute.jit
    def read(self, call: TileTableArguments, batch: Int32) -> LaneSequence:
        """The sequence with a number, if there is one."""
        begin_q, seqlen_q, begin_k, seqlen_k, owned_k = (Int32(0) for _ in range(5))
        if batch < call.queries.num_sequences:
            begin_q, seqlen_q = call.queries.read(batch)
            begin_k, seqlen_k = call.keys.read(batch)
            if cutlass.const_expr(self.is_of_keys):
                owned_k = call.keys.owned(batch)
        num_tiles = (seqlen_q + self.tile_m - 1) // self.tile_m
        num_tiles = num_tiles if seqlen_q > call.short_queries else Int32(0)
        if cutlass.const_expr(self.is_of_keys):
            num_tiles = self.key_tiles(owned_k)
            if cutlass.const_expr(self.has_lines):
                sequence = Sequence(seqlen_q, seqlen_k, call.window)
                num_tiles = self.parts_of_line(call, sequence, num_tiles)
            else:
                num_tiles = parts_of_last(call.block_parts, call.rise, num_tiles)
        return LaneSequence(begin_q, seqlen_q, begin_k, seqlen_k, owned_k, num_tiles)

    @cute.jit
    def parts_of_line(self, call: TileTableArguments, sequence: Sequence, count: Int32) -> Int32:
        """Parts of a sequence's `count` key tiles."""
        line = KeyLine.of(PlainDivisor(call.line_length), larger(count, 1))
        parts = Int32(0)
        for n in cutlass.range(count, unroll=1):
            begin = n * self.tile_n
            blocks = self.band.query_blocks(begin, self.tile_n, self.tile_m, sequence)
            visited = blocks.end - blocks.begin if begin < sequence.seqlen_k else Int32(1)
            parts += line.parts(n, visited * call.line_heads)
        return parts

    def sequence(self, call: TileTableArguments, lane_sequence: LaneSequence) -> Sequence:
        """A lane's sequence, for the mask."""
        return Sequence(lane_sequence.seqlen_q, lane_sequence.seqlen_k, call.window)

    @cute.jit
    def write_tiles(
        self,
        call: TileTableArguments,
        first: Int32,  # the sequence of lane 0
        lane_sequence: LaneSequence,
        upto: Int32,  # the sum of tiles over the lanes up to this one
        place: Int32,  # the place of the first record of this lane's sequence
        # begin, step: of the tiles in order of their sequences, those from `begin` on that this
        # warp writes, and all those that are so many times `step` further.
        begin: Int32,
        step: Int32,
        are_all: cutlass.Constexpr = False,  # whether there are no other sequences
    ):
        """Write records of the tiles of a warp's sequences, one a lane."""
        lane = cute.arch.lane_idx()
        total = cute.arch.shuffle_sync(upto, WARP - 1)
        while begin < total:
            number = begin + lane
            owner = owner_of(number, upto)
            *ends, owned_k, num_tiles, end, first_place = (
                cute.arch.shuffle_sync(value, owner) for value in (*lane_sequence, upto, place)
            )
            left = end - 1 - number
            at = first_place + num_tiles - 1 - left
            if cutlass.const_expr(self.is_of_keys and are_all and not self.has_lines):  # noqa: SIM102
                if call.is_by_work != 0:
                    _, before, parts = find_part(call.block_parts, call.rise, left)
                    tile_place = owner, before, parts, call.queries.num_sequences
                    at = place_of_tile(lane_sequence.num_tiles, *tile_place) + left - before
            record = TileRecord(left, first + owner, *ends, num_tiles)
            if cutlass.const_expr(self.is_of_keys):
                record = KeyTileRecord(*record, owned_k)
            has_room = at >= 0 and at < call.capacity
            write_record(call.table, at, record, number < total and has_room)
            begin += step

    def key_tiles(self, owned_k):
        """Key tiles of a sequence."""
        return (owned_k + self.tile_n - 1) // self.tile_n

    @cute.jit
    def work(self, call: TileTableArguments, lane_sequence: LaneSequence) -> DecodeShare:
        """A sequence's work; the decode kernel's if it has no tiles."""
        num_tiles, ratio = lane_sequence.num_tiles, call.qhead_per_kvhead
        sequence = self.sequence(call, lane_sequence)
        last = cutlass.max(num_tiles - 1, 0) * self.tile_m
        ends = [
            self.band.key_blocks(row, self.tile_m, self.tile_n, sequence)
            for row in (Int32(0), last)
        ]
        blocks = [Float32(one.end - one.begin) for one in ends]
        # As if blocks grew evenly from the first tile to the last one.
        long = Float32(num_tiles * ratio) * ((blocks[0] + blocks[1]) * 0.5 + BLOCKS_OF_ENDS)
        short_blocks = self.band.key_blocks(0, sequence.seqlen_q, DECODE_TILE_N, sequence)
        row_blocks = (sequence.seqlen_q * ratio + ROWS - 1) // ROWS
        row_blocks = row_blocks if num_tiles == 0 else Int32(0)
        short = Float32(row_blocks) * Float32(short_blocks.end - short_blocks.begin)
        return DecodeShare(long, short * (KEYS_OF_DECODING / self.tile_n))

    def amount(self, call: TileTableArguments, lane_sequence: LaneSequence) -> Int32:
        """The index of a longest tile's work; the most has index 0."""
        sequence, num_tiles = self.sequence(call, lane_sequence), lane_sequence.num_tiles
        find, rows, columns = self.band.key_blocks, self.tile_m, self.tile_n
        if self.is_of_keys:
            num_tiles = self.key_tiles(lane_sequence.owned_k)
            find, rows, columns = self.band.query_blocks, self.tile_n, self.tile_m
        last = cutlass.max(num_tiles - 1, 0)
        blocks = [find(tile * rows, rows, columns, sequence) for tile in (Int32(0), last)]
        work = cutlass.max(*(one.end - one.begin for one in blocks)) >> call.shift
        return AMOUNTS - 1 - cutlass.min(work, AMOUNTS - 1)


@cute.jit
def owner_of(number: Int32, upto: Int32) -> Int32:
    """The first lane whose `upto` is above a number, or the last."""
    owner = Int32(0)
    for i in cutlass.range_constexpr(5):
        half = 16 >> i
        half_sum = cute.arch.shuffle_sync(upto, owner + half - 1)
        owner = owner + half if half_sum <= number else owner
    return owner


@cute.jit
def take_places(places: cute.Tensor, amount: Int32, count: Int32, upto: Int32) -> Int32:
    """Return the first of `count` free places for this lane's amount.

    `upto` is the sum of `count` over the lanes up to this one. If all amounts of a warp are equal,
    as for many short sequences, it takes its places at once: the adds of 32 lanes would wait for
    each other.
    """
    lane, place = cute.arch.lane_idx(), Int32(0)
    first_amount = cute.arch.shuffle_sync(amount, 0)
    total = cute.arch.shuffle_sync(upto, WARP - 1)
    if cute.arch.vote_all_sync(amount == first_amount or count == 0):
        if lane == 0:
            place = add_to(places.iterator + amount, total)
        place = cute.arch.shuffle_sync(place, 0) + upto - count
    elif count > 0:
        place = add_to(places.iterator + amount, count)
    return place


@cute.jit
def place_among(amount: Int32, count: Int32, num_lanes: Int32) -> Int32:
    """The sum of `count` over the lanes that come before this one.
    Their amount is less, or the same and their number is less."""
    rank, place = amount * WARP + cute.arch.lane_idx(), Int32(0)
    for first in cutlass.range(0, num_lanes, AT_ONCE):
        for i in cutlass.range_constexpr(AT_ONCE):
            other, other_count = (cute.arch.shuffle_sync(n, first + i) for n in (rank, count))
            place += other_count if other < rank else Int32(0)
    return place


@cute.jit
def place_of_tile(
    count: Int32, owner: Int32, before: Int32, parts: Int32, num_lanes: Int32
) -> Int32:
    """The place of lane `owner`'s tile among the parts of all lanes.
    The lanes have `count` parts each. `before` parts of the lane follow it. Tiles that most follow
    come first."""
    place = Int32(0)
    for first in cutlass.range(0, num_lanes, AT_ONCE):
        for i in cutlass.range_constexpr(AT_ONCE):
            other = cute.arch.shuffle_sync(count, first + i) - before
            place += cutlass.max(other - parts, 0)
            place += parts if other > 0 and first + i < owner else Int32(0)
    return place


def add_to(word: cute.Pointer, number: Int32) -> Int32:
    """Add to a word of shared memory; return what was there."""
    return cute.arch.atomic_add(word, number, sem="relaxed", scope="cta")


def words_of_table(capacity: int) -> int:
    """int32 words of a table."""
    return TABLE_HEADER + RECORD * capacity


def shift_of_work(max_seqlen_k: int, tile_n: int) -> int:
    """The shift of work with which all amounts can be told apart."""
    return max(0, (-(-max_seqlen_k // tile_n)).bit_length() - AMOUNTS.bit_length() + 1)
