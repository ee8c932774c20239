"""`fa3 tune`: measures the planner's best plans of some shapes, and keeps the fastest of each."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from fa3.calls.attention import flash_attn_func
from fa3.calls.devices import gpu_of
from fa3.calls.tuned_plans import keep_plan, plans_path
from fa3.planning.costs import Gpu
from fa3.planning.decode import DecodePlan
from fa3.planning.explanation import describe_problem, duration
from fa3.planning.plan import Plan
from fa3.planning.planner import CHOICES, candidates, plan_dense, plan_forward
from fa3.planning.tilings import configs
from fa3.problem import Problem
from fa3.running.compiler import is_on_disk
from fa3.tools.compile_pool import check_folder, compile_all
from fa3.tools.plan_command import problem_of
from fa3.tools.recording import hopper_device, random_operands
from fa3.tools.timing import time_in_turn

AnyPlan = Plan | DecodePlan

Stopwatch = Callable[[Sequence[AnyPlan]], list[float]]
"""Returns the microseconds of some plans of one problem."""

MOST_PLANS = 6  # plans of a shape that are measured
HOPELESS = 1.5  # plans that are predicted to take so many times the shortest time are not measured

LEAST_SHARE = 0.01
"""Share by which a plan must be faster than the planner's choice to be kept instead: two
measurements of one plan may differ by so much."""


def tune_here(options: argparse.Namespace) -> None:
    """Tune shapes on the current GPU; takes the options of the command line."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a Hopper GPU (compute capability 9.0): torch sees no GPU")
    device = hopper_device()
    gpu = gpu_of(device)
    if options.forget:
        plans_path(gpu.name).unlink(missing_ok=True)
        print(f"the planner chooses all plans for a {gpu.name}")
        return
    problems = dict.fromkeys(problem_of(shape, options) for shape in options.shapes)
    tune(problems, gpu, partial(time_plans, device))


def tune(problems: Iterable[Problem], gpu: Gpu, stopwatch: Stopwatch) -> None:
    """Measure plans of each problem, keep the fastest, and print their times.
    Raises RuntimeError if plans cannot be kept, or no kernel of a problem could be compiled."""
    plans = {problem: plans_to_measure(problem, gpu) for problem in problems}
    check_folder()
    kernels = dict.fromkeys(
        kernel for some in plans.values() for plan in some for kernel in plan.all_kernels
    )
    absent = [kernel for kernel in kernels if not is_on_disk(kernel)]
    compile_all(absent)
    for problem, some in plans.items():
        ready = [plan for plan in some if all(map(is_on_disk, plan.all_kernels))]
        if not ready:
            raise RuntimeError(
                f"no kernel for {describe_problem(problem)} could be compiled: what is printed "
                "above says why"
            )
        times = stopwatch(ready)
        best = fastest(times)
        keep_plan(ready[best])
        lines = [describe_problem(problem)]
        for plan, us in zip(ready, times, strict=True):
            mark = "kept" if plan is ready[best] else ""
            lines.append(f"{mark:4} {duration(us):>9}  {plan.name}")
        print("\n".join(lines), flush=True)


def plans_to_measure(problem: Problem, gpu: Gpu) -> list[AnyPlan]:
    """Return the planner's choice, then the plans that are predicted to be the next fastest."""
    plans: list[AnyPlan] = [
        plan_forward(problem, gpu, one.config, one.schedule)
        for one in candidates(problem, gpu, configs(problem, gpu), CHOICES)
    ]
    grouped = DecodePlan.if_possible(problem, gpu)
    if grouped is not None:
        plans.append(grouped)
    us = {plan.name: plan.predict().mean_us for plan in plans}
    plans.sort(key=lambda plan: us[plan.name])
    choice, limit = plan_dense(problem, gpu), HOPELESS * us[plans[0].name]
    by_name = {plan.name: plan for plan in (choice, *plans) if us[plan.name] <= limit}
    return list(by_name.values())[:MOST_PLANS]


def fastest(times: Sequence[float]) -> int:
    """Return the index of the shortest time; 0 if it is not clearly shorter than the first."""
    best = min(range(len(times)), key=lambda index: times[index])
    return best if times[best] < (1 - LEAST_SHARE) * times[0] else 0


def time_plans(device: torch.device, plans: Sequence[AnyPlan]) -> list[float]:
    """Return the microseconds of plans of one problem."""
    problem = plans[0].problem
    with torch.cuda.device(device):
        q, k, v = random_operands(problem, device)
        left, right = problem.window
        attend = partial(flash_attn_func, q, k, v, window_size=(left, right))
        choices = {
            plan.name: {"plan": plan} if isinstance(plan, Plan) else {"pack_gqa": True}
            for plan in plans
        }
        us = time_in_turn({name: partial(attend, **choice) for name, choice in choices.items()})
    return [us[plan.name] for plan in plans]
