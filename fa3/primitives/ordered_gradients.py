"""Sums of dQ whose parts come in a fixed order, so that they have the same bits every time.

Many tiles of keys add to a tile of queries, and fp32 sums depend on the order. Here who adds a
block waits for the tile of keys that lies after its own: the last keys add first. CTAs also take
them first (`fa3.kernels.backward`), in the order of their numbers. So who is waited for runs, or is
done, and nothing can wait forever.

With a causal mask the order fits how CTAs walk. Tiles of keys that start together reach a block of
queries one after another, the last keys first, since they begin at later queries.

What is waited for is a word for each tile of queries: how many tiles of keys, from the last one on,
have added. `fa3.primitives.query_begin` sets them to zero. A warp of its own writes them: releases
by the warps that compute dQ took a sixth of the kernel's time (docs/experiments.md).

    who adds        waits for the word | adds block i | it is done     | waits for the next word
    who makes known                                   | writes its word
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles


class TurnWords(NamedTuple):
    """The words of all tiles of queries; `buffer` is (tiles,), int32."""

    buffer: cute.Tensor

    def of_tile(self, tiles: QueryTiles | PackedQueryTiles, tile) -> cute.Pointer:
        """The word of a tile."""
        return self.buffer.iterator + tiles.number(tile)

    @cute.jit
    def clear(self, tiles, tile, thread):
        """Set a tile's word to zero."""
        if thread == 0:
            cute.arch.store(self.of_tile(tiles, tile), Int32(0))


@dataclass(frozen=True)
class TurnsToAdd:
    """Whose turn it is to add to the tiles of queries, for one tile of keys and one query head.

    Fields:
        words: of all tiles.
        tiles: `QueryTiles` of the sequence, which say where the words are.
        rank: how many tiles of keys add before this one, and this one.
        begin, end: the blocks of queries that the tile of keys after this one adds to.
    """

    words: TurnWords
    tiles: QueryTiles | PackedQueryTiles
    rank: Int32
    begin: Int32
    end: Int32

    @cute.jit
    def wait(self, tile):
        """Wait until all have added to a tile of queries that come before this one."""
        m_block, _, _ = tile
        if m_block >= self.begin and m_block < self.end:
            word, rank = self.words.of_tile(self.tiles, tile), Int32(0)
            while rank < self.rank - 1:
                rank = cute.arch.load(word, Int32, sem="acquire", scope="gpu")

    def pass_on(self, tile):
        """Make known that this tile of keys has added; one thread calls this.

        The maximum: tiles of keys that no query sees add zeros, whenever they come.
        """
        word = self.words.of_tile(self.tiles, tile)
        cute.arch.atomic_max(word, self.rank, sem="release", scope="gpu")
