"""What compiles for GPUs but has not been checked there yet: calls for it are refused.

A kernel counts as working when it ran on a GPU against a reference. The GPU tests of what is
refused here lift this; when they have passed, the refusal goes.
"""

import torch


def refuse_unchecked(what: str, device: torch.device) -> None:
    """Raise for a GPU."""
    if device.type == "cuda":
        raise NotImplementedError(
            f"{what} is not supported on GPUs yet: its kernels have not been checked there"
        )
