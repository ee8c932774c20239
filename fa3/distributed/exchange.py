"""What the ranks of a group send each other: rows, heads, and what they were asked for.

Collectives want the same number of rows of each rank. So rows are padded to the most that a rank
has, and put in order by an index when they have arrived.
"""

import functools
from collections.abc import Mapping
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
    """Return the process group of an argument `group`; None stands for all ranks.

    Raises:
        TypeError: it is no group.
        ValueError: torch.distributed is not initialised, the mesh has several dimensions, or this
            rank is not in the group.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised: call init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of 1 dimension, got {group.ndim}")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank must be in group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {shown(group)}")
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
    def own_chunks(self) -> tuple[range, ...]:
        """The chunks of this rank."""
        return self.chunks[self.group.rank()]

    @property
    def most_rows(self) -> int:
        """The most rows that a rank has."""
        return max(sum(map(len, chunks)) for chunks in self.chunks)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole (seqlen, ...) from this rank's (rows, ...), by all-gather."""
        sent = F.pad(x, (0, 0) * (x.ndim - 1) + (0, self.most_rows - len(x))).contiguous()
        received = sent.new_empty(len(self.chunks) * self.most_rows, *x.shape[1:])
        ALL_GATHER(received, sent, self.group)
        return received.index_select(0, orders(self.chunks, x.device)[1])

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's (rows, ...) of the ranks' summed (seqlen, ...), by reduce-scatter."""
        sent = x.index_select(0, orders(self.chunks, x.device)[0])
        received = sent.new_empty(self.most_rows, *x.shape[1:])
        REDUCE_SCATTER(received, sent, group=self.group)
        return received[: sum(map(len, self.own_chunks))]


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


class WholeRows(torch.autograd.Function):
    """The whole (seqlen, ...) of each rank's rows; its gradient is the sum over ranks, in fp32."""

    @staticmethod
    def forward(ctx, split: Split, x: torch.Tensor) -> torch.Tensor:
        """Gather the rows."""
        ctx.split = split
        return split.whole(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Sum and scatter the gradient."""
        return None, ctx.split.sums(gradient.float()).to(gradient.dtype)


def agree_on_rows(
    layout: Any,
    group: dist.ProcessGroup,
    rows: int,
    asked: Mapping[str, object],
    error: Exception | None = None,
) -> int:
    """Return the rows of the whole sequence; raise on all ranks if one of them cannot go on.

    The ranks tell each other what they were asked for, and the host waits for it.

    Args:
        rows: of this rank.
        asked: what must be the same on all ranks, by name.
        error: why this rank cannot go on; all ranks raise it.

    Raises:
        ValueError: the ranks disagree, or the layout gives a rank another number of rows.
    """
    texts = {name: f"{value}" for name, value in asked.items()}
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, (rows, texts, error), group)
    for rank, (_, _, refusal) in enumerate(said):
        if refusal is not None:
            raise type(refusal)(f"rank {rank}: {refusal}") from error
    for rank, (_, others, _) in enumerate(said):
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
