"""Fit the planner's cost model to measured times: `python -m benchmarks.fit_costs DIR [DIR ...]`.

Takes every row of `schedules.csv`, and ours of `forward.csv`, in these results directories. The
cells are split in two halves; each half is predicted with parameters that were fitted to the
other one, and these errors are reported. What is written is fitted to all cells.

`fa3.planning.fit` fits them, as it does for `python -m fa3 tune`; here it starts from nothing.
"""

import argparse
import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import results
from benchmarks.plans import can_run, cell_of, config_of, recorded_config
from benchmarks.problems import problem_of
from benchmarks.results import OK, Measurement, PlanRow, Row
from fa3.planning.costs import AGAIN, H200_COSTS, Costs, text_of
from fa3.planning.fit import Accuracy, errors, fit_all, held_out_errors
from fa3.planning.gpu import H200, Gpu
from fa3.planning.grouped import GroupedPlan
from fa3.planning.observation import Observation
from fa3.planning.tile_costs import Rule

SCHEDULES_CSV = "schedules.csv"

START = Costs(
    gpu=H200.name,
    measured=True,
    source={},
    schedules=(),
    bytes_per_us=4_300_000,
    launch_us=1.5,
    unit_us={"single": 1.5, "single in pairs": 1.5},
    call_us={"split": 1.0, AGAIN: 1.0},
    memory_power=0.3,
    tiles={},
    rule=Rule(
        tensor=0.00055,
        exponential=0.0004,
        masked=1.3,
        tile_us=1.2,
        steady=1.14,
        part_us=2.0,
        fixed=0.92,
    ),
)
"""Where a fit starts and what holds it: bandwidth of a device-to-device copy; what a tile costs
more with one tile a CTA (d128 causal 2k and 8k: 1.4 to 1.6 us), what a part takes to be left, and
a call to merge its last parts, and blocks without maxima, all from docs/experiments.md; the rest
by rough count."""


def observe(row: Measurement, gpu: Gpu) -> Observation:
    """The observation that a row records."""
    problem = problem_of(cell_of(row))
    if isinstance(row, PlanRow):
        config, schedule = config_of(row), row.schedule
    else:
        config, schedule = recorded_config(row)
    return Observation.of(row.cell, row.regime, row.us, problem, gpu, config, schedule)


def read_observations(directories: Iterable[Path], gpu: Gpu) -> list[Observation]:
    """Everything of ours that some results directories have, on normal data, in the forward
    kernel."""
    rows: list[Measurement] = []
    for directory in directories:
        ours = (row for row in results.read(directory / results.CSV_NAME, Row))
        rows += [row for row in ours if row.provider == "fa3" and row.choice != GroupedPlan.name]
        rows += filter(can_run, results.read(directory / SCHEDULES_CSV, PlanRow))
    return [observe(row, gpu) for row in rows if row.status == OK and row.data == "normal"]


def describe_source(directories: Sequence[Path], held_out: Accuracy, cells: int) -> dict:
    """Where a model's parameters come from, for its file."""
    environments = {}
    for directory in directories:
        path = directory / "environment.json"
        if path.exists():
            content = json.loads(path.read_text())
            wanted = ("date", "gpu", "driver", "cuda", "torch", "packages", "git_commit")
            environments[directory.name] = {name: content.get(name) for name in wanted}
    return {
        "fitted": datetime.date.today().isoformat(),
        "cells": cells,
        "times": held_out.times,
        "held_out_error": held_out.rounded(),
        "results": environments,
    }


def report(found: Sequence[tuple[Observation, float]]) -> None:
    """Print held-out errors: all, by regime, by schedule, and the worst ones."""
    print(f"held out: {Accuracy.of(error for _, error in found)}")
    for regime in sorted({observation.regime for observation, _ in found}):
        chosen = [error for observation, error in found if observation.regime == regime]
        print(f"  {regime}: {Accuracy.of(chosen)}")
    for schedule in sorted({observation.schedule for observation, _ in found}):
        chosen = [error for observation, error in found if observation.schedule == schedule]
        print(f"  {schedule}: {Accuracy.of(chosen)}")
    worst = sorted(found, key=lambda item: -abs(item[1]))[:8]
    for observation, error in worst:
        key = observation.key
        tile = f"{key.tile_m}x{key.tile_n}x{key.cluster}"
        print(
            f"  {error:+.1%}  {observation.cell} {observation.regime}, {observation.schedule} "
            f"{tile}: {observation.us:.1f} us measured"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_costs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=H200_COSTS, help="the model's file (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    seen = read_observations(options.directories, H200)
    held_out = held_out_errors(START, seen)
    report(held_out)
    model = fit_all(START, seen)
    print(f"fitted to all: {Accuracy.of(error for _, error in errors(model, seen))}")
    accuracy = Accuracy.of(error for _, error in held_out)
    cells = len({observation.cell for observation in seen})
    source = describe_source(options.directories, accuracy, cells)
    options.out.write_text(text_of(replace(model, measured=True, source=source)))
    print(options.out)


if __name__ == "__main__":
    main()
