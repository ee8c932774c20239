"""What `fa3 plan` does: plan a call, explain the plan, record it and draw it."""

import argparse
import json
from typing import Any

from fa3.calls.devices import gpu_of
from fa3.calls.tuned_plans import is_tuned, plan_call
from fa3.planning.explanation import PlanDescription, duration
from fa3.planning.gpu import Gpu, as_gpu
from fa3.planning.grouped import GroupedPlan
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.planning.timeline import Timeline
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import Problem, Window
from fa3.tools.arguments import Shape
from fa3.tools.call_plans import explain_backward, explain_packed
from fa3.tools.drawing import draw_tile_order
from fa3.tools.models import SHORT_DTYPES
from fa3.tools.recording import device_here, record_timeline
from fa3.tools.warmup import known_gpus


def show_plan(options: argparse.Namespace) -> None:
    """Print how a call would run; takes the options of the command line."""
    check_options(options)
    problem, gpu = problem_of(options), gpu_to_plan_for(options)
    plan, explanation = explained(options, problem, gpu)
    facts, lines = dict(explanation.facts), [str(explanation)]
    if options.call == "dense" and not options.schedule and is_tuned(problem, gpu):
        facts["tuned"] = True
        lines.append("Tuned    The fastest plan that `fa3 tune` measured on this GPU.")
    if isinstance(plan, Plan):
        add_timeline(options, plan, facts, lines)
    elif options.record or options.png or options.trace:
        raise ValueError(
            "--record, --png and --trace show the forward kernel, but this call runs in another "
            "one; with --schedule list a dense call runs in the forward kernel"
        )
    print(json.dumps(facts, indent=2) if options.json else "\n".join(lines))


def add_timeline(
    options: argparse.Namespace, plan: Plan, facts: dict[str, Any], lines: list[str]
) -> None:
    """Record a plan and draw what each SM does, as the options say, and add what came of it."""
    recorded = None
    if options.record:
        recorded = record_timeline(plan)
        facts["recorded"] = {"us": round(recorded.us, 3), "balance": round(recorded.balance, 4)}
        lines.append(f"Recorded {describe_recording(recorded, plan)}")
    if options.png:
        draw_tile_order(plan, plan.simulate(), options.png, recorded)
        facts["picture"] = str(options.png)
        lines.append(f"Picture  {options.png}")
    if options.trace:
        options.trace.write_text(json.dumps(plan.trace(recorded)))
        facts["trace"] = str(options.trace)
        lines.append(f"Trace    {options.trace}")


def explained(
    options: argparse.Namespace, problem: Problem, gpu: Gpu
) -> tuple[Plan | GroupedPlan | None, PlanDescription]:
    """How the call runs that the options name: the plan of a call without gradients, and what
    there is to say."""
    if options.call == "backward":
        return None, explain_backward(problem, gpu)
    if options.call == "packed":
        return None, explain_packed(problem, Window(*bounds_of(options)), gpu)
    if options.call == "cache":
        cache = CacheLayout(options.page_size)
        grouped = GroupedPlan.of(problem, gpu, cache, options.append)
        return grouped, grouped.explain(options.append)
    if options.schedule:
        plan = plan_forward(problem, gpu, schedule=options.schedule)
        return plan, plan.explain()
    made = plan_call(problem, gpu)
    return made, made.explain()


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that say nothing of the call that is planned."""
    kinds = {"schedule": "dense", "page_size": "cache", "append": "cache"}
    for name, kind in kinds.items():
        if getattr(options, name) and options.call != kind:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} goes with --call {kind}, got --call {options.call}")
    if (options.record or options.png or options.trace) and options.call != "dense":
        raise ValueError(
            "--record, --png and --trace show the forward kernel and go with --call dense, got "
            f"--call {options.call}"
        )
    if options.page_size < 0:
        raise ValueError(f"--page-size must be 0 (no pages) or more, got {options.page_size}")
    if options.record and options.gpu:
        raise ValueError("--record runs on the GPU of this machine, so it does not take --gpu")


def gpu_to_plan_for(options: argparse.Namespace) -> Gpu:
    """The GPU that the options name, or the one of this machine; else an H200."""
    if options.gpu:
        return as_gpu(options.gpu)
    return gpu_of(device_here()) if options.record else known_gpus()[0]


def describe_recording(recorded: Timeline, plan: Plan) -> str:
    """What was recorded and what was predicted, in a sentence."""
    prediction = plan.predict()
    steady = duration(prediction.us - prediction.launch_us)
    burst = duration(prediction.burst_us - prediction.launch_us)
    return (
        f"{duration(recorded.us)}, balance {recorded.balance:.1%}; {steady} were predicted under "
        f"steady load and {burst} in a burst, all without the launch."
    )


def problem_of(options: argparse.Namespace) -> Problem:
    """The problem of a call that the options describe."""
    return problem_of_shape(options.shape, options, options.head_dim_v)


def problem_of_shape(
    shape: Shape, options: argparse.Namespace, head_dim_v: int | None = None
) -> Problem:
    """The problem of a shape, with the options' dtype and mask."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = shape
    return Problem.of(
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim if head_dim_v is None else head_dim_v),
        window_size=bounds_of(options),
        dtype=SHORT_DTYPES[options.dtype],
    )


def bounds_of(options: argparse.Namespace) -> tuple[int, int]:
    """The window that the options ask for."""
    left, right = options.window
    return left, 0 if options.causal else right
