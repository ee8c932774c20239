"""Processes that are the ranks of gloo groups, for tests of `fa3.distributed`."""

import datetime
import functools
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

NUM_RANKS = 4
SECONDS = 30
"""Until a collective or a process counts as hung."""

PRELOADED = ["torch", "torch.distributed", "fa3.calls.passes", "fa3.distributed"]


class Ranks:
    """Four processes; groups of 1, 2 and 4 of them."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, folder, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, size: int, function: Callable, *arguments: object) -> list:
        """Call `function(group, *arguments)` on the first ranks; return what each returns.

        Raises:
            AssertionError: with the traceback, if a rank raises anything.
        """
        connections = self.connections[:size]
        for connection in connections:
            connection.send((size, function, arguments))
        for connection in connections:
            assert connection.poll(2 * SECONDS), "a rank hangs"
        results = [connection.recv() for connection in connections]
        failed = [text for is_right, text in results if not is_right]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def stop(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(SECONDS)
            process.kill()


def serve(rank: int, folder: Path, connection: Connection) -> None:
    """Run what comes on a connection, until None comes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=NUM_RANKS,
        store=dist.FileStore(str(folder / "store"), NUM_RANKS),
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, NUM_RANKS)}
    for size, function, arguments in iter(connection.recv, None):
        try:
            connection.send((True, function(groups[size], *arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


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
