"""Queries that the backward kernel begins and ends itself: statistics of their rows and what their
sums begin with before tiles of keys, dQ of the sums behind them.

Which queries it begins says `fa3.schedules.query_sections`. The CTAs that run first begin them,
share by share, before their warps have roles; the producers of all CTAs wait until those of a
tile's section are begun. It ends all of them: the MMA warpgroups of a CTA that finds no more tiles
of keys, while others still work on theirs, take pieces of dQ, section by section, and wait until a
piece's section is complete. What is left when the last tile of keys is done, the last section at
least, is for all CTAs together.

Timeline of a warp that begins queries
    loads of a unit | stores of the unit before | after each section: fences, raises its word

Timeline of a warp that ends queries
    loads a piece's second half | asks for the next piece | writes the first half | waits for the
    next one's section | loads its first half | writes this one's second half
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa3.kernels.backward_launch import (
    ADDED,
    BEGUN,
    TO_BEGIN,
    TO_END,
    BackwardConfig,
    BeginArguments,
    place_of_word,
)
from fa3.primitives.first_additions import FirstAdditions
from fa3.primitives.query_begin import QueryBegin, warps_of_tile
from fa3.primitives.query_end import QueryEnd
from fa3.primitives.query_tiles import QueryPieces, SumWords
from fa3.primitives.section_words import raise_word, wait_for
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec
from fa3.schedules.query_sections import BEGINNERS, QuerySections
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork, QueryTile


class QueriesInside(NamedTuple):
    """The tiles of queries of a call, as far as the backward kernel begins and ends them.

    Fields:
        call: the kernel before begins its first `num_tiles` tiles.
        work: the tiles by their numbers.
        sections: the sections that they lie in.
        dq: (batch, rows, heads, head_dim), receives the gradient; packed ones in a batch of one.
        scale: factor of the sums.
    """

    call: BeginArguments
    work: DenseQueryWork | PackedQueryWork
    sections: QuerySections
    dq: cute.Tensor
    scale: Float32

    @cute.jit
    def begin(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        ticket: cute.Tensor,
        warp_idx: Int32,
    ):
        """Begin those that the kernel before has not, if this CTA is one of the first that run;
        all its warps share the work.

        Who is done asks for another share: it may be that of a CTA that cannot run yet.

        Args:
            ticket: (1,), int32 in shared memory, for the number of the share that is next.
        """
        if self.call.num_tiles < self.sections.num_tiles:
            shares = cutlass.min(Int32(BEGINNERS), cute.arch.grid_dim()[0])
            warps = config.threads // WARP
            share = self.take_share(ticket, warp_idx)
            while share < shares:
                self.begin_units(spec, config, share * warps + warp_idx, shares * warps)
                share = self.take_share(ticket, warp_idx)

    @cute.jit
    def take_share(self, ticket: cute.Tensor, warp_idx: Int32) -> Int32:
        """Which share is this CTA's next; all its warps call this."""
        cute.arch.sync_threads()  # all have read the one before
        if warp_idx == 0:
            with cute.arch.elect_one():
                words = self.call.counters.iterator + TO_BEGIN
                ticket[0] = cute.arch.atomic_add(words, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        return ticket[0]

    @cute.jit
    def begin_units(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        index: Int32,
        step: Int32,
    ):
        """Begin every `step`-th unit, a warp's share of a tile; one warp calls this.

        The next unit's loads are in flight while this one's stores are waited for.
        """
        call, work, sections = self.call, self.work, self.sections
        tile_m, units = config.tile_m, warps_of_tile(spec, config.tile_m)
        rows = QueryBegin.of(spec, config, call, units)
        end = sections.num_tiles * units
        unit = call.num_tiles * units + index
        tile = cutlass.min(unit, end - 1) // units
        section, count = sections.section_of(tile), Int32(0)
        rows.load(work.at(tile, tile_m), unit % units)
        while unit < end:
            rows.write(work.at(unit // units, tile_m), unit % units)
            count += 1
            unit += step
            tile = cutlass.min(unit, end - 1) // units
            rows.load(work.at(tile, tile_m), unit % units)
            if unit >= end or sections.section_of(tile) != section:
                # Copies and additions in bulk will read and change what was written.
                cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    raise_word(call.counters, place_of_word(section, BEGUN), count)
                section, count = sections.section_of(tile), Int32(0)

    @cute.jit
    def wait_until_begun(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        section: Int32,
    ):
        """Wait until all queries of a section are begun; one warp calls this."""
        if self.sections.tiles_before(section) >= self.call.num_tiles:
            count = self.sections.tiles_in(section) * warps_of_tile(spec, config.tile_m)
            wait_for(self.call.counters, place_of_word(section, BEGUN), count)
            cute.arch.fence_proxy("async.global")

    def make_known(self, section):
        """Make known that a tile of keys has added all that it adds; one thread, which has waited
        for its additions, calls this."""
        raise_word(self.call.counters, place_of_word(section, ADDED), 1)

    @cute.jit
    def end(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        order,
    ):
        """Write dQ piece by piece until none is left; one warp calls this.

        Half of a piece is always on its way from memory.

        Args:
            order: that of the tiles of keys.
        """
        pieces = config.pieces(padded(spec.head_dim))
        end = QueryEnd.of(pieces, config.tile_m, self.call.sums, self.dq, self.scale)
        count = self.sections.num_tiles * pieces.count
        number, known = self.first_lanes(self.take()), Int32(-1)
        own, piece = self.piece(config, pieces, cutlass.min(number, count - 1))
        has_sums = Boolean(True)
        if number < count:
            known = self.wait_until_added(spec, config, number // pieces.count, known, order)
            has_sums = self.has_sums(own)
            end.load(own, piece, 0)
        while number < count:
            end.load(own, piece, 1)
            taken = self.take()
            end.write(own, piece, has_sums, 0)
            number = self.first_lanes(taken)
            following_has_sums = has_sums
            following, piece_of_it = self.piece(config, pieces, cutlass.min(number, count - 1))
            if number < count:
                known = self.wait_until_added(spec, config, number // pieces.count, known, order)
                following_has_sums = self.has_sums(following)
                end.load(following, piece_of_it, 0)
            end.write(own, piece, has_sums, 1)
            own, piece, has_sums = following, piece_of_it, following_has_sums

    def has_sums(self, own: QueryTile) -> Boolean:
        """Whether a tile has sums, when its section has all that is added to it."""
        if self.call.words is None:
            return Boolean(True)
        words = SumWords(self.call.words)
        return FirstAdditions(words, own.tiles, self.call.has_zeros).has_sums(own.tile)

    def piece(self, config: BackwardConfig, pieces: QueryPieces, number) -> tuple[QueryTile, Int32]:
        """The tile of a piece, and which of its pieces it is."""
        tile = number // pieces.count
        return self.work.at(tile, config.tile_m), number - tile * pieces.count

    @cute.jit
    def wait_until_added(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        tile: Int32,
        known: Int32,
        order,
    ) -> Int32:
        """Wait until a tile's section has all that is added to it, unless it is known to have.

        Where packed sequences use no keys, no tile of keys has waited for what is begun: so it is
        waited for, too.

        Returns:
            the section.
        """
        section = self.sections.section_of(tile)
        if section != known:
            self.wait_until_begun(spec, config, section)
            tiles = order.tiles_in(section)
            wait_for(self.call.counters, place_of_word(section, ADDED), tiles)
        return section

    @cute.jit
    def take(self) -> Int32:
        """Ask for the next piece; lane 0 gets its number, other lanes anything."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            words = self.call.counters.iterator + TO_END
            number = cute.arch.atomic_add(words, Int32(1), sem="relaxed", scope="gpu")
        return number

    def first_lanes(self, number: Int32) -> Int32:
        """What lane 0 has of a number, for all lanes."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(number, 0))
