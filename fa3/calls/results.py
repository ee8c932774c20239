"""What calls write where no query sees a key."""

import math

import torch


def hide_all_keys(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    """Write what queries get that see no key: 0, and -inf or their head's sink."""
    out.zero_()
    if lse is not None:
        hide_all_keys_of_lse(lse, sinks)


def hide_all_keys_of_lse(lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Write the log-sum-exps (..., heads, queries) of queries that see no key."""
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None])


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
