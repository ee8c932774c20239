"""Kernels in memory and on disk: what threads, processes and damaged files make of them."""

import os
import runpy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fa3.kernels.combine import Combine
from fa3.running import compiler

SMALL = Combine("bfloat16", 64, None, None)
NUM_THREADS = 4


@dataclass(frozen=True)
class Fake:
    """A kernel for a compiler that is not the real one."""

    name: str
    entry_name: ClassVar[str] = "fake"
    is_storable: ClassVar[bool] = False

    def arguments(self) -> list:
        return []


class FakeCompiler:
    """Stands in for cute.compile: takes its time and cannot do two things at once."""

    def __init__(self):
        self.compiled = []
        self.is_busy = threading.Event()

    def __call__(self, kernel: Fake, options: str) -> object:
        assert not self.is_busy.is_set(), "two threads compile at the same time"
        self.is_busy.set()
        time.sleep(0.05)
        self.is_busy.clear()
        self.compiled.append(kernel)
        return object()


@pytest.fixture
def fake_compiler(monkeypatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(compiler.cute, "compile", fake)
    monkeypatch.setattr(compiler, "LOADED", {})
    return fake


def in_threads(function: Callable, kernels: list) -> list:
    """What a function does to kernels in threads that start together."""
    start = threading.Barrier(len(kernels))

    def run(kernel) -> object:
        start.wait()
        return function(kernel)

    with ThreadPoolExecutor(len(kernels)) as pool:
        return list(pool.map(run, kernels))


@pytest.mark.parametrize(
    "function", [compiler.load_kernel, lambda kernel: compiler.compiled(kernel, compiler.OPTIONS)]
)
def test_threads_compile_one_after_another(fake_compiler, function):
    kernels = [Fake(str(i)) for i in range(NUM_THREADS)]
    assert len(set(in_threads(function, kernels))) == NUM_THREADS
    assert sorted(kernel.name for kernel in fake_compiler.compiled) == ["0", "1", "2", "3"]


def test_threads_that_want_the_same_kernel_compile_it_once(fake_compiler):
    entries = in_threads(compiler.load_kernel, [Fake("one")] * NUM_THREADS)
    assert fake_compiler.compiled == [Fake("one")]
    assert len(set(entries)) == 1


def test_a_loaded_kernel_takes_no_lock(fake_compiler, monkeypatch):
    loaded = compiler.load_kernel(Fake("loaded"))
    monkeypatch.setattr(compiler, "COMPILING", None)
    assert compiler.load_kernel(Fake("loaded")) is loaded


def test_a_forked_process_can_compile(fake_compiler):
    """A fork in the midst of a compilation would leave the child a lock that nobody frees."""
    thread = threading.Thread(target=compiler.load_kernel, args=(Fake("one"),))
    thread.start()
    assert fake_compiler.is_busy.wait(10)
    child = os.fork()
    if child == 0:
        # Nothing of the test may go on here, whatever is raised.
        try:
            is_free = compiler.COMPILING.acquire(blocking=False)
            os._exit(0 if is_free and not fake_compiler.is_busy.is_set() else 1)
        finally:
            os._exit(2)
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_the_environment_tells_the_compiler_is_part_of_the_key(monkeypatch):
    """All but the architecture, which is an option."""
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    settings = runpy.run_path(compiler.__file__)["DSL_SETTINGS"]
    assert settings == sorted([*compiler.DSL_SETTINGS, ("CUTE_DSL_LINEINFO", "1")])
    key = compiler.key_of(SMALL)
    monkeypatch.setattr(compiler, "DSL_SETTINGS", settings)
    assert key != compiler.key_of(SMALL)
