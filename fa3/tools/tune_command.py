"""What `python -m fa3 tune` does: measure on the GPU that is here, fit the cost model, keep it."""

import argparse
import importlib.metadata
import sys
from dataclasses import replace

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.tuned_costs import OF_COSTS, keep_costs, tuned_path
from fa3.planning.explanation import counted
from fa3.planning.gpu import Gpu
from fa3.problem import NO_BOUND, Problem
from fa3.tools.info import driver_version
from fa3.tools.models import PRESETS, SHORT_DTYPES
from fa3.tools.plan_command import problem_of_shape
from fa3.tools.plan_stopwatch import GpuStopwatch
from fa3.tools.plan_times import OF_TIMES, PlanTimes, alone
from fa3.tools.progress import Bar, terminal
from fa3.tools.recording import hopper_device
from fa3.tools.tuning import (
    DEFAULT_MODELS,
    Stopwatch,
    Tuning,
    fit_times,
    measure_shapes,
    plans_to_measure,
    shapes_of,
)

WORSE = 0.01
"""Regret by which costs may choose worse than those that come with fa3 and still be kept: so much
times differ from one measurement to the next."""


def tune_here(options: argparse.Namespace) -> None:
    """Tune the planner to the current GPU; options are those of the command line."""
    device = hopper_device()
    if options.forget:
        forget(gpu_of(device))
    else:
        tune(options, gpu_of(device), GpuStopwatch(device))


def forget(gpu: Gpu) -> None:
    """Remove what was measured on a GPU and fitted to it."""
    with alone(gpu.name):
        for suffix in (OF_COSTS, OF_TIMES):
            tuned_path(gpu.name, suffix).unlink(missing_ok=True)
    print(f"the planner takes the costs that come with fa3 for a {gpu.name}")


def tune(options: argparse.Namespace, gpu: Gpu, stopwatch: Stopwatch) -> None:
    """Measure what is not measured yet, fit to all that was, and keep the costs."""
    problems = problems_to_tune(options)
    try:
        with alone(gpu.name):
            record = PlanTimes.read(gpu.name)
            left = measure(problems, gpu, record, stopwatch, options.budget)
            print(f"Times    {len(record.times):,}; a fit takes up to a minute", flush=True)
            keep_better(gpu, fit_times(gpu, record.times, versions()))
    except KeyboardInterrupt:
        sys.exit("fa3: interrupted; the same command goes on where this one stopped")
    if left:
        print(f"{counted(left, 'shape')} left: the same command goes on")


def measure(
    problems: list[Problem], gpu: Gpu, record: PlanTimes, stopwatch: Stopwatch, budget_s: float
) -> int:
    """Add the times of problems that a record does not have; return how many are left."""
    pending = [problem for problem in problems if problem not in record.problems]
    print(f"GPU      {gpu.name}, {gpu.num_sms} SMs")
    print(f"Shapes   {len(problems)}, {len(problems) - len(pending)} of them measured before")
    plans = [plans_to_measure(problem, gpu) for problem in pending]
    stopwatch.prepare([plan for of_shape in plans for plan in of_shape])
    bar = Bar(len(pending), terminal(), "shapes")
    done = measure_shapes(plans, record, stopwatch, budget_s, bar.advance)
    bar.end()
    return len(pending) - done


def keep_better(gpu: Gpu, tuning: Tuning) -> None:
    """Tell how good a fit is, and keep its costs unless those that come with fa3 are better."""
    print(f"Fit      {counted(tuning.cells, 'shape')}; error {tuning.accuracy}")
    print(
        f"Choice   {tuning.regret:.1%} slower than the best plan on average; "
        f"{tuning.shipped_regret:.1%} by the costs that come with fa3"
    )
    if tuning.regret > tuning.shipped_regret + WORSE:
        tuned_path(gpu.name).unlink(missing_ok=True)
        print("Costs    not kept: those that come with fa3 choose better")
    else:
        print(f"Costs    {keep_costs(tuning.costs)}, for processes that start from now on")


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
    """What the times depend on beside fa3."""
    return {
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
    }
