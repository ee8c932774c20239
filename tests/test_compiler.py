"""Kernels in memory and on disk: what processes and damaged files make of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cutlass.cute as cute
import pytest

import fa3
from fa3 import compiler
from fa3.kernels.combine import Combine

ROOT = Path(fa3.__file__).parent.parent
TESTS = Path(__file__).parent
SMALL = Combine("bfloat16", 64, None, True, None)


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


def test_a_damaged_object_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))

    def check_loads():
        compiler.load_kernel.cache_clear()
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

from fa3.compiler import load_kernel
from fa3.kernels import combine

source = Path("fa3/kernels/combine.py").resolve()
assert source.samefile(combine.__file__)
source.write_text(source.read_text() + "# edited\\n")
with warnings.catch_warnings(record=True) as seen:
    load_kernel(combine.Combine("bfloat16", 64, None, True, None))
print(*(warning.message for warning in seen))
"""


def test_a_kernel_whose_source_is_edited_after_the_import_is_not_kept(tmp_path):
    """Its key would be that of the new source, and its code that of the old one."""
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    shutil.copytree(ROOT / "fa3", copy / "fa3")
    printed = run_python(EDIT, copy, FA3_CACHE_DIR=str(cache))
    assert list(cache.glob("*.o")) == []
    assert "sources have changed" in printed


KEY = "from test_compiler import *; print(compiler.key_of(SMALL))"


def test_what_the_environment_tells_the_compiler_is_part_of_the_key(monkeypatch):
    """All but the architecture, which is an option."""
    key = run_python(KEY, ROOT, TESTS, CUTE_DSL_LINEINFO="1", CUTE_DSL_ARCH="sm_100a").strip()
    assert key != compiler.key_of(SMALL)
    settings = sorted([*compiler.DSL_SETTINGS, ("CUTE_DSL_LINEINFO", "1")])
    monkeypatch.setattr(compiler, "DSL_SETTINGS", settings)
    assert key == compiler.key_of(SMALL)
