"""What `fa3 cache show` prints: the folder of compiled kernels, and what is in it."""

import time

from fa3.running.cache_upkeep import kernel_files, total_size
from fa3.running.code_cache import cache_dir, check_trust

SPANS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def show_cache() -> None:
    """Print folder, number of kernels, bytes, and when they were last used.

    Raises:
        RuntimeError: there is no folder for kernels.
    """
    folder = cache_dir()
    files = kernel_files(folder)
    lines = {"folder": folder, "kernels": len(files), "size": f"{total_size(files) / 1e6:.1f} MB"}
    if files:
        now = time.time()
        first, last = (age(now - file.used) for file in (files[-1], files[0]))
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
