"""Measure gradients beside their peers: `python -m benchmarks.bench_backward`.

A backward pass alone, and a forward pass with it, through torch's autograd as users run them: host
time shows where it is longer than the GPU's, but for cells that are replayed from a CUDA graph.
TFLOP/s count 2.5 and 3.5 times the operations of the forward pass.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks import bench_forward, harness, plot, report, runs
from benchmarks.gradients import (
    CELLS,
    DROPPED_OURS,
    NAMES,
    ORDERED_FA4,
    ORDERED_OURS,
    OURS,
    PASSES,
    PEERS,
    Found,
    Gradients,
    InOneThread,
    Nothing,
    label_of,
    reference_of,
    shrink,
)
from benchmarks.peers import COMPILED
from benchmarks.results import Row
from benchmarks.runs import Timed
from benchmarks.shapes import MASKS, Cell, named

CSV_NAME = "backward.csv"
HOST_NAME = "backward-host.json"

TITLES = {"backward": "Backward pass", "both": "Forward and backward pass"}

QUICK = (
    "backward-d64-causal-1024",
    "backward-d64-causal-4096",
    "backward-d128-causal-1024",
    "backward-d128-causal-4096",
    "backward-d128-full-4096",
    "backward-d256-causal-4096",
    "backward-gqa-h32.8-2x4k",
    "backward-few-h12.12-8x1k",
    "backward-few-h12.12-8x1k-graph",
    "backward-lognormal-64k",
    "both-d128-causal-4096",
    "both-few-h12.12-8x1k",
)
"""Cells of a quick run that names none."""

HOST_CELL = replace(named("host", 1, (256, 256), (1, 1)), name="host", passes="both")
"""Too small to keep the GPU busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRow(Row):
    """Gradients by a provider beside its peers.

    Fields:
        passes: what a call computes, see `benchmarks.shapes.CREDITS`.
        peak_mib: the most memory that a call takes beside what its inputs take.
    """

    passes: str
    peak_mib: float | None = None


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_backward",
        description="Measure gradients beside their peers. "
        "A quick run that names no cells measures a few of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    runs.add_row_options(parser, NAMES)
    parser.set_defaults(regimes=["burst"])
    return parser.parse_args(arguments)


def make_rows(timed: Timed) -> list[GradientRow]:
    """Turn the blocks of one cell and regime into rows, one for every provider."""
    rows = []
    for row in bench_forward.make_rows(timed):
        contender, peak = timed.contenders.get(row.provider), None
        if contender:
            peak = harness.peak_bytes(contender.runner.calls[0]) / 2**20
        rows.append(GradientRow(**asdict(row), passes=timed.job.cell.passes, peak_mib=peak))
    return rows


def mib_text(row: GradientRow | None) -> str:
    return f"{row.peak_mib:.0f}" if row and row.peak_mib is not None else ""


def joules_text(row: GradientRow | None) -> str:
    """Millijoules of a call, where they were measured: not in bursts."""
    return f"{1e3 * row.joules:.0f}" if row and row.joules is not None else ""


def table_of_cells(cells: Sequence[Cell], found: dict[tuple[str, str], GradientRow]) -> str:
    """Every cell beside its peers: time, speed, energy, memory."""
    lines = []
    for cell in cells:
        rows = [found.get((cell.name, name)) for name in (OURS, *PEERS)]
        numbers = (" / ".join(map(text, rows)) for text in (joules_text, mib_text))
        times = map(report.time_text, rows)
        lines.append([label_of(cell), *times, report.best_peer_text(rows[0]), *numbers])
    names = " / ".join((OURS, *PEERS))
    header = ["head_dim, mask, batch x length, heads", OURS, *PEERS, "over the best peer"]
    return report.markdown_table([*header, f"mJ: {names}", f"MiB: {names}"], lines)


def table_of_standings(rows: Sequence[GradientRow]) -> str:
    """Geometric means of ours over the best peer, over the grid."""
    grid = [row for row in rows if row.group == "grid" and row.provider == OURS]
    lines = []
    for head_dims in sorted({(row.head_dim, row.head_dim_v) for row in grid}):
        for mask in MASKS:
            chosen = [
                row
                for row in grid
                if (row.head_dim, row.head_dim_v, row.causal) == (*head_dims, mask == "causal")
            ]
            if not chosen:
                continue
            result = report.standing(chosen)
            places = f"{result.wins}-{result.ties}-{result.losses}"
            name = "/".join(map(str, dict.fromkeys(head_dims)))
            lines.append([name, mask, f"{result.vs_best_peer:.3f}", places])
    return report.markdown_table(["head_dim", "mask", "over the best peer", "win-tie-loss"], lines)


OPTIONS = (((ORDERED_OURS, OURS), (ORDERED_FA4, PEERS[0])), ((DROPPED_OURS, OURS),))
"""Who is measured with an option beside the same without: deterministic gradients, and dropout."""


def table_of_option(
    cells: Sequence[Cell],
    found: dict[tuple[str, str], GradientRow],
    pairs: Sequence[tuple[str, str]],
) -> str:
    """What an option costs: the speed with it over that without."""
    lines, header = [], ["head_dim, mask, batch x length, heads"]
    for cell in cells:
        line = [label_of(cell)]
        for name, plain in pairs:
            row, base = found.get((cell.name, name)), found.get((cell.name, plain))
            line += [report.time_text(row), report.speed_text(report.speed_over(row, base))]
        lines.append(line)
    for name, plain in pairs:
        header += [name, f"over {plain}"]
    return report.markdown_table(header, lines)


def markdown(rows: Sequence[GradientRow], passes: str) -> str:
    """The tables of one regime and what was asked for."""
    rows = [row for row in rows if row.passes == passes]
    found = {(row.cell, row.provider): row for row in rows}
    cells = [cell for cell in CELLS if any(row.cell == cell.name for row in rows)]
    tables = [table_of_cells(cells, found)]
    if any(row.group == "grid" and row.provider == OURS for row in rows):
        tables.append(table_of_standings(rows))
    for pairs in OPTIONS:
        chosen = [cell for cell in cells if any((cell.name, name) in found for name, _ in pairs)]
        if chosen:
            tables.append(table_of_option(chosen, found, pairs))
    return "\n\n".join(tables)


def print_report(console: Console, rows: Sequence[GradientRow], directory: Path) -> None:
    """Print the tables of each regime, and draw its grid."""
    for regime in dict.fromkeys(row.regime for row in rows):
        chosen = [row for row in rows if row.regime == regime]
        for passes in PASSES:
            if any(row.passes == passes for row in chosen):
                console.print(f"\n{TITLES[passes]}, {regime}: us (TFLOP/s)\n")
                text = markdown(chosen, passes)
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        for line in report.failures(chosen):
            console.print(line, markup=False, soft_wrap=True)
    for passes in PASSES:
        drawn = [row for row in rows if row.passes == passes and row.provider in (OURS, *PEERS)]
        for path in plot.draw_all(drawn, directory, passes, TITLES[passes]):
            console.print(path)


def check_cell(run: runs.Run, job: runs.Job) -> dict[str, runs.Verdict]:
    """Compile and check a cell for every provider, by what it should give."""
    verdicts = {}
    for has_dropout in (False, True):
        providers = [one for one in job.providers if (one.name == DROPPED_OURS) == has_dropout]
        if providers:
            make = functools.partial(reference_of, has_dropout=has_dropout)
            verdicts |= runs.check_cell(run, job._replace(providers=providers), make)
    return verdicts


def measure(options: argparse.Namespace, cells: Sequence[Cell], console: Console) -> Path:
    """Measure what is not yet in the results directory; return it."""
    runs.need_gpu()
    found = Found([name for name in NAMES if not options.only or name in options.only])
    run, jobs = runs.open_jobs(
        options, console, CSV_NAME, GradientRow, cells, found.dense, found.missing,
        found.providers_of,
    )  # fmt: skip
    if not jobs:
        return run.csv.parent
    host_providers = found.providers_of(HOST_CELL)
    calls = [(one, HOST_CELL) for one in host_providers]
    calls += [(one, shrink(one, job.cell)) for job in jobs for one in job.providers]
    runs.compile_all((call for call in calls if call[0].name not in COMPILED), console)
    costs = bench_forward.measure_host(
        run,
        [
            *host_providers,
            Gradients(Nothing()),
            *map(InOneThread, host_providers),
            InOneThread(Gradients(Nothing())),
        ],
        HOST_CELL,
        HOST_NAME,
    )
    left = runs.check_and_measure(run, jobs, make_rows, bench_forward.summary_line, check_cell)
    bench_forward.print_host(console, costs)
    if left:
        console.print(f"{left} cells left: run the same command again")
    return run.csv.parent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cells = runs.chosen_cells(CELLS, QUICK, options)
    runs.list_or_report(options, cells, measure, CSV_NAME, GradientRow, print_report)


if __name__ == "__main__":
    main()
