"""The GPU of a call, and the SMs of it that the call may use."""

import functools
from dataclasses import replace

import torch

from fa3.planning.gpu import H100, H200, Gpu


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """What the planner needs to know of a device; raises unless it is a Hopper GPU."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise ValueError(
            f"q is on {properties.name} (compute capability {properties.major}."
            f"{properties.minor}); the kernels need a Hopper GPU (9.0)"
        )
    like = H100 if properties.name.startswith(H100.name) else H200
    return Gpu(properties.name, properties.multi_processor_count, like.l2_bytes)


def sms_of(device: torch.device, sm_margin: int) -> int:
    """SMs that a call on a device may use; on the CPU an H200's."""
    gpu = H200 if device.type == "cpu" else gpu_of(device)
    return reserve_sms(gpu, sm_margin).num_sms


def reserve_sms(gpu: Gpu, sm_margin: int) -> Gpu:
    """The GPU without the SMs that the caller keeps for other work."""
    if not 0 <= sm_margin < gpu.num_sms:
        raise ValueError(f"sm_margin must be from 0 to {gpu.num_sms - 1}, got {sm_margin}")
    return replace(gpu, num_sms=gpu.num_sms - sm_margin)
