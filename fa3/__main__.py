"""The command line: `fa3 info | plan | compile | tune | cache | demo`, also as `python -m fa3`.

What a command needs is imported when it runs: `--help` needs neither torch nor the compiler.
"""

import argparse
import os
import signal
import sys

import fa3
from fa3.tools.arguments import fail_usage, make_parser
from fa3.tools.models import PAGE_SIZES


def main(arguments: list[str] | None = None) -> None:
    """Run one command.

    Wrong arguments end with status 2, what else goes wrong with 1; each says why in one line.
    """
    try:
        try:
            run(arguments)
        finally:
            # Without an open standard output Python has none.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("fa3: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        # As a program ends that knows nothing of signals; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def run(arguments: list[str] | None) -> None:
    options = make_parser(fa3.__version__).parse_args(arguments)
    try:
        COMMANDS[options.command](options)
    except BrokenPipeError:
        raise
    except ValueError as error:
        fail_usage(f"fa3 {options.command}", error)
    except (ModuleNotFoundError, OSError, RuntimeError) as error:
        sys.exit(f"fa3 {options.command}: {error}")


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
        dry_run=options.dry_run,
    )
    print(report)


def run_tune(options: argparse.Namespace) -> None:
    from fa3.tools.tune import tune_here

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


COMMANDS = {
    "info": run_info,
    "plan": run_plan,
    "compile": run_compile,
    "tune": run_tune,
    "cache": run_cache,
    "demo": run_demo,
}

if __name__ == "__main__":
    main()
