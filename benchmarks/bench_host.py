"""What calls cost the host: `python -m benchmarks.bench_host`.

Each kind of call is queued in blocks, and the time that its thread ran is counted: neither waiting
nor other processes show in it. Problems are so small that the GPU keeps up. Kernels are compiled
before, in processes side by side.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

import fa3
from benchmarks import runs
from benchmarks.bench_first_call import about

BATCH, KEYS, HEADS, HEADS_KV, HEAD_DIM = 2, 256, 4, 2, 64
"""Sequences, their keys, heads and columns of all calls."""

CALLS_OF_BLOCK = 50
"""Calls that are queued without waiting."""

FILE_NAME = "host-calls.json"

Times = Mapping[str, Sequence[float]]
"""By the kind of call, the microseconds of a call in every block."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_host",
        description="Measure what calls cost the host, in time of their thread.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=200, help="timed blocks of each kind")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {FILE_NAME} there")
    return parser.parse_args(arguments)


def calls_on(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """A call of each kind, by name."""

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def integers(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    q, k, v = draw(BATCH, 1, HEADS), *(draw(BATCH, KEYS, HEADS_KV) for _ in "kv")
    rows = {"k": draw(BATCH, 1, HEADS_KV), "v": draw(BATCH, 1, HEADS_KV)}
    tables = {name: draw(KEYS)[:, : HEAD_DIM // 2] for name in ("rotary_cos", "rotary_sin")}
    lengths = integers(*[KEYS - 1] * BATCH)
    cached = partial(fa3.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True)
    sizes = (BATCH, 1, KEYS, HEADS, HEADS_KV, HEAD_DIM)
    cache_metadata = fa3.get_scheduler_metadata(*sizes, lengths.cpu(), causal=True)

    ends, ends_k = integers(*range(BATCH + 1)), integers(*range(0, BATCH * KEYS + 1, KEYS))
    packed = q[:, 0]
    varlen = partial(
        fa3.flash_attn_varlen_func, packed, k.flatten(0, 1), v.flatten(0, 1), ends, ends_k, 1, KEYS,
        causal=True,
    )  # fmt: skip
    others = itertools.cycle([
        partial(
            fa3.flash_attn_varlen_func, packed, *(x[:, :keys].flatten(0, 1) for x in (k, v)), ends,
            integers(*range(0, BATCH * keys + 1, keys)), 1, keys, causal=True,
        )
        for keys in range(KEYS // 2, KEYS)
    ])  # fmt: skip
    packed_metadata = fa3.get_scheduler_metadata(
        *sizes, None, cu_seqlens_q=ends.cpu(), cu_seqlens_k=ends_k.cpu(), causal=True
    )
    on_cache = partial(
        fa3.flash_attn_with_kvcache, packed, k, v, cache_seqlens=lengths, cu_seqlens_q=ends,
        max_seqlen_q=1, causal=True,
    )  # fmt: skip
    mixed_metadata = fa3.get_scheduler_metadata(
        *sizes, lengths.cpu(), cu_seqlens_q=ends.cpu(), causal=True
    )
    return {
        "dense": partial(fa3.flash_attn_func, draw(BATCH, KEYS, HEADS), k, v, causal=True),
        "cache": cached,
        "cache, metadata": partial(cached, scheduler_metadata=cache_metadata),
        "cache, appending": partial(cached, **rows),
        "cache, appending, rotary": partial(cached, **rows, **tables),
        "packed": varlen,
        "packed, other lengths": lambda: next(others)(),
        "packed, metadata": partial(varlen, scheduler_metadata=packed_metadata),
        "packed on a cache": on_cache,
        "packed on a cache, metadata": partial(on_cache, scheduler_metadata=mixed_metadata),
    }


def call_once(name: str) -> str:
    """Make a call, which compiles its kernels; return what went wrong, if anything."""
    try:
        calls_on("cuda")[name]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name}: {runs.first_line(error)}"
    return ""


def measure(calls: Mapping[str, Callable[[], object]], blocks: int) -> dict[str, list[float]]:
    """Microseconds of the thread for a call in every block; the kinds of calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(blocks):
            for name, call in calls.items():
                call()
                torch.cuda.synchronize()
                begin = time.thread_time()
                for _ in range(CALLS_OF_BLOCK):
                    call()
                times[name].append((time.thread_time() - begin) * 1e6 / CALLS_OF_BLOCK)
    finally:
        gc.enable()
    return times


def table_of(times: Times) -> Table:
    """A row for each kind of call."""
    table = Table(title="Microseconds of the host's thread for a call", title_justify="left")
    table.add_column("call")
    for column in ("median", "fastest block"):
        table.add_column(column, justify="right")
    for name, us in times.items():
        table.add_row(name, f"{statistics.median(us):.1f}", f"{min(us):.1f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    runs.need_gpu()
    console = runs.make_console()
    torch.set_grad_enabled(False)
    calls = calls_on("cuda")
    for error in filter(None, runs.in_processes(call_once, list(calls))):
        console.print(error, markup=False)
    times = measure(calls, options.blocks)
    console.print(table_of(times))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        runs.write_json(options.out / FILE_NAME, {"environment": about(), "microseconds": times})


if __name__ == "__main__":
    main()
