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
from fa3.distributed.exchange import Split, orders
from fa3.distributed.pieces import Move, RowExchange, everything_of, exchange_of
from fa3.distributed.transfer import Transfer, by_rows, transfer_of


@dataclass(frozen=True)
class Ulysses:
    """Heads for rows, and back.

    Attributes:
        part: attention of the whole sequence, of this rank's heads.
        copies: how often each key/value head is there, so that each rank has whole heads.
        orders: the rows' orders by ranks and in the sequence, or none.
        transfers: by the name of what they bring.
    """

    split: Split
    part: KeyPart
    copies: int
    orders: tuple[Tensor, ...]
    transfers: dict[str, Transfer]

    def to_heads(self, name: str, *tensors: Tensor) -> list[Tensor]:
        """Return all rows of this rank's heads, of (batch, rows, heads, columns).
        Unless they are ordered here, they may be read until the transfer is released."""
        transfer = self.transfers[name].start(by_rows(*tensors))
        transfer.wait()
        held = transfer.tensors
        if self.orders:
            held = [x.index_select(0, self.orders[1]) for x in held]
        return [x.transpose(0, 1) for x in held]

    def to_rows(self, name: str, *tensors: Tensor) -> list[Tensor]:
        """Return (batch, rows, heads, columns) of all rows of this rank's heads."""
        held = by_rows(*tensors)
        if self.orders:
            held = [x.index_select(0, self.orders[0]) for x in held]
        transfer = self.transfers[name].start(held)
        transfer.wait()
        results = [x.transpose(0, 1).clone() for x in transfer.tensors]
        transfer.release()
        return results

    def modifiers_of(self, modifiers: tuple) -> tuple[Tensor | None, ...]:
        """Return the slopes and sinks of this rank's heads."""
        count, rank = len(self.split.rows), self.split.rank
        mine = (None if x is None else x.unflatten(-1, (count, -1)) for x in modifiers)
        return tuple(None if x is None else x[..., rank, :] for x in mine)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 2) for x in (k, v))
        held = self.to_heads("qkv", q, k, v)
        out, lse = self.part.forward((*held, None), self.modifiers_of(modifiers))
        if self.part.asked.has_gradient and not self.orders:
            held = [x.clone() for x in held]
        self.transfers["qkv"].release()
        (rows,) = self.to_rows("out", out)
        lses = self.to_rows("lse", lse.transpose(1, 2)[..., None]) if returns_lse else []
        return rows, lses[0].squeeze(3).transpose(1, 2) if lses else None, (*held, out, lse)

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients; copies of a key/value head have theirs added up in float32."""
        if d_out is not None:
            (d_out,) = self.to_heads("d_out", d_out)
        if d_lse is not None:
            (d_lse,) = self.to_heads("d_lse", d_lse.transpose(1, 2)[..., None])
            d_lse = d_lse.squeeze(3).transpose(1, 2)
        fp32 = self.copies > 1
        tensors = *saved, d_out, d_lse
        *grads, mine = self.part.backward(tensors, self.modifiers_of(modifiers), fp32_dkv=fp32)
        for name in ("d_out", "d_lse"):
            self.transfers[name].release()
        (dq,), (dk, dv) = self.to_rows("dq", grads[0]), self.to_rows("dkv", *grads[1:])
        if fp32:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        d_sinks = None
        if mine is not None:
            d_sinks = torch.zeros_like(modifiers[1])
            d_sinks.unflatten(0, (len(self.split.rows), -1))[self.split.rank] = mine
        return dq, dk, dv, d_sinks


def ulysses_of(
    split: Split,
    part: KeyPart,
    ends: tuple[int, ...],  # of documents
    batch: int,
    sizes: Sequence[tuple[int, int]],  # heads and columns of q, k and v
    dtype: torch.dtype,
    device: torch.device,
) -> Ulysses:
    """Return what computes a call."""
    count, (heads, columns), (heads_kv, _), (_, columns_v) = len(split.rows), *sizes
    copies = math.lcm(heads_kv, count) // heads_kv
    whole = [(heads, columns), (heads_kv * copies, columns), (heads_kv * copies, columns_v)]
    whole += (heads, columns_v), (heads, 1)
    shares = [(one // count, x) for one, x in whole]
    every = (range(sum(split.rows)),)
    there = everything_of(split.rows) if ends else exchange_of(split.chunks, (every,) * count)
    moves = [Move(target, source, at, rows) for source, target, rows, at in there.moves]
    here, fp32 = RowExchange(split.rows, tuple(moves)), torch.float32
    group = split.group, batch
    to_heads = {
        "qkv": (dtype, 0, whole[:3]), "d_out": (dtype, 1, whole[3:4]), "d_lse": (fp32, 2, whole[4:])
    }  # fmt: skip
    to_rows = {
        "out": (dtype, 3, shares[3:4]), "dq": (dtype, 3, shares[:1]),
        "dkv": (fp32 if copies > 1 else dtype, 4, shares[1:3]), "lse": (fp32, 5, shares[4:]),
    }  # fmt: skip
    transfers = {
        name: transfer_of(there, kind, number, *group, of, device, leaves_by_heads=True)
        for name, (kind, number, of) in to_heads.items()
    } | {
        name: transfer_of(here, kind, number, *group, of, device, comes_by_heads=True)
        for name, (kind, number, of) in to_rows.items()
    }
    if not ends:
        return Ulysses(split, part, copies, (), transfers)
    rows = tuple(end - begin for begin, end in pairwise(ends))
    part = replace(part, lengths=packed_lengths(device, rows, rows))
    return Ulysses(split, part, copies, orders(split.chunks, device), transfers)
