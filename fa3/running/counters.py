"""Zeroed counters in device memory, from `fa3.calls` to kernels, which leave them at zero; and what
kernels write for each other within a call that counts.

A call owns its counters from before its first launch until it has issued its last one:

    counters = stream_counters.take(count)
    ...                                       # launches
    stream_counters.give_back(counters)

Then the next call on the same stream may take them, since its launches run later. A call of another
thread in between gets other counters, and an interrupted call's counters are not used again.
To allocate the memory of parts anew takes the host 1 us: a stream keeps that, too.

In a captured CUDA graph, launches of one stream run one after another, but the graph may overlap
anything else: each capture has its own counters (`fa3.running.graphs`).
"""

import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial

import torch

from fa3.running.graphs import PER_THREAD, Capture, idle_stream, made_apart

RESERVE = 1 << 18
"""Counters that a device sets aside for captures at a time. A graph that needs more allocates and
zeroes its own."""

FEWEST = 1 << 12  # fewest counters to allocate, so that later, larger calls seldom need new ones
ALIGNED = 4  # counters in 16 bytes, as kernels want them to be aligned
MOST_STREAMS = 256  # most streams whose counters are kept


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device for captures. They are allocated before: memory allocated
    during a capture belongs to torch, which takes it back when the capture ends."""

    free: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_low: bool = True  # whether few are left, so that calls outside of captures should fill it

    def fill(self, device: torch.device) -> None:
        """Allocate zeroed counters. Must not be called during a capture."""
        if device.type == "cuda":
            idle = idle_stream(device)
            with self.lock, torch.cuda.stream(idle):
                zeros = zeros_apart(RESERVE, device)
                # A graph may run on any stream, so the zeros must be written now.
                idle.synchronize()
                self.free = zeros
        self.is_low = False

    def take(self, count: int) -> torch.Tensor | None:
        """Counters for a capture; None if too few are left."""
        count = -(-count // ALIGNED) * ALIGNED
        with self.lock:
            if self.free is None or len(self.free) < count:
                return None
            taken, self.free = self.free[:count], self.free[count:]
            self.is_low = len(self.free) < RESERVE // 2
            return taken


@dataclass(slots=True)
class StreamCounters:
    """The counters and the memory of parts of one stream."""

    device: torch.device
    reserve: Reserve  # of the device; filled by calls that are not captured
    capture: Capture | None = None  # that the stream takes part in
    # Counters and memory of parts that no call owns. Appending and popping are atomic.
    free: list[torch.Tensor] = field(default_factory=list)
    free_parts: list[torch.Tensor] = field(default_factory=list)

    def take(self, count: int) -> torch.Tensor:
        """At least `count` counters (int32), all zero; in a capture, whenever the graph runs."""
        if self.reserve.is_low and self.capture is None:
            self.reserve.fill(self.device)
        try:
            counters = self.free.pop()
        except IndexError:
            return self.new(count)
        # Outside of captures all have the fewest, and to look takes 0.1 us.
        if (count > FEWEST or self.capture is not None) and counters.shape[0] < count:
            return self.new(count)
        return counters

    def new(self, count: int) -> torch.Tensor:
        """Counters that no call had before."""
        if self.capture is None:
            return zeros_apart(max(count, FEWEST), self.device)
        taken = self.reserve.take(count)
        if taken is None:
            # The graph zeroes these itself whenever it runs.
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        self.capture.keep(taken)
        return taken

    def give_back(self, counters: torch.Tensor) -> None:
        if self.capture is None or self.capture.keeps(counters):
            self.free.append(counters)

    def take_parts(self, count: int) -> torch.Tensor:
        """At least `count` numbers (float32), whatever they are."""
        try:
            parts = self.free_parts.pop()
        except IndexError:
            parts = None
        if parts is None or parts.nbytes < count * parts.itemsize:
            empty = partial(torch.empty, count, dtype=torch.float32, device=self.device)
            parts = made_apart(empty, self.device) if self.capture is None else empty()
        return parts

    def give_back_parts(self, parts: torch.Tensor) -> None:
        # Torch has a graph use its own memory again.
        if self.capture is None:
            self.free_parts.append(parts)


BY_STREAM: dict[tuple[torch.device, int], StreamCounters] = {}
RESERVES: dict[torch.device, Reserve] = {}


def zeros_apart(count: int, device: torch.device) -> torch.Tensor:
    """Zeros of the current stream that stay."""
    return made_apart(lambda: torch.zeros(count, dtype=torch.int32, device=device), device)


NEW_STREAM = threading.RLock()  # held while streams come and go; finalizers may come back to it


def counters_of(device: torch.device, stream: int, capture: Capture | None) -> StreamCounters:
    """The counters of a stream, or of a stream of a capture."""
    if capture is not None:
        reserve = RESERVES.setdefault(device, Reserve())
        return capture.counters.setdefault(stream, StreamCounters(device, reserve, capture))
    if stream == PER_THREAD:
        stream = -threading.get_ident()
    counters = BY_STREAM.get((device, stream))
    if counters is None:
        with NEW_STREAM:
            while len(BY_STREAM) >= MOST_STREAMS:
                forget_oldest()
            reserve = RESERVES.setdefault(device, Reserve())
            counters = BY_STREAM.setdefault((device, stream), StreamCounters(device, reserve))
    return counters


def forget_oldest() -> None:
    """Forget the stream that came first, if nothing gets in between."""
    # Torch reuses freed memory on the same stream only, so it may be freed at any time. A finalizer
    # may run in here and bring a stream of its own; then the dictionary is another one.
    with contextlib.suppress(RuntimeError, StopIteration):
        BY_STREAM.pop(next(iter(BY_STREAM)), None)
