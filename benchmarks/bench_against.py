"""This tree beside another checkout of it, in one process: what a change costs or gains.

    git worktree add ../before 03c846c
    python -m benchmarks.bench_against ../before                  # grid, both regimes
    python -m benchmarks.bench_against ../before --head-dims 128 --seqlens 1024 4096
    python -m benchmarks.bench_against ../before --parts host failing

Ratios are time before over time now, taken inside a round; above 1 is faster now.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

import fa3
from benchmarks.shapes import HIDDEN, TOKENS
from benchmarks.timing import REGIMES, Regime
from fa3.problem import REMEMBERED

PARTS = ("host", "grid", "failing", "decode", "few")
LEAST_BLOCK_MS = 20
"""Work of a block in bursts: shorter than for records, since only ratios count."""

HOST_CALLS = 100
"""Calls that are queued while the host is timed."""

CACHE_SETS_BYTES = 240 << 20
"""Caches that decoding rotates through: four times the L2 of an H200."""

GRAPHS = 4
"""Graphs that are captured of every row of decoding and of few tiles."""

DECODING = (
    (1, 8192, 32, 8),
    (16, 8192, 32, 8),
    (64, 8192, 32, 8),
    (5, 3000, 28, 4),
    (48, 4096, 64, 8),
    (128, 2048, 8, 1),
)
FEW_TILES = ((1, 1024, 8, 1), (1, 2048, 8, 1), (1, 1024, 32, 8), (1, 2048, 32, 8), (2, 577, 16, 16))
"""Rows of (batch, keys, query heads, key/value heads) with heads of 128."""

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def one_set_of_operators() -> Iterator[None]:
    """Let torch keep this tree's operators: another one has some of the same names."""
    importlib.import_module("fa3.calls.operators")

    def register(*arguments, **options) -> Callable:
        return lambda function: function

    names = "define", "impl", "register_fake", "register_autograd"
    with mock.patch.multiple(torch.library, **dict.fromkeys(names, register)):
        yield


def load_tree(path: Path) -> ModuleType:
    """Import the fa3 of another checkout beside this one's."""
    with one_set_of_operators():
        return load_without_operators(path)


def load_without_operators(path: Path) -> ModuleType:
    """`load_tree` where operators are not registered."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "fa3"}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(path.resolve()))
    try:
        theirs = importlib.import_module("fa3")
        if not Path(theirs.__file__).is_relative_to(path.resolve()):
            raise FileNotFoundError(f"{path} is no checkout of fa3: found {theirs.__file__}")
        # Names are imported when they are asked for: now, while its modules are the ones found.
        for name in theirs.__all__:
            getattr(theirs, name)
        return theirs
    finally:
        sys.path.remove(str(path.resolve()))
        for name in [name for name in sys.modules if name.split(".")[0] == "fa3"]:
            del sys.modules[name]
        sys.modules.update(ours)


def draw(
    batch: int, seqlen: int, heads: int, head_dim: int, heads_kv: int | None = None
) -> Operands:
    """Draw q, k and v from the normal distribution."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads_kv = heads_kv or heads
    q, k, v = (
        torch.randn(
            (batch, seqlen, count, head_dim),
            dtype=torch.bfloat16, device="cuda", generator=generator,
        )
        for count in (heads, heads_kv, heads_kv)
    )  # fmt: skip
    return q, k, v


def block_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of a call in a block of them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / calls


def compare(
    calls: dict[str, Callable[[], object]], regime: Regime, rounds: int
) -> dict[str, list[float]]:
    """Microseconds of each call in each round, in random order inside a round."""
    for call in calls.values():
        call(), call()
    torch.cuda.synchronize()
    draw_order, times = random.Random(0), {name: [] for name in calls}
    length = regime.block_ms if regime.load_s else LEAST_BLOCK_MS
    count = max(3, round(length * 1000 / block_us(next(iter(calls.values())), 3)))
    deadline = time.monotonic() + regime.load_s
    while time.monotonic() < deadline:
        block_us(next(iter(calls.values())), count)
    for _ in range(rounds):
        for name in draw_order.sample(list(calls), len(calls)):
            if regime.idle_s:
                torch.cuda.synchronize()
                time.sleep(regime.idle_s / 10)
            times[name].append(block_us(calls[name], count))
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the ratios of two calls inside a round."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def measure_grid(before: ModuleType, options: argparse.Namespace) -> list[dict]:
    """Every cell of the grid, in both regimes."""
    rows = []
    for regime in map(REGIMES.get, options.regimes):
        for head_dim in options.head_dims:
            for causal in (False, True):
                for seqlen in options.seqlens:
                    q, k, v = draw(max(1, TOKENS // seqlen), seqlen, HIDDEN // head_dim, head_dim)
                    calls = {
                        name: partial(tree.flash_attn_func, q, k, v, causal=causal)
                        for name, tree in (("now", fa3), ("before", before))
                    }
                    times = compare(calls, regime, options.rounds)
                    rows.append(
                        {
                            "regime": regime.name,
                            "head_dim": head_dim,
                            "causal": causal,
                            "seqlen": seqlen,
                            "us": statistics.median(times["now"]),
                            "ratio": ratio(times, "before", "now"),
                        }
                    )
                ratios = " ".join(f"{row['ratio']:.3f}" for row in rows[-len(options.seqlens) :])
                mask = "causal" if causal else "full"
                print(f"{regime.name} d{head_dim} {mask}: {ratios}", flush=True)
        ratios = [row["ratio"] for row in rows if row["regime"] == regime.name]
        print(f"{regime.name}: {statistics.geometric_mean(ratios):.4f}, worst {min(ratios):.3f}")
    return rows


def failing_data(q: torch.Tensor, k: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys whose scores leave what a fixed row max serves, everywhere."""
    head_dim = q.shape[-1]
    channels, sink_keys, first_keys = k.clone(), k.clone(), k * 0.1
    channels[..., :4] *= 20
    sink_keys[:, :4] += 50 / (0.8 * head_dim**0.5)
    first_keys[:, :40] += 300 / (1.8 * head_dim**0.5)
    return {
        "logits x32": (q * 32, k),
        "outlier channels x20": (torch.cat((q[..., :4] * 20, q[..., 4:]), dim=-1), channels),
        "sink keys +50": (q.abs(), sink_keys),
        "logits x64": (q * 64, k),
        "first keys +300": (q.abs() + 1, first_keys),
    }


def measure_failing(before: ModuleType, options: argparse.Namespace) -> list[dict]:
    """Data for which every fixed row max fails, over the same call on ordinary data."""
    rows = []
    for seqlen in (4096, 8448, 8576):
        q, k, v = draw(max(1, TOKENS // seqlen), seqlen, HIDDEN // 128, 128)
        for data, operands in failing_data(q, k).items():
            for regime in map(REGIMES.get, options.regimes):
                calls = {
                    "usual": partial(fa3.flash_attn_func, q, k, v, causal=True),
                    "now": partial(fa3.flash_attn_func, *operands, v, causal=True),
                    "before": partial(before.flash_attn_func, *operands, v, causal=True),
                }
                times = compare(calls, regime, max(3, options.rounds // 2))
                row = {"regime": regime.name, "data": data, "seqlen": seqlen}
                row |= {name: ratio(times, name, "usual") for name in ("now", "before")}
                rows.append(row)
                print(f"failing {row}", flush=True)
    return rows


def host_calls(tree: ModuleType) -> dict[str, Callable[[], object]]:
    """Calls whose kernels take next to no time, by name."""
    q, k, v = draw(1, 512, 2, 64)
    lengths = torch.full((1,), 511, dtype=torch.int32, device="cuda")
    tables = torch.ones((512, 32), dtype=torch.bfloat16, device="cuda")
    cached = partial(
        tree.flash_attn_with_kvcache, q[:, :1], k, v, cache_seqlens=lengths, causal=True
    )
    new = {"k": q[:, 1:2], "v": q[:, 2:3], "rotary_cos": tables, "rotary_sin": tables}
    # More totals than calls are remembered, so that each is as good as new.
    packed, _, _ = draw(1, 2 * REMEMBERED, 2, 64)
    totals = itertools.cycle([packed[0, :total] for total in range(1, packed.shape[1])])
    ends = torch.arange(2, dtype=torch.int32, device="cuda")

    def with_new_total() -> object:
        return tree.flash_attn_with_kvcache(
            next(totals), k, v, cache_seqlens=lengths, cu_seqlens_q=ends, max_seqlen_q=1
        )

    def packed_with_new_total() -> object:
        rows = next(totals)
        return tree.flash_attn_varlen_func(rows, rows, rows, ends, ends, 1, 1, causal=True)

    return {
        "flash_attn_func": partial(tree.flash_attn_func, q, k, v, causal=True),
        "flash_attn_with_kvcache": cached,
        "flash_attn_with_kvcache, appending": partial(cached, **new),
        "flash_attn_with_kvcache, packed, a new total": with_new_total,
        "flash_attn_varlen_func, a new total": packed_with_new_total,
    }


def measure_host(before: ModuleType) -> list[dict]:
    """Microseconds of the host for calls whose plans are known."""
    rows = []
    calls = {name: host_calls(tree) for name, tree in (("before", before), ("now", fa3))}
    for call_name in calls["now"]:
        trees = [name for name in calls if knows(calls[name][call_name])]
        for _ in range(3):
            for name in trees:
                call, best = calls[name][call_name], float("inf")
                for _ in range(30):
                    begin = time.perf_counter()
                    for _ in range(HOST_CALLS):
                        call()
                    best = min(best, (time.perf_counter() - begin) * 1e6 / HOST_CALLS)
                    torch.cuda.synchronize()
                rows.append({"call": call_name, "tree": name, "us": best})
                print(f"host {call_name} {name}: {best:.2f} us", flush=True)
    return rows


def knows(call: Callable[[], object]) -> bool:
    """Whether a call runs: an older tree may lack the function, or refuse its arguments."""
    try:
        call()
    except (AttributeError, TypeError, NotImplementedError) as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


def captured(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """One graph of all calls, so that the host costs nothing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def measure_captured(
    before: ModuleType, options: argparse.Namespace, part: str, rows: Sequence[tuple[int, ...]]
) -> list[dict]:
    """Rows of decoding or of few tiles, in graphs."""
    measured = []
    for batch, seqlen, heads, heads_kv in rows:
        sets = 20
        if part == "decode":
            sets = -(-CACHE_SETS_BYTES // (2 * 2 * batch * seqlen * heads_kv * 128))
        operands = [draw(batch, seqlen, heads, 128, heads_kv) for _ in range(sets)]
        lengths = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")

        def calls_of(tree: ModuleType, lengths=lengths, operands=operands) -> list[Callable]:
            if part == "decode":
                call = partial(tree.flash_attn_with_kvcache, cache_seqlens=lengths)
                return [partial(call, q[:, :1], k, v) for q, k, v in operands]
            return [partial(tree.flash_attn_func, *one, causal=True) for one in operands]

        for regime in map(REGIMES.get, options.regimes):
            times = {"now": [], "before": []}
            # Where a graph's outputs happen to lie costs or gains 1%: several graphs of each.
            for _ in range(GRAPHS):
                trees = {"now": fa3, "before": before}
                calls = {name: captured(calls_of(tree)) for name, tree in trees.items()}
                for name, found_times in compare(calls, regime, options.rounds).items():
                    times[name] += found_times
            row = {"regime": regime.name, "row": (batch, seqlen, heads, heads_kv)}
            row |= {"us": statistics.median(times["now"]) / sets}
            row |= {"ratio": ratio(times, "before", "now")}
            measured.append(row)
            print(f"{part} {row}", flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument(
        "--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    before, measured = load_tree(options.before), {}
    if "host" in options.parts:
        measured["host"] = measure_host(before)
    if "grid" in options.parts:
        measured["grid"] = measure_grid(before, options)
    if "failing" in options.parts:
        measured["failing"] = measure_failing(before, options)
    for part, rows in (("decode", DECODING), ("few", FEW_TILES)):
        if part in options.parts:
            measured[part] = measure_captured(before, options, part, rows)
    if options.output:
        options.output.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
