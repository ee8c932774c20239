"""The benchmark of first calls, as far as it needs no GPU."""

import subprocess
import sys

import pytest

from benchmarks import bench_first_call, first_call
from benchmarks.first_call import CALLS, DONE, FIRST, SECOND
from fa3.tools import models

STEPS = [
    "import torch", "first tensor", "import cutlass", "import fa3", FIRST, DONE, SECOND,
]  # fmt: skip


def test_kinds_of_calls_have_the_names_that_warming_up_gives_them():
    assert sorted(CALLS) == sorted(models.CALLS)


def test_nothing_is_imported_before_the_clock_runs():
    program = (
        "import sys, benchmarks.first_call; print('torch' in sys.modules, 'fa3' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=bench_first_call.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("call", CALLS)
def test_each_call_runs(call):
    found = first_call.run(call, "cpu", 64, is_compiled=False)
    assert sorted(found) == sorted(STEPS) and min(found.values()) >= 0
    assert found[FIRST] <= found[DONE]


def test_a_kernel_that_is_not_on_disk_is_an_error(monkeypatch):
    from fa3.running import compiler

    monkeypatch.setattr(compiler, "compiled", compiler.compiled)
    first_call.run("dense", "cpu", 64, is_compiled=True)
    with pytest.raises(RuntimeError, match="a kernel is not on disk: run the call once"):
        compiler.compiled("kernel", "options")


def test_new_processes_are_measured():
    times = bench_first_call.measure(["paged"], 1, "--device", "cpu", "--seqlen", "64")
    (found,) = times["paged"]
    assert sorted(found) == sorted(STEPS)
    assert found["import torch"] > 10
