"""Methods of attention over ranks: what each rank computes and sends, in both passes.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places. dK and dV go back in float32.
ring: the same, but from a rank at a time, while it attends to the keys of the one before. Partial
outputs are merged in float32 by their log-sum-exps.
ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889);
Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa3.calls.forward import flash_attn_func
from fa3.calls.options import as_pair, check_window, flag
from fa3.calls.passes import flash_attn_backward
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.distributed.exchange import Arriving, Split, orders
from fa3.distributed.pieces import RoundTrip, Runs, exchange_of, together, with_begins
from fa3.distributed.planning import plan
from fa3.problem import NO_BOUND, Window

Optional = Tensor | None
FourGradients = tuple[Tensor, Tensor, Tensor, Optional]
"""Of q, k, v and the sinks. They may be float32, which autograd rounds."""


class Seen(NamedTuple):
    """Rows of this rank, and keys that they see."""

    rows: slice = slice(None)
    keys: slice = slice(None)
    options: Mapping[str, Any] = {}  # of attention to these keys alone, by name
    is_local: bool = False  # whether all of these keys are this rank's


@dataclass(frozen=True)
class Alone:
    """Attention in this process.

    Attributes:
        options: of both passes, by name.
        lengths: of packed sequences, by name; their tensors have a batch of 1 all the same.
    """

    options: dict[str, Any]
    lengths: dict[str, Any] = field(default_factory=dict)

    def forward(
        self, part: Seen, q: Tensor, k: Tensor, v: Tensor, out: Optional = None
    ) -> tuple[Tensor, Tensor]:
        """Write the part's rows of out, or a new tensor; return it with the log-sum-exp."""
        named: Any = {"return_lse": True, **self.lengths, **self.options, **part.options}
        q, k, v = q[:, part.rows], k[:, part.keys], v[:, part.keys]
        out = None if out is None else out[:, part.rows]
        if not self.lengths:
            return flash_attn_func(q, k, v, out=out, **named)
        named["out"] = None if out is None else out[0]
        out, lse = flash_attn_varlen_func(q[0], k[0], v[0], **named)
        return out[None], lse[None]

    def backward(
        self, part: Seen, d_out: Optional, d_lse: Optional, *saved: Tensor, fp32_dkv: bool = True
    ) -> FourGradients:
        """Return a part's gradients; `saved` are all rows of q, k, v, out and the log-sum-exp."""
        (q, k, v, out, lse), rows, keys = saved, part.rows, part.keys
        tensors: list[Any] = [q[:, rows], k[:, keys], v[:, keys], out[:, rows]]
        tensors += lse[:, :, rows].contiguous(), None if d_lse is None else d_lse[:, :, rows]
        tensors.insert(0, None if d_out is None else d_out[:, rows])
        if self.lengths:
            tensors = [None if x is None else x[0] for x in tensors]
        named: Any = {"d_lse": tensors[6], **self.lengths, **self.options, **part.options}
        dq, dk, dv, d_sinks = flash_attn_backward(*tensors[:6], fp32_dkv=fp32_dkv, **named)
        if self.lengths:
            dq, dk, dv = dq[None], dk[None], dv[None]
        return dq, dk, dv, d_sinks


class Hop(NamedTuple):
    """Keys that come here together."""

    parts: tuple[Seen, ...]  # in the order of the rows
    exchange: RoundTrip  # by which ranks get the keys
    # Of what they get, in which parts count, and which has a row twice at most; or None.
    order: Optional = None

    def start(self, split: Split, *tensors: Tensor) -> Arriving:
        """Return the keys or values, and what waits for them."""
        placed, wait = split.moved(self.exchange.there, *tensors)
        if self.order is not None:
            wait()
            placed = [x.index_select(1, self.order) for x in placed]
        return placed, wait

    def start_back(self, split: Split, *tensors: Tensor) -> Arriving:
        """Return what comes back of the gradients of keys or values, and what waits for it."""
        if self.order is not None:
            rows = self.exchange.there.total
            sums = (x.new_zeros(len(x), rows, *x.shape[2:]) for x in tensors)
            pairs = zip(sums, tensors, strict=True)
            tensors = tuple(total.index_add_(1, self.order, x) for total, x in pairs)
        return split.moved(self.exchange.back, *tensors)


@dataclass(frozen=True)
class Hops:
    """Keys come to each rank, for the backward pass again; the next ones while it computes.

    Attributes:
        hops: one has all keys that are seen. Of several, the first has this rank's keys.
    """

    split: Split
    attention: Alone
    hops: tuple[Hop, ...]

    def arrivals(self, k: Tensor, v: Tensor) -> Iterator[tuple]:
        """Yield each hop, whether it is the first, its keys, and what waits for them."""
        arriving = self.hops[0].start(self.split, k, v)
        for i, hop in enumerate(self.hops):
            (keys, values), wait = arriving
            for following in self.hops[i + 1 : i + 2]:
                arriving = following.start(self.split, k, v)
            yield hop, i == 0, keys, values, wait
            wait()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, returns_lse: bool):
        """Return out, the log-sum-exp, and what the backward pass reads."""
        total = out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        for hop, is_first, keys, values, wait in self.arrivals(k, v):
            for part in hop.parts:
                if not part.is_local:
                    wait()
                target = out if is_first else None
                results = self.attention.forward(part, q, keys, values, target)
                if is_first:
                    lse[:, :, part.rows] = results[1]
                else:
                    merge_into(total[:, part.rows], lse[:, :, part.rows], *results)
            if is_first and len(self.hops) > 1:
                total = out.float()
        out = total.to(q.dtype)
        return out, lse, (q, k, v, out, lse)

    def backward(self, d_out: Optional, d_lse: Optional, *saved: Tensor) -> FourGradients:
        """Return the gradients: each hop's with out and the log-sum-exp of all keys."""
        q, k, v, out, lse = saved
        dq, d_sinks, returns, totals = torch.empty_like(q), None, [], list[Tensor]()
        for hop, is_first, keys, values, wait in self.arrivals(k, v):
            gradients, sums = [], list[Tensor]()
            for part in hop.parts:
                if not part.is_local:
                    wait()
                read = q, keys, values, out, lse
                more, *dkv, more_sinks = self.attention.backward(part, d_out, d_lse, *read)
                gradients.append(dkv)
                (Tensor.copy_ if is_first else Tensor.add_)(dq[:, part.rows], more)
                if more_sinks is not None:
                    d_sinks = more_sinks if d_sinks is None else d_sinks + more_sinks
            # The last part sees most keys: what it gives becomes the sum.
            for part, dkv in zip(reversed(hop.parts), reversed(gradients), strict=True):
                begin, end, _ = part.keys.indices(count := keys.shape[1])
                for total, x in zip(sums, dkv, strict=False):
                    total[:, begin:end] += x
                outside = (0, 0, 0, 0, begin, count - end)
                sums = sums or [F.pad(x, outside) if any(outside) else x for x in dkv]
            sums = sums or [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
            returns.append((hop.exchange, hop.start_back(self.split, *sums)))
            if len(returns) == 2:
                totals = self.split.add_back(totals, *returns.pop(0))
            if is_first and len(self.hops) > 1:
                dq = dq.float()
        dk, dv = self.split.add_back(totals, *returns[0])
        return dq, dk, dv, d_sinks


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into out, float32, and its log-sum-exp, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part.float(), weight.transpose(1, 2)[..., None])
    lse.copy_(both)


@functools.lru_cache(maxsize=64)
def dense_hop(chunks: Runs, rank: int, window: Window) -> Hop:
    """Return a rank's chunks, each with the keys that it sees, and how ranks get them.
    Bottom-right alignment puts the chunk's last query at the last of the keys. Where keys after the
    chunk are seen, the window makes up for it."""
    (left, right), seqlen = window, sum(len(chunk) for held in chunks for chunk in held)

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
        moved = left if left < 0 else left + after, right if right < 0 else right - after
        is_local = any(keys.start in run and keys.stop <= run.stop for run in own)
        places = slice(keys.start - first, keys.stop - first) if keys else slice(0, 0)
        rows = slice(begin, begin + len(chunk))
        parts.append(Seen(rows, places, {"window_size": moved}, is_local))
    return Hop(tuple(parts), exchange_of(chunks, tuple(wanted), rank))


@functools.lru_cache(maxsize=64)
def ring_hops(chunks: Runs, rank: int, is_causal: bool) -> tuple[Hop, ...]:
    """Return a hop for each rank: this one, the rank before, and so on round all ranks."""
    # A rank's chunks are in order, so a causal mask is right inside of them.
    parts, hops = [Seen(options={"causal": is_causal}, is_local=True)], []
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
                    parts.append(Seen(slice(begin, end), slice(0, count), {"sinks": None}))
        hops.append(Hop(tuple(parts), exchange_of(chunks, tuple(wanted), rank)))
    return tuple(hops)


@functools.lru_cache(maxsize=64)
def packed_lengths(device: torch.device, rows: tuple[int, ...], keys: tuple[int, ...]) -> dict:
    """Return lengths of packed sequences, as `fa3.flash_attn_varlen_func` takes them."""
    lengths: dict[str, Any] = {}
    with torch.inference_mode(False):
        for name, counts in (("q", rows), ("k", keys)):
            starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            lengths[f"cu_seqlens_{name}"] = starts.to(device)
            lengths[f"max_seqlen_{name}"] = max(counts, default=0)
    return lengths


@functools.lru_cache(maxsize=64)
def visible_keys(
    chunks: Runs, rank: int, ends: tuple[int, ...], window: Window, device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """Return which rows of all ranks a rank's chunks see, and the packed lengths."""
    (left, right), rows = window, []
    for i, chunk in enumerate(chunks[rank]):
        # Each document has two chunks, of which one or both may be empty.
        begin, end = ends[i // 2], ends[i // 2 + 1]
        first = begin if left < 0 else max(chunk.start - left, begin)
        rows.append(range(first, (end if right < 0 else chunk.stop) if chunk else first))
    places = orders(chunks, device)[1]
    order = torch.cat([places[:0], *(places[one.start : one.stop] for one in rows)])
    return order, packed_lengths(device, tuple(map(len, chunks[rank])), tuple(map(len, rows)))


@dataclass(frozen=True)
class Ulysses:
    """Heads for rows, and back.

    Attributes:
        attention: to the whole sequence, of this rank's heads.
        trip: of rows that become all rows.
        orders: the rows' orders by ranks and in the sequence, or none.
        copies: how often each key/value head is there, so that each rank has whole heads.
    """

    split: Split
    attention: Alone
    trip: RoundTrip
    orders: tuple[Tensor, ...]
    copies: int

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Return (batch, seqlen, heads / ranks, columns) of (batch, rows, heads, columns)."""
        placed, wait = self.split.moved(self.trip.there, *tensors, by_heads=True)
        wait()
        return [x.index_select(1, self.orders[1]) for x in placed] if self.orders else placed

    def to_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Return (batch, rows, heads, columns): the inverse of `to_heads`."""
        if self.orders:
            tensors = tuple(x.index_select(1, self.orders[0]) for x in tensors)
        returned, wait = self.split.moved(self.trip.back, *tensors)
        wait()
        rows, rank = self.split.rows, self.split.rank
        by_rank = (x.unflatten(1, (len(rows), rows[rank])).unbind(1) for x in returned)
        # This rank's heads come first.
        return [torch.cat((*x[1 : rank + 1], x[0], *x[rank + 1 :]), 2) for x in by_rank]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 2) for x in (k, v))
        read = self.to_heads(q, k, v)
        out, lse = self.attention.forward(Seen(), *read)
        columns = [lse.transpose(1, 2)[..., None]] if returns_lse else []
        results = self.to_rows(out, *columns)
        sent_lse = results[1].squeeze(3).transpose(1, 2) if returns_lse else None
        return results[0], sent_lse, (*read, out, lse)

    def backward(self, d_out: Optional, d_lse: Optional, *saved: Tensor) -> FourGradients:
        """Return the gradients; copies of a key/value head have theirs added up in float32."""
        if d_out is not None:
            (d_out,) = self.to_heads(d_out)
        if d_lse is not None:
            d_lse = self.to_heads(d_lse.transpose(1, 2)[..., None])[0].squeeze(3).transpose(1, 2)
        fp32 = self.copies > 1
        *grads, d_sinks = self.attention.backward(Seen(), d_out, d_lse, *saved, fp32_dkv=fp32)
        dq, dk, dv = self.to_rows(*grads)
        if self.copies > 1:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        if d_sinks is not None:
            before, heads = self.split.rank * len(d_sinks), dq.shape[2]
            d_sinks = F.pad(d_sinks, (before, heads - before - len(d_sinks)))
        return dq, dk, dv, d_sinks


SHARED = "softmax_scale causal window_size softcap alibi_slopes sinks deterministic sm_margin"


def window_of(options: dict[str, Any]) -> Window:
    """Return the window of a call, with causal folded in."""
    return check_window(as_pair(options["window_size"]), flag("causal", options["causal"]))


def method_of(
    named: dict[str, Any], split: Split, ends: tuple[int, ...], q: Tensor, v: Tensor
) -> Hops | Ulysses:
    """Return what computes a call that is checked; `ends` are of documents."""
    window, options = window_of(named), {x: named[x] for x in SHARED.split()}
    options |= {"causal": False, "window_size": tuple(window)}
    method, heads = named["method"], (q.shape[2], v.shape[2])
    if method == "auto":
        sizes = sum(split.rows), len(split.chunks), *heads, q.shape[3], v.shape[3]
        slopes = named["alibi_slopes"] is not None
        method = plan(named["layout"], *sizes, window_size=window, has_slopes=slopes).method
    if method == "ulysses":
        count, each = len(split.chunks), heads[0] // len(split.chunks)
        mine = slice(split.rank * each, (split.rank + 1) * each)
        modifiers = {x: options[x] for x in ("alibi_slopes", "sinks") if options[x] is not None}
        options |= {name: x[..., mine] for name, x in modifiers.items()}
        lengths, copies = {}, math.lcm(heads[1], count) // heads[1]
        by_rank: tuple[Tensor, ...] = ()
        trip = exchange_of(split.chunks, ((range(sum(split.rows)),),) * count, split.rank)
        if ends:
            rows = tuple(end - begin for begin, end in pairwise(ends))
            lengths = packed_lengths(q.device, rows, rows)
            trip, by_rank = split.everything, orders(split.chunks, q.device)
        return Ulysses(split, Alone(options, lengths), trip, by_rank, copies)
    if method == "ring":
        hops = ring_hops(split.chunks, split.rank, window.right == 0)
        return Hops(split, Alone(options | {"window_size": (NO_BOUND, NO_BOUND)}), hops)
    if not ends:
        return Hops(split, Alone(options), (dense_hop(split.chunks, split.rank, window),))
    order, lengths = visible_keys(split.chunks, split.rank, ends, window, q.device)
    return Hops(split, Alone(options, lengths), (Hop((Seen(),), split.everything, order),))
