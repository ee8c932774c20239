"""What `fa3 tune` does: measure on the GPU that is here, fit the cost model, keep it."""

import argparse
import importlib.metadata
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.tuned_costs import OF_COSTS, keep_costs, tuned_path
from fa3.planning.explanation import counted
from fa3.planning.gpu import Gpu
from fa3.problem import NO_BOUND, Problem
from fa3.tools.info import driver_version
from fa3.tools.models import PRESETS, SHORT_DTYPES
from fa3.tools.plan_command import problem_of_shape
from fa3.tools.plan_stopwatch import GpuWorkbench
from fa3.tools.plan_times import OF_TIMES, PlanTimes, alone
from fa3.tools.progress import Bar, terminal
from fa3.tools.recording import device_here
from fa3.tools.tuning import (
    DEFAULT_MODELS,
    Budget,
    Measuring,
    Tuning,
    Workbench,
    fit_times,
    in_turn,
    plans_to_measure,
    shapes_of,
)

WORSE = 0.01
"""Regret by which costs may choose worse than those that come with fa3 and still be kept: so much
times differ from one measurement to the next."""


def tune_here(options: argparse.Namespace) -> None:
    """Tune the planner to the current GPU; takes the options of the command line."""
    device = device_here()
    if options.forget:
        forget(gpu_of(device))
    else:
        tune(options, gpu_of(device), GpuWorkbench(device))


def forget(gpu: Gpu) -> None:
    """Remove what was measured on a GPU and fitted to it."""
    with alone(gpu.name):
        for suffix in (OF_COSTS, OF_TIMES):
            tuned_path(gpu.name, suffix).unlink(missing_ok=True)
    print(f"the planner takes the costs that come with fa3 for a {gpu.name}")


def tune(
    options: argparse.Namespace,
    gpu: Gpu,
    bench: Workbench,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Measure what is not measured yet within the budget, fit to all that was, keep the costs."""
    budget = Budget(options.budget, clock)
    problems = problems_to_tune(options)
    with alone(gpu.name):
        record = PlanTimes.read(gpu.name)
        try:
            work = measure(problems, gpu, record, bench, budget)
            if record.times:
                print(f"Times    {len(record.times):,}", flush=True)
                keep_better(gpu, fit_times(gpu, record.times, versions()))
        except KeyboardInterrupt:
            sys.exit(
                f"fa3: interrupted; {counted(len(record.times), 'time')} kept. The same command "
                "goes on where this one stopped"
            )
    if work.todo and not work.measured:
        sys.exit(
            f"fa3: the budget of {budget.seconds:g} s ended before any plan was measured: "
            f"{counted(len(work.absent), 'kernel')} not compiled yet. What is compiled is kept: "
            f"the same command goes on, better with --budget {longer(budget.seconds)}s"
        )
    if work.todo:
        print(f"{counted(len(work.todo), 'plan')} left: the same command goes on")
    elif work.failed and not work.measured:
        sys.exit("fa3: no plan could be measured, since no kernel could be compiled")


def longer(seconds: float) -> int:
    """A budget to try after one that was too short: enough for a kernel on a slow machine."""
    return math.ceil(max(60.0, 3 * seconds))


def measure(
    problems: list[Problem], gpu: Gpu, record: PlanTimes, bench: Workbench, budget: Budget
) -> Measuring:
    """Add the times of plans that a record does not have; tell what is left."""
    plans = in_turn([plans_to_measure(problem, gpu) for problem in problems])
    pending = [plan for plan in plans if not record.has(plan)]
    work = Measuring(pending, record, bench, budget)
    print(f"GPU      {gpu.name}, {gpu.num_sms} SMs")
    print(
        f"Plans    {len(plans)} of {counted(len(problems), 'shape')}, "
        f"{len(plans) - len(pending)} of them measured before"
    )
    print(f"Kernels  {len(work.absent)} to compile", flush=True)
    bar = Bar(len(pending), terminal(), "plans")

    def tell() -> None:
        compiling = f", {counted(len(work.absent), 'kernel')} left" if work.absent else ""
        bar.show(work.measured, f"{budget}{compiling}")

    if pending:
        try:
            work.run(tell)
        finally:
            bar.end()
            print(f"Spent    {budget}")
    if work.failed:
        print(
            f"Failed   {counted(len(work.failed), 'plan')} left out: what is printed above says "
            "why kernels did not compile"
        )
    return work


def keep_better(gpu: Gpu, tuning: Tuning) -> None:
    """Tell how good a fit is, and keep its costs unless those that come with fa3 are better."""
    print(f"Fit      {counted(tuning.cells, 'shape')}; error {tuning.accuracy}")
    print(
        f"Choice   {slower(tuning.regret)}; by the costs that come with fa3 "
        f"{slower(tuning.shipped_regret)}"
    )
    if tuning.regret > tuning.shipped_regret + WORSE:
        tuned_path(gpu.name).unlink(missing_ok=True)
        print("Costs    not kept: those that come with fa3 choose better")
    else:
        print(f"Costs    {keep_costs(tuning.costs)}, for processes that start from now on")


def slower(regret: float) -> str:
    """What choices take compared with the best measured plans; some were not measured."""
    return "not measured yet" if math.isnan(regret) else f"{regret:.1%} slower than the best"


def problems_to_tune(options: argparse.Namespace) -> list[Problem]:
    """The problems that the options ask for."""
    masked = options.causal or tuple(options.window) != (NO_BOUND, NO_BOUND)
    if options.shapes:
        return list(dict.fromkeys(problem_of_shape(shape, options) for shape in options.shapes))
    if masked:
        raise ValueError("--causal and --window go with --shapes; a preset says its mask")
    models = (PRESETS[options.preset],) if options.preset else DEFAULT_MODELS
    return shapes_of(replace(model, dtype=SHORT_DTYPES[options.dtype]) for model in models)


def versions() -> dict[str, str]:
    """What the times depend on besides fa3."""
    return {
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
    }
