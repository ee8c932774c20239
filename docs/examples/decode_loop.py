"""Decoding: one token after another against a paged cache, on a GPU by one captured graph."""

import time
from dataclasses import dataclass

import torch

import fa3

HEADS_Q, HEADS_KV, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16


@dataclass
class Cache:
    """The keys and values of a batch, in pages.

    Fields:
        k, v: (pages, PAGE_SIZE, HEADS_KV, HEAD_DIM).
        page_table: (batch, pages of a sequence), int32.
        lengths: (batch,), int32, tokens in the cache.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def empty(cls, batch: int, capacity: int, device: str) -> "Cache":
        pages = -(-capacity // PAGE_SIZE)
        shape = batch * pages, PAGE_SIZE, HEADS_KV, HEAD_DIM
        k, v = torch.zeros(2, *shape, dtype=torch.bfloat16, device=device)
        numbers = torch.arange(batch * pages, dtype=torch.int32, device=device)
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        return cls(k, v, numbers.view(batch, pages), lengths)

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append one token and attend to all tokens; the caller counts it in `lengths`."""
        return fa3.flash_attn_with_kvcache(
            q,
            self.k,
            self.v,
            k,
            v,
            cache_seqlens=self.lengths,
            page_table=self.page_table,
            causal=True,
        )


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache
) -> tuple[list[torch.Tensor], float]:
    """Decode the tokens of q, k and v (tokens, batch, 1, heads, HEAD_DIM) one by one.

    Each step reads its lengths on the GPU, so one graph, captured once, serves them all.

    Returns:
        the outputs, and seconds for all steps, without compiling and capturing.
    """
    if not q.is_cuda:
        outs, begin = [], time.perf_counter()
        for token in zip(q, k, v, strict=True):
            outs.append(cache.step(*token))
            cache.lengths += 1
        return outs, time.perf_counter() - begin
    inputs = q[0].clone(), k[0].clone(), v[0].clone()
    cache.step(*inputs)  # compiles; what it appends is written again below
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.step(*inputs)
    torch.cuda.synchronize()
    outs, begin = [], time.perf_counter()
    for token in zip(q, k, v, strict=True):
        for into, given in zip(inputs, token, strict=True):
            into.copy_(given)
        graph.replay()
        cache.lengths += 1
        outs.append(out.clone())
    torch.cuda.synchronize()
    return outs, time.perf_counter() - begin


def example(device: str = "cpu", tokens: int = 40, batch: int = 3) -> torch.Tensor:
    """Decode tokens, and compare with one causal call; (batch, tokens, HEADS_Q, HEAD_DIM)."""
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(batch, tokens, HEADS_Q, HEAD_DIM, **options)
    k, v = torch.randn(2, batch, tokens, HEADS_KV, HEAD_DIM, **options)
    by_token = (t.transpose(0, 1).unsqueeze(2) for t in (q, k, v))
    outs, seconds = decode(*by_token, Cache.empty(batch, tokens, device))
    out = torch.cat(outs, dim=1)
    torch.testing.assert_close(out, fa3.flash_attn_func(q, k, v, causal=True), rtol=2e-2, atol=2e-2)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(
        f"Checked: {tokens} steps for {batch} sequences give what one causal call gives. "
        f"{1e6 * seconds / tokens:,.0f} us per step on {where}."
    )
    return out


if __name__ == "__main__":
    example("cuda" if torch.cuda.is_available() else "cpu")
