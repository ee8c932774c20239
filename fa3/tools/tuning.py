"""Tunes the planner to a GPU: measures the candidates for some shapes, and fits the cost model.

`fa3.tools.tune_command` calls `measure_shapes`, which adds to a record of times, and `fit_times`,
which fits to all of it. The fit starts from the costs that come with fa3: tiles that were measured
get times of their own, the others are scaled as these are.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from fa3.planning.costs import Costs
from fa3.planning.explanation import describe_problem
from fa3.planning.fit import Accuracy, errors, fit_all, halves, held_out_errors
from fa3.planning.gpu import Gpu
from fa3.planning.observation import Observation
from fa3.planning.plan import Plan
from fa3.planning.planner import CHOICES, candidates, plan_forward
from fa3.problem import AttentionSpec, Problem
from fa3.scores.masks import Band
from fa3.tools.models import Model
from fa3.tools.plan_times import PlanTime, PlanTimes, digest_of_sources

HOPELESS = 1.5
"""Candidates that are predicted to take so many times the best one's time are not measured."""

TUNED_SIZES = (
    (1, 4096, 4096), (1, 1024, 1024), (4, 2048, 2048), (1, 128, 4096), (1, 16384, 16384),
    (4, 512, 512), (1, 512, 8192), (1, 512, 512), (8, 1024, 1024), (1, 2048, 2048),
    (1, 8192, 8192), (2, 512, 512), (16, 512, 512), (1, 1280, 8192),
)  # fmt: skip
"""Batch size, queries and keys of what is measured for a model: large and small calls in turn, so
that those come first which say most. Small ones have a reference that follows."""

DEFAULT_MODELS = tuple(
    Model(heads, heads // 4, head_dim, head_dim)
    for head_dim, heads in ((128, 32), (64, 64), (256, 16))
)
"""What is measured if nothing is asked for: usual head sizes, 4096 columns of queries."""


def shapes_of(models: Iterable[Model]) -> list[Problem]:
    """The shapes to measure for some models. Scores and sinks are left out, as in the costs."""
    found: dict[Problem, None] = {}
    models = tuple(models)
    for batch, seqlen_q, seqlen_k in TUNED_SIZES:
        for model in models:
            for window in model.windows:
                tight = window.tighten(seqlen_q, seqlen_k)
                head_dims = model.head_dim, model.head_dim_v
                spec = AttentionSpec(model.dtype, *head_dims, Band.of(tight))
                heads = model.heads_kv, model.heads_q // model.heads_kv
                found[Problem(spec, batch, seqlen_q, seqlen_k, *heads, tight)] = None
    return list(found)


def plans_to_measure(problem: Problem, gpu: Gpu) -> list[Plan]:
    """The candidates that the planner considers for a problem, without hopeless ones."""
    found = candidates(problem, gpu, schedules=CHOICES)
    limit = HOPELESS * min(one.prediction.mean_us for one in found)
    hopeful = (one for one in found if one.prediction.mean_us <= limit)
    return [plan_forward(problem, gpu, one.config, one.schedule) for one in hopeful]


# -------------------------------------------------------------------------------------- measure


class Stopwatch(Protocol):
    """Measures plans; on a GPU that is `fa3.tools.plan_stopwatch.GpuStopwatch`."""

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Do what takes time and is not to be measured, such as compiling."""

    def measure(self, plans: Sequence[Plan]) -> list[PlanTime]:
        """Time some plans of one problem, in both regimes."""


def measure_shapes(
    plans: Sequence[Sequence[Plan]],
    record: PlanTimes,
    stopwatch: Stopwatch,
    budget_s: float,
    advance: Callable[[], None],
) -> int:
    """Measure plans, shape by shape, and add their times to the record.

    Args:
        plans: those of each shape.
        budget_s: seconds to measure for; a shape that would probably end later is not begun, but
            one shape is measured in any case.
        advance: called after each shape.

    Returns:
        how many shapes were measured.
    """
    begin, longest, done = time.monotonic(), 0.0, 0
    for found in plans:
        start = time.monotonic()
        if done and start - begin + longest > budget_s:
            break
        record.add(stopwatch.measure(found))
        longest = max(longest, time.monotonic() - start)
        done += 1
        advance()
    return done


# ------------------------------------------------------------------------------------------ fit


class Tuning(NamedTuple):
    """What a fit gives.

    Fields:
        cells, times: number of shapes and of times that it was made from.
        accuracy: errors of shapes that are predicted from the others; of all shapes by the costs
            themselves where there are too few.
        regret, shipped_regret: how much longer than the best measured plan the planner's choice
            takes, on average: by these costs, and by those that come with fa3.
    """

    costs: Costs
    cells: int
    times: int
    accuracy: Accuracy
    regret: float
    shipped_regret: float


def fit_times(gpu: Gpu, times: Sequence[PlanTime], versions: dict[str, str]) -> Tuning:
    """Fit the cost model to a GPU's times.

    Args:
        times: at least one.
        versions: of what the times were measured with, kept with the costs.
    """
    shipped = replace(gpu, tuned=None)
    start = replace(shipped.costs, gpu=gpu.name, measured=True)
    seen = [observed(one, shipped) for one in times]
    fitted = fit_all(start, seen)
    found = held_out_errors(start, seen) if all(halves(seen)) else errors(fitted, seen)
    accuracy = Accuracy.of(error for _, error in found)
    cells = len({one.cell for one in seen})
    source = {
        "fitted": datetime.date.today().isoformat(),
        "cells": cells,
        "times": len(seen),
        "held_out_error": accuracy.rounded(),
        "sources": digest_of_sources(),
        "versions": versions,
    }
    costs = replace(mark_tuned(fitted, seen), source=source)
    regrets = (regret(replace(gpu, tuned=tuned), times) for tuned in (costs, None))
    return Tuning(costs, cells, len(seen), accuracy, *regrets)


def observed(one: PlanTime, gpu: Gpu) -> Observation:
    """A time as the fit takes it."""
    name = describe_problem(one.problem)
    return Observation.of(name, one.regime, one.us, one.problem, gpu, one.config, one.schedule)


def mark_tuned(costs: Costs, seen: Sequence[Observation]) -> Costs:
    """Note for each tile on how many shapes it was measured here."""
    cells = {key: {one.cell for one in seen if one.key == key} for key in {s.key for s in seen}}
    tiles = {key: costs.tiles[key]._replace(tuned=len(found)) for key, found in cells.items()}
    return replace(costs, tiles={**costs.tiles, **tiles})


def regret(gpu: Gpu, times: Sequence[PlanTime]) -> float:
    """How much longer than the best measured plan the choice for a GPU takes, on average over the
    problems, of the geometric means of both regimes; choices that were not measured do not count.
    """
    us: dict[Problem, dict[tuple, list[float]]] = {}
    for one in times:
        plans = us.setdefault(one.problem, {})
        plans.setdefault((one.config, one.schedule), []).append(one.us)
    regrets = []
    for problem, plans in us.items():
        means = {plan: statistics.geometric_mean(found) for plan, found in plans.items()}
        chosen = plan_forward(problem, gpu)
        if mean := means.get((chosen.config, chosen.schedule.name)):
            regrets.append(mean / min(means.values()) - 1)
    return statistics.mean(regrets) if regrets else float("nan")
