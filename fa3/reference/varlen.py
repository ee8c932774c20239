"""Packed sequences on the CPU: each one runs through the plan that it would get as a batch of one.

On a GPU all of them run in one launch, by another plan (`fa3.planning.ragged`).
"""

import itertools
from typing import NamedTuple

import torch

from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.reference.forward import execute
from fa3.scores.scores import bind


class RaggedOperands(NamedTuple):
    """The tensors of one call, on one device and already validated.

    Fields:
        q: (total_q, heads_q, head_dim), bfloat16 or float16.
        k: (total_k, heads_kv, head_dim), dtype of q.
        v: (total_k, heads_kv, head_dim_v), dtype of q.
        out: (total_q, heads_q, head_dim_v), receives the output.
        lse: (heads_q, total_q) float32, receives the log-sum-exp, or None.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where sequences begin and end.
        seqused_q, seqused_k: (batch,) int32, rows of each sequence that count; all if None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None


def used_rows(ends: list[int], used: list[int] | None) -> list[range]:
    """The rows of each sequence that count.

    Args:
        ends: cumulated lengths, from 0 on.
        used: how many rows of each sequence count; None for all.
    """
    rows = list(itertools.starmap(range, itertools.pairwise(ends)))
    if used is None:
        return rows
    return [of_one[: max(0, count)] for of_one, count in zip(rows, used, strict=True)]


def execute_varlen(
    spec: AttentionSpec,
    window: Window,
    operands: RaggedOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend inside of each sequence of CPU tensors; other rows of out and lse stay as they are.

    Args:
        window: keys that a query sees beside its own position.
        softmax_scale: factor of Q K^T before the softmax; positive.
        tensors: those of the spec's scores, mask and sinks.
    """
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = operands
    heads_kv = k.shape[1]
    _, _, sinks = bind(spec, tensors)
    rows_q, rows_k = (
        used_rows(ends.tolist(), None if used is None else used.tolist())
        for ends, used in ((cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k))
    )
    for batch, (queries, keys) in enumerate(zip(rows_q, rows_k, strict=True)):
        of_q, of_k = (slice(rows.start, rows.stop) for rows in (queries, keys))
        if not queries:
            continue
        if keys:
            problem = Problem(
                spec, 1, len(queries), len(keys), heads_kv, q.shape[1] // heads_kv, window
            )
            of_sequence = q[None, of_q], k[None, of_k], v[None, of_k]
            plan = plan_forward(problem)
            result, of_rows = execute(plan, *of_sequence, softmax_scale, tensors, batch)
        else:
            result = 0.0
            of_rows = -torch.inf if sinks is None else sinks[:, None].float()
        out[of_q] = result
        if lse is not None:
            lse[:, of_q] = of_rows
