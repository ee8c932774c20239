"""Fit the planner's cost model to measured times: `python -m benchmarks.fit_costs DIR [DIR ...]`.

Takes every row of `schedules.csv`, and ours of `forward.csv`, in these results directories. The
cells are split in two halves; each half is predicted with parameters that were fitted to the
other one, and these errors are reported. What is written is fitted to all cells.

The fit takes least squares of the logarithms of times, with a weak pull of every parameter to its
prior. It first fits the rule for unmeasured tiles to all times. Each tile's own parameters follow,
pulled to what the rule says of them.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.cost_parameters import (
    Observation,
    Parameter,
    common_parameters,
    predicted_us,
    rule_parameters,
    tile_parameters,
)
from benchmarks.plans import can_run, cell_of, config_of, recorded_config
from benchmarks.problems import problem_of
from benchmarks.results import OK, Measurement, PlanRow, Row
from fa3.planning.costs import AGAIN, H200, H200_COSTS, Costs, Gpu, Rule, TileKey
from fa3.planning.decode import DecodePlan
from fa3.planning.planner import plan_forward

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


NOISE = 0.02
"""Relative error of a time that the fit takes as normal."""

ITERATIONS = 12
STEP = 1e-4
"""Change of a parameter by which its effect is found."""


def observe(row: Measurement, gpu: Gpu) -> Observation:
    """The observation that a row records."""
    problem = problem_of(cell_of(row))
    if isinstance(row, PlanRow):
        config, schedule = config_of(row), row.schedule
    else:
        config, schedule = recorded_config(row)
    plan = plan_forward(problem, gpu, config, schedule)
    segments = plan.schedule.segments(plan.tiled.blocks_of_tiles())
    return Observation(row.cell, row.regime, row.us, plan.tiled, schedule, segments)


def read_observations(directories: Iterable[Path], gpu: Gpu) -> list[Observation]:
    """Everything of ours that some results directories have, on normal data, in the forward
    kernel."""
    rows: list[Measurement] = []
    for directory in directories:
        ours = (row for row in results.read(directory / results.CSV_NAME, Row))
        rows += [row for row in ours if row.provider == "fa3" and row.choice != DecodePlan.name]
        rows += filter(can_run, results.read(directory / SCHEDULES_CSV, PlanRow))
    return [observe(row, gpu) for row in rows if row.status == OK and row.data == "normal"]


# ------------------------------------------------------------------------------------------ fit


def fit(costs: Costs, seen: Sequence[Observation], fitted: list[Parameter]) -> Costs:
    """Change some parameters of a model so that it predicts what was observed (Gauss-Newton)."""
    measured = np.log([observation.us for observation in seen])

    def misses(model: Costs, of: Sequence[int]) -> np.ndarray:
        return np.array([np.log(predicted_us(model, seen[i])) - measured[i] for i in of])

    everything = range(len(seen))
    values = np.array([parameter.of(costs) for parameter in fitted])
    priors = np.array([parameter.prior for parameter in fitted])
    spreads = np.array([parameter.spread for parameter in fitted])
    touched = [[i for i in everything if parameter.touches(seen[i])] for parameter in fitted]

    def with_values(values: np.ndarray) -> Costs:
        model = costs
        for parameter, value in zip(fitted, values, strict=True):
            model = parameter.put(model, value)
        return model

    def price(miss: np.ndarray, values: np.ndarray) -> float:
        return float(((miss / NOISE) ** 2).sum() + (((values - priors) / spreads) ** 2).sum())

    model = with_values(values)
    miss = misses(model, everything)
    for _ in range(ITERATIONS):
        slopes = np.zeros((len(seen), len(fitted)))
        for j, parameter in enumerate(fitted):
            moved = parameter.put(model, values[j] + STEP)
            slopes[touched[j], j] = (misses(moved, touched[j]) - miss[touched[j]]) / STEP
        pull = np.diag(1 / spreads)
        matrix = np.concatenate((slopes / NOISE, pull))
        aim = np.concatenate((-miss / NOISE, (priors - values) / spreads))
        step = np.linalg.lstsq(matrix, aim, rcond=None)[0]
        scale = 1.0
        while scale > 1e-3:
            tried = values + scale * step
            model_tried = with_values(tried)
            miss_tried = misses(model_tried, everything)
            if price(miss_tried, tried) <= price(miss, values):
                break
            scale /= 2
        else:
            break
        values, model, miss = tried, model_tried, miss_tried
    return model


def fit_all(start: Costs, seen: Sequence[Observation]) -> Costs:
    """Fit what all tiles have in common, then each tile's own parameters from there.

    Args:
        start: where the fit starts and what holds it. It has no tiles.
    """
    common = common_parameters(start, seen)
    ruled = fit(start, seen, [*common, *rule_parameters(start.rule)])
    cells: dict[TileKey, set[str]] = {}
    for observation in seen:
        cells.setdefault(observation.key, set()).add(observation.cell)
    tiles = {key: ruled.tile(key)._replace(cells=len(cells[key])) for key in sorted(cells)}
    tile_fits = [parameter for key in tiles for parameter in tile_parameters(key, tiles[key])]
    schedules = sorted({observation.schedule for observation in seen})
    known = replace(ruled, tiles=tiles, schedules=tuple(schedules))
    return fit(known, seen, [*common, *tile_fits])


def halves(seen: Sequence[Observation]) -> tuple[set[str], set[str]]:
    """The cells in two halves: every other one of those that run on the same tile and regime."""
    first_key: dict[str, TileKey] = {}
    for observation in seen:
        first_key.setdefault(observation.cell, observation.key)
    counts: dict[TileKey, int] = {}
    split: tuple[set[str], set[str]] = (set(), set())
    for cell, key in first_key.items():
        turn = counts[key] = counts.get(key, -1) + 1
        split[turn % 2].add(cell)
    return split


class Accuracy(NamedTuple):
    """Absolute relative errors: median, 90th percentile, largest; and of how many."""

    median: float
    p90: float
    largest: float
    times: int

    @classmethod
    def of(cls, found: Iterable[float]) -> "Accuracy":
        sizes = sorted(abs(error) for error in found)
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        return cls(statistics.median(sizes), p90, sizes[-1], len(sizes))

    def rounded(self) -> dict[str, float]:
        """The errors, for a file."""
        return {name: round(value, 4) for name, value in self._asdict().items() if name != "times"}

    def __str__(self) -> str:
        return (
            f"median {self.median:.1%}, 90% within {self.p90:.1%}, largest {self.largest:.1%} "
            f"({self.times} times)"
        )


def held_out_errors(start: Costs, seen: Sequence[Observation]) -> list[tuple[Observation, float]]:
    """Errors of both halves, each predicted from the other."""
    found = []
    first, second = halves(seen)
    for learn, test in ((first, second), (second, first)):
        model = fit_all(start, [observation for observation in seen if observation.cell in learn])
        found += errors(model, [observation for observation in seen if observation.cell in test])
    return found


def errors(costs: Costs, seen: Iterable[Observation]) -> list[tuple[Observation, float]]:
    """The relative error of the time that is predicted for each observation."""
    return [(one, predicted_us(costs, one) / one.us - 1) for one in seen]


# --------------------------------------------------------------------------------------- report


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


def text_of(costs: Costs) -> str:
    """Parameters as JSON, one line per tile."""

    def rounded(values: NamedTuple) -> dict:
        return {name: round(value, 6) for name, value in values._asdict().items()}

    content = vars(costs) | {
        "bytes_per_us": round(costs.bytes_per_us),
        "launch_us": round(costs.launch_us, 3),
        "unit_us": {name: round(us, 3) for name, us in costs.unit_us.items()},
        "call_us": {name: round(us, 3) for name, us in costs.call_us.items()},
        "rule": rounded(costs.rule),
    }
    tiles = ",\n".join(
        "    " + json.dumps({"tile": key._asdict(), "costs": rounded(costs.tiles[key])})
        for key in sorted(costs.tiles)
    )
    text = json.dumps(content | {"tiles": "TILES"}, indent=2)
    return text.replace('"TILES"', f"[\n{tiles}\n  ]") + "\n"


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
