"""What ranks send each other: rows, heads, arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fa3.complaints import shown

Group = dist.ProcessGroup | DeviceMesh | None


def groups_of(group: Group) -> tuple[dist.ProcessGroup, ...]:
    """Return the process group of an argument `group`; None means all ranks.
    Of a mesh of two dimensions return the groups along both, too."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed must be initialised: call init_process_group first")
    along: list[dist.ProcessGroup] = []
    if isinstance(group, DeviceMesh):
        if group.ndim == 2 and group.mesh_dim_names:
            along, group = group.get_all_groups(), group._flatten()
        if group.ndim == 1:
            group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a ProcessGroup that has this rank, a DeviceMesh of 1 dimension, one of "
            f"2 dimensions with mesh_dim_names, or None, got {shown(group)}"
        )
    return group, *along


class OverRanks(torch.autograd.Function):
    """What ranks compute together, differentiable once."""

    @staticmethod
    def forward(ctx, run: Callable, run_back: Callable, *tensors: Tensor | None):
        """Return what `run` returns except the last: tensors that `run_back` takes last."""
        *results, saved = run(*tensors)
        ctx.run_back = run_back
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        """Return what `run_back` returns: a gradient of each tensor, or None."""
        return None, None, *ctx.run_back(*gradients, *ctx.saved_tensors)


def agree_on_rows(
    group: dist.ProcessGroup,
    rows: int,
    named: Mapping[str, Any],
    error: Exception | None = None,
    dim: int = -3,
) -> int:
    """Return the rows of the whole sequence, or raise on all ranks.
    Arguments must be the same on all ranks, but for this dimension of tensors, which has rows. All
    raise the error of one."""
    said: list[Any] = [None] * group.size()
    texts = {name: without_rows(value, dim) for name, value in named.items()}
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
    seqlen, layout = sum(count for count, _, _ in said), named["layout"]
    for rank, chunks in enumerate(layout.chunks(seqlen, group.size())):
        wanted, count = sum(map(len, chunks)), said[rank][0]
        if wanted != count:
            raise ValueError(
                f"rank {rank} must have {wanted} of {seqlen} rows by {layout!r:.200}, got {count}"
            )
    return seqlen


def without_rows(value: object, dim: int) -> str:
    """Return as a text what ranks must agree on.
    Of tensors that is neither rows nor values."""
    if not isinstance(value, Tensor):
        return f"{value}"
    shape = [size for i, size in enumerate(value.shape) if i - value.ndim != dim]
    # Else ranks would hang later.
    gradient = " with a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"
