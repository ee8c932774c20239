"""CUDA graphs of calls."""

from collections.abc import Callable
from typing import TypeVar

import torch

Results = TypeVar("Results")


def captured(run: Callable[[], Results], **options) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Return a graph of what a function launches, and what the function returned.

    The function must have run before, so that its kernels are loaded.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = run()
    return graph, results
