"""Attention over the ranks of a process group: layouts of a sequence, and calls on parts of it.

Each rank holds some rows of q, k and v, as a layout says, and gets the same rows of the output. All
communication goes through torch.distributed.
"""

from fa3.distributed.layouts import (
    Contiguous,
    Documents,
    SequenceLayout,
    Zigzag,
    contiguous,
    documents,
    zigzag,
)

__all__ = [
    "Contiguous",
    "Documents",
    "SequenceLayout",
    "Zigzag",
    "contiguous",
    "documents",
    "zigzag",
]
