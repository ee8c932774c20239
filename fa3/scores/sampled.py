"""`Sampled`: what a user's score or mask gives at chosen positions, compiled for the host.

`fa3.tools.function_check` compares this with the method's torch half, without a GPU.
"""

from dataclasses import dataclass, field

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa3.primitives.coords import Position
from fa3.problem import AttentionSpec
from fa3.scores.scores import bind


@dataclass(frozen=True)
class Sampled:
    """A host function that calls the user's method at every position."""

    spec: AttentionSpec  # has the user's score or else the user's mask, and no other
    # the arguments of a call, with tensors of the host.
    given: tuple = field(compare=False, repr=False)

    entry_name = "sampled"
    is_storable = False

    def arguments(self) -> list:
        return list(self.given)

    @cute.jit
    def __call__(
        self,
        tensors: tuple | None,
        places: cute.Tensor,
        seqlen_q: Int32,
        seqlen_k: Int32,
        logits: cute.Tensor,
        found: cute.Tensor,
    ):
        """Write what the method returns.

        Args:
            tensors: of the score or the mask.
            places: (4, n), int32: batch, head, query and key.
            logits: (n,), float32; a mask reads none.
            found: (n,), float32: new logits, or 1 where a mask lets the key through, else 0.
        """
        scores, mask, _ = bind(self.spec, tensors)
        for i in cutlass.range(cute.size(found)):
            at = Position(
                places[0, i], places[1, i], places[2, i], places[3, i], seqlen_q, seqlen_k
            )
            if cutlass.const_expr(len(scores) > 0):
                found[i] = Float32(scores[0].score(logits[i], at))
            else:
                found[i] = Float32(1.0) if Boolean(mask.function.visible(at)) else Float32(0.0)
