"""Counters that kernels find at zero and leave at zero.

A call owns its counters from before its first launch until its last one has been issued. Then
they are the next call's on the same stream, whose launches follow. So what another thread launches
in between has counters of its own, and those of a call that was interrupted are not used again:

    counters = stream_counters.take(count)
    ...                                       # launches
    stream_counters.give_back(counters)

Launches that a CUDA graph captures on one stream follow each other whenever the graph runs, but it
may run beside anything else: every capture has counters of its own (`fa3.running.graphs`).
"""

import threading
from dataclasses import dataclass, field

import torch

from fa3.running.graphs import Capture, idle_stream

RESERVE = 1 << 18
"""Counters of a device that are set aside for captures at a time; a graph zeroes its own if it
takes more."""

FEWEST = 1 << 12
"""Counters that a call gets at least, so that larger calls seldom need new ones."""

MOST_STREAMS = 256
"""Streams whose counters are remembered."""

PER_THREAD = 2
"""The handle of `cudaStreamPerThread`, which is another stream in every thread."""


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device for captures. A graph must not make them: what it allocates
    is torch's, which wants it back when the capture ends."""

    free: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(self, device: torch.device) -> None:
        """Have zeros at hand; not while capturing."""
        if self.free is None or len(self.free) < RESERVE // 2:
            idle = idle_stream(device)
            with self.lock, torch.cuda.stream(idle):
                zeros = torch.zeros(RESERVE, dtype=torch.int32, device=device)
                # Graphs run on any stream.
                idle.synchronize()
                self.free = zeros

    def take(self, count: int) -> torch.Tensor | None:
        """Counters for a capture; None if there are not enough left."""
        with self.lock:
            if self.free is None or len(self.free) < count:
                return None
            taken, self.free = self.free[:count], self.free[count:]
            return taken


@dataclass(slots=True)
class StreamCounters:
    """The counters of one stream.

    Fields:
        free: those that no call has. Appending and popping are atomic.
    """

    device: torch.device
    free: list[torch.Tensor] = field(default_factory=list)

    def take(self, count: int) -> torch.Tensor:
        """At least `count` counters (int32), all zero."""
        reserve = RESERVES.get(self.device) or RESERVES.setdefault(self.device, Reserve())
        if self.device.type == "cuda":
            reserve.fill(self.device)
        try:
            counters = self.free.pop()
        except IndexError:
            counters = None
        if counters is None or len(counters) < count:
            size = max(count, FEWEST)
            counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        return counters

    def give_back(self, counters: torch.Tensor) -> None:
        self.free.append(counters)


@dataclass(slots=True)
class CaptureCounters:
    """The counters of one stream of a capture."""

    device: torch.device
    capture: Capture
    free: list[torch.Tensor] = field(default_factory=list)

    def take(self, count: int) -> torch.Tensor:
        """At least `count` counters (int32), all zero whenever the graph runs."""
        fitting = (i for i, counters in enumerate(self.free) if len(counters) >= count)
        if (first := next(fitting, None)) is not None:
            return self.free.pop(first)
        reserve = RESERVES.get(self.device)
        taken = reserve.take(count) if reserve else None
        if taken is None:
            # Zeroed by the graph itself, whenever it runs.
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        self.capture.keep(taken)
        return taken

    def give_back(self, counters: torch.Tensor) -> None:
        if self.capture.keeps(counters):
            self.free.append(counters)


BY_STREAM: dict[tuple[torch.device, int], StreamCounters] = {}
RESERVES: dict[torch.device, Reserve] = {}


def counters_of(
    device: torch.device, stream: int, capture: Capture | None
) -> StreamCounters | CaptureCounters:
    """The counters of a stream, or of a stream of a capture."""
    if capture is not None:
        return capture.counters.setdefault(stream, CaptureCounters(device, capture))
    key = device, stream if stream != PER_THREAD else -threading.get_ident()
    found = BY_STREAM.get(key)
    if found is None:
        # Memory of a stream goes back to the same stream, so it can be let go at any time.
        for old in tuple(BY_STREAM)[: max(0, len(BY_STREAM) - MOST_STREAMS + 1)]:
            BY_STREAM.pop(old, None)
        found = BY_STREAM.setdefault(key, StreamCounters(device))
    return found
