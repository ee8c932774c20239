"""Fits the cost model to measured times: least squares of the logarithms of times, with a weak pull
of every parameter to its prior.

A fit from nothing (`benchmarks.fit_costs`) first fits the rule for unmeasured tiles to all of them;
a fit from costs that are there (`fa3.tools.tuning`) first scales all of these to the GPU. Each
tile's own parameters follow, pulled to what the first step says of them.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fa3.planning.costs import Costs
from fa3.planning.observation import Observation, predicted_us
from fa3.planning.parameters import (
    Parameter,
    common_parameters,
    rule_parameters,
    scale_parameters,
    tile_parameters,
)
from fa3.planning.tile_costs import TileCosts, TileKey

NOISE = 0.02
"""Relative error of a time that the fit takes as normal."""

ITERATIONS = 12
STEP = 1e-4
"""Change of a parameter by which its effect is found."""


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
        start: where the fit starts and what holds it. Of its tiles those that were not observed
            stay, scaled like the others; without tiles, the rule for all of them is fitted.
    """
    common = common_parameters(start, seen)
    of_all = scale_parameters(start) if start.tiles else rule_parameters(start.rule)
    ruled = fit(start, seen, [*common, *of_all])
    cells: dict[TileKey, set[str]] = {}
    for observation in seen:
        cells.setdefault(observation.key, set()).add(observation.cell)
    keys = sorted(cells)
    schedules = {*start.schedules, *(observation.schedule for observation in seen)}
    tiles = {key: seen_on(len(cells[key]), ruled.tile(key)) for key in keys}
    of_tiles = [parameter for key in keys for parameter in tile_parameters(key, tiles[key])]
    known = replace(ruled, tiles={**ruled.tiles, **tiles}, schedules=tuple(sorted(schedules)))
    return fit(known, seen, [*common, *of_tiles])


def seen_on(cells: int, tile: TileCosts) -> TileCosts:
    """A tile's costs, measured on so many more cells."""
    return tile._replace(cells=tile.cells + cells)


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
