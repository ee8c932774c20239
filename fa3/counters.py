"""Counters that kernels find at zero and leave at zero.

Launches on one stream follow each other, so they share their counters; those of other streams
must not. Launches that a CUDA graph captures on one stream follow each other whenever the graph
runs, but it may run beside anything else: every capture has counters of its own.
"""

import threading
from dataclasses import dataclass, field

import torch
from cuda.bindings import driver

RESERVE = 1 << 18
"""Counters of a device that are set aside for captures."""

FEWEST = 1 << 12
"""Counters of a stream at least, so that larger launches seldom need new ones."""

Capture = tuple[int, int]
"""The number of a capture, and one of its streams."""


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device for captures.

    Fields:
        given: what each stream of a capture got, the largest last. It is never taken back: nobody
            knows how long the graph will live.
    """

    free: torch.Tensor | None = None
    given: dict[Capture, list[torch.Tensor]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(self, count: int, device: torch.device) -> None:
        """Have zeros at hand for a launch of `count`; not while capturing: they outlive graphs."""
        needed = max(count, RESERVE // 2)
        with self.lock:
            if self.free is None or len(self.free) < needed:
                self.free = torch.zeros(2 * needed, dtype=torch.int32, device=device)

    def take(self, count: int, capture: Capture, device: torch.device) -> torch.Tensor:
        """Counters for a captured launch; if there are none left, the graph zeroes its own."""
        with self.lock:
            given = self.given.setdefault(capture, [])
            if not given or len(given[-1]) < count:
                if self.free is None or len(self.free) < count:
                    return torch.zeros(count, dtype=torch.int32, device=device)
                given.append(self.free[:count])
                self.free = self.free[count:]
            return given[-1][:count]


BY_STREAM: dict[tuple[torch.device, int], torch.Tensor] = {}
RESERVES: dict[torch.device, Reserve] = {}


def zeros_for_launch(count: int, q: torch.Tensor) -> torch.Tensor:
    """Counters (int32) for one launch on the current stream of q's GPU."""
    device = q.device
    reserve = RESERVES.get(device) or RESERVES.setdefault(device, Reserve())
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return reserve.take(count, (capture_of(stream), stream), device)
    reserve.fill(count, device)
    key = device, stream
    counters = BY_STREAM.get(key)
    if counters is None or len(counters) < count:
        counters = torch.zeros(max(count, FEWEST), dtype=torch.int32, device=device)
        BY_STREAM[key] = counters
    return counters[:count]


def capture_of(stream: int) -> int:
    """The number of the capture that a stream takes part in."""
    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA does not say what stream {stream} captures: {error.name}")
    return int(number)
