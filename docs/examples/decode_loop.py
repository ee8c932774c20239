"""Decoding: one token after another against a paged cache, on a GPU by one captured graph."""

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
        """Append one token and attend to all; the caller counts it in `lengths`."""
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
) -> tuple[torch.Tensor, ...]:
    """Decode the tokens of q, k and v (tokens, batch, 1, heads, HEAD_DIM) one by one.

    Each step reads its lengths on the GPU, so one graph, captured once, serves them all.
    """
    if not q.is_cuda:
        outs = []
        for token in zip(q, k, v, strict=True):
            outs.append(cache.step(*token))
            cache.lengths += 1
        return tuple(outs)
    inputs = q[0].clone(), k[0].clone(), v[0].clone()
    cache.step(*inputs)  # compiles; what it appends is written again below
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.step(*inputs)
    outs = []
    for token in zip(q, k, v, strict=True):
        for into, given in zip(inputs, token, strict=True):
            into.copy_(given)
        graph.replay()
        cache.lengths += 1
        outs.append(out.clone())
    return tuple(outs)


def example(device: str = "cpu", tokens: int = 40, batch: int = 3) -> torch.Tensor:
    """Decode some tokens; the results as (batch, tokens, HEADS_Q, HEAD_DIM).

    The same comes out as of one causal call with all tokens, but for rounding.
    """
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(batch, tokens, HEADS_Q, HEAD_DIM, **options)
    k, v = torch.randn(2, batch, tokens, HEADS_KV, HEAD_DIM, **options)
    by_token = (t.transpose(0, 1).unsqueeze(2) for t in (q, k, v))
    out = torch.cat(decode(*by_token, Cache.empty(batch, tokens, device)), dim=1)
    torch.testing.assert_close(out, fa3.flash_attn_func(q, k, v, causal=True), rtol=2e-2, atol=2e-2)
    return out


if __name__ == "__main__":
    print(example("cuda" if torch.cuda.is_available() else "cpu"))
