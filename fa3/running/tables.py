"""Schedules' tables in device memory: from the planner on the host to `fa3.calls.forward`."""

from dataclasses import dataclass, field

import numpy as np
import torch

from fa3.running.graphs import Capture, idle_stream, is_capturing, made_apart


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table in device memory. It stays alive until the last launch that reads it has ended."""

    numbers: torch.Tensor
    # Handles of the streams with launches that read the table.
    streams: set[int] = field(default_factory=set)

    @classmethod
    def upload(cls, table: np.ndarray, device: torch.device) -> "Table":
        """Copy a table to the GPU; wait for the copy but for no other work.
        Raises RuntimeError while a CUDA graph is captured."""
        if is_capturing(device):
            raise RuntimeError(
                "q, k and v have sizes that were not planned before, and its tile order cannot "
                "be copied to the GPU while a CUDA graph is captured: call once before capturing"
            )
        # The current stream may have a long queue of work.
        with torch.cuda.stream(idle_stream(device)):
            return cls(made_apart(lambda: torch.tensor(table, device=device), device))

    def on(self, stream: int, capture: Capture | None) -> torch.Tensor:
        """The table, for a launch on torch's current stream; `stream` is the stream's handle."""
        if capture is not None:
            capture.keep(self.numbers)
        elif stream not in self.streams:
            self.numbers.record_stream(torch.cuda.current_stream(self.numbers.device))
            self.streams.add(stream)
        return self.numbers
