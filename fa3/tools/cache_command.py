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
from typing import NamedTuple

from fa3.running.code_cache import cache_dir, check_trust

OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.o")
LOCK_NAME = re.compile(r"[0-9a-f]{64}\.lock")
UNFINISHED_NAME = re.compile(r"([0-9a-f]{64}|tuned-[a-z0-9-]+)\.[0-9a-f]{16}\.tmp")

ABANDONED_SECONDS = 3600
"""Age from which no process still writes an unfinished file: writing takes milliseconds."""

SPANS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


class KernelFile(NamedTuple):
    """A compiled kernel on disk.

    Fields:
        size: bytes.
        used: when it was made or last used, in seconds since 1970.
    """

    path: Path
    size: int
    used: float


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
    remove(file.path for file in files)
    remove(named(folder, LOCK_NAME))
    # What processes have left that no longer run.
    before = time.time() - ABANDONED_SECONDS
    remove(path for path in named(folder, UNFINISHED_NAME) if path.lstat().st_mtime < before)
    print(f"removed {len(files)} kernels, {megabytes(files)}")


def kernel_files(folder: Path) -> list[KernelFile]:
    """The compiled kernels in a folder, last used first; none if there is no folder."""
    files = []
    for path in named(folder, OBJECT_NAME):
        with contextlib.suppress(OSError):  # just removed
            status = path.lstat()
            files.append(KernelFile(path, status.st_size, status.st_mtime))
    return sorted(files, key=lambda file: (-file.used, file.path))


def named(folder: Path, pattern: re.Pattern) -> list[Path]:
    """The paths in a folder that have names which match."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def megabytes(files: Iterable[KernelFile]) -> str:
    """The size of files together."""
    return f"{sum(file.size for file in files) / 1e6:.1f} MB"


def show(folder: Path, files: list[KernelFile]) -> None:
    """Print folder, number of kernels, bytes, and when they were last used."""
    lines = {"folder": folder, "kernels": len(files), "size": megabytes(files)}
    if files:
        last, first = (age(time.time() - file.used) for file in (files[0], files[-1]))
        lines["last used"] = f"{last} ago; the one unused for longest {first} ago"
    try:
        check_trust(folder, folder.stat())
    except FileNotFoundError:
        lines["note"] = "made with the first kernel"
    except OSError as error:
        lines["not used"] = error.strerror
    for name, value in lines.items():
        print(f"{name:9} {value}")


def age(seconds: float) -> str:
    """A span of time in its largest unit, rounded down."""
    for unit, length in SPANS:
        if seconds >= 2 * length:
            return f"{int(seconds / length)} {unit}"
    return "a moment"
