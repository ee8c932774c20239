"""Times plans on a GPU for `fa3.tools.tuning`: compiles their kernels in processes side by side,
then runs all plans of a problem in interleaved rounds.
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
from fa3.running.compiler import is_on_disk
from fa3.tools.plan_times import PlanTime
from fa3.tools.progress import Bar, terminal
from fa3.tools.recording import random_operands
from fa3.tools.timing import QUICK, QUICK_ROUNDS, make_runner, run_rounds
from fa3.tools.warmup import check_kept, compile_all


class GpuStopwatch:
    """Times plans on one GPU, with operands of normal values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, plans: Sequence[Plan]) -> None:
        """Compile the kernels that are not on disk yet."""
        kernels = dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches())
        absent = [kernel for kernel in kernels if not is_on_disk(kernel)]
        bar = Bar(len(absent), terminal())
        compile_all(absent, len(os.sched_getaffinity(0)), bar.advance)
        check_kept(absent)

    def measure(self, plans: Sequence[Plan]) -> list[PlanTime]:
        """The median time of each plan in each regime; all are of one problem."""
        problem = plans[0].problem
        with torch.cuda.device(self.device):
            attend = partial(
                flash_attn_func,
                *random_operands(problem, self.device),
                window_size=tuple(problem.window),
            )
            runners = {plan.name: make_runner([partial(attend, plan=plan)]) for plan in plans}
            found = []
            for regime in QUICK.values():
                us: dict[str, list[float]] = {name: [] for name in runners}
                # Garbage collection in the middle of a block would show as a stall of the host.
                gc.collect()
                gc.disable()
                try:
                    for name, block in run_rounds(runners, regime, QUICK_ROUNDS, random.Random(0)):
                        us[name].append(block.us)
                finally:
                    gc.enable()
                for plan in plans:
                    median = statistics.median(us[plan.name])
                    schedule = plan.schedule.name
                    found.append(PlanTime(problem, plan.config, schedule, regime.name, median))
        return found
