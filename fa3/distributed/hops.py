"""Gather and ring: ranks get keys in one hop or in several.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places. dK and dV go back in float32.
ring: the same, but from a rank at a time, while it attends to the keys of the one before. Partial
outputs are merged in float32 by their log-sum-exps.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

import functools
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from typing import Any

import torch
from torch import Tensor

from fa3.calls.options import DENSE
from fa3.distributed.alone import ALL, FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import RankCall
from fa3.distributed.transfer import (
    RowExchange,
    Runs,
    Transfer,
    exchange_of,
    shares_of_documents,
    together,
    with_begins,
)
from fa3.problem import NO_BOUND, Window

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
        dkv_dtype: of dK and dV; None for the dtype of k.
    """

    hops: tuple[Hop, ...]
    keeps: bool = False
    dkv_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, hops: Sequence[Hop], keeps: bool = False) -> "Hops":
        """Return hops whose parts leave SMs while rows are under way.
        With two hops none are while the last one computes, in neither pass."""
        free = len(hops) - (len(hops) < 3)
        leaving = [replace(x, parts=tuple(y.leaving_sms() for y in x.parts)) for x in hops[:free]]
        return cls((*leaving, *hops[free:]), keeps)

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
        dkv_dtype = self.dkv_dtype or saved[2].dtype
        # One part's dK and dV need no sums.
        sums = len(self.hops) > 1 or bool(self.hops[0].going) or len(self.hops[0].parts) > 1
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
                fp32 = (sums and not part.is_alone) or dkv_dtype == torch.float32
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
        dk, dv = added_up(key_terms, k, k.shape[1], [(*x.shape[2:], dkv_dtype) for x in (k, v)])
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


def gather(call: RankCall) -> Hops:
    """Return hops: this rank's own keys, and all others that it sees."""
    if call.ends:
        return packed_gather(call)
    rows = call.split.rows
    return Hops.of(hops_of(call, [((range(sum(rows)),),) * len(rows)], keeps(call)), keeps(call))


def ring(call: RankCall) -> Hops:
    """Return a hop for each rank, from this one backwards."""
    split, part = call.split, call.part
    held = [tuple(together(one) or one[:1]) for one in split.chunks]
    steps = [tuple(held[i - step] for i in range(len(held))) for step in range(len(held))]
    first, *others = hops_of(call, steps, keeps(call))
    window = part.options.window
    if window.left < 0 and window.right <= 0:
        # A rank's chunks are in order, so a causal mask is right inside of them.
        rows = slice(0, split.rows[split.rank])
        first = Hop((replace(part, rows=rows, keys=rows),))
    return Hops.of((first, *others), keeps(call))


def packed_gather(call: RankCall) -> Hops:
    """Return a hop of this rank's keys, and one of others' documents.
    Whole documents are one packed part. Each one that is cut is a sequence of its own."""
    split, rank, part = call.split, call.split.rank, call.part
    one_by_one = replace(part, options=part.options._replace(kind=DENSE))
    own, others, whole, numbers = list[KeyPart](), list[KeyPart](), list[int](), list[int]()
    wanted, rows, keys = [list[range]() for _ in split.rows], 0, 0
    for i, shares in enumerate(shares_of_documents(split.chunks)):
        chunks = [held[2 * i : 2 * i + 2] for held in split.chunks]
        document = whole_of([x for held in chunks for x in held])
        number = bisect(call.ends, document.start, hi=len(call.ends) - 1) - 1
        if max(shares) == len(document) and not any(wanted):
            whole.append(shares[rank])
            numbers.append(number)
        else:
            of = [parts_of(held, (document,), one_by_one) for held in chunks]
            mine, parts, (arriving,) = of[rank]
            own += [x.moved(rows, rows, number) for x in mine if shares[rank]]
            others += [x.moved(rows, keys, number) for x in parts]
            for runs, (*_, seen) in zip(wanted, of, strict=True):
                runs += seen
            keys += len(arriving)
        rows += shares[rank]
    at = slice(0, sum(whole))
    if at.stop or not rows:  # a rank without rows has an empty part
        lengths = packed_lengths(call.device, whole, whole)
        named: Any = {"lengths": lengths, "documents": tuple(numbers), "is_alone": True}
        own.insert(0, replace(part, rows=at, keys=at, **named))
    hops = [Hop(tuple(own))]
    if any(map(len, chain(*wanted))):
        exchange = exchange_of(split.chunks, tuple(map(tuple, wanted)))
        hops.append(hop_of(call, others, exchange, 0, keeps(call)))
    return Hops.of(hops, keeps(call))


def whole_of(chunks: Sequence[range]) -> range:
    """Return neighbouring chunks as one."""
    return range(min(x.start for x in chunks), max(x.stop for x in chunks))


def keeps(call: RankCall) -> bool:
    """Whether keys are kept for the backward pass: if they are small."""
    (heads, _), (heads_kv, _), _ = call.sizes
    return call.part.options.has_gradient and heads_kv * len(call.split.rows) <= heads


def hops_of(call: RankCall, steps: list[Runs], keeps: bool = False) -> tuple[Hop, ...]:
    """Return a hop for each step, where ranks see key runs.
    Parts that see this rank's own keys only are in the first."""
    chunks, own, hops = call.split.chunks, list[KeyPart](), list[Hop]()
    for seen in steps:
        rank_parts = [
            parts_of(held, keys, call.part) for held, keys in zip(chunks, seen, strict=True)
        ]
        mine, parts, _ = rank_parts[call.split.rank]
        own += mine
        wanted = tuple(keys for *_, keys in rank_parts)
        if any(len(run) for runs in wanted for run in runs):
            # Steps without keys do not count: hops in a row have other memory.
            hops.append(hop_of(call, parts, exchange_of(chunks, wanted), len(hops), keeps))
    return Hop(tuple(own)), *hops


def hop_of(
    call: RankCall, parts: list[KeyPart], exchange: RowExchange, number: int, keeps: bool
) -> Hop:
    """Return a hop of these parts; `number` is its transfers'."""
    coming, going = ([(*x, kind) for x in call.sizes[1:]] for kind in (call.dtype, torch.float32))
    back = call.transfer(exchange.gradients(), going, number=2 + number, is_free=not keeps)
    return Hop(tuple(parts), call.transfer(exchange, coming, number=number % 2), back)


def seen_by(run: range, keys: range, window: Window) -> tuple[range, range, Window]:
    """Return a run's rows that see keys, these keys, and the window.
    Bottom-right alignment puts the last row at the last of the keys."""
    left, right = window
    begin = run.start if right < 0 else max(run.start, keys.start - right)
    end = run.stop if left < 0 else min(run.stop, keys.stop + left)
    first = keys.start if left < 0 else max(keys.start, begin - left)
    last = keys.stop if right < 0 else min(keys.stop, end + right)
    rows, keys = range(begin, max(begin, end)), range(first, max(first, last))
    if not rows or not keys:
        return run[:0], run[:0], window
    after = last - end
    # Where a bound hides nothing there is none.
    is_free = left < 0 or 0 < after >= len(keys) - 1 - left
    left = NO_BOUND if is_free else left + after
    is_free = right < 0 or 0 < -after >= len(rows) - 1 - right
    return rows, keys, Window(left, NO_BOUND if is_free else right - after)


def parts_of(
    held: tuple[range, ...], key_runs: tuple[range, ...], part: KeyPart
) -> tuple[list[KeyPart], list[KeyPart], tuple[range, ...]]:
    """Return a rank's parts with own keys, others, and coming keys.
    The rank has these chunks and sees these runs of keys."""
    runs, own, others = with_begins(together(held) or held[:1]), list[KeyPart](), []
    wanted = []
    for key_run in key_runs:
        seen = []
        for run, _ in runs:
            rows, keys, window = seen_by(run, key_run, part.options.window)
            sees_itself = key_run.start <= run.start and run.stop <= key_run.stop
            if keys or sees_itself:
                options, at = part.options._replace(window=window), placed(keys, runs)
                named: Any = {"rows": placed(rows, runs), "merges": not sees_itself}
                one = replace(part, options=options, **named)
                if at:
                    own.append(replace(one, keys=at))
                else:
                    seen.append((keys, one))
        first = min((keys.start for keys, _ in seen), default=0)
        wanted.append(range(first, max((keys.stop for keys, _ in seen), default=0)))
        others += seen
    runs = with_begins(wanted)
    parts = [replace(one, keys=placed(keys, runs) or ALL) for keys, one in others]
    return with_joined(own), with_joined(parts), tuple(wanted)


def placed(rows: range, runs: list[tuple[range, int]]) -> slice | None:
    """Return where rows are among placed runs, if one has them all."""
    for run, begin in runs:
        if run.start <= rows.start and rows.stop <= run.stop:
            return slice(rows.start - run.start + begin, rows.stop - run.start + begin)
    return None


def with_joined(parts: list[KeyPart]) -> list[KeyPart]:
    """Return parts, with those joined that see all of neighbouring keys."""
    results = list[KeyPart]()
    for part in sorted(parts, key=lambda part: part.merges):
        last = results[-1] if results else part
        is_whole = bool(results) and part.options.window == Window(NO_BOUND, NO_BOUND)
        is_whole = is_whole and part.options == last.options
        if is_whole and part.keys == last.keys and last.rows.stop == part.rows.start:
            results[-1] = replace(last, rows=slice(last.rows.start, part.rows.stop))
        elif is_whole and part.rows == last.rows and last.keys.stop == part.keys.start:
            results[-1] = replace(last, keys=slice(last.keys.start, part.keys.stop))
        else:
            results.append(part)
    return results
