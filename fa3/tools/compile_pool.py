"""Compiles kernels in other processes, and reports each kernel that is done.

A worker is a program of its own, since a fork would inherit CUDA's state and what `multiprocessing`
spawns would run the caller's script again. Kernels come pickled through its standard input; each is
answered by a line, and goes to the cache on disk. What is printed meanwhile goes to the standard
error."""

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from fa3.running.compiler import ARCH, Kernel, object_code

ROOT = str(Path(__file__).parents[2])

PROGRAM = f"import sys; sys.path[0] = {ROOT!r}; from fa3.tools.compile_pool import serve; serve()"
"""Runs this very package, wherever it is."""


class CompilePool:
    """Compiles kernels in so many processes, the first ones first, inside of its `with`.

    A thread waits for each process. What is not done at the end stays in `waiting`; the processes
    are killed, which leaves nothing broken on disk.
    """

    def __init__(self, kernels: Iterable[Kernel], processes: int) -> None:
        self.waiting = deque(kernels)
        self.tried: SimpleQueue[Kernel] = SimpleQueue()
        self.workers: list[subprocess.Popen] = []
        self.is_open, self.lock = True, Lock()
        count = min(processes, len(self.waiting))
        self.threads = [Thread(target=self.compile_waiting, daemon=True) for _ in range(count)]

    def __enter__(self) -> "CompilePool":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.is_open = False
        for worker in self.workers:
            worker.kill()
        for thread in self.threads:
            thread.join()
        for worker in self.workers:
            worker.communicate()

    def next_done(self) -> Kernel:
        """Wait for a kernel that was tried; whether it is on disk tells if that went well."""
        return self.tried.get()

    def compile_waiting(self) -> None:
        """Have waiting kernels compiled, one after another; each thread does this."""
        worker = None
        while self.is_open:
            try:
                kernel = self.waiting.popleft()
            except IndexError:
                return
            if worker is None:
                with self.lock:
                    if not self.is_open:
                        return
                    worker = start_worker()
                    self.workers.append(worker)
            if not has_tried(worker, kernel):
                worker = None
            self.tried.put(kernel)


def start_worker() -> subprocess.Popen:
    """A process that compiles what it is sent."""
    # It needs no GPU, so it shall not take memory of one. Where GPUs are hidden the DSL looks for
    # one 281 times a kernel, unless the environment names the architecture.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": ARCH}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        # Ctrl-C is the caller's, who ends this process.
        start_new_session=True,
    )


def has_tried(worker: subprocess.Popen, kernel: Kernel) -> bool:
    """Have a kernel compiled; whether the process still runs afterwards."""
    assert worker.stdin and worker.stdout, "they were asked for"
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(kernel, worker.stdin)
        worker.stdin.flush()
    return bool(worker.stdout.readline())


def serve() -> None:
    """Compile what comes until nothing more does; errors are printed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            kernel = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            object_code(kernel)
        except Exception:
            traceback.print_exc()
        print("done", file=answers, flush=True)
