"""Prefill: attention over whole prompts, with a Llama 3 8B layer's heads."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import fa3


def example(device: str = "cpu", batch: int = 1, seqlen: int = 1000) -> torch.Tensor:
    """Attend causally with 32 query heads to 8 key/value heads, and compare with torch."""
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(batch, seqlen, 32, 128, **options)
    k, v = torch.randn(2, batch, seqlen, 8, 128, **options)
    # The log-sum-exps are (batch, heads_q, seqlen), for instance to merge with other keys.
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert lse.shape == (batch, 32, seqlen)

    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)

    def attend() -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, causal=True)

    seconds = Timer("attend()", globals={"attend": attend}).timeit(3).median
    flops = 2 * 2 * batch * 32 * 128 * seqlen * (seqlen + 1) / 2
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(
        f"Checked: torch gives the same for {batch} x {seqlen} tokens. "
        f"{1e6 * seconds:,.0f} us, {flops / seconds / 1e12:.3g} TFLOP/s on {where}."
    )
    return out


if __name__ == "__main__":
    if torch.cuda.is_available():
        example("cuda", seqlen=8192)
    else:
        example()
