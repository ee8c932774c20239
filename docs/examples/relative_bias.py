"""Relative-position bias: a learned number for each head and distance is added to the scores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import fa3


@dataclass(frozen=True)
class RelativeBias(fa3.Score):
    """table[head, distance + reach], with larger distances clipped to the reach.

    Fields:
        table: (heads_q, 2 * reach + 1), float32.
        reach: the largest distance with a number of its own.
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
    """Attend with a bias for 128 distances on either side, and compare with torch."""
    q, k, v = torch.randn(3, 1, 1000, 4, 64, dtype=torch.bfloat16, device=device)
    table = torch.randn(4, 2 * 128 + 1, device=device)

    def attend() -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, score=RelativeBias(table, reach=128))

    out = attend()
    key = torch.arange(1000, device=device)
    bias = table[:, (key - key[:, None]).clamp(-128, 128) + 128].bfloat16()
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, attn_mask=bias)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)
    seconds = Timer("attend()", globals={"attend": attend}).timeit(3).median
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(f"Checked: torch agrees, with the bias as a matrix. {1e6 * seconds:,.0f} us on {where}.")
    return out


if __name__ == "__main__":
    example("cuda" if torch.cuda.is_available() else "cpu")
