"""Queries that the backward kernel begins itself: statistics of their rows, zeros of their sums.

Which these are says `fa3.schedules.query_sections`. The CTAs that run first begin them, share by
share, before their warps have roles; the producers of all CTAs wait until those of a tile's section
are begun.

Timeline of a warp that begins queries
    loads of a unit | stores of the unit before | after each section: fences, raises its word
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.kernels.backward_launch import FIRST_OF_BEGUN, TICKET, BackwardConfig, BeginArguments
from fa3.primitives.query_begin import QueryBegin, warps_of_tile
from fa3.primitives.section_words import raise_word, wait_for
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec
from fa3.schedules.query_sections import BEGINNERS, QuerySections
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork


class QueriesToBegin(NamedTuple):
    """All tiles of queries but the first `call.num_tiles`, which the kernel before begins.

    Fields:
        work: the tiles by their numbers.
        sections: the sections that they lie in.
    """

    call: BeginArguments
    work: DenseQueryWork | PackedQueryWork
    sections: QuerySections

    @cute.jit
    def begin(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        ticket: cute.Tensor,
        warp_idx: Int32,
    ):
        """Begin them, if this CTA is one of the first that run; all its warps share the work.

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
                words = self.call.counters.iterator + TICKET
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
        call, work, sections = self
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
                    raise_word(call.counters, FIRST_OF_BEGUN + section, count)
                section, count = sections.section_of(tile), Int32(0)

    @cute.jit
    def wait(
        self,
        spec: cutlass.Constexpr[AttentionSpec],
        config: cutlass.Constexpr[BackwardConfig],
        section: Int32,
    ):
        """Wait until all queries of a section are begun; one warp calls this."""
        if self.sections.tiles_before(section) >= self.call.num_tiles:
            count = self.sections.tiles_in(section) * warps_of_tile(spec, config.tile_m)
            wait_for(self.call.counters, FIRST_OF_BEGUN + section, count)
            cute.arch.fence_proxy("async.global")
