"""The benchmark of what calls cost the host, as far as it needs no GPU."""

import pytest
import torch
from rich.console import Console

from benchmarks import bench_host
from benchmarks.bench_host import HEAD_DIM, HEADS, calls_on, measure, table_of


def test_all_kinds_of_calls_run_and_agree_with_metadata():
    calls = calls_on("cpu")
    for name, call in calls.items():
        out = call()
        assert out.shape[-2:] == (HEADS, HEAD_DIM)
        assert out.isfinite().all()
        if name == "packed, other lengths":
            assert not torch.equal(out, call())
            continue
        plain = calls[name.removesuffix(", metadata")]
        torch.testing.assert_close(out, plain(), atol=0.01, rtol=0.02)


def test_times_are_of_each_call_in_each_block(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_host.time, "thread_time", lambda: 1e-3 * next(clock))
    count = []
    times = measure({"one": lambda: count.append(1), "other": lambda: count.append(1)}, blocks=3)
    assert len(count) == 2 * 3 * (bench_host.CALLS_OF_BLOCK + 1)
    assert times == {name: [pytest.approx(20.0)] * 3 for name in ("one", "other")}


def test_a_call_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(bench_host, "calls_on", lambda device: {"bad": lambda: 1 / 0})
    assert bench_host.call_once("bad") == "bad: ZeroDivisionError: division by zero"


def test_the_table_has_a_line_for_each_kind(capsys):
    Console(width=100).print(table_of({"cache": [8.0, 9.0, 30.0], "packed": [20.0]}))
    printed = capsys.readouterr().out
    assert "cache" in printed and "packed" in printed
    assert "9.0" in printed and "8.0" in printed and "20.0" in printed


def test_a_gpu_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        bench_host.main([])
