"""Ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fa3.distributed.alone import FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import RankCall, Split, orders
from fa3.distributed.transfer import Transfer, everything_of, exchange_of


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
        In shared memory they are there until the next transfer of that number."""
        held = self.transfers[name].start(tensors)()
        return [x.index_select(1, self.orders[1]) for x in held] if self.orders else held

    def to_rows(self, name: str, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to send all rows of this rank's heads to the ranks that have the rows. Return what
        waits for (batch, rows, heads, columns)."""
        held = [x.index_select(1, self.orders[0]) for x in tensors] if self.orders else tensors
        wait = self.transfers[name].start(held)
        # From each rank come its heads. This copies, as what waits returns may be written again.
        return lambda: [torch.cat([*x], 2) for x in wait()]

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
        of_out, lse_rows = self.to_rows("out", out), None
        in_inbox = self.transfers["qkv"].in_shared_memory and not self.orders
        if in_inbox and self.part.options.has_gradient:
            held = [x.clone() for x in held]  # while the output is under way
        if returns_lse:
            (of_lse,) = self.to_rows("lse", lse.transpose(1, 2)[..., None])()
            lse_rows = of_lse.squeeze(3).transpose(1, 2)
        return of_out()[0], lse_rows, (*held, out, lse)

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
        of_dq, of_dkv = self.to_rows("dq", grads[0]), self.to_rows("dkv", *grads[1:])
        (dq,), (dk, dv) = of_dq(), of_dkv()
        if fp32:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        d_sinks = None
        if mine is not None:
            d_sinks = torch.zeros_like(modifiers[1])
            d_sinks.unflatten(0, (len(self.split.rows), -1))[self.split.rank] = mine
        return dq, dk, dv, d_sinks


def ulysses(call: RankCall) -> Ulysses:
    """Return what computes a call."""
    split, part, ends, fp32 = call.split, call.part, call.ends, torch.float32
    count, ((heads, columns), (heads_kv, _), (_, columns_v)) = len(split.rows), call.sizes
    copies = math.lcm(heads_kv, count) // heads_kv
    of_q, of_out, of_lse = ((heads // count, x) for x in (columns, columns_v, 1))
    of_kv = [(heads_kv * copies // count, x) for x in (columns, columns_v)]
    every = ((range(sum(split.rows)),),) * count
    there = everything_of(split.rows) if ends else exchange_of(split.chunks, every)
    named = {
        "qkv": (call.dtype, 0, [of_q, *of_kv]), "d_out": (call.dtype, 0, [of_out]),
        "d_lse": (fp32, 1, [of_lse]),
        "out": (call.dtype, 2, [of_out]), "lse": (fp32, 3, [of_lse]),
        "dq": (call.dtype, 2, [of_q]), "dkv": (fp32 if copies > 1 else call.dtype, 3, of_kv),
    }  # fmt: skip
    transfers = {}
    for name, (kind, number, sizes) in named.items():
        to_heads = number < 2
        exchange = there if to_heads else there.back(split.rows)
        flags = {"shares_heads": to_heads, "by_source": not to_heads, "is_free": not to_heads}
        transfers[name] = call.transfer(exchange, kind, number, sizes, **flags)
    if not ends:
        return Ulysses(split, part, copies, (), transfers)
    rows = tuple(end - begin for begin, end in pairwise(ends))
    part = replace(part, lengths=packed_lengths(call.device, rows, rows))
    return Ulysses(split, part, copies, orders(split.chunks, call.device), transfers)
