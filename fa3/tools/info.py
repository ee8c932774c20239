"""What `python -m fa3 info` prints: GPU, versions, the kernel cache, how many shapes are tuned, and
the environment variables that fa3 reads."""

import argparse
import importlib.metadata
import os
from pathlib import Path

import torch

from fa3.running.code_cache import cache_dir
from fa3.settings import ACCEPTED, SETTINGS
from fa3.tools.cache_command import kernel_files, megabytes

CACHE_DIR = "FA3_CACHE_DIR"


def show_info(options: argparse.Namespace) -> None:
    """Print all of it; takes the options of the command line, with fa3's version among them."""
    gpu, tuned = "none", "no shape"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        gpu = f"{properties.name}, {properties.multi_processor_count} SMs, capability {capability}"
        if capability != "9.0":
            gpu += "; the kernels need 9.0"
        tuned = describe_tuned(properties.name)
    for name, value in (
        ("fa3", options.version),
        ("GPU", gpu),
        ("driver", driver_version()),
        ("torch", torch.__version__),
        ("CuTe DSL", importlib.metadata.version("nvidia-cutlass-dsl")),
        ("cache", describe_cache()),
        ("tuned", tuned),
        *(("variable", line) for line in describe_variables()),
    ):
        print(f"{name:9} {value}")


def describe_variables() -> list[str]:
    """A line for each environment variable that fa3 reads, or that looks as if it did."""
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
    """How many shapes `fa3 tune` has measured on a GPU."""
    # Only now, since it imports the compiler.
    from fa3.calls.tuned_plans import tuned_plans

    count = len(tuned_plans(gpu_name))
    return f"{count} shape{'s' * (count != 1)}" if count else "no shape"


def driver_version() -> str:
    """The NVIDIA driver's version, as the kernel module tells it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "none"


def describe_cache() -> str:
    """Where compiled kernels are kept, and how many."""
    try:
        folder = cache_dir()
    except RuntimeError as error:
        return f"none: {error}"
    files = kernel_files(folder)
    return f"{folder}, {len(files)} kernels, {megabytes(files)}"
