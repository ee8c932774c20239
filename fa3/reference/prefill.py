"""Long packed queries against keys in a cache on the CPU: their keys are gathered and packed.

`fa3.reference.cache` attends for the short ones; `fa3.calls.mixed` calls both.
"""

import torch
from torch.nn.functional import pad

from fa3.planning.ragged import RaggedPlan
from fa3.problem import Window
from fa3.reference.block_loop import CPU
from fa3.reference.cache import CacheOperands, find, tokens_of_sequence
from fa3.reference.varlen import RaggedOperands, execute_varlen


def execute_prefill(
    plan: RaggedPlan,
    window: Window,
    operands: CacheOperands,
    most_short: int,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend to the keys in a cache for all sequences with more than `most_short` packed queries.

    The other arguments are those of `execute_varlen`.
    """
    q, k_cache, v_cache, out, lse, seqlens, _, _, page_table = operands[:9]
    ends = operands.cu_seqlens_q.clamp(0, len(q))
    counts = ends.diff().clamp(min=0)
    used = torch.where(counts > most_short, counts, 0)
    keys = torch.where(used > 0, seqlens, 0).clamp(0, tokens_of_sequence(k_cache, page_table))
    places = [
        find(sequence, torch.arange(count, device=CPU), None, page_table, k_cache)[:2]
        for sequence, count in enumerate(keys.tolist())
    ]
    packed = (torch.cat([cache[at] for at in places]) for cache in (k_cache, v_cache))
    ends_k = pad(keys.cumsum(0, dtype=torch.int32), (1, 0))
    of_long = RaggedOperands(q, *packed, out, lse, ends, ends_k, used, None)
    execute_varlen(plan.spec, window, of_long, softmax_scale, tensors)
