"""Which sequences of a call are the decode kernel's, and which the forward kernel's.

A tile of the forward kernel has 128 queries of one head, a tile of the decode kernel 64 rows of all
heads that share keys, and the decode kernel cuts the keys so that all SMs read equally many. A
sequence with few queries is therefore the decode kernel's. Lengths are known on the GPU only, so
both kernels are launched, and each leaves out the sequences of the other: the decode kernel those
with more than `short_queries` (`fa3.schedules.sequences.Cached`), the table of the forward kernel's
tiles the rest (`fa3.kernels.tile_table`).
"""

from fa3.primitives.wgmma import ROWS

MOST_SHORT_ROWS = 2 * ROWS
"""Rows of a key/value head up to which a sequence is short: with more the keys are read, and
multiplied, by more than two tiles of one warpgroup each."""


def short_queries(qhead_per_kvhead: int) -> int:
    """The most queries of a short sequence; at least 1.

    Without heads to pack, more than one tile of rows is as much work for either kernel.
    """
    return max(1, min(ROWS, MOST_SHORT_ROWS // qhead_per_kvhead))
