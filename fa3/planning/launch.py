"""Plans: launches with arguments by name, and memory that they share.

`fa3.calls.execution` loads the kernels and launches them.
"""

from typing import Any, NamedTuple

import numpy as np

from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardArguments
from fa3.planning.costs import Gpu
from fa3.planning.explanation import describe_plan
from fa3.primitives.output_store import numbers_of_parts
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS_OF_WARP
from fa3.problem import Problem, Window


class FromCall(str):
    """The name of a tensor or number that each call passes anew."""

    __slots__ = ()


class Launch(NamedTuple):
    """One kernel of a plan; plans list them in running order."""

    kernel: Any  # of `fa3.kernels`, what it is compiled for
    arguments: dict[str, Any]  # in order: what is `FromCall`, or what is the same in all calls

    @classmethod
    def of(cls, kernel: Any, kind: Any, **named: Any) -> "Launch":
        """Return a launch with arguments of this kind.
        Arguments that are not named have their default, or else the call's value of their name."""
        values = {name: FromCall(name) for name in kind._fields}
        arguments = values | kind._field_defaults | named
        assert arguments.keys() == values.keys()
        return cls(kernel, arguments)


class Memory(NamedTuple):
    """Memory that kernels of a call share, besides the call's tensors."""

    counters: tuple[tuple[str, int], ...] = ()  # how many counters, which are zero
    parts: tuple[tuple[str, int], ...] = ()  # how many numbers, float32
    # Numbers of the decode kernel's workspace where it merges: the stream keeps them for the next
    # call. To allocate memory anew takes the host 1 us.
    workspace: int = 0
    cleared: int = 0  # first numbers of the workspace in `parts` that must be zero

    @classmethod
    def of_parts(cls, num_slots: int, rows: int, head_dim_v: int) -> "Memory":
        """Return the memory of so many tile parts of the forward kernel.
        `rows` are of a cluster's tile."""
        # The kernel wants a tensor also where no tile is split.
        num_counters = max(1, num_slots * rows // ROWS_OF_WARP)
        numbers = numbers_of_parts(num_slots, rows, padded(head_dim_v))
        return cls((("part_counters", num_counters),), (("part_buffer", numbers),))


NO_MEMORY = Memory()


class PlanBase:
    """Base class of plans: a problem, a GPU, launches, and words."""

    __slots__ = ()

    problem: Problem
    gpu: Gpu  # what of it may be used

    def launches(self) -> tuple[Launch, ...]:
        """Return what is launched, in this order."""
        raise NotImplementedError

    @property
    def memory(self) -> Memory:
        """What the launches share."""
        return NO_MEMORY

    @property
    def table(self) -> np.ndarray | None:
        """The table that the first kernel reads, if its schedule has one."""
        return None

    @property
    def all_kernels(self) -> list[Any]:
        """The kernels that run, in this order."""
        return [launch.kernel for launch in self.launches()]

    @property
    def flops(self) -> int:
        """Useful floating-point operations."""
        return self.problem.flops

    def sentences(self) -> dict[str, str]:
        """Return this kind of plan's lines, by their labels."""
        raise NotImplementedError

    def explain(self) -> str:
        """Say what the plan does, its predicted time, and the alternatives."""
        return describe_plan(self.problem, self.gpu, self.all_kernels, self.sentences(), self.flops)


def launch_of_forward(kernel: Forward, window: Window, **named: Any) -> Launch:
    """Return a launch of the forward kernel, with the arguments it takes."""
    schedule: Any = kernel.schedule_type
    spec, cache = kernel.spec, kernel.cache
    takes = {
        "schedule_state": schedule.reads_state,
        "part_buffer": schedule.splits,
        "part_counters": schedule.splits,
        "marks": kernel.config.fixed_row_max or kernel.packs_sequences,
        "recording": kernel.is_recorded,
        "table": schedule.is_ragged,
        "page_table": cache is not None and cache.page_size > 0,
        "dropout": spec.has_dropout,
        "descales": spec.is_fp8 or (cache is not None and cache.is_fp8),
    }
    values = {name: FromCall(name) for name, is_taken in takes.items() if is_taken}
    bounds = {"window_left": window.left, "window_right": window.right}
    return Launch.of(kernel, ForwardArguments, **bounds | values | named)
