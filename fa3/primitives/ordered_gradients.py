"""Sums of dQ whose parts come in a fixed order, so that they have the same bits every time.

Many tiles of keys add to a tile of queries, and fp32 sums depend on the order. Here each warp
waits, before it adds its part, for that of the tile of keys that lies after its own: the last keys
add first. CTAs also take them first (`fa3.kernels.backward`), in the order of their numbers. So who
is waited for runs, or is done, and nothing can wait forever.

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

WORDS_OF_TILE = WARPS
"""int32 words of a tile."""


class TurnWords(NamedTuple):
    """The words of all tiles of queries; `buffer` is (tiles * WORDS_OF_TILE,), int32.

    A tile has one for each warp that adds.
    """

    buffer: cute.Tensor

    def of_tile(self, tiles: QueryTiles | PackedQueryTiles, tile) -> cute.Pointer:
        """The first word of a tile."""
        return self.buffer.iterator + tiles.number(tile) * WORDS_OF_TILE

    @cute.jit
    def clear(self, tiles, tile, thread):
        """Set a tile's words to zero."""
        if thread < WORDS_OF_TILE:
            cute.arch.store(self.of_tile(tiles, tile) + thread, Int32(0))


@dataclass(frozen=True)
class OrderedGradients:
    """`QueryGradients` for one tile of keys and one query head, which add in their turn.

    A block is made known when all of the next one has been added, or in `finish`: by then it is in
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
    def enter(self, thread, tile):
        """Wait until this warp may add to a tile."""
        m_block, _, _ = tile
        if m_block >= self.begin_before and m_block < self.end_before:
            word, rank = self.word(thread, tile), Int32(0)
            while rank < self.rank - 1:
                rank = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_warp()

    def add(self, *given) -> None:
        """Add a warp's accumulators of a piece."""
        self.sums.add(*given)

    @cute.jit
    def leave(self, pieces: cutlass.Constexpr, thread, tile):
        """All of a tile is on its way: make the one before it known."""
        m_block, head, batch = tile
        if m_block > self.begin:
            self.pass_on(thread, (m_block - 1, head, batch), pieces.count)

    @cute.jit
    def finish(self, thread, head, batch):
        """Make the last block known."""
        self.pass_on(thread, (self.end - 1, head, batch), 0)

    @cute.jit
    def pass_on(self, thread, tile, since: cutlass.Constexpr):
        """Make known that this warp has added to a tile, `since` bulk groups ago."""
        if thread % WARP == 0:
            cute.arch.cp_async_bulk_wait_group(since)
            # The maximum: tiles of keys that no query sees add zeros, whenever they come.
            word = self.word(thread, tile)
            cute.arch.atomic_max(word, self.rank, sem="release", scope="gpu")

    def word(self, thread, tile) -> cute.Pointer:
        """This warp's word of a tile."""
        return self.turns.of_tile(self.sums.tiles, tile) + thread // WARP
