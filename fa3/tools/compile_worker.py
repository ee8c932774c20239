"""A process that compiles kernels for `fa3.tools.compile_pool`, one after another.

It is a program of its own, since a fork would inherit CUDA's state and what `multiprocessing`
spawns would run the caller's script again. Kernels come pickled through the standard input; each is
answered by a line. What is printed meanwhile goes to the standard error.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fa3.running.compiler import ARCH, Kernel, object_code

ROOT = str(Path(__file__).parents[2])

PROGRAM = f"import sys; sys.path[0] = {ROOT!r}; from fa3.tools.compile_worker import serve; serve()"
"""Runs this very package, wherever it is."""


@contextlib.contextmanager
def worker() -> Iterator[subprocess.Popen]:
    """A process that compiles what is passed to `compile_in`."""
    # It needs no GPU, so it shall not take memory of one. Where GPUs are hidden the DSL looks for
    # one 281 times a kernel, unless the environment names the architecture.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": ARCH}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        # Ctrl-C is the caller's, who ends this process.
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(BrokenPipeError):
                pipes(process)[0].close()


def pipes(process: subprocess.Popen) -> tuple[IO[bytes], IO[bytes]]:
    """Where kernels go to a process, and where its answers come from."""
    assert process.stdin and process.stdout, "both were asked for"
    return process.stdin, process.stdout


def compile_in(process: subprocess.Popen, kernel: Kernel) -> bool:
    """Have a kernel compiled; whether the process is still there."""
    kernels, answers = pipes(process)
    try:
        pickle.dump(kernel, kernels)
        kernels.flush()
    except BrokenPipeError:
        return False
    return bool(answers.readline())


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
