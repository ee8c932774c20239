"""Gather and ring: ranks get keys in hops, and gradients go back.

While keys are under way, a rank attends to those that came before. Partial outputs are merged in
float32 by their log-sum-exps. dK and dV go back in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from fa3.distributed.alone import KeyPart
from fa3.distributed.steps import steps_of
from fa3.distributed.transfer import RankCall, Transfer

Terms = list[tuple[slice, Sequence[Tensor]]]
"""Rows, and what is added up there of each of some tensors."""


@dataclass(frozen=True)
class Hop:
    """Keys that come here together, or this rank's own.

    Attributes:
        coming, going: bring keys here, and gradients back; None for this rank's own.
        used: this rank's keys, see `RowExchange.gradients`.
    """

    parts: list[KeyPart]
    coming: Transfer | None = None
    going: Transfer | None = None
    used: Sequence = ()

    def start_back(self, terms: Terms, like: Tensor) -> Callable[[], Terms]:
        """Begin to bring gradients of keys back to their ranks.
        Return what waits for the gradients of this rank's rows, from here and from other ranks."""
        if self.coming is None or (going := self.going) is None:
            return lambda: terms
        sums = added_up(terms, like, self.coming.exchange.totals[going.rank], going.kinds)
        wait = going.start(sums)

        def finish() -> Terms:
            return [
                (rows, [at_rows(x, places) for x in tensors])
                for tensors, moved in zip((sums, wait()), self.used, strict=True)
                for rows, places in moved
            ]

        return finish


class Hops:
    """Gather, or a ring: keys come while ranks compute.

    Attributes:
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
        keeps: whether keys that come are kept for the backward pass; else they come again.
        dkv_dtype: of dK and dV; fp32_parts: whether parts have theirs in fp32.
        merges: whether outputs of several parts are merged; part_dtype: of parts' out and dQ.
    """

    def __init__(self, call: RankCall, by_ring: bool) -> None:
        rank, (of_q, *sizes) = call.rank, call.sizes
        local, steps = steps_of(call.chunks, call.ends, call.order, call.part, by_ring)
        self.keeps = keeps_keys(call.part, len(call.chunks), of_q[0], sizes[0][0])
        self.hops = [Hop(local[rank])]
        self.dkv_dtype, is_sum = call.dkv_dtype, bool(steps) or len(local[rank]) != 1
        self.fp32_parts = is_sum or self.dkv_dtype == torch.float32
        kinds: Any = [[(*x, kind) for x in sizes] for kind in (call.dtype, torch.float32)]
        for number, (exchange, parts) in enumerate(steps):
            # Hops in a row have other memory.
            back, used = exchange.gradients(rank)
            going = Transfer(call, back, kinds[1], number=2 + number)
            coming = Transfer(call, exchange, kinds[0], number=number % 2)
            self.hops.append(Hop(parts[rank], coming, going, used))
        self.merges = any(part.merges for hop in self.hops for part in hop.parts)
        self.part_dtype = torch.float32 if self.merges else call.dtype

    def arrivals(
        self, there: Sequence[Sequence[Tensor]], step: int
    ) -> Iterator[tuple[Hop, Sequence[Tensor]]]:
        """Yield each hop and its keys and values.
        Keys of the first hops are there. Others come now, the next ones before these are used."""

        def begun(i: int) -> Callable[[], Sequence[Tensor]]:
            if i < len(there) or (coming := self.hops[i].coming) is None:
                return lambda: there[i]
            coming.meet()
            return coming.start(there[0], is_kept=True)

        order = range(len(self.hops))[::step]
        waits = [begun(order[0])]
        for i, hop in enumerate(self.hops[::step]):
            waits += map(begun, order[i + 1 : i + 2])
            yield hop, waits[i]()
            if hop.coming and order[i] >= len(there):
                hop.coming.end()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=self.part_dtype)
        kept, lses, lse = list[Tensor](), list[tuple[int, Tensor]](), None
        # Copy engines want rows without gaps.
        for hop, keys in self.arrivals([(k.contiguous(), v.contiguous())], 1):
            for part in hop.parts:
                rows = part.rows
                read = at_rows(q, rows), *(at_rows(x, part.keys) for x in keys)
                here = at_rows(out, rows)
                if not part.merges:
                    lses.append((rows.start, part.forward((*read, here), modifiers)[1]))
                    continue
                if lse is None:
                    lse = lse_of_rows(lses)
                    lses = [(0, lse)]
                more = part.forward((*read, torch.empty_like(here)), (None, None))
                merge_into(here, at_rows(lse, rows, -1), *more)
            if self.keeps or not hop.coming:
                # Other calls write to memory that ranks share.
                is_shared = hop.coming and hop.coming.in_shared_memory
                kept += [x.clone() for x in keys] if is_shared else keys
        out = out.to(q.dtype)
        saved = q, out, *kept, *(lse for _, lse in lses)
        return out, lse_of_rows(lses) if returns_lse else None, saved

    def backward(
        self, modifiers: tuple, d_out: Tensor, d_lse: Tensor | None, *saved: Tensor
    ) -> tuple:
        """Return the gradients, by out and the log-sum-exp of all keys.
        This rank's own keys come last, while gradients go back to other ranks."""
        num_kept = 2 * len(self.hops) if self.keeps else 2
        (q, out, *kept), lses = saved[: 2 + num_kept], [*saved[2 + num_kept :]]
        there = [*zip(kept[::2], kept[1::2], strict=True)]
        query_terms, key_terms, finish = Terms(), Terms(), lambda: Terms()
        d_sinks: Tensor | None = None
        dq = torch.empty_like(q, dtype=self.part_dtype, memory_format=torch.contiguous_format)
        if self.keeps and (going := self.hops[-1].going):
            going.meet()
        for hop, keys in self.arrivals(there, -1):
            hop_terms = Terms()
            for part in hop.parts[::-1]:
                rows = part.rows
                lse = at_rows(lses[0], rows, -1).contiguous() if self.merges else lses.pop()
                tensors: list[Any] = [at_rows(q, rows), *(at_rows(x, part.keys) for x in keys)]
                tensors += [at_rows(out, rows), lse, at_rows(d_out, rows)]
                tensors += [None if d_lse is None else at_rows(d_lse, rows, -1)]
                read, to = ((None, None), None) if part.merges else (modifiers, at_rows(dq, rows))
                part_dq, *dkv, more = part.backward(tensors, read, to, self.fp32_parts)
                if more is not None:
                    d_sinks = more if d_sinks is None else d_sinks + more
                sums = [x for at, (x,) in query_terms if at == rows and part.merges]
                if sums:  # one sum for these rows, not a dQ for each hop
                    sums[0].add_(part_dq)
                else:
                    query_terms.append((rows, [part_dq]))
                hop_terms.append((part.keys, dkv))
            finish_next = hop.start_back(hop_terms, q)
            key_terms += finish()
            finish = finish_next
        key_terms += finish()
        if self.merges:
            (dq,) = added_up(query_terms, q, q.shape[-3], [(*q.shape[-2:], q.dtype)])
        kinds = [(*x.shape[-2:], self.dkv_dtype) for x in there[0]]
        dk, dv = added_up(key_terms, q, q.shape[-3], kinds)
        return dq, dk, dv, d_sinks


def at_rows(x: Tensor, rows: slice, dim: int = -3) -> Tensor:
    """Return some rows of a tensor."""
    count = rows.stop - rows.start
    return x if count == x.shape[dim] else x.narrow(dim, rows.start, count)


def lse_of_rows(lses: list[tuple[int, Tensor]]) -> Tensor:
    """Return all rows' log-sum-exp from the parts', each with its first row."""
    parts = [lse for _, lse in sorted(lses, key=lambda one: one[0])]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def added_up(terms: Terms, like: Tensor, total: int, kinds: Sequence) -> Sequence[Tensor]:
    """Return sums of terms, (*batch, total, heads, columns) of these kinds.
    Rows of no term are 0. A single term that has all rows is the sum."""
    if [(rows, *(x.dtype for x in tensors)) for rows, tensors in terms] == [
        (slice(0, total), *(dtype for *_, dtype in kinds))
    ]:
        return terms[0][1]
    batch = like.shape[:-3]
    results = [like.new_empty(*batch, total, *x, dtype=dtype) for *x, dtype in kinds]
    edges = {edge for rows, _ in terms for edge in (rows.start, rows.stop)}
    for (begin, end), i in product(pairwise(sorted(edges | {0, total})), range(len(kinds))):
        addends = [
            at_rows(x[i], slice(begin - rows.start, end - rows.start))
            for rows, x in terms
            if rows.start <= begin and end <= rows.stop
        ]
        while len(addends) > 2:
            addends.append(addends.pop().float() + addends.pop())
        place = at_rows(results[i], slice(begin, end))
        if len(addends) == 2:
            torch.add(*addends, out=place)
        elif addends:
            place.copy_(addends[0])
        else:
            place.zero_()
    return results


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys, in float32, into out and its log-sum-exp."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part, weight.mT[..., None])
    lse.copy_(both)


def keeps_keys(part: KeyPart, num_ranks: int, heads_q: int, heads_kv: int) -> bool:
    """Whether keys are kept for the backward pass: if they are small."""
    return part.options.has_gradient and heads_kv * num_ranks <= heads_q
