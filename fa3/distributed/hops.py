"""Gather and ring: keys come to each rank, in one hop or in several.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places. dK and dV go back in float32.
ring: the same, but from a rank at a time, while it attends to the keys of the one before. Partial
outputs are merged in float32 by their log-sum-exps.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fa3.distributed.alone import ALL, FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import RankCall, orders
from fa3.distributed.transfer import (
    Move,
    RowExchange,
    Runs,
    Transfer,
    everything_of,
    exchange_of,
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
        keys: all of them.
        kept: how this rank gets its own keys.
        coming, going: bring keys here, and gradients back; None for this rank's own.
        order: of what comes, in which parts count, and which has a row twice at most; or None.
    """

    parts: tuple[KeyPart, ...]
    keys: slice = field(default_factory=lambda: ALL)
    kept: Sequence[Move] = ()
    coming: Transfer | None = None
    going: Transfer | None = None
    order: Tensor | None = None

    def start(self, k: Tensor, v: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Begin to get keys and values; return what waits for them."""
        if self.coming is None:
            return lambda: (k, v)
        wait, order = self.coming.start((k, v)), self.order
        return wait if order is None else lambda: [x.index_select(1, order) for x in wait()]

    def start_back(self, gradients: Terms, terms: Terms, q: Tensor) -> Callable[[], None]:
        """Begin to bring gradients of keys back. Add gradients of this rank's own rows to terms;
        return what adds the gradients that come from other ranks."""
        if (going := self.going) is None:
            terms += gradients
            return lambda: None
        sums = list(gradients.pop()[1]) if [keys for keys, _ in gradients] == [self.keys] else []
        if not sums:
            shapes = ((len(q), self.keys.stop, *size) for size in going.sizes)
            sums = [q.new_zeros(shape, dtype=torch.float32) for shape in shapes]
        for keys, more in gradients:
            for one, x in zip(sums, more, strict=True):
                if self.order is None:
                    one[:, keys].add_(x)
                else:
                    one.index_add_(1, self.order, x)
        wait = going.start(sums)
        for _, _, rows, places in self.kept:
            terms.append((rows, [x[:, places] for x in sums]))

        def finish() -> None:
            arrived = wait()
            for source, target, _, rows in going.exchange.moves:
                if target == going.rank:
                    sent = [x[source] for x in arrived] if going.by_source else arrived
                    terms.append((rows, [x[:, rows] for x in sent]))

        return finish


@dataclass(frozen=True)
class Hops:
    """Keys come to each rank, the next ones while it computes.

    Attributes:
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
    """

    hops: tuple[Hop, ...]

    def arrivals(self, k: Tensor, v: Tensor, step: int) -> Iterator[tuple[Hop, Sequence[Tensor]]]:
        """Yield each hop and its keys and values."""
        # Copy engines want rows without gaps.
        hops, own = self.hops[::step], (k.contiguous(), v.contiguous())
        waits = [hops[0].start(*own)]
        for i, hop in enumerate(hops):
            waits += [after.start(*own) for after in hops[i + 1 : i + 2]]
            yield hop, waits[i]()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        lses, out = dict[int, Tensor](), q.new_empty(*q.shape[:3], v.shape[3])
        total = None  # type: Any
        for hop, keys in self.arrivals(k, v, 1):
            for part in hop.parts:
                rows, read = part.rows, [q[:, part.rows], *(x[:, part.keys] for x in keys)]
                if not part.merges:
                    _, lses[rows.start] = part.forward((*read, out[:, rows]), modifiers)
                    continue
                if total is None:
                    total, lses = out.float(), {0: lse_of_rows(lses)}
                merge_into(
                    total[:, rows], lses[0][:, :, rows], *part.forward((*read, None), (None, None))
                )
        out = out if total is None else total.to(q.dtype)
        saved = q, out, k, v, *(lses[begin] for begin in sorted(lses))
        return out, lse_of_rows(lses) if returns_lse else None, saved

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients: each part's with out and the log-sum-exp of all keys.
        This rank's own keys come last, while gradients go back to other ranks."""
        q, out, k, v, *lses = saved
        of_q, of_kv, finish = Terms(), Terms(), lambda: None
        d_sinks: Tensor | None = None
        begins = sorted(x.rows.start for hop in self.hops for x in hop.parts if not x.merges)
        for hop, keys in self.arrivals(k, v, -1):
            of_keys = Terms()
            for part in hop.parts[::-1]:
                rows = part.rows
                lse = lses[begins.index(rows.start)] if len(lses) > 1 else lses[0][:, :, rows]
                tensors: list[Any] = [q[:, rows], *(x[:, part.keys] for x in keys), out[:, rows]]
                tensors += [lse.contiguous(), None if d_out is None else d_out[:, rows]]
                tensors += [None if d_lse is None else d_lse[:, :, rows]]
                dq, *dkv, more = part.backward(tensors, (None, None) if part.merges else modifiers)
                if more is not None:
                    d_sinks = more if d_sinks is None else d_sinks + more
                of_q.append((rows, [dq]))
                of_keys.append((part.keys, dkv))
            finish_next = hop.start_back(of_keys, of_kv, q)
            finish()
            finish = finish_next
        finish()
        (dq,), (dk, dv) = added_up(of_q, q), added_up(of_kv, k, v)
        return dq, dk, dv, d_sinks


def lse_of_rows(lses: dict[int, Tensor]) -> Tensor:
    """Return the log-sum-exp of all rows from the parts', by their first rows."""
    parts = [lses[begin] for begin in sorted(lses)]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def added_up(terms: Terms, *likes: Tensor) -> Sequence[Tensor]:
    """Return sums of terms, in these tensors' shapes and dtypes; the terms may be lost."""
    if len(terms) == 1 and terms[0][1][0].dtype == likes[0].dtype:
        return terms[0][1]
    results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in likes]
    edges = {edge for rows, _ in terms for edge in (rows.start, rows.stop)}
    for begin, end in pairwise(sorted(edges)):
        covering = [
            [x[:, begin - rows.start : end - rows.start] for x in tensors]
            for rows, tensors in terms
            if rows.start <= begin and end <= rows.stop
        ]
        for result, (first, *others) in zip(results, zip(*covering, strict=True), strict=True):
            if len(others) > 1:
                first, *others = first.float(), *others  # a copy unless it is float32
            for other in others[:-1]:
                first.add_(other)
            if others:
                torch.add(first, others[-1], out=result[:, begin:end])
            else:
                result[:, begin:end].copy_(first)
    return results


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into out, float32, and its log-sum-exp, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part.float(), weight.transpose(1, 2)[..., None])
    lse.copy_(both)


def gather(call: RankCall) -> Hops:
    """Return this rank's own keys, and a hop of all others that are seen."""
    if call.ends:
        return packed_gather(call)
    rows = call.split.rows
    return hops_of(call, [((range(sum(rows)),),) * len(rows)], by_source=True)


def ring(call: RankCall) -> Hops:
    """Return a hop for each rank: this one, the rank before, and so on round all ranks."""
    split, part = call.split, call.part
    held = [tuple(together(one) or one[:1]) for one in split.chunks]
    steps = [tuple(held[i - step] for i in range(len(held))) for step in range(len(held))]
    first, *others = hops_of(call, steps, by_source=False).hops
    window = part.options.window
    if window.left < 0 and window.right <= 0:
        # A rank's chunks are in order, so a causal mask is right inside of them.
        rows = slice(0, split.rows[split.rank])
        first = Hop((part.at(window, True, rows=rows, keys=rows),))
    return Hops((first, *others))


def packed_gather(call: RankCall) -> Hops:
    """Return a hop of all rows, of which a rank's chunks of documents see some."""
    (left, right), seen, split = call.part.options.window, [], call.split
    chunks = split.chunks[split.rank]
    for i, chunk in enumerate(chunks):
        # Each document has two chunks, of which one or both may be empty.
        begin, end = call.ends[i // 2], call.ends[i // 2 + 1]
        first = begin if left < 0 else max(chunk.start - left, begin)
        seen.append(range(first, (end if right < 0 else chunk.stop) if chunk else first))
    places = orders(split.chunks, call.device)[1]
    order = torch.cat([places[:0], *(places[one.start : one.stop] for one in seen)])
    lengths = packed_lengths(call.device, tuple(map(len, chunks)), tuple(map(len, seen)))
    part = replace(call.part, rows=slice(0, split.rows[split.rank]), lengths=lengths)
    return Hops((hop_of(call, [part], everything_of(split.rows), 0, True, order),))


def hops_of(call: RankCall, steps: list[Runs], by_source: bool) -> Hops:
    """Return a hop for each step, in which ranks see runs of keys; but parts that see this rank's
    own keys only are in the first."""
    chunks, own, hops = call.split.chunks, list[KeyPart](), list[Hop]()
    for i, seen in enumerate(steps):
        of_ranks = [
            parts_of(held, keys, call.part, len(steps) > 1)
            for held, keys in zip(chunks, seen, strict=True)
        ]
        mine, parts, _ = of_ranks[call.split.rank]
        own += mine
        wanted = tuple(keys for *_, keys in of_ranks)
        if any(len(run) for runs in wanted for run in runs):
            hops.append(hop_of(call, parts, exchange_of(chunks, wanted), i, by_source))
    return Hops((Hop(tuple(own)), *hops))


def hop_of(
    call: RankCall, parts: list[KeyPart], exchange: RowExchange, number: int, by_source: bool,
    order: Tensor | None = None,
) -> Hop:  # fmt: skip
    """Return a hop of these parts; `number` and `by_source` are its transfers'."""
    rank, of_kv = call.split.rank, call.sizes[1:]
    kept = [move for move in exchange.moves if move.source == rank == move.target]
    # Gradients of this rank's own keys are added up where they are.
    back = exchange.back(call.split.rows, but=rank)
    coming = call.transfer(exchange, call.dtype, number % 2, of_kv)
    flags = {"by_source": by_source, "is_free": True}
    going = call.transfer(back, torch.float32, 2 + number, of_kv, **flags)
    return Hop(tuple(parts), slice(0, exchange.totals[rank]), kept, coming, going, order)


def seen_by(run: range, keys: range, window: Window) -> tuple[range, range, Window]:
    """Return the rows of a run that see any of these keys, the keys that they see, and the window
    that shows them. Bottom-right alignment puts the last row at the last of the keys."""
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
    held: tuple[range, ...], key_runs: tuple[range, ...], part: KeyPart, waits: bool
) -> tuple[list[KeyPart], list[KeyPart], tuple[range, ...]]:
    """Return the parts of a rank that has these chunks and sees these runs of keys: parts that see
    its own keys, and others. Return, too, which keys come for the others."""
    runs, own, others = with_begins(together(held) or held[:1]), list[KeyPart](), []
    wanted = []
    for key_run in key_runs:
        seen = []
        for run, _ in runs:
            rows, keys, window = seen_by(run, key_run, part.options.window)
            sees_itself = key_run.start <= run.start and run.stop <= key_run.stop
            if keys or sees_itself:
                at, named = placed(keys, runs), {"rows": placed(rows, runs), "keys": None}
                one = part.at(window, waits or bool(at), **named, merges=not sees_itself)
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
    """Return where rows are among runs, each with its place, if one of these has all of them."""
    for run, begin in runs:
        if run.start <= rows.start and rows.stop <= run.stop:
            return slice(rows.start - run.start + begin, rows.stop - run.start + begin)
    return None


def with_joined(parts: list[KeyPart]) -> list[KeyPart]:
    """Return parts, of which those that see all of neighbouring keys are one."""
    results = list[KeyPart]()
    for part in sorted(parts, key=lambda part: part.merges):
        while results:
            last = results[-1]
            if part.options != last.options or part.options.window != Window(NO_BOUND, NO_BOUND):
                break
            if part.keys == last.keys and last.rows.stop == part.rows.start:
                part = replace(part, rows=slice(last.rows.start, part.rows.stop))
            elif part.rows == last.rows and last.keys.stop == part.keys.start:
                part = replace(part, keys=slice(last.keys.start, part.keys.stop))
            else:
                break
            results.pop()
        results.append(part)
    return results
