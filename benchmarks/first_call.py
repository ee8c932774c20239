"""A new process that makes one call, and says how long everything up to it took.

`benchmarks.bench_first_call` starts it: `python -m benchmarks.first_call dense` prints a line of
JSON, the milliseconds of each step in their order. Until the clock runs, nothing but the standard
library is imported.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
"""Those of Llama-3-8B."""

SEQLEN, BATCH, PAGE_SIZE = 1024, 4, 64
"""Tokens of a sequence, sequences, and tokens of a page: small, since it is not the GPU that is
measured, and yet prompts are long enough for a fixed row max, which takes a second kernel."""

FIRST, DONE, SECOND = "first call", "until the GPU is done", "second call"
"""Steps of which the first is from the call to its return, when all kernels are launched."""

Call = Callable[[], object]


class Steps:
    """The milliseconds of steps, by name."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        begin = time.perf_counter()
        yield
        self.found[name] = 1e3 * (time.perf_counter() - begin)


def dense(torch, fa3, device: str, seqlen: int) -> Call:
    """A prompt of each sequence, all of one length."""
    q, k, v = (
        torch.randn(BATCH, seqlen, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    return lambda: fa3.flash_attn_func(q, k, v, causal=True)


def packed(torch, fa3, device: str, seqlen: int) -> Call:
    """The same prompts, packed."""
    q, k, v = (
        torch.randn(BATCH * seqlen, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    ends = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * seqlen
    return lambda: fa3.flash_attn_varlen_func(q, k, v, ends, ends, seqlen, seqlen, causal=True)


def pages_of(torch, device: str, seqlen: int) -> tuple:
    """Keys and values in pages, and the pages of each sequence."""
    pages = BATCH * seqlen // PAGE_SIZE
    caches = (
        torch.randn(pages, PAGE_SIZE, HEADS_KV, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for _ in "kv"
    )
    table = torch.arange(pages, dtype=torch.int32, device=device).view(BATCH, -1)
    return *caches, table


def cache(torch, fa3, device: str, seqlen: int) -> Call:
    """A token of each sequence: appended to pages with its embedding, then attention."""
    k_cache, v_cache, table = pages_of(torch, device, seqlen)
    q, k, v = (
        torch.randn(BATCH, 1, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    cos, sin = (
        torch.ones(seqlen, HEAD_DIM // 2, dtype=torch.bfloat16, device=device) for _ in "cs"
    )
    lengths = torch.full((BATCH,), seqlen // 2, dtype=torch.int32, device=device)
    return lambda: fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        page_table=table, causal=True, rotary_interleaved=False,
    )  # fmt: skip


def paged(torch, fa3, device: str, seqlen: int) -> Call:
    """A step of vLLM: a token of each sequence, packed, on pages."""
    k_cache, v_cache, table = pages_of(torch, device, seqlen)
    q = torch.randn(BATCH, HEADS_Q, HEAD_DIM, dtype=torch.bfloat16, device=device)
    ends = torch.arange(BATCH + 1, dtype=torch.int32, device=device)
    lengths = torch.full((BATCH,), seqlen // 2, dtype=torch.int32, device=device)
    return lambda: fa3.flash_attn_varlen_func(
        q, k_cache, v_cache, ends, None, 1, seqlen, seqused_k=lengths, causal=True, page_table=table
    )


CALLS = {"dense": dense, "packed": packed, "cache": cache, "paged": paged}
"""What is called first, by the names of `fa3.tools.models.CALLS`."""


def refuse_to_compile(*given):
    raise RuntimeError("a kernel is not on disk: run the call once before it is timed")


def run(call: str, device: str, seqlen: int, is_compiled: bool) -> dict[str, float]:
    """Import everything, make the call twice, and give the milliseconds of the steps.

    Args:
        device: "cuda", or "cpu" to try this program out.
        is_compiled: whether a kernel that is not on disk is an error.
    """
    steps = Steps()
    with steps.step("import torch"):
        import torch
    with steps.step("first tensor"):
        torch.ones(1, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else int
    with steps.step("import cutlass"):
        import cutlass
        import cutlass.cute  # noqa: F401
    with steps.step("import fa3"):
        import fa3

        _ = fa3.flash_attn_func, fa3.flash_attn_varlen_func, fa3.flash_attn_with_kvcache
    if is_compiled:
        from fa3.running import compiler

        compiler.compiled = refuse_to_compile
    attend = CALLS[call](torch, fa3, device, seqlen)
    wait()
    with steps.step(DONE):
        with steps.step(FIRST):
            attend()
        wait()
    with steps.step(SECOND):
        attend()
    wait()
    return steps.found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call")
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    parser.add_argument("--compiled", action="store_true", help="refuse to compile a kernel")
    options = parser.parse_args()
    print(json.dumps(run(options.call, options.device, options.seqlen, options.compiled)))


if __name__ == "__main__":
    main()
