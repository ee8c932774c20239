"""The gradients of attention on the CPU: key block by key block in torch, as a kernel would do it.

K and V of a block stay, and the query blocks that touch it pass by, of all query heads that share
the block: so dK and dV of a block are summed in one place, and dQ of a row block by block in the
order of the keys. P comes again from Q K^T and the log-sum-exp that the forward pass left. Sums
are kept in fp32; P and dS are rounded to the input dtype before they are multiplied, as P is in
`fa3.reference.block_loop`. The order is fixed, so the same call gives the same bits.

What comes in is what a forward pass took and gave, and the gradients of what it gave
(`fa3.calls.autograd` brings them); what goes out are the gradients of q, k, v and the sinks.

Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 3.1, algorithm 2; Dao et al.,
FlashAttention (arXiv 2205.14135), algorithm 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fa3.primitives.coords import Position
from fa3.primitives.softmax import LOG2_E
from fa3.problem import Problem
from fa3.reference.block_loop import CPU
from fa3.reference.dropout import Dropout
from fa3.reference.forward import visible
from fa3.scores.masks import Sequence
from fa3.scores.scores import Score, bind

QUERIES_OF_BLOCK, KEYS_OF_BLOCK = 64, 128
"""Sizes of the blocks."""


class Wanted(NamedTuple):
    """Whose gradients are wanted."""

    q: bool = True
    k: bool = True
    v: bool = True
    sinks: bool = True


class Gradients(NamedTuple):
    """The gradients of a call; None for what is not wanted or not there."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None


class BackwardOperands(NamedTuple):
    """What the backward pass reads, on the CPU.

    Fields:
        q, k, v: as `fa3.reference.forward.execute` took them.
        out, lse: what it gave.
        d_out: (batch, seqlen_q, num_heads_q, head_dim_v), dtype of q: the gradient of out.
        d_lse: (batch, num_heads_q, seqlen_q), float32: the gradient of the log-sum-exp.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor
    d_lse: torch.Tensor


ALL_WANTED = Wanted()


# As in the forward pass: 16 bits around a call leave its sums in 32.
@torch.autocast("cpu", enabled=False)
def execute_backward(
    problem: Problem,
    operands: BackwardOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    wanted: Wanted = ALL_WANTED,
    first_batch: int = 0,
    dropout: Dropout | None = None,
) -> Gradients:
    """Compute the gradients of a problem posed by CPU tensors.

    Args:
        problem: its scores must have a `derivative`.
        softmax_scale, tensors, first_batch, dropout: as `fa3.reference.forward.execute` took them.
        wanted: of the sinks nothing is computed if there are none.

    Returns:
        gradients of q, k, v and the sinks, of their shapes and dtypes, contiguous. A row that sees
        no key gets 0 and adds nothing, whatever came for it.
    """
    q, k, v, out, lse, d_out, d_lse = operands
    scores, mask, sinks = bind(problem.spec, tensors)
    is_empty = lse == -torch.inf
    # exp2(score - inf) is the 0 that all P of an empty row are.
    lse = lse.masked_fill(is_empty, torch.inf)
    d_out = d_out.masked_fill(is_empty.transpose(1, 2)[..., None], 0.0)
    delta = (d_out.float() * out.float()).sum(dim=3).transpose(1, 2) - d_lse
    delta = delta.masked_fill(is_empty, 0.0)
    walk = BackwardWalk(
        problem, q, k, v, d_out, lse, delta, softmax_scale, scores, mask, first_batch, dropout
    )
    d_sinks = None
    if sinks is not None and wanted.sinks:
        d_sinks = gradient_of_sinks(sinks, lse, delta)
    dq, dk, dv = walk.run(wanted)
    return Gradients(dq, dk, dv, d_sinks)


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of a key without a value: for sinks (heads,), from lse and delta
    (batch, heads, seqlen_q).
    """
    p = torch.exp(sinks.float()[:, None] - lse)
    return -(p * delta).sum(dim=(0, 2)).to(sinks.dtype)


@dataclass(frozen=True)
class BackwardWalk:
    """One call's key blocks and what is needed to work on them.

    Fields:
        lse, delta: (batch, num_heads_q, seqlen_q), float32: log-sum-exps, infinite for rows that
            see no key; what dP is taken relative to.
        scores, mask: bound to their tensors.
        first_batch: what scores, mask and dropout take the first batch entry of q for.
        dropout: None without.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    softmax_scale: float
    scores: tuple[Score, ...]
    mask: Any
    first_batch: int
    dropout: Dropout | None

    def run(
        self, wanted: Wanted
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of q, k and v, in their dtypes."""
        needs_dS = wanted.q or wanted.k
        dq = torch.zeros(self.q.shape, dtype=torch.float32, device=CPU) if wanted.q else None
        dk = torch.empty(self.k.shape, dtype=self.k.dtype, device=CPU) if wanted.k else None
        dv = torch.empty(self.v.shape, dtype=self.v.dtype, device=CPU) if wanted.v else None
        for batch in range(self.problem.batch):
            for head_kv in range(self.problem.num_heads_kv):
                for begin in range(0, self.problem.seqlen_k, KEYS_OF_BLOCK):
                    keys = slice(begin, min(begin + KEYS_OF_BLOCK, self.problem.seqlen_k))
                    of_block = batch, keys, head_kv
                    acc_dK, acc_dV = self.key_block(of_block, dq, needs_dS)
                    if dk is not None:
                        dk[of_block] = (acc_dK * self.softmax_scale).to(dk.dtype)
                    if dv is not None:
                        dv[of_block] = acc_dV.to(dv.dtype)
        dq = None if dq is None else (dq * self.softmax_scale).to(self.q.dtype)
        return dq, dk, dv

    def key_block(
        self, of_block: tuple[int, slice, int], dq: torch.Tensor | None, needs_dS: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let all query blocks that see a key block pass by, and add to their rows of dQ.

        Returns:
            dK (keys, head_dim), without the softmax scale as dQ is too, and dV
            (keys, head_dim_v), both float32.
        """
        batch, keys, head_kv = of_block
        k, v = self.k[of_block].float(), self.v[of_block].float()
        acc_dK, acc_dV = torch.zeros_like(k), torch.zeros_like(v)
        for head, rows, is_masked in self.query_blocks(batch, keys, head_kv):
            q, d_out = self.q[batch, rows, head].float(), self.d_out[batch, rows, head].float()
            p, kept, slope = self.probabilities(q, k, (batch, head, rows), keys, is_masked)
            acc_dV += self.rounded(p * kept).T @ d_out
            if not needs_dS:
                continue
            dP = d_out @ v.T * kept
            dS = self.rounded(p * (dP - self.delta[batch, head, rows, None]) * slope)
            acc_dK += dS.T @ q
            if dq is not None:
                dq[batch, rows, head] += dS @ k
        return acc_dK, acc_dV

    @property
    def sequence(self) -> Sequence:
        """Every sequence of the call."""
        return Sequence(self.problem.seqlen_q, self.problem.seqlen_k, self.problem.window)

    def query_blocks(
        self, batch: int, keys: slice, head_kv: int
    ) -> Iterator[tuple[int, slice, bool]]:
        """Yield the query blocks that may see the keys: head, rows, whether pairs are hidden."""
        sequence, group = self.sequence, self.problem.qhead_per_kvhead
        for head in range(head_kv * group, (head_kv + 1) * group):
            blocks = self.mask.at(self.first_batch + batch, head).query_blocks(
                keys.start, KEYS_OF_BLOCK, QUERIES_OF_BLOCK, sequence
            )
            for m_block in range(blocks.begin, blocks.end):
                begin = m_block * QUERIES_OF_BLOCK
                rows = slice(begin, min(begin + QUERIES_OF_BLOCK, sequence.seqlen_q))
                yield head, rows, not blocks.full_begin <= m_block < blocks.full_end

    def probabilities(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        place: tuple[int, int, slice],
        keys: slice,
        is_masked: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | float]:
        """P of a block (rows, keys), its factor by dropout, and dS / d(scale Q K^T)."""
        batch, head, rows = place
        sequence = self.sequence
        query = torch.arange(rows.start, rows.stop, device=CPU)[:, None]
        key = torch.arange(keys.start, keys.stop, device=CPU)
        number = self.first_batch + batch
        at = Position(number, head, query, key, sequence.seqlen_q, sequence.seqlen_k)
        values, slope = q @ k.T * self.softmax_scale, 1.0
        for score in self.scores:
            slope = slope * score.derivative(values, at)
            values = score.reference(values, at)
        if is_masked:
            values = values.masked_fill(~visible(self.mask, at, key, sequence), -torch.inf)
        p = torch.exp2((values - self.lse[batch, head, rows, None]) * LOG2_E)
        kept = 1.0 if self.dropout is None else self.dropout.keeps(at) / self.dropout.kept
        return p, kept, slope

    def rounded(self, operand: torch.Tensor) -> torch.Tensor:
        """An operand of a product as the tensor cores would get it."""
        return operand.to(self.q.dtype).float()
