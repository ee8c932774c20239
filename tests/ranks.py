"""Processes that are the ranks of groups, for tests of `fa3.distributed`.

On the CPU they talk through gloo, on GPUs through NCCL, with one GPU for each.
"""

import contextlib
import datetime
import functools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

NUM_RANKS = 4
SECONDS = 30
"""Until a collective counts as hung. On GPUs kernels compile in between."""

PRELOADED = ["torch", "torch.distributed", "fa3.calls.passes", "fa3.distributed", "torch._dynamo"]


class Ranks:
    """Processes, and groups of the first 1, 2, 4, ... of them.

    Attributes:
        count: processes.
    """

    def __init__(self, folder: Path, count: int = NUM_RANKS, backend: str = "gloo") -> None:
        self.count, self.backend = count, backend
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipes = [context.Pipe() for _ in range(count)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, count, backend, folder, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, size: int, function: Callable, *arguments: object) -> list:
        """Call `function(group, *arguments)` on the first ranks; return what each returns.

        Raises:
            AssertionError: with the traceback, if a rank raises anything.
        """
        if size > self.count:
            pytest.skip(f"needs {size} GPUs, has {self.count}")
        connections = self.connections[:size]
        for connection in connections:
            connection.send((size, function, arguments))
        for connection in connections:
            assert connection.poll(SECONDS * (2 if self.backend == "gloo" else 8)), "a rank hangs"
        results = [connection.recv() for connection in connections]
        failed = [text for is_right, text in results if not is_right]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def stop(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(SECONDS)
            process.kill()


def serve(rank: int, count: int, backend: str, folder: Path, connection: Connection) -> None:
    """Run what comes on a connection, until None comes."""
    torch.set_num_threads(1)
    if backend == "nccl":
        # Hosts may be shared.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=count,
        store=dist.FileStore(str(folder / "store"), count),
        timeout=datetime.timedelta(seconds=SECONDS * (1 if backend == "gloo" else 4)),
    )
    sizes = [size for size in (1, 2, 4, 8) if size <= count]
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    for size, function, arguments in iter(connection.recv, None):
        try:
            connection.send((True, function(groups[size], *arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where the tensors of a group's rank are."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def refusal(function: Callable, *arguments: object, **named: object) -> str:
    """Return the type and the text of what a call raises, in a line."""
    try:
        function(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@functools.cache
def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same random bfloat16 tensor on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
