"""Queries of the backward pass: their preprocessing, and the dQ conversion.

Preprocessing gives each row statistics: delta = rowsum(dO O) - dLSE is subtracted from dP, so that
dS = P (dP - delta). The accumulator starts with zeros, or with flags that say that it has no value
(`fa3.primitives.dq_accumulator`). A CTA of the preprocess kernel has a query tile of the first head
groups. It also sets the backward kernel's counters to zero. Warps share a tile. All loads of a
warp's rows are in flight at once; a few neighbouring lanes share a row, 16 bytes each.

The backward kernel preprocesses the other query tiles by the same code (`TilePreprocess`), as
`fa3.schedules.query_index` says. The CTAs that run first do it, share by share, before their warps
have roles. The producers of all CTAs wait until the head group of their key tile is preprocessed.

All of dQ is converted in the backward kernel. The MMA warpgroups of a CTA that finds no more key
tiles take pieces of dQ, head group by head group, while others still work on key tiles. They wait
until the piece's head group is complete. What is left when the last key tile is done, at least the
last head group, is shared by all CTAs.

Two flags for each head group say how far it is. They are words in device memory, to which warps add
what they have done.

Timeline of a CTA of the preprocess kernel
    wait for the kernel before | rows of O and dO, all loads in flight | zeros | sums over lanes
    The backward kernel is launched early and waits in hardware for the end of this one.

Timeline of a warp that preprocesses in the backward kernel
    loads of a unit | stores of the unit before | after each head group: fences, adds to its flag

Timeline of a warp that converts dQ
    loads a piece's second half | takes the next piece | writes the first half | waits for the head
    group of the next piece | loads its first half | writes the second half of the present piece

Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from fa3.kernels.backward_launch import (
    ACCUMULATED,
    CONVERT_TICKET,
    PREPROCESS_TICKET,
    PREPROCESSED,
    BackwardConfig,
    PassArguments,
    QueryRows,
    place_of_group_flag,
)
from fa3.kernels.kernel_base import KernelBase
from fa3.primitives.dq_accumulator import DqPieces
from fa3.primitives.fragments import convert_words, words_of
from fa3.primitives.query_tiles import PAIR, place_of_row, statistics_of_tile
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import QUAD, VECTOR, vector_of
from fa3.primitives.wgmma import ROWS, ROWS_OF_WARP, WARP, WARPS
from fa3.problem import AttentionSpec
from fa3.schedules.query_index import (
    PREPROCESS_SHARES,
    DenseQueryIndex,
    PackedQueryIndex,
    QueryHeadGroups,
    QueryTile,
)

PREPROCESS_THREADS = 256

VECTORS_OF_LANE = 8  # vectors of O and of dO that a lane loads at once: 64 registers

LOADED_AT_ONCE = 2  # of the four times 16 rows of a piece, how many a warp loads at once


@dataclass(frozen=True)
class TilePreprocess:
    """Preprocesses a warp's part of query tiles.
    Neighbouring lanes share a row, and have several rows below one another."""

    kernel: object  # the `Backward`
    call: QueryRows
    warps: int  # warps that share a tile; `warp` is the number of one of them
    vectors: cute.Tensor  # (8, rows, 2), the rows of O and dO that a lane has loaded
    # Of the rows whose statistics the lane writes; lanes that share rows divide them up.
    lses: cute.Tensor

    @classmethod
    def of(cls, kernel, call: QueryRows, warps: int) -> "TilePreprocess":
        rows = kernel.config.tile_m // warps
        lanes = lanes_of_row(kernel.spec, rows)
        count = rows * lanes // WARP
        vectors = cute.make_rmem_tensor((VECTOR, count, 2), call.out.element_type)
        lses = cute.make_rmem_tensor(max(1, count // lanes), Float32)
        return cls(kernel, call, warps, vectors, lses)

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return lanes_of_row(self.kernel.spec, self.kernel.config.tile_m // self.warps)

    @property
    def count(self) -> int:
        """Rows of a lane."""
        return cute.size(self.vectors, mode=[1])

    def query(self, tile: QueryTile, warp, i):
        """The index in its sequence of the lane's row i."""
        lane = cute.arch.lane_idx()
        tile_m = self.kernel.config.tile_m
        row = warp * (tile_m // self.warps) + lane // self.lanes
        return tile.tile.m_block * tile_m + row + i * (WARP // self.lanes)

    def row_of_lane(self, i: int):
        """The lane's row for the i-th statistics that it writes, see `totals_of_rows`."""
        lane, count, row = cute.arch.lane_idx() % self.lanes, self.count, i
        for step in range(min(self.lanes, self.count).bit_length() - 1):
            count //= 2
            row += lane // (1 << step) % 2 * count
        return row

    @cute.jit
    def load(self, tile: QueryTile, warp):
        """Load a warp's rows of a tile."""
        lane, step = cute.arch.lane_idx(), WARP // self.lanes
        column = cutlass.min(lane % self.lanes, (self.kernel.spec.head_dim_v - 1) // VECTOR)
        first = tile.begin + self.query(tile, warp, 0)
        # Past the last row, that row is read again.
        last = self.call.out.shape[1] - 1
        at = cutlass.max(cutlass.min(first, last), 0)
        steps = (last - at) // step
        for j, tensor in enumerate((self.call.out, self.call.d_out)):
            source = vector_of(tensor[tile.batch, at, tile.tile.head, None], column)
            stride = Int64(tensor.stride[1]) * step
            for i in cutlass.range_constexpr(self.count):
                place = (source.iterator + cutlass.min(Int32(i), steps) * stride).align(16)
                row = cute.make_tensor(place, source.layout)
                cute.autovec_copy(row, self.vectors[None, i, j])
        for i in cutlass.range_constexpr(cute.size(self.lses)):
            row = tile.begin + self.query(tile, warp, self.row_of_lane(i))
            row = cutlass.max(cutlass.min(row, last), 0)
            self.lses[i] = self.call.lse[tile.batch, tile.tile.head, row]

    @cute.jit
    def write(self, tile: QueryTile, warp):
        """Write statistics of the loaded rows, and what their dQ starts with."""
        call, config, flags = self.call, self.kernel.config, self.kernel.dq_flags
        thread, first = warp * WARP + cute.arch.lane_idx(), tile.tile.m_block * config.tile_m
        pieces = self.kernel.pieces
        if call.dq_is_zeroed != 0 and first >= 0 and first < tile.owned:
            self.call.dq(tile.tiles).clear(pieces, thread, self.warps * WARP, tile.tile)
        for i in cutlass.range_constexpr(flags):
            dq = self.call.dq(tile.tiles).one_of(pieces, flags, i)
            dq.clear_flag(tile.tile, thread)
        number = tile.tiles.number(tile.tile)
        statistics = statistics_of_tile(call.statistics, config.tile_m, number)
        totals = self.totals_of_rows()
        if cute.arch.lane_idx() % self.lanes < self.count:
            for i in cutlass.range_constexpr(len(totals)):
                query = self.query(tile, warp, self.row_of_lane(i))
                lse, delta = Float32.inf, Float32(0.0)
                if query >= 0 and query < tile.seqlen_q and self.lses[i] != -Float32.inf:
                    lse, delta = self.statistics(tile, query, self.lses[i], totals[i])
                place = place_of_row(query - first, config.stats_vector)
                statistics[place, 0] = lse
                statistics[place, 1] = delta

    @cute.jit
    def totals_of_rows(self) -> list:
        """The sums of O dO of rows whose statistics a lane writes.
        In each step a lane keeps half of its rows, the later ones if its number has the step's bit,
        and gives the others away. So the sums of all rows take hardly more steps than one."""
        lane = cute.arch.lane_idx() % self.lanes
        is_used = lane * VECTOR < self.kernel.spec.head_dim_v
        sums = []
        for i in cutlass.range_constexpr(self.count):
            o, d_o = (self.vectors[None, i, j].load().to(Float32) for j in range(2))
            total = (o * d_o).reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
            sums.append(total if is_used else Float32(0.0))
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            bit, half = 1 << step, len(sums) // 2
            kept = sent = sums
            if cutlass.const_expr(half > 0):
                is_upper = lane // bit % 2 == 1
                pairs = list(zip(sums[:half], sums[half:], strict=True))
                kept = [b if is_upper else a for a, b in pairs]
                sent = [a if is_upper else b for a, b in pairs]
            received = [cute.arch.shuffle_sync_bfly(x, offset=bit) for x in sent]
            sums = [a + b for a, b in zip(kept, received, strict=True)]
        return sums

    @cute.jit
    def statistics(self, tile: QueryTile, query, lse, total) -> tuple[Float32, Float32]:
        """A query's log-sum-exp and delta, as the backward kernel takes them."""
        lse, delta = lse * LOG2_E, total
        if self.call.has_d_lse != 0:
            delta -= self.call.d_lse[tile.batch, tile.tile.head, tile.begin + query]
        if cutlass.const_expr(self.kernel.spec.has_dropout):
            # The backward kernel then has P / kept, and dS = P / kept (dP or 0) -
            # P / kept (kept delta).
            lse += cute.math.log2(self.call.kept, fastmath=True)
            delta *= self.call.kept
        return lse, delta


def lanes_of_row(spec: AttentionSpec, rows: int) -> int:
    """Lanes that share a row, if a warp has so many rows."""
    vectors = -(-spec.head_dim_v // VECTOR)
    return max(1 << (vectors - 1).bit_length(), WARP // rows)


def warps_of_tile(spec: AttentionSpec, tile_m: int) -> int:
    """Warps that share a tile if each fills its registers."""
    vectors = -(-spec.head_dim_v // VECTOR)
    return max(1, tile_m * (1 << (vectors - 1).bit_length()) // (WARP * VECTORS_OF_LANE))


@dataclass(frozen=True)
class BackwardPreprocess(KernelBase):
    """The preprocess kernel, compiled for one backward kernel."""

    main: Any  # the `Backward`

    entry_name: ClassVar[str] = "fa3_backward_preprocess"
    arguments_type: ClassVar[type] = PassArguments

    def arguments(self) -> list:
        return self.main.arguments()

    @cute.jit
    def launch(self, call: PassArguments, stream):
        rows = call.query_rows(self.main)
        self.kernel(rows, rows.index(self.main.config.tile_m)).launch(
            grid=(rows.num_tiles, 1, 1),
            block=(PREPROCESS_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, call: QueryRows, queries: DenseQueryIndex | PackedQueryIndex):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        ctas, _, _ = cute.arch.grid_dim()
        first = block * PREPROCESS_THREADS + thread
        for i in cutlass.range(first, call.counters.shape[0], ctas * PREPROCESS_THREADS, unroll=1):
            call.counters[i] = 0
        # The last tiles first, so that L2 has the first ones when the backward kernel needs them.
        tile = queries.at(ctas - 1 - block, self.main.config.tile_m)
        warp = cute.arch.make_warp_uniform(thread // WARP)
        warps = PREPROCESS_THREADS // WARP
        rows = TilePreprocess.of(self.main, call, warps)
        rows.load(tile, warp)
        rows.write(tile, warp)


class FusedPrePostprocess(NamedTuple):
    """Preprocessing and dQ conversion of query tiles inside the backward kernel."""

    call: QueryRows  # the preprocess kernel does the first `num_tiles` query tiles
    queries: DenseQueryIndex | PackedQueryIndex  # the query tiles by number
    groups: QueryHeadGroups  # their head groups
    # (batch, rows, heads, head_dim), receives dQ; packed sequences in a batch of one.
    dq: cute.Tensor
    scale: Float32  # factor of the accumulator

    # ------------------------------------------------------------------------------- preprocessing

    @cute.jit
    def preprocess(self, kernel: cutlass.Constexpr, ticket: cute.Tensor, warp_idx: Int32):
        """Preprocess the remaining queries in the first CTAs; all warps call this.
        A CTA that is done takes another share, which may belong to a CTA that cannot run yet. Its
        number goes through `ticket` in shared memory."""
        if self.call.num_tiles < self.groups.num_tiles:
            shares = cutlass.min(Int32(PREPROCESS_SHARES), cute.arch.grid_dim()[0])
            warps = kernel.config.threads // WARP
            share = self.take_share(ticket, warp_idx)
            while share < shares:
                self.preprocess_units(kernel, share * warps + warp_idx, shares * warps)
                share = self.take_share(ticket, warp_idx)

    @cute.jit
    def take_share(self, ticket: cute.Tensor, warp_idx: Int32) -> Int32:
        """The number of this CTA's next share; all its warps call this."""
        cute.arch.sync_threads()  # all have read the previous number
        if warp_idx == 0:
            with cute.arch.elect_one():
                ticket[0] = self.take(PREPROCESS_TICKET)
        cute.arch.sync_threads()
        return ticket[0]

    @cute.jit
    def preprocess_units(self, kernel: cutlass.Constexpr, index: Int32, step: Int32):
        """Preprocess every `step`-th unit, a warp's part of a tile.
        One warp calls this. The next unit's loads are in flight while stores are waited for."""
        call, queries, groups = self.call, self.queries, self.groups
        tile_m = kernel.config.tile_m
        units = warps_of_tile(kernel.spec, tile_m)
        rows = TilePreprocess.of(kernel, call, units)
        end = groups.num_tiles * units
        unit = call.num_tiles * units + index
        tile = cutlass.min(unit, end - 1) // units
        group, count = groups.group_of(tile), Int32(0)
        rows.load(queries.at(tile, tile_m), unit % units)
        while unit < end:
            rows.write(queries.at(unit // units, tile_m), unit % units)
            count += 1
            unit += step
            tile = cutlass.min(unit, end - 1) // units
            rows.load(queries.at(tile, tile_m), unit % units)
            if unit >= end or groups.group_of(tile) != group:
                # Bulk copies and additions will read and change what was written.
                cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    self.add_to_flag(group, PREPROCESSED, count)
                group, count = groups.group_of(tile), Int32(0)

    @cute.jit
    def wait_until_preprocessed(self, kernel: cutlass.Constexpr, group: Int32):
        """Wait, as a warp, until a head group's queries are preprocessed."""
        if self.groups.tiles_before(group) >= self.call.num_tiles:
            units = warps_of_tile(kernel.spec, kernel.config.tile_m)
            count = self.groups.tiles_in(group) * units
            self.wait_for_flag(group, PREPROCESSED, count)
            cute.arch.fence_proxy("async.global")

    # ------------------------------------------------------------------------------ flags of groups

    def add_to_flag(self, group, which: int, count) -> None:
        """Add to a head group's flag; releases what came before."""
        flag = self.call.counters.iterator + place_of_group_flag(group, which)
        cute.arch.atomic_add(flag, Int32(count), sem="release", scope="gpu")

    @cute.jit
    def wait_for_flag(self, group: Int32, which: cutlass.Constexpr, count: Int32):
        """Wait, as a warp, until a head group's flag reaches `count`."""
        flag, value = place_of_group_flag(group, which), Int32(-1)
        while value < count:
            place = self.call.counters.iterator + flag
            value = cute.arch.load(place, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def wait_until_accumulated(self, kernel: cutlass.Constexpr, tile, complete, order) -> Int32:
        """Wait, unless `complete`, until key tiles of a head group have added.
        Where packed sequences use no keys, no key tile has waited for the preprocessing. So this
        waits for it, too. Returns the head group."""
        group = self.groups.group_of(tile)
        if group != complete:
            self.wait_until_preprocessed(kernel, group)
            self.wait_for_flag(group, ACCUMULATED, order.tiles_in(group))
        return group

    # -------------------------------------------------------------------------------- dQ conversion

    @cute.jit
    def convert_dq(self, kernel: cutlass.Constexpr, order):
        """Write dQ piece by piece, as a warp, until none is left.
        Half of a piece is always on its way from memory. `order` is of the key tiles."""
        config, pieces = kernel.config, kernel.pieces
        convert = ConvertDq.of(kernel, self)
        count = self.groups.num_tiles * pieces.count
        number, complete = self.first_lanes(self.take_piece()), Int32(-1)
        tile, piece = self.piece(config, pieces, cutlass.min(number, count - 1))
        has_value = Boolean(True)
        if number < count:
            complete = self.wait_until_accumulated(kernel, number // pieces.count, complete, order)
            has_value = self.has_value(tile)
            convert.load(tile, piece, 0)
        while number < count:
            convert.load(tile, piece, 1)
            taken = self.take_piece()
            convert.write(tile, piece, has_value, 0)
            number = self.first_lanes(taken)
            next_has_value = has_value
            next_tile, next_piece = self.piece(config, pieces, cutlass.min(number, count - 1))
            if number < count:
                complete = self.wait_until_accumulated(
                    kernel, number // pieces.count, complete, order
                )
                next_has_value = self.has_value(next_tile)
                convert.load(next_tile, next_piece, 0)
            convert.write(tile, piece, has_value, 1)
            tile, piece, has_value = next_tile, next_piece, next_has_value

    def has_value(self, tile: QueryTile) -> Boolean:
        """Whether the accumulator has a value for a complete tile."""
        if self.call.dq_flags is None:
            return Boolean(True)
        return self.call.dq(tile.tiles).has_value(tile.tile, self.call.dq_is_zeroed)

    def piece(self, config: BackwardConfig, pieces: DqPieces, number) -> tuple[QueryTile, Int32]:
        """The tile of a piece, and the piece's index in it."""
        tile = number // pieces.count
        return self.queries.at(tile, config.tile_m), number - tile * pieces.count

    @cute.jit
    def take_piece(self) -> Int32:
        """Take the next piece; lane 0 gets its number, other lanes anything."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = self.take(CONVERT_TICKET)
        return number

    def take(self, ticket: int) -> Int32:
        """Take the next number of a counter; one thread calls this."""
        counter = self.call.counters.iterator + ticket
        return cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")

    def first_lanes(self, number: Int32) -> Int32:
        """Lane 0's number, for all lanes."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(number, 0))


@dataclass(frozen=True)
class ConvertDq:
    """Converts pieces of dQ, for one warp.

    It scales the accumulator and writes rows in 16 bits.

    The accumulator is as the dQ warpgroup held it: a lane's quad is two neighbouring columns of two
    rows, 8 apart. Four lanes exchange, so that each has 8 columns of a row and writes them at once.

    Of two quads, what lanes 4 i to 4 i + 3 have of row i (and of row i + 8), in pairs of columns:
        as loaded                            0, 4 (0, 4) | 1, 5 (1, 5) | 2, 6 (2, 6) | 3, 7 (3, 7)
        after the exchange with the next     0, 1, 4, 5  |(0, 1, 4, 5) | 2, 3, 6, 7  |(2, 3, 6, 7)
        after the exchange with the second   0, 1, 2, 3  |(0, 1, 2, 3) | 4, 5, 6, 7  |(4, 5, 6, 7)
    """

    kernel: object  # the `Backward` kernel
    fused: FusedPrePostprocess  # names the accumulator, dQ, and the factor between them
    # (4, quads, parts, 2), the loaded elements; two halves, so that the next rows are on their way
    # while the present ones are written.
    values: cute.Tensor

    pieces: DqPieces  # of a tile

    @classmethod
    def of(cls, kernel, fused: FusedPrePostprocess) -> "ConvertDq":
        halves, pieces = WARPS // LOADED_AT_ONCE, kernel.pieces
        values = cute.make_rmem_tensor((QUAD, pieces.quads, LOADED_AT_ONCE, halves), Float32)
        return cls(kernel, fused, values, pieces)

    @cute.jit
    def load(self, tile: QueryTile, piece, half: cutlass.Constexpr, second=None):
        """Load half of a piece, all of it in flight at once.
        `second` is the second accumulator and where its elements go."""
        accumulator, values = self.fused.call.dq(tile.tiles), self.values[None, None, None, half]
        if cutlass.const_expr(second is not None):
            accumulator, values = second
        for i in cutlass.range_constexpr(LOADED_AT_ONCE):
            thread = (half * LOADED_AT_ONCE + i) * WARP + cute.arch.lane_idx()
            source = accumulator.quads_of(self.pieces, thread, piece, tile.tile)
            for j in cutlass.range_constexpr(self.pieces.quads):
                cute.autovec_copy(source[None, j], values[None, j, i])

    @cute.jit
    def add_second(self, tile: QueryTile, piece, has_first, half: cutlass.Constexpr):
        """Add the second accumulator to half a piece; either may lack values."""
        values, kernel = self.values[None, None, None, half], self.kernel
        second = self.fused.call.dq(tile.tiles).one_of(self.pieces, kernel.accumulators, 1)
        second_values = cute.make_rmem_tensor_like(values)
        self.load(tile, piece, half, (second, second_values))
        has_second = second.has_value(tile.tile, self.fused.call.dq_is_zeroed)
        for i in cutlass.range_constexpr(cute.size(values)):
            first = values[i] if has_first else Float32(0.0)
            values[i] = first + (second_values[i] if has_second else Float32(0.0))

    @cute.jit
    def write(self, tile: QueryTile, piece, has_value, half: cutlass.Constexpr):
        """Write the existing rows of half a piece; zeros without a value."""
        if cutlass.const_expr(self.kernel.accumulators > 1):
            self.add_second(tile, piece, has_value, half)
            has_value = Boolean(True)
        for i in cutlass.range_constexpr(LOADED_AT_ONCE):
            part, values = half * LOADED_AT_ONCE + i, self.values[None, None, i, half]
            self.write_part(tile, piece, part, values, has_value)

    @cute.jit
    def write_part(self, tile: QueryTile, piece, part: cutlass.Constexpr, values, has_value):
        """Write 16 rows of a piece."""
        lane, dq = cute.arch.lane_idx(), self.fused.dq
        if cutlass.const_expr(dq.element_type is Float32):
            self.write_floats(tile, piece, part, values, has_value)
            return
        is_lower, is_right = lane % 2 == 1, lane // 2 % 2 == 1
        down, right = self.pieces.place(piece)
        row = down * ROWS + part * ROWS_OF_WARP + lane // QUAD + (8 if is_lower else 0)
        query = tile.tile.m_block * self.kernel.config.tile_m + row
        words = self.words(values)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] if has_value else Uint32(0)
        for i in cutlass.range_constexpr(0, self.pieces.quads, PAIR):
            pairs = [four_columns(words, j, is_lower) for j in (i, i + 1)]
            vector = eight_columns(*pairs, is_right)
            column = right * (self.pieces.width // VECTOR) + i + (1 if is_right else 0)
            if query >= 0 and query < tile.owned and column * VECTOR < cute.size(dq, mode=[3]):
                target = vector_of(dq[tile.batch, tile.begin + query, tile.tile.head, None], column)
                place = cute.recast_ptr(target.iterator.align(16), dtype=Uint32)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(QUAD)))

    @cute.jit
    def write_floats(self, tile: QueryTile, piece, part: cutlass.Constexpr, values, has_value):
        """Write 16 rows of a piece in float32, two columns at once."""
        lane, dq, scale = cute.arch.lane_idx(), self.fused.dq, self.fused.scale
        down, right = self.pieces.place(piece)
        for r in cutlass.range_constexpr(2):
            row = down * ROWS + part * ROWS_OF_WARP + lane // QUAD + 8 * r
            query = tile.tile.m_block * self.kernel.config.tile_m + row
            if query >= 0 and query < tile.owned:
                place = dq[tile.batch, tile.begin + query, tile.tile.head, None]
                for i in cutlass.range_constexpr(self.pieces.quads):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for j in cutlass.range_constexpr(2):
                        pair[j] = values[2 * r + j, i] * scale if has_value else Float32(0.0)
                    column = right * self.pieces.width + 8 * i + 2 * (lane % QUAD)
                    if column < cute.size(dq, mode=[3]):
                        cute.autovec_copy(pair, vector_of(place, column // 2, 2))

    def words(self, values: cute.Tensor) -> cute.Tensor:
        """A lane's elements of 16 rows, scaled and in 16 bits.
        There is a word for each row of a quad."""
        scaled = cute.make_rmem_tensor((QUAD, self.pieces.quads), Float32)
        scaled.store(values.load() * self.fused.scale)
        rounded = cute.make_rmem_tensor_like(scaled, self.fused.dq.element_type)
        convert_words(scaled, rounded)
        return words_of(rounded)


@cute.jit
def four_columns(words: cute.Tensor, quad: cutlass.Constexpr, is_lower) -> tuple[Uint32, Uint32]:
    """Four columns of a row, from this lane and the next.
    The second of the two lanes has the lower row."""
    upper, lower = words[2 * quad], words[2 * quad + 1]
    kept, sent = (lower if is_lower else upper), (upper if is_lower else lower)
    received = cute.arch.shuffle_sync_bfly(sent, offset=1)
    return (received if is_lower else kept), (kept if is_lower else received)


@cute.jit
def eight_columns(left: tuple, right: tuple, is_right) -> cute.Tensor:
    """Eight columns of a row, from four columns of two quads each.
    Of two lanes, two apart, the second one gets the right quad."""
    vector = cute.make_rmem_tensor(QUAD, Uint32)
    for i in cutlass.range_constexpr(PAIR):
        kept, sent = (right[i] if is_right else left[i]), (left[i] if is_right else right[i])
        received = cute.arch.shuffle_sync_bfly(sent, offset=2)
        vector[i] = received if is_right else kept
        vector[i + PAIR] = kept if is_right else received
    return vector
