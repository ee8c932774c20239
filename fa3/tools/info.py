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
from pathlib import Path

from fa3.running.code_cache import cache_dir, check_trust
from fa3.settings import ACCEPTED, SETTINGS

CACHE_DIR = "FA3_CACHE_DIR"

OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.o")
LOCK_NAME = re.compile(r"[0-9a-f]{64}\.lock")
UNFINISHED_NAME = re.compile(r"([0-9a-f]{64}|tuned-[a-z0-9-]+)\.[0-9a-f]{16}\.tmp")

ABANDONED_SECONDS = 3600
"""Age from which no process still writes an unfinished file: writing takes milliseconds."""


def show_info(options: argparse.Namespace) -> None:
    """Print all of it; takes the options of the command line, with fa3's version among them."""
    import torch  # heavy: `fa3 cache` needs none

    gpu, tuned = "none", "no shape"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        gpu = f"{properties.name}, {properties.multi_processor_count} SMs, capability {capability}"
        if capability != "9.0":
            gpu += "; the kernels need 9.0"
        tuned = describe_tuned(properties.name)
    driver = "none"
    with contextlib.suppress(OSError):
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    cache = "none"
    try:
        cache = f"{cache_dir()}, " + ", ".join(count_kernels(cache_dir()))
    except RuntimeError as error:
        cache = f"none: {error}"
    for name, value in (
        ("fa3", options.version),
        ("GPU", gpu),
        ("driver", driver),
        ("torch", torch.__version__),
        ("CuTe DSL", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("cache", cache),
        ("tuned", tuned),
        *(("variable", line) for line in describe_variables()),
    ):
        print(f"{name:9} {value}")


def describe_variables() -> list[str]:
    """Return a line for each environment variable that fa3 reads, or looks as if it read it."""
    lines = []
    for name, value in SETTINGS.items():
        accepted = " or ".join(ACCEPTED[name])
        refused = "" if value in ACCEPTED[name] else f": refused by every call, must be {accepted}"
        lines.append(f"{name}={value}{refused}")
    lines.append(f"{CACHE_DIR}={os.environ.get(CACHE_DIR, '')}")
    others = sorted(name for name in os.environ if name.startswith("FA3_"))
    known = *SETTINGS, CACHE_DIR
    return lines + [f"{name}: nothing reads it" for name in others if name not in known]


def describe_tuned(gpu_name: str) -> str:
    """Return how many shapes `fa3 tune` has measured on a GPU."""
    # Only now, since it imports the compiler.
    from fa3.calls.tuned_plans import tuned_plans

    count = len(tuned_plans(gpu_name))
    return f"{count} shape{'s' * (count != 1)}" if count else "no shape"


def run_cache(options: argparse.Namespace) -> None:
    """Show the folder, or remove files from it; takes the options of the command line."""
    folder = cache_dir()
    count, size = count_kernels(folder)
    reason = None
    try:
        check_trust(folder, folder.stat())
    except FileNotFoundError:
        reason = "note", "made with the first kernel"
    except OSError as error:
        if options.action == "clear":
            raise
        reason = "not used", str(error.strerror)
    if options.action == "show":
        number, _ = count.split()
        lines = ("folder", folder), ("kernels", number), ("size", size), reason
        for name, value in filter(None, lines):
            print(f"{name:9} {value}")
        return
    # What processes have left that no longer run.
    before = time.time() - ABANDONED_SECONDS
    unfinished = (x for x in named(folder, UNFINISHED_NAME) if x.lstat().st_mtime < before)
    for path in (*named(folder, OBJECT_NAME), *named(folder, LOCK_NAME), *unfinished):
        path.unlink(missing_ok=True)
    print(f"removed {count}, {size}")


def named(folder: Path, pattern: re.Pattern) -> list[Path]:
    """Return the paths in a folder that have names which match; none if there is no folder."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []


def count_kernels(folder: Path) -> tuple[str, str]:
    """Return the number of compiled kernels in a folder, and their size together."""
    total, files = 0, named(folder, OBJECT_NAME)
    for path in files:
        with contextlib.suppress(OSError):  # just removed
            total += path.lstat().st_size
    return f"{len(files)} kernels", f"{total / 1e6:.1f} MB"
