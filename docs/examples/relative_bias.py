"""Relative-position bias: a learned number for each head and distance is added to the scores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch

import fa3


@dataclass(frozen=True)
class RelativeBias(fa3.Score):
    """table[head, distance + reach], with distances beyond the reach clipped to it.

    Fields:
        table: (heads_q, 2 * reach + 1), float32.
        reach: the largest distance of a key from a query's own position that is told apart.
    """

    table: torch.Tensor
    reach: int

    @cute.jit
    def score(self, logit, at: fa3.Position):
        distance = at.key - (at.query + at.seqlen_k - at.seqlen_q)
        clipped = cutlass.max(cutlass.min(distance, self.reach), -self.reach)
        return logit + self.table[at.head, clipped + self.reach]

    def reference(self, logits, at):
        distance = at.key - (at.query + at.seqlen_k - at.seqlen_q)
        return logits + self.table[at.head, distance.clamp(-self.reach, self.reach) + self.reach]


def example(device: str = "cpu") -> torch.Tensor:
    """Attend with a bias that tells 128 distances to either side apart."""
    q, k, v = torch.randn(3, 1, 1000, 4, 64, dtype=torch.bfloat16, device=device)
    table = torch.randn(4, 2 * 128 + 1, device=device)
    return fa3.flash_attn_func(q, k, v, score=RelativeBias(table, reach=128))


if __name__ == "__main__":
    print(example("cuda" if torch.cuda.is_available() else "cpu"))
