"""What the ranks of a group send each other: rows, heads, and what they were asked for.

Collectives want the same number of rows of each rank. So rows are padded to the most that a rank
has, and put in order by an index when they have arrived.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fa3.complaints import shown

Group = dist.ProcessGroup | DeviceMesh | None

# Torch 2.13 renamed them; 2.10 has only the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_of(group: Group) -> dist.ProcessGroup:
    """Return the process group of an argument `group`; None stands for all ranks."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised: call init_process_group first")
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a ProcessGroup that has this rank, a DeviceMesh of 1 dimension or None, "
            f"got {shown(group)}"
        )
    return group


@dataclass(frozen=True)
class Split:
    """A sequence, split among the ranks of a group.

    Attributes:
        chunks: of each rank, as `SequenceLayout.chunks` returns them.
    """

    chunks: tuple[tuple[range, ...], ...]
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def own_chunks(self) -> tuple[range, ...]:
        """The chunks of this rank."""
        return self.chunks[self.rank]

    @functools.cached_property
    def rows(self) -> list[int]:
        """Rows of each rank."""
        return [sum(map(len, chunks)) for chunks in self.chunks]

    def sent_by_one(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's (batch, rows, ...) as (most rows, batch, ...)."""
        missing, x = max(self.rows) - x.shape[1], x.transpose(0, 1)
        return (F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x).contiguous()

    def sent_by_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, seqlen, ...) as (ranks * most rows, batch, ...)."""
        return x.transpose(0, 1).index_select(0, orders(self.chunks, x.device)[0])

    def in_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, seqlen, ...): the inverse of `sent_by_all`."""
        return x.index_select(0, orders(self.chunks, x.device)[1]).transpose(0, 1)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return (ranks * most rows, batch, ...) of the ranks' (batch, rows, ...)."""
        sent = self.sent_by_one(x)
        received = sent.new_empty(len(self.chunks) * len(sent), *sent.shape[1:])
        ALL_GATHER(received, sent, self.group)
        return received

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, seqlen, ...) of the ranks' (batch, rows, ...)."""
        return self.in_sequence(self.gathered(x))

    def scattered(self, sent: torch.Tensor) -> torch.Tensor:
        """Return this rank's (batch, rows, ...) of the sum of what `gathered` is like."""
        received = sent.new_empty(max(self.rows), *sent.shape[1:])
        REDUCE_SCATTER(received, sent, group=self.group)
        return received[: self.rows[self.rank]].transpose(0, 1)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's (batch, rows, ...) of the sum of all (batch, seqlen, ...)."""
        return self.scattered(self.sent_by_all(x.float())).to(x.dtype)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, seqlen, heads / ranks, columns) of (batch, rows, heads, columns)."""
        by_rank = self.sent_by_one(x).unflatten(2, (len(self.chunks), -1)).movedim(2, 0)
        return self.in_sequence(self.all_to_all(by_rank.flatten(0, 1)))

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, rows, heads, columns): the inverse of `to_heads`."""
        by_rank = self.all_to_all(self.sent_by_all(x)).unflatten(0, (len(self.chunks), -1))
        rows = by_rank[:, : self.rows[self.rank]]
        return rows.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of all ranks' tensors, which are cut in dimension 0."""
        received, sent = torch.empty_like(x), x.contiguous()
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def passed_on(self, source: int, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Send a rank's (batch, rows, ...) to the next rank; return what waits for other ones.

        The previous rank sends rows of the rank before `source`.
        """
        count = len(self.chunks)
        rows, sent = self.rows[(source - 1) % count], [x.contiguous() for x in tensors]
        received = [x.new_empty(len(x), rows, *x.shape[2:]) for x in sent]
        works = []
        if count == 1:
            received = list(sent)
        else:
            peers = [dist.get_global_rank(self.group, (self.rank + i) % count) for i in (1, -1)]
            pairs: list[Any] = [(dist.isend, x, peers[0]) for x in sent]
            pairs += [(dist.irecv, x, peers[1]) for x in received]
            make: Any = dist.P2POp
            operations = [make(*one, self.group) for one in pairs if one[1].numel()]
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            # Until here nothing else may have the memory of what is sent.
            sent.clear()
            return received

        return wait


@functools.lru_cache(maxsize=64)
def orders(
    chunks: tuple[tuple[range, ...], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence row of each padded row of all ranks, and the other way round.

    Padding stands for row 0; what becomes of it is never read.
    """
    with torch.inference_mode(False):
        rows = [torch.cat([torch.arange(c.start, c.stop) for c in of_rank]) for of_rank in chunks]
        most = max(map(len, rows))
        to_ranks = torch.cat([F.pad(one, (0, most - len(one))) for one in rows])
        to_sequence = torch.empty(sum(map(len, rows)), dtype=torch.int64)
        for rank, one in enumerate(rows):
            to_sequence[one] = rank * most + torch.arange(len(one))
        return to_ranks.to(device), to_sequence.to(device)


class Transfer(torch.autograd.Function):
    """Send tensors, and their gradients back."""

    @staticmethod
    def forward(ctx, send: Callable, send_back: Callable, *tensors: torch.Tensor):
        """Return what `send` returns for each tensor."""
        ctx.send_back = send_back
        return tuple(map(send, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: torch.Tensor):
        """Return what `send_back` returns for each gradient."""
        return None, None, *map(ctx.send_back, gradients)


def agree_on_rows(
    layout: Any,
    group: dist.ProcessGroup,
    rows: int,
    asked: Mapping[str, object],
    error: Exception | None = None,
) -> int:
    """Return the rows of the whole sequence; raise on all ranks if one cannot go on.

    Args:
        rows: of this rank.
        asked: what must be the same on all ranks, by name.
        error: why this rank cannot go on; all ranks raise it.
    """
    said: list[Any] = [None] * group.size()
    texts = {name: f"{value}" for name, value in asked.items()}
    try:
        dist.all_gather_object(said, (rows, texts, error), group)
    except RuntimeError as broken:
        raise RuntimeError(
            f"rank {group.rank()}: another rank did not answer within the group's timeout; it has "
            "ended, or it calls something else"
        ) from broken
    for rank, (_, others, refusal) in enumerate(said):
        if refusal is not None:
            raise type(refusal)(f"rank {rank}: {refusal}") from error
        for name, text in said[0][1].items():
            if others[name] != text:
                raise ValueError(
                    f"{name} must be the same on all ranks, got {text:.200} on rank 0 and "
                    f"{others[name]:.200} on rank {rank}"
                )
    seqlen = sum(count for count, _, _ in said)
    for rank, chunks in enumerate(layout.chunks(seqlen, group.size())):
        wanted, count = sum(map(len, chunks)), said[rank][0]
        if wanted != count:
            raise ValueError(
                f"rank {rank} must have {wanted} of {seqlen} rows by {layout!r:.200}, got {count}"
            )
    return seqlen
