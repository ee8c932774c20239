"""Ulysses: each rank attends over the whole sequence of some heads.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fa3.distributed.hops import Hops
from fa3.distributed.transfer import RankCall, Transfer, exchange_of, together


class Ulysses:
    """Heads for rows, and back.

    Attributes:
        count, rank: of the ranks that exchange heads.
        inside: attention of this rank's heads.
        copies: how often each key/value head is there, so that each rank has whole heads.
        transfers: by the name of what they bring.
        is_shared: q, k and v come to memory that other calls write to, and have gradients.
    """

    def __init__(self, call: RankCall, by_ring: bool, *groups: dist.ProcessGroup) -> None:
        """Prepare a call.
        With two groups, ranks of the second one exchange heads. Gather or ring brings keys over the
        ranks of the first one."""
        (heads, columns), (heads_kv, _), (_, columns_v) = call.sizes
        outside, group = groups or (call.group, call.group)
        self.count = count = group.size()
        self.rank = group.rank()
        # Chunks of neighbouring ranks are neighbours. These are of all ranks that exchange heads.
        near = [call.chunks[i : i + count] for i in range(0, len(call.chunks), count)]
        wholes = tuple(together(sorted(chain(*x), key=attrgetter("start"))) for x in near)
        number = call.rank // count
        held, everything = tuple(map(together, near[number])), (wholes[number],) * count
        there, back = exchange_of(held, everything), exchange_of(everything, held)
        self.copies = copies = math.lcm(heads_kv, count) // heads_kv
        dkv_dtype = torch.float32 if copies > 1 else call.dtype
        heads, heads_kv = heads // count, heads_kv * copies // count
        sizes = (heads, columns), (heads_kv, columns), (heads_kv, columns_v)
        q, k, v = ((*x, call.dtype) for x in sizes)
        dk, dv = ((*x, dkv_dtype) for x in sizes[1:])
        out, lse = (heads, columns_v, call.dtype), (heads, 1, torch.float32)
        to_heads = {"qkv": [q, k, v], "d_out": [out], "d_out, d_lse": [out, lse]}
        to_rows = {"out": [out], "out, lse": [out, lse], "dq, dk, dv": [q, dk, dv]}
        here = call._replace(group=group)
        split: Any = {"number": 0, "heads": "split"}
        join: Any = {"number": 1, "heads": "join"}
        self.transfers = {x: Transfer(here, there, y, **split) for x, y in to_heads.items()}
        self.transfers |= {x: Transfer(here, back, y, **join) for x, y in to_rows.items()}
        outer = call._replace(chunks=wholes, group=outside, rank=number, sizes=sizes)
        self.inside = Hops(outer._replace(dkv_dtype=dkv_dtype), by_ring)
        is_shared = self.transfers["qkv"].in_shared_memory
        self.is_shared = is_shared and call.part.options.has_gradient

    def modifiers_of(self, modifiers: tuple) -> tuple[Tensor | None, ...]:
        """Return the slopes and sinks of this rank's heads."""
        return tuple(x if x is None else x.chunk(self.count, -1)[self.rank] for x in modifiers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, -2) for x in (k, v))
        self.transfers["qkv"].meet()
        q, k, v = self.transfers["qkv"].start((q, k, v))()
        out, lse, saved = self.inside.forward(q, k, v, self.modifiers_of(modifiers), returns_lse)
        named = ("out, lse", out, lse.mT[..., None]) if returns_lse else ("out", out)
        wait = self.transfers[named[0]].start(named[1:])
        if self.is_shared:
            # Other calls write there. This copies while the output is under way.
            copies = {id(x): x.clone() for x in (q, k, v)}
            saved = tuple(copies.get(id(x), x) for x in saved)
        out, *lses = wait()
        return out, lses[0].squeeze(-1).mT if lses else None, saved

    def backward(
        self, modifiers: tuple, d_out: Tensor, d_lse: Tensor | None, *saved: Tensor
    ) -> tuple:
        """Return the gradients; key/value heads' copies have theirs added in float32."""
        named = ("d_out", d_out) if d_lse is None else ("d_out, d_lse", d_out, d_lse.mT[..., None])
        there = self.transfers[named[0]]
        there.meet()
        d_out, *lses = there.start(named[1:])()
        d_lse = lses[0].squeeze(-1).mT if lses else None
        *grads, mine = self.inside.backward(self.modifiers_of(modifiers), d_out, d_lse, *saved)
        dq, dk, dv = self.transfers["dq, dk, dv"].start(grads)()
        if self.copies > 1:
            dk, dv = (x.unflatten(-2, (-1, self.copies)).sum(-2) for x in (dk, dv))
        d_sinks = None
        if mine is not None:
            d_sinks = torch.zeros_like(modifiers[1])
            d_sinks.unflatten(0, (self.count, -1))[self.rank] = mine
        return dq, dk, dv, d_sinks
