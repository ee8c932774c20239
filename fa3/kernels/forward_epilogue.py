"""How a consumer warpgroup of the forward kernel finishes a tile.

A tile is written whole, or only some of its rows are. Rows that must be computed again are marked.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline

from fa3.kernels.forward_launch import OTHER_REGISTERS
from fa3.primitives.arithmetic import Divisor
from fa3.primitives.attention import Attention
from fa3.primitives.block_memory import BlockRing
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.fragments import as_rows_and_columns
from fa3.primitives.output_store import PartMerge, RowLse, RowStore, SlabStore, store_lse
from fa3.primitives.recorder import NoRecorder, Recorder
from fa3.primitives.tma import TmaTensor
from fa3.primitives.wgmma import WARP, WARPS
from fa3.schedules import Segment, Tile
from fa3.schedules.recompute import ALL_ROWS, RecomputeMask, bit_of_row
from fa3.schedules.sequences import Dense, MultiSequence, Ragged


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
    softmax_scale: Float32  # factor of Q K^T
    sequences: Dense | Ragged | MultiSequence  # how long sequences are, and where their rows are


class ForwardBuffers(NamedTuple):
    """The buffers in shared memory, and the pipelines from the producer.
    Q and O are swizzled, (64, columns, slabs of 64 rows)."""

    q: cute.Tensor
    pipe_q: pipeline.PipelineTmaAsync
    k: BlockRing
    v: BlockRing
    o: cute.Tensor
    # (4, consumers, stages) int32, each warp's largest query; None unless consumers convert Q.
    largest: cute.Tensor | None
    ones: cute.Tensor | None  # (8, 32), what row sums of linear codes multiply P by


@dataclass(frozen=True)
class ForwardEpilogue:
    """What a consumer warpgroup does with a tile after all key blocks."""

    kernel: Any  # the `Forward`
    operands: ForwardOperands
    segment: Segment  # what the cluster works on
    tile: Tile  # the CTA's own tile
    slab: Int32  # the number of this warpgroup's 64 rows, counted in the sequence
    thread_idx: Int32  # of the CTA
    attention: Attention
    out: SlabStore
    sinks: tuple | None  # of this thread's rows
    # parts, number: of a part of a tile, its merge and the number that it took; else None.
    parts: PartMerge | None
    number: Int32 | None

    @cute.jit
    def finish(self):
        """Finish the tile, or a part of it."""
        kernel = self.kernel
        if cutlass.const_expr(kernel.schedule_type.splits):
            if self.segment.part.num_parts > 1:
                self.finish_part()
            else:
                self.finish_whole()
        elif cutlass.const_expr(kernel.is_recompute):
            self.finish_marked()
        elif cutlass.const_expr(kernel.packs_sequences):
            self.finish_shared()
        else:
            self.finish_whole()

    @cute.jit
    def finish_part(self):
        """Write a part of a tile; the last one merges all."""
        attention, kernel, parts = self.attention, self.kernel, self.parts
        lse = attention.finish()
        if cutlass.const_expr(kernel.config.fixed_row_max):
            self.mark(has_sinks=False)
        acc_O, coords = attention.regs.acc_O, attention.rules.coords
        places, are_queries = self.places(), self.are_queries()
        if not parts.is_last(self.number):
            parts.leave(acc_O, lse)
        else:
            merged = parts.merge(acc_O, lse, self.sinks, kernel.registers[1] - OTHER_REGISTERS)
            self.operands.rows.store(acc_O, merged, coords, places, are_queries)

    @cute.jit
    def finish_whole(self):
        """Finish a tile; mark rows whose fixed row max was far off."""
        self.finish_tile()
        if cutlass.const_expr(self.kernel.config.fixed_row_max):
            self.mark(has_sinks=self.sinks is not None)

    @cute.jit
    def mark(self, has_sinks: cutlass.Constexpr):
        """Mark this thread's rows whose fixed row max was too far off."""
        softmax, acc_O = self.attention.softmax, as_rows_and_columns(self.attention.regs.acc_O)
        if cute.arch.vote_any_sync(not softmax.surely_in_range(acc_O, has_sinks)):
            warp, tile = warp_of_tile(self.thread_idx), self.tile_number()
            failed = tuple(
                is_query and softmax.failed(acc_O[r, None], r, has_sinks)
                for r, is_query in enumerate(self.are_queries())
            )
            self.operands.marks.add(failed, tile, warp)

    @cute.jit
    def finish_tile(self):
        """Divide O by the row sums; write O and the log-sum-exps.
        In float32 a slab of O has no room in shared memory."""
        if cutlass.const_expr(self.kernel.spec.has_float32_out):
            self.finish_rows(lambda r: True)
        else:
            self.finish_slab()

    @cute.jit
    def finish_slab(self):
        """Write a slab of O from shared memory, and the log-sum-exps."""
        sequences, segment, tile = self.operands.sequences, self.segment, self.tile
        attention, operands = self.attention, self.operands
        acc_O, coords = attention.regs.acc_O, attention.rules.coords
        lse = attention.finish(self.sinks)
        self.out.store(acc_O, self.slab, tile.head, sequences.queries(segment))
        if operands.lse.is_wanted():
            for r in cutlass.range_constexpr(cute.size(lse)):
                row = coords.query(r)
                if row < attention.rules.sequence.seqlen_q:
                    place = sequences.place(tile, segment, row)
                    store_lse(operands.lse.tensor, place, lse[r], coords)

    @cute.jit
    def finish_marked(self):
        """Finish a tile of the second launch: write the marked rows only."""
        tile, warp = self.tile_number(), warp_of_tile(self.thread_idx)
        marks = self.operands.marks
        group_rows = marks.rows_of_group(tile, warp // WARPS * WARPS)
        marked = Int32(0)
        is_whole = Boolean(True)
        for i in cutlass.range_constexpr(WARPS):
            marked = group_rows[i] if warp % WARPS == i else marked
            is_whole = is_whole and group_rows[i] == ALL_ROWS
        # Clear the marks only after all warps of the group have read them.
        self.out.meet()
        marks.clear(tile, warp)
        if is_whole:
            self.finish_tile()
        else:
            self.finish_rows(lambda r: (marked & bit_of_row(r)) != 0)

    @cute.jit
    def finish_shared(self):
        """Finish a tile with rows of several sequences.
        Used rows are written. Rows that are not finite are marked: values of another sequence may
        be why."""
        rules, marks = self.attention.rules, self.operands.marks
        rows = rules.mask.rows
        if rules.sequence.is_whole(self.out.group):
            self.finish_tile()
        else:
            self.finish_rows(lambda r: rows[r].is_used)
        for r in cutlass.range_constexpr(2):
            # A sequence has marks for one tile, which is enough where `max_seqlen_q` holds.
            has_place = rows[r].is_used and rows[r].query < self.kernel.config.tile_m
            if has_place and not self.attention.is_finite(r):
                number = rows[r].batch * marks.order.heads.value + self.tile.head
                marks.add_row(number, rows[r].query)

    @cute.jit
    def finish_rows(self, is_wanted: cutlass.Constexpr):
        """Finish a tile; write this thread's row r if `is_wanted(r)`."""
        acc_O, rules = self.attention.regs.acc_O, self.attention.rules
        lse = self.attention.finish(self.sinks)
        is_written = tuple(
            is_wanted(r) and is_query for r, is_query in enumerate(self.are_queries())
        )
        self.operands.rows.store(acc_O, lse, rules.coords, self.places(), is_written)

    def places(self) -> tuple:
        """Where this thread's rows of a tile are in the output."""
        queries = (self.attention.rules.coords.query(r) for r in range(2))
        return tuple(self.operands.sequences.place(self.tile, self.segment, row) for row in queries)

    def are_queries(self) -> tuple:
        """Which of this thread's rows of a tile are queries."""
        rules = self.attention.rules
        return tuple(rules.coords.query(r) < rules.sequence.seqlen_q for r in range(2))

    def tile_number(self):
        """The number of the CTA's tile among the marks."""
        if self.kernel.schedule_type.is_ragged:
            return self.segment.number
        return self.operands.marks.order.index(self.tile)


def warp_of_tile(thread_idx):
    """This warp's index among the consumer warps of a CTA."""
    return cute.arch.make_warp_uniform(thread_idx // WARP - WARPS)
