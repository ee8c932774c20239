"""The benchmark of first calls, as far as it needs no GPU."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from benchmarks import bench_first_call, first_call, runs
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


def of_processes(*first: float) -> list[dict[str, float]]:
    return [dict.fromkeys(STEPS, 1.0) | {FIRST: milliseconds} for milliseconds in first]


def test_what_is_said_of_the_times(monkeypatch, tmp_path, capsys):
    times = {"dense": of_processes(40, 90, 50), "cache": of_processes(151, 160, 140)}
    console = Console(width=runs.WIDTH, record=True)
    console.print(bench_first_call.table_of(times))
    assert "50.0 (90.0)" in console.export_text()
    assert bench_first_call.verdict(times).endswith("at most 151 ms (cache): above 150 ms")
    del times["cache"]
    assert bench_first_call.verdict(times).endswith("at most 50 ms (dense): within 150 ms")

    monkeypatch.setattr(runs, "need_gpu", lambda: None)
    monkeypatch.setattr(bench_first_call, "measure", lambda calls, processes: times)
    monkeypatch.setattr(bench_first_call, "about", lambda: {"gpu": "none"})
    bench_first_call.main(["--calls", "dense", "--out", str(tmp_path)])
    assert "within 150 ms" in capsys.readouterr().out
    written = json.loads((tmp_path / bench_first_call.FILE_NAME).read_text())
    assert written == {"environment": {"gpu": "none"}, "milliseconds": times}
