"""Measured times of plans, and the numbers of the cost model that are fitted to them.

`benchmarks.fit_costs` fits them. Each number is pulled to a prior; its spread says how strongly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fa3.planning.costs import AGAIN, Costs, Rule, TileCosts, TileKey
from fa3.planning.prediction import Load, predict, unit_name
from fa3.planning.tilings import TiledProblem
from fa3.schedules.order import Segments

REFERENCE_SCHEDULE = "list"
"""What other schedules add to a unit of work is counted from this one."""


class Observation(NamedTuple):
    """A measured time and what it was measured on.

    Fields:
        cell: name of the problem; observations of one name are held out together.
        regime: "burst", at full clock after idleness, or "steady", under the power cap.
        us: microseconds of a call.
    """

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
        return touches(seen) and bool(np.any(seen.segments.partial))

    def parameter(name: str, spread: float, touches: Callable = touches) -> Parameter:
        def put(costs: Costs, value: float) -> Costs:
            tile = costs.tiles[key]
            if name == "full_us":
                ratio = tile.masked_us / tile.full_us
                tile = tile._replace(full_us=value, masked_us=value * ratio)
            else:
                changed: dict[str, Any] = {name: value}
                tile = tile._replace(**changed)
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
    if not all(observation.key.online_max for observation in seen):
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
        changed: dict[str, Any] = {table: {**getattr(costs, table), name: value}}
        return replace(costs, **changed)

    spread = max(0.2, 0.3 * of(prior))
    return Parameter(of, put, of(prior), spread, lambda observation: name_of(observation) == name)


def of_second_launch(prior: Costs) -> Parameter:
    """What the launch adds that finds no marked tile."""
    return on_log_scale(
        lambda costs: costs.call_us[AGAIN],
        lambda costs, value: replace(costs, call_us={**costs.call_us, AGAIN: value}),
        prior.call_us[AGAIN],
        0.3,
        lambda observation: not observation.key.online_max,
    )


def comparable_schedules(seen: Sequence[Observation]) -> list[str]:
    """The schedules that were measured next to the baseline on some cell and tile."""
    places: dict[str, set] = {}
    for observation in seen:
        place = observation.cell, observation.key
        places.setdefault(observation.schedule, set()).add(place)
    reference = places.pop(REFERENCE_SCHEDULE, set())
    return sorted(name for name, found in places.items() if found & reference)
