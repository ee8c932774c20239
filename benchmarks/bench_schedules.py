"""Measure every way to run a problem, and hold the planner's choice against them.

    python -m benchmarks.bench_schedules             # on a GPU: measure and report
    python -m benchmarks.bench_schedules --compile   # anywhere: fill the kernel cache
    python -m benchmarks.bench_schedules --report DIR [DIR ...]   # anywhere: judge a record

A way to run a problem is a schedule, a tiling of the planner's table, and CTAs alone, in pairs of
rows or in pairs of heads. Regret is the planner's time over the best time, minus 1.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import regret, results, runs, shapes
from benchmarks.cost_parameters import predicted_us
from benchmarks.fit_costs import SCHEDULES_CSV, observe
from benchmarks.plans import Planned, all_plans, can_run
from benchmarks.problems import present_gpu, problem_of
from benchmarks.results import PlanRow
from benchmarks.runs import Timed
from benchmarks.shapes import Cell
from fa3.kernels.forward import Forward
from fa3.running.compiler import load_kernel

SHAPES = ["grid", "low-wave"]
HEAD_DIMS = [64, 128, 256]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_schedules",
        description="Measure every way to run a problem, and the regret of the planner's choice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes.CHOICES, default=SHAPES,
        help="groups of cells to measure",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT",
        help="only plans whose names contain one of these, like list or 128x128",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="compile the kernels that are not cached, and stop"
    )
    parser.add_argument(
        "--report", nargs="+", type=Path, default=[], metavar="DIR",
        help="judge these results by the present planner, and stop; pictures go to the first",
    )  # fmt: skip
    runs.add_options(parser)
    return parser.parse_args(arguments)


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that the options ask for."""
    grid = shapes.grid(HEAD_DIMS, list(shapes.MASKS), list(shapes.SEQLENS))
    return runs.with_names_like(shapes.choose(options.shapes, grid), options.cells)


@functools.cache
def plans_of(cell: Cell, only: tuple[str, ...]) -> list[Planned]:
    """The plans to measure on a cell."""
    plans = all_plans(problem_of(cell), present_gpu()).values()
    return [Planned(plan) for plan in plans if not only or any(text in plan.name for text in only)]


def compile_all(cells: Sequence[Cell], only: tuple[str, ...], console: Console) -> None:
    """Compile every kernel that the cells need, in processes side by side."""
    plans = [one.plan for cell in cells for one in plans_of(cell, only)]
    recompute = [plan.recompute for plan in plans if plan.recompute]
    kernels = dict.fromkeys(plan.kernel() for plan in (*plans, *recompute))
    with runs.progress_bar(console) as progress:
        task = progress.add_task("compile", total=len(kernels))
        for kernel, error in zip(kernels, runs.in_processes(compile_one, kernels), strict=True):
            if error:
                progress.console.print(f"{kernel}: {error}", markup=False)
            progress.advance(task)


def compile_one(kernel: Forward) -> str:
    """Put a kernel into the cache on disk; return what went wrong, if anything."""
    try:
        load_kernel(kernel)
    except Exception as error:
        return runs.first_line(error)
    return ""


def make_rows(timed: Timed) -> list[PlanRow]:
    """Turn the blocks of one cell and regime into rows, one for every plan."""
    rows = []
    for provider in timed.job.providers:
        plan = provider.plan
        rows.append(
            PlanRow(
                **timed.columns(provider),
                schedule=plan.schedule.name,
                tile_m=plan.config.tile_m,
                tile_n=plan.config.tile_n,
                q_stages=plan.config.q_stages,
                kv_stages=plan.config.kv_stages,
                cluster_m=plan.config.cluster_m,
                own_o=plan.config.own_o,
                cluster_h=plan.config.cluster_h,
                fixed_reference=plan.config.fixed_row_max,
                predicted_us=regret.in_regime(plan.predict(), timed.regime.name),
            )
        )
    return rows


def summary_line(rows: Sequence[PlanRow]) -> str:
    """One line on a cell and regime that is done."""
    parts = [f"{row.provider} {row.us:.1f}" if row.us else row.provider for row in rows]
    return f"{rows[0].cell} {rows[0].regime}, us: " + ", ".join(parts) + runs.clock_text(rows)


def report(console: Console, directories: Sequence[Path]) -> None:
    """Judge what some directories hold; tables to the console, picture and table to the first."""
    gpu = present_gpu()
    rows = [row for path in directories for row in results.read(path / SCHEDULES_CSV, PlanRow)]
    verdicts = regret.judge(rows, gpu)
    if not verdicts:
        console.print("nothing was measured")
        return
    for regime in dict.fromkeys(verdict.regime for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.regime == regime]
        console.print(regret.cells_table(found, f"{regime}, the planner's choice"))
    for regime in dict.fromkeys(verdict.regime for verdict in verdicts):
        found = [verdict for verdict in verdicts if verdict.regime == regime]
        console.print(f"{regime}: {regret.describe(regret.standing(found))}")
    timed = [row for found in regret.by_cell(rows).values() for row in found if can_run(row)]
    predicted = [predicted_us(gpu.costs, observe(row, gpu)) for row in timed]
    regret.draw(timed, predicted, verdicts, directories[0] / "schedules.png")
    (directories[0] / "schedules.md").write_text(regret.markdown(verdicts))
    console.print(directories[0] / "schedules.png")
    console.print(directories[0] / "schedules.md")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = runs.make_console()
    if options.report:
        report(console, options.report)
        return
    cells = chosen_cells(options)
    if options.list:
        console.print(runs.cells_listing(cells))
        return
    only = tuple(options.only)
    if options.compile:
        compile_all(cells, only, console)
        return
    runs.need_gpu()
    run = runs.open_run(options, console, SCHEDULES_CSV, [], {})
    done = results.read(run.csv, PlanRow) if options.resume else []
    regimes = runs.chosen_regimes(options)
    jobs = runs.find_jobs(cells, regimes, lambda cell: plans_of(cell, only), options.data, done)
    left = 0
    if jobs:
        compile_all([job.cell for job in jobs], only, console)
        left = runs.check_and_measure(run, jobs, make_rows, summary_line)
    report(console, [run.csv.parent])
    console.print(run.csv)
    if left:
        console.print(f"{left} cells left: run the same command again")


if __name__ == "__main__":
    main()
