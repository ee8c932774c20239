"""The command line: `python -m fa3 info | plan | demo`."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path

import torch

import fa3
from fa3.calls.devices import gpu_of
from fa3.calls.forward import check_forward_counts
from fa3.planning.explanation import microseconds
from fa3.planning.gpu import H200
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.planning.timeline import Timeline
from fa3.problem import HEAD_DIM_UNIT, MAX_HEAD_DIM, NO_BOUND, AttentionSpec, Problem, Window
from fa3.running.code_cache import cache_dir
from fa3.schedules import SCHEDULES
from fa3.scores.masks import Band
from fa3.tools.drawing import draw_tile_order
from fa3.tools.recording import hopper_device, record_timeline

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
DEFAULT_SHAPE = "1,4096,4096,32,8,128"


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    try:
        try:
            run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # As a program ends that knows nothing of signals; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def run(arguments: list[str] | None) -> None:
    options = parser().parse_args(arguments)
    try:
        options.command(options)
    except BrokenPipeError:
        raise
    except (ModuleNotFoundError, OSError, ValueError) as error:
        sys.exit(f"fa3: {error}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m fa3", description="Hopper attention in CuTe DSL")
    commands = top.add_subparsers(required=True, metavar="command")

    info = commands.add_parser("info", help="show GPU, versions and the kernel cache")
    info.set_defaults(command=show_info)

    plan = commands.add_parser("plan", help="show how a problem would run")
    plan.add_argument(
        "--shape",
        metavar="B,SQ,SK,HQ,HKV,D",
        default=DEFAULT_SHAPE,
        help="batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim (default: %(default)s)",
    )
    plan.add_argument("--causal", action="store_true", help="hide keys after a query's position")
    plan.add_argument(
        "--window",
        nargs=2,
        type=int,
        metavar=("L", "R"),
        default=(NO_BOUND, NO_BOUND),
        help="keys to either side of a query's position, -1 for all; --causal sets R to 0",
    )
    plan.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")
    plan.add_argument("--schedule", choices=SCHEDULES, help="tile schedule; planned if not given")
    plan.add_argument(
        "--record",
        action="store_true",
        help="also run it on the Hopper GPU here, and show what each SM did when",
    )
    plan.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline")
    plan.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline as JSON for Perfetto"
    )
    plan.set_defaults(command=show_plan)

    demo = commands.add_parser(
        "demo", help="run attention on a Hopper GPU, or all that works without one"
    )
    demo.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        default=Path("tile_order.png"),
        help="default: %(default)s",
    )
    demo.set_defaults(command=run_demo)
    return top


def show_info(options: argparse.Namespace) -> None:
    gpu = "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        gpu = f"{properties.name}, {properties.multi_processor_count} SMs, capability {capability}"
        if capability != "9.0":
            gpu += "; the kernels need 9.0"
    for name, value in (
        ("fa3", fa3.__version__),
        ("GPU", gpu),
        ("driver", driver_version()),
        ("torch", torch.__version__),
        ("CuTe DSL", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("cache", describe_cache()),
    ):
        print(f"{name:9} {value}")


def driver_version() -> str:
    """The NVIDIA driver's version, as the kernel module tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "none"


def describe_cache() -> str:
    """Where compiled kernels are kept, and how many."""
    try:
        folder = cache_dir()
    except RuntimeError as error:
        return f"none: {error}"
    sizes = []
    for path in folder.glob("*.o"):
        with contextlib.suppress(OSError):  # a link to nowhere, or just removed
            sizes.append(path.stat().st_size)
    return f"{folder}, {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"


def show_plan(options: argparse.Namespace) -> None:
    gpu = gpu_of(hopper_device()) if options.record else H200
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
    steady = microseconds(prediction.us - prediction.launch_us)
    burst = microseconds(prediction.burst_us - prediction.launch_us)
    return (
        f"{microseconds(recorded.us)} us, balance {recorded.balance:.1%}, beside {steady} us "
        f"predicted under steady load and {burst} us in a burst, all without the launch."
    )


def problem_of(options: argparse.Namespace) -> Problem:
    """The problem of a call that the options describe."""
    sizes = options.shape.split(",")
    if len(sizes) != 6 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--shape needs six positive integers, got {options.shape!r}")
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


def run_demo(options: argparse.Namespace) -> None:
    from fa3.tools.demo import demo

    demo(options.png)


if __name__ == "__main__":
    main()
