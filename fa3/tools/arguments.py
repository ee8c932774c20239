"""The options of the command line; needs the standard library only.

So `--help` comes at once. `fa3.__main__` runs what they ask for.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fa3.problem import NO_BOUND
from fa3.tools.models import CACHE_DTYPES, CALLS, PRESETS, ROTARIES, SHORT_DTYPES

DEFAULT_SHAPE = "1,4096,4096,32,8,128"

GPU_NAMES = ("H100", "H200")  # what `fa3.planning.costs.GPUS` has

SHAPE = "B,SQ,SK,HQ,HKV,D"  # batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim

BOUNDS: dict[str, Any] = {"nargs": 2, "metavar": ("L", "R")}
"""An option that takes the bounds of a window."""


class Parser(argparse.ArgumentParser):
    """A parser of one command; its help ends with examples."""

    def __init__(self, *, examples: str, **options) -> None:
        options["epilog"] = f"examples:\n{examples.strip(chr(10))}"
        formatter = argparse.RawDescriptionHelpFormatter
        # `--head-dim` of `fa3 compile` must not be taken for `--head-dim-v` of `fa3 plan`.
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and end by `fail_usage`."""
        fail_usage(self.prog, message)


def fail_usage(command: str, message: object) -> NoReturn:
    """End with status 2 and one line about wrong arguments."""
    print(f"{command}: {message} (see {command} --help)", file=sys.stderr)
    sys.exit(2)


def make_parser(version: str) -> Parser:
    """The parser of the command line; `command` names what is to run."""
    top = Parser(
        prog="fa3",
        description="Attention for NVIDIA Hopper GPUs: show plans, compile kernels ahead of time.",
        examples="  fa3 info\n  fa3 plan --shape 1,4096,4096,32,8,128 --causal\n"
        "  fa3 compile --preset llama3-8b",
    )
    top.add_argument("--version", action="version", version=f"fa3 {version}")
    commands = top.add_subparsers(required=True, metavar="command", dest="command")
    about = "show the GPU, versions and the folder of compiled kernels"
    info = commands.add_parser("info", help=about, examples="  fa3 info")
    info.set_defaults(version=version)
    add_plan(commands)
    add_compile(commands)
    add_tune(commands)
    demo = commands.add_parser(
        "demo",
        help="a short tour: on a Hopper GPU it checks and times a call, else it compiles one",
        examples="  fa3 demo\n  fa3 demo --png order.png",
    )
    where = "where the picture of the plan goes (default: %(default)s)"
    add_option(demo, "--png", Path, where, default=Path("tile_order.png"))
    return top


def add_option(command: Any, flag: str, kind: Any, text: str, **settings: Any) -> None:
    """Add an option: a flag (`bool`), choices, or a reader of values."""
    if kind is bool:
        settings.setdefault("action", "store_true")
    elif isinstance(kind, tuple | dict):
        settings["choices"] = kind
    else:
        settings = {"type": kind, "metavar": METAVARS.get(kind)} | settings
    command.add_argument(flag, help=text, **settings)


def add_plan(commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="show which kernels a call would run, and how",
        description="Show which kernels a call would run, how they divide the work, and the time "
        "that is predicted.",
        examples="""
  fa3 plan --shape 1,4096,4096,32,8,128 --causal --gpu H100
  fa3 plan --shape 1,1,32768,32,8,128 --causal           # few queries: the decode kernel
  fa3 plan --call cache --shape 8,1,8192,32,8,128 --causal --page-size 64
  fa3 plan --call packed --shape 64,512,512,32,8,128 --causal
  fa3 plan --call backward --shape 4,4096,4096,16,16,192 --head-dim-v 128 --causal
  fa3 plan --causal --png order.png                      # what each SM does when
""",
    )
    add_option(
        plan,
        "--call",
        ("dense", "packed", "cache", "backward"),
        "dense: flash_attn_func; packed: flash_attn_varlen_func with sequences of equal lengths; "
        "cache: flash_attn_with_kvcache, seqlen_k being what the cache has room for; backward: the "
        "gradients of flash_attn_func (default: dense)",
        default="dense",
    )
    sizes = "batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim (default: %(default)s)"
    add_option(plan, "--shape", numbers, sizes, metavar=SHAPE, default=DEFAULT_SHAPE)
    add_shape_options(plan)
    gpu = "plan for this GPU (default: the Hopper GPU of this machine, else an H200)"
    add_option(plan, "--gpu", GPU_NAMES, gpu)
    add_option(plan, "--page-size", int, "the cache has pages of N tokens", default=0)
    add_option(plan, "--append", bool, "the call appends tokens to the cache")
    schedules = "run the forward kernel with this schedule: single, static, list, dynamic or split "
    add_option(plan, "--schedule", str, f"{schedules}(default: the planner chooses)")
    add_option(plan, "--png", Path, "draw what each SM does when")


def add_compile(commands) -> None:
    """The options of `fa3.warmup`, under its names."""
    model = commands.add_parser(
        "compile",
        help="compile all kernels of a model ahead of time",
        description="Compile all kernels that a model can need and keep them on disk, so that no "
        "call waits for the compiler. Needs no GPU.",
        examples="""
  fa3 compile --preset llama3-8b
  fa3 compile --preset llama3-8b --calls paged            # only what vLLM calls
  fa3 compile --preset Llama-3.1-8B/config.json           # a model's own file from Hugging Face
  fa3 compile --heads 32,8 --head-dim 128 --dry-run       # list the kernels, compile nothing
""",
    )
    presets = f"one of {', '.join(PRESETS)}, or the path of a model's config.json"
    presets += (
        ", taken as a causal decoder; it says the sizes, mask, softcap and sinks that are not named"
    )
    add_option(model, "--preset", str, presets)
    add_option(model, "--heads", numbers, "query heads, and key/value heads", metavar="HQ,HKV")
    add_option(model, "--head-dim", int, "columns of q and k")
    add_option(model, "--head-dim-v", int, HEAD_DIM_V_HELP)
    add_option(model, "--dtype", SHORT_DTYPES, "default: the dtype of config.json, else bf16")
    mask = model.add_mutually_exclusive_group()
    add_option(mask, "--causal", bool, CAUSAL_HELP, default=True)
    full = "hide no keys (default: --causal)"
    add_option(mask, "--full", bool, full, dest="causal", action="store_false")
    add_option(mask, "--window", int, WINDOW_HELP, **BOUNDS, dest="window_size")
    add_option(model, "--softcap", float, "bound of scores")
    add_option(model, "--sinks", bool, "the heads have attention sinks")
    calls = "; ".join(f"{name}: {call}" for name, call in CALLS.items())
    calls = f"the functions that the model calls; {calls} (default: all)"
    add_option(model, "--calls", CALLS, calls, nargs="+")
    pages = "tokens of a page of the cache, 0 for no pages; may be repeated (default: 0 and 64)"
    add_option(model, "--page-size", int, pages, dest="page_sizes", action="append")
    rotary = (
        "the rotary embedding of appended tokens: turns both halves of a head against each other, "
        "as Llama does, or neighbouring pairs of columns; none: no embedding (default: halves)"
    )
    add_option(model, "--rotary", ROTARIES, rotary)
    caches = "dtype of the cache: the model's, or float8_e4m3fn (default: auto)"
    add_option(model, "--cache-dtype", CACHE_DTYPES, caches)
    add_option(model, "--processes", int, "compile in N processes (default: one per core)")
    add_option(model, "--dry-run", bool, "list the kernels and compile nothing")


def add_tune(commands) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure plans of some shapes on the GPU of this machine, and keep the fastest",
        description="Measure the planner's best plans of some shapes on the Hopper GPU of this "
        "machine, and keep the fastest of each. In processes that start later, calls of these "
        "shapes run by it.",
        examples="  fa3 tune --shapes 8,2048,2048,32,8,128 1,512,9000,32,8,128 --causal\n"
        "  fa3 tune --forget",
    )
    task = tune.add_mutually_exclusive_group(required=True)
    sizes = "batch size, queries, keys, query heads, key/value heads and head size"
    add_option(task, "--shapes", numbers, sizes, metavar=SHAPE, nargs="+")
    add_option(task, "--forget", bool, "leave all plans to the planner again")
    add_shape_options(tune)


HEAD_DIM_V_HELP = "columns of v, if not head_dim"
CAUSAL_HELP = "hide keys after a query's position"
WINDOW_HELP = "keys that a query sees to the left and to the right of its position, -1 for all"


def add_shape_options(command: argparse.ArgumentParser) -> None:
    """Add what a shape does not say of a call."""
    add_option(command, "--head-dim-v", int, HEAD_DIM_V_HELP)
    add_option(command, "--causal", bool, CAUSAL_HELP)
    window = f"{WINDOW_HELP}; --causal sets R to 0"
    add_option(command, "--window", int, window, **BOUNDS, default=(NO_BOUND, NO_BOUND))
    add_option(command, "--dtype", SHORT_DTYPES, "default: bf16", default="bf16")


def numbers(text: str) -> tuple[int, ...]:
    """The integers between commas."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers and commas, got {text!r}") from None


METAVARS: dict[Callable, str] = {int: "N", float: "X", str: "NAME", Path: "FILE"}
"""How help shows a value, unless the option says it."""
