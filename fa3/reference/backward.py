"""Gradients of attention in torch, key tile by key tile.

K and V of a tile stay, and the query blocks that see it pass by, of all query heads that share
the tile. So dK and dV of a tile are summed in one place. dQ of a row is summed tile by tile in the
order of the keys. P comes again from Q K^T and the log-sum-exp that the forward pass left. Sums are
in fp32; P and dS are rounded to the input dtype before they are multiplied. The order is fixed, so
the same call gives the same bits.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1, algorithm 2; Dao et al.,
FlashAttention (arXiv 2205.14135), algorithm 4.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch

from fa3.primitives.softmax import LOG2_E
from fa3.problem import Problem
from fa3.reference.dropout import Dropout
from fa3.reference.walker import CPU, BlockRows, SequenceRows, Walker, batched

QUERIES_OF_BLOCK, KEYS_OF_BLOCK = 64, 128  # sizes of the blocks


class Gradients(NamedTuple):
    """The gradients of a call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None  # None if unwanted or missing


class BackwardOperands(NamedTuple):
    """What the backward pass reads, of dense or packed sequences."""

    # q, k, v: as the forward pass took them.
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    # out, lse: what it gave.
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor  # like out, dtype of q: the gradient of out
    d_lse: torch.Tensor  # like lse, float32: the gradient of the log-sum-exp


# As in the forward pass: 16 bits around a call leave its sums in 32.
@torch.autocast("cpu", enabled=False)
def execute_backward(
    problem: Problem,
    operands: BackwardOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    wants_sinks: bool = True,
    fp32_dkv: bool = False,
    dropout: Dropout | None = None,
    sequences: list[SequenceRows] | None = None,
) -> Gradients:
    """Compute the gradients of attention of CPU tensors.

    Args:
        problem: of the call; its scores must have a `derivative`.
        softmax_scale, tensors, dropout: as the forward pass took them.
        fp32_dkv: whether dK and dV are in fp32, to add up the gradients of several calls.
        sequences: the sequences, if they are packed.

    Returns:
        gradients of q, k, v and the sinks, of their shapes and dtypes, contiguous, dQ as out; 0 in
        rows of no sequence. A row that sees no key gets 0 and adds nothing, whatever came for it.
    """
    q, k, v, out, lse, d_out, d_lse = batched(operands)
    values = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "softmax_scale": softmax_scale}
    walk = Walker(problem.spec, problem.window, values | {"modifiers": tensors, "dropout": dropout})
    is_empty = lse == -torch.inf
    # exp2(score - inf) is the 0 that all P of an empty row are.
    lse = lse.masked_fill(is_empty, torch.inf)
    d_out = d_out.masked_fill(is_empty.transpose(1, 2)[..., None], 0.0)
    delta = (d_out.float() * out.float()).sum(dim=3).transpose(1, 2) - d_lse
    delta = delta.masked_fill(is_empty, 0.0)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=CPU)
    dtype = torch.float32 if fp32_dkv else k.dtype
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=CPU) for x in (k, v))
    dense = SequenceRows.dense(len(q), q.shape[1], k.shape[1])
    places = dense if sequences is None else sequences
    for place, head_kv, begin in (
        (one, head, first)
        for one in places
        for head in range(k.shape[2])
        for first in range(0, len(one.k), KEYS_OF_BLOCK)
    ):
        positions = range(begin, min(begin + KEYS_OF_BLOCK, len(place.k)))
        k_tile, v_tile = walk.load(place.keys(head_kv), positions)
        acc_dK, acc_dV = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows, is_masked in query_blocks(walk, place, head_kv, positions):
            batch, queries, head = rows.place
            q_block, d_out_block = q[rows.place].float(), d_out[rows.place].float()
            scores, kept, slope = walk.logits(
                rows, positions, q_block, k_tile, softmax_scale, is_masked, has_slope=True
            )
            kept = kept if dropout is None else kept / dropout.kept
            p = torch.exp2((scores - lse[batch, head, queries, None]) * LOG2_E)
            acc_dV += walk.rounded(p * kept).T @ d_out_block
            dP = d_out_block @ v_tile.T * kept
            dS = walk.rounded(p * (dP - delta[batch, head, queries, None]) * slope)
            acc_dK += dS.T @ q_block
            dq[rows.place] += dS @ k_tile
        rows_of_tile = slice(place.k.start + begin, place.k.start + positions.stop)
        tile = place.entry_k, rows_of_tile, head_kv
        dk[tile], dv[tile] = acc_dK * softmax_scale, acc_dV
    d_sinks = None
    if walk.sinks is not None and wants_sinks:
        parts = [slice(None)] if sequences is None else [slice(x.q.start, x.q.stop) for x in places]
        sinks = walk.sinks.float()
        sums = (gradient_of_sinks(sinks, lse[..., x], delta[..., x]) for x in parts)
        d_sinks = reduce(torch.add, sums).to(walk.sinks.dtype)
    gradients = (dq * softmax_scale).to(getattr(torch, problem.spec.out_dtype)), dk, dv
    d_q, d_k, d_v = (one.view(x.shape) for one, x in zip(gradients, operands, strict=False))
    return Gradients(d_q, d_k, d_v, d_sinks)


def query_blocks(
    walk: Walker, place: SequenceRows, head_kv: int, keys: range
) -> Iterator[tuple[BlockRows, bool]]:
    """Yield query blocks that may see keys, and whether pairs are hidden."""
    sequence, group = place.sequence(walk.window), walk.q.shape[2] // walk.k.shape[2]
    for head in range(head_kv * group, (head_kv + 1) * group):
        blocks = walk.mask.at(place.batch, head).query_blocks(
            keys.start, KEYS_OF_BLOCK, QUERIES_OF_BLOCK, sequence
        )
        for m_block in range(blocks.begin, blocks.end):
            begin = m_block * QUERIES_OF_BLOCK
            queries = range(begin, min(begin + QUERIES_OF_BLOCK, sequence.seqlen_q))
            is_masked = not blocks.full_begin <= m_block < blocks.full_end
            yield walk.rows(place, queries, head), is_masked


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks (heads,), which are keys without a value.
    From lse and delta (batch, heads, seqlen_q).
    """
    p = torch.exp(sinks.float()[:, None] - lse)
    return -(p * delta).sum(dim=(0, 2)).to(sinks.dtype)
