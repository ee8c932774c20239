"""The options of the command line. Needs the standard library only, so that `--help` comes at once.

`fa3.__main__` runs what they ask for.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from fa3.problem import NO_BOUND
from fa3.tools.models import CALLS, PRESETS, ROTARIES, SHORT_DTYPES, preset_of

DEFAULT_SHAPE = "1,4096,4096,32,8,128"

GPU_NAMES = ("H100", "H200")
"""What `fa3.planning.gpu.GPUS` has."""

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""What a size may end with -> bytes."""

USAGE_ERROR = 2
"""Exit status after wrong arguments."""

Shape = tuple[int, int, int, int, int, int]
"""batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim."""


class Parser(argparse.ArgumentParser):
    """A parser of one command, whose help ends with examples."""

    def __init__(self, *, examples: str = "", **options) -> None:
        if examples:
            options["epilog"] = f"examples:\n{examples.rstrip()}"
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # `--head-dim` of `fa3 compile` must not be taken for `--head-dim-v` of `fa3 plan`.
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but each command refuses what it does not know by itself."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and end as all wrong arguments do."""
        fail_usage(self.prog, message)


def fail_usage(command: str, message: object) -> NoReturn:
    """End with status 2 and one line that says what is wrong with the arguments."""
    print(f"{command}: {message} (see {command} --help)", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def make_parser(version: str) -> Parser:
    """The parser of the whole command line; `command` names what is to run."""
    top = Parser(
        prog="fa3",
        description="Attention for NVIDIA Hopper GPUs: show plans, compile kernels ahead of time.",
        examples="  fa3 info\n  fa3 plan --shape 1,4096,4096,32,8,128 --causal\n"
        "  fa3 compile --preset llama3-8b",
    )
    top.add_argument("--version", action="version", version=f"fa3 {version}")
    commands = top.add_subparsers(required=True, metavar="command", dest="command")
    commands.add_parser(
        "info",
        help="show the GPU, versions and the folder of compiled kernels",
        examples="  fa3 info",
    )
    add_plan(commands)
    add_compile(commands)
    add_tune(commands)
    add_cache(commands)
    demo = commands.add_parser(
        "demo",
        help="a short tour: on a Hopper GPU it checks and times a call, else it compiles one",
        examples="  fa3 demo\n  fa3 demo --png order.png",
    )
    demo.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        default=Path("tile_order.png"),
        help="where the picture of the plan goes (default: %(default)s)",
    )
    return top


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
  fa3 plan --causal --json                               # the same for programs
  fa3 plan --causal --png order.png --trace order.json   # what each SM does when
""".lstrip("\n"),
    )
    plan.add_argument(
        "--call",
        choices=("dense", "packed", "cache", "backward"),
        default="dense",
        help="dense: flash_attn_func; packed: flash_attn_varlen_func with sequences of equal "
        "lengths; cache: flash_attn_with_kvcache, seqlen_k being what the cache has room for; "
        "backward: the gradients of flash_attn_func (default: dense)",
    )
    plan.add_argument(
        "--shape",
        type=shape,
        metavar="B,SQ,SK,HQ,HKV,D",
        default=DEFAULT_SHAPE,
        help="batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim (default: %(default)s)",
    )
    plan.add_argument("--head-dim-v", type=int, metavar="D", help="columns of v, if not head_dim")
    add_mask(plan)
    plan.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")
    plan.add_argument(
        "--gpu",
        choices=GPU_NAMES,
        help="plan for this GPU (default: the Hopper GPU of this machine, else an H200)",
    )
    plan.add_argument(
        "--page-size", type=int, default=0, metavar="N", help="the cache has pages of N tokens"
    )
    plan.add_argument("--append", action="store_true", help="the call appends tokens to the cache")
    plan.add_argument(
        "--schedule",
        metavar="NAME",
        help="run the forward kernel with this schedule: single, static, list, dynamic or split "
        "(default: the planner chooses)",
    )
    plan.add_argument(
        "--record",
        action="store_true",
        help="also run the plan on the Hopper GPU of this machine, and show what each SM did when",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--png", type=Path, metavar="FILE", help="draw what each SM does when")
    plan.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the same as JSON for ui.perfetto.dev"
    )


def add_compile(commands) -> None:
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
""".lstrip("\n"),
    )
    model.add_argument(
        "--preset",
        type=preset,
        metavar="MODEL",
        help=f"one of {', '.join(PRESETS)}, or the path of a model's config.json; instead of its "
        "sizes",
    )
    model.add_argument(
        "--heads", type=head_counts, metavar="HQ,HKV", help="query heads, and key/value heads"
    )
    model.add_argument("--head-dim", type=int, metavar="D", help="columns of q and k")
    model.add_argument("--head-dim-v", type=int, metavar="D", help="columns of v, if not head_dim")
    model.add_argument(
        "--dtype", choices=SHORT_DTYPES, help="default: the dtype of config.json, else bf16"
    )
    mask = model.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="hide keys after a query's position")
    mask.add_argument("--full", action="store_true", help="hide no keys (default: --causal)")
    mask.add_argument(
        "--window",
        nargs=2,
        type=window_bound,
        metavar=("L", "R"),
        help="keys that a query sees to the left and to the right of its position, -1 for all",
    )
    model.add_argument("--softcap", type=float, default=0.0, metavar="X", help="bound of scores")
    model.add_argument("--sinks", action="store_true", help="the heads have attention sinks")
    model.add_argument(
        "--calls",
        nargs="+",
        choices=CALLS,
        default=tuple(CALLS),
        help="the functions that the model calls; "
        + "; ".join(f"{name}: {call}" for name, call in CALLS.items())
        + " (default: all)",
    )
    model.add_argument(
        "--page-size",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a page of the cache, 0 for no pages; may be repeated (default: 0 and 64)",
    )
    model.add_argument(
        "--rotary",
        choices=ROTARIES,
        default="halves",
        help="the rotary embedding turns both halves of a head against each other, as Llama does, "
        "or neighbouring pairs of columns (default: %(default)s)",
    )
    model.add_argument(
        "--rotary-dtype",
        choices=(*SHORT_DTYPES, "float32"),
        help="dtype of the rotary embedding's tables (default: the model's)",
    )
    model.add_argument(
        "--processes", type=int, metavar="N", help="compile in N processes (default: one per core)"
    )
    model.add_argument(
        "--dry-run", action="store_true", help="list the kernels and compile nothing"
    )


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
    task.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="B,SQ,SK,HQ,HKV,D",
        help="batch size, queries, keys, query heads, key/value heads and head size",
    )
    task.add_argument("--forget", action="store_true", help="leave all plans to the planner again")
    add_mask(tune)
    tune.add_argument("--dtype", choices=SHORT_DTYPES, default="bf16", help="default: bf16")


def add_mask(command: argparse.ArgumentParser) -> None:
    command.add_argument("--causal", action="store_true", help="hide keys after a query's position")
    command.add_argument(
        "--window",
        nargs=2,
        type=window_bound,
        metavar=("L", "R"),
        default=(NO_BOUND, NO_BOUND),
        help="keys that a query sees to the left and to the right of its position, -1 for all; "
        "--causal sets R to 0",
    )


def add_cache(commands) -> None:
    cache = commands.add_parser(
        "cache",
        help="look after the compiled kernels on disk",
        examples="  fa3 cache\n  fa3 cache bound 500M\n  fa3 cache clear",
    )
    actions = cache.add_subparsers(metavar="action")
    cache.set_defaults(action="show")
    for action, help_text in (
        ("show", "folder, number of kernels, bytes and ages; the default"),
        ("verify", "remove what is damaged, or can have been written by others"),
        ("clear", "remove all kernels"),
        ("bound", "remove the kernels that were not used for longest"),
    ):
        size = " 500M" if action == "bound" else ""
        added = actions.add_parser(
            action, help=help_text, description=help_text, examples=f"  fa3 cache {action}{size}"
        )
        added.set_defaults(action=action)
        if action == "bound":
            added.add_argument("size", type=byte_count, help="most bytes that stay, as in 500M")


# ------------------------------------------------------------------------------ kinds of values


def shape(text: str) -> Shape:
    """The six sizes in "1,4096,4096,32,8,128"."""
    sizes = text.split(",")
    if len(sizes) != 6 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"needs six positive integers B,SQ,SK,HQ,HKV,D, got {text!r}"
        )
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = map(int, sizes)
    return batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim


def preset(text: str) -> str:
    """The name of a well-known model, or the path of a model's `config.json`."""
    try:
        preset_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def window_bound(text: str) -> int:
    """A bound of a window."""
    if not re.fullmatch(r"-1|\d+", text):
        raise argparse.ArgumentTypeError(f"needs integers of -1 or more, got {text!r}")
    return int(text)


def head_counts(text: str) -> tuple[int, int]:
    """The numbers of query heads and of key/value heads in "32,8"."""
    if not re.fullmatch(r"\d+,\d+", text):
        raise argparse.ArgumentTypeError(f"needs two integers HQ,HKV, got {text!r}")
    query_heads, kv_heads = map(int, text.split(","))
    return query_heads, kv_heads


def byte_count(text: str) -> int:
    """The bytes in "500M" or "1.5G", in powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)b?", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"needs bytes as in 500M or 1.5G, got {text!r}")
    count = float(match[1]) * UNITS[match[2]]
    if count == float("inf"):
        raise argparse.ArgumentTypeError(f"needs a finite number of bytes, got {text!r:.200}")
    return int(count)
