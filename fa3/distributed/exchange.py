"""What the ranks of a group send each other: rows, heads, and what they were asked for."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fa3.complaints import shown
from fa3.distributed.pieces import Moves, RoundTrip, Runs, exchange_of

Group = dist.ProcessGroup | DeviceMesh | None
Arriving = tuple[list[Tensor], Callable[[], object]]
"""Tensors, and what waits for their rows of other ranks'."""


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
        chunks: of each rank, as `SequenceLayout.chunks` returns them; rows: their numbers of rows.
    """

    chunks: Runs
    group: dist.ProcessGroup
    rank: int
    rows: list[int]

    @property
    def everything(self) -> RoundTrip:
        """How this rank gets all rows, one rank's after another's."""
        ends = [0, *accumulate(self.rows)]
        each = tuple((range(*pair),) for pair in pairwise(ends))
        return exchange_of(each, ((range(ends[-1]),),) * len(each), self.rank)

    def whole(self, x: Tensor) -> Tensor:
        """Return (batch, seqlen, ...) of the ranks' (batch, rows, ...)."""
        (placed,), wait = self.moved(self.everything.there, x)
        wait()
        return placed.index_select(1, orders(self.chunks, x.device)[1])

    def sums(self, x: Tensor) -> Tensor:
        """Return this rank's (batch, rows, ...) of the sum of all (batch, seqlen, ...)."""
        by_rank = x.float().index_select(1, orders(self.chunks, x.device)[0])
        trip = self.everything
        return self.add_back([], trip, self.moved(trip.back, by_rank))[0]

    def moved(self, moves: Moves, *tensors: Tensor, by_heads: bool = False) -> Arriving:
        """Return the rows that moves bring of the ranks' (batch, rows, ...).
        This rank's own are in their places at once. By heads, each rank gets its share of heads."""
        total, sent, received, kept = moves
        if by_heads:
            tensors = tuple(x.unflatten(2, (len(self.rows), -1)).movedim(2, 0) for x in tensors)
            held = [x.transpose(1, 2).contiguous().unbind() for x in tensors]
        else:
            held = [(x.transpose(0, 1).contiguous(),) * len(self.rows) for x in tensors]
        placed = [x[0].new_empty(total, *x[0].shape[1:]) for x in held]
        # Torch's functions for this cost the host several times as much.
        group, device = self.group, placed[0].device
        steps: list[Any] = [(group.send, x[rank][rows], rank) for rank, rows in sent for x in held]
        steps += [(group.recv, y[places], rank) for rank, places in received for y in placed]
        is_batch = bool(steps) and group._get_backend(device).supports_coalescing
        if is_batch:
            group._start_coalescing(device)
        works = [begin([x], rank, 0) for begin, x, rank in steps]
        if is_batch:
            works = [group._end_coalescing(device)]
        for rows, places in kept:
            for x, y in zip(held, placed, strict=True):
                y[places] = x[self.rank][rows]

        def wait() -> None:
            while works:
                works.pop().wait()
            # Until here nothing else may have the memory of what is sent.
            steps.clear()

        return [y.transpose(0, 1) for y in placed], wait

    def add_back(self, sums: list[Tensor], trip: RoundTrip, arriving: Arriving) -> list[Tensor]:
        """Return sums over this rank's rows with what comes back, which may be all there is yet."""
        parts, wait = arriving
        wait()
        sums = sums or [x[:, : self.rows[self.rank]] for x in parts]
        for (_, rows), (_, places) in zip(trip.there.sent, trip.back.received, strict=True):
            for total, x in zip(sums, parts, strict=True):
                total[:, rows] += x[:, places]
        return sums


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
