"""The backward kernel's loop over query blocks, pipelined from step to step.

As `fa3.primitives.gradient_step`, but a step starts S of its own block before dQ and dK of the
block before: then the exponentials of a block run under these two products. Between steps live dS
in registers, an operand of dK, and dS in shared memory, that of dQ.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from fa3.primitives import wgmma
from fa3.primitives.fragments import as_operand_a, as_rows_and_columns, convert
from fa3.primitives.gradient_step import GradientStep
from fa3.primitives.score_gradients import DELTA, LSE
from fa3.primitives.softmax import LOG2_E
from fa3.primitives.wgmma import ROWS


@dataclass(frozen=True)
class PipelinedStep(GradientStep):
    """The steps of one tile of keys and one query head, for one MMA warpgroup."""

    @cute.jit
    def all(self, blocks, q_state, do_state):
        """All query blocks, upwards: there is one at least."""
        shape = self.mmas.scores.partition_shape_C((ROWS, self.config.queries))
        rdS = cute.make_rmem_tensor(shape, self.smem.q.element_type)
        user, stages = pipeline.PipelineUserType.Consumer, self.config.ds_stages
        ds_state = pipeline.make_pipeline_state(user, stages)
        self.pipelines.q.consumer_wait(q_state)
        acc_S = self.issue_s(q_state)
        lses = self.statistics(q_state).all(LSE)
        warpgroup.wait_group(0)
        self.exponentiate(acc_S, lses, blocks.begin, blocks, q_state)
        do_state = self.differentiate(acc_S, rdS, blocks.begin, q_state, do_state, ds_state)
        m_block = blocks.begin + 1
        while m_block < blocks.end:
            q_before, ds_before = q_state.clone(), ds_state.clone()
            q_state.advance()
            ds_state.advance()
            self.pipelines.q.consumer_wait(q_state)
            acc_S = self.issue_s(q_state)
            lses = self.statistics(q_state).all(LSE)
            acc_dQ = self.issue_gradients(rdS, q_before, ds_before)
            warpgroup.wait_group(2)
            if self.exponentiate(acc_S, lses, m_block, blocks, q_state):
                # This Q has landed: it is waited for again since a branch on the exponentials keeps
                # ptxas from sinking them below the wait for dQ. With dropout the warp waits for
                # itself instead, which takes no register.
                if cutlass.const_expr(self.dropout is None):
                    self.pipelines.q.consumer_wait(q_state)
                else:
                    cute.arch.sync_warp()
            self.finish_gradients(acc_dQ, m_block - 1, q_before)
            do_state = self.differentiate(acc_S, rdS, m_block, q_state, do_state, ds_state)
            m_block += 1
        acc_dQ = self.issue_gradients(rdS, q_state, ds_state)
        self.finish_gradients(acc_dQ, m_block - 1, q_state)
        q_state.advance()
        # The next head begins with the first stage of dS, which others may still read.
        self.barrier.arrive_and_wait()
        return q_state, do_state

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor, lses, m_block, blocks, q_state):
        """P^T from S^T, in place.

        Returns:
            whether none is negative, which is so, but is known only when all are computed.
        """
        p = as_rows_and_columns(acc_S)
        is_masked = m_block < blocks.full_begin
        if cutlass.const_expr(self.rules.mask.left):
            is_masked = is_masked or m_block >= blocks.full_end
        if is_masked:
            self.rules.hide(p, m_block)
        self.statistics(q_state).exponentiate(p, lses, self.rules.unit * LOG2_E)
        signs = Int32(0)
        for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
                signs |= p[r, c].bitcast(Int32)
        return signs >= 0

    @cute.jit
    def differentiate(
        self, acc_S: cute.Tensor, rdS: cute.Tensor, m_block, q_state, do_state, ds_state
    ):
        """Of P^T: dP and dV, and dS^T in registers and in shared memory. Nothing is left running.

        Returns:
            the state of dO's next block.
        """
        pipelines, statistics = self.pipelines, self.statistics(q_state)
        pipelines.d_out.consumer_wait(do_state)
        acc_dP = self.issue_dp(do_state)
        rP = self.rounded_p(acc_S, m_block)
        d_out_t = self.regs.d_out_t[None, None, None, do_state.index]
        wgmma.issue(self.mmas.dv.op, self.regs.acc_dV, as_operand_a(rP), d_out_t, accumulate=True)
        deltas = statistics.all(DELTA)
        warpgroup.wait_group(1)
        p, dP = as_rows_and_columns(acc_S), as_rows_and_columns(acc_dP)
        statistics.differentiate(p, dP, deltas, (), self.dropout is not None)
        convert(acc_S, rdS)
        self.write(rdS, self.smem.ds, ds_state)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.wait_group(0)
        pipelines.d_out.consumer_release(do_state)
        do_state.advance()
        return do_state

    @cute.jit
    def issue_gradients(self, rdS: cute.Tensor, q_state, ds_state) -> cute.Tensor:
        """Start dQ, into a fresh accumulator, and dK, once all warpgroups have written dS."""
        self.barrier.arrive_and_wait()
        acc_dQ = self.issue_dq(ds_state)
        qt = self.regs.qt[None, None, None, q_state.index]
        wgmma.issue(self.mmas.dk.op, self.regs.acc_dK, as_operand_a(rdS), qt, accumulate=True)
        return acc_dQ

    @cute.jit
    def finish_gradients(self, acc_dQ: cute.Tensor, m_block, q_state):
        """Add dQ of a block while dK runs, and give its Q back."""
        warpgroup.wait_group(1)
        self.add(acc_dQ, m_block)
        warpgroup.wait_group(0)
        self.pipelines.q.consumer_release(q_state)
