"""The epilogues of the forward kernel: what a consumer warpgroup does with a finished tile.

A tile is written whole, or only some of its rows are. Rows that must be computed again are marked.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline

from fa3.kernels.forward_launch import ForwardConfig
from fa3.kernels.kernel_base import AttentionKernel
from fa3.primitives.arithmetic import Divisor
from fa3.primitives.attention import Attention
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.fp8_blocks import ConvertedPipeline
from fa3.primitives.fragments import ScoreCoords
from fa3.primitives.output_store import PartMerge, RowLse, RowStore, SlabStore, store_lse
from fa3.primitives.recorder import NoRecorder, Recorder
from fa3.primitives.tma import TmaTensor
from fa3.primitives.wgmma import WARP, WARPS
from fa3.schedules import Segment, Tile
from fa3.schedules.marked import ALL_ROWS, RecomputeMask, bit_of_row
from fa3.schedules.sequences import Dense, MultiSequence, Ragged
from fa3.scores.scores import ScorePipeline


class ForwardOperands(NamedTuple):
    """The global tensors."""

    # q, k, v, o: (seqlen, head_dim, heads, batch); k and v of a cache with pages are (page_size,
    # head_dim, heads, pages).
    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    o: TmaTensor
    lse: RowLse  # of (batch, heads, seqlen_q)
    heads_of_key: Divisor  # query heads that share one key/value head
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks
    rows: RowStore | None  # writes single rows of O; None if only whole tiles are written
    parts: PartMerge | None  # merges split tiles; None if no tile is split
    # Rows that a first launch marks and a second computes again; None without a second.
    marks: RecomputeMask | None
    recorder: Recorder | NoRecorder  # records the times of every tile in an instrumented kernel
    # (batch, pages) int32, the page numbers of a sequence; None without pages.
    page_table: cute.Tensor | None
    dropout: DropoutArguments | None  # None without
    descales: tuple | None  # see `ForwardArguments`


class ForwardBuffers(NamedTuple):
    """The buffers in shared memory, swizzled (rows, columns, count): Q and O count slabs of 64
    rows, K and V stages. Consumers read k and v, with products in FP8 V^T; TMA loads others."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    loaded_k: cute.Tensor
    loaded_v: cute.Tensor
    # (4, consumers) int32, the largest query of each warp; None unless consumers convert Q.
    largest: cute.Tensor | None


class ForwardPipelines(NamedTuple):
    """The mbarrier pipelines from the producer to the consumers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync | ConvertedPipeline
    v: pipeline.PipelineTmaAsync | ConvertedPipeline
    # loaded_k, loaded_v: to the warps that rewrite blocks; the same as k and v where none do.
    loaded_k: pipeline.PipelineTmaAsync
    loaded_v: pipeline.PipelineTmaAsync


class TileContext(NamedTuple):
    """What a CTA works on."""

    sequences: Dense | Ragged | MultiSequence
    segment: Segment  # what its cluster works on
    tile: Tile  # the CTA's own tile


class ForwardEpilogue(AttentionKernel):
    """Base of the forward kernel: its epilogues."""

    config: ForwardConfig
    schedule_type: type

    @cute.jit
    def mark(
        self,
        operands: ForwardOperands,
        attention: Attention,
        work: TileContext,
        thread_idx,
        sinks: tuple | None,
    ):
        """Mark this thread's finished rows whose fixed row max was too far off."""
        has_sinks = sinks is not None
        if attention.may_have_failed(has_sinks):
            warp = self.warp_of_tile(thread_idx)
            number = self.number_of(operands, work)
            operands.marks.add(attention.failed_rows(has_sinks), number, warp)

    @cute.jit
    def finish_tile(
        self,
        operands: ForwardOperands,
        attention: Attention,
        out: SlabStore,
        sinks: tuple | None,
        work: TileContext,
        slab,
    ):
        """Divide O by the row sums; write O and the log-sum-exps to global memory."""
        if cutlass.const_expr(self.stores_rows):
            self.finish_rows(operands, attention, sinks, work, lambda r: True)
        else:
            sequences, segment, tile = work
            acc_O, coords = attention.regs.acc_O, attention.rules.coords
            lse = attention.finish(sinks)
            out.store(acc_O, slab, tile.head, sequences.queries(segment))
            if operands.lse.is_wanted():
                for r in cutlass.range_constexpr(cute.size(lse)):
                    row = coords.query(r)
                    if row < attention.rules.sequence.seqlen_q:
                        store_lse(
                            operands.lse.tensor, sequences.place(tile, segment, row), lse[r], coords
                        )

    @property
    def stores_rows(self) -> bool:
        """Whether each thread stores its rows of O, since shared memory has no room for them."""
        return self.spec.is_fp8 and not self.config.own_o

    @cute.jit
    def finish_recompute(
        self,
        operands: ForwardOperands,
        attention: Attention,
        out: SlabStore,
        sinks: tuple | None,
        work: TileContext,
        slab,
        thread_idx,
    ):
        """Finish a tile of the second launch: write marked rows, let the others keep their bits."""
        number, warp = self.number_of(operands, work), self.warp_of_tile(thread_idx)
        of_group = operands.marks.rows_of_group(number, warp // WARPS * WARPS)
        own = Int32(0)
        is_whole = Boolean(True)
        for i in cutlass.range_constexpr(WARPS):
            own = of_group[i] if warp % WARPS == i else own
            is_whole = is_whole and of_group[i] == ALL_ROWS
        # Clear the marks only after all warps of the group have read them.
        out.meet()
        operands.marks.wipe_out(number, warp)
        if is_whole:
            self.finish_tile(operands, attention, out, sinks, work, slab)
        else:
            self.finish_rows(operands, attention, sinks, work, lambda r: (own & bit_of_row(r)) != 0)

    @cute.jit
    def finish_shared(
        self,
        operands: ForwardOperands,
        attention: Attention,
        out: SlabStore,
        sinks: tuple | None,
        work: TileContext,
        slab,
        half,
    ):
        """Finish a tile with rows of several sequences: write those that are used, and mark those
        that are not finite, since what another sequence holds may be why."""
        rows = attention.rules.mask.rows
        if attention.rules.sequence.is_whole(half):
            self.finish_tile(operands, attention, out, sinks, work, slab)
        else:
            self.finish_rows(operands, attention, sinks, work, lambda r: rows[r].is_used)
        for r in cutlass.range_constexpr(2):
            # A sequence has marks for one tile, which is enough where `max_seqlen_q` holds.
            has_place = rows[r].is_used and rows[r].query < self.config.tile_m
            if has_place and not attention.is_finite(r):
                number = rows[r].batch * operands.marks.order.heads.value + work.tile.head
                operands.marks.add_row(number, rows[r].query)

    @cute.jit
    def finish_rows(
        self,
        operands: ForwardOperands,
        attention: Attention,
        sinks: tuple | None,
        work: TileContext,
        is_wanted: cutlass.Constexpr,  # (r) -> whether this thread's row r is to be written
    ):
        """Finish a tile some of whose rows are to stay as they are."""
        acc_O, rules = attention.regs.acc_O, attention.rules
        lse = attention.finish(sinks)
        is_written = tuple(
            is_wanted(r) and is_query for r, is_query in enumerate(self.are_queries(rules))
        )
        operands.rows.store(acc_O, lse, rules.coords, self.places(work, rules.coords), is_written)

    def places(self, work: TileContext, coords: ScoreCoords) -> tuple:
        """Where this thread's rows of a tile are in the output."""
        queries = (coords.query(r) for r in range(2))
        return tuple(work.sequences.place(work.tile, work.segment, row) for row in queries)

    def are_queries(self, rules: ScorePipeline) -> tuple:
        """Which of this thread's rows of a tile are queries."""
        return tuple(rules.coords.query(r) < rules.sequence.seqlen_q for r in range(2))

    def warp_of_tile(self, thread_idx):
        """This warp's index among the consumer warps of a CTA."""
        return cute.arch.make_warp_uniform(thread_idx // WARP - WARPS)

    def warp_of_cluster(self, rank, thread_idx):
        """This warp's index among the consumer warps of a cluster."""
        return rank * self.config.consumers * WARPS + self.warp_of_tile(thread_idx)

    def number_of(self, operands: ForwardOperands, work: TileContext):
        """The number of the CTA's tile among the marks."""
        if self.schedule_type.is_ragged:
            return work.segment.number
        return operands.marks.order.index(work.tile)
