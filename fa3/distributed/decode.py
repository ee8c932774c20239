"""`fa3.distributed.flash_attn_with_kvcache`: decoding with a cache that is split among ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fa3.calls.attention import flash_attn_with_kvcache as attend_alone
from fa3.calls.combine import flash_attn_combine
from fa3.calls.options import as_pair, check_window, flag
from fa3.distributed.exchange import Group, groups_of

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # till 2.12

LSE_COLUMNS = 4
"""Columns that a row's log-sum-exp takes next to its output: 16 bytes, so that rows are aligned."""


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    group: Group = None,
    cache_seqlens: int | Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to a cache whose keys are split over the ranks.

    Ranks attend to their keys, exchange outputs and log-sum-exps, and merge them. Nothing is
    compared between ranks, and the host waits for nothing.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), the same on all ranks.
        k_cache, v_cache: this rank's part, as `fa3.flash_attn_with_kvcache` takes it.
        k, v: tokens to append to this rank's part; None on ranks that get none.
        group: a ProcessGroup, a DeviceMesh for its ranks, or None for all ranks.
        cache_seqlens: keys that this rank has of each sequence; may be 0.
        causal, window_size: only causal with a single query, as ranks do not know positions.
        sinks: (heads_q,), the same on all ranks.
        options: other options of `fa3.flash_attn_with_kvcache`, but none that counts positions.

    Returns:
        as `fa3.flash_attn_with_kvcache`, the same on all ranks.

    Raises:
        TypeError, ValueError, NotImplementedError: as there, or an option counts positions.
    """
    group = groups_of(group)[0]
    window = check_window(as_pair(window_size), flag("causal", causal))
    if window.left >= 0 or window.right > 0 or (window.right == 0 and q.shape[1] != 1):
        raise NotImplementedError(
            "causal and window_size are not supported with keys split among ranks, except causal "
            "with a single query"
        )
    for name in ("alibi_slopes", "rotary_cos", "rotary_sin", "cu_seqlens_q", "out", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported with keys split among ranks")
    out, lse = attend_alone(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, return_lse=True,
        sinks=sinks if group.rank() == 0 else None, **options,
    )  # fmt: skip
    head_dim, return_lse = out.shape[3], return_lse or options.get("return_softmax_lse", False)
    columns = lse.transpose(1, 2)[..., None].expand(-1, -1, -1, LSE_COLUMNS)
    part = torch.cat((out.float(), columns), 3)
    parts = part.new_empty(group.size() * len(part), *part.shape[1:])
    ALL_GATHER(parts, part, group)
    parts = parts.unflatten(0, (group.size(), len(part)))
    out, lse = flash_attn_combine(parts[..., :head_dim], parts[..., head_dim], out_dtype=out.dtype)
    return (out, lse.transpose(1, 2)) if return_lse else out
