"""Compiles kernels in other processes, and reports each kernel that is done.

A worker is a program of its own, since a fork would inherit CUDA's state and what `multiprocessing`
spawns would run the caller's script again. Kernels come pickled through its standard input; each is
answered by a line. What is printed meanwhile goes to the standard error. Kernels go to the cache on
disk.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from fa3.running.compiler import ARCH, Kernel, object_code

ROOT = str(Path(__file__).parents[2])

PROGRAM = f"import sys; sys.path[0] = {ROOT!r}; from fa3.tools.compile_pool import serve; serve()"
"""Runs this very package, wherever it is."""


class CompilePool:
    """Compiles kernels in so many processes, the first ones first, inside of its `with`.

    What is not done at the end of that is given up; its processes are killed, which leaves nothing
    broken on disk.

    Attributes:
        waiting: kernels that no process has.
        current: what each busy process compiles, in the order in which that began.
    """

    def __init__(self, kernels: Iterable[Kernel], processes: int) -> None:
        self.waiting = deque(kernels)
        self.idle: list[subprocess.Popen] = []
        self.current: dict[subprocess.Popen, Kernel] = {}
        self.missing = min(processes, len(self.waiting))
        # Ctrl-C reaches the main thread: it must not interrupt a start, which nothing would end.
        self.starter = ThreadPoolExecutor(1)
        self.started: list[Future[subprocess.Popen]] = []

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.starter.shutdown()
        for start in self.started:
            start.result().kill()
        for start in self.started:
            start.result().communicate()

    def next_done(self, timeout_s: float | None = None) -> Kernel | None:
        """A kernel that was tried, each once; None if none was within the time.

        Whether it is on disk now tells whether that went well. Waiting kernels are handed to
        processes here only.
        """
        self.hand_out()
        answers = {answers_of(process): process for process in self.current}
        for answer in wait(cast(Any, list(answers)), timeout_s):
            process = answers[cast(Any, answer)]
            kernel = self.current.pop(process)
            if answers_of(process).readline():
                self.idle.append(process)
            else:
                process.wait()
                self.missing += 1
            self.hand_out()
            return kernel
        return None

    def hand_out(self) -> None:
        """Give each process that has nothing to do a kernel that waits."""
        while self.waiting and (self.idle or self.missing):
            if self.idle:
                process = self.idle.pop()
            else:
                self.started.append(self.starter.submit(start_worker))
                process = self.started[-1].result()
                self.missing -= 1
            self.current[process] = self.waiting.popleft()
            # That a process has just died is seen where it should answer.
            with contextlib.suppress(BrokenPipeError):
                send(process, self.current[process])


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


def send(process: subprocess.Popen, kernel: Kernel) -> None:
    """Have a kernel compiled; raises BrokenPipeError if the process is gone."""
    assert process.stdin, "it was asked for"
    pickle.dump(kernel, process.stdin)
    process.stdin.flush()


def answers_of(process: subprocess.Popen) -> IO[bytes]:
    """Where a line comes from for each kernel that was tried, or the end."""
    assert process.stdout, "it was asked for"
    return process.stdout


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
