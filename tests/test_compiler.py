"""Kernels in memory and on disk: what threads, processes and damaged files make of them."""

import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import cutlass.cute as cute
import pytest

import fa3
from fa3.kernels.combine import Combine
from fa3.running import compiler

ROOT = Path(fa3.__file__).parent.parent
TESTS = Path(__file__).parent
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


def run_python(program: str, *places: Path, **environment: str) -> str:
    """What a new process prints that imports from these places."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=places[0],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


IN_THREADS = """
from fa3.running.compiler import load_kernel
from fa3.kernels.combine import Combine
from test_compiler import in_threads

kernels = [Combine("bfloat16", head_dim, None, None) for head_dim in (32, 64)]
entries = in_threads(load_kernel, kernels)
print(*(type(entry).__name__ for entry in entries))
"""


@pytest.mark.compiles
def test_a_process_compiles_its_first_kernels_in_threads(tmp_path):
    """With the real compiler, which may end the process if two threads use it."""
    printed = run_python(IN_THREADS, ROOT, TESTS, FA3_CACHE_DIR=str(tmp_path))
    assert printed.split() == ["Function"] * 2
    assert len(list(tmp_path.glob("*.o"))) == 2


@pytest.mark.compiles
def test_a_damaged_object_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))

    def check_loads():
        monkeypatch.setattr(compiler, "LOADED", {})
        with pytest.raises(TypeError, match="Expects 10 parameters"):
            compiler.load_kernel(SMALL)()

    check_loads()
    (path,) = tmp_path.glob("*.o")
    size = path.stat().st_size
    os.truncate(path, size // 2)
    check_loads()
    assert path.stat().st_size == size
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    with pytest.raises(TypeError, match="Expects 10 parameters"):
        getattr(module, SMALL.entry_name)()


EDIT = """
import warnings
from pathlib import Path

from fa3.running.compiler import load_kernel
from fa3.kernels import combine

source = Path("fa3/kernels/combine.py").resolve()
assert source.samefile(combine.__file__)
source.write_text(source.read_text() + "# edited\\n")
with warnings.catch_warnings(record=True) as seen:
    load_kernel(combine.Combine("bfloat16", 64, None, None))
print(*(warning.message for warning in seen))
"""


@pytest.mark.compiles
def test_a_kernel_whose_source_is_edited_after_the_import_is_not_kept(tmp_path):
    """Its key would be that of the new source, and its code that of the old one."""
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    shutil.copytree(ROOT / "fa3", copy / "fa3")
    printed = run_python(EDIT, copy, FA3_CACHE_DIR=str(cache))
    assert list(cache.glob("*.o")) == []
    assert "sources have changed" in printed


def test_what_the_environment_tells_the_compiler_is_part_of_the_key(monkeypatch):
    """All but the architecture, which is an option."""
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    settings = runpy.run_path(compiler.__file__)["DSL_SETTINGS"]
    assert settings == sorted([*compiler.DSL_SETTINGS, ("CUTE_DSL_LINEINFO", "1")])
    key = compiler.key_of(SMALL)
    monkeypatch.setattr(compiler, "DSL_SETTINGS", settings)
    assert key != compiler.key_of(SMALL)
