"""How dQ of a block of queries gets from shared memory into the sums: by one thread, in bulk.

The thread belongs to a warp that does nothing else. Who hands dQ over needs a fence, and dQ's warps
stood at it twice as long when they added, too (docs/experiments.md).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

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
        turns: None if sums have no fixed order.
    """

    pieces: QueryPieces
    sums: QueryGradients
    memory: cute.Tensor
    pipelines: object
    turns: TurnsToAdd | None

    @cute.jit
    def next(self, tile, state, added_state):
        """Add one block of queries, when it is this tile's turn."""
        staged, added = self.pipelines.staged, self.pipelines.added
        if cutlass.const_expr(self.turns is not None):
            # Not before there is dQ: words may be among what is still to be begun.
            staged.consumer_wait(state)
            self.turns.wait(tile)
            cute.arch.sync_warp()
        for piece in cutlass.range(self.pieces.count, unroll=1):
            staged.consumer_wait(state)
            if cute.arch.lane_idx() == 0:
                self.sums.add(self.pieces, piece, tile, state.index, self.memory)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                staged.consumer_release(state)
            # Nobody may come two rounds late to the pipeline, whose phases look alike.
            cute.arch.sync_warp()
            state.advance()
        if cutlass.const_expr(self.turns is not None):
            added.producer_acquire(added_state)
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0)
                added.producer_commit(added_state)
            added_state.advance()
        return state, added_state
