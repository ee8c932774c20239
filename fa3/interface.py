"""FlashAttention-3's module `flash_attn_interface`, as far as its functions exist here.

    from fa3 import interface as flash_attn_interface

Names, order and defaults of FlashAttention-3's arguments, and what the functions return, are the
same, with two exceptions: `num_splits` of `flash_attn_varlen_func` is 0, and `_flash_attn_backward`
returns nothing. docs/migration.md says what else differs. Arguments that fa3 adds are passed by
name. `install` makes this module the one that other libraries import.
"""

import sys

from fa3.calls.attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.calls.combine import flash_attn_combine
from fa3.calls.options import flag
from fa3.calls.passes import _flash_attn_backward, _flash_attn_forward, flash_attn_qkvpacked_func
from fa3.calls.scheduler_metadata import get_scheduler_metadata

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
]

NAME = "flash_attn_interface"  # what libraries import


def install(force: bool = False) -> None:
    """Make `import flash_attn_interface` give this module, in this process.

    Call it before you import libraries that import that name. Libraries that have imported another
    module by then keep it.

    Args:
        force: replace another module of this name that is already imported.

    Raises:
        TypeError: force is no bool.
        RuntimeError: another module of this name is imported, and force is False.
    """
    force = flag("force", force)
    ours, present = sys.modules[__name__], sys.modules.get(NAME)
    if present not in (None, ours) and not force:
        place = getattr(present, "__file__", None) or "memory"
        raise RuntimeError(
            f"{NAME} is imported already, from {place}: call fa3.interface.install() before, or "
            "install(force=True) to replace it for what is imported from now on"
        )
    sys.modules[NAME] = ours
