"""One warpgroup's attention: 64 query rows against key blocks, from the last to the first.

In the main loop S = Q K^T of the next block is started, then O += P V of the block before; the
softmax of S runs while P V is still in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.primitives.fragments import as_operand_a, as_rows_and_columns, convert
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import OnlineSoftmax, Reference
from fa3.primitives.wgmma import ROWS
from fa3.problem import AttentionSpec


class AttentionKernel:
    """What kernels of attention derive from their `spec`."""

    spec: AttentionSpec

    @property
    def is_storable(self) -> bool:
        """A function of the user's may use names that only its module knows."""
        return not self.spec.has_user_functions

    @property
    def dtype(self):
        return ELEMENT_TYPES[self.spec.dtype]

    @property
    def columns(self) -> int:
        """Columns of Q and K in shared memory."""
        return padded(self.spec.head_dim)

    @property
    def columns_v(self) -> int:
        """Columns of V and O in shared memory and registers."""
        return padded(self.spec.head_dim_v)


class Fragments(NamedTuple):
    """What one thread holds: shared-memory descriptors of Q, K and V^T, and registers."""

    q: cute.Tensor
    k: cute.Tensor
    vt: cute.Tensor
    acc_O: cute.Tensor
    p: cute.Tensor


class Mmas(NamedTuple):
    """S = Q K^T with both operands in shared memory; O += P V with P in registers."""

    qk: cute.TiledMma
    pv: cute.TiledMma

    @classmethod
    def of(cls, dtype, tile_n: int, columns_v: int) -> "Mmas":
        """The products of 64 rows with blocks of `tile_n` keys."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        types, shape_v = (dtype, dtype), (ROWS, columns_v)
        qk = sm90.make_trivial_tiled_mma(
            *types, k_major, k_major, Float32, (1, 1, 1), (ROWS, tile_n)
        )
        pv = sm90.make_trivial_tiled_mma(
            *types, k_major, mn_major, Float32, (1, 1, 1), shape_v, warpgroup.OperandSource.RMEM
        )
        return cls(qk, pv)

    def fragments(self, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor) -> Fragments:
        """Register accumulators, and the operand descriptors of buffers (rows, columns, stages)."""
        tile_n, columns_v, stages = (cute.size(sV, mode=[i]) for i in range(3))
        vt_layout = cute.make_ordered_layout((columns_v, tile_n, stages), order=(1, 0, 2))
        sVt = cute.composition(sV, vt_layout)
        shape_S = self.qk.partition_shape_C((ROWS, tile_n))
        acc_O = cute.make_rmem_tensor(self.pv.partition_shape_C((ROWS, columns_v)), Float32)
        return Fragments(
            self.qk.make_fragment_A(self.qk.get_slice(0).partition_A(sQ)),
            self.qk.make_fragment_B(self.qk.get_slice(0).partition_B(sK)),
            self.pv.make_fragment_B(self.pv.get_slice(0).partition_B(sVt)),
            acc_O,
            cute.make_rmem_tensor(shape_S, sQ.element_type),
        )


@dataclass(frozen=True)
class Attention:
    """The attention of one tile's rows.

    Fields:
        q: the fragment of the tile's Q.
        pipeline_k, pipeline_v: bring blocks of K and V.
        rules: what happens to scores before the softmax.
        turns: when this warpgroup may issue WGMMAs.
    """

    mmas: Mmas
    regs: Fragments
    q: cute.Tensor
    pipeline_k: object
    pipeline_v: object
    softmax: OnlineSoftmax
    rules: object
    turns: object

    def wait(self, pipe, state):
        """Wait for a block of K or V."""
        pipe.consumer_wait(state)

    def issue_qk(self, k_state) -> cute.Tensor:
        """Start S = Q K^T into a fresh accumulator: an old one would stay alive as its input."""
        acc_S = cute.make_rmem_tensor(self.regs.p.layout, Float32)
        k = self.regs.k[None, None, None, k_state.index]
        wgmma.issue(self.mmas.qk.op, acc_S, self.q, k, accumulate=False)
        return acc_S

    def issue_pv(self, v_state):
        """Start O += P V."""
        p, vt = as_operand_a(self.regs.p), self.regs.vt[None, None, None, v_state.index]
        wgmma.issue(self.mmas.pv.op, self.regs.acc_O, p, vt, accumulate=True)

    @property
    def guesses_beside_biases(self) -> bool:
        """Whether a reference is taken from scores without their biases."""
        return self.softmax.reference is Reference.FIXED and bool(self.rules.scores)

    @cute.jit
    def first(self, n_block, k_state):
        """S = Q K^T and softmax of a tile's first block, which is always masked."""
        self.wait(self.pipeline_k, k_state)
        acc_S = self.issue_qk(k_state)
        warpgroup.wait_group(0)
        self.pipeline_k.consumer_release(k_state)
        k_state.advance()
        scores = as_rows_and_columns(acc_S)
        if cutlass.const_expr(self.guesses_beside_biases):
            # A guess for all blocks: this one may be far from where biases are small.
            self.rules.hide(scores, n_block)
            self.softmax.start(scores, None, self.sees(n_block))
            shifts = self.rules.apply(scores, n_block, masked=True)
        else:
            shifts = self.rules.apply(scores, n_block, masked=True)
            self.softmax.start(scores, shifts, self.sees(n_block))
        self.softmax.exponentiate(scores, True, shifts)
        convert(acc_S, self.regs.p)
        self.regs.acc_O.fill(0.0)
        return k_state

    @cute.jit
    def rest(self, blocks, k_state, v_state):
        """All blocks of a tile before its first one, of which P V is still to come in the end.

        Args:
            blocks: `fa3.scores.masks.Blocks`, of which the one before `end` is done.
        """
        n_block = blocks.end - 1
        while n_block > blocks.full_end:
            n_block -= 1
            k_state, v_state = self.next(n_block, k_state, v_state, masked=True)
        while n_block > blocks.full_begin:
            n_block -= 1
            k_state, v_state = self.next(n_block, k_state, v_state, masked=False)
        if cutlass.const_expr(self.rules.mask.left):
            while n_block > blocks.begin:
                n_block -= 1
                k_state, v_state = self.next(n_block, k_state, v_state, masked=True)
        return k_state, v_state

    @cute.jit
    def skip(self, count, k_state, v_state):
        """Let blocks go by that other warpgroups work on, in which no row of this one sees a key.

        Takes as many turns.
        """
        for _ in cutlass.range(count, unroll=1):
            self.wait(self.pipeline_k, k_state)
            self.turns.wait()
            self.turns.pass_on()
            self.pipeline_k.consumer_release(k_state)
            self.wait(self.pipeline_v, v_state)
            self.pipeline_v.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
        return k_state, v_state

    @cute.jit
    def next(self, n_block, k_state, v_state, masked: cutlass.Constexpr):
        """S = Q K[n_block]^T beside O += P V[n_block + 1], then the softmax of S."""
        self.wait(self.pipeline_k, k_state)
        self.turns.wait()
        acc_S = self.issue_qk(k_state)
        self.wait(self.pipeline_v, v_state)
        self.issue_pv(v_state)
        self.turns.pass_on()
        warpgroup.wait_group(1)
        self.pipeline_k.consumer_release(k_state)
        scores = as_rows_and_columns(acc_S)
        shifts = self.rules.apply(scores, n_block, masked)
        if cutlass.const_expr(self.softmax.follows):
            acc_O = as_rows_and_columns(self.regs.acc_O)
            self.softmax.follow(scores, acc_O, lambda: warpgroup.wait_group(0), shifts)
        elif cutlass.const_expr(self.may_lack_reference(masked)):
            self.softmax.adopt(scores, shifts, self.sees(n_block))
        may_hide = masked or self.rules.may_hide or self.may_lack_reference(masked)
        self.softmax.exponentiate(scores, may_hide, shifts)
        # V has landed long ago. The branch of this wait keeps ptxas from hoisting the wait for
        # P V above the exponentials, which are meant to run under it. Where nothing before it
        # branched, it must depend on them.
        if self.softmax.has_summed():
            self.pipeline_v.consumer_wait(v_state)
        warpgroup.wait_group(0)
        self.pipeline_v.consumer_release(v_state)
        convert(acc_S, self.regs.p)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def last(self, v_state):
        """O += P V of the tile's last block."""
        self.wait(self.pipeline_v, v_state)
        self.issue_pv(v_state)
        warpgroup.wait_group(0)
        self.pipeline_v.consumer_release(v_state)
        v_state.advance()
        return v_state

    def sees(self, n_block) -> Callable | None:
        """Whether row r sees a key of a block, for a guess by the first ones.

        None if nothing is guessed, or a row may see later ones alone.
        """
        rules = self.rules
        if self.softmax.reference is not Reference.FIXED or rules.mask.left:
            return None

        def sees_first_key(r: int):
            _, end = rules.mask.key_range(rules.coords.query(r), rules.sequence)
            return end > n_block * rules.coords.tile_n

        return sees_first_key

    def may_lack_reference(self, masked: bool) -> bool:
        """Whether a row may meet its first visible key in a later block than the tile's first."""
        mask = self.rules.mask
        is_fixed = self.softmax.reference is Reference.FIXED
        return is_fixed and ((masked and mask.right) or bool(mask.templates))

    @cute.jit
    def may_have_failed(self, has_sinks: cutlass.Constexpr) -> cutlass.Boolean:
        """Whether a row of this warp may need to be computed again, once all are finished."""
        acc_O = as_rows_and_columns(self.regs.acc_O)
        return cute.arch.vote_any_sync(not self.softmax.is_sure(acc_O, has_sinks))

    @cute.jit
    def failed_rows(self, has_sinks: cutlass.Constexpr) -> tuple:
        """For each row of this thread, once all are finished, whether its reference failed."""
        rules, acc_O = self.rules, as_rows_and_columns(self.regs.acc_O)
        rows = range(cute.size(self.softmax.row_sum))
        return tuple(
            rules.coords.query(r) < rules.sequence.seqlen_q
            and self.softmax.failed(acc_O[r, None], r, has_sinks)
            for r in rows
        )
