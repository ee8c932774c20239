"""Compiles kernels in other processes, into the cache on disk.

A worker is a program of its own, since a fork would inherit CUDA's state and what `multiprocessing`
spawns would run the caller's script again. Kernels come pickled through its standard input; each is
answered by a line, and goes to the cache on disk. What is printed meanwhile goes to the standard
error."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from fa3.planning.explanation import describe_kernel
from fa3.running.code_cache import cache_dir, check_can_keep
from fa3.running.compiler import ARCH, Kernel, object_code

ROOT = str(Path(__file__).parents[2])

PROGRAM = f"import sys; sys.path[0] = {ROOT!r}; from fa3.tools.compile_pool import serve; serve()"
"""Runs this very package, wherever it is."""


def check_folder() -> None:
    """Raise RuntimeError, before anything is compiled, if no kernel can be kept."""
    folder = cache_dir()
    try:
        check_can_keep(folder)
    except OSError as error:
        raise RuntimeError(
            f"kernels cannot be kept in {folder}: {error.strerror}. Set FA3_CACHE_DIR to a folder "
            "of your own"
        ) from error


def compile_all(kernels: Sequence[Kernel], processes: int | None = None) -> None:
    """Have kernels compiled by so many processes, or one a core; print each that was tried.
    Whether a kernel is on disk afterwards tells if that went well. At an error or Ctrl-C the
    processes are killed, which leaves nothing broken on disk."""
    begin, total = time.perf_counter(), len(kernels)
    count = min(processes or len(os.sched_getaffinity(0)), total)
    workers = [start_worker() for _ in range(count)]
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    starting, given_up = threading.Lock(), threading.Event()

    def try_kernel(kernel: Kernel) -> Kernel:
        worker = idle.get()
        with starting:
            if worker.poll() is not None and not given_up.is_set():
                worker = start_worker()
                workers.append(worker)
        send(worker, kernel)
        idle.put(worker)
        return kernel

    threads = ThreadPoolExecutor(max(1, count))
    try:
        futures = [threads.submit(try_kernel, kernel) for kernel in kernels]
        for done, future in enumerate(as_completed(futures), 1):
            if sys.stderr is not None:
                clock = f"{done} of {total} kernels, {time.perf_counter() - begin:.0f} s"
                print(f"{clock}: {describe_kernel(future.result())}", file=sys.stderr, flush=True)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        with starting:  # after this no other process is started
            given_up.set()
            for worker in workers:
                worker.kill()
        threads.shutdown()
        for worker in workers:
            worker.communicate()


def start_worker() -> subprocess.Popen:
    """Start a process that compiles what it is sent."""
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


def send(worker: subprocess.Popen, kernel: Kernel) -> None:
    """Have a process compile a kernel; wait until it has, or has died of it."""
    assert worker.stdin and worker.stdout, "they were asked for"
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(kernel, worker.stdin)
        worker.stdin.flush()
    if not worker.stdout.readline():
        worker.wait()


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
