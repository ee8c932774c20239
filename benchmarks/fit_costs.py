"""Fit the planner's cost model to measured times: `python -m benchmarks.fit_costs DIR [DIR ...]`.

Takes every row of `schedules.csv`, and ours of `forward.csv`, in these results directories. The
cells are split in two halves; each half is predicted with parameters that were fitted to the
other one, and these errors are reported. What is written is fitted to all cells.

Least squares of the logarithms of times, with a weak pull: of a tile's parameters to what the rule
for unmeasured tiles says, and of the rest to where they were. The rule is fitted first.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.plans import can_run, cell_of, config_of, recorded_config
from benchmarks.problems import problem_of
from benchmarks.results import OK, Measurement, PlanRow, Row
from fa3.planning.costs import AGAIN, H200_COSTS, Costs, Rule, TileCosts, TileKey, write_costs
from fa3.planning.gpu import H200, Gpu
from fa3.planning.load import Load, Segments, segments_of
from fa3.planning.planner import plan_forward
from fa3.planning.prediction import predict, unit_name
from fa3.planning.tiled import TiledProblem

SCHEDULES_CSV = "schedules.csv"

NOISE = 0.02
"""Relative error of a time that the fit takes as normal."""

ITERATIONS = 12
STEP = 1e-4
"""Change of a parameter by which its effect is found."""

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

REFERENCE_SCHEDULE = "list"
"""What other schedules add to a unit of work is counted from this one."""


class Observation(NamedTuple):
    """A measured time and what it was measured on."""

    cell: str
    regime: str
    us: float
    tiled: TiledProblem
    schedule: str
    segments: Segments

    @property
    def key(self) -> TileKey:
        return self.tiled.key

    @property
    def unit_name(self) -> str:
        return unit_name(self.schedule, self.tiled.config)


def predicted_us(costs: Costs, seen: Observation) -> float:
    """What a cost model says of an observation."""
    load = Load.of(seen.segments, costs.tile(seen.key), seen.tiled.lanes)
    prediction = predict(costs, seen.tiled, seen.schedule, load)
    return prediction.us if seen.regime == "steady" else prediction.burst_us


def observe(row: Measurement, gpu: Gpu) -> Observation:
    """The observation that a row records."""
    problem = problem_of(cell_of(row))
    if isinstance(row, PlanRow):
        config, schedule = config_of(row), row.schedule
    else:
        config, schedule = recorded_config(row)
    plan = plan_forward(problem, gpu, config, schedule)
    return Observation(
        row.cell, row.regime, row.us, plan.tiled, schedule, segments_of(plan.tiled, plan.schedule)
    )


def read_observations(directories: Iterable[Path], gpu: Gpu) -> list[Observation]:
    """Everything of ours that some results directories have, on normal data."""
    rows: list[Measurement] = []
    for directory in directories:
        ours = (row for row in results.read(directory / results.CSV_NAME, Row))
        rows += [row for row in ours if row.provider == "fa3"]
        rows += filter(can_run, results.read(directory / SCHEDULES_CSV, PlanRow))
    return [observe(row, gpu) for row in rows if row.status == OK and row.data == "normal"]


@dataclass(frozen=True)
class Parameter:
    """One number of a cost model that is fitted.

    Fields:
        of: reads it from a model. put: gives a model with another value.
        prior: where it is pulled to. spread: how far it may go for the price of one `NOISE`.
        touches: whether an observation depends on it.
    """

    of: Callable[[Costs], float]
    put: Callable[[Costs, float], Costs]
    prior: float
    spread: float
    touches: Callable[[Observation], bool]


def on_log_scale(
    of: Callable[[Costs], float],
    put: Callable[[Costs, float], Costs],
    prior: float,
    spread: float,
    touches: Callable[[Observation], bool] = lambda seen: True,
) -> Parameter:
    """A positive parameter: fitted by its logarithm, `spread` is relative."""
    return Parameter(
        lambda costs: float(np.log(of(costs))),
        lambda costs, value: put(costs, float(np.exp(value))),
        float(np.log(prior)),
        spread,
        touches,
    )


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


def rule_parameters(prior: Rule) -> list[Parameter]:
    """The rule for tiles that were not measured."""

    def parameter(name: str, spread: float) -> Parameter:
        return on_log_scale(
            lambda costs: getattr(costs.rule, name),
            lambda costs, value: replace(costs, rule=costs.rule._replace(**{name: value})),
            getattr(prior, name),
            spread,
        )

    spreads = {"steady": 0.02, "fixed": 0.03}
    return [parameter(name, spreads.get(name, 0.2)) for name in Rule._fields]


def tile_parameters(key: TileKey, prior: TileCosts) -> list[Parameter]:
    """The times of one tile. A masked block is fitted by its ratio to a full one."""

    def touches(seen: Observation) -> bool:
        return seen.key == key

    def splits(seen: Observation) -> bool:
        return touches(seen) and seen.segments.num_partial > 0

    def parameter(name: str, spread: float, touches: Callable = touches) -> Parameter:
        def put(costs: Costs, value: float) -> Costs:
            tile = costs.tiles[key]
            if name == "full_us":
                ratio = tile.masked_us / tile.full_us
                tile = tile._replace(full_us=value, masked_us=value * ratio)
            else:
                tile = tile._replace(**{name: value})
            return replace(costs, tiles={**costs.tiles, key: tile})

        return on_log_scale(
            lambda costs: getattr(costs.tiles[key], name),
            put,
            getattr(prior, name),
            spread,
            touches,
        )

    ratio = prior.masked_us / prior.full_us
    masked = on_log_scale(
        lambda costs: costs.tiles[key].masked_us / costs.tiles[key].full_us,
        lambda costs, value: replace(
            costs,
            tiles={
                **costs.tiles,
                key: costs.tiles[key]._replace(masked_us=value * costs.tiles[key].full_us),
            },
        ),
        ratio,
        0.1,
        touches,
    )
    return [
        parameter("full_us", 0.1),
        masked,
        parameter("tile_us", 0.25),
        parameter("steady", 0.02),
        parameter("part_us", 0.25, splits),
    ]


def common_parameters(prior: Costs, seen: Sequence[Observation]) -> list[Parameter]:
    """Bandwidth, launch, and what schedules add to a unit of work."""
    found = [
        on_log_scale(
            lambda costs: costs.bytes_per_us,
            lambda costs, value: replace(costs, bytes_per_us=value),
            prior.bytes_per_us,
            0.05,
        ),
        on_log_scale(
            lambda costs: costs.launch_us,
            lambda costs, value: replace(costs, launch_us=value),
            prior.launch_us,
            0.1,
        ),
    ]
    for name in comparable_schedules(seen):
        # A split schedule's units are few and of many sizes: it costs more by the call.
        if name in prior.call_us:
            found.append(of_schedule(name, "call_us", prior, lambda one: one.schedule))
            continue
        places = {one.unit_name for one in seen if one.schedule == name}
        for place in sorted(places):
            found.append(of_schedule(place, "unit_us", prior, lambda one: one.unit_name))
    if not all(observation.key.follows for observation in seen):
        found.append(of_second_launch(prior))
    found.append(
        on_log_scale(
            lambda costs: costs.memory_power,
            lambda costs, value: replace(costs, memory_power=value),
            prior.memory_power,
            0.5,
            lambda observation: observation.regime == "steady",
        )
    )
    return found


def of_schedule(
    name: str, table: str, prior: Costs, name_of: Callable[[Observation], str]
) -> Parameter:
    """What a schedule adds, in one of a model's tables by schedule; microseconds.

    `name_of` gives the entry that an observation depends on.
    """

    def of(costs: Costs) -> float:
        return getattr(costs, table).get(name, 0.0)

    def put(costs: Costs, value: float) -> Costs:
        return replace(costs, **{table: {**getattr(costs, table), name: value}})

    spread = max(0.2, 0.3 * of(prior))
    return Parameter(of, put, of(prior), spread, lambda observation: name_of(observation) == name)


def of_second_launch(prior: Costs) -> Parameter:
    """What the launch adds that finds no marked tile."""
    return on_log_scale(
        lambda costs: costs.call_us[AGAIN],
        lambda costs, value: replace(costs, call_us={**costs.call_us, AGAIN: value}),
        prior.call_us[AGAIN],
        0.3,
        lambda observation: not observation.key.follows,
    )


def comparable_schedules(seen: Sequence[Observation]) -> list[str]:
    """The schedules that were measured beside the reference on some cell and tile."""
    places: dict[str, set] = {}
    for observation in seen:
        place = observation.cell, observation.key
        places.setdefault(observation.schedule, set()).add(place)
    reference = places.pop(REFERENCE_SCHEDULE, set())
    return sorted(name for name, found in places.items() if found & reference)


def fit_all(start: Costs, seen: Sequence[Observation]) -> Costs:
    """Fit the rule to all tiles, then each tile's own parameters from there."""
    common = common_parameters(start, seen)
    ruled = fit(replace(start, tiles={}), seen, [*common, *rule_parameters(start.rule)])
    cells: dict[TileKey, set[str]] = {}
    for observation in seen:
        cells.setdefault(observation.key, set()).add(observation.cell)
    keys = sorted(cells)
    schedules = tuple(sorted({observation.schedule for observation in seen}))
    tiles = {key: ruled.rule.tile(key)._replace(cells=len(cells[key])) for key in keys}
    of_tiles = [parameter for key in keys for parameter in tile_parameters(key, tiles[key])]
    known = replace(ruled, tiles=tiles, schedules=schedules)
    return fit(known, seen, [*common, *of_tiles])


def halves(seen: Sequence[Observation]) -> tuple[set[str], set[str]]:
    """The cells in two halves: every other one of those that run on the same tile and regime."""
    first_key = {}
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
    count: int

    @classmethod
    def of(cls, found: Iterable[float]) -> "Accuracy":
        sizes = sorted(abs(error) for error in found)
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        return cls(statistics.median(sizes), p90, sizes[-1], len(sizes))

    def __str__(self) -> str:
        return (
            f"median {self.median:.1%}, 90% within {self.p90:.1%}, largest {self.largest:.1%} "
            f"({self.count} times)"
        )


def held_out_errors(start: Costs, seen: Sequence[Observation]) -> list[tuple[Observation, float]]:
    """Errors of both halves, each predicted from the other."""
    found = []
    first, second = halves(seen)
    for learn, test in ((first, second), (second, first)):
        model = fit_all(start, [observation for observation in seen if observation.cell in learn])
        tested = [observation for observation in seen if observation.cell in test]
        found += [
            (observation, predicted_us(model, observation) / observation.us - 1)
            for observation in tested
        ]
    return found


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
        "times": held_out.count,
        "held_out_error": {
            name: round(value, 4) for name, value in held_out._asdict().items() if name != "count"
        },
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
    fitted = [predicted_us(model, observation) / observation.us - 1 for observation in seen]
    print(f"fitted to all: {Accuracy.of(fitted)}")
    accuracy = Accuracy.of(error for _, error in held_out)
    cells = len({observation.cell for observation in seen})
    source = describe_source(options.directories, accuracy, cells)
    write_costs(replace(model, measured=True, source=source), options.out)
    print(options.out)


if __name__ == "__main__":
    main()
