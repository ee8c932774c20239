"""Compiles kernels in other processes, into the cache on disk.

A program of its own imports the compiler. A fork of this process would inherit CUDA's state, and
what `multiprocessing` spawns would run the caller's script again. It gets all kernels pickled
through its standard input, and forks for each of them: so a kernel of which the compiler dies takes
no other with it. What is printed meanwhile goes to the standard error."""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fa3.kernels.combine import Combine
from fa3.kernels.kernel_base import KernelBase
from fa3.planning.explanation import describe_kernel
from fa3.running.code_cache import cache_dir, check_can_keep
from fa3.running.compiler import ARCH, OPTIONS, compiled, object_code

PROGRAM = f"""import sys; sys.path[0] = {str(Path(__file__).parents[2])!r}
from fa3.tools.compile_pool import compile_from_stdin; compile_from_stdin()"""
"""Runs this very package, wherever it is."""


def compile_all(kernels: Sequence[KernelBase], processes: int | None = None) -> None:
    """Have kernels compiled by several processes; print each that was tried.
    Whether a kernel is on disk afterwards tells if that went well. At an error or Ctrl-C the
    processes are killed, which leaves nothing broken on disk. Raises RuntimeError before, if no
    kernel can be kept."""
    folder = cache_dir()
    try:
        check_can_keep(folder)
    except OSError as error:
        raise RuntimeError(
            f"kernels cannot be kept in {folder}: {error.strerror}. Set FA3_CACHE_DIR to a folder "
            "of your own"
        ) from error
    begin, total = time.perf_counter(), len(kernels)
    # They need no GPU, so they shall not take memory of one. Where GPUs are hidden the DSL looks
    # for one 281 times a kernel, unless the environment names the architecture.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": ARCH}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if sys.stderr is None else None,
        env=environment,
        start_new_session=True,  # so that all of them can be killed, and Ctrl-C is the caller's
    ) as program:
        assert program.stdin and program.stdout, "they were asked for"
        try:
            with suppress(BrokenPipeError), program.stdin:
                pickle.dump((kernels, processes or len(os.sched_getaffinity(0))), program.stdin)
            for done, number in enumerate(program.stdout, 1):
                clock = f"{done} of {total} kernels, {time.perf_counter() - begin:.0f} s"
                line = f"{clock}: {describe_kernel(kernels[int(number)])}"
                if sys.stderr is not None:
                    print(line, file=sys.stderr, flush=True)
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def compile_from_stdin() -> None:
    """Compile the kernels that come, each in a process; number each try."""
    kernels, processes = pickle.load(sys.stdin.buffer)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if len(kernels) > processes:
        # What the DSL loads for its first kernel takes 2 s, and forks then have it.
        compiled(Combine("float32", 8, None, None), OPTIONS)
    waiting = list(range(len(kernels)))[::-1]
    running: dict[int, int] = {}  # processes, and the numbers of their kernels
    while waiting or running:
        if waiting and len(running) < processes:
            number = waiting.pop()
            process = os.fork()
            if process == 0:
                try_kernel(kernels[number])
            running[process] = number
        else:
            process, _ = os.wait()
            os.write(answers, b"%d\n" % running.pop(process))


def try_kernel(kernel: KernelBase) -> None:
    """Compile a kernel and end the process; an error is printed."""
    try:
        object_code(kernel)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
