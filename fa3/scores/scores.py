"""Scores: what changes Q K^T before the softmax, besides the softmax scale.

A score is a frozen dataclass, part of a problem's spec (`fa3.problem`); kernels apply a tile's
scores and mask through `ScorePipeline`. `Score.apply` changes one block's scores in registers, as
(rows, columns) of a thread. They need not be natural logits: a score x stands for the logit x *
unit. The unit is softmax_scale at first; each score's `unit_after` gives the unit after its
`apply`. So a factor that all scores share costs nothing.

Each class has a device half and a torch half, `reference`, which the reference and tests run. Ours
also have the `derivative` of `reference`, and `apply_transposed` for the backward kernel, which
holds S^T and wants the derivative too.

Your own score is a subclass with two methods:

    @dataclass(frozen=True)
    class Tilt(fa3.Score):
        slope: torch.Tensor  # (heads,), float32; tensors are passed to the kernel

        @cute.jit
        def score(self, logit, at: fa3.Position):
            return logit + self.slope[at.head] * (at.key - at.query)

        def reference(self, logits, at):
            return logits + self.slope[at.head] * (at.key - at.query)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa3.primitives.fragments import Position, ScoreCoords, TransposedCoords
from fa3.primitives.softmax import LOG2_E
from fa3.problem import AttentionSpec


class Score:
    """Base class of scores: functions of a natural logit and its position."""

    hides = True  # whether `apply` may make a score -inf
    bends = True  # whether the derivative of `apply` may be other than 1
    bound = math.inf  # the largest magnitude of a natural logit after `apply`

    def score(self, logit, at: Position):
        """The new logit; a `@cute.jit` method of the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define score(self, logit, at)")

    def reference(self, logits, at: Position):
        """The new logits in torch.

        Args:
            logits: float32 or float64 tensor (..., queries, keys).
            at: its fields broadcast against logits.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reference(self, logits, at)")

    def derivative(self, logits, at: Position):
        """Of `reference` by the logits, in torch; the arguments are its own."""
        raise NotImplementedError(f"{type(self).__name__} has no derivative")

    def at_rows(self, coords: ScoreCoords, unit):
        """What `apply` needs to know of rows; computed once per tile."""
        return ()

    def unit_after(self, unit):
        """The natural logit that a score of 1 stands for after `apply`."""
        return Float32(1.0)

    @cute.jit
    def apply(self, scores: cute.Tensor, rows, coords: ScoreCoords, n_block, sequence, unit):
        """Change a block's scores (rows, columns) in place.

        Returns for each row a shift that is still to be added to its scores; None for no shifts."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                at = coords.position(r, c, n_block, sequence)
                scores[r, c] = Float32(self.score(scores[r, c] * unit, at))

    def apply_transposed(
        self, scores: cute.Tensor, coords: TransposedCoords, m_block, sequence, unit
    ):
        """Change a block of S^T (keys, queries) in place, shifts included.

        Returns the derivative of each natural logit by the one before, or None where all are 1."""
        raise NotImplementedError(f"{type(self).__name__} has no derivative")


@dataclass(frozen=True)
class Softcap(Score):
    """cap * tanh(logit / cap).
    Uses `tanh.approx`, whose relative error is at most 2^-11: one more instruction for the
    exponential units, which are the bottleneck of a softcap."""

    cap: float

    hides = False

    @property
    def bound(self) -> float:
        return self.cap

    def reference(self, logits, at):
        return self.cap * (logits / self.cap).tanh()

    def derivative(self, logits, at):
        return 1.0 - (logits / self.cap).tanh().square()

    def unit_after(self, unit):
        return Float32(self.cap)

    @cute.jit
    def apply(self, scores: cute.Tensor, rows, coords, n_block, sequence, unit):
        scale = unit * (1.0 / self.cap)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            row = scores[r, None]
            row.store(cute.math.tanh(row.load() * scale, fastmath=True))

    @cute.jit
    def apply_transposed(self, scores: cute.Tensor, coords, m_block, sequence, unit):
        self.apply(scores, (), coords, m_block, sequence, unit)
        # In 16 bits, which are as exact as the tanh and take half of the registers.
        slopes = cute.make_rmem_tensor_like(scores, cutlass.Float16)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            tanh = scores[r, None].load()
            slopes[r, None].store((1.0 - tanh * tanh).to(cutlass.Float16))
        return slopes


@dataclass(frozen=True)
class Alibi(Score):
    """`-slope |i + offset - j|` for query i and key j (Press et al., arXiv 2108.12409).

    In a block that the diagonal does not cross, the bias of a row changes by a constant from
    column to column: each score takes one multiply-add with a number known at compile time, and
    the remainder is a shift of the row.
    """

    slopes: object  # (heads,) or (batch, heads), float32
    is_causal: bool  # whether no query sees keys after its own position; then `abs` is not needed

    hides = False
    bends = False

    def reference(self, logits, at):
        slopes = self.slopes.to(logits.dtype)
        slopes = slopes[at.head] if slopes.ndim == 1 else slopes[at.batch, at.head]
        distance = at.query + at.seqlen_k - at.seqlen_q - at.key
        return logits - slopes * abs(distance)

    def derivative(self, logits, at):
        return 1.0

    def at_rows(self, coords: ScoreCoords, unit):
        """The rows' slopes in score units, and the tile's query range."""
        rank = len(self.slopes.shape)
        heads = (coords.head_of(r) for r in range(len(coords.row_steps)))
        slopes = tuple(
            (self.slopes[h] if rank == 1 else self.slopes[coords.batch, h]) / unit for h in heads
        )
        return slopes, *coords.queries()

    def unit_after(self, unit):
        return unit

    @cute.jit
    def apply(self, scores: cute.Tensor, rows, coords: ScoreCoords, n_block, sequence, unit):
        slopes, first_query, last_query = rows
        num_rows = len(coords.row_steps)
        # Position of this thread's first key in the block, minus the row's query's.
        first = [
            Float32(coords.first_column(n_block) - coords.query(r) - sequence.offset)
            for r in range(num_rows)
        ]
        if cutlass.const_expr(self.is_causal):
            self.slant(scores, slopes, coords)
            return tuple(product(slopes[r], first[r]) for r in range(num_rows))
        shifts = cute.make_rmem_tensor(num_rows, Float32)
        first_key = n_block * coords.width
        is_before = first_key + coords.width <= first_query + sequence.offset
        is_behind = first_key >= last_query + sequence.offset
        if is_before or is_behind:
            growth = [slopes[r] if is_before else -slopes[r] for r in range(num_rows)]
            self.slant(scores, growth, coords)
            for r in cutlass.range_constexpr(num_rows):
                shifts[r] = product(growth[r], first[r])
        else:
            for r in cutlass.range_constexpr(num_rows):
                shifts[r] = 0.0
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    distance = first[r] + float(coords.column_steps[c])
                    distance = cute.arch.fmax(distance, -distance)
                    scores[r, c] = scores[r, c] - slopes[r] * distance
        return tuple(shifts[r] for r in range(num_rows))

    @cute.jit
    def apply_transposed(
        self, scores: cute.Tensor, coords: TransposedCoords, m_block, sequence, unit
    ):
        at = (coords.head,) if len(self.slopes.shape) == 1 else (coords.batch, coords.head)
        slope = self.slopes[at] / unit
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            first = Float32(coords.first_column(m_block) + sequence.offset - coords.row_at(r))
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                distance = first + float(coords.column_steps[c])
                if cutlass.const_expr(not self.is_causal):
                    distance = cute.arch.fmax(distance, -distance)
                scores[r, c] = scores[r, c] - slope * distance
        return

    @cute.jit
    def slant(self, scores: cute.Tensor, growth, coords: ScoreCoords):
        """Add to each score its row's growth per key, times its column."""

        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] + growth[r] * float(coords.column_steps[c])


def product(a: Float32, b: Float32) -> Float32:
    """a * b, rounded before any addition.
    The compiler might fuse it with an addition in one copy of the code and not in another: then
    the bits of a result would depend on which copy computed a block."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def bind(spec: AttentionSpec, modifiers: Iterable | None) -> tuple:
    """The scores, the mask and the sinks of a spec, with tensors."""
    remaining = iter(modifiers or ())
    scores = tuple(template.bind(remaining) for template in spec.scores)
    return scores, spec.mask.bind(remaining), next(remaining) if spec.sinks else None


@dataclass(frozen=True)
class ScorePipeline:
    """What happens to a tile's scores between `Q K^T` and the softmax."""

    scores: tuple[Score, ...]  # applied one after another
    units: tuple  # the unit before each score, then the unit after the last
    rows: tuple  # for each score what its `at_rows` gave for this tile; () if S is transposed
    mask: object  # the mask of the tile's head
    coords: ScoreCoords | TransposedCoords
    sequence: object

    @classmethod
    def of(cls, scores: tuple[Score, ...], mask, coords, sequence, softmax_scale):
        """The rules of a tile, from a bound mask and bound scores."""
        units, rows = [softmax_scale], []
        has_rows = isinstance(coords, ScoreCoords)
        for score in scores:
            rows.append(score.at_rows(coords, units[-1]) if has_rows else ())
            units.append(score.unit_after(units[-1]))
        mask = mask.at_rows(coords, sequence) if has_rows else mask
        return cls(scores, tuple(units), tuple(rows), mask, coords, sequence)

    @property
    def unit(self):
        """The natural logit that a score of 1 stands for after `apply`."""
        return self.units[-1]

    @property
    def may_hide(self) -> bool:
        """Whether a score may be -inf in a block without masked keys."""
        return any(score.hides for score in self.scores)

    @property
    def bound(self) -> float:
        """The largest magnitude of a natural logit when it reaches the softmax."""
        return self.scores[-1].bound if self.scores else math.inf

    @cute.jit
    def apply(self, values: cute.Tensor, n_block, masked: cutlass.Constexpr):
        """Change a block's scores (rows, columns) in place; masked ones become -inf.
        Returns the shifts of the rows, see `fa3.primitives.softmax`."""
        shifts = None
        for i in cutlass.range_constexpr(len(self.scores)):
            if cutlass.const_expr(shifts is not None):
                for r in cutlass.range_constexpr(cute.size(values, mode=[0])):
                    values[r, None].store(values[r, None].load() + shifts[r])
            shifts = self.scores[i].apply(
                values, self.rows[i], self.coords, n_block, self.sequence, self.units[i]
            )
        if cutlass.const_expr(masked):
            self.hide(values, n_block)
        return shifts

    def hide(self, values: cute.Tensor, n_block) -> None:
        """Set the masked scores of a block to -inf."""
        self.mask.apply(values, self.coords, n_block, self.sequence)

    def sinks_of_rows(self, sinks: cute.Tensor | None) -> tuple | None:
        """The rows' sinks as base-2 logarithms, for the softmax; None without sinks."""
        if sinks is None:
            return None
        rows = range(len(self.coords.row_steps))
        return tuple(Float32(sinks[self.coords.head_of(r)]) * LOG2_E for r in rows)


class TransposedScorePipeline(ScorePipeline):
    """What happens to a tile's scores between K Q^T and P^T."""

    def shifted(self, columns: int) -> "TransposedScorePipeline":
        """The rules of as many scores `columns` columns further in the block."""
        return replace(self, coords=self.coords.shifted(columns))

    @cute.jit
    def apply(self, values: cute.Tensor, m_block, masked: cutlass.Constexpr):
        """Change a block of S^T (keys, queries); set masked scores to -inf.
        Returns factors of dS (keys, queries): the derivatives of all scores that have one."""
        factors = []
        for i in cutlass.range_constexpr(len(self.scores)):
            slopes = self.scores[i].apply_transposed(
                values, self.coords, m_block, self.sequence, self.units[i]
            )
            if cutlass.const_expr(slopes is not None):
                factors.append(slopes)
        if cutlass.const_expr(masked):
            self.hide(values, m_block)
        return tuple(factors)

    def hide(self, values: cute.Tensor, m_block):
        """Set the masked scores of a block to -inf."""
        self.mask.apply_transposed(values, self.coords, m_block, self.sequence)
