"""Kernels compiled by the oldest versions of the DSL and of TVM FFI that pyproject.toml allows.

Another process compiles a kernel of each kind with them, and checks the machine code by the tests
that there are for the newest versions. pip puts the old ones into a folder of their own: 240 MB,
for as long as the test runs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_compile import cases, name_of

from fa3.schedules.ragged import RaggedTiles

TESTS = Path(__file__).parent
DSL = "nvidia-cutlass-dsl"
FFI = "apache-tvm-ffi"
PARTS_OF_DSL = ("", "-libs-core", "-libs-base", "-libs-cu13")
UNREACHABLE = re.compile(r"No matching distribution|Could not find a version|connection|Timeout")

RUN_TESTS = """
import sys, cutlass, tvm_ffi, pytest
*versions, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
assert [cutlass.__version__, tvm_ffi.__version__] == versions
sys.exit(pytest.main(arguments))
"""


RAGGED = next(name_of(case) for case in cases() if case[2] is RaggedTiles)
NAMES = [
    f"test_compile.py::test_machine_code[{RAGGED}]",
    "test_decode_compile.py::test_machine_code_of_decode[contiguous]",
    "test_decode_compile.py::test_machine_code[pairs-of-some]",
    "test_backward_compile.py::test_machine_code_for_packed_sequences",
]
"""Tests of forward, decode, append and backward kernels."""


def oldest(package: str) -> str:
    """The version from which on pyproject.toml allows a package."""
    text = TESTS.with_name("pyproject.toml").read_text()
    return re.search(rf'"{package}(?:\[cu13\])?>=([\d.]+),<[\d.]+"', text)[1]


@pytest.fixture
def older_dsl(tmp_path):
    """The folder with the oldest versions; removed at the end, since it is large."""
    folder = tmp_path / "oldest"
    requirements = [f"{DSL}{part}=={oldest(DSL)}" for part in PARTS_OF_DSL]
    requirements.append(f"{FFI}=={oldest(FFI)}")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile")
    options += ("--only-binary", ":all:")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"pip cannot reach {requirements[0]}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


@pytest.mark.compiles
def test_machine_code(older_dsl):
    arguments = ("-n", "0", "-p", "no:cacheprovider", *NAMES)
    paths = (str(older_dsl), *sys.path)
    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, oldest(DSL), oldest(FFI), *arguments],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert f"{len(NAMES)} passed" in done.stdout, done.stdout + done.stderr
