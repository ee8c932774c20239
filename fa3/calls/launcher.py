"""The launcher: runs the kernels of any plan, on the current stream of the tensors' GPU.

A call gives its tensors and numbers by name. The launcher adds counters and memory, which it gives
back for other calls, and picks the arguments of each kernel by their names.
"""

from collections.abc import Callable, Iterable
from operator import itemgetter
from sys import intern
from typing import Any, NamedTuple

import torch

from fa3.planning.launch import NO_MEMORY, FromCall, Launch, Memory
from fa3.running.compiler import load_kernel
from fa3.running.counters import counters_of
from fa3.running.graphs import Table, capture_of, current_device, current_stream


class Prepared(NamedTuple):
    """The launches of a plan with their kernels loaded."""

    fixed: dict[str, Any]  # arguments that are the same in all calls
    # Of each launch the kernel's entry, and what picks its arguments.
    kernels: tuple[tuple[Callable, Callable], ...]
    names: frozenset[str]  # of the values that kernels take
    memory: Memory = NO_MEMORY
    table: Table | None = None  # the schedule's table; it becomes the value `schedule_state`

    @classmethod
    def of(
        cls, launches: Iterable[Launch], memory: Memory = NO_MEMORY, table: Table | None = None
    ) -> "Prepared":
        """Load the kernels of launches."""
        fixed: dict[str, Any] = {}
        kernels, names = [], set()
        for number, launch in enumerate(launches):
            keys = []
            for name, argument in launch.arguments.items():
                if isinstance(argument, FromCall):
                    keys.append(intern(str(argument)))
                    names.add(keys[-1])
                else:
                    keys.append(intern(f"{name} of launch {number}"))
                    fixed[keys[-1]] = argument
            kernels.append((load_kernel(launch.kernel), itemgetter(*keys)))
        return cls(fixed, tuple(kernels), frozenset(names), memory, table)

    def run(self, values: dict[str, Any], memory: Memory | None = None) -> None:
        """Launch the kernels.

        Args:
            values: of the call, by name; more are added.
            memory: where it depends on the call.
        """
        q = values["q"]
        device = q.device
        if device.index != current_device():
            with torch.cuda.device(device):
                return self.run(values, memory)
        fixed, kernels, _, always, table = self
        counters, parts, workspace, cleared = always if memory is None else memory
        values |= fixed
        taken: list[torch.Tensor] = []
        stream_memory: Any = None
        if counters or table is not None:
            stream = current_stream(device.index)
            capture = capture_of(stream)
            if table is not None:
                values["schedule_state"] = table.on(stream, capture)
            if counters:
                # Now: to zero new ones takes a kernel, and none may come between two others.
                stream_memory = counters_of(device, stream, capture)
            for name, count in counters:
                values[name] = one = stream_memory.take(count)
                taken.append(one)
            if workspace:
                # The decode kernel takes an address.
                values["counters"] = values["counters"].data_ptr()
                values["workspace"] = kept = stream_memory.take_parts(workspace)
        for name, count in parts:
            values[name] = q.new_empty(count, dtype=torch.float32)
        if cleared:
            values["workspace"][:cleared].zero_()
        for kernel, arguments_of in kernels:
            kernel(*arguments_of(values))
        # Counters do not go back if anything was raised: then they need not be zero. The last one
        # comes first, so that the next call takes each for the same purpose.
        while taken:
            stream_memory.give_back(taken.pop())
        if workspace:
            stream_memory.give_back_parts(kept)
        return None
