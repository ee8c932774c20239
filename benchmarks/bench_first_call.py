"""How long a new process takes until its first call: `python -m benchmarks.bench_first_call`.

Kernels are compiled before, by one process for each kind of call. Then each kind is the first call
of several new processes (`benchmarks.first_call`), which find its kernels on disk. What counts is
the time from the call to its return, when all of its kernels are launched.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import environment, runs
from benchmarks.first_call import CALLS, FIRST
from benchmarks.meter import open_gauge

ROOT = Path(__file__).parent.parent

MOST_MS = 150
"""What a first call may take."""

FILE_NAME = "first-call.json"

Times = Mapping[str, Sequence[Mapping[str, float]]]
"""By the kind of call, the milliseconds of the steps of every process."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_first_call",
        description="Measure the first call of a new process whose kernels are on disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--processes", type=int, default=7, help="new processes of each kind")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write first-call.json there")
    return parser.parse_args(arguments)


def in_new_process(call: str, *options: str) -> dict[str, float]:
    """The milliseconds of the steps of a new process whose first call is of this kind."""
    command = [sys.executable, "-m", "benchmarks.first_call", call, *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    calls: Sequence[str], processes: int, *options: str
) -> dict[str, list[dict[str, float]]]:
    """Have kernels compiled, then time processes; the kinds of calls take turns."""
    for call in calls:
        in_new_process(call, *options)
    found: dict[str, list[dict[str, float]]] = {call: [] for call in calls}
    for _ in range(processes):
        for call in calls:
            found[call].append(in_new_process(call, "--compiled", *options))
    return found


def table_of(times: Times) -> Table:
    """A row for each kind of call, a column for each step: the median, and the longest."""
    table = Table(title="Milliseconds in a new process: median (longest)", title_justify="left")
    table.add_column("first call")
    steps = list(next(iter(next(iter(times.values())))))
    for step in steps:
        table.add_column(step, justify="right")
    for call, processes in times.items():
        columns = []
        for step in steps:
            milliseconds = [process[step] for process in processes]
            columns.append(f"{statistics.median(milliseconds):.1f} ({max(milliseconds):.1f})")
        table.add_row(call, *columns)
    return table


def verdict(times: Times) -> str:
    """Whether first calls take as little as they may, in a line."""
    slowest = max(
        times,
        key=lambda call: statistics.median(process[FIRST] for process in times[call]),
    )
    median = statistics.median(process[FIRST] for process in times[slowest])
    word = "within" if median <= MOST_MS else "above"
    return f"From the call to its return at most {median:.0f} ms ({slowest}): {word} {MOST_MS} ms"


def about() -> dict[str, object]:
    """Where this is measured."""
    gauge, _ = open_gauge(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return environment.describe([], {}, gauge)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else runs.WIDTH)
    runs.need_gpu()
    times = measure(options.calls, options.processes)
    console.print(table_of(times))
    console.print(verdict(times))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": about(), "milliseconds": times}, indent=1)
        (options.out / FILE_NAME).write_text(text + "\n")


if __name__ == "__main__":
    main()
