"""What the ranks of a group send each other: rows, heads, and what they were asked for."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fa3.complaints import shown
from fa3.distributed.alone import KeyPart
from fa3.distributed.transfer import RowExchange, Runs, Transfer

Group = dist.ProcessGroup | DeviceMesh | None


def group_of(group: Group) -> dist.ProcessGroup:
    """Return the process group of an argument `group`; None stands for all ranks."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
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
        chunks: of each rank, as `SequenceLayout.chunks` returns them; rows: their numbers of rows.
    """

    chunks: Runs
    group: dist.ProcessGroup
    rank: int
    rows: tuple[int, ...]

    def whole(self, x: Tensor) -> Tensor:
        """Return (batch, seqlen, ...) of the ranks' (batch, rows, ...)."""
        most = max(self.rows)
        padded = F.pad(x.transpose(0, 1), [0, 0] * (x.ndim - 1) + [0, most - x.shape[1]])
        parts = [torch.empty_like(padded) for _ in self.rows]
        dist.all_gather(parts, padded, self.group)
        by_rank = torch.cat([one[:rows] for one, rows in zip(parts, self.rows, strict=True)])
        return by_rank[orders(self.chunks, x.device)[1]].transpose(0, 1)

    def sums(self, x: Tensor) -> Tensor:
        """Return this rank's (batch, rows, ...) of the sum of all (batch, seqlen, ...)."""
        dist.all_reduce(x := x.float().contiguous(), group=self.group)
        rows = [x[:, one.start : one.stop] for one in self.chunks[self.rank]]
        return torch.cat([x[:, :0], *rows], 1)


class RankCall(NamedTuple):
    """A call over ranks, without what its tensors hold.

    Attributes:
        part: with what is asked for; ends: of documents, or none.
        sizes: heads and columns of q, k and v.
    """

    split: Split
    part: KeyPart
    ends: tuple[int, ...]
    batch: int
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    def transfer(
        self, exchange: RowExchange, dtype: torch.dtype, number: int, sizes: Any, **named: bool
    ) -> Transfer:
        """Return a transfer of tensors with these heads and columns."""
        group = self.split.group
        return Transfer(exchange, dtype, number, group, self.batch, sizes, self.device, **named)


@functools.lru_cache(maxsize=64)
def orders(chunks: Runs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sequence row of each row of all ranks, and the other way round."""
    with torch.inference_mode(False):
        rows = [torch.arange(x.start, x.stop) for held in chunks for x in held]
        to_ranks = torch.cat([torch.arange(0), *rows])
        return to_ranks.to(device), to_ranks.argsort().to(device)


class OverRanks(torch.autograd.Function):
    """What ranks compute together, differentiable once."""

    @staticmethod
    def forward(ctx, run: Callable, run_back: Callable, *tensors: Tensor | None):
        """Return what `run` returns, but for the last: tensors that `run_back` takes last."""
        *results, saved = run(*tensors)
        ctx.run_back = run_back
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        """Return what `run_back` returns: a gradient of each tensor, or None."""
        return None, None, *ctx.run_back(*gradients, *ctx.saved_tensors)


def agree_on_rows(
    layout: Any,
    group: dist.ProcessGroup,
    rows: int,
    asked: Mapping[str, object],
    error: Exception | None = None,
) -> int:
    """Return the rows of the whole sequence; raise on all ranks if one cannot go on.
    What is asked, by name, must be the same on all ranks. All raise the error of one."""
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
