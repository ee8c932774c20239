"""What `fa3 info` prints: GPU, versions, kernels on disk, tuned shapes, environment variables."""

import argparse
import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fa3.running.code_cache import cache_dir, check_trust
from fa3.settings import ACCEPTED, SETTINGS

CACHE_DIR = "FA3_CACHE_DIR"


def show_info(options: argparse.Namespace) -> None:
    """Print all of it, by the options of the command line."""
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
    rows = (
        ("fa3", options.version),
        ("GPU", gpu),
        ("driver", driver),
        ("torch", torch.__version__),
        ("CuTe DSL", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("cache", describe_cache()),
        ("tuned", f"{tuned or 'no'} shape{'s' * (tuned > 1)}"),
        *(("variable", line) for line in describe_variables()),
    )
    for name, value in rows:
        print(f"{name:9} {value}")


def describe_cache() -> str:
    """Return folder and number of compiled kernels, or why it is unused."""
    try:
        folder = cache_dir()
        sizes = [path.stat().st_size for path in folder.glob("*.o")]
        text = f"{folder}, {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"
    except (OSError, RuntimeError) as error:
        return f"none: {error}"
    try:
        check_trust(folder, folder.stat())
    except FileNotFoundError:
        pass  # made with the first kernel
    except OSError as error:
        text += f"; not used: {error.strerror}"
    return text


def describe_variables() -> Iterator[str]:
    """Yield a line for each environment variable of fa3, also unknown ones."""
    for name, value in SETTINGS.items():
        accepted = " or ".join(ACCEPTED[name])
        refused = "" if value in ACCEPTED[name] else f": refused by every call, must be {accepted}"
        yield f"{name}={value}{refused}"
    yield f"{CACHE_DIR}={os.environ.get(CACHE_DIR, '')}"
    for name in sorted(os.environ):
        if name.startswith("FA3_") and name not in (*SETTINGS, CACHE_DIR):
            yield f"{name}: nothing reads it"
