"""What `python -m fa3 plan` does: plan a problem, explain it, record it and draw it."""

import argparse
import json

from fa3.calls.dense import check_forward_counts
from fa3.calls.devices import gpu_of
from fa3.planning.explanation import duration
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.planning.timeline import Timeline
from fa3.problem import HEAD_DIM_UNIT, MAX_HEAD_DIM, NO_BOUND, AttentionSpec, Problem, Window
from fa3.scores.masks import Band
from fa3.tools.drawing import draw_tile_order
from fa3.tools.models import SHORT_DTYPES
from fa3.tools.recording import hopper_device, record_timeline
from fa3.tools.warmup import known_gpus


def show_plan(options: argparse.Namespace) -> None:
    """Print how a problem would run; options are those of the command line."""
    gpu = gpu_of(hopper_device()) if options.record else known_gpus()[0]
    plan = plan_forward(problem_of(options), gpu, schedule=options.schedule)
    explanation = plan.explain()
    print(explanation)
    recorded = None
    if options.record:
        recorded = record_timeline(plan)
        print(f"Recorded {describe_recording(recorded, plan)}")
    if options.png:
        draw_tile_order(plan, explanation.timeline, options.png, recorded)
        print(f"Picture  {options.png}")
    if options.trace:
        options.trace.write_text(json.dumps(explanation.trace(recorded)))
        print(f"Trace    {options.trace}")


def describe_recording(recorded: Timeline, plan: Plan) -> str:
    """What was recorded beside what was predicted, in a sentence."""
    prediction = plan.predict()
    steady = duration(prediction.us - prediction.launch_us)
    burst = duration(prediction.burst_us - prediction.launch_us)
    return (
        f"{duration(recorded.us)}, balance {recorded.balance:.1%}, beside {steady} "
        f"predicted under steady load and {burst} in a burst, all without the launch."
    )


def problem_of(options: argparse.Namespace) -> Problem:
    """The problem of a call that the options describe."""
    return problem_of_shape(options.shape, options)


def problem_of_shape(shape: str, options: argparse.Namespace) -> Problem:
    """The problem of a shape "B,SQ,SK,HQ,HKV,D", with the options' dtype and mask."""
    sizes = shape.split(",")
    if len(sizes) != 6 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"a shape needs six positive integers, got {shape!r}")
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = map(int, sizes)
    if heads_q % heads_kv:
        raise ValueError(f"{heads_q} query heads do not divide among {heads_kv} key/value heads")
    if head_dim % HEAD_DIM_UNIT or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}, got {head_dim}"
        )
    left, right = options.window
    if min(left, right) < NO_BOUND:
        raise ValueError(f"--window needs integers from -1, got {left} {right}")
    check_forward_counts(batch, seqlen_q, seqlen_k, heads_q)
    window = Window(left, 0 if options.causal else right).tighten(seqlen_q, seqlen_k)
    spec = AttentionSpec(SHORT_DTYPES[options.dtype], head_dim, head_dim, Band.of(window))
    return Problem(spec, batch, seqlen_q, seqlen_k, heads_kv, heads_q // heads_kv, window)
