"""Costs that `fa3 tune` has fitted to this machine's GPUs, next to the compiled kernels.

`fa3.tools.tune_command` writes them, and `devices.gpu_of` gives them to the planner. They are read
once in a process, so that its plans never change: costs that are written meanwhile count for
processes that start later. A file must be whole and trusted as kernels must (`running.code_cache`);
if it is not, a warning names it, and the costs that come with fa3 are taken.
"""

import re
import threading
import warnings
from pathlib import Path

from fa3.planning.costs import Costs, parse_costs, text_of
from fa3.running.code_cache import cache_dir, check_trust, read, write

OF_COSTS = ".costs"

READ: dict[str, Costs | None] = {}
"""What this process has read, by the GPU's name."""

READING = threading.Lock()


def tuned_costs(gpu_name: str) -> Costs | None:
    """The costs that this process takes for a GPU; None if it was not tuned when they were read."""
    with READING:
        if gpu_name not in READ:
            READ[gpu_name] = read_costs(gpu_name)
        return READ[gpu_name]


def tuned_path(gpu_name: str, suffix: str = OF_COSTS) -> Path:
    """The file of a GPU's costs, or another one next to it.

    Raises:
        RuntimeError: there is no folder for it.
    """
    name = re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
    return cache_dir() / f"tuned-{name}{suffix}"


def read_costs(gpu_name: str) -> Costs | None:
    """The costs on disk; None if there are none. Warns of a file that is not taken."""
    try:
        path = tuned_path(gpu_name)
    except RuntimeError:
        return None
    content = read_kept(path)
    if content is None:
        return None
    try:
        costs = parse_costs(content.decode())
        if costs.gpu != gpu_name or not costs.when:
            raise ValueError(f"they are of a {costs.gpu}")
    except (LookupError, TypeError, ValueError) as error:
        ignore(path, f"not costs of a {gpu_name} as this version of fa3 writes them ({error})")
        return None
    return costs


def read_kept(path: Path) -> bytes | None:
    """What `write_kept` wrote; None if there is no file, or it is damaged or not to be trusted, of
    which a warning tells."""
    try:
        status = path.lstat()
    except OSError:
        return None
    content = read(path)
    if content is None:
        why = "damaged, or cannot be read"
        try:
            check_trust(path.parent, path.parent.stat())
            check_trust(path, status)
        except OSError as error:
            why = f"not to be trusted: {error.strerror}"
        ignore(path, why)
    return content


def ignore(path: Path, why: str) -> None:
    """Warn that a file is not taken."""
    warnings.warn(
        f"fa3 ignores {path}, which is {why}. `fa3 tune` writes it anew",
        RuntimeWarning,
        stacklevel=2,
    )


def write_kept(path: Path, text: str) -> None:
    """Write a file that `read_kept` reads, in a folder that is made if it is missing.

    Raises:
        OSError: that is not possible, or others may write to its folder.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write(path, text.encode())


def keep_costs(costs: Costs) -> Path:
    """Write a GPU's costs for processes that start later; return the file."""
    path = tuned_path(costs.gpu)
    write_kept(path, text_of(costs))
    return path
