"""Sums of dQ whose parts come in a fixed order, so that they have the same bits every time.

Many tiles of keys add to a tile of queries, and fp32 sums depend on the order. Here each warp
waits, before it adds its part, for that of the tile of keys that lies after its own: the last keys
add first. They also start first (`fa3.kernels.backward`), and the GPU starts CTAs in the order of
their numbers. So who is waited for runs, or is done, and nothing can wait forever.

With a causal mask the order fits how CTAs walk. Tiles of keys that start together reach a block of
queries one after another, the last keys first, since they begin at later queries.

What a warp waits for is a word of its own for each tile of queries: how many tiles of keys, from
the last one on, have added. `fa3.kernels.backward_begin` sets them to zero.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.query_tiles import PackedQueryTiles, QueryGradients, QueryTiles
from fa3.primitives.wgmma import WARP, WARPS


class TurnWords(NamedTuple):
    """The words of all tiles of queries; `buffer` is (tiles * words,), int32.

    A tile has `words`: one for each warp of each warpgroup.
    """

    buffer: cute.Tensor

    def of_tile(self, words: int, tiles: QueryTiles | PackedQueryTiles, tile) -> cute.Pointer:
        """The first word of a tile."""
        return self.buffer.iterator + tiles.number(tile) * words

    @cute.jit
    def clear(self, words: cutlass.Constexpr, tiles, tile, thread):
        """Set a tile's words to zero."""
        if thread < words:
            cute.arch.store(self.of_tile(words, tiles, tile) + thread, Int32(0))


@dataclass(frozen=True)
class OrderedGradients:
    """`QueryGradients` for one tile of keys and one query head, which add in their turn.

    A part is made known when that of the next block is added, or in `finish`: by then it is in
    memory, and nobody waits until it is.

    Fields:
        rank: how many tiles of keys add before this one, and this one.
        begin, end: the blocks of queries that this tile adds to.
        begin_before, end_before: those that the tile of keys after this one adds to.
    """

    sums: QueryGradients
    turns: TurnWords
    rank: Int32
    begin: Int32
    end: Int32
    begin_before: Int32
    end_before: Int32

    @cute.jit
    def add(self, pieces: cutlass.Constexpr, acc: cute.Tensor, thread, piece, tile, stage):
        """Add a warp's accumulators of a piece, after those that come before."""
        m_block, head, batch = tile
        if m_block > self.begin:
            # Since this piece of the block before, all the other pieces have been added once.
            since = pieces.count - 1
            self.pass_on(pieces, thread, piece, (m_block - 1, head, batch), since)
        if m_block >= self.begin_before and m_block < self.end_before:
            word, rank = self.word(pieces, thread, piece, tile), Int32(0)
            while rank < self.rank - 1:
                rank = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_warp()
        self.sums.add(pieces, acc, thread, piece, tile, stage)

    @cute.jit
    def finish(self, pieces: cutlass.Constexpr, thread, piece, head, batch):
        """Make the last part known."""
        self.pass_on(pieces, thread, piece, (self.end - 1, head, batch), 0)

    @cute.jit
    def pass_on(self, pieces: cutlass.Constexpr, thread, piece, tile, since: cutlass.Constexpr):
        """Make known that this warp has added to a tile, `since` bulk groups ago."""
        if thread % WARP == 0:
            cute.arch.cp_async_bulk_wait_group(since)
            # The maximum: tiles of keys that no query sees add zeros, whenever they come.
            word = self.word(pieces, thread, piece, tile)
            cute.arch.atomic_max(word, self.rank, sem="release", scope="gpu")

    def word(self, pieces, thread, piece, tile) -> cute.Pointer:
        """This warp's word of a tile."""
        first = self.turns.of_tile(words_of_turns(pieces), self.sums.tiles, tile)
        return first + piece * WARPS + thread // WARP


def words_of_turns(pieces) -> int:
    """int32 words of a tile, on the host or in a kernel."""
    return pieces.count * WARPS
