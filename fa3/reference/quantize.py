"""The quantize kernel in torch: FP8 q, k or v with scales."""

import itertools

import torch

from fa3.kernels.quantize import HASH, LEAST_SCALE, MOST, mixed_columns
from fa3.primitives.vectors import VECTOR
from fa3.problem import KEYS_OF_GROUP


def quantize_rows(
    # (batch, seqlen, heads, columns) in 16 bits, and the same in e4m3, which is written, or V^T;
    # of packed sequences (total, heads, columns).
    rows: torch.Tensor,
    written: torch.Tensor,
    descale: torch.Tensor,  # (batch, heads_kv), written
    mean: torch.Tensor | None,  # (batch, heads, columns), which the rows lose
    is_rotated: bool,
    ends: torch.Tensor | None = None,  # (batch + 1,), where packed sequences end
) -> None:
    """Write the rows of some sequences in e4m3, and their scales."""
    if ends is not None:
        for n, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            one, place = slice(n, n + 1), slice(begin, end)
            means = None if mean is None else mean[one]
            quantize_rows(rows[None, place], written[None, place], descale[one], means, is_rotated)
        return
    values, norm = rows.float(), 1.0
    if mean is not None:
        values = values - mean[:, None]
    if is_rotated:
        values, norm = rotate_rows(values), mixed_columns(rows.shape[3]) ** -0.5
    by_head = values.unflatten(2, (descale.shape[1], -1))
    if rows.shape[1]:
        descale.copy_(by_head.abs().amax((1, 3, 4)) / MOST)
    else:
        descale.zero_()
    descale.clamp_(min=LEAST_SCALE)
    scaled = by_head * (1.0 / descale)[:, None, :, None, None]
    codes = scaled.clamp(-MOST, MOST).flatten(2, 3)
    written.copy_(in_key_order(codes) if written.dim() == 5 else codes)
    descale.mul_(norm)


def in_key_order(rows: torch.Tensor) -> torch.Tensor:
    """V^T (batch, heads, columns, groups, 16) of V (batch, seqlen, heads, columns).
    Past the last key is that key again."""
    missing = -rows.shape[1] % KEYS_OF_GROUP
    rows = torch.cat((rows, rows[:, -1:].expand(-1, missing, -1, -1)), 1)
    halves = rows.unflatten(1, (rows.shape[1] // KEYS_OF_GROUP, 2, 4, 2))
    return halves.permute(0, 5, 6, 1, 3, 2, 4).flatten(4).contiguous()


def in_rows(transposed: torch.Tensor, seqlen: int) -> torch.Tensor:
    """V of V^T, the other way round."""
    keys = transposed.view(torch.uint8).unflatten(4, (4, 2, 2)).transpose(4, 5).flatten(3)
    return keys[..., :seqlen].permute(0, 3, 1, 2).view(transposed.dtype)


def rotate_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows in which some columns are negated, then transformed, without keeping lengths."""
    column = torch.arange(rows.shape[-1], device=rows.device)
    is_negated = (column // VECTOR + 1) * HASH % 2**32 >> (24 + column % VECTOR) & 1 == 1
    rows = torch.where(is_negated, -rows, rows)
    for step in (1 << i for i in range(mixed_columns(len(column)).bit_length() - 1)):
        first, second = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((first + second, first - second), -2).flatten(-3)
    return rows
