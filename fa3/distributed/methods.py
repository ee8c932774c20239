"""Methods of attention over ranks: what each rank computes and sends, in both passes.

gather: each rank gets all keys and values. A chunk of queries attends to the keys up to the last
one it sees, which bottom-right alignment puts in their places. dK and dV are added up in float32.
ring: keys and values go round the ranks, and each rank attends to a rank's rows at a time. Partial
outputs are merged in float32 by their log-sum-exps. dK and dV go round with their rows, in float32.
ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889);
Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fa3.calls.forward import flash_attn_func
from fa3.calls.operators import BackwardOptions, gradients_of_call
from fa3.calls.options import as_pair, check_window, flag
from fa3.calls.varlen import flash_attn_varlen_func
from fa3.distributed.exchange import Arriving, Split, orders
from fa3.distributed.pieces import Exchange, Runs, exchange_of, joined, place_of, with_begins
from fa3.distributed.planning import plan
from fa3.problem import NO_BOUND, Window
from fa3.reference.backward import BackwardOperands
from fa3.reference.varlen import PackedLengths

Optional = torch.Tensor | None
ALL = slice(None)
FourGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional]
"""Of q, k, v and the sinks. dK and dV may be float32."""


@dataclass(frozen=True)
class Alone:
    """Attention in this process.

    Attributes:
        options: of both passes, by name.
        lengths: of packed sequences, by name; their tensors have a batch of 1 all the same.
    """

    options: dict[str, Any]
    lengths: dict[str, Any] = field(default_factory=dict)

    def but(self, options: Mapping[str, Any]) -> "Alone":
        """Return this with other options."""
        return replace(self, options={**self.options, **options})

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Optional = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write out, or a new tensor; return it with the log-sum-exp."""
        if not self.lengths:
            return flash_attn_func(q, k, v, out=out, return_lse=True, **self.options)
        named: Any = {"out": None if out is None else out[0], **self.lengths, **self.options}
        out, lse = flash_attn_varlen_func(q[0], k[0], v[0], return_lse=True, **named)
        return out[None], lse[None]

    def backward(
        self, d_out: Optional, d_lse: Optional, *saved: torch.Tensor, fp32_dkv: bool = True
    ) -> FourGradients:
        """Return the gradients; `saved` are q, k, v, out and the log-sum-exp."""
        tensors: list[Any] = [*saved[:4], saved[4].contiguous(), d_out, d_lse]
        options = BackwardOptions(**self.options, fp32_dkv=fp32_dkv)
        lengths: tuple = ()
        if self.lengths:
            tensors = [None if x is None else x[0] for x in tensors]
            ends_q, longest_q, ends_k, longest_k = self.lengths.values()
            lengths = PackedLengths(ends_q, ends_k, None, None), longest_q, longest_k
        dq, dk, dv, d_sinks = gradients_of_call(BackwardOperands(*tensors), options, *lengths)
        if self.lengths:
            dq, dk, dv = dq[None], dk[None], dv[None]
        return dq, dk, dv, None if options.sinks is None else d_sinks


def with_rows(
    sums: list[torch.Tensor], parts: Iterable[torch.Tensor], rows: slice, count: int
) -> list[torch.Tensor]:
    """Add gradients of some of `count` rows to sums; without sums yet, make them."""
    if sums:
        for total, one in zip(sums, parts, strict=True):
            total[:, rows] += one
        return sums
    outside = (0, 0, 0, 0, rows.indices(count)[0], count - rows.indices(count)[1])
    return [F.pad(x, outside) if any(outside) else x for x in parts]


class Seen(NamedTuple):
    """Rows of this rank, and keys that they see.

    Fields:
        options: of attention to these keys alone, by name.
        is_local: whether all of these keys are this rank's.
    """

    rows: slice
    keys: slice
    options: Mapping[str, Any] = {}
    is_local: bool = False

    def forward(
        self,
        attention: Alone,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: Optional = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in tensors with all rows and keys; write these rows of out, or a new tensor."""
        rows, keys = self.rows, self.keys
        target = None if out is None else out[:, rows]
        return attention.but(self.options).forward(q[:, rows], k[:, keys], v[:, keys], target)

    def backward(
        self, attention: Alone, d_out: Optional, d_lse: Optional, *saved: torch.Tensor
    ) -> FourGradients:
        """Return the gradients of the rows and the keys, of tensors with all of them."""
        (q, k, v, out, lse), rows, keys = saved, self.rows, self.keys
        d_out = None if d_out is None else d_out[:, rows]
        d_lse = None if d_lse is None else d_lse[:, :, rows]
        read = q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows]
        return attention.but(self.options).backward(d_out, d_lse, *read)


@dataclass(frozen=True)
class Gather:
    """Each rank gets the keys that its rows see, for the backward pass again.

    Attributes:
        parts: in the order of the rows.
        exchange: by which this rank gets them.
        order: of what it gets, in which parts count, and has a row twice at most; or None.
    """

    split: Split
    attention: Alone
    parts: tuple[Seen, ...]
    exchange: Exchange
    order: Optional = None

    def start(self, *tensors: torch.Tensor) -> Arriving:
        """Return the rows of keys or values that are seen, and what waits for them."""
        placed, wait = self.split.moved(self.exchange.there, *tensors)
        if self.order is None:
            return placed, wait
        wait()
        return [x.index_select(1, self.order) for x in placed], wait

    def sums(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's rows of the sums of all ranks' gradients of `start`."""
        if self.order is not None:
            rows = self.exchange.there.total
            sums = (x.new_zeros(len(x), rows, *x.shape[2:]) for x in tensors)
            tensors = tuple(
                x.index_add_(1, self.order, y) for x, y in zip(sums, tensors, strict=True)
            )
        return self.split.sums_back(self.exchange, *tensors)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, returns_lse: bool):
        """Return out, the log-sum-exp, and what the backward pass reads."""
        (keys, values), wait = self.start(k, v)
        out, lses = q.new_empty(*q.shape[:-1], v.shape[-1]), []
        for part in self.parts:
            if not part.is_local:
                wait()
            lses.append(part.forward(self.attention, q, keys, values, out)[1])
        wait()
        lse = torch.cat(lses, 2)
        return out, lse, (q, k, v, out, lse)

    def backward(self, d_out: Optional, d_lse: Optional, *saved: torch.Tensor) -> FourGradients:
        """Return the gradients."""
        q, k, v, out, lse = saved
        (keys, values), wait = self.start(k, v)
        dq, gradients, d_sinks = torch.empty_like(q), [], None
        for part in self.parts:
            if not part.is_local:
                wait()
            read = q, keys, values, out, lse
            dq[:, part.rows], *dkv, more = part.backward(self.attention, d_out, d_lse, *read)
            if more is not None:
                d_sinks = more if d_sinks is None else d_sinks + more
            gradients.append(dkv)
        wait()
        sums: list[torch.Tensor] = []
        # The last part sees most keys: what it gives becomes the sum.
        for part, dkv in zip(reversed(self.parts), reversed(gradients), strict=True):
            sums = with_rows(sums, dkv, part.keys, keys.shape[1])
        dk, dv = self.sums(*sums)
        return dq, dk, dv, d_sinks


@functools.lru_cache(maxsize=64)
def dense_parts(chunks: Runs, rank: int, window: Window) -> tuple[tuple[Seen, ...], Exchange]:
    """Return this rank's chunks, each with the keys that it sees, and how ranks get them.

    Bottom-right alignment puts the chunk's last query at the last of the keys. Where keys after the
    chunk are seen, the window makes up for it.
    """
    (left, right), seqlen = window, sum(len(chunk) for held in chunks for chunk in held)

    def seen_by(chunk: range) -> range:
        first = 0 if left < 0 else max(chunk.start - left, 0)
        last = seqlen if right < 0 else min(chunk.stop + right, seqlen)
        return range(first, last if chunk else first)

    wanted = tuple(
        joined(sorted(map(seen_by, held), key=lambda keys: keys.start)) for held in chunks
    )
    own, parts = joined(chunks[rank]), []
    for chunk, begin in with_begins(chunks[rank]):
        keys = seen_by(chunk)
        first = place_of(keys.start, wanted[rank]) if keys else 0
        after = max(keys.stop - chunk.stop, 0)
        moved = left if left < 0 else left + after, right if right < 0 else right - after
        is_local = any(keys.start in run and keys.stop <= run.stop for run in own)
        places = slice(begin, begin + len(chunk)), slice(first, first + len(keys))
        parts.append(Seen(*places, {"window_size": moved}, is_local))
    return tuple(parts), exchange_of(chunks, wanted, rank)


def lengths_of(device: torch.device, **counts: list[int]) -> dict[str, Any]:
    """Return packed lengths of q and k, as `fa3.flash_attn_varlen_func` takes them."""
    lengths: dict[str, Any] = {}
    with torch.inference_mode(False):
        for name, rows in counts.items():
            starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
            lengths[f"cu_seqlens_{name}"] = starts.to(device)
            lengths[f"max_seqlen_{name}"] = max(rows, default=0)
    return lengths


@functools.lru_cache(maxsize=64)
def whole_documents(ends: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return the packed lengths of whole documents; nothing if there are none."""
    rows = [end - begin for begin, end in pairwise(ends)]
    return lengths_of(device, q=rows, k=rows) if ends else {}


@functools.lru_cache(maxsize=64)
def visible_keys(
    chunks: tuple[tuple[range, ...], ...],
    rank: int,
    ends: tuple[int, ...],
    window: Window,
    device: torch.device,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return which rows of all ranks a rank's chunks see, and the packed lengths."""
    (left, right), rows = window, []
    for i, chunk in enumerate(chunks[rank]):
        # Each document has two chunks, of which one or both may be empty.
        begin, end = ends[i // 2], ends[i // 2 + 1]
        first = begin if left < 0 else max(chunk.start - left, begin)
        rows.append(range(first, (end if right < 0 else chunk.stop) if chunk else first))
    places = orders(chunks, device)[1]
    order = torch.cat([places[:0], *(places[one.start : one.stop] for one in rows)])
    return order, lengths_of(device, q=list(map(len, chunks[rank])), k=list(map(len, rows)))


@dataclass(frozen=True)
class Ring:
    """Keys and values go round.

    Attributes:
        attention: without a mask.
    """

    split: Split
    attention: Alone
    is_causal: bool

    def hops(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield each rank, and its keys and values, while the next ones are under way."""
        count, rank, here = len(self.split.chunks), self.split.rank, [k, v]
        for step in range(count):
            source = (rank - step) % count
            arriving = self.split.passed_on(source, *here) if step + 1 < count else (here, list)
            yield source, here
            here, wait = arriving
            wait()

    def parts(self, source: int) -> list[Seen]:
        """Return what this rank's rows have to do with the keys of a rank."""
        split, options = self.split, {"sinks": None}
        if source == split.rank:
            # This rank's chunks are in order, so a causal mask is right inside of them.
            return [Seen(ALL, ALL, {"causal": self.is_causal})]
        if not self.is_causal:
            return [Seen(ALL, ALL, options)]
        parts, begin = [], 0

        def seen_by(chunk: range) -> int:
            return sum(len(keys) for keys in split.chunks[source] if keys.start < chunk.start)

        for seen, chunks in groupby(split.own_chunks, seen_by):
            end = begin + sum(map(len, chunks))
            if seen and end > begin:
                parts.append(Seen(slice(begin, end), slice(0, seen), options))
            begin = end
        return parts

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, returns_lse: bool):
        """Return out, the log-sum-exp, and what the backward pass reads."""
        for source, (keys, values) in self.hops(k, v):
            for part in self.parts(source):
                more, more_lse = part.forward(self.attention, q, keys, values)
                if source == self.split.rank:
                    out, lse = more.float(), more_lse
                else:
                    merge_into(out[:, part.rows], lse[:, :, part.rows], more, more_lse)
        out = out.to(q.dtype)
        return out, lse, (q, k, v, out, lse)

    def backward(self, d_out: Optional, d_lse: Optional, *saved: torch.Tensor) -> FourGradients:
        """Return the gradients: each hop's with out and the log-sum-exp of all keys."""
        q, k, v, out, lse = saved
        arrived: list[torch.Tensor] = []
        wait: Callable[[], object] = list
        for source, here in self.hops(k, v):
            sums: list[torch.Tensor] = []
            for part in self.parts(source):
                read = q, *here, out, lse
                more, *dkv, of_sinks = part.backward(self.attention, d_out, d_lse, *read)
                if source == self.split.rank:
                    dq, d_sinks = more.float(), of_sinks
                else:
                    dq[:, part.rows] += more
                sums = with_rows(sums, dkv, part.keys, here[0].shape[1])
            wait()
            for total, one in zip(sums, arrived, strict=False):
                total += one
            arrived, wait = self.split.passed_on(source, *(sums or arrived))
        wait()
        dk, dv = arrived
        return dq.to(q.dtype), dk, dv, d_sinks


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge attention to more keys into out, float32, and its log-sum-exp, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where no key is seen, the difference is NaN.
    weight = (part_lse - both).exp_().nan_to_num_(0.0)
    out.lerp_(part.float(), weight.transpose(1, 2)[..., None])
    lse.copy_(both)


@dataclass(frozen=True)
class Ulysses:
    """Heads for rows, and back.

    Attributes:
        attention: to the whole sequence, of this rank's heads.
        heads: these heads.
        copies: how often each key/value head is there, so that each rank has whole heads.
    """

    split: Split
    attention: Alone
    heads: slice
    copies: int

    @classmethod
    def of(
        cls, split: Split, options: dict[str, Any], lengths: dict[str, Any], *heads: int
    ) -> "Ulysses":
        """Return the method for heads_q and heads_kv."""
        count, (heads_q, heads_kv) = len(split.chunks), heads
        each = heads_q // count
        own = slice(split.rank * each, (split.rank + 1) * each)
        modifiers = {x: options[x] for x in ("alibi_slopes", "sinks") if options[x] is not None}
        options = options | {name: x[..., own] for name, x in modifiers.items()}
        return cls(split, Alone(options, lengths), own, math.lcm(heads_kv, count) // heads_kv)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, returns_lse: bool):
        """Return out, the log-sum-exp or None, and what the backward pass reads."""
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 2) for x in (k, v))
        read = tuple(map(self.split.to_heads, (q, k, v)))
        out, lse = self.attention.forward(*read)
        sent_lse = sent_as_columns(self.split.to_rows, lse) if returns_lse else None
        return self.split.to_rows(out), sent_lse, (*read, out, lse)

    def backward(self, d_out: Optional, d_lse: Optional, *saved: torch.Tensor) -> FourGradients:
        """Return the gradients; copies of a key/value head have theirs added up in float32."""
        if d_out is not None:
            d_out = self.split.to_heads(d_out)
        if d_lse is not None:
            d_lse = sent_as_columns(self.split.to_heads, d_lse)
        gradients = self.attention.backward(d_out, d_lse, *saved, fp32_dkv=self.copies > 1)
        dq, dk, dv = map(self.split.to_rows, gradients[:3])
        if self.copies > 1:
            dk, dv = (x.unflatten(2, (-1, self.copies)).sum(3) for x in (dk, dv))
        d_sinks = gradients[3]
        if d_sinks is not None:
            d_sinks = F.pad(d_sinks, (self.heads.start, dq.shape[2] - self.heads.stop))
        return dq, dk, dv, d_sinks


def sent_as_columns(send: Callable[[torch.Tensor], torch.Tensor], lse: torch.Tensor):
    """Return what a log-sum-exp, (batch, heads, rows), becomes when it is sent."""
    return send(lse.transpose(1, 2)[..., None]).squeeze(3).transpose(1, 2)


RankMethod = Gather | Ring | Ulysses

SHARED_OPTIONS = (
    "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "sinks", "deterministic",
    "sm_margin",
)  # fmt: skip
"""Options of both passes on one rank."""


def window_of(options: dict[str, Any]) -> Window:
    """Return the window of a call, with causal folded in."""
    return check_window(as_pair(options["window_size"]), flag("causal", options["causal"]))


def method_of(
    named: dict[str, Any], split: Split, ends: tuple[int, ...], q: torch.Tensor, v: torch.Tensor
) -> RankMethod:
    """Return what computes a call that is checked; `ends` are of documents."""
    window, options = window_of(named), {name: named[name] for name in SHARED_OPTIONS}
    options |= {"causal": False, "window_size": tuple(window)}
    method, heads = named["method"], (q.shape[2], v.shape[2])
    if method == "auto":
        sizes = sum(split.rows), len(split.chunks), *heads, q.shape[3], v.shape[3]
        slopes = named["alibi_slopes"] is not None
        method = plan(named["layout"], *sizes, window_size=window, has_slopes=slopes).method
    if method == "ulysses":
        return Ulysses.of(split, options, whole_documents(ends, q.device), *heads)
    if method == "ring":
        return Ring(split, Alone(options | {"window_size": (NO_BOUND,) * 2}), window.right == 0)
    if ends:
        order, lengths = visible_keys(split.chunks, split.rank, ends, window, q.device)
        parts = (Seen(ALL, ALL),)
        return Gather(split, Alone(options, lengths), parts, split.everything, order)
    return Gather(split, Alone(options), *dense_parts(split.chunks, split.rank, window))
