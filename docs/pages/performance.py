"""Writes docs/performance.md from the committed records of benchmarks.

    python -m docs.pages.performance

The forward grid, few tiles, decoding, packed sequences and gradients, compared with the peers. Each
cell has the figures of the newest record that has it. docs/benchmarks.md explains the figures, and
has the figures of schedules, scores and the cost model.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import bench_backward, bench_decode, bench_varlen, gradients
from benchmarks.caches import READ
from benchmarks.report import (
    Standing,
    best_peer_text,
    is_peer,
    providers_of,
    standing,
    time_text,
)
from benchmarks.results import CSV_NAME, OK, Row, read
from benchmarks.shapes import size
from docs.pages.support import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RECORDS = ROOT / "benchmarks" / "results"

GRID = (
    "h100-2026-11-28-forward256",
    "h200-2026-11-27-forward256",
    "h100-2026-11-27-grid",
    "h100-2026-11-27-peers",
)
FEW = ("h200-2026-11-23-begun", "h200-2026-11-21-planned-few")
DECODE = ("h200-2026-11-28-decode",)
PACKED = ("h100-2026-11-27-grid", "h200-2026-11-27-peers")
BACKWARD = (
    "h200-2026-11-28-heads",
    "h100-2026-11-28-heads",
    "h100-2026-11-27-grid",
    "h200-2026-11-27-peers",
    "h100-2026-11-25-regimes",
)
BACKWARD_STEADY = ("h200-2026-11-28-heads", "h100-2026-11-28-heads", "h100-2026-11-25-regimes")
"""Records, the newest first. Older records give the cells that newer records do not have."""

NAMES = {
    "fa3": "fa3",
    "fa3-cpp": "FlashAttention-3 C++",
    "fa4-cute": "FlashAttention-4 CuTe",
    "cudnn": "cuDNN",
}

TITLE = """# Performance

All measurements of fa3 and its peers. `python -m docs.pages.performance` writes this page from the
records in `benchmarks/results`, and a test fails if it is out of date.

- *Over the best peer* is the speed of fa3 over the speed of the fastest peer: above 1, fa3 is
  faster. The ratio is taken in each round; the table shows the median over the rounds. So it may
  differ from the quotient of two columns, and be above 1 where a peer's figure is in bold.
- After a ratio, brackets have its quartiles over the rounds, then comes the name of that peer.
  *Tie* means less than 1.5% from it.
- Each cell is from the newest record that has it. Older records were measured with older kernels.
  One record is left out: a repeat of three decoding cells (`decode-again.csv`), which
  [benchmarks.md](benchmarks.md#decoding) shows.
- On 2026-11-28 H200s ran decoding and fifteen gradients of few heads. H100s ran seven forward cells
  of 256 and a gradient of 6/1 heads. On the day before, H100s ran the forward grid, gradients of
  (192, 128) and of 256 causal 16k in bursts, and two packed cells. H200s ran three forward cells of
  256, the other gradients in bursts and the other packed cells. Few tiles and the other gradients
  under steady load are older.
- *Burst* and *steady load* are explained in [benchmarks.md](benchmarks.md), which also has the
  remaining figures. How everything is measured: [benchmarks/README.md](../benchmarks/README.md).
"""

LONG_NAMES = {
    **NAMES,
    "fa3-kvcache": "fa3 on caches",
    "fa3-page16": "fa3 on pages of 16",
    "fa3-page64": "fa3 on pages of 64",
    "fa3-dense": "fa3, dense call",
    "over dense": "over the dense call",
    "invariant": "batch-invariant",
}
"""What tables of benchmarks call columns and peers -> what this page calls them."""

OF_DECODING = """\
Microseconds. In brackets: GB/s of keys and values read, and their share of the rate at which torch
reads device memory in the same run, which is no upper bound. *Batch-invariant*, next to *over the
best peer*, is the speed with `batch_invariant=True` over the speed without. The table of page sizes
is of 32/8, 16 x 8k; *over contiguous* is the speed on pages over the speed on a contiguous cache.
*fa3-fp8* reads an [FP8 cache](decoding.md#caches-in-fp8), and *over fa3* is its speed over fa3's on
a bfloat16 cache.
"""

OF_PACKING = """\
Microseconds and TFLOP/s, or GB/s of keys and values; heads q/kv of 128.

| column | call |
|---|---|
| fa3 | `flash_attn_varlen_func` with `num_splits=0` |
| fa3, dense call | `flash_attn_func`; *over the dense call*: the speed of fa3 over its speed |
| fa3 on caches | `flash_attn_with_kvcache` on contiguous caches |
| fa3 on pages of 16, 64 | `flash_attn_varlen_func` with `page_table` |

| sequences | lengths |
|---|---|
| equal-causal-16x1k | 16 of 1,024 tokens; other names likewise |
| lognormal-64k | from a lognormal distribution with a mean of 1k, 64k tokens in all |
| long-128x128+1x16k | 128 of 128 tokens, and one of 16k |
| chat-500 | 500 prompts, from an exponential distribution with a mean of 300 |
| short-8192x34, short-8192x1..16 | 8,192 of 34 tokens; of 1 to 16 |
| few-1x2k | one of 2k tokens, with few heads |
| chunks-7x512+64x1 | 7 of 512 queries after 0 to 32k keys; 64 of 1 query, 4k keys on average |
| few-512of32k | one chunk of 512 queries on 32k keys, with few heads |
| decode-64x8k | 64 of 1 query on 8k keys |

few-512of32k on caches (151.0 us) was measured before the forward kernel served such calls. It now
takes 102.4 us ([log](experiments.md#2026-11-27-prompts-on-caches-without-cu_seqlens_q)).
"""

OF_GRADIENTS = """\
The backward pass alone: microseconds, and TFLOP/s at 2.5 times the operations of the forward pass.

- *lognormal-64k* is 64 sequences of 64k tokens in all, *heads-h8.1-8x512* eight of 512, and
  *heads-h8.1-5-of-8k* five of 492 to 3,500. *Graph*: replayed from a CUDA graph.
- Memory is the most that torch's allocator held during the call, minus what it held before. Results
  are included.
- Passes of few heads that take less than 300 us without a graph may have waited for the host, which
  was busy.
- The costs of `deterministic=True` and dropout are in [benchmarks.md](benchmarks.md#gradients).
"""

PACKAGES = {"fa3-cpp": "fa3-fwd", "fa4-cute": "flash-attn-4", "cudnn": "cuDNN"}


def origin(record: str, name: str, rows: Sequence[Row]) -> str:
    """Where and with what a record was measured.

    The peers' versions are those of its rows. What is known of a record without
    environment.json is its name; the page says so.
    """
    path = RECORDS / record / "environment.json"
    versions = {row.provider: row.version for row in rows}
    peers = ", ".join(
        f"{package} {version_text(versions[peer])}"
        for peer, package in PACKAGES.items()
        if peer in versions
    )
    if path.exists():
        said = json.loads(path.read_text())
        machine, date = (
            f"{said['gpu']}, driver {said['driver'].split('.')[0]}, torch {said['torch']}, CuTe "
            f"DSL {said['packages']['nvidia-cutlass-dsl']}",
            said["date"][:10],
        )
    else:
        tests = f"[gpu_tests.txt](../benchmarks/results/{record}/gpu_tests.txt)"
        torch = versions.get(READ.name)  # the stream of reads is torch's
        known, unknown = (f", torch {torch}", "") if torch else ("", ", torch")
        machine, date = (
            f"H200 by the record's name{known}. This record has no environment.json, so driver"
            f"{unknown} and CuTe DSL are unknown (see {tests})",
            "-".join(record.split("-")[1:4]),
        )
    return f"{machine}; {peers}; {date} ([record](../benchmarks/results/{record}/{name})).\n"


def version_text(version: str) -> str:
    """A version; cuDNN gives its own as one number."""
    if not version.isdigit():
        return version
    return f"{int(version) // 10_000}.{int(version) // 100 % 100}"


def newest(
    records: Sequence[str], name: str, kind: type[Row] = Row, regime: str = "burst"
) -> Iterator[tuple[str, list[Row]]]:
    """Yield each record's origin, and its rows in a regime of cells that no newer record has."""
    seen: set[str] = set()
    for record in records:
        rows = [
            row
            for row in read(RECORDS / record / name, kind)
            if (row.data, row.regime) == ("normal", regime) and row.cell not in seen
        ]
        seen |= {row.cell for row in rows}
        yield origin(record, name, rows), rows


def with_long_names(text: str) -> str:
    """A table of a benchmark with the names that this page has."""
    names = "|".join(map(re.escape, sorted(LONG_NAMES, key=len, reverse=True)))
    pattern = rf"(?<![\w-])(?:{names})(?![\w-])"
    return re.sub(pattern, lambda found: LONG_NAMES[found[0]], text)


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


def few_text(row: Row | None, ours: Row) -> str:
    """A time with a unit that fits; whether a call went without the graph that ours had."""
    if row is None:
        return "-"
    text = f"{row.us / 1000:.2f} ms" if row.us >= 1000 else f"{row.us:.1f} us"
    return f"{text}, eager" if (row.launch, ours.launch) == ("eager", "graph") else text


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
        times = [few_text(found.get(name), ours) for name in providers]
        ratio = f"{ours.vs_best_peer:.2f}" if ours.vs_best_peer else "-"
        yield [sizes, heads, mask_text(ours), *times, ratio]


def mask_text(row: Row) -> str:
    """The mask of a cell, in words."""
    if row.window_left >= 0:
        return f"window {row.window_left}"
    return "causal" if row.causal else "none"


def backward_lines(
    rows: Sequence[bench_backward.GradientRow], extra_text: Callable
) -> Iterator[list[str]]:
    """Every cell of backward passes alone: time and rate of each provider, and memory or energy."""
    for cell in gradients.CELLS:
        found = {row.provider: row for row in rows if row.cell == cell.name}
        if cell.passes == "backward" and found:
            chosen = [found.get(name) for name in (gradients.OURS, *gradients.PEERS)]
            times, extra = map(time_text, chosen), map(extra_text, chosen)
            label = gradients.label_of(cell).removeprefix("backward-")
            yield [label, *times, with_long_names(best_peer_text(chosen[0])), *extra]


EXTRA = {"burst": ("MiB", bench_backward.mib_text), "steady": ("mJ", bench_backward.joules_text)}
"""A regime -> the further columns: joules are measured under steady load only."""


def backward_tables(records: Sequence[str], regime: str) -> Iterator[str]:
    """Of each record where gradients were measured, and its cells that none before it has."""
    names = [NAMES[name] for name in (gradients.OURS, *gradients.PEERS)]
    unit, extra_text = EXTRA[regime]
    extra = [f"{unit}, {name}" for name in names]
    header = ["head size, mask, batch x length, heads", *names, "over the best peer", *extra]
    rows_of = newest(records, bench_backward.CSV_NAME, bench_backward.GradientRow, regime)
    for origin_text, rows in rows_of:
        yield origin_text + "\n" + table(header, backward_lines(rows, extra_text))


BUDGET = """### Where the time of decoding goes

Found by leaving out one thing at a time, not by tracing warps
([log](experiments.md#2026-11-22-decoding-in-one-launch)).

| part | 32/8, 1 x 8k | 32/8, 64 x 8k |
|---|---|---|
| keys and values at the speed of torch's reads (4,473 GB/s) | 7.5 us | 480 us |
| the call | 12.5 us | 475 us |
| fixed costs: launch, latency of the first loads, merge of parts | 5 to 5.7 us | hidden |
| a separate launch that merged parts, now removed | 1.3 us | 2.4 us |
| SMs idle between two calls, before an SM had room for both | none | 7 us |
| more loads in flight, larger or smaller copies, two CTAs per call | no gain | no gain |

The fixed costs also show in 32/8, 1 x 1k. Reading its keys at full speed takes 0.9 us, and the
call takes 6.6 us. The tables above are newer: there 1 x 8k takes 11.8 us, and 64 x 8k 464 us.
"""


def page() -> str:
    """The page as it should be."""
    grids = [
        (origin_text, [row for row in rows if row.group == "grid"])
        for origin_text, rows in newest(GRID, CSV_NAME, regime="steady")
    ]
    grid = [row for _, rows in grids for row in rows]
    providers = [name for name in providers_of(grid) if is_peer(name) or name == "fa3"]
    head = ("head size", "mask")
    over = "over the best peer"
    return "\n".join(
        (
            TITLE,
            "## Forward, steady load\n",
            "TFLOP/s, bf16, 16,384 tokens in all, heads times head size 2048.\n",
            *(
                origin_text
                + "\n"
                + table((*head, "length", *shown(providers), over), grid_lines(rows, providers))
                for origin_text, rows in grids
            ),
            "Geometric means over the lengths, and cells won, tied (within 1.5%) and lost:\n",
            table((*head, "over FlashAttention-3 C++", over, "result"), standing_lines(grid)),
            "## Few or unequal tiles, bursts\n",
            "Short calls are replayed from CUDA graphs. *Eager* marks a peer that was called "
            "directly where fa3 was replayed; its time may include the host.\n",
            *(
                origin_text
                + "\n"
                + table(
                    ("batch x queries on keys", "heads q/kv", "mask", *shown(providers), over),
                    few_lines(rows, providers),
                )
                for origin_text, rows in newest(FEW, CSV_NAME)
            ),
            "## Decoding, bursts\n",
            OF_DECODING,
            *(
                f"{origin_text}\n{with_long_names(bench_decode.markdown(rows))}\n"
                for origin_text, rows in newest(DECODE, "decode.csv", bench_decode.DecodeRow)
            ),
            BUDGET,
            "## Packed sequences, bursts\n",
            OF_PACKING,
            *(
                f"{origin_text}\n{with_long_names(bench_varlen.markdown(rows))}\n"
                for origin_text, rows in newest(PACKED, bench_varlen.CSV_NAME)
            ),
            "## Gradients, bursts\n",
            OF_GRADIENTS,
            *backward_tables(BACKWARD, "burst"),
            "## Gradients, steady load\n",
            "The same, with the energy of a call. Cells that are missing here were not measured "
            "with these kernels.\n",
            *backward_tables(BACKWARD_STEADY, "steady"),
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
