"""An MMA warpgroup's loop over query blocks in the backward kernel.

Q, dO and the rows' statistics come from shared memory, where the producer's TMA wrote them. dK and
dV stay in registers for the epilogue. dS goes to shared memory for `fa3.primitives.dq_accumulator`.

A thread has 208 registers, of which dK and dV take 128 at head size 128. So P is kept in 16 bits
while dP is there, and is read again for dS: it is rounded for dV in any case.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa3.primitives import wgmma
from fa3.primitives.dropout import TransposedDropout, split_probabilities
from fa3.primitives.fragments import (
    as_operand_a,
    as_rows_and_columns,
    convert_words,
    widen_words,
    write_fragment,
)
from fa3.primitives.gradient_mmas import GradientMmas, GradientOperands, KeyTileStep
from fa3.primitives.query_tiles import PAIR, place_of_row
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.vectors import QUAD, vector_of
from fa3.primitives.wgmma import ROWS

LSE, DELTA = 0, 1  # which of a row's statistics


@dataclass(frozen=True)
class ColumnStatistics:
    """Log-sum-exps and deltas of a thread's columns."""

    # (queries, 2) in shared memory, of `fa3.primitives.query_tiles.statistics_of_tile`.
    numbers: cute.Tensor
    column: Int32  # the thread's first column
    columns: int  # how many it has
    at_once: int  # how many it reads at once, 2 or 4

    def read(self, which: int, i: int) -> cute.Tensor:
        """Log-sum-exps or deltas of columns [i at_once, (i + 1) at_once)."""
        values = cute.make_rmem_tensor(self.at_once, Float32)
        place = place_of_row(self.column, self.at_once) // self.at_once + i * QUAD
        cute.autovec_copy(vector_of(self.numbers[None, which], place, self.at_once), values)
        return values

    def reader(self, which: int) -> Callable[[int], cute.Tensor]:
        """`read` for one of the statistics.
        It reads what is asked for, or has read all before unless registers are short."""
        if self.at_once == PAIR:
            return partial(self.read, which)
        return [self.read(which, i) for i in range(self.columns // self.at_once)].__getitem__

    @cute.jit
    def exponentiate(self, scores: cute.Tensor, lses: cutlass.Constexpr, scale_log2: Float32):
        """P = exp(score - lse), in place; a score of 1 is 2^scale_log2."""
        for begin in cutlass.range_constexpr(0, self.columns, self.at_once):
            lse = lses(begin // self.at_once)
            for i in cutlass.range_constexpr(self.at_once):
                c = begin + i
                for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                    exponent = scores[r, c] * scale_log2 - lse[i]
                    scores[r, c] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def differentiate(
        self,
        p: cute.Tensor,
        dP: cute.Tensor,
        deltas: cutlass.Constexpr,
        factors: tuple,
        # Whether P is negative where it is dropped: then dP counts as 0.
        has_dropout: cutlass.Constexpr,
    ):
        """dS = P (dP - delta) times the scores' derivatives, in place of dP."""
        for begin in cutlass.range_constexpr(0, self.columns, self.at_once):
            delta = deltas(begin // self.at_once)
            for i in cutlass.range_constexpr(self.at_once):
                c = begin + i
                for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
                    if cutlass.const_expr(has_dropout):
                        kept = cute.arch.fmax(p[r, c], 0.0)
                        dS = kept * dP[r, c] - magnitude(p[r, c]) * delta[i]
                    else:
                        dS = p[r, c] * (dP[r, c] - delta[i])
                    for k in cutlass.range_constexpr(len(factors)):
                        dS = dS * Float32(factors[k][r, c])
                    dP[r, c] = dS


def magnitude(x: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


@dataclass(frozen=True)
class GradientStep(KeyTileStep):
    """The steps of an MMA warpgroup."""

    mmas: GradientMmas
    regs: GradientOperands
    v_state: pipeline.PipelineState  # the state in which the tile's V arrives
    rules: object  # score functions and masks; their coordinates name query head and batch
    group: Int32
    barrier: object  # of all MMA warpgroups
    dropout: TransposedDropout | None  # what is dropped, or None

    @cute.jit
    def all(self, walk, q_state, do_state):
        """All query blocks of a walk of `fa3.primitives.query_tiles`."""
        blocks, i, states = walk.blocks, walk.blocks.begin, (q_state, do_state)
        if cutlass.const_expr(not walk.is_down):
            while i < blocks.full_begin:
                states = self.at(walk, i).next(walk.at(i), *states, masked=True)
                i += 1
        while i < blocks.full_end:
            states = self.at(walk, i).next(walk.at(i), *states, masked=False)
            i += 1
        if cutlass.const_expr(self.rules.mask.left or walk.may_be_down):
            while i < blocks.end:
                states = self.at(walk, i).next(walk.at(i), *states, masked=True)
                i += 1
        return states

    @cute.jit
    def next(self, m_block, q_state, do_state, masked: cutlass.Constexpr):
        """One query block, one part of it after another."""
        config, pipelines = self.config, self.pipelines
        # dS of a block has the stage of its Q, and dO if it has as many; a state takes registers.
        # The producer of dS is a phase ahead.
        phase = q_state.phase ^ 1
        ds_state = pipeline.PipelineState(config.stages, q_state.count, q_state.index, phase)
        if cutlass.const_expr(config.do_stages == config.stages):
            do_state = q_state
        states = q_state, do_state, ds_state
        # Before the wait: after it ptxas loads them only when all WGMMAs of S have been issued.
        statistics = self.statistics(q_state)
        pipelines.q.consumer_wait(q_state)
        if cutlass.const_expr(config.q_splits == 1):
            self.mma_part(0, m_block, states, statistics, masked)
            warpgroup.wait_group(1)
            pipelines.d_out.consumer_release(do_state)
            warpgroup.wait_group(0)
        else:
            # A loop: in one piece of code what the second part reads would be read before the
            # first, for which there are no registers.
            for part in cutlass.range(config.q_splits, unroll=1):
                part_step = self.of_part(part)
                statistics = part_step.statistics(q_state)
                part_step.mma_part(part, m_block, states, statistics, masked)
                warpgroup.wait_group(0)
            pipelines.d_out.consumer_release(do_state)
        pipelines.q.consumer_release(q_state)
        q_state.advance()
        if cutlass.const_expr(config.do_stages != config.stages):
            do_state.advance()
        return q_state, do_state

    def at(self, walk, place) -> "GradientStep":
        """The step at a place of a walk, for its query head."""
        coords, dropout = self.rules.coords, self.dropout
        _, head = walk.place(place, coords.head)
        if head is coords.head:
            return self
        coords = replace(coords, head=head)
        if dropout is not None:
            dropout = replace(dropout, coords=coords)
        return replace(self, rules=replace(self.rules, coords=coords), dropout=dropout)

    def of_part(self, part) -> "GradientStep":
        """The steps for a part of each block, with its coordinates."""
        rules, dropout = self.rules.shifted(part * self.config.queries), self.dropout
        if dropout is not None:
            dropout = replace(dropout, coords=rules.coords)
        return replace(self, rules=rules, dropout=dropout)

    @cute.jit
    def mma_part(
        self, part, m_block, states, statistics: ColumnStatistics, masked: cutlass.Constexpr
    ):
        """One part of a block: S, P, dP, dV, dS and dK.
        Nothing waits for dV and dK. The rules and the statistics are the part's."""
        config, mmas, regs, pipelines = self.config, self.mmas, self.regs, self.pipelines
        q_state, do_state, ds_state = states
        k = regs.k[None, None, None, self.k_stage]
        acc_S = self.issue_scores(k, regs.q[None, None, None, part, q_state.index])
        lses = statistics.reader(LSE)
        # While the tensor cores compute S.
        masks = None
        if cutlass.const_expr(self.dropout is not None):
            masks = self.dropout.masks(m_block, cute.size(acc_S) // 2, config.q_splits)
        warpgroup.wait_group(0)
        p = as_rows_and_columns(acc_S)
        factors = self.rules.apply(p, m_block, masked)
        statistics.exponentiate(p, lses, self.rules.unit * LOG2_E)
        rP = self.rounded(acc_S)
        deltas = statistics.reader(DELTA)
        # V comes after K and the first Q; from the second block on it is there.
        pipelines.v.consumer_wait(self.v_state)
        pipelines.d_out.consumer_wait(do_state)
        acc_dP = self.issue_scores(regs.v, regs.d_out[None, None, None, part, do_state.index])
        kept_p = rP
        if cutlass.const_expr(masks is not None):
            # P becomes negative where it is dropped.
            kept_p = cute.make_rmem_tensor_like(rP)
            split_probabilities(rP, kept_p, masks)
        d_out_t = regs.d_out_t[None, None, None, part, do_state.index]
        qt = regs.qt[None, None, None, part, q_state.index]
        # The dQ warpgroup has read the dS that was here. So has the other MMA warpgroup, with
        # shared keys, and P too: the two have met in the step between.
        pipelines.ds.producer_acquire(ds_state)
        if cutlass.const_expr(config.warpgroups_share_keys):
            self.write(kept_p, self.smem.p, part, ds_state)
            warpgroup.wait_group(0)
        else:
            wgmma.issue(mmas.dv.op, regs.acc_dV, as_operand_a(kept_p), d_out_t, accumulate=True)
            warpgroup.wait_group(1)
        widen_words(rP, acc_S)
        p, dP = as_rows_and_columns(acc_S), as_rows_and_columns(acc_dP)
        statistics.differentiate(p, dP, deltas, factors, self.dropout is not None)
        rdS = self.rounded(acc_dP)
        self.write(rdS, self.smem.ds, part, ds_state)
        if cutlass.const_expr(not config.warpgroups_share_keys):
            # Before the fence, which waits until dS is in shared memory.
            wgmma.issue(mmas.dk.op, regs.acc_dK, as_operand_a(rdS), qt, accumulate=True)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            pipelines.ds.producer_commit(ds_state)
        if cutlass.const_expr(config.warpgroups_share_keys):
            self.barrier.arrive_and_wait()
            p_operand = regs.p[None, None, None, ds_state.index]
            ds_operand = regs.ds[None, None, None, ds_state.index]
            wgmma.issue(mmas.dv.op, regs.acc_dV, p_operand, d_out_t, accumulate=True)
            wgmma.issue(mmas.dk.op, regs.acc_dK, ds_operand, qt, accumulate=True)

    def statistics(self, q_state) -> ColumnStatistics:
        """The statistics of a block's queries."""
        coords, numbers = self.rules.coords, self.smem.statistics[None, None, q_state.index]
        columns = coords.column, len(coords.column_steps)
        return ColumnStatistics(numbers, *columns, self.config.stats_vector)

    def issue_scores(self, a, b) -> cute.Tensor:
        """Start a product with the shape of this group's scores."""
        shape = self.mmas.scores.partition_shape_C((ROWS, self.config.queries))
        acc = cute.make_rmem_tensor(shape, Float32)
        wgmma.issue(self.mmas.scores.op, acc, a, b, accumulate=False)
        return acc

    def rounded(self, acc: cute.Tensor) -> cute.Tensor:
        """An accumulator in 16 bits."""
        rounded = cute.make_rmem_tensor_like(acc, self.smem.q.element_type)
        convert_words(acc, rounded)
        return rounded

    @cute.jit
    def write(self, fragment: cute.Tensor, buffer: cute.Tensor, part, state):
        """Write this group's part of P^T or dS^T to shared memory."""
        slab, columns = (0, self.group) if self.config.warpgroups_share_keys else (self.group, part)
        slab_buffer = buffer[None, None, state.index * self.config.slabs + slab]
        target = cute.local_tile(slab_buffer, (ROWS, self.config.queries), (0, columns))
        write_fragment(fragment, self.mmas.scores, self.thread, target)
