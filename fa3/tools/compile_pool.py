"""Compiles kernels in other processes, and reports each kernel that is done.

`fa3.tools.warmup` waits for all of them. The processes run `fa3.tools.compile_worker`, and kernels
go to the cache on disk.
"""

import contextlib
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from fa3.running.compiler import Kernel
from fa3.tools.compile_worker import compile_in, worker


class CompilePool:
    """Compiles kernels in so many processes, the first ones first, inside of its `with`.

    `current` has those that are being compiled, in the order in which that began.

    What is not done at the end of that is given up; its processes are killed, which leaves nothing
    broken on disk.
    """

    def __init__(self, kernels: Iterable[Kernel], processes: int) -> None:
        self.waiting = deque(kernels)
        self.done: queue.SimpleQueue[Kernel | Exception] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.current: dict[Kernel, None] = {}
        self.is_closed = False
        count = min(processes, len(self.waiting))
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(count)]

    def __enter__(self) -> "CompilePool":
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes, and wait for the threads that were started."""
        # First: then no thread takes one more kernel, also if another Ctrl-C ends this.
        self.is_closed = True
        with self.lock:
            for process in self.running:
                process.kill()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def next_done(self, timeout_s: float | None = None) -> Kernel | None:
        """A kernel that was tried, each once; None if none was within the time.

        Whether it is on disk now tells whether that went well.
        """
        try:
            found = self.done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def work(self) -> None:
        """Compile what is waiting; a process that dies of a kernel is followed by another."""
        try:
            while self.waiting and not self.is_closed:
                self.work_in_process()
        except Exception as error:
            self.done.put(error)

    def work_in_process(self) -> None:
        """Compile what is waiting, until nothing is or the process dies."""
        with contextlib.ExitStack() as stack:
            with self.lock:
                if self.is_closed:
                    return
                process = stack.enter_context(worker())
                self.running.add(process)
                # Before it is waited for: one that is gone must not be killed.
                stack.callback(self.forget, process)
            is_there = True
            while is_there and (kernel := self.take()) is not None:
                self.current[kernel] = None
                is_there = compile_in(process, kernel)
                del self.current[kernel]
                self.done.put(kernel)

    def take(self) -> Kernel | None:
        """A kernel that waits; None if none does."""
        try:
            return None if self.is_closed else self.waiting.popleft()
        except IndexError:
            return None

    def forget(self, process: subprocess.Popen) -> None:
        """Let a process end by itself."""
        with self.lock:
            self.running.remove(process)
