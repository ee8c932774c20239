"""`fa3.distributed.flash_attn_func` and `flash_attn_varlen_func`: checks, agreement, autograd."""

import inspect
from typing import Any

import torch

from fa3.calls.call import AttentionCall
from fa3.calls.forward import describe_dense
from fa3.calls.operands import operand_of
from fa3.complaints import shown
from fa3.distributed.exchange import Group, OverRanks, agree_on_rows, group_of
from fa3.distributed.layouts import Documents, SequenceLayout
from fa3.distributed.methods import method_of, window_of
from fa3.distributed.planning import methods_for
from fa3.problem import NO_BOUND
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    group: Group = None,
    method: str = "auto",
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
        method: "gather", "ring" or "ulysses", which needs heads_q to be a multiple of the group's
            size. Key/value heads are repeated where they are too few. "auto" takes what `plan`
            says: "gather" or "ulysses".
        seqlen: rows of the whole sequence, where the ranks are known to agree. None, or less than
            two for each rank: they tell each other what they were asked for; the host waits.
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: Documents, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `fa3.flash_attn_varlen_func` of documents that are split among the ranks.

    Queries, keys and values are of the same documents, which `layout` knows.

    Args:
        q: (rows, heads_q, head_dim), bfloat16 or float16: the rows of this rank.
        k, v: (rows, heads_kv, head_dim or head_dim_v), the same rows.
        layout: `documents(cu_seqlens)`.
        options: group, method and others as in `flash_attn_func`, but "ring" is not supported. With
            "gather", window_size must show no key after a query, or all keys.

    Returns:
        as `flash_attn_func`, without the batch. It also raises the same errors.
    """
    arguments = SIGNATURE.bind(q, k, v, layout=layout, **options)
    arguments.apply_defaults()
    return attend_over_ranks(arguments.arguments, is_packed=True)


SIGNATURE = inspect.signature(flash_attn_func)


@torch._disable_dynamo  # which torch.compiler.disable is, but imported when it is called
def attend_over_ranks(
    named: dict[str, Any], is_packed: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the result of a public function of its arguments, by name."""
    group, seqlen = group_of(named.pop("group")), named.pop("seqlen")
    if is_packed:
        tensors = {name: named[name] for name in "qkv" if isinstance(named[name], torch.Tensor)}
        named |= {name: x[None] for name, x in tensors.items()}
    error: Exception | None = None
    try:
        check_call(named, group.size(), is_packed)
    except Exception as wrong:  # the other ranks wait for this one
        error = wrong
    # The first call of NCCL hangs if a rank has nothing to send.
    if seqlen is None or seqlen < 2 * group.size():
        asked = {name: without_rows(value) for name, value in named.items()}
        rows = 0 if error else named["q"].shape[1]
        seqlen = agree_on_rows(named["layout"], group, rows, asked, error)
    elif error is not None:
        raise error
    split = named["layout"].split(seqlen, group)
    q, v = named["q"], named["v"]
    if q.shape[1] != (rows := split.rows[split.rank]):
        raise ValueError(
            f"q must have {rows} of {seqlen} rows by {named['layout']}, got {q.shape[1]}"
        )
    method = method_of(named, split, named["layout"].cu_seqlens if is_packed else (), q, v)
    run = lambda q, k, v, _: method.forward(q, k, v, named["return_lse"])  # noqa: E731
    out, lse = OverRanks.apply(run, method.backward, q, named["k"], v, named["sinks"])
    if not named["return_lse"]:
        return out[0] if is_packed else out
    return (out[0], lse[0]) if is_packed else (out, lse)


def check_call(named: dict[str, Any], num_ranks: int, is_packed: bool) -> None:
    """Raise unless this rank's arguments, by name, fit together and are supported."""
    layout, method, slopes = named["layout"], named["method"], named["alibi_slopes"]
    if method not in (methods := ("auto", "gather", "ring", "ulysses")):
        raise ValueError(f"method must be one of {methods}, got {shown(method)}")
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
    tensors = [named[name] for name in "qkv"]
    if getattr(tensors[0], "dtype", None) == torch.float8_e4m3fn:
        raise NotImplementedError("q must be in 16 bits over ranks, got torch.float8_e4m3fn")
    for name, x in zip("qkv", tensors, strict=True):
        if isinstance(x, torch.Tensor) and x.ndim != 4:
            shape = tuple(x.shape[is_packed:])
            raise ValueError(f"{name} must have {4 - is_packed} dimensions, got {shape}")
    call = AttentionCall.dense(*map(operand_of, describe_dense((*tensors, slopes, named["sinks"]))))
    rows, key_rows = (x.shape[1] for x in tensors[:2])
    if key_rows != rows:
        raise ValueError(f"k must have {rows} rows like q, got {key_rows}")
    methods_for(method, num_ranks, call.heads_q, window_of(named), slopes is not None, is_packed)


def without_rows(value: object) -> object:
    """Return what ranks must agree on: of a tensor all but its rows and values."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size for i, size in enumerate(value.shape) if value.ndim != 4 or i != 1]
    gradient = " with a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{value.dtype} {shape} on {value.device.type}{gradient}"
