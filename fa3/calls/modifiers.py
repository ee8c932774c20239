"""Score and mask functions, biases and dropout of a call, checked.

Templates of it shape the code; the tensors go to the kernel. The seed of dropout is
drawn from torch's default generator of the tensors' device, on that device. So the host waits for
nothing, and a captured graph draws another seed at each replay.
"""

import torch

from fa3.calls.operands import Operand, describe
from fa3.calls.options import UserFunctions, check_probability, integer, real
from fa3.complaints import not_an_object
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.fragments import Position
from fa3.reference.dropout import Dropout
from fa3.scores.diagnostics import check_class
from fa3.scores.masks import Mask
from fa3.scores.scores import Alibi, Score, Softcap
from fa3.scores.templates import Template, tensors_of

ELEMENT_DTYPES = tuple(getattr(torch, name) for name in ELEMENT_TYPES)
"""Dtypes of tensors that a score or a mask of the user's may have."""


def functions_of(
    q: torch.Tensor | Operand, score: Score | None, mask: Mask | None
) -> tuple[UserFunctions, tuple[torch.Tensor, ...]]:
    """Check the user's score and mask; return what is compiled, and tensors."""
    tensors = {}
    for kind, one, base, method in (
        ("score", score, Score, "score"),
        ("mask", mask, Mask, "visible"),
    ):
        if one is None:
            continue
        if not isinstance(one, base):
            raise not_an_object(kind, one, base)
        check_class(type(one), base, method)
        for field, tensor in tensors_of(one):
            name = f"{kind}.{field}"
            operand = describe(name, tensor, 1)
            operand.check_dtype(name, *ELEMENT_DTYPES)
            operand.check_device(name, "q", q)
            tensors[name] = tensor
    scores = () if score is None else (Template.of(score),)
    template = None if mask is None else Template.of(mask)
    return UserFunctions(scores, template, tuple(tensors)), tuple(tensors.values())


def modifier_tensors(
    slopes: torch.Tensor | None,
    function_tensors: tuple[torch.Tensor, ...],
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The tensors of scores, mask and sinks, in the order of kernels."""
    return tuple(tensor for tensor in (slopes, *function_tensors, sinks) if tensor is not None)


def standard_scores(
    softcap: float, slopes: Operand | torch.Tensor | None, is_causal: bool
) -> tuple[Template, ...]:
    """What is compiled of softcap and alibi_slopes.
    If `is_causal`, no key after a query's own position is visible."""
    scores: list[Score] = [Softcap(float(softcap))] if softcap else []
    if slopes is not None:
        like_slopes = torch.empty((0,) * len(slopes.shape), dtype=torch.float32, device="meta")
        scores.append(Alibi(like_slopes, is_causal))
    return tuple(map(Template.of, scores))


# -------------------------------------------------------------------------------------- dropout


def dropout_of(dropout_p: float, rng_state: torch.Tensor | None, q: torch.Tensor) -> Dropout | None:
    """The dropout of a call with these queries; None without."""
    if not dropout_p:
        if rng_state is not None:
            raise ValueError("rng_state must be None without dropout_p: nothing is drawn")
        return None
    check_probability(dropout_p)
    if rng_state is None:
        return Dropout(draw_rng_state(q.device), dropout_p)
    described_state(rng_state).check_device("rng_state", "q", q)
    return Dropout(rng_state, dropout_p)


def draw_rng_state(device: torch.device) -> torch.Tensor:
    """A seed from torch's default generator."""
    return torch.randint(2**63 - 1, (1,), device=device)


def described_state(rng_state: torch.Tensor) -> Operand:
    """Describe a seed that the caller gives; raises unless it is one."""
    operand = describe("rng_state", rng_state, torch.int64.itemsize)
    operand.check_dtype("rng_state", torch.int64)
    if tuple(operand.shape) != (1,):
        raise ValueError(f"rng_state must have shape (1,), got {tuple(operand.shape)}")
    return operand


def dropout_mask(
    rng_state: torch.Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> torch.Tensor:
    """Return which weights a call with this seed keeps, for inspection.

    A weight's random number depends only on the seed, batch, head, query and key. So the mask of a
    call is part of the mask of a larger call. A packed sequence has the mask of its number in the
    batch.

    Args:
        rng_state: (1,), int64, as for `flash_attn_func`.
        dropout_p: as for `flash_attn_func`; 0 keeps all.
        heads: query heads.

    Returns:
        (batch, heads, seqlen_q, seqlen_k), bool, on rng_state's device: True for what is kept.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """
    named = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes = [integer(name, size, 0, most=LARGEST) for name, size in named.items()]
    dropout_p = real("dropout_p", dropout_p)
    check_probability(dropout_p)
    described_state(rng_state)
    if not dropout_p:
        return torch.ones(sizes, dtype=torch.bool, device=rng_state.device)
    entry, head, query, key = (
        torch.arange(size, device=rng_state.device).view(-1, *[1] * (3 - i))
        for i, size in enumerate(sizes)
    )
    return Dropout(rng_state, dropout_p).keeps(Position(entry, head, query, key, *sizes[2:]))
