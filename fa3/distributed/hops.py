"""Gather and ring: keys come to each rank, in one hop or in several.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places. Where they are small, keys stay
for the backward pass. dK and dV go back in float32.
ring: the same, but from a rank at a time, while it attends to the keys of the one before. Partial
outputs are merged in float32 by their log-sum-exps.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa3.distributed.alone import FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import Joined, Split, orders
from fa3.distributed.pieces import (
    RowExchange,
    Runs,
    everything_of,
    exchange_of,
    keeps_keys,
    together,
    with_begins,
)
from fa3.problem import NO_BOUND, Window


class Hop(NamedTuple):
    """Keys that come here together."""

    parts: tuple[KeyPart, ...]  # in the order of the rows
    exchange: RowExchange  # by which ranks get the keys
    # Of what they get, in which parts count, and which has a row twice at most; or None.
    order: Tensor | None = None


@dataclass(frozen=True)
class Hops:
    """Keys come to each rank, the next ones while it computes.

    Attributes:
        joined: keys and values.
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
    """

    split: Split
    joined: Joined
    hops: tuple[Hop, ...]

    def start(self, i: int, own: Tensor) -> tuple[Tensor, Callable]:
        """Begin a hop; return the buffer of its keys, and what waits for them."""
        total, _, sent, received = self.hops[i].exchange
        buffer = self.joined.empty(own, total) if i else own
        messages = [(rank, own[rows]) for rank, rows in sent]
        return buffer, self.split.start(messages, [(rank, buffer[x]) for rank, x in received])

    def arrivals(self, k: Tensor, v: Tensor | None) -> Iterator[tuple[int, Hop, Tensor, Callable]]:
        """Yield each hop with its number, its keys, and what waits for them.
        Without v, k has the keys and values of the only hop."""
        if v is None:
            yield 0, self.hops[0], k, lambda: None
            return
        own = self.joined.empty(k, self.hops[0].exchange.total)
        for rows, places in self.hops[0].exchange.kept:
            flat = [x[:, rows].transpose(0, 1).flatten(2) for x in (k, v)]
            torch.cat(flat, 2, out=own[places])
        arriving = self.start(0, own)
        for i, hop in enumerate(self.hops):
            buffer, wait = arriving
            if i + 1 < len(self.hops):
                arriving = self.start(i + 1, own)
            if hop.order is not None:
                wait()
                buffer = buffer.index_select(0, hop.order)
            yield i, hop, buffer, wait
            wait()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        lses = list[Tensor]()
        total: Any = None
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for i, hop, buffer, wait in self.arrivals(k, v):
            for part in hop.parts:
                if not part.is_local:
                    wait()
                keys, target = self.joined.views(buffer, part.keys), out[:, part.rows]
                tensors = q[:, part.rows], *keys, None if i else target
                result, lse = part.forward(tensors, (None, None) if i else modifiers)
                if total is None:
                    lses.append(lse)
                else:
                    merge_into(total[:, part.rows], lses[0][:, :, part.rows], result, lse)
            if i == 0 and len(self.hops) > 1:
                total = out.float()
        out = out if total is None else total.to(q.dtype)
        whole_lse = torch.cat(lses, 2) if returns_lse else None
        is_kept = keeps_keys(q.shape[2], k.shape[2], len(self.split.rows))
        saved: Any = (buffer, None) if is_kept and len(self.hops) == 1 else (k, v)
        return out, whole_lse, (q, out, *saved, *lses)

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients: each hop's with out and the log-sum-exp of all keys."""
        q, out, k, v, *lses = saved
        finish_hop = dq = d_sinks = own = None  # type: Any
        for i, hop, buffer, wait in self.arrivals(k, v):
            sums, dqs, finish = list[Tensor](), dict[int, Tensor](), None
            # The last part sees most keys. Parts that see only this rank's keys run while sums go
            # back to other ranks.
            pairs = sorted(enumerate(hop.parts), key=lambda pair: (pair[1].is_local, -pair[0]))
            for j, part in pairs:
                rows = part.rows
                if not part.is_local:
                    wait()
                elif finish is None:
                    finish = self.start_back(i, sums, q)
                keys = self.joined.views(buffer, part.keys)
                tensors: list[Any] = [q[:, rows], *keys, out[:, rows]]
                tensors += [lses[0][:, :, rows].contiguous() if i else lses[j]]
                tensors += [None if d_out is None else d_out[:, rows]]
                tensors += [None if d_lse is None else d_lse[:, :, rows]]
                # The first hop of several has the sinks, and several have no slopes.
                of_hop = (None, None) if i else modifiers
                dqs[j], *dkv, more = part.backward(tensors, of_hop)
                if more is not None:
                    d_sinks = more if d_sinks is None else d_sinks + more
                add_keys(sums, dkv, part.keys, len(buffer))
            finish = finish or self.start_back(i, sums, q)
            if i:
                for j, part in enumerate(hop.parts):
                    dq[:, part.rows].add_(dqs[j])
                finish_hop(own)
            else:
                in_order = [dqs[j] for j in sorted(dqs)]
                own, dq = sums, torch.cat(in_order, 1) if len(dqs) > 1 else in_order[0]
                dq = dq.float() if len(self.hops) > 1 else dq
            finish_hop = finish
        finish_hop(own)
        dk, dv = (q.new_empty(*q.shape[:2], *size) for size in self.joined.sizes)
        for rows, places in self.hops[0].exchange.kept:
            for x, total in zip((dk, dv), own, strict=True):
                x[:, rows].copy_(total[:, places])
        return dq, dk, dv, d_sinks

    def start_back(self, i: int, sums: list[Tensor], q: Tensor) -> Callable:
        """Begin to exchange sums of dK and dV of a hop: other ranks' go to them, this one's come.
        The sums become of all rows of the hop's buffer. Return what adds those that have come to
        sums over the first hop's buffer."""
        (total, _, sent, received), order = self.hops[i].exchange, self.hops[i].order
        if not sums or order is not None:
            ordered = tuple(sums)
            sums[:] = [
                q.new_zeros(len(q), total, *x, dtype=torch.float32) for x in self.joined.sizes
            ]
            for x, y in zip(sums, ordered, strict=False):
                x.index_add_(1, order, y)  # type: ignore[arg-type]
        by_rows = [x.transpose(0, 1).contiguous() for x in sums] if received else []
        coming = [
            (rank, q.new_empty(rows.stop - rows.start, len(q), *size, dtype=torch.float32))
            for rank, rows in sent
            for size in self.joined.sizes
        ]
        leaving = [(rank, x[places]) for rank, places in received for x in by_rows]
        wait = self.split.start(leaving, coming)

        def finish(own: list[Tensor]) -> None:
            wait()
            for j, (_, part) in enumerate(coming):
                own[j % 2][:, sent[j // 2][1]].add_(part.transpose(0, 1))

        return finish


def add_keys(sums: list[Tensor], gradients: list[Tensor], keys: slice, count: int) -> None:
    """Add gradients of some keys to sums over all of them, or make the sums of them."""
    begin, end, _ = keys.indices(count)
    if not sums:
        is_whole = end - begin == count
        sums += [x if is_whole else F.pad(x, (0, 0, 0, 0, begin, count - end)) for x in gradients]
        return
    for total, x in zip(sums, gradients, strict=True):
        total[:, begin:end].add_(x)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into out, float32, and its log-sum-exp, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part.float(), weight.transpose(1, 2)[..., None])
    lse.copy_(both)


def dense_hop(chunks: Runs, rank: int, part: KeyPart) -> Hop:
    """Return a rank's chunks, each with the keys that it sees, and how ranks get them.
    Bottom-right alignment puts the chunk's last query at the last of the keys. Where keys after the
    chunk are seen, the window makes up for it."""
    left, right = part.asked.options.window
    seqlen = sum(len(chunk) for held in chunks for chunk in held)

    def seen_by(chunk: range) -> range:
        first = 0 if left < 0 else max(chunk.start - left, 0)
        last = seqlen if right < 0 else min(chunk.stop + right, seqlen)
        return range(first, last if chunk else first)

    wanted = []
    for held in chunks:
        seen = list(filter(len, map(seen_by, held))) or [range(0)]
        wanted.append((range(min(x.start for x in seen), max(x.stop for x in seen)),))
    own, first, parts = together(chunks[rank]), wanted[rank][0].start, []
    for chunk, begin in with_begins(chunks[rank]):
        keys = seen_by(chunk)
        after = max(keys.stop - chunk.stop, 0)
        moved = Window(left if left < 0 else left + after, right if right < 0 else right - after)
        is_local = any(keys.start in run and keys.stop <= run.stop for run in own)
        places = slice(keys.start - first, keys.stop - first) if keys else slice(0, 0)
        rows = slice(begin, begin + len(chunk))
        parts.append(part.at(rows, places, moved, is_local=is_local))
    return Hop(tuple(parts), exchange_of(chunks, tuple(wanted), rank, is_placed=True))


def ring_hops(chunks: Runs, rank: int, part: KeyPart) -> tuple[Hop, ...]:
    """Return a hop for each rank: this one, the rank before, and so on round all ranks."""
    is_causal, everything = part.asked.options.window.right == 0, Window(NO_BOUND, NO_BOUND)
    # A rank's chunks are in order, so a causal mask is right inside of them.
    parts, hops = [replace(part, is_local=True)], []
    for step in range(len(chunks)):

        def seen_by(chunk: range, target: int = rank, step: int = step) -> tuple[range, ...]:
            held = chunks[target - step]
            if not (step and is_causal):
                return held
            return tuple(keys for keys in held if keys.start < chunk.start)

        wanted = []
        for target, held in enumerate(chunks):
            # The last chunk with rows sees most.
            last = list(filter(len, held))[-1:]
            wanted.append(together(keys for chunk in last for keys in seen_by(chunk, target)))
        if step:
            parts, end = [], 0
            for seen, group in groupby(chunks[rank], seen_by):
                begin, end = end, end + sum(map(len, group))
                if begin < end and (count := sum(map(len, seen))):
                    parts.append(part.at(slice(begin, end), slice(0, count), everything))
        hops.append(Hop(tuple(parts), exchange_of(chunks, tuple(wanted), rank)))
    return tuple(hops)


def packed_hop(split: Split, part: KeyPart, ends: tuple[int, ...], device: torch.device) -> Hop:
    """Return all rows, of which a rank's chunks of documents see some."""
    (left, right), rows = part.asked.options.window, []
    chunks = split.chunks[split.rank]
    for i, chunk in enumerate(chunks):
        # Each document has two chunks, of which one or both may be empty.
        begin, end = ends[i // 2], ends[i // 2 + 1]
        first = begin if left < 0 else max(chunk.start - left, begin)
        rows.append(range(first, (end if right < 0 else chunk.stop) if chunk else first))
    places = orders(split.chunks, device)[1]
    order = torch.cat([places[:0], *(places[one.start : one.stop] for one in rows)])
    lengths = packed_lengths(device, tuple(map(len, chunks)), tuple(map(len, rows)))
    return Hop(
        (replace(part, lengths=lengths),), everything_of(split.rows, split.rank, True), order
    )
