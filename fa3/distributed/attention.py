"""`fa3.distributed.flash_attn_func`: attention of a sequence that is split among ranks.

gather: each rank gets all keys and values. A chunk of queries attends to the keys up to the last
one it sees, which bottom-right alignment puts in their places. dK and dV are added up in float32.
ulysses: each rank gets the whole sequence of some heads, attends, and sends the output back.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Jacobs et al., DeepSpeed-Ulysses
(arXiv 2309.14509).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fa3.calls.call import AttentionCall
from fa3.calls.forward import describe_dense
from fa3.calls.forward import flash_attn_func as attend_alone
from fa3.calls.operands import operand_of
from fa3.calls.operators import BackwardOptions, gradients_of_call
from fa3.calls.options import as_pair, check_window, flag
from fa3.complaints import shown
from fa3.distributed.exchange import Group, Split, Transfer, agree_on_rows, group_of
from fa3.distributed.layouts import Documents, SequenceLayout
from fa3.problem import NO_BOUND, Window
from fa3.reference.backward import BackwardOperands
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `fa3.flash_attn_func` of a sequence of which each rank has some rows.

    All ranks of the group must call it, and all must run the backward pass if one does. Gradients
    of q, k and v are of this rank's rows. The gradient of sinks is this rank's share, so add it up
    over the group as for any weight.

    Args:
        q: (batch, rows, heads_q, head_dim), bfloat16 or float16: the rows of this rank.
        k, v: (batch, rows, heads_kv, head_dim or head_dim_v), the same rows.
        layout: which rows those are: `zigzag` or `contiguous`.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        method: "gather" or "ulysses", which needs heads_q to be a multiple of the group's size.
            Key/value heads are repeated where they are too few.
        seqlen: rows of the whole sequence, where the ranks are known to agree. None: they tell each
            other what they were asked for, which the host waits for.
        alibi_slopes: not with "gather" if keys after a query's position are seen.
        softmax_scale and the others: as `fa3.flash_attn_func` takes them, the same on all ranks.
        score, mask, dropout_p: depend on positions in the whole sequence; not supported yet.

    Returns:
        out, (batch, rows, heads_q, head_dim_v), of q's dtype; with return_lse also the log-sum-exp,
        (batch, heads_q, rows), float32.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fa3.flash_attn_func`; or the ranks disagree,
            or a rank has other rows than the layout gives it. On all ranks if seqlen is None.
    """
    group = group_of(group)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "deterministic": deterministic, "sm_margin": sm_margin,
    }  # fmt: skip
    named = {"layout": layout, "method": method, "return_lse": return_lse, "q": q, "k": k, "v": v}
    named |= {"score": score, "mask": mask, "dropout_p": dropout_p} | options
    error: Exception | None = None
    try:
        check_call(named, group.size())
    except Exception as wrong:  # the other ranks wait for this one
        error = wrong
    if seqlen is None:
        asked = {name: without_rows(value) for name, value in named.items()}
        seqlen = agree_on_rows(layout, group, 0 if error else q.shape[1], asked, error)
    elif error is not None:
        raise error
    split = layout.split(seqlen, group)
    if q.shape[1] != (rows := split.rows[group.rank()]):
        raise ValueError(f"q must have {rows} of {seqlen} rows by {layout}, got {q.shape[1]}")
    if method == "ulysses":
        return attend_to_heads(split, options, q, k, v, return_lse)
    out, lse = AttentionToAllKeys.apply(split, options, q, k, v, sinks)
    return (out, lse) if return_lse else out


def check_call(named: Mapping[str, Any], num_ranks: int) -> None:
    """Raise unless this rank's arguments, by name, fit together and are supported."""
    layout, method, slopes = named["layout"], named["method"], named["alibi_slopes"]
    if method not in ("gather", "ulysses"):
        raise ValueError(f"method must be 'gather' or 'ulysses', got {shown(method)}")
    if isinstance(layout, Documents):
        raise NotImplementedError("layout must be zigzag or contiguous: documents are not masked")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be one of fa3.distributed, got {shown(layout)}")
    for name in ("score", "mask", "dropout_p"):
        if named[name] not in (None, 0):
            raise NotImplementedError(
                f"{name} is not supported over ranks: it depends on positions in the whole sequence"
            )
    if window_of(named).right != 0 and slopes is not None and method == "gather":
        raise NotImplementedError(
            "alibi_slopes is supported with method='gather' only if no key after a query is seen: "
            "pass method='ulysses'"
        )
    tensors = named["q"], named["k"], named["v"], slopes, named["sinks"]
    call = AttentionCall.dense(*map(operand_of, describe_dense(tensors)))
    rows, key_rows = named["q"].shape[1], named["k"].shape[1]
    if key_rows != rows:
        raise ValueError(f"k must have {rows} rows like q, got {key_rows}")
    if method == "ulysses" and call.heads_q % num_ranks:
        raise ValueError(f"heads_q must be a multiple of {num_ranks} ranks, got {call.heads_q}")


def window_of(options: Mapping[str, Any]) -> Window:
    """Return the window of a call, with causal folded in."""
    return check_window(as_pair(options["window_size"]), flag("causal", options["causal"]))


def without_rows(value: object) -> object:
    """Return what ranks must agree on: of a tensor all but its rows and values."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size for dim, size in enumerate(value.shape) if value.ndim != 4 or dim != 1]
    gradient = " with a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"


# ------------------------------------------------------------------------------------- gather


def chunks_and_keys(
    split: Split, options: Mapping[str, Any]
) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield each chunk among this rank's rows, the keys that it sees, and its options.

    Bottom-right alignment puts the chunk's last query at the last of the keys. Where keys after the
    chunk are seen, the window makes up for it.
    """
    (left, right), seqlen, begin = window_of(options), sum(split.rows), 0
    for chunk in split.own_chunks:
        first = 0 if left < 0 else max(chunk.start - left, 0)
        last = seqlen if right < 0 else min(chunk.stop + right, seqlen)
        after = last - chunk.stop
        window = left if left < 0 else left + after, right if right < 0 else right - after
        moved = {**options, "causal": False, "window_size": window}
        yield slice(begin, begin + len(chunk)), slice(first, last), moved
        begin += len(chunk)


class AttentionToAllKeys(torch.autograd.Function):
    """Gathers keys, and attends to them. Gathers them again for the backward pass."""

    @staticmethod
    def forward(ctx, split: Split, options: Mapping[str, Any], q, k, v, sinks):
        """Return out and the log-sum-exp."""
        keys, values = split.whole(k), split.whole(v)
        outs, lses = [], []
        for rows, seen, named in chunks_and_keys(split, options):
            one = attend_alone(q[:, rows], keys[:, seen], values[:, seen], return_lse=True, **named)
            outs.append(one[0])
            lses.append(one[1])
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
        ctx.split, ctx.options = split, options
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: torch.Tensor | None, d_lse: torch.Tensor | None):
        """Return the gradients of q, k, v and sinks."""
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = ctx.split.whole(k), ctx.split.whole(v)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        dq, d_sinks = torch.empty_like(q), []
        for rows, seen, named in chunks_and_keys(ctx.split, ctx.options):
            read: list[Any] = [q[:, rows], keys[:, seen], values[:, seen], out[:, rows]]
            read += [lse[..., rows].contiguous(), None if d_out is None else d_out[:, rows]]
            read += [None if d_lse is None else d_lse[..., rows]]
            one = gradients_of_call(
                BackwardOperands(*read), BackwardOptions(**named, fp32_dkv=True)
            )
            dq[:, rows] = one[0]
            dk[:, seen] += one[1]
            dv[:, seen] += one[2]
            d_sinks.append(one[3])
        dk, dv = (ctx.split.sums(x).to(k.dtype) for x in (dk, dv))
        return None, None, dq, dk, dv, sum(d_sinks) if ctx.needs_input_grad[5] else None


# ------------------------------------------------------------------------------------ ulysses


def attend_to_heads(
    split: Split,
    options: Mapping[str, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return out of this rank's rows, with return_lse also the log-sum-exp."""
    num_ranks, rank = len(split.chunks), split.group.rank()
    copies = math.lcm(k.shape[2], num_ranks) // k.shape[2]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    heads = q.shape[2] // num_ranks
    named = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if named[name] is not None:
            named[name] = named[name][..., rank * heads : (rank + 1) * heads]
    q, k, v = Transfer.apply(split.to_heads, split.to_rows, q, k, v)
    out, lse = attend_alone(q, k, v, return_lse=True, **named)
    results = (out, lse.transpose(1, 2)[..., None]) if return_lse else (out,)
    out, *lses = Transfer.apply(split.to_rows, split.to_heads, *results)
    return (out, lses[0].squeeze(3).transpose(1, 2)) if return_lse else out
