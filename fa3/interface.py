"""FlashAttention-3's module `flash_attn_interface`, as far as its functions exist here.

    from fa3 import interface as flash_attn_interface

Names, order and defaults of FlashAttention-3's arguments, and what the functions return, are the
same, but for one: `num_splits` of `flash_attn_varlen_func`, which is 0. docs/conventions.md says
what else differs. Arguments that fa3 adds are passed by name.
"""

from fa3.calls.combine import flash_attn_combine
from fa3.calls.forward import flash_attn_func
from fa3.calls.kvcache import flash_attn_with_kvcache
from fa3.calls.scheduler_metadata import get_scheduler_metadata
from fa3.calls.varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
