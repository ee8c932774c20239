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

    who adds        waits for a word | adds block i | looks at the next | it is done
    who makes known                                                                | writes its word
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles, SumWords


@dataclass(frozen=True)
class TurnsToAdd:
    """Whose turn it is to add to the tiles of queries, for one tile of keys and one query head.

    Fields:
        words: of all tiles.
        tiles: `QueryTiles` of the sequence, which say where the words are.
        rank: how many tiles of keys add before this one, and this one.
        begin, end: the blocks of queries that the tile of keys after this one adds to.
    """

    words: SumWords
    tiles: QueryTiles | PackedQueryTiles
    rank: Int32
    begin: Int32
    end: Int32

    @cute.jit
    def wait(self, tile, rank: Int32):
        """Wait until all have added to a tile of queries that come before this one.

        Args:
            rank: what has been seen of the tile's word.
        """
        if self.is_shared(tile):
            word = self.words.of_tile(self.tiles, tile)
            while rank < self.rank - 1:
                rank = cute.arch.load(word, Int32, sem="acquire", scope="gpu")

    @cute.jit
    def look(self, tile) -> Int32:
        """What a tile's word says now; whoever needs it waits for it, not this thread.

        No acquire, which would wait: an addition is not issued before a branch that depends on the
        word, and it is made in L2, where those that the word tells of have been made.
        """
        rank = Int32(0)
        if self.is_shared(tile):
            word = self.words.of_tile(self.tiles, tile)
            rank = cute.arch.load(word, Int32, sem="relaxed", scope="gpu")
        return rank

    @cute.jit
    def is_shared(self, tile) -> Boolean:
        """Whether another tile of keys adds to a tile of queries before this one."""
        m_block, _, _ = tile
        return m_block >= self.begin and m_block < self.end

    def pass_on(self, tile):
        """Make known that this tile of keys has added; one thread calls this.

        The maximum: tiles of keys that no query sees add zeros, whenever they come.
        """
        word = self.words.of_tile(self.tiles, tile)
        cute.arch.atomic_max(word, self.rank, sem="release", scope="gpu")
