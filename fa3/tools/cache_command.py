"""What `fa3 cache` does: shows and clears the folder of compiled kernels.

Only files that `code_cache` names are ever removed: objects, their locks, and unfinished files of
processes that have ended. All else in the folder, which may be a shared one, is left alone: plans
that were tuned to a GPU (`fa3.calls.tuned_plans`) stay. As for loading, the folder must belong to
the user or to root, and no other user may write to it.
"""

import argparse
import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

from fa3.running.code_cache import cache_dir, check_trust

OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.o")
LOCK_NAME = re.compile(r"[0-9a-f]{64}\.lock")
UNFINISHED_NAME = re.compile(r"([0-9a-f]{64}|tuned-[a-z0-9-]+)\.[0-9a-f]{16}\.tmp")

ABANDONED_SECONDS = 3600
"""Age from which no process still writes an unfinished file: writing takes milliseconds."""


def run_cache(options: argparse.Namespace) -> None:
    """Show the folder, or remove files from it; takes the options of the command line.

    Raises:
        PermissionError: the folder may be written to by others, or a file cannot be removed.
        RuntimeError: there is no folder for kernels.
    """
    folder = cache_dir()
    files = kernel_files(folder)
    if options.action == "show":
        show(folder, files)
        return
    with contextlib.suppress(FileNotFoundError):
        check_trust(folder, folder.stat())
    size = megabytes(files)
    remove(files)
    remove(named(folder, LOCK_NAME))
    # What processes have left that no longer run.
    before = time.time() - ABANDONED_SECONDS
    remove(path for path in named(folder, UNFINISHED_NAME) if path.lstat().st_mtime < before)
    print(f"removed {len(files)} kernels, {size}")


def kernel_files(folder: Path) -> list[Path]:
    """Return the compiled kernels in a folder; none if there is no folder."""
    return named(folder, OBJECT_NAME)


def named(folder: Path, pattern: re.Pattern) -> list[Path]:
    """The paths in a folder that have names which match."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def megabytes(files: Iterable[Path]) -> str:
    """Return the size of files together."""
    total = 0
    for path in files:
        with contextlib.suppress(OSError):  # just removed
            total += path.lstat().st_size
    return f"{total / 1e6:.1f} MB"


def show(folder: Path, files: list[Path]) -> None:
    """Print folder, number of kernels and bytes."""
    lines = {"folder": folder, "kernels": len(files), "size": megabytes(files)}
    try:
        check_trust(folder, folder.stat())
    except FileNotFoundError:
        lines["note"] = "made with the first kernel"
    except OSError as error:
        lines["not used"] = error.strerror
    for name, value in lines.items():
        print(f"{name:9} {value}")
