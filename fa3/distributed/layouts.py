"""Layouts: which rows of a sequence each rank has.

A layout is a frozen value without tensors. It cuts a sequence into chunks of neighbouring rows.
Each rank has some of them. Any length will do: ranks differ by one row at most.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fa3.calls.options import integer
from fa3.complaints import shown
from fa3.distributed.exchange import Group, OverRanks, Split, agree_on_rows, groups_of, orders
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
        """Return the chunks of each rank, in its order; some may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must define chunks(seqlen, num_ranks)")

    def split(self, seqlen: int, group: Group = None) -> Split:
        """Return a sequence as it is split among the ranks of a group."""
        group = groups_of(group)[0]
        chunks = chunks_of(self, integer("seqlen", seqlen, 0), group.size())
        return Split(chunks, group, group.rank(), tuple(sum(map(len, x)) for x in chunks))

    def shard(self, x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
        """Return this rank's rows of a whole tensor, which all ranks have; differentiable."""
        split = self.split(x.shape[dim], group)
        chunks = split.chunks[split.rank]
        return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)

    def unshard(self, x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
        """Return the whole tensor from all ranks' rows; all ranks must call it.

        The host waits for the other ranks' shapes. The gradient is summed over ranks in float32.

        Raises:
            ValueError: on all ranks: shape, dtype or requires_grad differ, or rows do not fit.
        """
        rows, group = x.movedim(dim, 0), groups_of(group)[0]
        asked = {"layout": self, "shape": ("rows", *rows.shape[1:]), "dtype": x.dtype}
        asked["requires_grad"] = rows.requires_grad  # else ranks would hang later
        split = self.split(agree_on_rows(self, group, len(rows), asked), group)
        padding = [0, 0] * (x.ndim - 1) + [0, max(split.rows) - len(rows)]

        def run(rows: Tensor) -> tuple[Tensor, tuple]:
            sent = F.pad(rows, padding)
            parts = [torch.empty_like(sent) for _ in split.rows]
            dist.all_gather(parts, sent, group)
            by_rank = torch.cat([x[:n] for x, n in zip(parts, split.rows, strict=True)])
            return by_rank[orders(split.chunks, x.device)[1]], ()

        def run_back(gradient: Tensor) -> tuple[Tensor]:
            dist.all_reduce(gradient := gradient.float().contiguous(), group=group)
            return (self.shard(gradient, 0, group),)

        (whole,) = OverRanks.apply(run, run_back, rows)
        return whole.movedim(0, dim)

    def positions(
        self, seqlen: int, group: Group = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the positions of this rank's rows, for RoPE: (rows,), int64, on `device`.

        Documents count from their own beginning.
        """
        (places,) = self.shard(torch.arange(seqlen)[None], 1, group)
        starts = torch.tensor(self.cu_seqlens)
        return (places - starts[torch.searchsorted(starts, places, right=True) - 1]).to(device)


@functools.lru_cache(maxsize=64)
def chunks_of(layout: SequenceLayout, seqlen: int, num_ranks: int) -> Runs:
    """Return a layout's chunks."""
    return layout.chunks(seqlen, num_ranks)


def cut(begin: int, end: int, count: int, first: int = 0) -> list[range]:
    """Cut rows into chunks; longer ones come in turn from `first` on."""
    rows, longer = divmod(end - begin, count)
    lengths = [rows + ((i - first) % count < longer) for i in range(count)]
    return [range(*ends) for ends in pairwise(accumulate(lengths, initial=begin))]


@dataclass(frozen=True)
class Zigzag(SequenceLayout):
    """Rank r of n has chunks r and 2n - 1 - r of 2n.
    Causal attention is the same work for all. Torch's `_HeadTailLoadBalancer` has this order."""

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return the two chunks of each rank."""
        return Documents((0, seqlen)).chunks(seqlen, num_ranks)


@dataclass(frozen=True)
class Contiguous(SequenceLayout):
    """Rank r of n has chunk r of n: for full attention, short windows."""

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return the one chunk of each rank."""
        return tuple((part,) for part in cut(0, seqlen, num_ranks))


@dataclass(frozen=True)
class Documents(SequenceLayout):
    """Each packed document is cut as `Zigzag` cuts a sequence.

    A rank holds its chunks of the first document, then of the second, and so on. The longer chunks
    go on in turn from document to document, so the ranks' rows differ by one at most.

    Attributes:
        cu_seqlens: (documents + 1,) integers; the host waits for a tensor on a GPU.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths: Iterable = self.cu_seqlens
        ends = tuple(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        if not ends or ends[0] != 0 or any(end < begin for begin, end in pairwise(ends)):
            raise ValueError(f"cu_seqlens must begin with 0 and never fall, got {ends!r:.200}")
        object.__setattr__(self, "cu_seqlens", ends)

    def chunks(self, seqlen: int, num_ranks: int) -> Runs:
        """Return the chunks of each rank, two for each document."""
        if seqlen != self.cu_seqlens[-1]:
            raise ValueError(
                f"seqlen must be {self.cu_seqlens[-1]}, where cu_seqlens ends, got {seqlen}"
            )
        ranks: list[list[range]] = [[] for _ in range(num_ranks)]
        for begin, end in pairwise(self.cu_seqlens):
            # The documents before have had the longer chunks up to this one.
            parts = cut(begin, end, 2 * num_ranks, begin % (2 * num_ranks))
            for rank, chunks in enumerate(ranks):
                chunks += parts[rank], parts[-1 - rank]
        return tuple(map(tuple, ranks))


zigzag = Zigzag()
contiguous = Contiguous()
documents = Documents
