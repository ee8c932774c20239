"""The plans that `fa3 tune` measured to be the fastest, on disk next to the compiled kernels.

A file has the plans of one GPU and of one version of fa3. A process reads it once, so that its
plans never change: plans that are written meanwhile count for processes that start later. The file
must be whole, and trusted as kernels must (`fa3.running.code_cache`). If it is not, a warning names
it, and the planner chooses.
"""

import hashlib
import json
import os
import re
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.decode import DecodePlan
from fa3.planning.gpu import Gpu
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_dense, plan_forward
from fa3.problem import Problem
from fa3.running.code_cache import SOURCES, cache_dir, exclusive, read, write
from fa3.settings import SETTINGS

VERSION_DIGITS = 16


class TunedPlan(NamedTuple):
    """How calls of a shape are to run."""

    # config, schedule: tiling and name of the schedule; both None for the decode kernel.
    config: ForwardConfig | None
    schedule: str | None


READ: dict[str, dict[str, TunedPlan]] = {}
"""What this process has read: for each GPU the plans by `tuning_key`."""

READING = threading.Lock()


def plan_call(problem: Problem, gpu: Gpu, pack_gqa: bool | None = None) -> Plan | DecodePlan:
    """Return the tuned plan of a dense call, or else the planner's choice.

    Args:
        pack_gqa: see `plan_dense`.
    """
    tuned = None if pack_gqa else tuned_plans(gpu.name).get(tuning_key(problem, gpu))
    if tuned is None or (pack_gqa is False and tuned.config is None):
        return plan_dense(problem, gpu, pack_gqa)
    if tuned.config is None:
        return DecodePlan.of_dense(problem, gpu)
    return plan_forward(problem, gpu, tuned.config, tuned.schedule)


def is_tuned(problem: Problem, gpu: Gpu) -> bool:
    """Whether a tuned plan is known for a problem."""
    return tuning_key(problem, gpu) in tuned_plans(gpu.name)


def tuning_key(problem: Problem, gpu: Gpu) -> str:
    """Return all that a tuned plan depends on, besides the GPU's name and the version of fa3."""
    settings = ", ".join(SETTINGS[name] for name in ("FA3_REFERENCE", "FA3_FP8_SUMS"))
    return f"{problem} on {gpu.num_sms} SMs, {settings}"


def tuned_plans(gpu_name: str) -> dict[str, TunedPlan]:
    """Return the plans that this process uses on a GPU, by `tuning_key`."""
    with READING:
        if gpu_name not in READ:
            READ[gpu_name] = read_plans(gpu_name)
        return READ[gpu_name]


def keep_plan(plan: Plan | DecodePlan) -> None:
    """Write a plan as its problem's fastest, for processes that start later.

    Raises:
        OSError: that is not possible, or others may write to the folder.
    """
    name = plan.gpu.name
    tuned = TunedPlan(None, None)
    if isinstance(plan, Plan):
        tuned = TunedPlan(plan.config, plan.schedule.name)
    path = plans_path(name)
    with exclusive(path):
        plans = read_plans(name) | {tuning_key(plan.problem, plan.gpu): tuned}
        rows = {
            key: {"config": one.config and asdict(one.config), "schedule": one.schedule}
            for key, one in plans.items()
        }
        write(path, json.dumps({"gpu": name, "plans": rows}, indent=1).encode())


def forget_plans(gpu_name: str) -> None:
    """Remove the plans of a GPU, of all versions of fa3."""
    for path in cache_dir().glob(f"{stem_of(gpu_name)}-{'[0-9a-f]' * VERSION_DIGITS}.plans"):
        path.unlink(missing_ok=True)


def read_plans(gpu_name: str) -> dict[str, TunedPlan]:
    """Return the plans on disk; warn about a file that cannot be used."""
    try:
        path = plans_path(gpu_name)
    except RuntimeError:
        return {}
    if not os.path.lexists(path):
        return {}
    try:
        content = json.loads(read(path) or b"{}")
        if content["gpu"] != gpu_name:
            raise ValueError(content["gpu"])
        return {
            key: TunedPlan(row["config"] and ForwardConfig(**row["config"]), row["schedule"])
            for key, row in content["plans"].items()
        }
    except (AttributeError, LookupError, TypeError, ValueError):
        warnings.warn(
            f"fa3 ignores {path}: it is damaged, of another GPU than {gpu_name}, or other users "
            "may write to it. `fa3 tune` writes it anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def plans_path(gpu_name: str) -> Path:
    """Return the file for plans of a GPU, of this version of fa3.
    The version is a digest of the sources: another kernel may have another fastest plan."""
    digests = sorted((name, digest) for name, (_, digest) in SOURCES.items())
    version = hashlib.sha256(repr(digests).encode()).hexdigest()[:VERSION_DIGITS]
    return cache_dir() / f"{stem_of(gpu_name)}-{version}.plans"


def stem_of(gpu_name: str) -> str:
    """Return what the names of a GPU's files begin with."""
    return "tuned-" + re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
