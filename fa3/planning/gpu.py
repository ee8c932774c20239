"""The GPUs that the planner knows; `fa3.calls.devices` finds the one that a tensor is on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the planner needs to know of a GPU.

    Fields:
        num_sms: streaming multiprocessors.
        l2_bytes: bytes of L2 that the K and V of one section of heads may take.
    """

    name: str
    num_sms: int
    l2_bytes: int


H200 = Gpu("NVIDIA H200", num_sms=132, l2_bytes=32 << 20)
"""Has 60 MB of L2; Q and O pass through it too, so half is left for K and V."""

H100 = Gpu("NVIDIA H100", num_sms=132, l2_bytes=26 << 20)
"""The SXM version: 50 MB of L2."""
