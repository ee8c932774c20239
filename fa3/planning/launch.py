"""Plans: launches with arguments by name, and memory that they share.

`fa3.calls.execution` loads the kernels and launches them.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from fa3.planning.costs import Gpu
from fa3.planning.explanation import describe_plan
from fa3.primitives.output_store import numbers_of_parts
from fa3.primitives.shared_memory import padded
from fa3.primitives.wgmma import ROWS_OF_WARP
from fa3.problem import REMEMBERED, Problem, Window


class FromCall(str):
    """The name of a tensor or number that each call passes anew."""

    __slots__ = ()


class Launch(NamedTuple):
    """One kernel of a plan; plans list them in running order."""

    kernel: Any  # of `fa3.kernels`, what it is compiled for
    arguments: dict[str, Any]  # in order: what is `FromCall`, or what is the same in all calls

    @classmethod
    def of(cls, kernel: Any, window: Window | None = None, **named: Any) -> "Launch":
        """Return a launch of a kernel, with the bounds of a window.
        Numbers that are not named have their default. All else has the call's value of its name, or
        is None if the kernel does not take it."""
        kind, taken = kernel.arguments_type, taken_by(kernel)
        if window is not None:
            named |= {"window_left": window.left, "window_right": window.right}
        values = {name: FromCall(name) for name in kind._fields}
        numbers = {name: one for name, one in kind._field_defaults.items() if one is not None}
        arguments = values | numbers | named
        assert arguments.keys() == values.keys()
        return cls(kernel, {x: one if x in taken else None for x, one in arguments.items()})


@functools.lru_cache(maxsize=REMEMBERED)
def taken_by(kernel: Any) -> frozenset[str]:
    """The arguments that a kernel takes; its kind may have more."""
    types = zip(kernel.arguments_type._fields, kernel.arguments(), strict=False)
    return frozenset(name for name, kind in types if kind is not None)


class Memory(NamedTuple):
    """Memory that kernels of a call share, besides the call's tensors."""

    counters: tuple[tuple[str, int], ...] = ()  # how many counters, which are zero
    parts: tuple[tuple[str, int], ...] = ()  # how many numbers, float32
    # How many numbers, exactly, and their dtype. The stream keeps them: to allocate takes 1 us.
    kept: tuple[tuple[str, int, str], ...] = ()
    cleared: int = 0  # first numbers of the workspace in `parts` that must be zero

    @classmethod
    def of_parts(cls, num_slots: int, rows: int, head_dim_v: int) -> "Memory":
        """Return the memory of so many tile parts of the forward kernel.
        `rows` are of a cluster's tile."""
        # The kernel wants a tensor also where no tile is split.
        num_counters = max(1, num_slots * rows // ROWS_OF_WARP)
        numbers = numbers_of_parts(num_slots, rows, padded(head_dim_v))
        return cls((("part_counters", num_counters),), kept=(("part_buffer", numbers, "float32"),))


NO_MEMORY = Memory()

OF_FORWARD = {"lse": FromCall("address_of_lse"), "dropout": FromCall("arguments_of_dropout")}
"""Arguments of the forward kernel that have other names in a call's values."""


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
