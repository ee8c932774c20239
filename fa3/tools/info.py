"""What `fa3 info` and `fa3 cache` do.

`info` prints GPU, versions, the kernel cache, how many shapes are tuned, and the environment
variables that fa3 reads. `cache` shows and clears the folder of compiled kernels. Only files that
`code_cache` names are ever removed: objects, their locks, and unfinished files of processes that
have ended. All else in the folder, which may be a shared one, is left alone. As for loading, the
folder must belong to the user or to root, and no other user may write to it.
"""

import argparse
import contextlib
import importlib.metadata
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from fa3.running.code_cache import cache_dir, check_trust
from fa3.settings import ACCEPTED, SETTINGS

CACHE_DIR = "FA3_CACHE_DIR"

KERNEL_NAME = re.compile(r"[0-9a-f]{64}\.(o|lock)")  # objects and their locks
UNFINISHED_NAME = re.compile(r"([0-9a-f]{64}|tuned-[a-z0-9-]+)\.[0-9a-f]{16}\.tmp")

ABANDONED_SECONDS = 3600
"""Age from which no process still writes an unfinished file: writing takes milliseconds."""


def show_info(options: argparse.Namespace) -> None:
    """Print all of it; takes the options of the command line, with the version of fa3."""
    import torch  # heavy: `fa3 cache` needs none

    gpu, tuned, driver = "none", 0, "none"
    if torch.cuda.is_available():
        # Only now, since it imports the compiler.
        from fa3.calls.tuned_plans import tuned_plans

        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        gpu = f"{properties.name}, {properties.multi_processor_count} SMs, capability {capability}"
        if capability != "9.0":
            gpu += "; the kernels need 9.0"
        tuned = len(tuned_plans(properties.name))
    with contextlib.suppress(OSError):
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    try:
        cache = f"{cache_dir()}, {describe_kernels(cache_dir())}"
    except RuntimeError as error:
        cache = f"none: {error}"
    print_table(
        ("fa3", options.version),
        ("GPU", gpu),
        ("driver", driver),
        ("torch", torch.__version__),
        ("CuTe DSL", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("cache", cache),
        ("tuned", f"{tuned or 'no'} shape{'s' * (tuned > 1)}"),
        *(("variable", line) for line in describe_variables()),
    )


def print_table(*rows: tuple[str, object]) -> None:
    """Print names with what they are."""
    for name, value in rows:
        print(f"{name:9} {value}")


def describe_variables() -> Iterator[str]:
    """Yield a line for each environment variable that fa3 reads, or looks as if it read it."""
    for name, value in SETTINGS.items():
        accepted = " or ".join(ACCEPTED[name])
        refused = "" if value in ACCEPTED[name] else f": refused by every call, must be {accepted}"
        yield f"{name}={value}{refused}"
    yield f"{CACHE_DIR}={os.environ.get(CACHE_DIR, '')}"
    for name in sorted(os.environ):
        if name.startswith("FA3_") and name not in (*SETTINGS, CACHE_DIR):
            yield f"{name}: nothing reads it"


def run_cache(options: argparse.Namespace) -> None:
    """Show the folder, or remove files from it; takes the options of the command line."""
    folder = cache_dir()
    kernels = describe_kernels(folder)
    rows: list[tuple[str, object]] = []
    try:
        check_trust(folder, folder.stat())
    except FileNotFoundError:
        rows = [("note", "made with the first kernel")]
    except OSError as error:
        if options.action == "clear":
            raise
        rows = [("not used", error.strerror)]
    if options.action == "show":
        print_table(("folder", folder), ("holds", kernels), *rows)
        return
    # What processes have left that no longer run.
    before = time.time() - ABANDONED_SECONDS
    unfinished = (x for x in named(folder, UNFINISHED_NAME) if x.lstat().st_mtime < before)
    for path in (*named(folder, KERNEL_NAME), *unfinished):
        path.unlink(missing_ok=True)
    print(f"removed {kernels}")


def named(folder: Path, pattern: re.Pattern) -> list[Path]:
    """Return the paths in a folder that have names which match; none if there is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []


def describe_kernels(folder: Path) -> str:
    """Return how many compiled kernels are in a folder, and how many bytes they take."""
    paths, size = [path for path in named(folder, KERNEL_NAME) if path.suffix == ".o"], 0
    for path in paths:
        with contextlib.suppress(OSError):  # just removed
            size += path.lstat().st_size
    return f"{len(paths)} kernels, {size / 1e6:.1f} MB"
