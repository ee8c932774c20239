"""Online softmax in base 2: turns scores into P, and finishes O."""

import math
from dataclasses import dataclass
from enum import Enum
from operator import add
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32

SLACK = 8.0  # powers of two by which scores may exceed the row max before sums and O are rescaled

MARGIN = 24.0
"""Powers of two that a `FIXED` row max lies above the scores it was taken from: this leaves row
sums more room to grow than to shrink."""

FP8_OFFSET, LINEAR_OFFSET = 6.0, 5.75
"""Powers of two by which the row max lies below the largest score, if terms are e4m3: small terms
shall not vanish. The linear code of 2**5.75 stands for 4.1% too much, about as much as codes do in
the mean. So the largest key of a row weighs as much as it should."""

FP8_SLACK = 8.75  # `SLACK` in FP8: the largest number in e4m3 is 2**8.8

OUTLIER, OUTLIER_OFFSET = 6.0, 2.0
"""The row max lies `OUTLIER_OFFSET` lower where the largest score is `OUTLIER` powers of two above
the largest of another thread of the row: other keys shall not vanish next to one."""

CODE, CODE_OF_ONE = 8.0 * 2.0**-24, 72.0 * 2.0**-24
"""A power of two in codes of e4m3, which has 8 codes for it, and the code of 1 plus 16; as fp16
subnormals, whose bits are the codes."""

EXCESS = math.log2(1.5 * math.log(2.0))  # powers of two that linear codes add in the mean

LOG2_E = math.log2(math.e)  # powers of two in a natural logit

GUESSED = 8
"""Columns of a thread from which a row max is guessed: the first 32 keys of a block. More columns
would delay the exponentials of the tile's first block."""

FEWEST, MOST = 2.0**-64, 2.0**120
"""A `FIXED` or `ZERO` row max was good enough if the row sum lies between these. Terms below
2**-149 vanish, but do not matter compared with FEWEST; MOST is far enough below infinity."""

MOST_BESIDE_SINKS = 2.0**40
"""MOST for rows with a sink. A sink may lie far above the row max; then the terms that vanish
are less than 2**-86 of the sum."""

LEAST_OF_ZEROS = 2.0**-39
"""Row sums from which an output of 0 is a true zero, if values are at least 2**-110."""

FITTING = 2.0**15  # P fits fp16 if a thread's P of a block sum up to no more

SURE = 0.5  # row sums below this cannot make O overflow, whatever V holds
FAINT = 2.0**-60  # nonzero outputs below this may have lost digits, since V is so small
STRONG = 2.0**60  # outputs above this may have overflowed in part


class RowMax(Enum):
    """The number subtracted from a row's scores before they are exponentiated.

    It depends only on the scores that the row sees.

    ONLINE: the running maximum, updated lazily (FlashAttention-4). While no row of the warp
        exceeds its row max by more than `SLACK` powers of two, nothing is rescaled and no value
        crosses threads. Terms then reach 2**SLACK, which fp32 sums and 16-bit P both hold.
    FIXED: the maximum over some keys of the first block in which the row sees one, plus `MARGIN`.
        It is a guess: other blocks are not searched for a maximum. At the end the row sum and O
        tell whether the guess failed (`failed`). It needs a P with the range of fp32.
    RISING: FIXED for P in fp16. It is the maximum of the first block in which the row sees a key.
        Other blocks are not searched for a maximum either. If the sum of a block's P tells that P
        may not fit fp16, the row max rises, and P, sums and O are rescaled. It fails if scores
        exceed the row max by some 123 to 128 powers of two, when their sum is infinite.
    LOW: as ONLINE, less `FP8_OFFSET` powers of two, or `OUTLIER_OFFSET` more. Terms reach
        2**FP8_SLACK, which is little less than the largest number in e4m3.
    LINEAR: as LOW, but with `LINEAR_OFFSET`, and without exponentials: P is in codes of e4m3 that
        are linear in the score, and WGMMAs sum up its rows.
    ZERO: 0, for bounded scores. It cannot fail if the bound is at most `SLACK` powers of two;
        above, the row sum and O tell, as for FIXED.
    """

    ONLINE = "online"
    FIXED = "fixed"
    RISING = "rising"
    LOW = "low"
    LINEAR = "linear"
    ZERO = "zero"


@cute.jit
def row_reduce(row: cute.Tensor, op: cutlass.Constexpr, columns: cutlass.Constexpr) -> Float32:
    """Reduce the first `columns` of a thread's row in four chains."""
    lanes = [row[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, columns, 4):
        for j in cutlass.range_constexpr(4):
            lanes[j] = op(lanes[j], row[i + j])
    return op(op(lanes[0], lanes[1]), op(lanes[2], lanes[3]))


@cute.jit
def quad_reduce(value: Float32, op: cutlass.Constexpr) -> Float32:
    """Reduce over the four threads that share a row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def sum_of_squares(row: cute.Tensor, factor: cutlass.Constexpr) -> Float32:
    """Sum of (factor * x)^2 over this thread's part of a row."""
    squares = cute.make_rmem_tensor(row.shape, Float32)
    values = row.load() * factor
    squares.store(values * values)
    return row_reduce(squares, add, cute.size(squares))


@cute.jit
def finite(row_max: Float32) -> Float32:
    """The maximum, or 0 if the row has seen no key yet.
    exp2(-inf - 0) is 0, as needed."""
    return Float32(0.0) if row_max == -Float32.inf else row_max


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maxima and row sums of one thread's rows (FlashAttention-2, section 3.1).

    `row_max` holds each row's row max in units of raw scores; a quad's four threads hold the
    same ones. `row_sum` covers this thread's columns only, until `finish`.

    `shifts` has for each row a number still to be added to all scores of a block; None adds 0.
    """

    scale_log2: Float32
    row_max: cute.Tensor
    row_sum: cute.Tensor

    kind: ClassVar[RowMax] = RowMax.ONLINE
    slack: ClassVar[float] = SLACK

    @staticmethod
    def create(num_rows: int, scale_log2: Float32, kind: RowMax = RowMax.ONLINE) -> "OnlineSoftmax":
        rows = (cute.make_rmem_tensor(num_rows, Float32) for _ in range(2))
        return SOFTMAXES[kind](scale_log2, *rows)

    @property
    def online_max(self) -> bool:
        return self.kind in (RowMax.ONLINE, RowMax.LINEAR, RowMax.LOW)

    @cute.jit
    def start(
        self, scores: cute.Tensor, shifts: tuple | None = None, sees: cutlass.Constexpr = None
    ):
        """Take row maxima from a tile's first block of scores.
        `sees` says of row r whether it sees the block's first key; then row maxima are guessed
        from the first columns. If it is None, they are taken from all columns."""
        self.row_sum.fill(0.0)
        if cutlass.const_expr(self.kind is RowMax.ZERO):
            self.row_max.fill(0.0)
        else:
            self.row_max.store(self.row_max_of(scores, shifts, sees).load())

    @cute.jit
    def init_late_rows(
        self, scores: cute.Tensor, shifts: tuple | None = None, sees: cutlass.Constexpr = None
    ):
        """Do as `start` for rows that saw no key yet."""
        num_rows, row_max = cute.size(scores, mode=[0]), self.row_max
        is_missing = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(num_rows):
            is_missing = is_missing or row_max[r] == -Float32.inf
        if cute.arch.vote_any_sync(is_missing):
            fresh = self.row_max_of(scores, shifts, sees)
            for r in cutlass.range_constexpr(num_rows):
                row_max[r] = fresh[r] if row_max[r] == -Float32.inf else row_max[r]

    @cute.jit
    def row_max_of(
        self, scores: cute.Tensor, shifts: tuple | None, sees: cutlass.Constexpr
    ) -> cute.Tensor:
        """Each row's row max from one block; -inf for no keys."""
        row_max = cute.make_rmem_tensor_like(self.row_max)
        maxima = self.maxima(scores, shifts, None if sees is None else GUESSED)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            largest = quad_reduce(maxima[r], cute.arch.fmax)
            largest = largest + self.margin_of(largest, maxima[r])
            if cutlass.const_expr(sees is not None):
                # All guessed columns are -inf though keys are seen: try 0. If bad, the row fails.
                no_guess = largest == -Float32.inf and sees(r)
                largest = Float32(0.0) if no_guess else largest
            row_max[r] = largest
        return row_max

    def margin_of(self, largest: Float32, own: Float32):
        """How far the row max is above its scores, in raw scores.
        They are at most `largest`, and this thread's at most `own`."""
        if self.kind is RowMax.FIXED:
            return MARGIN * cute.arch.rcp_approx(self.scale_log2)
        return 0.0

    def maxima(
        self, scores: cute.Tensor, shifts: tuple | None, columns: int | None = None
    ) -> list[Float32]:
        """This thread's largest score in each row, over all or first columns."""
        rows, columns = range(cute.size(scores, mode=[0])), columns or cute.size(scores, mode=[1])
        maxima = [row_reduce(scores[r, None], cute.arch.fmax, columns) for r in rows]
        return maxima if shifts is None else [maxima[r] + shifts[r] for r in rows]

    @cute.jit
    def update_row_max(
        self, scores, accs: cutlass.Constexpr, accs_ready: cutlass.Constexpr, shifts: tuple | None
    ):
        """Raise each row max that scores exceed too far; rescale accs.
        Calls `accs_ready()` before it reads or writes accs."""
        # Not as fields: a branch cannot carry a subclass, which has constants of its own.
        row_max, row_sum, scale_log2 = self.row_max, self.row_sum, self.scale_log2
        if cute.arch.vote_any_sync(self.outgrown(scores, shifts)):
            accs_ready()
            maxima, slack = self.maxima(scores, shifts), self.slack
            for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
                raised = quad_reduce(cute.arch.fmax(maxima[r], row_max[r]), cute.arch.fmax)
                # Decide for each row alone: other rows of the warp may see keys that it does not.
                has_outgrown = (raised - row_max[r]) * scale_log2 > slack
                if cutlass.const_expr(self.kind is not RowMax.ONLINE):
                    raised = raised + self.margin_of(raised, maxima[r])
                raised = raised if has_outgrown else row_max[r]
                correction = cute.math.exp2(
                    (row_max[r] - finite(raised)) * scale_log2, fastmath=True
                )
                row_max[r] = raised
                row_sum[r] = row_sum[r] * correction
                for acc in accs:
                    acc[r, None].store(acc[r, None].load() * correction)

    @cute.jit
    def outgrown(self, scores: cute.Tensor, shifts: tuple | None) -> cutlass.Boolean:
        """Whether a score of this thread exceeds its row max too far."""
        maxima, outgrown = self.maxima(scores, shifts), cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            outgrown = outgrown or (maxima[r] - self.row_max[r]) * self.scale_log2 > self.slack
        return outgrown

    @cute.jit
    def exponentiate(
        self, scores: cute.Tensor, masked: cutlass.Constexpr, shifts: tuple | None = None
    ):
        """Replace scores by exp2(scale_log2 * (score + shift - row max)); sum up.
        Returns the sums of the block, one for each row."""
        sums = []
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            row = scores[r, None]
            exponents = row.load() * self.scale_log2
            if cutlass.const_expr(self.kind is not RowMax.ZERO):
                row_max = self.row_max[r]
                if cutlass.const_expr(masked or self.online_max):
                    row_max = finite(row_max)
                if cutlass.const_expr(shifts is not None):
                    row_max = row_max - shifts[r]
                exponents = exponents - row_max * self.scale_log2
            row.store(cute.math.exp2(exponents, fastmath=True))
            sums.append(row_reduce(row, add, cute.size(row)))
            self.row_sum[r] = self.row_sum[r] + sums[r]
        return sums

    def has_summed(self):
        """A condition that always holds; most kinds need row sums for it."""
        is_plain = self.kind in (RowMax.ONLINE, RowMax.LINEAR)
        return True if is_plain else self.row_sum[0] + self.row_sum[1] >= 0.0

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        # For each row a logit, in base 2, that only joins the row sum; or None.
        sinks: tuple | None = None,
        factor: Float32 | None = None,  # what else to multiply acc by; None for 1
        # (r, row sum) -> what to divide row r by, without sinks; None for the row sum.
        divisor: cutlass.Constexpr = None,
    ) -> cute.Tensor:
        """Divide acc by the row sums; return the rows' log-sum-exps (natural logarithm).
        A row that saw no key becomes 0, with log-sum-exp -inf or its sink's logit."""
        lse = cute.make_rmem_tensor(self.row_sum.layout, Float32)
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            row_sum = quad_reduce(self.row_sum[r], add)
            self.row_sum[r] = row_sum
            scaled = finite(self.row_max[r]) * self.scale_log2
            if cutlass.const_expr(self.kind is RowMax.LINEAR):
                scaled = scaled - EXCESS
            if cutlass.const_expr(sinks is None):
                hidden = row_sum == 0.0
                divided_by = row_sum if divisor is None else divisor(r, row_sum)
                inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(divided_by)
                log2_sum = scaled + cute.math.log2(row_sum, fastmath=True)
            else:
                # A row that saw no key may have the row max 0, which must not count here.
                scaled = -Float32.inf if row_sum == 0.0 else scaled
                largest = cute.arch.fmax(scaled, sinks[r])
                correction = cute.math.exp2(scaled - finite(largest), fastmath=True)
                total = row_sum * correction + cute.math.exp2(
                    sinks[r] - finite(largest), fastmath=True
                )
                hidden = total == 0.0
                inverse = Float32(0.0) if hidden else correction * cute.arch.rcp_approx(total)
                log2_sum = largest + cute.math.log2(total, fastmath=True)
            lse[r] = -Float32.inf if hidden else log2_sum * math.log(2.0)
            if cutlass.const_expr(factor is not None):
                inverse = inverse * factor
            acc[r, None].store(acc[r, None].load() * inverse)
        return lse

    @cute.jit
    def failed(
        self, row: cute.Tensor, r: cutlass.Constexpr, has_sink: cutlass.Constexpr
    ) -> cutlass.Boolean:
        """Whether the `FIXED` or `ZERO` row max of row r failed.
        `row` is this thread's part of the finished output. If a sink has joined the sum
        (`has_sink`), an output near 0 tells nothing."""
        row_sum, square = self.row_sum[r], sum_of_squares(row, 1.0)
        # Written so that NaN fails.
        if cutlass.const_expr(has_sink):
            failed = not (row_sum >= LEAST_OF_ZEROS and row_sum <= MOST_BESIDE_SINKS)
            may_be_faint = cutlass.Boolean(False)
        else:
            failed = not (row_sum >= FEWEST and row_sum <= MOST)
            may_be_faint = square < FAINT**2
        if may_be_faint or (row_sum >= SURE and not square <= STRONG**2):
            # True zeros do not fail. Times 2**100, the square of any other output is not 0.
            failed = failed or sum_of_squares(row, 2.0**100) != 0.0 or row_sum < LEAST_OF_ZEROS
        # A row that saw no key rightly has the sum 0. With bounded scores a sum of 0 tells: no term
        # vanishes.
        is_empty = row_sum == 0.0
        if cutlass.const_expr(self.kind is not RowMax.ZERO):
            is_empty = is_empty and self.row_max[r] == -Float32.inf
        return failed and not is_empty

    @cute.jit
    def surely_in_range(self, acc: cute.Tensor, has_sink: cutlass.Constexpr) -> cutlass.Boolean:
        """Whether surely none of this thread's rows failed; a quick test.
        `acc` is the rows' finished output (rows, columns)."""
        first, second = self.row_sum[0], self.row_sum[1]
        fewest = LEAST_OF_ZEROS if has_sink else FEWEST
        is_sure = cute.arch.fmin(first, second) >= fewest and first + second < SURE
        if cutlass.const_expr(not has_sink):
            one, other = (cute.arch.fmax(acc[r, 0], -acc[r, 0]) for r in range(2))
            is_sure = is_sure and cute.arch.fmin(one, other) >= FAINT
        return is_sure


class FixedSoftmax(OnlineSoftmax):
    kind = RowMax.FIXED


class RisingSoftmax(OnlineSoftmax):
    kind = RowMax.RISING

    @cute.jit
    def fit(
        self, p: cute.Tensor, sums: cutlass.Constexpr, acc: cute.Tensor, ready: cutlass.Constexpr
    ):
        """Raise row maxima whose P may exceed fp16; rescale P, sums, O.
        `sums` are the sums of a block's P. Calls `ready()` before it reads or writes O."""
        row_max, row_sum, scale_log2 = self.row_max, self.row_sum, self.scale_log2
        if cute.arch.vote_any_sync(not sums[0] + sums[1] <= FITTING):
            ready()
            for r in cutlass.range_constexpr(cute.size(p, mode=[0])):
                largest = quad_reduce(sums[r], cute.arch.fmax)
                # An infinite P stays: the row fails.
                rises = largest > FITTING and largest < Float32.inf
                powers = cute.math.log2(largest, fastmath=True) if rises else Float32(0.0)
                # Then P is at most 256, and the correction no subnormal, which would vanish.
                powers = cute.arch.fmin(powers, Float32(120.0))
                correction = cute.math.exp2(-powers, fastmath=True)
                if rises:
                    row_max[r] = row_max[r] + powers * cute.arch.rcp_approx(scale_log2)
                row_sum[r] = row_sum[r] * correction
                for rows in (p, acc):
                    rows[r, None].store(rows[r, None].load() * correction)

    @cute.jit
    def failed(
        self, row: cute.Tensor, r: cutlass.Constexpr, has_sink: cutlass.Constexpr
    ) -> cutlass.Boolean:
        """Whether a P of row r was infinite."""
        return not self.row_sum[r] < Float32.inf  # so that NaN fails

    def surely_in_range(self, acc: cute.Tensor, has_sink: cutlass.Constexpr) -> cutlass.Boolean:
        """Whether none of this thread's rows failed."""
        return self.row_sum[0] + self.row_sum[1] < Float32.inf


class BoundedSoftmax(OnlineSoftmax):
    kind = RowMax.ZERO


class LowSoftmax(OnlineSoftmax):
    kind, slack, offset = RowMax.LOW, FP8_SLACK, FP8_OFFSET

    @cute.jit
    def margin_of(self, largest: Float32, own: Float32):
        least, scale = quad_reduce(own, cute.arch.fmin), self.scale_log2
        is_outlier = (largest - least) * scale > OUTLIER and least > -Float32.inf
        more = Float32(OUTLIER_OFFSET) if is_outlier else Float32(0.0)
        return (-self.offset - more) * cute.arch.rcp_approx(scale)


class LinearSoftmax(LowSoftmax):
    kind, offset = RowMax.LINEAR, LINEAR_OFFSET

    @cute.jit
    def exponentiate(
        self, scores: cute.Tensor, masked: cutlass.Constexpr, shifts: tuple | None = None
    ):
        """Replace scores by their codes of e4m3 plus 16, not rounded yet.
        As floats these are so small that they become subnormals of fp16."""
        scale = self.scale_log2 * CODE
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            row, row_max = scores[r, None], finite(self.row_max[r])
            if cutlass.const_expr(shifts is not None):
                row_max = row_max - shifts[r]
            row.store(row.load() * scale + (CODE_OF_ONE - row_max * scale))


KINDS = OnlineSoftmax, FixedSoftmax, RisingSoftmax, BoundedSoftmax, LowSoftmax, LinearSoftmax
SOFTMAXES = {softmax.kind: softmax for softmax in KINDS}
"""Classes, not a field: the DSL would turn a constant field into a GPU value at a branch."""
