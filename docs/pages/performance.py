"""Writes docs/performance.md from the committed records of benchmarks.

    python -m docs.pages.performance

The grid beside its peers, few tiles, and decoding, each from one run. What the figures mean, and
those of schedules, scores and the cost model, stand in docs/benchmarks.md.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import bench_decode
from benchmarks.report import Standing, is_peer, providers_of, standing
from benchmarks.results import CSV_NAME, OK, Row, read
from benchmarks.shapes import size
from docs.pages.support import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RECORDS = ROOT / "benchmarks" / "results"

GRID, FEW, DECODE = (f"h200-2026-11-21-{name}" for name in ("planned", "planned-few", "decode"))

NAMES = {
    "fa3": "fa3",
    "fa3-cpp": "FlashAttention-3 C++",
    "fa4-cute": "FlashAttention-4 CuTe",
    "cudnn": "cuDNN",
}

TITLE = """# Performance

Written by `python -m docs.pages.performance` from the records in `benchmarks/results`; a test says
when it is stale. A ratio is the speed over the other's, taken inside each round; the median over
the rounds. How it was measured is in [benchmarks/README.md](../benchmarks/README.md), all other
figures in [benchmarks.md](benchmarks.md).
"""


def origin(record: str, name: str) -> str:
    """Where and with what a record was measured."""
    said = json.loads((RECORDS / record / "environment.json").read_text())
    packages, cudnn = said["packages"], int(said["cudnn"])
    return (
        f"{said['gpu']}, driver {said['driver'].split('.')[0]}, torch {said['torch']}, CuTe DSL "
        f"{packages['nvidia-cutlass-dsl']}; fa3-fwd {packages['fa3-fwd']}, flash-attn-4 "
        f"{packages['flash-attn-4']}, cuDNN {cudnn // 10_000}.{cudnn // 100 % 100}; "
        f"{said['date'][:10]} "
        f"([record](../benchmarks/results/{record}/{name})).\n"
    )


def rows_of(record: str) -> list[Row]:
    """The rows of a record with ordinary data."""
    return [row for row in read(RECORDS / record / CSV_NAME) if row.data == "normal"]


def shown(providers: Sequence[str]) -> list[str]:
    return [NAMES[name] for name in providers]


def grid_lines(rows: Sequence[Row], providers: Sequence[str]) -> Iterator[list[str]]:
    """TFLOP/s of every cell, the fastest in bold."""
    cells = dict.fromkeys(row.cell for row in rows)
    for cell in cells:
        found = {row.provider: row for row in rows if row.cell == cell and row.status == OK}
        best = max(row.tflops for row in found.values())
        ours = found["fa3"]
        rates = []
        for name in providers:
            row = found.get(name)
            rate = f"{row.tflops:.0f}" if row else "-"
            rates.append(f"**{rate}**" if row and row.tflops == best else rate)
        mask = "causal" if ours.causal else "none"
        yield [str(ours.head_dim), mask, size(ours.seqlen_q), *rates, f"{ours.vs_best_peer:.3f}"]


def standing_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """How fa3 stands against its peers, by head size and mask."""
    ours = [row for row in rows if row.provider == "fa3"]
    for head_dim in sorted({row.head_dim for row in ours}):
        for causal in (False, True):
            chosen = [row for row in ours if (row.head_dim, row.causal) == (head_dim, causal)]
            summed: Standing = standing(chosen)
            yield [
                str(head_dim),
                "causal" if causal else "none",
                f"{summed.vs_fa3_cpp:.3f}",
                f"{summed.vs_best_peer:.3f}",
                f"{summed.wins}-{summed.ties}-{summed.losses}",
            ]


def time_text(us: float) -> str:
    """A time with a unit that fits."""
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def few_lines(rows: Sequence[Row], providers: Sequence[str]) -> Iterator[list[str]]:
    """Times of every cell."""
    for cell in dict.fromkeys(row.cell for row in rows):
        found = {row.provider: row for row in rows if row.cell == cell and row.status == OK}
        ours = found.get("fa3")
        if ours is None:
            continue
        sizes = f"{ours.batch} x {size(ours.seqlen_q)} on {size(ours.seqlen_k)}"
        heads = f"{ours.heads_q}/{ours.heads_kv} of {ours.head_dim}"
        if ours.head_dim_v != ours.head_dim:
            heads += f", {ours.head_dim_v}"
        times = [time_text(found[name].us) if name in found else "-" for name in providers]
        ratio = f"{ours.vs_best_peer:.2f}" if ours.vs_best_peer else "-"
        yield [sizes, heads, mask_text(ours), *times, ratio]


def mask_text(row: Row) -> str:
    """The mask of a cell, in words."""
    if row.window_left >= 0:
        return f"window {row.window_left}"
    return "causal" if row.causal else "none"


def page() -> str:
    """The page as it should be."""
    grid = [row for row in rows_of(GRID) if (row.group, row.regime) == ("grid", "steady")]
    few = [row for row in rows_of(FEW) if row.regime == "burst"]
    decode = read(RECORDS / DECODE / "decode.csv", bench_decode.DecodeRow)
    providers = [name for name in providers_of(grid) if is_peer(name) or name == "fa3"]
    head = ("head size", "mask")
    over = "over the best peer"
    return "\n".join(
        (
            TITLE,
            "## Forward, steady load\n",
            "TFLOP/s, bf16, 16,384 tokens in all, hidden size 2048.",
            origin(GRID, CSV_NAME),
            table((*head, "length", *shown(providers), over), grid_lines(grid, providers)),
            "Geometric means over the lengths, and cells won, tied (within 1.5%) and lost:\n",
            table((*head, "over FlashAttention-3 C++", over, "result"), standing_lines(grid)),
            "## Few or unequal tiles, bursts\n",
            origin(FEW, CSV_NAME),
            table(
                ("batch x queries on keys", "heads q/kv", "mask", *shown(providers), over),
                few_lines(few, providers),
            ),
            "## Decoding, bursts\n",
            "Microseconds and GB/s of keys and values read.",
            origin(DECODE, "decode.csv"),
            bench_decode.markdown([row for row in decode if row.regime == "burst"]) + "\n",
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
