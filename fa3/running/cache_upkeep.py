"""Upkeep of the folder of compiled kernels, for the command line: look, verify, clear, bound.

Only files that `code_cache` names are ever removed: objects, their locks, and unfinished files of
processes that have ended. All else in the folder, which may be a shared one, is left alone: plans
that were tuned to a GPU (`fa3.calls.tuned_plans`) stay. As for loading, the folder must belong to
the user or to root, and no other user may write to it.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fa3.running.code_cache import cache_dir, check_trust, read

OBJECT_NAME = re.compile(r"[0-9a-f]{64}\.o")
LOCK_NAME = re.compile(r"[0-9a-f]{64}\.lock")
UNFINISHED_NAME = re.compile(r"([0-9a-f]{64}|tuned-[a-z0-9-]+)\.[0-9a-f]{16}\.tmp")

ABANDONED_SECONDS = 3600
"""Age from which no process still writes an unfinished file: writing takes milliseconds."""


class KernelFile(NamedTuple):
    """A compiled kernel on disk.

    Fields:
        size: bytes.
        used: when it was made or last used, in seconds since 1970.
    """

    path: Path
    size: int
    used: float


class Removal(NamedTuple):
    """What was removed and what remains: numbers of kernels, and their bytes."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int


def kernel_files(folder: Path) -> list[KernelFile]:
    """The compiled kernels in a folder, those used last first; none if there is no folder."""
    found = []
    for path in named(folder, OBJECT_NAME):
        with contextlib.suppress(OSError):  # just removed
            status = path.lstat()
            found.append(KernelFile(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda file: (-file.used, file.path))


def named(folder: Path, pattern: re.Pattern) -> list[Path]:
    """The paths in a folder whose names match."""
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except FileNotFoundError:
        return []


def verify() -> Removal:
    """Remove kernels that are damaged, or that others can have written, and abandoned files."""
    return keep_only(lambda file: read(file.path) is not None)


def clear() -> Removal:
    """Remove all kernels."""
    return keep_only(lambda file: False)


def bound(size: int) -> Removal:
    """Remove the kernels that were not used for longest, until all take `size` bytes at most."""
    total = 0

    def fits(file: KernelFile) -> bool:
        nonlocal total
        total += file.size
        return total <= size

    return keep_only(fits)


def keep_only(is_kept: Callable[[KernelFile], bool]) -> Removal:
    """Remove the kernels that are not to be kept, asked from the one used last, and what is left
    of kernels that are not there.

    Raises:
        PermissionError: the folder may be written to by others, or a file cannot be removed.
        RuntimeError: there is no folder for kernels.
    """
    folder = cache_dir()
    with contextlib.suppress(FileNotFoundError):
        check_trust(folder, folder.stat())
    kept: list[KernelFile] = []
    dropped: list[KernelFile] = []
    for file in kernel_files(folder):
        (kept if is_kept(file) else dropped).append(file)
    remove(file.path for file in dropped)
    names = {file.path.stem for file in kept}
    remove(path for path in named(folder, LOCK_NAME) if path.stem not in names)
    before = time.time() - ABANDONED_SECONDS
    remove(path for path in named(folder, UNFINISHED_NAME) if path.lstat().st_mtime < before)
    return Removal(len(dropped), total_size(dropped), len(kept), total_size(kept))


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def total_size(files: Iterable[KernelFile]) -> int:
    return sum(file.size for file in files)
