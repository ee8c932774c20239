"""Counters that kernels find at zero and leave at zero.

Launches on one stream follow each other, so they share their counters; those of other streams
must not. Launches that a CUDA graph captures get counters of their own: the graph may run beside
anything else.
"""

import threading
from dataclasses import dataclass, field

import torch

RESERVE = 1 << 18
"""Counters of a device that are set aside for captured launches, and again when used up."""


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device, given away once."""

    free: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        with self.lock:
            if self.free is None or len(self.free) < count:
                self.free = torch.zeros(max(count, RESERVE), dtype=torch.int32, device=device)
            taken, self.free = self.free[:count], self.free[count:]
        return taken


BY_STREAM: dict[tuple[torch.device, int], torch.Tensor] = {}
RESERVES: dict[torch.device, Reserve] = {}


def zeros_for_launch(count: int, q: torch.Tensor) -> torch.Tensor:
    """Counters (int32) for one launch on the current stream of q's GPU."""
    device = q.device
    reserve = RESERVES.setdefault(device, Reserve())
    if torch.cuda.is_current_stream_capturing():
        return reserve.take(count, device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    counters = BY_STREAM.get(key)
    if counters is None or len(counters) < count:
        counters = BY_STREAM[key] = torch.zeros(
            max(count, 1 << 12), dtype=torch.int32, device=device
        )
        # Graphs are captured after an eager call: have zeros at hand that no graph has to make.
        reserve.take(0, device)
    return counters[:count]
