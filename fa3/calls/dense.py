"""The tensors of a dense call: whether they fit together, and the problem that they pose."""

import math
from collections.abc import Sequence

import torch

from fa3.calls.dropout import check_probability
from fa3.calls.modifiers import UNMODIFIED, Modifiers, ModifierSpec
from fa3.calls.operands import (
    ALIGNMENT,
    DTYPES,
    Operand,
    check_head_dim,
    check_heads_divide,
    check_like_q,
    check_q,
    check_rank,
    check_shape,
    describe,
)
from fa3.calls.options import as_pair, check_window, flag, integer, real
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.primitives.arithmetic import LARGEST
from fa3.problem import HEAD_DIM_UNIT, Problem
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

SPARE = 1024
"""Positions beyond the last key that kernels count, in blocks."""

MOST_FORWARD_TILES = 1 << 24
"""Tiles at most: 32 bits count their marks and log-sum-exps."""


def problem_of_operands(
    q: Operand,
    k: Operand,
    v: Operand,
    causal: bool,
    window_size: tuple[int, int],
    modifiers: ModifierSpec,
) -> Problem:
    """The problem of a call with these tensors; raises unless they pose one."""
    check_operands(q, k, v)
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    window = check_window(window_size, causal).tighten(seqlen_q, seqlen_k)
    spec = modifiers.spec(q.dtype, head_dim, head_dim_v, window)
    group = heads_q // max(1, heads_kv)
    return Problem(spec, batch, seqlen_q, seqlen_k, heads_kv, group, window)


def problem_posed_by(
    q: torch.Tensor | Sequence[int],
    k: torch.Tensor | Sequence[int],
    v: torch.Tensor | Sequence[int],
    causal: bool,
    window_size: Sequence[int],
    dtype: str | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    score: Score | None,
    mask: Mask | None,
    dropout_p: float,
) -> Problem:
    """The problem of a call; `Problem.of` says what the arguments are."""
    q_operand, k_operand, v_operand = (
        posed_operand(*one, dtype) for one in (("q", q), ("k", k), ("v", v))
    )
    window = check_window(as_pair(window_size), flag("causal", causal))
    softcap, dropout_p = real("softcap", softcap), real("dropout_p", dropout_p)
    check_probability(dropout_p)
    structure = UNMODIFIED.structure
    if softcap or not (alibi_slopes is sinks is score is mask is None):
        check_rank("q", q_operand)
        batch, is_causal = q_operand.shape[0], window.right == 0
        structure = Modifiers.of(
            q_operand, batch, softcap, alibi_slopes, sinks, score, mask, is_causal,
            has_backward=True,
        ).structure  # fmt: skip
    structure = structure._replace(has_dropout=dropout_p > 0)
    return problem_of_operands(q_operand, k_operand, v_operand, False, window, structure)


def posed_operand(name: str, given: torch.Tensor | Sequence[int], dtype: str | None) -> Operand:
    """A tensor as it is described, or one on the CPU with this shape and aligned rows."""
    if isinstance(given, torch.Tensor):
        if dtype is not None:
            raise ValueError(
                f"dtype must be None with tensors, which have their own, got {dtype!r}"
            )
        return Operand(*describe(name, given, ALIGNMENT, True))
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a torch.Tensor or a shape, got {type(given).__name__}")
    shape = tuple(integer(name, size, 0) for size in given)
    types = {known: kind for kind, known in DTYPES.items()}
    if dtype is not None and dtype not in types:
        raise ValueError(f"dtype must be one of {list(types)}, got {dtype!r}")
    rows = *shape[:-1], -(-shape[-1] // HEAD_DIM_UNIT) * HEAD_DIM_UNIT if shape else 0
    strides = tuple(math.prod(rows[dim + 1 :]) for dim in range(len(shape)))
    return Operand(shape, strides, types[dtype or "bfloat16"], torch.device("cpu"))


def check_operands(q: Operand, k: Operand, v: Operand) -> None:
    """Raise if q, k and v do not describe one attention problem."""
    check_q(q)
    check_like_q("k", k, q)
    check_like_q("v", v, q)
    check_head_dim("q", q)
    check_head_dim("v", v)
    check_shape("k", k, (q.shape[0], *k.shape[1:3], q.shape[3]), "q")
    check_shape("v", v, (*k.shape[:3], v.shape[3]), "k")
    check_heads_divide(q, "k", k)
    check_forward_counts(q.shape[0], q.shape[1], k.shape[1], q.shape[2])


def check_forward_counts(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> None:
    """Raise unless kernels can count queries, keys and tiles in 32 bits; `heads` are q's."""
    most_keys = LARGEST - SPARE - 2 * seqlen_q
    if seqlen_k > most_keys:
        if most_keys < 1:
            most_queries = (LARGEST - SPARE - 1) // 2
            raise ValueError(f"q must have at most {most_queries} queries, got {seqlen_q}")
        raise ValueError(
            f"k must have at most {most_keys} keys with {seqlen_q} queries, got {seqlen_k}"
        )
    if batch * heads * (seqlen_q // FEWEST_ROWS + 1) > MOST_FORWARD_TILES:
        raise ValueError(
            f"q must have at most {MOST_FORWARD_TILES} tiles of {FEWEST_ROWS} rows, got batch "
            f"{batch}, {seqlen_q} queries and {heads} heads"
        )
