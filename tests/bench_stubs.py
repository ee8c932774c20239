"""What stands in for a GPU where tests run a benchmark from end to end."""

import math
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import harness, runs
from benchmarks.harness import Contender
from benchmarks.peers import Tensors
from benchmarks.shapes import Cell
from benchmarks.timing import Block


def draw(cell: Cell) -> Tensors:
    """Draw inputs of a cell on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in cell.operand_shapes)
    return Tensors(*(tensor.bfloat16() for tensor in drawn))


def without_gpu(monkeypatch, directory: Path) -> list[tuple[str, str]]:
    """Let runs work on the CPU and take no time; give the calls that are compiled before.

    Checks are those of real runs; all calls are said to take 100 us.
    """
    compiled = []

    def open_run(options, console, csv_name, found, missing):
        torch.set_grad_enabled(False)
        return runs.Run(console, options.data, 2, directory / csv_name, math.inf, None)

    def choose_runner(provider, cell, inputs):
        choice, call = next(iter(provider.prepare(cell, inputs[0]).items()))
        call()
        return Contender(provider, choice, SimpleNamespace(launch="eager", calls=[call]))

    def measure(contenders, regime, rounds, shuffle, meter):
        return {one.provider.name: [Block(100.0, 10, 0, 1)] * rounds for one in contenders}

    def compile_all(calls, console):
        compiled.extend((one.name, cell.name) for one, cell in dict.fromkeys(calls))

    monkeypatch.setattr(runs, "need_gpu", lambda: None)
    monkeypatch.setattr(runs, "open_run", open_run)
    monkeypatch.setattr(runs, "compile_all", compile_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replacements = {
        "draw_inputs": lambda cell, data, sets: [draw(cell)] * sets,
        "poison_freed_memory": lambda cell: None,
        "choose_runner": choose_runner,
        "measure": measure,
        "peak_bytes": lambda call: 1 << 20,
        "host_microseconds": lambda call: [20.0, 30.0],
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(harness, name, replacement)
    return compiled
