"""Gather and ring: keys come to each rank, in one hop or in several.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places. dK and dV go back in float32.
ring: the same, but from a rank at a time, while it attends to the keys of the one before. Partial
outputs are merged in float32 by their log-sum-exps.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa3.distributed.alone import ALL, FourGradients, KeyPart, packed_lengths
from fa3.distributed.exchange import Split, orders
from fa3.distributed.pieces import (
    Move,
    RowExchange,
    Runs,
    everything_of,
    exchange_of,
    together,
    with_begins,
)
from fa3.distributed.transfer import Transfer, by_rows, transfer_of
from fa3.problem import NO_BOUND, Window


@dataclass(frozen=True)
class Hop:
    """Keys that come here together.

    Attributes:
        parts: in the order of the rows.
        total: keys; kept: those that are this rank's.
        coming, going: bring keys here, and gradients back.
        added: places among the first hop's keys, and rows of what comes back that is added there.
        order: of what comes, in which parts count, and which has a row twice at most; or None.
    """

    parts: tuple[KeyPart, ...]
    total: int
    kept: list[Move]
    coming: Transfer
    going: Transfer
    added: list[tuple[slice, slice]]
    order: Tensor | None = None


@dataclass(frozen=True)
class Hops:
    """Keys come to each rank, the next ones while it computes.

    Attributes:
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
    """

    hops: tuple[Hop, ...]

    def arrivals(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Hop, Callable]]:
        """Yield each hop with its number, and what returns the keys of a part."""
        own, hops = by_rows(k, v), self.hops
        hops[0].coming.start(own)
        for i, hop in enumerate(hops):
            if i + 1 < len(hops):
                hops[i + 1].coming.start(own)
            ordered = None
            if hop.order is not None:
                hop.coming.wait()
                ordered = [x.index_select(0, hop.order).transpose(0, 1) for x in hop.coming.tensors]

            def keys_of(part: KeyPart, hop: Hop = hop, ordered: Any = ordered) -> list[Tensor]:
                if part.own is not None:
                    return [k[:, part.own], v[:, part.own]]
                hop.coming.wait()
                return ordered or hop.coming.at(part.keys)

            yield i, hop, keys_of
            hop.coming.release()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, modifiers: tuple, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        lses: Any = [None] * len(self.hops[0].parts)
        total: Any = None
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for i, hop, keys_of in self.arrivals(k, v):
            # This rank's own keys first, while others come.
            for j, part in sorted(enumerate(hop.parts), key=lambda pair: pair[1].own is None):
                target = out[:, part.rows]
                tensors = q[:, part.rows], *keys_of(part), None if i else target
                result, lse = part.forward(tensors, (None, None) if i else modifiers)
                if i:
                    merge_into(total[:, part.rows], lses[0][:, :, part.rows], result, lse)
                else:
                    lses[j] = lse
            if i == 0 and len(self.hops) > 1:
                total = out.float()
        out = out if total is None else total.to(q.dtype)
        return out, torch.cat(lses, 2) if returns_lse else None, (q, out, k, v, *lses)

    def backward(
        self, modifiers: tuple, d_out: Tensor | None, d_lse: Tensor | None, *saved: Tensor
    ) -> FourGradients:
        """Return the gradients: each hop's with out and the log-sum-exp of all keys."""
        q, out, k, v, *lses = saved
        finish_hop = dq = d_sinks = own = None  # type: Any
        for i, hop, keys_of in self.arrivals(k, v):
            sums, dqs, finish = list[Tensor](), dict[int, Tensor](), None
            # The last part sees most keys. Parts that see only this rank's keys run while sums go
            # back to other ranks.
            pairs = sorted(
                enumerate(hop.parts), key=lambda pair: (pair[1].own is not None, -pair[0])
            )
            for j, part in pairs:
                rows = part.rows
                if part.own is not None and finish is None:
                    finish = self.start_back(hop, sums, q)
                tensors: list[Any] = [q[:, rows], *keys_of(part), out[:, rows]]
                tensors += [lses[0][:, :, rows].contiguous() if i else lses[j]]
                tensors += [None if d_out is None else d_out[:, rows]]
                tensors += [None if d_lse is None else d_lse[:, :, rows]]
                # The first hop of several has the sinks, and several have no slopes.
                of_hop = (None, None) if i else modifiers
                dqs[j], *dkv, more = part.backward(tensors, of_hop)
                if more is not None:
                    d_sinks = more if d_sinks is None else d_sinks + more
                add_keys(sums, dkv, part.keys, hop.total)
            finish = finish or self.start_back(hop, sums, q)
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
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        for _, _, rows, places in self.hops[0].kept:
            for x, total in zip((dk, dv), own, strict=True):
                x[:, rows].copy_(total[:, places])
        return dq, dk, dv, d_sinks

    def start_back(self, hop: Hop, sums: list[Tensor], q: Tensor) -> Callable:
        """Begin to exchange sums of dK and dV of a hop: other ranks' go to them, this one's come.
        The sums become of all keys of the hop. Return what adds those that have come to sums over
        the first hop's keys."""
        if not sums or hop.order is not None:
            ordered = tuple(sums)
            total = len(q), hop.total
            sums[:] = [q.new_zeros(*total, *x, dtype=torch.float32) for x in hop.going.sizes]
            for x, y in zip(sums, ordered, strict=False):
                x.index_add_(1, hop.order, y)  # type: ignore[arg-type]
        hop.going.start(by_rows(*sums))

        def finish(own: list[Tensor]) -> None:
            hop.going.wait()
            for places, rows in hop.added:
                for total, x in zip(own, hop.going.at(rows), strict=True):
                    total[:, places].add_(x)
            hop.going.release()

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


class HopMaker(NamedTuple):
    """Makes the hops of a call on keys and values of these sizes."""

    split: Split
    part: KeyPart  # with what is asked for
    batch: int
    sizes: tuple[tuple[int, int], ...]  # heads and columns
    dtype: torch.dtype
    device: torch.device

    def hop(
        self,
        number: int,
        parts: Sequence[KeyPart],
        exchange: RowExchange,
        own: list[Move],  # of the first hop: how this rank gets its own keys
        order: Tensor | None = None,
    ) -> Hop:
        """Return a hop of these parts."""
        rank, (back, away), moves = self.split.rank, exchange.back(), exchange.moves
        if all(part.own is not None for part in parts):
            # This rank's keys are read where they are.
            moves = tuple(move for move in moves if move not in own)
        named = self.split.group, self.batch, self.sizes, self.device
        coming = transfer_of(exchange._replace(moves=moves), self.dtype, 2 * number, *named)
        going = transfer_of(back, torch.float32, 2 * number + 1, *named)
        added = []
        for move, home in zip(away, back.moves, strict=True):
            for _, _, rows, places in own if move.source == rank else ():
                if rows.start <= move.rows.start < rows.stop:
                    after = places.start - rows.start
                    at = slice(move.rows.start + after, move.rows.stop + after)
                    added.append((at, home.places))
        return Hop(tuple(parts), exchange.totals[rank], own, coming, going, added, order)

    def gather(self) -> Hops:
        """Return a hop of this rank's chunks, each with the keys that it sees."""
        chunks, rank = self.split.chunks, self.split.rank
        parts, exchange = parts_of(chunks, rank, self.part)
        return Hops((self.hop(0, parts, exchange, exchange.kept(rank)),))

    def packed_gather(self, ends: tuple[int, ...]) -> Hops:
        """Return a hop of all rows, of which a rank's chunks of documents see some."""
        (left, right), seen, split = self.part.asked.options.window, [], self.split
        chunks = split.chunks[split.rank]
        for i, chunk in enumerate(chunks):
            # Each document has two chunks, of which one or both may be empty.
            begin, end = ends[i // 2], ends[i // 2 + 1]
            first = begin if left < 0 else max(chunk.start - left, begin)
            seen.append(range(first, (end if right < 0 else chunk.stop) if chunk else first))
        places = orders(split.chunks, self.device)[1]
        order = torch.cat([places[:0], *(places[one.start : one.stop] for one in seen)])
        lengths = packed_lengths(self.device, tuple(map(len, chunks)), tuple(map(len, seen)))
        exchange, part = everything_of(split.rows), replace(self.part, lengths=lengths)
        return Hops((self.hop(0, [part], exchange, exchange.kept(split.rank), order),))

    def ring(self) -> Hops:
        """Return a hop for each rank: this one, the rank before, and so on round all ranks."""
        chunks, rank, part, hops = self.split.chunks, self.split.rank, self.part, []
        is_causal, everything = part.asked.options.window.right == 0, Window(NO_BOUND, NO_BOUND)
        own: list[Move] = []
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
            exchange, parts, end = exchange_of(chunks, tuple(wanted)), [], 0
            if not step:
                own = exchange.kept(rank)
                # A rank's chunks are in order, so a causal mask is right inside of them.
                parts = [part.at(ALL, ALL, part.asked.options.window, own=ALL)]
            for seen, group in groupby(chunks[rank] if step else (), seen_by):
                begin, end = end, end + sum(map(len, group))
                if begin < end and (count := sum(map(len, seen))):
                    parts.append(part.at(slice(begin, end), slice(0, count), everything))
            hops.append(self.hop(step, parts, exchange, own))
        return Hops(tuple(hops))


def parts_of(chunks: Runs, rank: int, part: KeyPart) -> tuple[list[KeyPart], RowExchange]:
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
    runs, first, parts = with_begins(together(chunks[rank])), wanted[rank][0].start, []
    for chunk, begin in with_begins(chunks[rank]):
        keys, own = seen_by(chunk), None
        after = max(keys.stop - chunk.stop, 0)
        moved = Window(left if left < 0 else left + after, right if right < 0 else right - after)
        for run, row in runs:
            if run.start <= keys.start and keys.stop <= run.stop:
                own = slice(keys.start - run.start + row, keys.stop - run.start + row)
        places = slice(keys.start - first, keys.stop - first) if keys else slice(0, 0)
        parts.append(part.at(slice(begin, begin + len(chunk)), places, moved, own))
    return parts, exchange_of(chunks, tuple(wanted))
