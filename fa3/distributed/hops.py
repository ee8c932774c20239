"""Gather and ring: ranks get keys in hops, and gradients go back.

While keys are under way, a rank attends to those that came before. Partial outputs are merged in
float32 by their log-sum-exps. dK and dV go back in float32.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from fa3.distributed.alone import FourGradients, KeyPart
from fa3.distributed.exchange import RankCall
from fa3.distributed.steps import steps_of
from fa3.distributed.transfer import Transfer

Terms = list[tuple[slice, Sequence[Tensor]]]
"""Rows, and what is added up there of each of some tensors."""


@dataclass(frozen=True)
class Hop:
    """Keys that come here together, or this rank's own.

    Attributes:
        coming, going: bring keys here, and gradients back; None for this rank's own.
    """

    parts: tuple[KeyPart, ...]
    coming: Transfer | None = None
    going: Transfer | None = None

    def start_back(self, terms: Terms, like: Tensor) -> Callable[[], Terms]:
        """Begin to bring gradients of keys back to their ranks.
        Return what waits for the gradients of this rank's rows, from here and from other ranks."""
        if (coming := self.coming) is None or (going := self.going) is None:
            return lambda: terms
        total = coming.exchange.totals[going.rank]
        sums = added_up(terms, like, total, going.kinds)
        wait = going.start(sums)

        def finish() -> Terms:
            results, arrived, begin = Terms(), wait(), 0
            for source, target, rows, places in coming.exchange.moves:
                if source == target == going.rank:
                    results.append((rows, [x[:, places] for x in sums]))
                elif source == going.rank:
                    end = begin + rows.stop - rows.start
                    results.append((rows, [x[:, begin:end] for x in arrived]))
                    begin = end
            return results

        return finish


@dataclass(frozen=True)
class Hops:
    """Keys come to each rank, the next ones while it computes.

    Attributes:
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
        keeps: whether keys that come are kept for the backward pass; else they come again.
        dkv_dtype: of dK and dV.
    """

    hops: tuple[Hop, ...]
    keeps: bool = False
    dkv_dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls, hops: Sequence[Hop], keeps: bool = False, dkv_dtype: torch.dtype = torch.float32
    ) -> "Hops":
        """Return hops whose parts leave SMs while rows are under way.
        With two hops none are while the last one computes, in neither pass."""
        free = len(hops) - (len(hops) < 3)
        leaving = [replace(x, parts=tuple(y.leaving_sms() for y in x.parts)) for x in hops[:free]]
        return cls((*leaving, *hops[free:]), keeps, dkv_dtype)

    def arrivals(
        self, k: Tensor, v: Tensor, step: int, kept: Sequence[Tensor] = ()
    ) -> Iterator[tuple[Hop, Sequence[Tensor]]]:
        """Yield each hop and its keys and values, kept or coming now."""
        # Copy engines want rows without gaps.
        hops, own, waits = self.hops[::step], (k.contiguous(), v.contiguous()), list[Callable]()
        pairs = [kept[i : i + 2] for i in range(0, len(kept), 2)][::step]
        for i, hop in enumerate(hops):
            for coming in (after.coming for after in hops[len(waits) : i + 2]):
                if coming and not kept:
                    waits.append(coming.start(own, meets=True))
                else:
                    waits.append(functools.partial(tuple, pairs.pop(0) if coming else own))
            yield hop, waits[i]()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        lses, out = list[tuple[int, Tensor]](), q.new_empty(*q.shape[:3], v.shape[3])
        kept = list[Tensor]()
        total: Any = None
        for hop, keys in self.arrivals(k, v, 1):
            for part in hop.parts:
                rows, read = part.rows, [q[:, part.rows], *(x[:, part.keys] for x in keys)]
                if not part.merges:
                    _, lse = part.forward((*read, out[:, rows]), modifiers)
                    lses.append((rows.start, lse))
                    continue
                if total is None:
                    total, lses = out.float(), [(0, lse_of_rows(lses))]
                more = part.forward((*read, None), (None, None))
                merge_into(total[:, rows], lses[0][1][:, :, rows], *more)
            if self.keeps and hop.coming:
                # Other calls write to memory that ranks share.
                kept += [x.clone() for x in keys] if hop.coming.in_shared_memory else keys
        out = out if total is None else total.to(q.dtype)
        saved = q, out, k, v, *kept, *(lse for _, lse in lses)
        return out, lse_of_rows(lses) if returns_lse else None, saved

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients, by out and the log-sum-exp of all keys.
        This rank's own keys come last, while gradients go back to other ranks."""
        merges = any(part.merges for hop in self.hops for part in hop.parts)
        num_kept = 2 * self.keeps * sum(1 for hop in self.hops if hop.coming)
        (q, out, k, v, *kept), lses = saved[: 4 + num_kept], list(saved[4 + num_kept :])
        query_terms, key_terms, finish = Terms(), Terms(), lambda: Terms()
        d_sinks: Tensor | None = None
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        for hop, keys in self.arrivals(k, v, -1, kept):
            hop_terms = Terms()
            for part in hop.parts[::-1]:
                rows = part.rows
                lse = lses[0][:, :, rows].contiguous() if merges else lses.pop()
                tensors: list[Any] = [q[:, rows], *(x[:, part.keys] for x in keys), out[:, rows]]
                tensors += [lse, None if d_out is None else d_out[:, rows]]
                tensors += [None if d_lse is None else d_lse[:, :, rows]]
                target, read = (None, (None, None)) if part.merges else (dq[:, rows], modifiers)
                fp32 = not part.is_alone or self.dkv_dtype == torch.float32
                part_dq, *dkv, more = part.backward(tensors, read, fp32, target)
                if more is not None:
                    d_sinks = more if d_sinks is None else d_sinks + more
                query_terms.append((rows, [part_dq]))
                hop_terms.append((part.keys, dkv))
            finish_next = hop.start_back(hop_terms, q)
            key_terms += finish()
            finish = finish_next
        key_terms += finish()
        if merges:
            (dq,) = added_up(query_terms, q, q.shape[1], [(*q.shape[2:], q.dtype)])
        dk, dv = added_up(
            key_terms, k, k.shape[1], [(*x.shape[2:], self.dkv_dtype) for x in (k, v)]
        )
        return dq, dk, dv, d_sinks


def lse_of_rows(lses: list[tuple[int, Tensor]]) -> Tensor:
    """Return all rows' log-sum-exp from the parts', each with its first row."""
    parts = [lse for _, lse in sorted(lses, key=lambda one: one[0])]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def added_up(terms: Terms, like: Tensor, total: int, kinds: Sequence) -> Sequence[Tensor]:
    """Return sums of terms, (batch, total, heads, columns) of these kinds.
    Rows of no term are 0. A term that has all rows may become the sum."""
    dtypes = [dtype for *_, dtype in kinds]
    whole = [x for rows, x in terms if rows == slice(0, total) and [y.dtype for y in x] == dtypes]
    if whole and (len(terms) == 1 or dtypes[0] == torch.float32):
        others = [(rows, x) for rows, x in terms if x is not whole[0]]
        for (rows, tensors), i in product(others, range(len(kinds))):
            whole[0][i][:, rows].add_(tensors[i])
        return whole[0]
    results = [like.new_empty(len(like), total, *x, dtype=dtype) for *x, dtype in kinds]
    edges = {edge for rows, _ in terms for edge in (rows.start, rows.stop)}
    for (begin, end), i in product(pairwise(sorted(edges | {0, total})), range(len(kinds))):
        place = results[i][:, begin:end]
        addends = [
            x[i][:, begin - rows.start : end - rows.start]
            for rows, x in terms
            if rows.start <= begin and end <= rows.stop
        ]
        if len(addends) > 2:
            addends[0] = addends[0].float()  # a copy unless it is float32
        while len(addends) > 2:
            addends[0].add_(addends.pop())
        if len(addends) == 2:
            torch.add(*addends, out=place)
        elif addends:
            place.copy_(addends[0])
        else:
            place.zero_()
    return results


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into out, float32, and its log-sum-exp."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part.float(), weight.transpose(1, 2)[..., None])
    lse.copy_(both)


def hops(call: RankCall, by_ring: bool) -> Hops:
    """Return what computes a call by gather, or by a ring."""
    chunks, rank, sizes = call.split.chunks, call.split.rank, call.sizes[1:]
    own, steps = steps_of(chunks, call.order, call.part, by_ring)
    keeps = keeps_keys(call.part, len(chunks), call.sizes[0][0], sizes[0][0])
    is_alone = not steps and len(own[rank]) == 1
    results = [Hop(tuple(replace(x, is_alone=x.is_alone or is_alone) for x in own[rank]))]
    for number, (exchange, parts) in enumerate(steps):
        # Hops in a row have other memory.
        kinds: Any = [[(*x, kind) for x in sizes] for kind in (call.dtype, torch.float32)]
        back = exchange.gradients(), kinds[1]
        going = call.transfer(*back, number=2 + number, is_free=not keeps)
        coming = call.transfer(exchange, kinds[0], number=number % 2)
        results.append(Hop(tuple(parts[rank]), coming, going))
    return Hops.of(results, keeps, call.dkv_dtype)


def keeps_keys(part: KeyPart, num_ranks: int, heads_q: int, heads_kv: int) -> bool:
    """Whether keys are kept for the backward pass: if they are small."""
    return part.options.has_gradient and heads_kv * num_ranks <= heads_q
