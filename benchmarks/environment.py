"""Where results were taken: GPU, driver, versions, commit."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch

from benchmarks.meter import NvmlGauge
from benchmarks.peers import Provider

PACKAGES = (
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
    "quack-kernels",
    "fa3-fwd",
    "tilelang",
    "triton",
)


def package_versions() -> dict[str, str]:
    """Versions of the packages that bear on the figures, as far as they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def directory_name(gpu: str, date: datetime.date) -> str:
    """Name a results directory: "NVIDIA H200" becomes h200-2026-01-31."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return f"{slug}-{date.isoformat()}"


def describe(
    providers: list[Provider], missing: dict[str, str], gauge: NvmlGauge | None
) -> dict[str, object]:
    """Everything about this run that figures may depend on, ready for JSON."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "driver": gauge.driver if gauge else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": package_versions(),
        "providers": {provider.name: provider.version for provider in providers},
        "missing_providers": missing,
        "git_commit": git_commit(),
    }
