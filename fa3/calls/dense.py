"""The tensors of a dense call: whether they fit together, and the problem that they pose."""

from fa3.calls.modifiers import Structure
from fa3.calls.operands import (
    Operand,
    check_head_dim,
    check_heads_divide,
    check_like_q,
    check_q,
    check_shape,
)
from fa3.calls.options import check_window
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.primitives.arithmetic import LARGEST
from fa3.problem import Problem

SPARE = 1024
"""Positions beyond the last key that kernels count, in blocks."""

MOST_FORWARD_TILES = 1 << 24
"""Tiles at most: 32 bits count their marks and log-sum-exps."""


def pose(
    q: Operand,
    k: Operand,
    v: Operand,
    causal: bool,
    window_size: tuple[int, int],
    modifiers: Structure,
) -> Problem:
    """The problem of a call with these tensors; raises unless they pose one."""
    check_operands(q, k, v)
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, head_dim_v = v.shape
    window = check_window(window_size, causal).tighten(seqlen_q, seqlen_k)
    spec = modifiers.spec(q.dtype, head_dim, head_dim_v, window)
    group = heads_q // max(1, heads_kv)
    return Problem(spec, batch, seqlen_q, seqlen_k, heads_kv, group, window)


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
