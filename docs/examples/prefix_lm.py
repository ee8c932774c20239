"""Prefix language model: the first keys of a sequence are for all queries, the others causal."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch

import fa3


@dataclass(frozen=True)
class PrefixLM(fa3.Mask):
    """A query sees the prefix, and the keys up to its own position.

    Fields:
        length: (batch,), int32: keys of the prefix.
    """

    length: torch.Tensor

    @cute.jit
    def visible(self, at: fa3.Position):
        own = at.query + at.seqlen_k - at.seqlen_q
        return at.key < self.length[at.batch] or at.key <= own

    def reference(self, at):
        own = at.query + at.seqlen_k - at.seqlen_q
        return (at.key < self.length[at.batch]) | (at.key <= own)

    def key_range(self, rows):
        own = rows.last + rows.seqlen_k - rows.seqlen_q
        return 0, cutlass.max(self.length[rows.batch], own + 1)

    def open_range(self, rows):
        own = rows.first + rows.seqlen_k - rows.seqlen_q
        return 0, cutlass.max(self.length[rows.batch], own + 1)


def example(device: str = "cpu") -> torch.Tensor:
    """Attend to sequences of 1000 tokens whose first 300 and 50 are given."""
    q, k, v = torch.randn(3, 2, 1000, 4, 64, dtype=torch.bfloat16, device=device)
    length = torch.tensor([300, 50], dtype=torch.int32, device=device)
    return fa3.flash_attn_func(q, k, v, mask=PrefixLM(length))


if __name__ == "__main__":
    print(example("cuda" if torch.cuda.is_available() else "cpu"))
