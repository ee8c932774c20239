"""`fa3 tune`: measures the best plans of shapes, and keeps the fastest."""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from fa3.calls.attention import flash_attn_func
from fa3.calls.devices import gpu_of
from fa3.calls.tuned_plans import keep_plan, plans_path
from fa3.planning.costs import Gpu
from fa3.planning.decode import DecodePlan
from fa3.planning.explanation import describe_problem, duration
from fa3.planning.planner import CHOICES, Plan, candidates, plan_dense, plan_forward
from fa3.planning.tilings import configs
from fa3.problem import Problem
from fa3.running.compiler import is_on_disk
from fa3.tools.compile_pool import compile_all
from fa3.tools.plan_command import problem_of
from fa3.tools.recording import hopper_device, random_operands

AnyPlan = Plan | DecodePlan

Stopwatch = Callable[[Sequence[AnyPlan]], Sequence[float]]
"""Returns the microseconds of some plans of one problem."""

MOST_PLANS = 6  # plans of a shape that are measured
HOPELESS = 1.5  # plans that are predicted to take so many times the shortest time are not measured

LEAST_SHARE = 0.01
"""Share by which a plan must be faster than the planner's choice to be kept instead: two
measurements of one plan may differ by so much."""

GRAPH_US = 4000  # work inside one graph: no host time shows
LOAD_S = 0.3  # seconds of work before the first round: then the power cap sets the clock
ROUNDS = 7


def tune_here(options: argparse.Namespace) -> None:
    """Tune shapes on the current GPU, by the command line's options."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs a Hopper GPU (compute capability 9.0): torch sees no GPU")
    gpu = gpu_of(hopper_device())
    if options.forget:
        plans_path(gpu.name).unlink(missing_ok=True)
        print(f"the planner chooses all plans for a {gpu.name}")
        return
    tune(dict.fromkeys(problem_of(shape, options) for shape in options.shapes), gpu, time_plans)


def tune(problems: Iterable[Problem], gpu: Gpu, stopwatch: Stopwatch) -> None:
    """Measure plans of each problem, keep the fastest, and print their times.
    Raises RuntimeError if plans cannot be kept, or no kernel of a problem could be compiled."""
    plans = {problem: plans_to_measure(problem, gpu) for problem in problems}
    kernels = (kernel for some in plans.values() for plan in some for kernel in plan.all_kernels)
    compile_all([kernel for kernel in dict.fromkeys(kernels) if not is_on_disk(kernel)])
    for problem, some in plans.items():
        ready = [plan for plan in some if all(map(is_on_disk, plan.all_kernels))]
        if not ready:
            raise RuntimeError(
                f"no kernel for {describe_problem(problem)} could be compiled: what is printed "
                "above says why"
            )
        times = stopwatch(ready)
        best = ready[fastest(times)]
        keep_plan(best)
        print(describe_problem(problem))
        for plan, us in zip(ready, times, strict=True):
            print(f"{'kept' * (plan is best):4} {duration(us):>9}  {plan.name}", flush=True)


def plans_to_measure(problem: Problem, gpu: Gpu) -> list[AnyPlan]:
    """Return the planner's choice, then the next fastest by prediction."""
    others: list[AnyPlan | None] = [
        plan_forward(problem, gpu, one.config, one.schedule)
        for one in candidates(problem, gpu, configs(problem, gpu), CHOICES)
    ]
    us = {
        plan: plan.predict().mean_us
        for plan in (plan_dense(problem, gpu), *others, DecodePlan.if_possible(problem, gpu))
        if plan is not None
    }
    choice, *rest = us
    limit = HOPELESS * min(us.values())
    by_name = {
        plan.name: plan for plan in (choice, *sorted(rest, key=us.__getitem__)) if us[plan] <= limit
    }
    return list(by_name.values())[:MOST_PLANS]


def fastest(times: Sequence[float]) -> int:
    """Return the index of the shortest time; 0 without a clear gain."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < (1 - LEAST_SHARE) * times[0] else 0


def time_plans(plans: Sequence[AnyPlan]) -> Sequence[float]:
    """Return the microseconds of plans of one problem, on the current GPU."""
    problem = plans[0].problem
    q, k, v = random_operands(problem, hopper_device())
    attend = partial(flash_attn_func, q, k, v, window_size=problem.window)
    calls = {
        plan.name: partial(attend, plan=plan)
        if isinstance(plan, Plan)
        else partial(attend, pack_gqa=True)
        for plan in plans
    }
    return list(time_in_turn(calls).values())


def time_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median microseconds of each call under steady load.
    In every round each call runs for some milliseconds, in random order, so that a drifting clock
    hits all alike."""
    graphs = {name: capture_calls(call) for name, call in calls.items()}
    until = time.perf_counter() + LOAD_S
    while time.perf_counter() < until:
        for graph, _ in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in random.sample(list(graphs), len(graphs)):
            graph, count = graphs[name]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: statistics.median(us) for name, us in times.items()}


def capture_calls(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture some milliseconds of calls; return graph and number of calls."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = math.ceil(GRAPH_US / 1e6 / (time.perf_counter() - begin))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph, count
