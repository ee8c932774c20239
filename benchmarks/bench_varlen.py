"""Measure packed sequences beside their peers: `python -m benchmarks.bench_varlen`.

Equal lengths stand beside the dense call, sequences with keys from before beside calls on caches
and on pages. TFLOP/s count the pairs that each sequence's mask shows, GB/s the keys and values.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import bench_forward, peers, plot, report, runs
from benchmarks.packed import (
    CELLS,
    DENSE,
    NAMES,
    OURS,
    PACKED,
    PEERS,
    Dense,
    PackedCell,
    PackedReference,
    pack,
    providers_of,
    shrink,
)
from benchmarks.results import Row

CSV_NAME = "varlen.csv"
HOST_NAME = "varlen-host.json"

QUICK = (
    "equal-causal-4x4k",
    "equal-causal-16x1k",
    "equal-causal-1x16k",
    "equal-full-4x4k",
    "lognormal-64k",
    "long-128x128+1x16k",
    "chat-500",
    "short-8192x34",
    "chunks-7x512+64x1",
    "decode-64x8k",
)
"""Cells of a quick run that names none."""

HOST_CELL = pack("host", "host", (1, 1), [256])
"""Too small to keep the GPU busy."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_varlen",
        description="Measure packed sequences beside their peers. "
        "A quick run that names no cells measures a few of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    runs.add_row_options(parser, NAMES)
    parser.set_defaults(regimes=["burst"])
    return parser.parse_args(arguments)


def markdown(rows: Sequence[Row]) -> str:
    """The tables of one regime: packed sequences, then those with keys from before."""
    found = {(row.cell, row.provider): row for row in rows}
    cells = [cell for cell in CELLS if any(row.cell == cell.name for row in rows)]
    lines = []
    for cell in (cell for cell in cells if not cell.is_cached):
        ours, dense = (found.get((cell.name, name)) for name in (PACKED, DENSE))
        theirs = [report.time_text(found.get((cell.name, name))) for name in PEERS]
        over_dense = report.speed_text(report.speed_over(ours, dense))
        line = [cell.label, report.time_text(ours), *theirs, report.best_peer_text(ours)]
        lines.append([*line, report.time_text(dense), over_dense])
    tables = []
    if lines:
        header = ["sequences", PACKED, *PEERS, "over the best peer", DENSE, "over dense"]
        tables.append(report.markdown_table(header, lines))
    lines = []
    names = [one.name for one in OURS if one.name != DENSE]
    for cell in (cell for cell in cells if cell.is_cached):
        times = [report.time_text(found.get((cell.name, name))) for name in (*names, *PEERS)]
        our_rows = (found.get((cell.name, name)) for name in names)
        best = [report.best_peer_text(row) for row in our_rows]
        lines.append([cell.label, *times, *best])
    if lines:
        header = ["sequences", *names, *PEERS, *(f"{name} over the best peer" for name in names)]
        tables.append(report.markdown_table(header, lines))
    return "\n\n".join(tables)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each cell's speeds as bars, in shares of its fastest."""
    names = [*(one.name for one in OURS), *PEERS]
    labels = {cell.name: cell.label for cell in CELLS if any(row.cell == cell.name for row in rows)}
    timed = [row for row in rows if row.us]
    fastest = {
        cell: min((row.us for row in timed if row.cell == cell), default=0) for cell in labels
    }
    speeds = {(row.cell, row.provider): 100 * fastest[row.cell] / row.us for row in timed}
    plot.draw_bars(labels, names, speeds, "speed, % of the fastest", path)


def print_report(console: Console, rows: Sequence[Row], directory: Path) -> None:
    """Print the tables of each regime, and draw it."""
    for regime in dict.fromkeys(row.regime for row in rows):
        chosen = [row for row in rows if row.regime == regime]
        console.print(f"\n{regime}: us (TFLOP/s, or GB/s of K and V)\n")
        console.print(markdown(chosen), markup=False, highlight=False, soft_wrap=True)
        for line in report.failures(chosen):
            console.print(line, markup=False, soft_wrap=True)
        path = directory / f"varlen-{regime}.png"
        draw(chosen, path)
        console.print(path)


def measure(options: argparse.Namespace, cells: Sequence[PackedCell], console: Console) -> Path:
    """Measure what is not yet in the results directory; return it."""
    runs.need_gpu()
    wanted = [name for name in PEERS if not options.only or name in options.only]
    found, missing = peers.find(wanted, PEERS)
    run, jobs = runs.open_jobs(
        options, console, CSV_NAME, Row, cells, [*OURS, *found], missing,
        lambda cell: providers_of(cell, found, options.only),
    )  # fmt: skip
    if not jobs:
        return run.csv.parent
    host_providers = providers_of(HOST_CELL, found, options.only)
    calls = [(one, HOST_CELL) for one in host_providers]
    calls += [
        (one, job.cell if isinstance(one, Dense) else shrink(job.cell))
        for job in jobs
        for one in job.providers
    ]
    runs.compile_all((call for call in calls if call[0].name not in peers.COMPILED), console)
    costs = bench_forward.measure_host(run, host_providers, HOST_CELL, HOST_NAME)
    check = functools.partial(runs.check_cell, make_reference=PackedReference)
    left = runs.check_and_measure(
        run, jobs, bench_forward.make_rows, bench_forward.summary_line, check
    )
    bench_forward.print_host(console, costs)
    if left:
        console.print(f"{left} cells left: run the same command again")
    return run.csv.parent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cells = runs.chosen_cells(CELLS, QUICK, options)
    runs.list_or_report(options, cells, measure, CSV_NAME, Row, print_report)


if __name__ == "__main__":
    main()
