"""`fa3.distributed.flash_attn_func` and `flash_attn_varlen_func`: checks, agreement, autograd."""

import contextlib
import functools
import numbers
from typing import Any

import torch

from fa3.calls.backward import wants_gradient
from fa3.calls.call import check_tensors, describe_tensors
from fa3.calls.latest import FastPath
from fa3.calls.operands import Operand
from fa3.calls.options import DENSE, PACKED, Options, check_scale, checked_options, integer
from fa3.distributed.alone import KeyPart
from fa3.distributed.exchange import Group, OverRanks, agree_on_rows, groups_of
from fa3.distributed.hops import Hops
from fa3.distributed.layouts import Documents, SequenceLayout, check_sequence_layout
from fa3.distributed.planning import methods_for, plan
from fa3.distributed.transfer import RankCall, num_rows_of
from fa3.distributed.ulysses import Ulysses
from fa3.problem import NO_BOUND, REMEMBERED
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
        group: a ProcessGroup, a DeviceMesh, or None for all ranks. In a mesh of two dimensions,
            ranks of the second one exchange heads, and `method` brings keys along the first one.
        method: "gather", "ring" or "ulysses", which needs heads_q to be a multiple of the group's
            size. Key/value heads are repeated where they are too few. "auto" takes what `plan`
            says: "gather" or "ulysses"; in a mesh of two dimensions "gather".
        seqlen: rows of the whole sequence, where the ranks are known to agree. None, or less than
            two for each rank: they tell each other what they were asked for; the host waits.
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
        options: group, method and others as in `flash_attn_func`.

    Returns:
        as `flash_attn_func`, without the batch. It also raises the same errors.
    """
    if unknown := options.keys() - DEFAULTS.keys():
        raise TypeError(f"flash_attn_varlen_func has no arguments {sorted(unknown)}")
    named = {"q": q, "k": k, "v": v, "layout": layout} | DEFAULTS | options
    return attend_over_ranks(named, is_packed=True)


OPERANDS = "q", "k", "v", "alibi_slopes", "sinks"
MAY_HAVE_GRADIENT = "q", "k", "v", "sinks"  # those that may have one
ASKED = "causal", "softcap", "deterministic", "sm_margin", "return_lse"
DEFAULTS = flash_attn_func.__kwdefaults__ or {}


@functools.lru_cache(maxsize=REMEMBERED, typed=True)
def latest_over_ranks(*_: object) -> FastPath[Hops | Ulysses]:
    """Return what is remembered of the latest call with these options."""
    return FastPath()


@torch._disable_dynamo  # which torch.compiler.disable is, but imported when it is called
def attend_over_ranks(
    named: dict[str, Any], is_packed: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the result of a public function of its arguments, by name."""
    groups, seqlen = groups_of(named.pop("group")), named["seqlen"]
    q, k, v, slopes, sinks = [named[name] for name in OPERANDS]
    # The first group has all ranks; there may be two more, of a mesh.
    sizes = [group.size() for group in groups]
    # The first call of NCCL hangs if a rank has nothing to send.
    compares = not (isinstance(seqlen, numbers.Integral) and int(seqlen) >= 2 * sizes[0])
    latest, method, error = None, None, None
    if not compares:
        with contextlib.suppress(TypeError):  # of values that cannot be looked up
            asked = [named[name] for name in named if name not in OPERANDS]
            asked += groups, is_packed, torch.is_grad_enabled(), *named["window_size"]
            method, _ = (latest := latest_over_ranks(*asked)).find(named)
    if method is None:
        try:
            call = checked(named, sizes, is_packed)
        except Exception as wrong:
            if not compares:
                raise
            error = wrong  # the other ranks wait for this one
        if compares:
            total = agree_on_rows(groups[0], 0 if error else q.shape[-3], named, error)
            if seqlen not in (None, total):
                raise ValueError(f"seqlen must be {total}, the rows of all ranks, got {seqlen}")
            seqlen = total
        method = prepare(call, seqlen, groups)
        if latest is not None:
            latest.remember(named, dict.fromkeys(OPERANDS, 16), (), method, MAY_HAVE_GRADIENT)
    modifiers, returns_lse = (slopes, sinks), named["return_lse"]
    if wants_gradient(q, k, v, sinks):
        run = lambda q, k, v, _: method.forward(q, k, v, modifiers, returns_lse)  # noqa: E731
        run_back = functools.partial(method.backward, modifiers)
        out, lse = OverRanks.apply(run, run_back, q, k, v, sinks)
    else:
        out, lse, _ = method.forward(q, k, v, modifiers, returns_lse)
    return (out, lse) if returns_lse else out


def checked(named: dict[str, Any], sizes: list[int], is_packed: bool) -> tuple:
    """Check named arguments; return their description, options, layout and method.
    The sizes are of groups, of which the first has all ranks."""
    layout, method, kind = named["layout"], named["method"], PACKED if is_packed else DENSE
    check_sequence_layout(layout)
    if named["seqlen"] is not None:
        integer("seqlen", named["seqlen"], 0)
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
    tensors = {name: named[name] for name in OPERANDS}
    call: Any = describe_tensors(tensors, Options(kind=DENSE))
    if call.q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("q must be in 16 bits over ranks, got torch.float8_e4m3fn")
    for name in "qkv":
        if len(shape := getattr(call, name).shape) != 4 - is_packed:
            raise ValueError(f"{name} must have {4 - is_packed} dimensions, got {tuple(shape)}")
    asked = {name: named[name] for name in ASKED}
    asked["has_gradient"] = wants_gradient(*[tensors[name] for name in MAY_HAVE_GRADIENT])
    made = checked_options(DENSE, named["window_size"], asked)
    check_scale(named["softmax_scale"], 1)
    fits = call
    if is_packed:
        ends = Operand((len(layout.cu_seqlens),), (1,), torch.int32, call.q.device)
        fits = call._replace(kind=PACKED, cu_seqlens_q=ends, cu_seqlens_k=ends)
    check_tensors(fits)
    *rows, heads, columns = call.q.shape
    call.k.check_shape("k", (*rows, call.k.shape[-2], columns), "q")  # of the same rows
    rest = heads, made.options.window, call.alibi_slopes is not None
    if len(sizes) > 1:
        if method == "ulysses":
            raise ValueError("method must be gather, ring or auto over a mesh of 2 dimensions")
        method = "gather" if method == "auto" else method
        methods_for("ulysses", sizes[2], *rest)
    methods_for(method, sizes[0], *rest)
    part = made.options._replace(kind=kind), named["softmax_scale"], made.deterministic
    return call, part, layout, method


@functools.lru_cache(maxsize=REMEMBERED)
def prepare(call: tuple, seqlen: int, groups: tuple) -> Hops | Ulysses:
    """Return what computes a call, prepared as far as possible."""
    described, part, layout, method = call
    (*batch, rows, heads, columns), _, dtype, device = described.q
    *_, heads_kv, columns_v = described.v.shape
    num_ranks, rank, window = groups[0].size(), groups[0].rank(), part[0].window
    chunks = layout.chunks(seqlen, num_ranks)
    ends: tuple[int, ...] = 0, seqlen
    order: tuple[int, ...] = ()
    if rows != (wanted := num_rows_of(chunks)[rank]):
        raise ValueError(f"q must have {wanted} of {seqlen} rows by {layout}, got {rows}")
    if method == "auto":
        asked = seqlen, num_ranks, heads, heads_kv, columns, columns_v
        named = {"window_size": window, "has_slopes": described.alibi_slopes is not None}
        method = plan(layout, *asked, **named).method
    if isinstance(layout, Documents):
        chunks, ends, order = layout.one_by_one(num_ranks)
    sizes = (heads, columns), (heads_kv, columns), (heads_kv, columns_v)
    kind = tuple(batch), sizes, dtype, device, dtype
    of = RankCall(chunks, groups[0], rank, KeyPart(*part), ends, order, *kind)
    if method == "ulysses" or len(groups) > 1:
        return Ulysses(of, method == "ring", *groups[1:])
    return Hops(of, method == "ring")
