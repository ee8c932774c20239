"""Ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from fa3.distributed.alone import FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import Split, orders
from fa3.distributed.pieces import Exchange, Move, everything_of, exchange_of
from fa3.distributed.transfer import Start, by_rows, starting


@dataclass(frozen=True)
class Ulysses:
    """Heads for rows, and back.

    Attributes:
        part: attention of the whole sequence, of this rank's heads.
        copies: how often each key/value head is there, so that each rank has whole heads.
        orders: the rows' orders by ranks and in the sequence, or none.
        starts: by name, what begins to exchange tensors.
    """

    split: Split
    part: KeyPart
    copies: int
    orders: tuple[Tensor, ...]
    starts: dict[str, Start]

    def to_heads(self, name: str, *tensors: Tensor) -> tuple[list[Tensor], Callable]:
        """Return all rows of this rank's heads, and what to call after they are read."""
        arrival = self.starts[name](by_rows(*tensors))
        arrival.wait()
        held, release = list(arrival.tensors), arrival.release
        if self.orders:
            held = [x.index_select(0, self.orders[1]) for x in held]
        elif name == "qkv" and self.part.asked.has_gradient:
            held = [x.clone() for x in held]  # for the backward pass
        return [x.transpose(0, 1) for x in held], release

    def to_rows(self, name: str, *tensors: Tensor) -> list[Tensor]:
        """Return (batch, rows, heads, columns) of all rows of this rank's heads."""
        held = by_rows(*tensors)
        if self.orders:
            held = [x.index_select(0, self.orders[0]) for x in held]
        arrival = self.starts[name](held)
        arrival.wait()
        results = [x.transpose(0, 1).clone() for x in arrival.tensors]
        arrival.release()
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
        held, release = self.to_heads("qkv", q, k, v)
        out, lse = self.part.forward((*held, None), self.modifiers_of(modifiers))
        release()
        (rows,) = self.to_rows("out", out)
        lses = self.to_rows("lse", lse.transpose(1, 2)[..., None]) if returns_lse else []
        return rows, lses[0].squeeze(3).transpose(1, 2) if lses else None, (*held, out, lse)

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients; copies of a key/value head have theirs added up in float32."""
        releases = []
        if d_out is not None:
            (d_out,), release = self.to_heads("d_out", d_out)
            releases.append(release)
        if d_lse is not None:
            (d_lse,), release = self.to_heads("d_lse", d_lse.transpose(1, 2)[..., None])
            d_lse = d_lse.squeeze(3).transpose(1, 2)
            releases.append(release)
        fp32 = self.copies > 1
        tensors = *saved, d_out, d_lse
        *grads, mine = self.part.backward(tensors, self.modifiers_of(modifiers), fp32_dkv=fp32)
        for release in releases:
            release()
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
    count, (_, (heads_kv, _), (_, columns_v)) = len(split.rows), sizes
    copies = math.lcm(heads_kv, count) // heads_kv
    q, k, v = ((heads * n, x) for (heads, x), n in zip(sizes, (1, copies, copies), strict=True))
    every = (range(sum(split.rows)),)
    there = everything_of(split.rows) if ends else exchange_of(split.chunks, (every,) * count)
    here = Exchange(
        split.rows, tuple(Move(b, a, places, rows) for a, b, rows, places in there.moves)
    )
    mine = tuple((heads // count, columns) for heads, columns in (q, k, v))
    of_out, of_lse = (mine[0][0], columns_v), (mine[0][0], 1)
    sums = torch.float32 if copies > 1 else dtype
    whole = (q[0], columns_v), (q[0], 1)
    leaving = {
        "qkv": (dtype, (q, k, v)), "d_out": (dtype, whole[:1]), "d_lse": (torch.float32, whole[1:]),
    }  # fmt: skip
    coming = {
        "out": (dtype, [of_out]), "lse": (torch.float32, [of_lse]), "dq": (dtype, mine[:1]),
        "dkv": (sums, mine[1:]),
    }  # fmt: skip
    starts = {}
    for i, (name, (kind, shapes)) in enumerate((leaving | coming).items()):
        exchange, named = (
            (there, "leaves_by_heads") if name in leaving else (here, "comes_by_heads")
        )
        starts[name] = starting(
            exchange, kind, i, split.group, batch, shapes, device, **{named: True}
        )
    if not ends:
        return Ulysses(split, part, copies, (), starts)
    rows = tuple(end - begin for begin, end in pairwise(ends))
    part = replace(part, lengths=packed_lengths(device, rows, rows))
    return Ulysses(split, part, copies, orders(split.chunks, device), starts)
