"""Prefill: attention over whole prompts, with a Llama 3 8B layer's heads."""

import torch

import fa3


def example(device: str = "cpu", batch: int = 1, seqlen: int = 1000) -> torch.Tensor:
    """Attend causally with 32 query heads to 8 key/value heads of 128 columns."""
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(batch, seqlen, 32, 128, **options)
    k, v = torch.randn(2, batch, seqlen, 8, 128, **options)
    # The log-sum-exps are (batch, heads_q, seqlen), for instance to merge with other keys.
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert lse.shape == (batch, 32, seqlen)
    return out


if __name__ == "__main__":
    print(example("cuda", seqlen=8192) if torch.cuda.is_available() else example())
