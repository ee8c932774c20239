"""How dQ of a block of queries gets from shared memory into the sums: by one thread, in bulk.

The thread belongs to a warp that does nothing else. Who hands dQ over needs a fence, and dQ's warps
stood at it twice as long when they added, too (docs/experiments.md).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa3.primitives.first_additions import FirstAdditions
from fa3.primitives.ordered_gradients import TurnsToAdd
from fa3.primitives.query_tiles import QueryGradients, QueryPieces


@dataclass(frozen=True)
class GradientAddition:
    """The additions of one tile of keys and one query head; one warp makes them.

    Fields:
        pieces: of a block.
        sums: of the tile's sequence.
        memory: where pieces are, one for each stage of `staged`.
        pipelines: `staged` delivers pieces; `added`, if sums have a fixed order, tells of blocks
            that have been added.
        claims: say who is first; None if all sums begin with zeros.
        turns: of a fixed order; None without.
    """

    pieces: QueryPieces
    sums: QueryGradients
    memory: cute.Tensor
    pipelines: object
    claims: FirstAdditions | None
    turns: TurnsToAdd | None

    @cute.jit
    def all(self, blocks, head, batch, state, added_state):
        """Add all blocks of queries, upwards, each when it is this tile's turn."""
        rank = Int32(0)
        for m_block in cutlass.range(blocks.begin, blocks.end, unroll=1):
            tile, following = (m_block, head, batch), (m_block + 1, head, batch)
            is_first = self.wait(tile, rank, state)
            for piece in cutlass.range(self.pieces.count, unroll=1):
                self.pipelines.staged.consumer_wait(state)
                self.meet()
                if cute.arch.lane_idx() == 0:
                    self.sums.add(self.pieces, piece, tile, state.index, self.memory, is_first)
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    self.pipelines.staged.consumer_release(state)
                cute.arch.sync_warp()
                state.advance()
            if cutlass.const_expr(self.claims is not None):
                self.make_known(tile, is_first)
            if cutlass.const_expr(self.turns is not None):
                # What it says comes while dQ is waited for.
                rank = self.turns.look(following)
                self.pipelines.added.producer_acquire(added_state)
                self.meet()
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                    self.pipelines.added.producer_commit(added_state)
                added_state.advance()
        return state, added_state

    @cute.jit
    def wait(self, tile, rank, state) -> Boolean:
        """Wait until a block may be added to the sums.

        Not before there is dQ: words may be among what is still to be begun.

        Args:
            rank: what has been seen of the tile's word, in a fixed order.

        Returns:
            for lane 0 whether it is to be stored.
        """
        is_first = Boolean(False)
        if cutlass.const_expr(self.turns is not None):
            self.pipelines.staged.consumer_wait(state)
            self.turns.wait(tile, rank)
        if cutlass.const_expr(self.claims is not None):
            self.pipelines.staged.consumer_wait(state)
            self.meet()
            if cute.arch.lane_idx() == 0:
                is_first = self.claims.claim(tile)
        return is_first

    @cute.jit
    def make_known(self, tile, is_first):
        """If this was the first block, make known that it is there."""
        if is_first:
            cute.arch.cp_async_bulk_wait_group(0)
            self.claims.make_known(tile)

    def meet(self):
        """All lanes have seen what they waited for, before lane 0 gives it back: who looks later
        might find it filled again, which looks as if it never had been."""
        cute.arch.sync_warp()
