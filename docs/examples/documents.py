"""Documents packed into one sequence: a query sees the keys of its own document only."""

from dataclasses import dataclass

import cutlass.cute as cute
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import fa3


@dataclass(frozen=True)
class Documents(fa3.Mask):
    """A query sees the keys that have its own id.

    Fields:
        of_query: (batch, seqlen_q), int32: ids.
        of_key: (batch, seqlen_k), int32: ids.
    """

    of_query: torch.Tensor
    of_key: torch.Tensor

    @cute.jit
    def visible(self, at: fa3.Position):
        return self.of_query[at.batch, at.query] == self.of_key[at.batch, at.key]

    def reference(self, at):
        return self.of_query[at.batch, at.query] == self.of_key[at.batch, at.key]


def example(device: str = "cpu") -> torch.Tensor:
    """Attend causally inside of documents of 200, 500 and 300 tokens, and compare with torch."""
    q, k, v = torch.randn(3, 1, 1000, 4, 64, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor([200, 500, 300], device=device)
    ids = torch.arange(3, dtype=torch.int32, device=device).repeat_interleave(lengths)[None]

    def attend() -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, causal=True, mask=Documents(ids, ids))

    out = attend()
    seen = (ids[0] == ids[0, :, None]).tril()
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, attn_mask=seen)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)
    seconds = Timer("attend()", globals={"attend": attend}).timeit(3).median
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(f"Checked: torch agrees, with the mask as a matrix. {1e6 * seconds:,.0f} us on {where}.")
    return out


if __name__ == "__main__":
    example("cuda" if torch.cuda.is_available() else "cpu")
