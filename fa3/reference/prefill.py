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
from fa3.scores.masks import Sequence


def execute_prefill(
    plan: RaggedPlan,
    window: Window,
    operands: CacheOperands,
    most_short: int,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Attend to the keys in a cache for all sequences with more than `most_short` packed queries.

    The other arguments are as for `execute_varlen`.
    """
    q, k_cache, v_cache, out, lse, seqlens, _, _, page_table = operands[:9]
    ends = operands.cu_seqlens_q.clamp(0, len(q))
    counts = ends.diff().clamp(min=0)
    if operands.seqused_q is not None:
        counts = counts.minimum(operands.seqused_q.clamp(min=0))
    used = torch.where(counts > most_short, counts, 0)
    keys = torch.where(used > 0, seqlens, 0).clamp(0, tokens_of_sequence(k_cache, page_table))
    keys_of, values_of = [], []
    for sequence, (seqlen_q, seqlen_k) in enumerate(zip(used.tolist(), keys.tolist(), strict=True)):
        key = torch.arange(seqlen_k, device=CPU)
        at = find(sequence, key, None, page_table, k_cache)[:2]
        # Pages before the window may hold anything, and 0 * NaN is not 0.
        first, _ = plan.spec.mask.key_range(0, Sequence(seqlen_q, seqlen_k, window))
        is_hidden = (key < first)[:, None, None]
        keys_of.append(k_cache[at].masked_fill(is_hidden, 0.0))
        values_of.append(v_cache[at].masked_fill(is_hidden, 0.0))
    packed = torch.cat(keys_of), torch.cat(values_of)
    ends_k = pad(keys.cumsum(0, dtype=torch.int32), (1, 0))
    of_long = RaggedOperands(q, *packed, out, lse, ends, ends_k, used, None)
    execute_varlen(plan.spec, window, of_long, softmax_scale, tensors)
