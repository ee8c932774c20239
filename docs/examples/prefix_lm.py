"""Prefix language model: all queries see the first keys of a sequence; the others are causal."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

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
    """Attend to sequences of 1000 tokens whose prefixes have 300 and 50, and compare with torch."""
    q, k, v = torch.randn(3, 2, 1000, 4, 64, dtype=torch.bfloat16, device=device)
    length = torch.tensor([300, 50], dtype=torch.int32, device=device)

    def attend() -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, mask=PrefixLM(length))

    out = attend()
    key = torch.arange(1000, device=device)
    seen = (key < length[:, None, None, None]) | (key <= key[:, None])
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, attn_mask=seen)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)
    seconds = Timer("attend()", globals={"attend": attend}).timeit(3).median
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(f"Checked: torch agrees, with the mask as a matrix. {1e6 * seconds:,.0f} us on {where}.")
    return out


if __name__ == "__main__":
    example("cuda" if torch.cuda.is_available() else "cpu")
