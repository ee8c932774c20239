"""Measure forward attention beside its peers: `python -m benchmarks.bench_forward`.

Every pending cell is first compiled and checked for all providers, then timed. Rows are written
as each cell is done, so a run that ends early goes on where it stopped.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console

from benchmarks import harness, peers, plot, report, results, runs, shapes
from benchmarks.peers import Provider
from benchmarks.ratios import Summary, paired_speedup, summarise
from benchmarks.results import OK, Row
from benchmarks.runs import Run, Timed, Verdict
from benchmarks.shapes import Cell

BASE = "fa3-cpp"
"""The peer that every provider is compared with."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_forward",
        description="Measure forward attention beside its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes.CHOICES, default=["grid"],
        help="groups of cells to measure",
    )  # fmt: skip
    parser.add_argument(
        "--head-dims", type=int, nargs="+", choices=shapes.HEAD_DIMS, default=[64, 128, 256],
        help="head dimensions of the grid",
    )  # fmt: skip
    parser.add_argument("--masks", nargs="+", choices=shapes.MASKS, default=list(shapes.MASKS))
    parser.add_argument(
        "--seqlens", type=int, nargs="+", default=list(shapes.SEQLENS), metavar="N",
        help="sequence lengths of the grid",
    )  # fmt: skip
    parser.add_argument(
        "--providers", nargs="+", choices=list(peers.PROVIDERS), default=list(peers.PROVIDERS),
        help="whom to measure, as far as they can be imported",
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=MODULE:FUNCTION",
        help="measure also what FUNCTION(cell, q, k, v) returns; can be repeated",
    )  # fmt: skip
    runs.add_options(parser)
    return parser.parse_args(arguments)


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for."""
    grid = shapes.grid(options.head_dims, options.masks, options.seqlens)
    return runs.with_names_like(shapes.choose(options.shapes, grid), options.cells)


def chosen_providers(options: argparse.Namespace) -> tuple[list[Provider], dict[str, str]]:
    """The providers that can be imported, variants with them, and why others cannot."""
    found, missing = peers.find(options.providers)
    for variant in options.variant:
        name, _, target = variant.partition("=")
        if name in peers.PROVIDERS or ":" not in target:
            raise SystemExit(f"--variant wants NAME=MODULE:FUNCTION with a new name, got {variant}")
        found.append(peers.Variant(name, target))
    return found, missing


def ratio_columns(name: str, ratio: Summary | None) -> dict[str, float]:
    if ratio is None:
        return {}
    return {name: ratio.median, f"{name}_q1": ratio.q1, f"{name}_q3": ratio.q3}


def make_rows(timed: Timed) -> list[Row]:
    """Turn the blocks of one cell and regime into rows, one for every provider."""
    times = {name: timed.times(name) for name in timed.blocks}
    peer_names = [name for name in times if timed.contenders[name].provider.is_peer]
    best_peer = min(peer_names, key=lambda name: summarise(times[name]).median, default="")
    rows = []
    for provider in timed.job.providers:
        columns = timed.columns(provider)
        if provider.name in times:
            own = times[provider.name]
            base = paired_speedup(own, times[BASE]) if BASE in times else None
            best = paired_speedup(own, times[best_peer]) if best_peer else None
            columns |= {
                **ratio_columns("vs_fa3_cpp", base),
                "best_peer": best_peer,
                **ratio_columns("vs_best_peer", best),
            }
        rows.append(Row(**columns))
    return rows


def summary_line(rows: Sequence[Row]) -> str:
    """One line on a cell and regime that is done."""
    parts = [f"{row.provider} {report.rate_text(row)}" for row in rows]
    return f"{rows[0].cell} {rows[0].regime}: " + ", ".join(parts) + runs.clock_text(rows)


def tiny_cell(like: Cell) -> Cell:
    """A cell too small to keep the GPU busy."""
    heads = like.heads_q // like.heads_kv
    sizes = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads_q": heads, "heads_kv": 1}
    return replace(like, name="host", **sizes)


def measure_host(
    run: Run, providers: Sequence[Provider], tiny: Cell, json_name: str = "host.json"
) -> dict[str, Summary]:
    """Measure and keep what a call costs the host, by provider."""
    (tensors,) = harness.draw_inputs(tiny, "normal", sets=1)
    costs = {}
    for provider in providers:
        if provider.supports(tiny):
            continue

        def time_calls(provider: Provider = provider) -> Verdict:
            call = next(iter(provider.prepare(tiny, tensors).values()))
            costs[provider.name] = summarise(harness.host_microseconds(call))
            return Verdict(OK)

        verdict = runs.attempt(time_calls)
        if verdict.status != OK:
            run.console.print(f"host {provider.name}: {verdict.reason}", markup=False)
    runs.write_json(
        run.csv.parent / json_name, {name: cost._asdict() for name, cost in costs.items()}
    )
    return costs


def print_host(console: Console, costs: dict[str, Summary]) -> None:
    for name, cost in costs.items():
        console.print(f"host, us a call: {name} {cost.median:.1f} ({cost.q1:.1f}-{cost.q3:.1f})")


def print_report(console: Console, rows: Sequence[Row], regimes: Iterable[str]) -> None:
    """Print the cells of every regime, then what they come to."""
    by_regime = {regime: [row for row in rows if row.regime == regime] for regime in regimes}
    by_regime = {regime: found for regime, found in by_regime.items() if found}
    for regime, found in by_regime.items():
        console.print(report.cells_table(found, f"{regime}, TFLOP/s"))
    for regime, found in by_regime.items():
        console.print(report.standings_table(found, f"{regime}, geometric means over the grid"))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = runs.make_console()
    cells = chosen_cells(options)
    if options.list:
        console.print(runs.cells_listing(cells))
        return
    runs.need_gpu()
    providers, missing = chosen_providers(options)
    for name, reason in missing.items():
        console.print(f"without {name}: {reason}", markup=False)
    run = runs.open_run(options, console, results.CSV_NAME, providers, missing)
    done = results.read(run.csv) if options.resume else []
    regimes = runs.chosen_regimes(options)
    jobs = runs.find_jobs(cells, regimes, lambda cell: providers, options.data, done)
    left = 0
    if jobs:
        verdicts = runs.check_all(run, jobs)
        costs = measure_host(run, providers, tiny_cell(jobs[0].cell))
        left = runs.measure_all(run, jobs, verdicts, make_rows, summary_line)
        print_host(console, costs)
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
