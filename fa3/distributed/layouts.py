"""Layouts: which rows of a sequence each rank has.

A layout is a frozen value without tensors. It cuts a sequence into chunks of neighbouring rows.
Each rank has some of them. Any length will do: ranks differ by one row at most.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fa3.calls.options import integer
from fa3.complaints import shown
from fa3.distributed.exchange import Group, OverRanks, agree_on_rows, groups_of
from fa3.distributed.transfer import Runs


def check_sequence_layout(layout: object) -> None:
    """Raise unless an argument is a layout."""
    if not isinstance(layout, SequenceLayout):
        accepted = "fa3.distributed.zigzag, contiguous or documents(cu_seqlens)"
        raise TypeError(f"layout must be {accepted}, got {shown(layout)}")


class SequenceLayout:
    """Base class of layouts.

    In all methods, seqlen counts the rows of the whole sequence; group is a ProcessGroup, a
    DeviceMesh for its ranks, or None for all ranks. They raise a ValueError if the layout has
    another length, or if this rank is not in the group.
    """

    cu_seqlens: tuple[int, ...] = (0,)
    """Where positions begin again."""

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return each rank's chunks, in its order; some may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must define chunks(seqlen, num_ranks)")

    def shard(self, x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
        """Return this rank's rows of a tensor that all ranks have; differentiable."""
        length, group = length_of(x, dim), groups_of(group)[0]
        chunks = self.chunks(length, group.size())[group.rank()]
        rows = [x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks]
        return torch.cat(rows or [x], dim)

    def unshard(self, x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
        """Return the whole tensor from all ranks' rows; all must call it.

        The host waits for the other ranks' shapes. The gradient is summed over ranks in float32.

        Raises:
            ValueError: on all ranks: shape, dtype or gradient differ, or rows do not fit.
        """
        length_of(x, dim)
        rows, group = x.movedim(dim, 0), groups_of(group)[0]
        named = {"layout": self, "x": x}
        total = agree_on_rows(group, len(rows), named, dim=dim % x.ndim - x.ndim)
        chunks = self.chunks(total, group.size())[group.rank()]

        def run(rows: Tensor) -> tuple[Tensor, tuple]:
            whole = rows.new_zeros(total, *rows.shape[1:])
            for chunk, held in zip(chunks, rows.split([*map(len, chunks)]), strict=True):
                whole[chunk.start : chunk.stop] = held
            # Bytes of all dtypes are sums, as other ranks have zeros there.
            dist.all_reduce(whole.view(torch.uint8), group=group)
            return whole, ()

        def run_back(gradient: Tensor) -> tuple[Tensor]:
            dist.all_reduce(gradient := gradient.float().contiguous(), group=group)
            return (self.shard(gradient, 0, group),)

        (whole,) = OverRanks.apply(run, run_back, rows)
        return whole.movedim(0, dim)

    def positions(
        self, seqlen: int, group: Group = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return positions of this rank's rows, for RoPE: (rows,), int64, on `device`.

        Documents count from their own beginning.
        """
        (places,) = self.shard(torch.arange(integer("seqlen", seqlen, 0))[None], 1, group)
        starts = torch.tensor(self.cu_seqlens)
        return (places - starts[torch.searchsorted(starts, places, right=True) - 1]).to(device)


def length_of(x: Tensor, dim: int) -> int:
    """Return the length of a tensor's dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {shown(x)}")
    return x.shape[integer("dim", dim, -x.ndim, most=x.ndim - 1)]


def dealt(rows: range, shares: Sequence[int]) -> Runs:
    """Return two chunks for each rank, with its share of rows.
    The first chunks follow each other, then the others in reverse. So under a causal mask a row is
    as much work on each rank. The last rank has one chunk: a second one, or first if it has all."""
    seconds = [share // 2 for share in shares]
    last = max((i for i, share in enumerate(shares) if share), default=0)
    seconds[last] = shares[last] * (shares[last] < sum(shares))
    lengths = [x - y for x, y in zip(shares, seconds, strict=True)] + seconds[::-1]
    chunks = [range(*ends) for ends in pairwise(accumulate(lengths, initial=rows.start))]
    return tuple((chunks[i], chunks[-1 - i]) for i in range(len(shares)))


def even(total: int, count: int) -> list[int]:
    """Return equal shares of rows; the last ones have one more."""
    return [(total + i) // count for i in range(count)]


@dataclass(frozen=True)
class Zigzag(SequenceLayout):
    """Rank r of n has the chunks r and 2n-1-r of 2n.
    Causal attention is the same work for all. Torch's `_HeadTailLoadBalancer` has this order."""

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return the two chunks of each rank."""
        return dealt(range(seqlen), even(seqlen, num_ranks))


@dataclass(frozen=True)
class Contiguous(SequenceLayout):
    """Rank r of n has chunk r: for full attention, short windows."""

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return the one chunk of each rank."""
        ends = pairwise(accumulate(even(seqlen, num_ranks), initial=0))
        return tuple((range(*pair),) for pair in ends)


@dataclass(frozen=True)
class Documents(SequenceLayout):
    """Ranks have whole packed documents, and chunks of some.

    Ranks have equally many rows, but for one, and at most 2% more work than the mean, but for a row
    or two. A rank has parts of four at most. These are cut as by `Zigzag`, but into unequal shares.
    Whole documents come first, then first chunks, then second ones.

    Attributes:
        cu_seqlens: (documents + 1,) integers; the host waits for a tensor on a GPU.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths: object = self.cu_seqlens
        if isinstance(lengths, Tensor):
            lengths = lengths.tolist()
        if not isinstance(lengths, Iterable):
            raise TypeError(f"cu_seqlens must be integers, got {shown(lengths)}")
        ends = tuple([integer("cu_seqlens", end, kind="integers") for end in lengths])
        if not ends or ends[0] != 0 or any(end < begin for begin, end in pairwise(ends)):
            raise ValueError(f"cu_seqlens must begin with 0 and never fall, got {ends!r:.200}")
        object.__setattr__(self, "cu_seqlens", ends)

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return each rank's chunks: whole documents, others' first chunks, their second ones."""
        if seqlen != self.cu_seqlens[-1]:
            raise ValueError(
                f"seqlen must be {self.cu_seqlens[-1]}, where cu_seqlens ends, got {seqlen}"
            )
        order, shares = self.shares(num_ranks)
        return chunks_of([self.cu_seqlens[i] for i in order], shares, num_ranks)

    def one_by_one(self, num_ranks: int) -> tuple[Runs, tuple[int, ...], tuple[int, ...]]:
        """Return chunks of documents in the ranks' order, their ends and numbers."""
        order, shares = self.shares(num_ranks)
        ends = tuple(accumulate(map(sum, shares), initial=0))
        return chunks_of(ends, shares, num_ranks), ends, tuple(order)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a value that holds no tensors
    def shares(self, num_ranks: int) -> tuple[list[int], list[list[int]]]:
        """Return documents in the ranks' order, and each rank's rows of them.
        Whole documents of a rank follow each other."""
        documents = sorted(
            enumerate(y - x for x, y in pairwise(self.cu_seqlens)), key=lambda one: -one[1]
        )
        shares = shares_of([length for _, length in documents], num_ranks)
        # Of whole documents, the rank that has them; cut ones come last.
        ranks = [x.index(max(x)) if max(x) == sum(x) else num_ranks for x in shares]
        order = sorted(range(len(shares)), key=ranks.__getitem__)
        return [documents[i][0] for i in order], [shares[i] for i in order]


def chunks_of(begins: Iterable[int], shares: list[list[int]], num_ranks: int) -> Runs:
    """Return each rank's first chunks of documents, then the second ones.
    Those that begin a document come first: a causal mask shows them no keys of other ranks."""
    documents = [(x, dealt(range(x, x + sum(y)), y)) for x, y in zip(begins, shares, strict=False)]
    results = []
    for rank in range(num_ranks):
        ours = [(begin, x[rank][0], x[rank][1]) for begin, x in documents]
        firsts = [first for begin, first, _ in sorted(ours, key=lambda x: x[1].start > x[0])]
        results.append((*firsts, *(second for _, _, second in ours)))
    return tuple(results)


def shares_of(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Return the ranks' rows of each document; documents fall in length.
    Rank after rank takes rows of the longest ones left, and of the shortest, so that what is left
    has the mean work. It takes whole documents where no rank then has 2% more than the mean."""
    ends = np.array([0, *accumulate(lengths)])
    works = np.array([0, *accumulate(x * x for x in lengths)], float)  # integers may overflow
    mean = works[-1] / max(ends[-1], 1)  # of a row
    first, last, before, taken = 0, sum(lengths), 0.0, list[Any]()

    def excess(begin: Any) -> Any:
        """Return the work over the mean of the ranks so far."""
        edges = (np.interp(x, ends, works) for x in (begin, begin + left))
        return mean * left + next(edges) - next(edges)

    for wanted in even(last, num_ranks):
        left = last - first - wanted  # rows for the other ranks
        begin = first + bisect_left(range(first, first + wanted), 0, key=excess)
        for near in (ends - left, ends):  # ends of long documents count more
            near = near[(near >= first) & (near <= first + wanted)]
            # Of the ranks so far, and of this one alone.
            away = np.maximum(abs(after := excess(near)), after - before)
            if away.min(initial=math.inf) <= 0.02 * works[-1] / num_ranks:
                begin = near[away.argmin()]
        before = excess(begin)
        sides = (first, begin), (begin + left, last)
        taken.append(sum(np.diff(np.clip(ends, *side)) for side in sides))
        first, last = begin, begin + left
    return np.transpose(taken).tolist()


zigzag = Zigzag()
contiguous = Contiguous()
documents = Documents
