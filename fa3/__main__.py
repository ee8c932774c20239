"""The command line: `python -m fa3 info | plan | compile | tune | cache | demo`.

What a command needs is imported when it runs: `--help` needs neither torch nor the compiler.
"""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

import fa3
from fa3.problem import NO_BOUND
from fa3.tools.models import CALLS, PAGE_SIZES, PRESETS, ROTARIES, SHORT_DTYPES

DEFAULT_SHAPE = "1,4096,4096,32,8,128"

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""What a size may end with -> bytes."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    try:
        try:
            run(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("fa3: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
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
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"fa3: {error}")


# ------------------------------------------------------------------------------------- options


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m fa3", description="Hopper attention in CuTe DSL")
    commands = top.add_subparsers(required=True, metavar="command")
    info = commands.add_parser("info", help="show GPU, versions and the kernel cache")
    info.set_defaults(command=run_info)
    add_plan(commands.add_parser("plan", help="show how a problem would run"))
    add_compile(commands.add_parser("compile", help="compile all kernels of a model, in parallel"))
    add_tune(commands.add_parser("tune", help="fit the planner's costs to the GPU that is here"))
    add_cache(commands.add_parser("cache", help="look after the compiled kernels on disk"))
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


def add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--shape",
        metavar="B,SQ,SK,HQ,HKV,D",
        default=DEFAULT_SHAPE,
        help="batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim (default: %(default)s)",
    )
    add_mask(plan)
    plan.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")
    plan.add_argument(
        "--schedule",
        metavar="NAME",
        help="tile schedule: single, static, list, dynamic or split; planned if not given",
    )
    plan.add_argument(
        "--record",
        action="store_true",
        help="also run it on the Hopper GPU here, and show what each SM did when",
    )
    plan.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline")
    plan.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline as JSON for Perfetto"
    )
    plan.set_defaults(command=run_plan)


def add_compile(model: argparse.ArgumentParser) -> None:
    model.add_argument("--preset", choices=PRESETS, help="a well-known model, instead of its sizes")
    model.add_argument(
        "--heads", type=head_counts, metavar="HQ,HKV", help="query heads, and key/value heads"
    )
    model.add_argument("--head-dim", type=int, metavar="D", help="columns of q and k")
    model.add_argument("--head-dim-v", type=int, metavar="D", help="columns of v, if others")
    model.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")
    mask = model.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="hide keys after a query's position")
    mask.add_argument("--full", action="store_true", help="hide none; the default is --causal")
    mask.add_argument(
        "--window",
        nargs=2,
        type=int,
        metavar=("L", "R"),
        help="keys to either side of a query's position, -1 for all",
    )
    model.add_argument("--softcap", type=float, default=0.0, metavar="X", help="bound of scores")
    model.add_argument("--sinks", action="store_true", help="heads have sinks")
    model.add_argument(
        "--calls",
        nargs="+",
        choices=CALLS,
        default=tuple(CALLS),
        help="what it is run through: "
        + "; ".join(f"{name}: {call}" for name, call in CALLS.items())
        + " (default: all)",
    )
    model.add_argument(
        "--page-size",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a page of the caches, 0 for no pages; may be repeated (default: 0 and 64)",
    )
    model.add_argument(
        "--rotary",
        choices=ROTARIES,
        default="halves",
        help="what turns together as tokens are appended (default: %(default)s)",
    )
    model.add_argument(
        "--rotary-dtype",
        choices=(*SHORT_DTYPES, "float32"),
        help="of the embedding's tables (default: the model's)",
    )
    model.add_argument(
        "--processes", type=int, metavar="N", help="how many compile (default: one for each core)"
    )
    model.set_defaults(command=run_compile)


def add_tune(tune: argparse.ArgumentParser) -> None:
    shapes = tune.add_mutually_exclusive_group()
    shapes.add_argument("--preset", choices=PRESETS, help="measure shapes of a well-known model")
    shapes.add_argument(
        "--shapes",
        nargs="+",
        metavar="B,SQ,SK,HQ,HKV,D",
        help="measure these; by default some with head_dim 64, 128 and 256, causal",
    )
    add_mask(tune)
    tune.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")
    tune.add_argument(
        "--budget",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="compile and measure for so long, as in 60s or 5m (default: 60s)",
    )
    tune.add_argument(
        "--forget", action="store_true", help="go back to the costs that come with fa3"
    )
    tune.set_defaults(command=run_tune)


def add_mask(command: argparse.ArgumentParser) -> None:
    command.add_argument("--causal", action="store_true", help="hide keys after a query's position")
    command.add_argument(
        "--window",
        nargs=2,
        type=int,
        metavar=("L", "R"),
        default=(NO_BOUND, NO_BOUND),
        help="keys to either side of a query's position, -1 for all; --causal sets R to 0",
    )


def add_cache(cache: argparse.ArgumentParser) -> None:
    actions = cache.add_subparsers(metavar="action")
    cache.set_defaults(command=run_cache, action="show")
    for action, help_text in (
        ("show", "folder, number of kernels, bytes and ages; the default"),
        ("verify", "remove what is damaged, or can have been written by others"),
        ("clear", "remove all kernels"),
        ("bound", "remove the kernels that were not used for longest"),
    ):
        added = actions.add_parser(action, help=help_text)
        added.set_defaults(action=action)
        if action == "bound":
            added.add_argument("size", type=byte_count, help="most bytes that stay, as in 500M")


def head_counts(text: str) -> tuple[int, int]:
    """The numbers of query heads and of key/value heads in "32,8"."""
    if not re.fullmatch(r"\d+,\d+", text):
        raise argparse.ArgumentTypeError(f"needs two integers HQ,HKV, got {text!r}")
    query_heads, kv_heads = map(int, text.split(","))
    return query_heads, kv_heads


def seconds(text: str) -> float:
    """The seconds in "60", "60s" or "1.5m"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"needs a time as in 60s or 5m, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def byte_count(text: str) -> int:
    """The bytes in "500M" or "1.5G", in powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"needs bytes as in 500M or 1.5G, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


# ------------------------------------------------------------------------------------ commands


def run_info(options: argparse.Namespace) -> None:
    from fa3.tools.info import show_info

    show_info(fa3.__version__)


def run_plan(options: argparse.Namespace) -> None:
    from fa3.tools.plan_command import show_plan

    show_plan(options)


def run_compile(options: argparse.Namespace) -> None:
    report = fa3.warmup(
        options.heads,
        options.head_dim,
        preset=options.preset,
        head_dim_v=options.head_dim_v,
        dtype=options.dtype,
        causal=not (options.full or options.window),
        window_size=tuple(options.window) if options.window else None,
        softcap=options.softcap,
        sinks=options.sinks,
        calls=options.calls,
        page_sizes=tuple(options.page_size or PAGE_SIZES),
        rotary=options.rotary,
        rotary_dtype=options.rotary_dtype,
        processes=options.processes,
    )
    print(
        f"{len(report.kernels)} kernels: {report.present} were there, {report.compiled} compiled, "
        f"in {report.seconds:.0f} s"
    )


def run_tune(options: argparse.Namespace) -> None:
    from fa3.tools.tune_command import tune_here

    tune_here(options)


def run_cache(options: argparse.Namespace) -> None:
    from fa3.running import cache_upkeep

    if options.action == "show":
        from fa3.tools.cache_report import show_cache

        show_cache()
        return
    if options.action == "bound":
        done = cache_upkeep.bound(options.size)
    else:
        done = {"verify": cache_upkeep.verify, "clear": cache_upkeep.clear}[options.action]()
    print(
        f"removed {done.removed} kernels, {done.removed_bytes / 1e6:.1f} MB; "
        f"{done.kept} remain, {done.kept_bytes / 1e6:.1f} MB"
    )


def run_demo(options: argparse.Namespace) -> None:
    from fa3.tools.demo import demo

    demo(options.png)


if __name__ == "__main__":
    main()
