"""What the host may see of the values in a call's small tensors.

What lies on the CPU. What is on a GPU is read back with FA3_ASSERTIONS=1 only, for finding errors:
to read it, the host waits for the GPU.
"""

import torch

from fa3.settings import SETTINGS

ASSERTIONS = SETTINGS["FA3_ASSERTIONS"] == "1"
"""Whether to read back and check what is on a GPU, too."""


MOST_SCORE = 2.0**24
"""Scores, scaled, up to which the softmax is right in float32 but for the rounding of the scores: a
weight's relative error is up to 2**-23 of its score."""


def is_visible(value: int | torch.Tensor) -> bool:
    """Whether the host is to see a value: it need not wait for a GPU, or is told to."""
    return isinstance(value, int) or value.is_cpu or ASSERTIONS


def read_back(name: str, tensor: torch.Tensor | None) -> list | None:
    """What lies in a tensor; None if there is none, or the host is not to see it.

    Raises:
        RuntimeError: it would have to be read back while a CUDA graph is captured.
    """
    if tensor is None or not is_visible(tensor):
        return None
    if not tensor.is_cpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS=1 can "
            "check a call before the capture, which must run without it"
        )
    return tensor.tolist()


def check_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,  # the softmax scale
    # Which rows of packed q and k count; None for all.
    used: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Raise if scores may be so large that the softmax loses them; for FA3_ASSERTIONS=1."""
    if not q.is_cpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "scores cannot be checked while a CUDA graph is captured: FA3_ASSERTIONS=1 can check a "
            "call before the capture, which must run without it"
        )
    largest = abs(scale)
    for rows, of_rows in zip((q, k), used, strict=True):
        rows = rows.detach() if of_rows is None else rows.detach()[of_rows]
        if not rows.numel():
            return
        largest *= rows.float().norm(dim=-1).max().item()
    if largest > MOST_SCORE:
        raise ValueError(
            f"scores must be at most {MOST_SCORE:.0f}, got rows of q and k whose score may be "
            f"{largest:.3g} after scaling: its exponential relative to the row max is lost to "
            "rounding in float32"
        )
