"""Counters that kernels find at zero and leave at zero.

Launches on one stream follow each other, so they share their counters; those of other streams
must not. Launches that a CUDA graph captures get counters of their own: the graph may run beside
anything else.
"""

import threading
from dataclasses import dataclass, field

import torch

RESERVE = 1 << 18
"""Counters of a device that are set aside for captured launches."""

FEWEST = 1 << 12
"""Counters of a stream at least, so that larger launches seldom need new ones."""


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device for captured launches; each is given away once."""

    free: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(self, device: torch.device) -> None:
        """Have zeros at hand; not while capturing, since they must outlive the graph."""
        with self.lock:
            if self.free is None or len(self.free) < RESERVE // 2:
                self.free = torch.zeros(RESERVE, dtype=torch.int32, device=device)

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """Counters for a captured launch; if there are none left, the graph zeroes its own."""
        with self.lock:
            if self.free is None or len(self.free) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)
            taken, self.free = self.free[:count], self.free[count:]
        return taken


BY_STREAM: dict[tuple[torch.device, int], torch.Tensor] = {}
RESERVES: dict[torch.device, Reserve] = {}


def zeros_for_launch(count: int, q: torch.Tensor) -> torch.Tensor:
    """Counters (int32) for one launch on the current stream of q's GPU."""
    device = q.device
    reserve = RESERVES.get(device) or RESERVES.setdefault(device, Reserve())
    if torch.cuda.is_current_stream_capturing():
        return reserve.take(count, device)
    reserve.fill(device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    counters = BY_STREAM.get(key)
    if counters is None or len(counters) < count:
        counters = torch.zeros(max(count, FEWEST), dtype=torch.int32, device=device)
        BY_STREAM[key] = counters
    return counters[:count]
