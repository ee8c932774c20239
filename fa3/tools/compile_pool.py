"""Compiles kernels in other processes, and reports each kernel that is done, also in a bar.

A worker is a program of its own, since a fork would inherit CUDA's state and what `multiprocessing`
spawns would run the caller's script again. Kernels come pickled through its standard input; each is
answered by a line. What is printed meanwhile goes to the standard error. Kernels go to the cache on
disk.
"""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from typing import TextIO

from fa3.running.compiler import ARCH, Kernel, object_code

ROOT = str(Path(__file__).parents[2])

PROGRAM = f"import sys; sys.path[0] = {ROOT!r}; from fa3.tools.compile_pool import serve; serve()"
"""Runs this very package, wherever it is."""


class CompilePool:
    """Compiles kernels in so many processes, the first ones first, inside of its `with`.

    A thread waits for each process. What is not done at the end is given up; the processes are
    killed, which leaves nothing broken on disk.

    Attributes:
        waiting: kernels that no process has.
        current: what each busy thread has compiled, in the order in which that began.
    """

    def __init__(self, kernels: Iterable[Kernel], processes: int) -> None:
        self.waiting = deque(kernels)
        self.current: dict[int, Kernel] = {}
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

    def next_done(self, timeout_s: float | None = None) -> Kernel | None:
        """A kernel that was tried, each once; None if none was within the time.

        Whether it is on disk now tells whether that went well.
        """
        try:
            return self.tried.get(timeout=timeout_s)
        except Empty:
            return None

    def compile_waiting(self) -> None:
        """Have waiting kernels compiled, one after another; each thread does this."""
        worker, me = None, get_ident()
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
            self.current[me] = kernel
            if not has_tried(worker, kernel):
                worker = None
            del self.current[me]
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


# --------------------------------------------------------------------------------- progress

BAR = 30
"""Characters of a full bar."""


def terminal() -> TextIO | None:
    """The standard error, if it is open and a terminal, so that a bar can be drawn."""
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


class Bar:
    """A progress bar of one line, redrawn in place; silent without a stream."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self.total, self.done, self.stream = total, 0, stream
        self.drawn, self.begin = 0, time.perf_counter()
        if total:
            self.show(0)

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.begin
        return f"{self.done} of {self.total} kernels, {seconds:.0f} s"

    def show(self, done: int, note: str = "") -> None:
        """Draw so many as done, with a note after the seconds."""
        self.done = done
        if self.stream:
            line = f"[{'#' * (BAR * done // self.total):{BAR}}] {self}" + (note and f": {note}")
            line = line[: shutil.get_terminal_size().columns - 1]
            # Spaces cover what a longer line has left.
            self.stream.write(f"\r{line:{self.drawn}}" + ("\n" if done == self.total else ""))
            self.stream.flush()
            self.drawn = len(line)

    def end(self) -> None:
        """Leave the line of a bar that is not full."""
        if self.stream and self.done < self.total:
            self.stream.write("\n")
