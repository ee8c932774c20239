"""Tunes the planner to a GPU: measures the candidates for some shapes, and fits the cost model.

`fa3.tools.tune_command` measures through `Measuring`, which adds to a record of times, and fits
to all of it by `fit_times`. The fit starts from the costs that come with fa3: tiles that were
measured get times of their own, the others are scaled as these are.
"""

import contextlib
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from fa3.planning.costs import Costs
from fa3.planning.explanation import describe_problem
from fa3.planning.fit import Accuracy, errors, fit_all, halves, held_out_errors
from fa3.planning.gpu import Gpu
from fa3.planning.observation import Observation
from fa3.planning.plan import Plan
from fa3.planning.planner import CHOICES, candidates, plan_forward
from fa3.problem import AttentionSpec, Problem
from fa3.running.compiler import Kernel
from fa3.scores.masks import Band
from fa3.tools.models import Model
from fa3.tools.plan_times import PlanTime, PlanTimes, digest_of_sources

HOPELESS = 1.5
"""Candidates that are predicted to take so many times the best one's time are not measured."""

PLAN_S, LONG_CALLS = 0.3, 21
"""What measuring a plan is expected to take: so many seconds, and the time of so many calls. That
many run if one alone is longer than a block of `fa3.tools.plan_stopwatch`."""

TUNED_SIZES = (
    (1, 4096, 4096), (1, 1024, 1024), (4, 2048, 2048), (1, 128, 4096), (1, 16384, 16384),
    (4, 512, 512), (1, 512, 8192), (1, 512, 512), (8, 1024, 1024), (1, 2048, 2048),
    (1, 8192, 8192), (2, 512, 512), (16, 512, 512), (1, 1280, 8192),
)  # fmt: skip
"""Batch size, queries and keys of what is measured for a model: large and small calls in turn, so
that those come first which say most. Small ones use the online softmax."""

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
    """The candidates for a problem, without hopeless ones: the planner's choice, then what it
    compared that with, then others, which tell of their tiles; the fastest by its costs first."""
    found = candidates(problem, gpu, schedules=CHOICES)
    limit = HOPELESS * min(one.prediction.mean_us for one in found)
    choice = plan_forward(problem, gpu)
    compared = {(one.config, one.schedule) for one in choice.considered}

    def rank(plan: Plan) -> tuple[bool, bool]:
        kind = plan.config, plan.schedule.name
        return plan.name != choice.name, kind not in compared

    ranked = sorted(found, key=lambda one: one.prediction.mean_us)
    hopeful = (one for one in ranked if one.prediction.mean_us <= limit)
    plans = (plan_forward(problem, gpu, one.config, one.schedule) for one in hopeful)
    return sorted(plans, key=rank)


def in_turn(plans: Iterable[Sequence[Plan]]) -> list[Plan]:
    """The plans of all problems: the best of each, then the second best of each, and so on."""
    rows = itertools.zip_longest(*plans)
    return [plan for row in rows for plan in row if plan is not None]


# -------------------------------------------------------------------------------------- measure


class Compilers(Protocol):
    """Processes that compile, such as `fa3.tools.compile_pool.CompilePool`."""

    def next_done(self, timeout_s: float | None = None) -> Kernel | None:
        """A kernel that was tried, each once; None if none was within the time."""


class Workbench(Protocol):
    """Compiles and times plans; on a GPU that is `fa3.tools.plan_stopwatch.GpuWorkbench`."""

    def has(self, kernel: Kernel) -> bool:
        """Whether a kernel is there to be run."""

    def compilers(self, kernels: Sequence[Kernel]) -> contextlib.AbstractContextManager[Compilers]:
        """Begin to compile kernels, the first ones first; what is not done in the end is left."""

    def measure(self, plans: Sequence[Plan]) -> list[PlanTime]:
        """Time some plans of one problem, in both regimes."""


@dataclass
class Budget:
    """Seconds that may be spent from now on, and on what they were.

    Fields:
        clock: gives seconds.
        waited_s, measured_s: spent waiting for kernels that are compiled, and measuring.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    waited_s: float = 0.0
    measured_s: float = 0.0

    def __post_init__(self) -> None:
        self.begin = self.clock()

    @property
    def left_s(self) -> float:
        return self.begin + self.seconds - self.clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is inside as waiting for kernels."""
        begin = self.clock()
        try:
            yield
        finally:
            self.waited_s += self.clock() - begin

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count what is inside as measuring."""
        begin = self.clock()
        try:
            yield
        finally:
            self.measured_s += self.clock() - begin

    def __str__(self) -> str:
        return f"{self.waited_s:.1f} s compiling, {self.measured_s:.1f} s measuring"


class Job(NamedTuple):
    """A plan to measure.

    Fields:
        kernels: those that it launches.
        expected_s: seconds that measuring it should take, if the costs are right.
    """

    plan: Plan
    kernels: frozenset[Kernel]
    expected_s: float

    @classmethod
    def of(cls, plan: Plan) -> "Job":
        kernels = frozenset(launch.kernel for launch in plan.launches())
        return cls(plan, kernels, PLAN_S + LONG_CALLS * plan.predict().us / 1e6)


class Measuring:
    """Measures plans while the kernels of others are compiled.

    Attributes:
        todo: what is not measured yet; the first come first, as far as their kernels are there.
        absent: kernels that were not there and are not tried yet.
        failed: plans that have a kernel which did not compile.
        measured: how many plans were measured.
        slowness: how many times what was expected plans took at most.
    """

    def __init__(
        self, plans: Iterable[Plan], record: PlanTimes, bench: Workbench, budget: Budget
    ) -> None:
        self.record, self.bench, self.budget = record, bench, budget
        self.todo = [Job.of(plan) for plan in plans]
        # In the order in which plans need them.
        needed = dict.fromkeys(one.kernel for job in self.todo for one in job.plan.launches())
        self.absent = {kernel: None for kernel in needed if not bench.has(kernel)}
        self.failed: list[Plan] = []
        self.measured, self.slowness = 0, 1.0

    def run(self, tell: Callable[[], None]) -> None:
        """Measure until nothing is left or the budget is spent; whatever ends this, the record has
        what was measured.

        Args:
            tell: called when something was compiled or measured, and every second.
        """
        with self.bench.compilers(tuple(self.absent)) as compilers:
            while self.todo and self.budget.left_s > 0:
                tell()
                while self.absent and (kernel := compilers.next_done(0)) is not None:
                    self.take_in(kernel)
                ready = [job for job in self.todo if not job.kernels & self.absent.keys()]
                if some := self.that_fit(ready):
                    self.measure(some)
                elif len(ready) < len(self.todo):
                    with self.budget.waiting():
                        kernel = compilers.next_done(max(0.0, min(1.0, self.budget.left_s)))
                    if kernel is not None:
                        self.take_in(kernel)
                else:
                    break
            tell()

    def take_in(self, kernel: Kernel) -> None:
        """A kernel was tried: if it is not there now, leave out what needs it."""
        del self.absent[kernel]
        if not self.bench.has(kernel):
            self.failed += [job.plan for job in self.todo if kernel in job.kernels]
            self.todo = [job for job in self.todo if kernel not in job.kernels]

    def that_fit(self, ready: list[Job]) -> list[Job]:
        """What to measure next: plans of the first problem that the budget has time for, as many as
        it has; the shortest in any case if none was measured yet."""
        left_s = self.budget.left_s / self.slowness
        fitting = [job for job in ready if job.expected_s <= left_s]
        if not fitting:
            return [] if self.measured else sorted(ready, key=lambda job: job.expected_s)[:1]
        some = [job for job in fitting if job.plan.problem == fitting[0].plan.problem]
        ends_s = itertools.accumulate(job.expected_s for job in some)
        return [job for job, end_s in zip(some, ends_s, strict=True) if end_s <= left_s]

    def measure(self, jobs: list[Job]) -> None:
        begin = self.budget.clock()
        with self.budget.measuring():
            self.record.add(self.bench.measure([job.plan for job in jobs]))
        self.todo = [job for job in self.todo if job not in jobs]
        slowness = (self.budget.clock() - begin) / sum(job.expected_s for job in jobs)
        self.slowness = max(slowness, self.slowness if self.measured else 0.0)
        self.measured += len(jobs)


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
