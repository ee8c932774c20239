"""Whether a call on a cache keeps its tiles whole, where the host knows the lengths.

Whole tiles need no workspace and no merge, but they may keep some SMs busy for longer.
"""

import numpy as np

from fa3.planning.decode import TILE_N, Sizes
from fa3.primitives.divisor import PlainDivisor
from fa3.problem import Window
from fa3.schedules.stream_k import Chunks
from fa3.scores.masks import Band, Sequence

MERGE_BYTES = 100_000
"""What an SM reads while a launch merges parts: some 3 us, at a 132nd of an H200's 4.8 TB/s."""


def whole_tiles_suffice(
    sizes: Sizes, window: Window, key_bytes: int, lengths: list[int], num_ctas: int
) -> bool:
    """Whether the SM with most whole tiles is done before equal pieces are read and merged."""
    most, total = most_of_whole_tiles(sizes, sizes.bounds(window), lengths, num_ctas)
    return most <= -(-total // num_ctas) + MERGE_BYTES / (TILE_N * key_bytes)


def most_of_whole_tiles(
    sizes: Sizes, window: Window, lengths: list[int], num_ctas: int
) -> tuple[int, int]:
    """Key blocks of the CTA that has the most if tiles stay whole, and of all CTAs."""
    mask, tiles = Band.of(window), sizes.heads_kv * sizes.num_m_blocks
    blocks = (
        mask.key_blocks(0, sizes.seqlen_q, TILE_N, Sequence(sizes.seqlen_q, max(0, n), window))
        for n in lengths
    )
    of_tile = np.array([of_sequence.end - of_sequence.begin for of_sequence in blocks], np.int64)
    ends = (tiles * of_tile).cumsum()
    pieces = Chunks.even(int(ends[-1]), PlainDivisor(num_ctas))
    cuts = pieces.begin(np.arange(num_ctas + 1))
    sequence = np.minimum(np.searchsorted(ends, cuts, side="right"), sizes.batch - 1)
    begin, blocks_of_tile = ends[sequence] - tiles * of_tile[sequence], of_tile[sequence]
    # A piece goes on to where the next tile begins.
    cuts = begin + -((begin - cuts) // blocks_of_tile) * blocks_of_tile
    return int(np.diff(cuts).max()), pieces.total
