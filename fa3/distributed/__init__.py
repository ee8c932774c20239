"""Attention over the ranks of a process group.

Each rank holds some rows of q, k and v, as a layout says, and gets the same rows of the output.
"""

from fa3.distributed.attention import flash_attn_func, flash_attn_varlen_func
from fa3.distributed.decode import flash_attn_with_kvcache
from fa3.distributed.layouts import SequenceLayout, contiguous, documents, zigzag
from fa3.distributed.planning import RankPlan, plan

__all__ = [
    "RankPlan",
    "SequenceLayout",
    "contiguous",
    "documents",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "plan",
    "zigzag",
]
