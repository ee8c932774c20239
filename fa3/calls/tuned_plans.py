"""Plans that `fa3 tune` measured to be fastest, kept on disk.

A file has the plans of one GPU and of one version of fa3: another kernel may have another fastest
plan. A process reads it once, so that its plans never change: plans that are written meanwhile
count for processes that start later. The file must be whole, and trusted as kernels must
(`fa3.running.code_cache`). If it is not, a warning names it, and the planner chooses.
"""

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import Gpu
from fa3.planning.decode import DecodePlan
from fa3.planning.planner import Plan, plan_dense, plan_forward
from fa3.problem import Problem
from fa3.running.code_cache import object_lock, path_of, read, write
from fa3.settings import SETTINGS

READ: dict[str, dict[str, Any]] = {}
"""What this process has read: for each GPU the fields of the `ForwardConfig` and the name of the
schedule, by `tuning_key`; both None for the decode kernel."""


def plan_call(problem: Problem, gpu: Gpu, pack_gqa: bool | None = None) -> Plan | DecodePlan:
    """Return a dense call's tuned plan, or else the planner's choice.
    `pack_gqa` is as in `plan_dense`."""
    tuned = None if pack_gqa else tuned_plans(gpu.name).get(tuning_key(problem, gpu))
    if tuned is None or (pack_gqa is False and tuned[0] is None):
        return plan_dense(problem, gpu, pack_gqa)
    fields, schedule = tuned
    if fields is None:
        return DecodePlan.of_dense(problem, gpu)
    return plan_forward(problem, gpu, ForwardConfig(**fields), schedule)


def tuning_key(problem: Problem, gpu: Gpu) -> str:
    """Return what a tuned plan depends on, besides GPU and version."""
    settings = ", ".join(SETTINGS[name] for name in ("FA3_ROW_MAX", "FA3_FP8_EXP", "FA3_FP8_SUMS"))
    return f"{problem} on {gpu.num_sms} SMs, {settings}"


def tuned_plans(gpu_name: str) -> dict[str, Any]:
    """Return the plans that this process uses on a GPU, by `tuning_key`."""
    if gpu_name not in READ:
        READ.setdefault(gpu_name, read_plans(gpu_name))
    return READ[gpu_name]


def keep_plan(plan: Plan | DecodePlan) -> None:
    """Write a plan as its problem's fastest, for processes that start later.
    Raises OSError if that is not possible, or others may write to the folder."""
    tuned: Any = None, None
    if isinstance(plan, Plan):
        tuned = asdict(plan.config), plan.schedule.name
    path = plans_path(plan.gpu.name)
    with object_lock(path):
        plans = read_plans(plan.gpu.name) | {tuning_key(plan.problem, plan.gpu): tuned}
        write(path, json.dumps(plans, indent=1).encode())


def read_plans(gpu_name: str) -> dict[str, Any]:
    """Return the plans on disk; warn about an unusable file."""
    try:
        path = plans_path(gpu_name)
    except RuntimeError:
        return {}
    content = read(path) if os.path.lexists(path) else b"{}"
    if content is None:
        warnings.warn(
            f"fa3 ignores {path}: it is damaged, of another GPU than {gpu_name}, or other users "
            "may write to it. `fa3 tune` writes it anew",
            RuntimeWarning,
            stacklevel=2,
        )
    return json.loads(content or b"{}")


def plans_path(gpu_name: str) -> Path:
    """Return this fa3 version's file for plans of a GPU."""
    return path_of(f"tuned plans of {gpu_name}").with_suffix(".plans")
