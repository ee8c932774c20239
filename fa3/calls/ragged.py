"""The tensors of a call on packed sequences: what they are, and whether they fit together.

Lengths are others in every call, and so are the sizes that follow from them: `tokens_of`,
`check_integers`, `check_totals` and `check_ragged_out` look at these each time and remember
nothing. `spec_of_packed` looks at the rest, which repeated calls share. `check_lengths` looks at
the values of the small integer tensors, as far as the host can see them.
"""

import itertools
from typing import NamedTuple

import torch

from fa3.calls.assertions import check_counts, read_back
from fa3.calls.dense import MOST_FORWARD_TILES
from fa3.calls.modifiers import ModifierSpec
from fa3.calls.operands import (
    ALIGNMENT,
    DTYPES,
    PACKED_DIMENSIONS,
    Description,
    Operand,
    check_contiguous,
    check_device,
    check_dtype,
    check_head_dim,
    check_heads_divide,
    check_kind,
    check_no_overlap,
    check_rank,
    check_same_kind,
    check_shape,
    check_stride,
    describe,
    hide_all_keys_of_lse,
)
from fa3.calls.options import VARLEN_FROM_FLASH_ATTENTION_2, check_window, note_on_order
from fa3.complaints import kind_of
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.problem import AttentionSpec, Window
from fa3.reference.varlen import used_rows

INTEGERS_OF_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

STRIDE_UNIT = ALIGNMENT // min(dtype.itemsize for dtype in DTYPES)
"""Elements of which strides may be any multiple."""

MOST_RAGGED_ROWS = 1 << 29
"""Rows of a tensor at most: 32 bits hold the sum of two rows' numbers and a bound of a window."""

Integers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The tensors that `INTEGERS_OF_LENGTHS` names."""


class Tokens(NamedTuple):
    """What the tokens of q, k or v are like, whatever their number and their strides.

    To the checks of kinds and heads it is an `Operand`.

    Fields:
        shape: heads and columns.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


def describe_integers(integers: Integers) -> tuple[Description | None, ...]:
    """Describe each of the integer tensors that is given.

    Raises:
        TypeError, ValueError, NotImplementedError: see `fa3.calls.operands.describe`.
    """
    ends_q, ends_k, used_q, used_k = integers
    if not (used_q is None or isinstance(used_q, torch.Tensor)):
        came, note = kind_of(used_q), note_on_order(used_q, VARLEN_FROM_FLASH_ATTENTION_2)
        raise TypeError(f"seqused_q must be a torch.Tensor, got {came}{note}")
    return (
        describe("cu_seqlens_q", ends_q, 1),
        describe("cu_seqlens_k", ends_k, 1),
        None if used_q is None else describe("seqused_q", used_q, 1),
        None if used_k is None else describe("seqused_k", used_k, 1),
    )


# --------------------------------------------------------------------- what no length changes


def spec_of_packed(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    causal: bool,
    window_size: tuple[int, int],
    modifiers: ModifierSpec,
) -> tuple[AttentionSpec, Window]:
    """What is compiled for a call with these tokens; raises unless they pose a problem.

    Returns:
        the spec, and the window with bounds that any lengths may have.
    """
    check_tokens(q, k, v)
    window = check_window(window_size, causal).tighten(MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
    return modifiers.spec(q.dtype, q.shape[1], v.shape[1], window), window


def check_tokens(q: Tokens, k: Tokens, v: Tokens) -> None:
    """Raise unless the tokens of q, k and v go together."""
    check_kind(q)
    check_same_kind("k", k, q)
    check_same_kind("v", v, q)
    check_head_dim("v", v)
    (_, head_dim), (heads_kv, head_dim_k), (heads_v, _) = q.shape, k.shape, v.shape
    if head_dim_k != head_dim:
        raise ValueError(f"k must have head_dim {head_dim} like q, got {head_dim_k}")
    if heads_v != heads_kv:
        raise ValueError(f"v must have {heads_kv} heads like k, got {heads_v}")
    check_heads_divide(q, "k", k)


# ------------------------------------------------------------------------------- sizes of a call


def tokens_of(name: str, description: Description) -> tuple:
    """The fields of the `Tokens` that a tensor holds, in a plain tuple to look a call up by.

    Raises:
        ValueError: it is not (total, heads, head_dim), or TMA cannot walk it where it lies.
    """
    shape, stride, dtype, device = description
    if len(shape) != 3 or stride[2] != 1 or stride[0] % STRIDE_UNIT or stride[1] % STRIDE_UNIT:
        operand = Operand(*description)
        check_rank(name, operand, PACKED_DIMENSIONS)
        check_contiguous(name, operand)
        # Also along a single row: kernels step to where other sequences would be.
        check_stride(name, operand, 0)
        check_stride(name, operand, 1)
    _, heads, columns = shape
    return (heads, columns), dtype, device


def check_integers(described: tuple[Description | None, ...], q: Description) -> int:
    """Raise unless the integer tensors have an entry for each sequence.

    Returns:
        the number of sequences.
    """
    ends_q, _, used_q, used_k = described
    shape, device = ends_q[0], q[3]
    if len(shape) != 1 or not shape[0]:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(shape)}")
    batch = shape[0] - 1
    ends_like, used_like = (shape, (1,), torch.int32, device), ((batch,), (1,), torch.int32, device)
    expected = ends_like, ends_like, used_q and used_like, used_k and used_like
    if described == expected:
        # Nearly all are, and are spared the checks.
        return batch
    for name, description, like in zip(INTEGERS_OF_LENGTHS, described, expected, strict=True):
        if description is not None:
            operand = Operand(*description)
            check_dtype(name, operand, torch.int32)
            check_device(name, operand, "q", Operand(*q))
            check_shape(name, operand, tuple(like[0]), "cu_seqlens_q")
            check_contiguous(name, operand)
    return batch


def are_of_batch(integers: Integers, batch: int) -> bool:
    """Whether the integer tensors, vectors all, have entries for so many sequences."""
    _, ends_k, used_q, used_k = integers
    return (
        ends_k.shape[0] == batch + 1 > 0
        and (used_q is None or used_q.shape[0] == batch)
        and (used_k is None or used_k.shape[0] == batch)
    )


def check_totals(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], batch: int
) -> tuple[int, int]:
    """Raise unless k and v have the same rows, and kernels can count rows and tiles in 32 bits.

    Args:
        q, k, v: their shapes.

    Returns:
        the rows of q, and the rows of k.
    """
    (total_q, heads, _), total_k, total_v = q, k[0], v[0]
    if total_v != total_k:
        raise ValueError(f"v must have {total_k} rows like k, got {total_v}")
    for name, total in (("q", total_q), ("k", total_k)):
        if total > MOST_RAGGED_ROWS:
            raise ValueError(f"{name} must have at most {MOST_RAGGED_ROWS} rows, got {total}")
    if heads * (total_q // FEWEST_ROWS + batch) > MOST_FORWARD_TILES:
        raise ValueError(
            f"q must have at most {MOST_FORWARD_TILES} tiles of {FEWEST_ROWS} rows, got {total_q} "
            f"rows of {batch} sequences and {heads} heads"
        )
    return total_q, total_k


def check_ragged_out(
    out: torch.Tensor, description: Description, shape: tuple[int, ...], q: Description
) -> None:
    """Raise unless the output of a call on q can lie as a tensor of the caller's does."""
    operand = Operand(*description)
    tokens_of("out", description)
    check_same_kind("out", operand, Operand(*q))
    check_shape("out", operand, shape, "q and the values")
    if not out.is_contiguous():
        check_no_overlap("out", operand)


# --------------------------------------------------------------------------------------- values


def check_lengths(integers: Integers, totals: tuple[int, int], longest: tuple[int, int]) -> None:
    """Raise unless the sequences lie in q and in k, and none is longer than the call says.

    Args:
        totals: rows of q and of k.
        longest: max_seqlen_q and max_seqlen_k.

    Raises:
        ValueError: naming the argument and the sequence.
        RuntimeError: a tensor would have to be read back while a CUDA graph is captured.
    """
    ends_q, ends_k, used_q, used_k = map(read_back, INTEGERS_OF_LENGTHS, integers)
    for side, ends, used, total, most in zip(
        "qk", (ends_q, ends_k), (used_q, used_k), totals, longest, strict=True
    ):
        check_ends(f"cu_seqlens_{side}", ends, side, total)
        check_counts(f"seqused_{side}", used or ())
        for sequence, rows in enumerate(used_rows(ends, used)):
            if len(rows) > most:
                raise ValueError(
                    f"max_seqlen_{side} must be {len(rows)} or more, the rows of {side} that "
                    f"sequence {sequence} has, got {most}"
                )


def check_ends(name: str, ends: list[int], side: str, total: int) -> None:
    """Raise unless cumulated lengths cut a tensor's rows into sequences."""
    if ends[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {ends[0]}")
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end < begin:
            raise ValueError(
                f"{name} must not decrease, got {begin} to {end} for sequence {sequence}"
            )
    if ends[-1] > total:
        raise ValueError(f"{name} must end at {total}, the rows of {side}, or less, got {ends[-1]}")


# ------------------------------------------------------------------------------------ results


def used_queries(total_q: int, ends: torch.Tensor, used: torch.Tensor | None) -> torch.Tensor:
    """Which rows of q belong to queries that are used, (total_q,) bool; there is a sequence."""
    row = torch.arange(total_q, dtype=torch.int32, device=ends.device)
    end = ends[1:]
    if used is not None:
        end = ends[:-1] + torch.minimum(used.clamp(min=0), ends.diff())
    # Rows behind the last sequence count as its own, past its end.
    return row < end[torch.bucketize(row, ends[1:-1], right=True)]


def hide_all_keys_of_packed(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    ends: torch.Tensor,
    used: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Write what packed queries get that see no key; rows that are not used stay as they are.

    Args:
        ends, used: cu_seqlens_q and seqused_q, on out's device.
    """
    is_used = used_queries(len(out), ends, used)
    out.masked_fill_(is_used[:, None, None], 0.0)
    if lse is not None:
        hidden = torch.empty_like(lse)
        hide_all_keys_of_lse(hidden, sinks)
        lse.copy_(torch.where(is_used, hidden, lse))
