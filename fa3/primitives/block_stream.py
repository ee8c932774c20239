"""The producer's side of the loop over key blocks: K and V in the order that consumers use.

Its three steps are those of `fa3.primitives.attention.Attention`: the first block, the rest, the
last V. What else a producer has to load or to look up goes in between.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class BlockStream:
    """Loads the key blocks of a tile, from the last to the first.

    Fields:
        find: (n_block) -> where a block lies; looked up one block ahead, since that may take time.
        load_k, load_v: (place, state) -> state; load a block into the stage of a pipeline's state.
        is_ahead: whether K is one block ahead of V, as S = Q K^T is of O += P V.
    """

    find: Callable
    load_k: Callable
    load_v: Callable
    is_ahead: bool = True

    @cute.jit
    def first(self, n_block, k_state):
        """Load K of the first block, if it is ahead; return the block's place, too."""
        place = self.find(n_block)
        if cutlass.const_expr(self.is_ahead):
            k_state = self.load_k(place, k_state)
        return place, k_state

    @cute.jit
    def rest(self, begin, n_block, place, k_state, v_state):
        """Load blocks down to `begin`, all but V of the last one."""
        while n_block > begin:
            n_block -= 1
            following = self.find(n_block)
            k_state = self.load_k(following if self.is_ahead else place, k_state)
            v_state = self.load_v(place, v_state)
            place = following
        return place, k_state, v_state

    @cute.jit
    def last(self, place, k_state, v_state):
        """Load what is left of the last block."""
        if cutlass.const_expr(not self.is_ahead):
            k_state = self.load_k(place, k_state)
        return k_state, self.load_v(place, v_state)
