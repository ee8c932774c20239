"""Times plans on a GPU for `fa3.tools.tuning`: compiles their kernels in other processes, and
runs plans of a problem in interleaved rounds.
"""

import gc
import os
import random
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from fa3.calls.forward import flash_attn_func
from fa3.planning.plan import Plan
from fa3.running.compiler import Kernel, is_on_disk
from fa3.tools.compile_pool import CompilePool
from fa3.tools.plan_times import PlanTime
from fa3.tools.recording import random_operands
from fa3.tools.timing import Regime, make_runner, run_rounds

TUNING_REGIMES = (
    Regime("burst", load_s=0, idle_s=0.02, block_ms=3),
    Regime("steady", load_s=0.2, idle_s=0, block_ms=5),
)
"""Shorter than the benchmarks': some 0.1 s a plan, so that a budget is enough for many."""

TUNING_ROUNDS = 3


class GpuWorkbench:
    """Compiles and times plans on one GPU, with operands of normal values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def has(self, kernel: Kernel) -> bool:
        """Whether a kernel is on disk."""
        return is_on_disk(kernel)

    def compilers(self, kernels: Sequence[Kernel]) -> CompilePool:
        """Compile on all cores but one, which measures meanwhile."""
        return CompilePool(kernels, max(1, len(os.sched_getaffinity(0)) - 1))

    def measure(self, plans: Sequence[Plan]) -> list[PlanTime]:
        """The median time of each plan in each regime; all are of one problem."""
        problem = plans[0].problem
        with torch.cuda.device(self.device):
            q, k, v = random_operands(problem, self.device)
            window = problem.window.left, problem.window.right
            attend = partial(flash_attn_func, q, k, v, window_size=window)
            runners = {plan.name: make_runner([partial(attend, plan=plan)]) for plan in plans}
            found = []
            for regime in TUNING_REGIMES:
                us: dict[str, list[float]] = {name: [] for name in runners}
                # Garbage collection in the middle of a block would show as a stall of the host.
                gc.collect()
                try:
                    gc.disable()
                    for name, block in run_rounds(runners, regime, TUNING_ROUNDS, random.Random(0)):
                        us[name].append(block.us)
                finally:
                    gc.enable()
                for plan in plans:
                    median = statistics.median(us[plan.name])
                    schedule = plan.schedule.name
                    found.append(PlanTime(problem, plan.config, schedule, regime.name, median))
        return found
