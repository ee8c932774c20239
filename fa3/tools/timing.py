"""Times calls on the GPU in turn, from CUDA graphs, for `fa3 tune` and `fa3 demo`."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

GRAPH_US = 4000  # work inside one graph: no host time shows
LOAD_S = 0.3  # seconds of work before the first round: then the power cap sets the clock
ROUNDS = 7


def time_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median microseconds of each call under steady load.
    In every round each call runs for some milliseconds, in random order, so that a drifting clock
    hits all alike."""
    graphs = {name: capture(call) for name, call in calls.items()}
    until = time.perf_counter() + LOAD_S
    while time.perf_counter() < until:
        for graph, _ in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in random.sample(list(graphs), len(graphs)):
            graph, count = graphs[name]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: statistics.median(us) for name, us in times.items()}


def capture(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture some milliseconds of calls; return graph and number of calls."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = math.ceil(GRAPH_US / 1e6 / (time.perf_counter() - begin))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph, count
