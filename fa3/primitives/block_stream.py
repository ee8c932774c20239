"""The producers' loop over key blocks: loads K and V in the order in which consumers use them.

The forward and the decode producer run it; `fa3.primitives.attention.Attention` consumes the
blocks in the same three steps: `first`, `rest`, `last`. A producer may load other data in between.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class BlockStream:
    """Loads the key blocks of a tile, from the last to the first."""

    # (n_block) -> the block's place; called one block ahead, since lookups take time.
    find: Callable
    # load_k, load_v: (place, state) -> next state; load a block into the state's stage.
    load_k: Callable
    load_v: Callable
    is_ahead: bool = True  # whether K is loaded one block ahead of V, as S = Q K^T is computed

    @cute.jit
    def first(self, n_block, k_state):
        """Load K of the first block if K is ahead; return the block's place and K's state."""
        place = self.find(n_block)
        if cutlass.const_expr(self.is_ahead):
            k_state = self.load_k(place, k_state)
        return place, k_state

    @cute.jit
    def rest(self, begin, n_block, place, k_state, v_state):
        """Load all blocks down to `begin` except what `last` loads."""
        while n_block > begin:
            n_block -= 1
            following = self.find(n_block)
            k_state = self.load_k(following if self.is_ahead else place, k_state)
            v_state = self.load_v(place, v_state)
            place = following
        return place, k_state, v_state

    @cute.jit
    def last(self, place, k_state, v_state):
        """Load V of block `begin`, and its K if K is not ahead."""
        if cutlass.const_expr(not self.is_ahead):
            k_state = self.load_k(place, k_state)
        return k_state, self.load_v(place, v_state)
