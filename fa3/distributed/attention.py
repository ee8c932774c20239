"""`fa3.distributed.flash_attn_func` and `flash_attn_varlen_func`: checks, agreement, autograd."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fa3.calls.call import AttentionCall
from fa3.calls.forward import describe_dense
from fa3.calls.operands import operand_of
from fa3.calls.options import as_pair, check_window, flag
from fa3.complaints import shown
from fa3.distributed.exchange import Group, Split, agree_on_rows, group_of
from fa3.distributed.layouts import Documents, SequenceLayout
from fa3.distributed.methods import (
    Gather,
    Ring,
    Ulysses,
    dense_parts,
    packed_gather,
    packed_lengths,
)
from fa3.problem import NO_BOUND, Window
from fa3.scores.masks import Mask
from fa3.scores.scores import Score

METHODS = "gather", "ring", "ulysses"

OPTIONS = (
    "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "sinks", "deterministic",
    "sm_margin",
)  # fmt: skip
"""Options of both passes on one rank."""

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    group: Group = None,
    method: str = "gather",
    seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    score: Score | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """Compute `fa3.flash_attn_func` of a sequence of which each rank has some rows.

    All ranks of the group must call it, and all must run the backward pass if one does. Gradients
    of q, k and v are of this rank's rows. The gradient of sinks is this rank's share, so add it up
    over the group as for any weight.

    Args:
        q: (batch, rows, heads_q, head_dim), bfloat16 or float16: the rows of this rank.
        k, v: (batch, rows, heads_kv, head_dim or head_dim_v), the same rows.
        layout: which rows those are: `zigzag` or `contiguous`.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        method: "gather", "ring" or "ulysses", which needs heads_q to be a multiple of the group's
            size. Key/value heads are repeated where they are too few.
        seqlen: rows of the whole sequence, where the ranks are known to agree. None: they tell each
            other what they were asked for, which the host waits for.
        window_size: not with "ring".
        alibi_slopes: not with "ring", nor with "gather" if keys after a query's position are seen.
        softmax_scale and the others: as `fa3.flash_attn_func` takes them, the same on all ranks.
        score, mask, dropout_p: depend on positions in the whole sequence; not supported yet.

    Returns:
        out, (batch, rows, heads_q, head_dim_v), of q's dtype; with return_lse also the log-sum-exp,
        (batch, heads_q, rows), float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fa3.flash_attn_func`; or the ranks disagree,
            or a rank has other rows than the layout gives it. On all ranks if seqlen is None.
        RuntimeError: a rank does not answer within the group's timeout.
    """
    return attend_over_ranks(dict(locals()), is_packed=False)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Documents,
    group: Group = None,
    method: str = "gather",
    seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (NO_BOUND, NO_BOUND),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    score: Score | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
) -> Result:
    """Compute `fa3.flash_attn_varlen_func` of documents that are split among the ranks.

    Queries, keys and values are of the same documents, which `layout` knows. All else is as in
    `flash_attn_func`.

    Args:
        q: (rows, heads_q, head_dim), bfloat16 or float16: the rows of this rank.
        k, v: (rows, heads_kv, head_dim or head_dim_v), the same rows.
        layout: `documents(cu_seqlens)`.
        method: "gather" or "ulysses".
        seqlen: rows of all documents together, cu_seqlens[-1], where the ranks are known to agree.
        window_size: with "gather" no key after a query may be seen, or all must be.
        alibi_slopes: not with "gather" if keys after a query's position are seen; (heads_q,).
        group and the others: as in `flash_attn_func`.

    Returns:
        out, (rows, heads_q, head_dim_v), of q's dtype; with return_lse also the log-sum-exp,
        (heads_q, rows), float32.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_attn_func`.
    """
    return attend_over_ranks(dict(locals()), is_packed=True)


def attend_over_ranks(named: dict[str, Any], is_packed: bool) -> Result:
    """Return the result of a public function of its arguments, by name."""
    group, seqlen = group_of(named.pop("group")), named.pop("seqlen")
    error: Exception | None = None
    try:
        check_call(named, group.size(), is_packed)
    except Exception as wrong:  # the other ranks wait for this one
        error = wrong
    if seqlen is None:
        asked = {name: without_rows(value, is_packed) for name, value in named.items()}
        rows = 0 if error else named["q"].shape[not is_packed]
        seqlen = agree_on_rows(named["layout"], group, rows, asked, error)
    elif error is not None:
        raise error
    split = named["layout"].split(seqlen, group)
    q, k, v = (named[name][None] if is_packed else named[name] for name in "qkv")
    if q.shape[1] != (rows := split.rows[split.rank]):
        raise ValueError(
            f"q must have {rows} of {seqlen} rows by {named['layout']}, got {q.shape[1]}"
        )
    ends = named["layout"].cu_seqlens if is_packed else None
    method = method_of(named, split, ends, q.device, q.shape[2], k.shape[2])
    out, lse = DistributedAttention.apply(method, named["return_lse"], q, k, v, named["sinks"])
    if is_packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if named["return_lse"] else out


def method_of(
    named: Mapping[str, Any],
    split: Split,
    ends: tuple[int, ...] | None,
    device: torch.device,
    *heads: int,
) -> Gather | Ring | Ulysses:
    """Return what computes a call that is checked; `ends` are cu_seqlens of documents."""
    window, options = window_of(named), {name: named[name] for name in OPTIONS}
    if named["method"] == "ulysses":
        return Ulysses.of(split, options, packed_lengths(ends, device) if ends else {}, *heads)
    if named["method"] == "ring":
        return Ring(split, options, window.right == 0)
    if ends:
        return packed_gather(split, ends, window, options, device)
    return Gather(split, tuple(dense_parts(split, window, options)))


class DistributedAttention(torch.autograd.Function):
    """Attention over ranks, differentiable once by q, k, v and the sinks."""

    @staticmethod
    def forward(ctx, method: Gather | Ring | Ulysses, returns_lse: bool, q, k, v, sinks):
        """Return out and the log-sum-exp, which may be None if it is not wanted."""
        out, lse, saved = method.forward(q, k, v, returns_lse)
        ctx.method = method
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None):
        """Return the gradients of q, k, v and the sinks."""
        saved = ctx.saved_tensors
        dq, dk, dv, d_sinks = ctx.method.backward(d_out, d_lse, *saved)
        dtype = saved[0].dtype
        return None, None, dq, dk.to(dtype), dv.to(dtype), d_sinks


def check_call(named: Mapping[str, Any], num_ranks: int, is_packed: bool) -> None:
    """Raise unless this rank's arguments, by name, fit together and are supported."""
    layout, method, slopes = named["layout"], named["method"], named["alibi_slopes"]
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {shown(method)}")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be one of fa3.distributed, got {shown(layout)}")
    if isinstance(layout, Documents) != is_packed:
        raise ValueError(
            "layout must be documents(cu_seqlens) for flash_attn_varlen_func, and zigzag or "
            f"contiguous for flash_attn_func, got {layout!r:.200}"
        )
    for name in ("score", "mask", "dropout_p"):
        if named[name] not in (None, 0):
            raise NotImplementedError(
                f"{name} is not supported over ranks: it depends on positions in the whole sequence"
            )
    tensors: list[Any] = [named[name] for name in ("q", "k", "v")]
    if is_packed:
        if any(isinstance(x, torch.Tensor) and x.ndim != 3 for x in tensors):
            shapes = ", ".join(f"{tuple(x.shape)}" for x in tensors)
            raise ValueError(f"q, k and v must have shape (rows, heads, head_dim), got {shapes}")
        tensors = [x[None] if isinstance(x, torch.Tensor) else x for x in tensors]
    call = AttentionCall.dense(*map(operand_of, describe_dense((*tensors, slopes, named["sinks"]))))
    rows, key_rows = (x.shape[1] for x in tensors[:2])
    if key_rows != rows:
        raise ValueError(f"k must have {rows} rows like q, got {key_rows}")
    if method == "ulysses" and call.heads_q % num_ranks:
        raise ValueError(f"heads_q must be a multiple of {num_ranks} ranks, got {call.heads_q}")
    check_positions(method, window_of(named), slopes, is_packed)


def check_positions(
    method: str, window: Window, slopes: torch.Tensor | None, is_packed: bool
) -> None:
    """Raise unless a method puts queries and keys in the places that options count from."""
    advice = ": pass method='ulysses'"
    is_full = window.left < 0 and window.right < 0
    if method == "ring":
        if is_packed:
            raise NotImplementedError("method='ring' is not supported with documents" + advice)
        if window.left >= 0 or window.right > 0:
            raise NotImplementedError("window_size is not supported with method='ring'" + advice)
        if slopes is not None:
            raise NotImplementedError("alibi_slopes is not supported with method='ring'" + advice)
    elif method == "gather" and window.right != 0:
        if slopes is not None:
            raise NotImplementedError(
                "alibi_slopes is supported with method='gather' only if no key after a query is "
                "seen" + advice
            )
        if is_packed and not is_full:
            raise NotImplementedError(
                "window_size of documents is supported with method='gather' only if no key after "
                "a query is seen" + advice
            )


def window_of(options: Mapping[str, Any]) -> Window:
    """Return the window of a call, with causal folded in."""
    return check_window(as_pair(options["window_size"]), flag("causal", options["causal"]))


def without_rows(value: object, is_packed: bool) -> object:
    """Return what ranks must agree on: of a tensor all but its rows and values."""
    if not isinstance(value, torch.Tensor):
        return value
    rank, dim = (3, 0) if is_packed else (4, 1)
    shape = [size for i, size in enumerate(value.shape) if value.ndim != rank or i != dim]
    gradient = " with a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"
