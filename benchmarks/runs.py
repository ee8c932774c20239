"""A run: every pending cell is checked for all its providers, then timed; rows are kept at once.

Rows are written as each cell is done, so a run that ends early goes on where it stopped. What a
benchmark adds is its cells, its providers and its kind of row.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import environment, harness, results
from benchmarks.harness import Contender, Errors, PartsReference, Reference
from benchmarks.meter import Meter, NvmlGauge, Reading, open_gauge, read_interval, reason_names
from benchmarks.peers import Provider, Tensors
from benchmarks.ratios import summarise
from benchmarks.results import FAILED, OK, UNSUPPORTED, WRONG, Measurement
from benchmarks.shapes import Cell
from benchmarks.timing import QUICK, QUICK_ROUNDS, REGIMES, Block, Regime

WIDTH = 200
"""Columns of tables that do not go to a terminal."""


class Verdict(NamedTuple):
    """Whether a provider may be timed on a cell."""

    status: str
    reason: str = ""
    errors: Errors | None = None


class Job(NamedTuple):
    """A cell with the providers to measure on it and the regimes that are still to be done."""

    cell: Cell
    providers: list[Provider]
    regimes: list[Regime]


@dataclass(frozen=True, slots=True)
class Run:
    """What holds for a whole run."""

    console: Console
    data: str
    rounds: int
    csv: Path
    deadline: float
    gauge: NvmlGauge | None

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.deadline


class Timed(NamedTuple):
    """What was measured of one cell in one regime.

    Fields:
        verdicts, contenders, blocks: by provider; only those who passed have the latter two.
    """

    run: Run
    job: Job
    regime: Regime
    verdicts: dict[str, Verdict]
    contenders: dict[str, Contender]
    blocks: dict[str, list[Block]]
    meter: Meter

    def times(self, provider: str) -> list[float]:
        """A provider's microseconds, one for each round."""
        return [block.us for block in self.blocks[provider]]

    def columns(self, provider: Provider) -> dict[str, object]:
        """The columns of `results.Measurement` for one provider."""
        cell, verdict = self.job.cell, self.verdicts[provider.name]
        contender = self.contenders.get(provider.name)
        columns = {
            "cell": cell.name,
            "group": cell.group,
            "data": self.run.data,
            "regime": self.regime.name,
            "provider": provider.name,
            "status": verdict.status,
            "reason": verdict.reason,
            "version": provider.version,
            "choice": contender.choice if contender else "",
            "launch": contender.runner.launch if contender else "",
            "batch": cell.batch,
            "seqlen_q": cell.seqlen_q,
            "seqlen_k": cell.seqlen_k,
            "heads_q": cell.heads_q,
            "heads_kv": cell.heads_kv,
            "head_dim": cell.head_dim,
            "head_dim_v": cell.head_dim_v,
            "causal": cell.causal,
            "window_left": cell.window_left,
            "dtype": cell.dtype,
            "max_error": verdict.errors.largest if verdict.errors else None,
            "allowed_error": verdict.errors.allowed if verdict.errors else None,
        }
        if contender is None:
            return columns
        times = self.times(provider.name)
        us = summarise(times)
        reading = read_blocks(self.meter, self.blocks[provider.name])
        return columns | {
            "us": us.median,
            "us_q1": us.q1,
            "us_q3": us.q3,
            "tflops": cell.flops / us.median / 1e6,
            "gbps": cell.kv_bytes / us.median / 1e3,
            "sm_mhz": reading.sm_mhz,
            "power_w": reading.power_w,
            "throttle": reason_names(reading.reasons),
            "joules": reading.joules,
            "rounds_us": tuple(times),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all runs take."""
    parser.add_argument(
        "--regimes", nargs="+", choices=list(REGIMES), default=list(REGIMES),
        help="burst: after idleness, at full clock; steady: under the power cap",
    )  # fmt: skip
    parser.add_argument(
        "--data", choices=harness.DATA, default="normal", help="how inputs are drawn"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed blocks of every provider")
    parser.add_argument(
        "--block-ms", type=float, default=REGIMES["steady"].block_ms,
        help="length of a block in the steady regime",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"short blocks and {QUICK_ROUNDS} rounds, without joules",
    )  # fmt: skip
    parser.add_argument(
        "--cells", nargs="+", default=[], metavar="TEXT",
        help="only cells whose names contain one of these",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="results directory (default: benchmarks/results/<gpu>-<date>)"
    )
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True,
        help="skip what the results directory already has",
    )  # fmt: skip
    parser.add_argument(
        "--max-minutes", type=float, default=float("inf"),
        help="start no cell that would probably end later than this",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the cells and stop")


def add_row_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the options of runs whose record is printed from its file.

    Args:
        names: of all providers.
    """
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="only these providers")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="print and draw this directory's rows, and stop"
    )
    add_options(parser)


def in_processes(compile_one: Callable[..., str], items: Collection) -> Iterator[str]:
    """What a function says of each item, which it compiles, in processes side by side."""
    # A forked process would inherit threads and the CUDA context.
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(items), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(compile_one, items)


def compile_all(calls: Iterable[tuple[Provider, Cell]], console: Console) -> None:
    """Put the kernels of providers into their caches on disk, side by side."""
    calls = dict.fromkeys(calls)
    with console.status("compile"):
        for (one, cell), error in zip(calls, in_processes(call_once, calls), strict=True):
            if error:
                console.print(f"{one.name} {cell.name}: {error}", markup=False)


def call_once(of: tuple[Provider, Cell]) -> str:
    """Make one call, which compiles its kernels; return what went wrong, if anything."""
    one, cell = of
    try:
        (tensors,) = harness.draw_inputs(cell, "normal", sets=1)
        next(iter(one.prepare(cell, tensors).values()))()
        torch.cuda.synchronize()
    except Exception as error:
        return first_line(error)
    return ""


def chosen_regimes(options: argparse.Namespace) -> list[Regime]:
    """The regimes that the options ask for."""
    regimes = [REGIMES[name] for name in dict.fromkeys(options.regimes)]
    if options.quick:
        return [QUICK[regime.name] for regime in regimes]
    return [
        replace(regime, block_ms=options.block_ms) if regime.name == "steady" else regime
        for regime in regimes
    ]


def with_names_like(cells: Iterable[Cell], texts: Sequence[str]) -> list[Cell]:
    """The cells whose names contain one of the texts; all cells if there are none."""
    return [cell for cell in cells if not texts or any(text in cell.name for text in texts)]


def chosen_cells(
    cells: Iterable[Cell], quick: Collection[str], options: argparse.Namespace
) -> list[Cell]:
    """The cells that the options name; if they name none, all cells, or those of a quick run."""
    if options.quick and not options.cells:
        return [cell for cell in cells if cell.name in quick]
    return with_names_like(cells, options.cells)


def find_jobs(
    cells: Iterable[Cell],
    regimes: Sequence[Regime],
    providers_of: Callable[[Cell], list[Provider]],
    data: str,
    rows: Sequence[Measurement],
) -> list[Job]:
    """Cells that some provider has no row of yet, with the regimes in which that is so."""
    jobs = []
    for cell in cells:
        providers = providers_of(cell)
        names = [provider.name for provider in providers]
        missing = [
            regime
            for regime in regimes
            if not results.is_done(rows, cell.name, data, regime.name, names)
        ]
        if missing:
            jobs.append(Job(cell, providers, missing))
    return jobs


def cells_listing(cells: Sequence[Cell]) -> Table:
    table = Table("cell", "batch", "seqlen q", "seqlen k", "heads", "head dims", "mask", "GFLOP")
    for cell in cells:
        table.add_row(
            cell.name,
            str(cell.batch),
            str(cell.seqlen_q),
            str(cell.seqlen_k),
            f"{cell.heads_q}/{cell.heads_kv}",
            f"{cell.head_dim}/{cell.head_dim_v}",
            cell.mask,
            f"{cell.flops / 1e9:.1f}",
        )
    return table


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def reason_of(error: Exception) -> str:
    """What went wrong, and what had gone wrong before that: the end of a capture hides it."""
    first: BaseException = error
    while first.__context__ is not None and not first.__suppress_context__:
        first = first.__context__
    return first_line(error) + ("" if first is error else f", after {first_line(first)}")


def attempt(action: Callable[[], Verdict]) -> Verdict:
    """Run a step of one provider; its errors become a verdict.

    A provider that broke the CUDA context ends the run: nothing after it could be trusted.
    """
    try:
        return action()
    except harness.WrongOutput as error:
        return Verdict(WRONG, str(error))
    except Exception as error:
        torch.cuda.synchronize()
        return Verdict(FAILED, reason_of(error))


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def check_cell(
    run: Run,
    job: Job,
    make_reference: Callable[[Cell, Tensors], Reference | PartsReference] = Reference,
) -> dict[str, Verdict]:
    """Compile and check a cell for every provider."""
    (tensors,) = harness.draw_inputs(job.cell, run.data, sets=1)
    reference = make_reference(job.cell, tensors)
    return check_providers(
        job, lambda provider: harness.check_provider(provider, job.cell, tensors, reference)
    )


def check_providers(job: Job, check: Callable[[Provider], Errors | None]) -> dict[str, Verdict]:
    """Check a cell for every provider that supports it.

    Args:
        check: the errors of a provider; None if it computes nothing that could be wrong.
    """

    def verdict(provider: Provider) -> Verdict:
        if reason := provider.supports(job.cell):
            return Verdict(UNSUPPORTED, reason)
        return attempt(lambda: Verdict(OK, errors=check(provider)))

    return {provider.name: verdict(provider) for provider in job.providers}


def check_all(run: Run, jobs: Sequence[Job]) -> dict[str, dict[str, Verdict]]:
    """Compile and check all cells, as far as there is time; verdicts by cell and provider."""
    verdicts = {}
    with progress_bar(run.console) as progress:
        task = progress.add_task("check", total=len(jobs))
        for job in jobs:
            if not run.has_time_for(0):
                break
            progress.update(task, description=f"check {job.cell.name}")
            verdicts[job.cell.name] = check_cell(run, job)
            report_failures(progress.console, job.cell, verdicts[job.cell.name])
            progress.advance(task)
    return verdicts


def make_contenders(run: Run, job: Job, verdicts: dict[str, Verdict]) -> dict[str, Contender]:
    """Make everyone who passed the check ready; who fails now gets a new verdict."""
    inputs = harness.draw_inputs(job.cell, run.data, job.cell.num_sets)
    contenders = {}
    for provider in job.providers:
        verdict = verdicts[provider.name]
        if verdict.status != OK:
            continue

        def make(provider: Provider = provider, verdict: Verdict = verdict) -> Verdict:
            contenders[provider.name] = harness.choose_runner(provider, job.cell, inputs)
            return verdict

        verdicts[provider.name] = attempt(make)
    return contenders


def read_blocks(meter: Meter, blocks: Sequence[Block]) -> Reading:
    """Sum up what the meter saw during one provider's blocks; joules are of one call."""
    readings = [read_interval(meter.samples, block.begin, block.end) for block in blocks]

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return summarise(known).median if known else None

    reasons = 0
    for reading in readings:
        reasons |= reading.reasons
    return Reading(
        median(reading.sm_mhz for reading in readings),
        median(reading.power_w for reading in readings),
        reasons,
        median(
            reading.joules / block.calls
            for reading, block in zip(readings, blocks, strict=True)
            if reading.joules is not None
        ),
    )


def measure_cell(run: Run, job: Job, verdicts: dict[str, Verdict]) -> Iterable[Timed]:
    """Time one cell; give each regime as it is done."""
    contenders = make_contenders(run, job, verdicts)
    # The same order of providers whichever cells a resumed run still has to do.
    shuffle = random.Random(job.cell.name)
    for regime in job.regimes:
        meter = Meter(run.gauge)
        blocks = harness.measure(list(contenders.values()), regime, run.rounds, shuffle, meter)
        yield Timed(run, job, regime, verdicts, contenders, blocks, meter)


def measure_all(
    run: Run,
    jobs: Sequence[Job],
    verdicts: dict[str, dict[str, Verdict]],
    make_rows: Callable[[Timed], list[Measurement]],
    summary_line: Callable[[Sequence[Measurement]], str],
) -> int:
    """Time checked cells as far as there is time; write their rows; return how many are left."""
    slowest = 0.0
    done = 0
    with progress_bar(run.console) as progress:
        task = progress.add_task("time", total=len(jobs))
        for job in jobs:
            if job.cell.name not in verdicts or not run.has_time_for(slowest):
                break
            progress.update(task, description=f"time {job.cell.name}")
            begin = time.monotonic()
            measure_and_keep(run, job, verdicts[job.cell.name], make_rows, summary_line)
            slowest = max(slowest, time.monotonic() - begin)
            done += 1
            progress.advance(task)
    return len(jobs) - done


def check_and_measure(
    run: Run,
    jobs: Sequence[Job],
    make_rows: Callable[[Timed], list[Measurement]],
    summary_line: Callable[[Sequence[Measurement]], str],
    check: Callable[[Run, Job], dict[str, Verdict]] = check_cell,
) -> int:
    """Check and time one cell after the other, for kernels that are compiled already.

    Unlike `check_all` and then `measure_all`, a run that ends early has spent no time on checks of
    cells that it does not reach. Returns how many cells are left.
    """
    slowest = 0.0
    with progress_bar(run.console) as progress:
        task = progress.add_task("measure", total=len(jobs))
        for done, job in enumerate(jobs):
            if not run.has_time_for(slowest):
                return len(jobs) - done
            progress.update(task, description=job.cell.name)
            begin = time.monotonic()
            verdicts = check(run, job)
            report_failures(progress.console, job.cell, verdicts)
            measure_and_keep(run, job, verdicts, make_rows, summary_line)
            slowest = max(slowest, time.monotonic() - begin)
            progress.advance(task)
    return 0


def measure_and_keep(
    run: Run,
    job: Job,
    verdicts: dict[str, Verdict],
    make_rows: Callable[[Timed], list[Measurement]],
    summary_line: Callable[[Sequence[Measurement]], str],
) -> None:
    """Time one cell and write the rows of each regime as it is done."""
    for timed in measure_cell(run, job, verdicts):
        rows = make_rows(timed)
        results.append(run.csv, rows)
        run.console.print(summary_line(rows), highlight=False)


def report_failures(console: Console, cell: Cell, verdicts: dict[str, Verdict]) -> None:
    """Say who may not be timed on a cell, and why."""
    for name, verdict in verdicts.items():
        if verdict.status != OK:
            console.print(f"{cell.name} {name}: {verdict.status}, {verdict.reason}", markup=False)


def clock_text(rows: Sequence[Measurement]) -> str:
    """The range of clocks of some rows, for the end of a line."""
    clocks = [row.sm_mhz for row in rows if row.sm_mhz]
    return f" [dim]at {min(clocks):.0f}-{max(clocks):.0f} MHz[/]" if clocks else ""


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def open_run(
    options: argparse.Namespace,
    console: Console,
    csv_name: str,
    providers: list[Provider],
    missing: dict[str, str],
) -> Run:
    """Make the results directory and describe the environment in it.

    Args:
        providers, missing: whom the environment's description names.
    """
    deadline = time.monotonic() + options.max_minutes * 60
    torch.set_grad_enabled(False)
    gpu = torch.cuda.get_device_properties(0)
    gauge, reason = open_gauge(f"GPU-{gpu.uuid}")
    if gauge is None:
        console.print(f"without clock, power and energy: {reason}", markup=False)
    out = options.out or Path(__file__).parent / "results" / environment.directory_name(
        gpu.name, datetime.date.today()
    )
    out.mkdir(parents=True, exist_ok=True)
    keep_environment(out / "environment.json", environment.describe(providers, missing, gauge))
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    return Run(console, options.data, rounds, out / csv_name, deadline, gauge)


def open_jobs(
    options: argparse.Namespace,
    console: Console,
    csv_name: str,
    kind: type[Measurement],
    cells: Iterable[Cell],
    found: list[Provider],
    missing: dict[str, str],
    providers_of: Callable[[Cell], list[Provider]],
) -> tuple[Run, list[Job]]:
    """Open a run, and find what its file does not have yet.

    Args:
        kind: of the rows.
        found, missing: providers that could be imported, and why others could not.
    """
    for name, reason in missing.items():
        console.print(f"without {name}: {reason}", markup=False)
    run = open_run(options, console, csv_name, found, missing)
    done = results.read(run.csv, kind) if options.resume else []
    return run, find_jobs(cells, chosen_regimes(options), providers_of, options.data, done)


def rows_to_report(
    path: Path, kind: type[results.Kind], cells: Iterable[Cell], data: str
) -> list[results.Kind]:
    """The rows of a file that tell of some cells."""
    names = {cell.name for cell in cells}
    return [row for row in results.read(path, kind) if row.cell in names and row.data == data]


def list_or_report(
    options: argparse.Namespace,
    cells: Sequence[Cell],
    measure: Callable[[argparse.Namespace, Sequence[Cell], Console], Path],
    csv_name: str,
    kind: type[results.Kind],
    print_report: Callable[[Console, Sequence[results.Kind], Path], None],
) -> None:
    """List the cells, or report on them, measured now or before, as the options say.

    Args:
        measure: measures what is not yet in a results directory, and returns that.
        csv_name: of the rows there, which are of this kind.
    """
    console = make_console()
    if options.list:
        console.print(cells_listing(cells))
        return
    directory = options.report or measure(options, cells, console)
    path = directory / csv_name
    print_report(console, rows_to_report(path, kind, cells, options.data), directory)
    console.print(path)


def keep_environment(path: Path, content: dict) -> None:
    """Write the environment; providers that other runs found in this directory stay named."""
    if path.exists():
        before = json.loads(path.read_text())["providers"]
        content["providers"] = before | content["providers"]
    write_json(path, content)


def need_gpu() -> None:
    """End the program unless there is a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: only --list works here")
