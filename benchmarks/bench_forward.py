"""Measure forward attention beside its peers: `python -m benchmarks.bench_forward`.

Every pending cell is first compiled and checked for all providers, then timed. Rows are written
as each cell is done, so a run that ends early goes on where it stopped.
"""

import argparse
import datetime
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import environment, harness, peers, plot, report, results, shapes
from benchmarks.harness import REGIMES, Block, Contender, Errors, Regime
from benchmarks.meter import Meter, NvmlGauge, Reading, open_gauge, read_interval, reason_names
from benchmarks.peers import Provider
from benchmarks.ratios import Summary, paired_speedup, summarise
from benchmarks.results import FAILED, OK, UNSUPPORTED, WRONG, Row
from benchmarks.shapes import Cell

BASE = "fa3-cpp"
"""The peer that every provider is compared with."""

WIDTH = 200
"""Columns of tables that do not go to a terminal."""


class Verdict(NamedTuple):
    """Whether a provider may be timed on a cell."""

    status: str
    reason: str = ""
    errors: Errors | None = None


class Pending(NamedTuple):
    """A cell, and the regimes in which it is still to be measured."""

    cell: Cell
    regimes: list[Regime]


@dataclass(frozen=True, slots=True)
class Run:
    """What holds for a whole run."""

    console: Console
    providers: list[Provider]
    data: str
    rounds: int
    csv: Path
    deadline: float
    gauge: NvmlGauge | None

    def has_time_for(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.deadline


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_forward",
        description="Measure forward attention beside its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--head-dims", type=int, nargs="*", choices=shapes.HEAD_DIMS, default=[64, 128, 256],
        help="head dimensions of the grid; give none to leave the grid out",
    )  # fmt: skip
    parser.add_argument("--masks", nargs="+", choices=shapes.MASKS, default=list(shapes.MASKS))
    parser.add_argument(
        "--seqlens", type=int, nargs="+", default=list(shapes.SEQLENS), metavar="N",
        help="sequence lengths of the grid",
    )  # fmt: skip
    parser.add_argument(
        "--extra", nargs="+", choices=[*shapes.NAMED, "all"], default=[],
        help="named shapes to add to the grid",
    )  # fmt: skip
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
        "--providers", nargs="+", choices=list(peers.PROVIDERS), default=list(peers.PROVIDERS),
        help="whom to measure, as far as they can be imported",
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=MODULE:FUNCTION",
        help="measure also what FUNCTION(cell, q, k, v) returns; can be repeated",
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
    return parser.parse_args(arguments)


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments ask for."""
    groups = shapes.NAMED if "all" in arguments.extra else dict.fromkeys(arguments.extra)
    cells = shapes.grid(arguments.head_dims, arguments.masks, arguments.seqlens)
    return cells + [cell for group in groups for cell in shapes.NAMED[group]]


def chosen_regimes(arguments: argparse.Namespace) -> list[Regime]:
    """The regimes that the arguments ask for."""
    regimes = [REGIMES[name] for name in dict.fromkeys(arguments.regimes)]
    return [
        replace(regime, block_ms=arguments.block_ms) if regime.name == "steady" else regime
        for regime in regimes
    ]


def chosen_providers(arguments: argparse.Namespace) -> tuple[list[Provider], dict[str, str]]:
    """The providers that can be imported, variants with them, and why others cannot."""
    found, missing = peers.find(arguments.providers)
    for variant in arguments.variant:
        name, _, target = variant.partition("=")
        if name in peers.PROVIDERS or ":" not in target:
            raise SystemExit(f"--variant wants NAME=MODULE:FUNCTION with a new name, got {variant}")
        found.append(peers.Variant(name, target))
    return found, missing


def find_pending(
    cells: Iterable[Cell],
    regimes: Sequence[Regime],
    providers: Sequence[Provider],
    data: str,
    rows: Sequence[Row],
) -> list[Pending]:
    """Cells that some provider has no row of yet, with the regimes in which that is so."""
    names = [provider.name for provider in providers]
    pending = []
    for cell in cells:
        missing = [
            regime
            for regime in regimes
            if not results.is_done(rows, cell.name, data, regime.name, names)
        ]
        if missing:
            pending.append(Pending(cell, missing))
    return pending


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


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


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
        return Verdict(FAILED, first_line(error))


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def check_cell(run: Run, cell: Cell) -> dict[str, Verdict]:
    """Compile and check a cell for every provider."""
    (tensors,) = harness.draw_inputs(cell, run.data, sets=1)
    reference = harness.Reference(cell, tensors)
    verdicts = {}
    for provider in run.providers:
        reason = provider.supports(cell)
        if reason:
            verdicts[provider.name] = Verdict(UNSUPPORTED, reason)
            continue

        def check(provider: Provider = provider) -> Verdict:
            errors = harness.check_provider(provider, cell, tensors, reference)
            return Verdict(OK, errors=errors)

        verdicts[provider.name] = attempt(check)
    return verdicts


def check_all(run: Run, pending: Sequence[Pending]) -> dict[str, dict[str, Verdict]]:
    """Compile and check all cells, as far as there is time; verdicts by cell and provider."""
    verdicts = {}
    with progress_bar(run.console) as progress:
        task = progress.add_task("check", total=len(pending))
        for cell, _ in pending:
            if not run.has_time_for(0):
                break
            progress.update(task, description=f"check {cell.name}")
            verdicts[cell.name] = check_cell(run, cell)
            for name, verdict in verdicts[cell.name].items():
                if verdict.status != OK:
                    progress.console.print(
                        f"{cell.name} {name}: {verdict.status}, {verdict.reason}", markup=False
                    )
            progress.advance(task)
    return verdicts


def make_contenders(run: Run, cell: Cell, verdicts: dict[str, Verdict]) -> list[Contender]:
    """Make everyone who passed the check ready; who fails now gets a new verdict."""
    inputs = harness.draw_inputs(cell, run.data, cell.num_sets)
    contenders = []
    for provider in run.providers:
        verdict = verdicts[provider.name]
        if verdict.status != OK:
            continue

        def make(provider: Provider = provider, verdict: Verdict = verdict) -> Verdict:
            contenders.append(harness.choose_runner(provider, cell, inputs))
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


def ratio_columns(name: str, ratio: Summary | None) -> dict[str, float]:
    if ratio is None:
        return {}
    return {name: ratio.median, f"{name}_q1": ratio.q1, f"{name}_q3": ratio.q3}


def make_rows(
    run: Run,
    cell: Cell,
    regime: Regime,
    verdicts: dict[str, Verdict],
    contenders: Sequence[Contender],
    blocks: dict[str, list[Block]],
    meter: Meter,
) -> list[Row]:
    """Turn the blocks of one cell and regime into rows, one for every provider."""
    times = {name: [block.us for block in found] for name, found in blocks.items()}
    by_name = {contender.provider.name: contender for contender in contenders}
    peer_names = [name for name in times if by_name[name].provider.is_peer]
    best_peer = min(peer_names, key=lambda name: summarise(times[name]).median, default="")
    rows = []
    for provider in run.providers:
        name, verdict = provider.name, verdicts[provider.name]
        contender = by_name.get(name)
        row = Row(
            cell=cell.name,
            group=cell.group,
            data=run.data,
            regime=regime.name,
            provider=name,
            status=verdict.status,
            reason=verdict.reason,
            version=provider.version,
            choice=contender.choice if contender else "",
            launch=contender.runner.launch if contender else "",
            batch=cell.batch,
            seqlen_q=cell.seqlen_q,
            seqlen_k=cell.seqlen_k,
            heads_q=cell.heads_q,
            heads_kv=cell.heads_kv,
            head_dim=cell.head_dim,
            head_dim_v=cell.head_dim_v,
            causal=cell.causal,
            window_left=cell.window_left,
            dtype=cell.dtype,
            max_error=verdict.errors.largest if verdict.errors else None,
            allowed_error=verdict.errors.allowed if verdict.errors else None,
        )
        if contender is None:
            rows.append(row)
            continue
        us = summarise(times[name])
        reading = read_blocks(meter, blocks[name])
        base = paired_speedup(times[name], times[BASE]) if BASE in times else None
        best = paired_speedup(times[name], times[best_peer]) if best_peer else None
        rows.append(
            replace(
                row,
                us=us.median,
                us_q1=us.q1,
                us_q3=us.q3,
                tflops=cell.flops / us.median / 1e6,
                gbps=cell.kv_bytes / us.median / 1e3,
                **ratio_columns("vs_fa3_cpp", base),
                best_peer=best_peer,
                **ratio_columns("vs_best_peer", best),
                sm_mhz=reading.sm_mhz,
                power_w=reading.power_w,
                throttle=reason_names(reading.reasons),
                joules=reading.joules,
                rounds_us=tuple(times[name]),
            )
        )
    return rows


def summary_line(rows: Sequence[Row]) -> str:
    """One line on a cell and regime that is done."""
    parts = [f"{row.provider} {report.rate_text(row)}" for row in rows]
    clocks = [row.sm_mhz for row in rows if row.sm_mhz]
    clock = f" [dim]at {min(clocks):.0f}-{max(clocks):.0f} MHz[/]" if clocks else ""
    return f"{rows[0].cell} {rows[0].regime}: " + ", ".join(parts) + clock


def measure_cell(
    run: Run, cell: Cell, regimes: Sequence[Regime], verdicts: dict[str, Verdict]
) -> Iterable[list[Row]]:
    """Time one cell; give the rows of each regime as it is done."""
    contenders = make_contenders(run, cell, verdicts)
    # The same order of providers whichever cells a resumed run still has to do.
    shuffle = random.Random(cell.name)
    for regime in regimes:
        meter = Meter(run.gauge)
        blocks = harness.measure(contenders, regime, run.rounds, shuffle, meter)
        yield make_rows(run, cell, regime, verdicts, contenders, blocks, meter)


def measure_all(
    run: Run, pending: Sequence[Pending], verdicts: dict[str, dict[str, Verdict]]
) -> int:
    """Time cells as far as there is time, and write their rows; return how many are left."""
    slowest = 0.0
    done = 0
    with progress_bar(run.console) as progress:
        task = progress.add_task("time", total=len(pending))
        for cell, regimes in pending:
            if cell.name not in verdicts or not run.has_time_for(slowest):
                break
            progress.update(task, description=f"time {cell.name}")
            begin = time.monotonic()
            for rows in measure_cell(run, cell, regimes, verdicts[cell.name]):
                results.append(run.csv, rows)
                progress.console.print(summary_line(rows), highlight=False)
            slowest = max(slowest, time.monotonic() - begin)
            done += 1
            progress.advance(task)
    return len(pending) - done


def measure_host(run: Run, like: Cell) -> dict[str, Summary]:
    """What a call costs the host, by provider, on a shape too small to keep the GPU busy."""
    tiny = replace(
        like,
        name="host",
        batch=1,
        seqlen_q=128,
        seqlen_k=128,
        heads_q=like.heads_q // like.heads_kv,
        heads_kv=1,
    )
    (tensors,) = harness.draw_inputs(tiny, "normal", sets=1)
    costs = {}
    for provider in run.providers:
        if provider.supports(tiny):
            continue

        def time_calls(provider: Provider = provider) -> Verdict:
            call = next(iter(provider.prepare(tiny, tensors).values()))
            costs[provider.name] = summarise(harness.host_microseconds(call))
            return Verdict(OK)

        verdict = attempt(time_calls)
        if verdict.status != OK:
            run.console.print(f"host {provider.name}: {verdict.reason}", markup=False)
    return costs


def print_report(console: Console, rows: Sequence[Row], regimes: Iterable[str]) -> None:
    """Print the cells of every regime, then what they come to."""
    by_regime = {regime: [row for row in rows if row.regime == regime] for regime in regimes}
    by_regime = {regime: found for regime, found in by_regime.items() if found}
    for regime, found in by_regime.items():
        console.print(report.cells_table(found, f"{regime}, TFLOP/s"))
    for regime, found in by_regime.items():
        console.print(report.standings_table(found, f"{regime}, geometric means over the grid"))


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def open_run(arguments: argparse.Namespace, console: Console) -> Run:
    """Find providers, make the results directory and describe the environment in it."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: only --list works here")
    torch.set_grad_enabled(False)
    deadline = time.monotonic() + arguments.max_minutes * 60
    providers, missing = chosen_providers(arguments)
    for name, reason in missing.items():
        console.print(f"without {name}: {reason}", markup=False)
    gpu = torch.cuda.get_device_properties(0)
    gauge, reason = open_gauge(f"GPU-{gpu.uuid}")
    if gauge is None:
        console.print(f"without clock, power and energy: {reason}", markup=False)
    out = arguments.out or Path(__file__).parent / "results" / environment.directory_name(
        gpu.name, datetime.date.today()
    )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "environment.json", environment.describe(providers, missing, gauge))
    return Run(
        console,
        providers,
        arguments.data,
        arguments.rounds,
        out / results.CSV_NAME,
        deadline,
        gauge,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    cells = chosen_cells(options)
    if options.list:
        console.print(cells_listing(cells))
        return
    run = open_run(options, console)
    done = results.read(run.csv) if options.resume else []
    regimes = chosen_regimes(options)
    pending = find_pending(cells, regimes, run.providers, options.data, done)
    left = 0
    if pending:
        verdicts = check_all(run, pending)
        costs = measure_host(run, pending[0].cell)
        write_json(
            run.csv.parent / "host.json",
            {name: cost._asdict() for name, cost in costs.items()},
        )
        left = measure_all(run, pending, verdicts)
        for name, cost in costs.items():
            console.print(
                f"host, us a call: {name} {cost.median:.1f} ({cost.q1:.1f}-{cost.q3:.1f})"
            )
    order = {cell.name: i for i, cell in enumerate(cells)}
    rows = [row for row in results.read(run.csv) if row.cell in order and row.data == options.data]
    rows.sort(key=lambda row: order[row.cell])
    print_report(console, rows, [regime.name for regime in regimes])
    for path in plot.draw_all(results.read(run.csv), run.csv.parent):
        console.print(path)
    console.print(run.csv)
    if left:
        console.print(f"{left} cells left: run the same command again")


if __name__ == "__main__":
    main()
