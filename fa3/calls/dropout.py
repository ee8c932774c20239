"""The dropout of a call: its probability and its seed, checked; and the mask that it leads to.

The seed is drawn from torch's default generator of the tensors' device, on that device. So the host
waits for nothing, and a captured graph draws another seed at each replay.
"""

import torch

from fa3.calls.operands import Operand, check_device, check_dtype, describe
from fa3.calls.options import check_probability, integer, real
from fa3.primitives.fragments import Position
from fa3.reference.dropout import Dropout

STATE_BYTES = 8  # bytes of a seed


def dropout_of(dropout_p: float, rng_state: torch.Tensor | None, q: torch.Tensor) -> Dropout | None:
    """The dropout of a call with these queries; None without."""
    if not dropout_p:
        if rng_state is not None:
            raise ValueError("rng_state must be None without dropout_p: nothing is drawn")
        return None
    check_probability(dropout_p)
    if rng_state is None:
        return Dropout(draw_rng_state(q.device), dropout_p)
    check_device("rng_state", described_state(rng_state), "q", q)
    return Dropout(rng_state, dropout_p)


def draw_rng_state(device: torch.device) -> torch.Tensor:
    """A seed from torch's default generator."""
    return torch.randint(2**63 - 1, (1,), device=device)


def described_state(rng_state: torch.Tensor) -> Operand:
    """Describe a seed that the caller gives; raises unless it is one."""
    operand = describe("rng_state", rng_state, STATE_BYTES)
    check_dtype("rng_state", operand, torch.int64)
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
    """Return which weights a call with this seed keeps; for tests and for inspection.

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
    sizes = [
        integer(name, size, 0)
        for name, size in zip(
            ("batch", "heads", "seqlen_q", "seqlen_k"),
            (batch, heads, seqlen_q, seqlen_k),
            strict=True,
        )
    ]
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
