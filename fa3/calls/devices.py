"""The GPU of a call, and how many SMs it may use."""

import functools
from dataclasses import replace

import torch

from fa3.planning.costs import H100, H200, Gpu


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return a device as the planner sees it; raise unless Hopper."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise ValueError(
            f"q is on {properties.name} (compute capability {properties.major}."
            f"{properties.minor}); the kernels need a Hopper GPU (9.0)"
        )
    like = H100 if properties.name.startswith(H100.name) else H200
    return Gpu(properties.name, properties.multi_processor_count, like.l2_bytes)


def gpu_for_call(device: torch.device, sm_margin: int = 0) -> Gpu:
    """A call's GPU without `sm_margin` SMs; an H200 for the CPU."""
    gpu = gpu_of(device) if device.type == "cuda" else H200
    if not 0 <= sm_margin < gpu.num_sms:
        raise ValueError(f"sm_margin must be from 0 to {gpu.num_sms - 1}, got {sm_margin}")
    return replace(gpu, num_sms=gpu.num_sms - sm_margin)
