"""Sums of dQ that need no zeros: who comes first to a tile of queries stores, all others add.

Many tiles of keys add to a tile of queries, in any order. Zeros to begin with are written to
memory, leave L2 and come back before anything is added; where sequences are short that took up to a
fifth of the backward pass. So a word for each tile of queries says whether sums are there. Who adds
claims the tile by an atomic, and stores if nobody has before; who finds it claimed waits until the
sums are there. Who has claimed a tile runs, and waits for no other CTA before it has stored; so
nobody waits forever.

    who is first    claims the word | stores block i | it is there: the word says so
    all others      find it claimed, and wait ....................... | add block i

Of long sequences tiles of keys walk along one another, and who is first holds up all the others. So
their sums begin with zeros, and nobody claims anything (docs/experiments.md).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles, SumWords

NOTHING, CLAIMED, STORED = 0, 1, 3
"""What a word says of a tile's sums. Bits are only added: so is a claim to stored ones."""


@dataclass(frozen=True)
class FirstAdditions:
    """Claims on the tiles of queries of a sequence.

    Fields:
        words: of all tiles.
        tiles: of the sequence, which say where the words are.
        has_zeros: 1 if sums begin with zeros; then words say nothing.
    """

    words: SumWords
    tiles: QueryTiles | PackedQueryTiles
    has_zeros: Int32

    @cute.jit
    def claim(self, tile) -> Boolean:
        """Wait until one may add to a tile, or is the first; one thread calls this.

        Returns:
            whether this thread is to store.
        """
        is_first = Boolean(False)
        if self.has_zeros == 0:
            word = self.words.of_tile(self.tiles, tile)
            found = cute.arch.atomic_or(word, Int32(CLAIMED), sem="acquire", scope="gpu")
            is_first = found == NOTHING
            while found == CLAIMED:
                found = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
            # What was stored in bulk is added to in bulk.
            cute.arch.fence_proxy("async.global")
        return is_first

    def make_known(self, tile):
        """Make known that the sums are there, which this thread has stored."""
        word = self.words.of_tile(self.tiles, tile)
        cute.arch.atomic_or(word, Int32(STORED), sem="release", scope="gpu")

    @cute.jit
    def has_sums(self, tile) -> Boolean:
        """Whether a tile has sums, when all have added: no key may have come to it."""
        has_sums = Boolean(True)
        if self.has_zeros == 0:
            word = self.words.of_tile(self.tiles, tile)
            has_sums = cute.arch.load(word, Int32, sem="relaxed", scope="gpu") != NOTHING
        return has_sums
