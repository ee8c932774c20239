"""Ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fa3.distributed.alone import FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import Joined, Split, orders
from fa3.distributed.pieces import RowExchange, everything_of, exchange_of


@dataclass(frozen=True)
class Ulysses:
    """Heads for rows, and back.

    Attributes:
        part: attention of the whole sequence, of this rank's heads.
        joined: q, k and v of these heads.
        copies: how often each key/value head is there, so that each rank has whole heads.
        exchange: by which ranks get all rows.
        orders: the rows' orders by ranks and in the sequence, or none.
    """

    split: Split
    part: KeyPart
    joined: Joined
    copies: int
    exchange: RowExchange
    orders: tuple[Tensor, ...]

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Return a tensor with its heads, dimension `dim`, as ranks and heads."""
        return x.unflatten(dim, (len(self.split.rows), -1))

    def to_heads(self, joined: Joined, *tensors: Tensor) -> Tensor:
        """Return all rows of this rank's heads, joined, of (batch, rows, heads, columns)."""
        total, kept, sent, received = self.exchange
        leaving = joined.empty(tensors[0], len(self.split.rows) * tensors[0].shape[1])
        for x, target in zip(tensors, joined.views(leaving), strict=True):
            target.unflatten(1, (len(self.split.rows), -1)).copy_(self.by_rank(x, 2).movedim(2, 1))
        leaving, buffer = self.by_rank(leaving, 0), joined.empty(tensors[0], total)
        messages = [(rank, leaving[rank, rows]) for rank, rows in sent]
        wait = self.split.start(messages, [(rank, buffer[rows]) for rank, rows in received])
        for rows, places in kept:
            buffer[places].copy_(leaving[self.split.rank, rows])
        wait()
        return buffer.index_select(0, self.orders[1]) if self.orders else buffer

    def to_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Return (batch, rows, heads, columns) of all rows of this rank's heads."""
        _, kept, sent, received = self.exchange
        held = [x.transpose(0, 1).contiguous() for x in tensors]
        if self.orders:
            held = [x.index_select(0, self.orders[0]) for x in held]
        shape = len(self.split.rows), self.split.rows[self.split.rank]
        placed = [x.new_empty(*shape, *x.shape[1:]) for x in held]
        wait = self.split.start(
            [(rank, x[places]) for rank, places in received for x in held],
            [(rank, x[rank, rows]) for rank, rows in sent for x in placed],
        )
        for rows, places in kept:
            for x, y in zip(held, placed, strict=True):
                y[self.split.rank, rows].copy_(x[places])
        wait()
        return [x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in placed]

    def modifiers_of(self, modifiers: tuple) -> tuple[Tensor | None, ...]:
        """Return the slopes and sinks of this rank's heads."""
        mine = (None if x is None else self.by_rank(x, x.ndim - 1) for x in modifiers)
        return tuple(None if x is None else x[..., self.split.rank, :] for x in mine)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 2) for x in (k, v))
        buffer = self.to_heads(self.joined, q, k, v)
        tensors = *self.joined.views(buffer), None
        out, lse = self.part.forward(tensors, self.modifiers_of(modifiers))
        columns = [lse.transpose(1, 2)[..., None]] if returns_lse else []
        rows, *lses = self.to_rows(out, *columns)
        return rows, lses[0].squeeze(3).transpose(1, 2) if lses else None, (buffer, out, lse)

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients; copies of a key/value head have theirs added up in float32."""
        buffer, out, lse = saved
        if d_out is not None:
            joined = Joined.of(len(out), (out.shape[2], out.shape[3]))
            (d_out,) = joined.views(self.to_heads(joined, d_out))
        if d_lse is not None:
            joined = Joined.of(len(out), (out.shape[2], 1))
            (d_lse,) = joined.views(self.to_heads(joined, d_lse.transpose(1, 2)[..., None]))
            d_lse = d_lse.squeeze(3).transpose(1, 2)
        tensors = *self.joined.views(buffer), out, lse, d_out, d_lse
        fp32 = self.copies > 1
        *grads, mine = self.part.backward(tensors, self.modifiers_of(modifiers), fp32_dkv=fp32)
        dq, dk, dv = self.to_rows(*grads)
        if fp32:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        d_sinks = None
        if mine is not None:
            d_sinks = torch.zeros_like(modifiers[1])
            self.by_rank(d_sinks, 0)[self.split.rank] = mine
        return dq, dk, dv, d_sinks


def ulysses_of(
    split: Split,
    part: KeyPart,
    ends: tuple[int, ...],  # of documents
    batch: int,
    sizes: Sequence[tuple[int, int]],  # heads and columns of q, k and v
    device: torch.device,
) -> Ulysses:
    """Return what computes a call."""
    count, heads_kv = len(split.rows), sizes[1][0]
    copies = math.lcm(heads_kv, count) // heads_kv
    repeated = zip(sizes, (1, copies, copies), strict=True)
    joined = Joined.of(batch, *((heads * n // count, columns) for (heads, columns), n in repeated))
    if not ends:
        everything = ((range(sum(split.rows)),),) * count
        exchange = exchange_of(split.chunks, everything, split.rank)
        return Ulysses(split, part, joined, copies, exchange, ())
    rows = tuple(end - begin for begin, end in pairwise(ends))
    part = replace(part, lengths=packed_lengths(device, rows, rows))
    exchange = everything_of(split.rows, split.rank, False)
    return Ulysses(split, part, joined, copies, exchange, orders(split.chunks, device))
