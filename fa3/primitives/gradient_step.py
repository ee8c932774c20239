"""The backward kernel's loop over query blocks: what a tile of keys gives and gets in each step.

Q, dO and the rows' statistics come from shared memory, where the producer's TMA wrote them; dK and
dV stay in registers for the epilogue, and dQ is added to the sums in global memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from fa3.primitives import wgmma
from fa3.primitives.fragments import (
    as_operand_a,
    as_rows_and_columns,
    convert,
    convert_positive,
)
from fa3.primitives.gradient_mmas import GradientMmas, GradientOperands
from fa3.primitives.query_tiles import QueryGradients
from fa3.primitives.score_gradients import DELTA, LSE, ColumnStatistics
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.wgmma import ROWS


@dataclass(frozen=True)
class GradientStep:
    """The steps of one tile of keys and one query head, for one MMA warpgroup.

    Fields:
        config: a `fa3.kernels.backward_launch.BackwardConfig`.
        smem, pipelines: the kernel's buffers, and what delivers Q and dO into them.
        sums: receive dQ.
        rules: score functions and masks; their coordinates name query head and batch.
        barrier: of all MMA warpgroups.
        dropout: a `fa3.primitives.dropout.TransposedDropout`, or None.
    """

    config: object
    mmas: GradientMmas
    regs: GradientOperands
    smem: object
    pipelines: object
    sums: QueryGradients
    rules: object
    thread: Int32
    group: Int32
    barrier: object
    dropout: object | None

    @cute.jit
    def all(self, blocks, q_state, do_state):
        """All query blocks, upwards."""
        m_block = blocks.begin
        while m_block < blocks.full_begin:
            q_state, do_state = self.next(m_block, q_state, do_state, masked=True)
            m_block += 1
        while m_block < blocks.full_end:
            q_state, do_state = self.next(m_block, q_state, do_state, masked=False)
            m_block += 1
        if cutlass.const_expr(self.rules.mask.left):
            while m_block < blocks.end:
                q_state, do_state = self.next(m_block, q_state, do_state, masked=True)
                m_block += 1
        return q_state, do_state

    @cute.jit
    def next(self, m_block, q_state, do_state, masked: cutlass.Constexpr):
        """One query block: S and dP, then dV, dQ and dK."""
        config, mmas, regs, pipelines = self.config, self.mmas, self.regs, self.pipelines
        pipelines.q.consumer_wait(q_state)
        statistics = self.statistics(q_state)
        acc_S = self.issue_s(q_state)
        lses = statistics.all(LSE)
        pipelines.d_out.consumer_wait(do_state)
        acc_dP = self.issue_dp(do_state)
        warpgroup.wait_group(1)
        p, dP = as_rows_and_columns(acc_S), as_rows_and_columns(acc_dP)
        factors = self.rules.apply(p, m_block, masked)
        statistics.exponentiate(p, lses, self.rules.unit * LOG2_E)
        rP = self.rounded_p(acc_S, m_block)
        deltas = statistics.all(DELTA)
        d_out_t = regs.d_out_t[None, None, None, do_state.index]
        if cutlass.const_expr(config.shares_keys):
            self.write(rP, self.smem.p, q_state)
            warpgroup.wait_group(0)
        else:
            wgmma.issue(mmas.dv.op, regs.acc_dV, as_operand_a(rP), d_out_t, accumulate=True)
            warpgroup.wait_group(1)
        statistics.differentiate(p, dP, deltas, factors, self.dropout is not None)
        rdS = self.rounded(acc_S)
        self.write(rdS, self.smem.ds, q_state)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier.arrive_and_wait()
        of_ds = as_operand_a(rdS)
        if cutlass.const_expr(config.shares_keys):
            of_p = regs.p[None, None, None, q_state.index]
            of_ds = regs.ds[None, None, None, q_state.index]
            wgmma.issue(mmas.dv.op, regs.acc_dV, of_p, d_out_t, accumulate=True)
        acc_dQ = self.issue_dq(q_state)
        qt = regs.qt[None, None, None, q_state.index]
        wgmma.issue(mmas.dk.op, regs.acc_dK, of_ds, qt, accumulate=True)
        warpgroup.wait_group(1)
        pipelines.d_out.consumer_release(do_state)
        self.add(acc_dQ, m_block)
        warpgroup.wait_group(0)
        pipelines.q.consumer_release(q_state)
        q_state.advance()
        do_state.advance()
        return q_state, do_state

    def statistics(self, q_state) -> ColumnStatistics:
        """What is known of the queries of a block."""
        coords, numbers = self.rules.coords, self.smem.statistics[None, None, q_state.index]
        columns = coords.column, len(coords.column_steps)
        return ColumnStatistics(numbers, *columns, self.config.statistics_at_once)

    def add(self, acc_dQ: cute.Tensor, m_block):
        """Add this group's piece of a block's dQ to the sums."""
        tile = m_block, self.rules.coords.head, self.rules.coords.batch
        pieces = self.config.pieces(cute.size(self.smem.k, mode=[1]))
        self.sums.add(pieces, acc_dQ, self.thread, self.group, tile, self.smem.sums)

    def issue_s(self, q_state) -> cute.Tensor:
        """Start S^T = K Q^T into a fresh accumulator."""
        return self.issue_scores(self.regs.k, self.regs.q[None, None, None, q_state.index])

    def issue_dp(self, do_state) -> cute.Tensor:
        """Start dP^T = V dO^T into a fresh accumulator."""
        return self.issue_scores(self.regs.v, self.regs.d_out[None, None, None, do_state.index])

    def issue_scores(self, a, b) -> cute.Tensor:
        """Start a product with the shape of this group's scores."""
        shape = self.mmas.scores.partition_shape_C((ROWS, self.config.queries))
        acc = cute.make_rmem_tensor(shape, Float32)
        wgmma.issue(self.mmas.scores.op, acc, a, b, accumulate=False)
        return acc

    def issue_dq(self, ds_state) -> cute.Tensor:
        """Start this group's piece of dQ = dS K into a fresh accumulator."""
        width = self.config.pieces(cute.size(self.smem.k, mode=[1])).width
        acc = cute.make_rmem_tensor(self.mmas.dq.partition_shape_C((ROWS, width)), Float32)
        dst = self.regs.dst[None, None, None, ds_state.index]
        wgmma.issue(self.mmas.dq.op, acc, dst, self.regs.kt, accumulate=False)
        return acc

    def rounded_p(self, acc_P: cute.Tensor, m_block) -> cute.Tensor:
        """P in 16 bits for dV. With dropout 0 where it is dropped; and there P becomes negative."""
        if self.dropout is None:
            return self.rounded(acc_P)
        self.dropout.mark(acc_P, m_block)
        rounded = cute.make_rmem_tensor_like(acc_P, self.smem.q.element_type)
        convert_positive(acc_P, rounded)
        return rounded

    def rounded(self, acc: cute.Tensor) -> cute.Tensor:
        """An accumulator in 16 bits."""
        rounded = cute.make_rmem_tensor_like(acc, self.smem.q.element_type)
        convert(acc, rounded)
        return rounded

    @cute.jit
    def write(self, fragment: cute.Tensor, buffer: cute.Tensor, state):
        """Write this group's part of P^T or dS^T to shared memory."""
        if cutlass.const_expr(self.config.shares_keys):
            shape = ROWS, self.config.queries
            part = cute.local_tile(buffer[None, None, state.index], shape, (0, self.group))
        else:
            part = buffer[None, None, state.index * self.config.groups + self.group]
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), fragment.element_type)
        copy = cute.make_tiled_copy_C(atom, self.mmas.scores).get_slice(self.thread)
        cute.copy(atom, copy.retile(fragment), copy.partition_D(part))
