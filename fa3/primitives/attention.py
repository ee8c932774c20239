"""The loops over key blocks, of consumers and producers, last block first.

The forward and the decode kernel run both. Each consumer warpgroup has 64 query rows
(`Attention`). Q, K and V come from shared memory, where the producer's TMA or cp.async wrote them;
O and the row sums stay in registers for the epilogue. The main loop starts S = Q K^T of the next
block, then O += P V of the previous one. The softmax of S runs while P V is still in flight.

Producers load K and V in the order in which consumers use them, in the same three steps: `first`,
`rest`, `last` (`BlockStream`). A producer may load other data in between. `PingPong` makes
warpgroups issue WGMMAs in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.fragments import (
    BYTES_OF_WORD,
    as_operand_a,
    as_rows_and_columns,
    convert,
    words_as_operand_a,
)
from fa3.primitives.packed_rows import clear_rows
from fa3.primitives.softmax import OnlineSoftmax, RowMax, sum_of_squares
from fa3.primitives.wgmma import ROWS, WARPGROUP


class Fragments(NamedTuple):
    """One thread's operands: descriptors q, k and vt; registers acc_O and p.
    Where Q K^T takes Q from registers, q is these. In FP8, p is in words of four values: single
    values would be packed at each use."""

    q: cute.Tensor
    k: cute.Tensor
    vt: cute.Tensor
    acc_O: cute.Tensor
    p: cute.Tensor


class Mmas(NamedTuple):
    """The WGMMAs of Q K^T and P V, with P in registers."""

    qk: cute.TiledMma
    pv: cute.TiledMma

    @classmethod
    def of(
        cls, dtype, tile_n: int, columns_pv: int, source_q=warpgroup.OperandSource.SMEM
    ) -> "Mmas":
        """The WGMMAs of 64 rows and `tile_n` keys; `columns_pv` of V."""
        k_major = OperandMajorMode.K
        major_v = k_major if dtype.width == 8 else OperandMajorMode.MN
        types, shape_v = (dtype, dtype), (ROWS, columns_pv)
        qk = sm90.make_trivial_tiled_mma(
            *types, k_major, k_major, Float32, (1, 1, 1), (ROWS, tile_n), source_q
        )
        pv = sm90.make_trivial_tiled_mma(
            *types, k_major, major_v, Float32, (1, 1, 1), shape_v, warpgroup.OperandSource.RMEM
        )
        return cls(qk, pv)

    def fragments(self, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor) -> Fragments:
        """Registers, and descriptors of the shared-memory buffers (rows, columns, stages); in FP8
        the last is V^T."""
        sVt, tile_n = sV, cute.size(sK, mode=[0])
        if sV.element_type.width == 8:
            p = cute.make_rmem_tensor(tile_n // BYTES_OF_WORD // 2, Uint32)
        else:
            _, columns_v, stages = (cute.size(sV, mode=[i]) for i in range(3))
            vt_layout = cute.make_ordered_layout((columns_v, tile_n, stages), order=(1, 0, 2))
            sVt = cute.composition(sV, vt_layout)
            p = cute.make_rmem_tensor(self.shape_S(tile_n), sV.element_type)
        shape_O = self.pv.partition_shape_C((ROWS, cute.size(sVt, mode=[0])))
        if self.qk.op.a_src == warpgroup.OperandSource.RMEM:
            shape_q = self.qk.partition_shape_A((ROWS, cute.size(sQ, mode=[1])))
            q = cute.make_rmem_tensor(shape_q, sQ.element_type)
        else:
            q = self.qk.make_fragment_A(self.qk.get_slice(0).partition_A(sQ))
        return Fragments(
            q,
            self.qk.make_fragment_B(self.qk.get_slice(0).partition_B(sK)),
            self.pv.make_fragment_B(self.pv.get_slice(0).partition_B(sVt)),
            cute.make_rmem_tensor(shape_O, Float32),
            p,
        )

    def shape_S(self, tile_n: int) -> tuple:
        """The shape of a thread's share of S."""
        return self.qk.partition_shape_C((ROWS, tile_n))


@dataclass(frozen=True)
class Attention:
    """The attention of one tile's rows."""

    mmas: Mmas
    regs: Fragments
    q: cute.Tensor  # the descriptor of this warpgroup's rows of Q
    # pipeline_k, pipeline_v: deliver blocks of K and V.
    pipeline_k: object
    pipeline_v: object
    softmax: OnlineSoftmax
    rules: object  # score functions and masks, applied before the softmax
    turns: object  # say when this warpgroup may issue WGMMAs
    dropout: object | None = None  # a `fa3.primitives.dropout.TileDropout`, or None
    scale_v: Float32 | None = None  # what the values are multiplied by; None for 1

    overlaps: ClassVar[bool] = True  # whether P V runs under the softmax of the next block
    neighbours: ClassVar[int] = 2  # how many columns of O next to each other a thread has

    def wait(self, pipe, state):
        """Wait for a block of K or V."""
        pipe.consumer_wait(state)

    def wait_for_products(self, pending: int):
        """Wait for all groups of WGMMAs but the last `pending`."""
        warpgroup.wait_group(pending)

    @property
    def parts(self) -> int:
        """Parts of V's columns; P V is computed for each in turn."""
        return 1

    def issue_qk(self, k_state) -> cute.Tensor:
        """Start S = Q K^T; an old accumulator would stay live."""
        acc_S = cute.make_rmem_tensor(self.mmas.shape_S(self.rules.coords.width), Float32)
        k = self.regs.k[None, None, None, k_state.index]
        wgmma.issue(self.mmas.qk.op, acc_S, self.q, k, accumulate=False)
        return acc_S

    def operand_p(self) -> cute.Tensor:
        """P as the A operand of P V."""
        p = self.regs.p
        return words_as_operand_a(p) if p.element_type is Uint32 else as_operand_a(p)

    def issue_pv(self, v_state, part: int):
        """Start O += P V; return what `add` adds to O."""
        vt = self.regs.vt[None, None, None, v_state.index]
        wgmma.issue(self.mmas.pv.op, self.regs.acc_O, self.operand_p(), vt, accumulate=True)

    def add(self, fresh, part: int, v_state=None) -> None:
        """Add P V of a part to O, unless the WGMMA did.
        The block loop gives V's state."""

    @property
    def accs(self) -> tuple:
        """The sums of O, which are rescaled when the row max grows."""
        return (self.regs.acc_O,)

    def update_row_max(self, scores: cute.Tensor, shifts: tuple | None, n_block, masked: bool):
        """Adapt row maxima to a block, and rescale O."""
        if self.softmax.online_max:
            accs = [as_rows_and_columns(acc) for acc in self.accs]
            self.softmax.update_row_max(scores, accs, lambda: self.wait_for_products(0), shifts)
        elif self.may_lack_row_max(masked):
            self.softmax.init_late_rows(scores, shifts, self.sees(n_block))

    @cute.jit
    def first(self, n_block, k_state):
        """S and softmax of the first block, always masked; no P V."""
        self.wait(self.pipeline_k, k_state)
        acc_S = self.issue_qk(k_state)
        self.wait_for_products(0)
        self.pipeline_k.consumer_release(k_state)
        k_state.advance()
        scores = as_rows_and_columns(acc_S)
        if cutlass.const_expr(self.softmax.kind is RowMax.FIXED and bool(self.rules.scores)):
            # The guess serves all blocks, but biases may be large in this one and small elsewhere.
            self.rules.hide(scores, n_block)
            self.softmax.start(scores, None, self.sees(n_block))
            shifts = self.rules.apply(scores, n_block, masked=True)
        else:
            shifts = self.rules.apply(scores, n_block, masked=True)
            self.softmax.start(scores, shifts, self.sees(n_block))
        self.softmax.exponentiate(scores, True, shifts)
        self.write_p(acc_S, self.draw(acc_S, n_block))
        for acc in self.accs:
            acc.fill(0.0)
        return k_state

    @cute.jit
    def clear_past_end(self, sV: cute.Tensor, n_block, v_state, thread, meet: cutlass.Constexpr):
        """Zero rows of V past the sequence's end, as caches may have.
        P is 0 there, but 0 * NaN is not. Every warpgroup does so, and its warps `meet`."""
        tile_n = self.rules.coords.width
        num_keys = self.rules.sequence.seqlen_k - n_block * tile_n
        if num_keys < tile_n:
            self.wait(self.pipeline_v, v_state)
            clear_rows(sV[None, None, v_state.index], num_keys, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            meet()

    @cute.jit
    def rest(self, blocks, k_state, v_state):
        """Blocks from `blocks.end - 2` down; `last` does the last P V.
        `blocks` are `fa3.scores.masks.Blocks`; `first` has done block `end - 1`."""
        if cutlass.const_expr(not self.overlaps):
            v_state = self.sum_up(v_state)
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
        """Skip blocks where no row sees a key, but take their turns."""
        for _ in cutlass.range(count, unroll=1):
            self.wait(self.pipeline_k, k_state)
            self.turns.wait()
            self.turns.signal_next()
            self.pipeline_k.consumer_release(k_state)
            self.wait(self.pipeline_v, v_state)
            self.pipeline_v.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
        return k_state, v_state

    @cute.jit
    def next(self, n_block, k_state, v_state, masked: cutlass.Constexpr):
        """`S = Q K[n_block]^T` and `O += P V[n_block + 1]`; softmax of S.
        Without overlap P V[n_block] follows instead."""
        self.wait(self.pipeline_k, k_state)
        self.turns.wait()
        acc_S = self.issue_qk(k_state)
        fresh = None
        if cutlass.const_expr(self.overlaps):
            self.wait(self.pipeline_v, v_state)
            fresh = self.issue_pv(v_state, 0)
        self.turns.signal_next()
        self.wait_for_products(1 if self.overlaps else 0)
        self.pipeline_k.consumer_release(k_state)
        scores = as_rows_and_columns(acc_S)
        shifts = self.rules.apply(scores, n_block, masked)
        self.update_row_max(scores, shifts, n_block, masked)
        may_hide = masked or self.rules.may_hide or self.may_lack_row_max(masked)
        sums = self.softmax.exponentiate(scores, may_hide, shifts)
        if cutlass.const_expr(self.softmax.kind is RowMax.RISING):
            acc_O, ready = as_rows_and_columns(self.regs.acc_O), lambda: self.wait_for_products(0)
            self.softmax.fit(scores, sums, acc_O, ready)
        drawn = self.draw(acc_S, n_block)
        if cutlass.const_expr(self.overlaps):
            # V has already landed; this wait is here for its branch. The branch keeps ptxas from
            # hoisting the wait for P V above the exponentials, which should overlap with P V. If
            # nothing above branches, the condition must depend on the exponentials.
            if self.softmax.has_summed():
                self.pipeline_v.consumer_wait(v_state)
            self.wait_for_products(0)
            self.add(fresh, 0, v_state)
            self.pipeline_v.consumer_release(v_state)
        self.write_p(acc_S, drawn)
        k_state.advance()
        if cutlass.const_expr(self.overlaps):
            v_state.advance()
        else:
            v_state = self.sum_up(v_state)
        return k_state, v_state

    @cute.jit
    def last(self, v_state):
        """O += P V of the last block, unless it is done."""
        if cutlass.const_expr(self.overlaps):
            v_state = self.sum_up(v_state)
        return v_state

    @cute.jit
    def sum_up(self, v_state):
        """O += P V of a block, part by part."""
        self.wait(self.pipeline_v, v_state)
        for part in cutlass.range_constexpr(self.parts):
            fresh = self.issue_pv(v_state, part)
            self.wait_for_products(0)
            self.add(fresh, part)
            if cutlass.const_expr(part + 1 < self.parts):
                # V has landed; the branch keeps ptxas from adding up after the next WGMMAs have
                # begun, which takes registers for both parts.
                self.wait(self.pipeline_v, v_state)
        self.pipeline_v.consumer_release(v_state)
        v_state.advance()
        return v_state

    def draw(self, acc_P: cute.Tensor, n_block):
        """Draw what is kept of a block's P; None without dropout.
        The row sums have all of it."""
        if self.dropout is None:
            return None
        return self.dropout.draw(acc_P, self.regs.p.element_type, n_block)

    def write_p(self, acc_P: cute.Tensor, drawn) -> None:
        """Make P the operand of P V, after the block before."""
        if drawn is None:
            convert(acc_P, self.regs.p)
        else:
            # What is kept of P, and 0 for the rest.
            words = cute.recast_tensor(cute.flatten(self.regs.p), Uint32)
            for i, (p, kept) in enumerate(drawn):
                words[i] = p & kept

    def finish(self, sinks: tuple | None = None) -> cute.Tensor:
        """Divide O by the row sums; return the rows' log-sum-exps."""
        factor = self.scale_v if self.dropout is None else self.dropout.factor
        divisor = None if self.has_exact_terms else self.divisor
        return self.softmax.finish(as_rows_and_columns(self.regs.acc_O), sinks, factor, divisor)

    @property
    def has_exact_terms(self) -> bool:
        """Whether rounding leaves the P of an only key as it is.
        It is a power of two if the row max was taken from that key's score, or a linear code."""
        rules, kind = self.rules, self.softmax.kind
        if self.softmax.online_max or kind is RowMax.RISING:
            return True
        return kind is RowMax.FIXED and not (rules.scores or rules.mask.templates)

    @cute.jit
    def divisor(self, r: cutlass.Constexpr, row_sum: Float32) -> Float32:
        """The row sum; in 16 bits if row r sees one key.
        So the output of such a row is V, with the same bits."""
        rules = self.rules
        begin, end = rules.mask.range_at(r, rules.coords, rules.sequence)
        rounded = row_sum.to(self.regs.p.element_type).to(Float32)
        return rounded if end - begin == 1 else row_sum

    def sees(self, n_block) -> Callable | None:
        """A function of row r: whether it sees the block's first key.
        None if nothing is guessed, or if a row may see later keys of the block but not the first.
        """
        rules = self.rules
        if self.softmax.kind is not RowMax.FIXED or rules.mask.left:
            return None

        def sees_first_key(r: int):
            _, end = rules.mask.key_range(rules.coords.query(r), rules.sequence)
            return end > n_block * rules.coords.width

        return sees_first_key

    def may_lack_row_max(self, masked: bool) -> bool:
        """Whether a tile's first block may leave a row without row max."""
        mask = self.rules.mask
        is_fixed = self.softmax.kind in (RowMax.FIXED, RowMax.RISING)
        return is_fixed and (bool(masked and (mask.right or mask.left)) or bool(mask.templates))

    @cute.jit
    def is_finite(self, r: cutlass.Constexpr) -> cutlass.Boolean:
        """Whether this thread's columns of finished row r are all finite."""
        row = as_rows_and_columns(self.regs.acc_O)[r, None]
        # Small enough for the squares of what fp32 holds.
        return sum_of_squares(row, 2.0**-70) < Float32.inf


@dataclass(frozen=True)
class BlockStream:
    """Loads the key blocks of a tile, from last to first."""

    # (n_block) -> the block's place; called one block ahead, since lookups take time.
    find: Callable
    # load_k, load_v: (place, state) -> next state; load a block into the state's stage.
    load_k: Callable
    load_v: Callable
    is_ahead: bool = True  # whether K is loaded one block ahead of V, as S = Q K^T is computed

    @cute.jit
    def first(self, n_block, k_state):
        """Load the first K if ahead; return place and K's state."""
        place = self.find(n_block)
        if cutlass.const_expr(self.is_ahead):
            k_state = self.load_k(place, k_state)
        return place, k_state

    @cute.jit
    def rest(self, begin, n_block, place, k_state, v_state):
        """Load all blocks down to `begin` except what `last` loads."""
        while n_block > begin:
            n_block -= 1
            following = self.find(n_block)
            k_state = self.load_k(following if self.is_ahead else place, k_state)
            v_state = self.load_v(place, v_state)
            place = following
        return place, k_state, v_state

    @cute.jit
    def last(self, place, k_state, v_state):
        """Load V of block `begin`, and K unless K is ahead."""
        if cutlass.const_expr(not self.is_ahead):
            k_state = self.load_k(place, k_state)
        return k_state, self.load_v(place, v_state)


@dataclass(frozen=True)
class PingPong:
    """Turns pass around a ring of warpgroups, starting with group 0.
    Each group has one barrier: its own threads wait on it, and the previous group's threads
    arrive on it. All groups must take the same number of turns."""

    first_barrier: int
    groups: int
    group: Int32

    @cute.jit
    def start(self):
        """Give group 0 the first turn. Every group must call this once."""
        if self.group == self.groups - 1:
            self.signal_next()

    @cute.jit
    def wait(self):
        """Wait for this group's turn."""
        self.barrier(self.group).arrive_and_wait()

    @cute.jit
    def signal_next(self):
        """Give the turn to the next group."""
        last = self.group == self.groups - 1
        self.barrier(0 if last else self.group + 1).arrive()

    @cute.jit
    def finish(self):
        """Take the last turn, so that no barrier is left half full."""
        if self.group == 0:
            self.wait()

    def barrier(self, group) -> pipeline.NamedBarrier:
        return pipeline.NamedBarrier(self.first_barrier + group, 2 * WARPGROUP)


class NoPingPong:
    """For warpgroups that never wait for a turn."""

    def wait(self):
        pass

    start = signal_next = finish = wait
