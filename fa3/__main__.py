"""The command line: `fa3 info | plan | compile | tune | demo`, also as `python -m fa3`.

What a command needs is imported when it runs: `--help` needs neither torch nor the compiler.
"""

import importlib
import os
import signal
import sys

import fa3
from fa3.tools.arguments import fail_usage, make_parser


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
        module, function = COMMANDS[options.command].split(":")
        getattr(importlib.import_module(module), function)(options)
    except BrokenPipeError:
        raise
    except ValueError as error:
        fail_usage(f"fa3 {options.command}", error)
    except (ModuleNotFoundError, OSError, RuntimeError) as error:
        sys.exit(f"fa3 {options.command}: {error}")


COMMANDS = {
    "info": "fa3.tools.info:show_info",
    "plan": "fa3.tools.plan_command:show_plan",
    "compile": "fa3.tools.warmup:run_compile",
    "tune": "fa3.tools.tune:tune_here",
    "demo": "fa3.tools.demo:show_demo",
}
"""What runs a command: a function that takes its options."""

if __name__ == "__main__":
    main()
