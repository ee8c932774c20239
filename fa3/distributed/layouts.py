"""Layouts: which rows of a sequence each rank has.

A layout is a frozen value without tensors. It cuts a sequence into chunks of neighbouring rows and
gives each rank some of them. Any length will do: ranks differ by one row at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from fa3.distributed.exchange import Group, Split, WholeRows, agree_on_rows, group_of


class SequenceLayout:
    """Base class of layouts."""

    def chunks(self, seqlen: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the chunks of each rank, in the order in which the rank holds them.

        Args:
            seqlen: rows of the whole sequence.

        Returns:
            for each rank, ranges of row numbers; some may be empty.
        """
        raise NotImplementedError(f"{type(self).__name__} must define chunks(seqlen, num_ranks)")

    def split(self, seqlen: int, group: Group = None) -> Split:
        """Return how a sequence is split among the ranks of a group."""
        group = group_of(group)
        return Split(self.chunks(seqlen, group.size()), group)

    def shard(self, x: torch.Tensor, dim: int = 1, group: Group = None) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, which all ranks have.

        Args:
            x: any shape and dtype, with the sequence in dimension `dim`.
            group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.

        Returns:
            a new tensor like x, with this rank's rows in `dim`. It is differentiable.

        Raises:
            ValueError: x has another length than the layout, or this rank is not in the group.
        """
        chunks = self.split(x.shape[dim], group).own_chunks
        return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)

    def unshard(
        self, x: torch.Tensor, dim: int = 1, group: Group = None, seqlen: int | None = None
    ) -> torch.Tensor:
        """Return the whole tensor from the rows of all ranks; all ranks must call it.

        Args:
            x: what `shard` returns, of one dtype on all ranks.
            dim, group: as in `shard`.
            seqlen: rows of the whole sequence. None: ranks tell each other how many they have,
                which the host waits for.

        Returns:
            the whole tensor, in the order of the sequence, on all ranks. Its gradient is the sum
            over ranks, added up in float32.

        Raises:
            ValueError: on all ranks if seqlen is None: ranks differ in shape or dtype, or one has
                another number of rows than the layout gives it.
        """
        rows = x.movedim(dim, 0)
        if seqlen is None:
            asked = {"layout": self, "shape": ("rows", *rows.shape[1:]), "dtype": x.dtype}
            seqlen = agree_on_rows(self, group_of(group), len(rows), asked)
        return WholeRows.apply(self.split(seqlen, group), rows).movedim(0, dim)

    def positions(
        self, seqlen: int, group: Group = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the positions of this rank's rows, for RoPE and for shifted labels.

        Args:
            seqlen: rows of the whole sequence.
            group: as in `shard`.

        Returns:
            (rows of this rank,), int64, on `device`. Documents count from their own beginning.

        Raises:
            ValueError: the layout has another length, or this rank is not in the group.
        """
        rows = [row for chunk in self.split(seqlen, group).own_chunks for row in chunk]
        return torch.tensor(rows, dtype=torch.int64, device=device)


def cut(seqlen: int, count: int, first: int = 0) -> list[range]:
    """Cut rows into chunks that differ by one row at most.

    Args:
        first: the first of the longer chunks; the others come after it, then from chunk 0 on.
    """
    rows, longer = divmod(seqlen, count)
    lengths = [rows + ((i - first) % count < longer) for i in range(count)]
    return [range(begin, end) for begin, end in pairwise(accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class Zigzag(SequenceLayout):
    """Rank r of n has chunks r and 2n - 1 - r of 2n, so causal attention is the same work for all.

    Where 2n divides the length, this is the order of torch's `_HeadTailLoadBalancer`.
    """

    def chunks(self, seqlen: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the two chunks of each rank."""
        parts = cut(seqlen, 2 * num_ranks)
        return tuple((parts[rank], parts[-1 - rank]) for rank in range(num_ranks))


@dataclass(frozen=True)
class Contiguous(SequenceLayout):
    """Rank r of n has chunk r of n: the least work for full attention and short windows."""

    def chunks(self, seqlen: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the one chunk of each rank."""
        return tuple((part,) for part in cut(seqlen, num_ranks))


@dataclass(frozen=True)
class Documents(SequenceLayout):
    """Each packed document is cut as `Zigzag` cuts a sequence.

    A rank holds its chunks of the first document, then of the second, and so on. The longer chunks
    go on in turn from document to document, so the ranks' rows differ by one at most.

    Attributes:
        cu_seqlens: beginnings of the documents in the packed sequence, and the end of the last.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        ends = self.cu_seqlens
        if not ends or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens must begin with 0 and never fall, got {ends!r:.200}")

    def chunks(self, seqlen: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the chunks of each rank, two for each document."""
        if seqlen != self.cu_seqlens[-1]:
            raise ValueError(f"seqlen must be {self.cu_seqlens[-1]} as cu_seqlens, got {seqlen}")
        ranks: list[list[range]] = [[] for _ in range(num_ranks)]
        count, first = 2 * num_ranks, 0
        for begin, end in pairwise(self.cu_seqlens):
            parts = [
                range(begin + part.start, begin + part.stop)
                for part in cut(end - begin, count, first)
            ]
            for rank, chunks in enumerate(ranks):
                chunks += parts[rank], parts[-1 - rank]
            first = (first + end - begin) % count
        return tuple(map(tuple, ranks))

    def positions(
        self, seqlen: int, group: Group = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the positions of this rank's rows, each in its document."""
        rows = super().positions(seqlen, group)
        starts = torch.tensor(self.cu_seqlens)
        return (rows - starts[torch.searchsorted(starts, rows, right=True) - 1]).to(device)


zigzag = Zigzag()
contiguous = Contiguous()


def documents(cu_seqlens: Sequence[int] | torch.Tensor) -> Documents:
    """Return the layout of packed documents.

    Args:
        cu_seqlens: (documents + 1,), integers, as `flash_attn_varlen_func` takes them. The host
            reads them, so it waits for a tensor on a GPU.

    Raises:
        ValueError: they do not begin with 0, or fall.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.tolist()
    return Documents(tuple(map(int, cu_seqlens)))
