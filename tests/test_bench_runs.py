"""Benchmarks of gradients and of packed sequences: whole runs on the CPU, and their checks."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    bench_backward,
    bench_varlen,
    gradients,
    harness,
    packed,
    results,
    runs,
    shapes,
)
from benchmarks.bench_backward import GradientRow
from benchmarks.gradients import ORDERED_OURS, PASSES, reference_of, with_passes
from benchmarks.harness import Contender, WrongOutput
from benchmarks.packed import BY_NAME, OURS, PackedReference, pack
from benchmarks.peers import Tensors
from benchmarks.results import OK
from benchmarks.shapes import Cell
from benchmarks.timing import Block

RAGGED = pack("ragged", "skewed", (4, 2), [70, 1, 130, 33])
EQUAL = pack("equal", "equal", (2, 2), [40, 40, 40], causal=False)
CHUNKS = pack("chunks", "cache", (4, 2), [40, 40, 1, 1], [40, 100, 150, 17])
DECODE = pack("decode", "cache", (4, 2), [1, 1, 1], [100, 100, 100], causal=False)
DENSE = shapes.named("dense", 2, (50, 50), (4, 2), (64, 32))
FULL = shapes.named("full", 1, (40, 70), (2, 2), (64, 64), causal=False)
DIFFERENTIATED = [with_passes(cell, passes) for cell in (DENSE, FULL, RAGGED) for passes in PASSES]


def draw(cell: Cell) -> Tensors:
    """Draw inputs of a cell on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in cell.operand_shapes)
    return Tensors(*(tensor.bfloat16() for tensor in drawn))


@pytest.fixture(autouse=True)
def without_gradients():
    """As runs have it."""
    with torch.no_grad():
        yield


@pytest.fixture
def compiled(monkeypatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Let runs work on the CPU and take no time; give the calls that are compiled before.

    Checks are those of real runs; all calls are said to take 100 us.
    """
    found = []

    def open_run(options, console, csv_name, rows, missing):
        return runs.Run(console, options.data, 2, tmp_path / csv_name, math.inf, None)

    def choose_runner(provider, cell, inputs):
        choice, call = next(iter(provider.prepare(cell, inputs[0]).items()))
        call()
        return Contender(provider, choice, SimpleNamespace(launch="eager", calls=[call]))

    def measure(contenders, regime, rounds, shuffle, meter):
        return {one.provider.name: [Block(100.0, 10, 0, 1)] * rounds for one in contenders}

    def compile_all(calls, console):
        found.extend((one.name, cell.name) for one, cell in dict.fromkeys(calls))

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
    return found


# ------------------------------------------------------------------------------------ packed


def test_operations_are_those_of_the_sequences():
    for mask in shapes.MASKS:
        dense = shapes.grid([128], [mask], [1024])[0]
        assert BY_NAME[f"equal-{mask}-16x1k"].flops == dense.flops
        assert BY_NAME[f"equal-{mask}-16x1k"].kv_bytes == dense.kv_bytes
    both = replace(RAGGED, passes="both")
    halves = sum(n * n / 2 for n in RAGGED.lengths_q)
    assert both.flops == pytest.approx(3.5 * 4 * 4 * halves * 128)
    seen = 40 * 41 / 2 + (40 * 60 + 40 * 41 / 2) + 150 + 17
    assert CHUNKS.pairs * CHUNKS.batch == seen - 40 * 41 / 2 + 40 * 40 / 2


def test_the_check_finds_wrong_lengths_masks_and_holes():
    tensors = draw(RAGGED)
    reference = PackedReference(RAGGED, tensors)
    (call,) = OURS[0].prepare(RAGGED, tensors).values()
    other = (71, 1, 129, 33)
    for wrong in (
        replace(RAGGED, causal=False),
        replace(RAGGED, lengths_q=other, lengths_k=other),
    ):
        with pytest.raises(WrongOutput, match="error"):
            reference.check(OURS[0].prepare(wrong, tensors)[""]())
    out = call()
    out[72, 3, 5] = math.nan
    with pytest.raises(WrongOutput, match="finite"):
        reference.check(out)


def test_a_run_of_packed_sequences(compiled, tmp_path, monkeypatch, capsys):
    cells = [replace(cell, name=f"{cell.name}-cell") for cell in (RAGGED, EQUAL, CHUNKS, DECODE)]
    monkeypatch.setattr(bench_varlen, "CELLS", cells)
    bench_varlen.main(["--rounds", "2"])
    rows = results.read(tmp_path / bench_varlen.CSV_NAME)
    assert {row.status for row in rows} == {OK}
    expected = {
        (cell.name, one.name) for cell in cells for one in packed.providers_of(cell, [], [])
    }
    assert expected <= {(row.cell, row.provider) for row in rows}
    assert {("fa3", "host"), ("fa3-dense", "equal-cell")} < set(compiled)
    assert {"fa3"} == set(json.loads((tmp_path / bench_varlen.HOST_NAME).read_text()))
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out
    # What there is is not measured again.
    bench_varlen.main(["--rounds", "2"])
    assert len(results.read(tmp_path / bench_varlen.CSV_NAME)) == len(rows)


# --------------------------------------------------------------------------------- gradients


def attend(q, k, v, causal):
    """Attention by torch, aligned to the bottom right."""
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        attn_mask=mask if causal else None, enable_gqa=True,
    )  # fmt: skip
    return out.transpose(1, 2)


@pytest.mark.parametrize("cell", [DENSE, FULL], ids=lambda cell: cell.name)
def test_reference_is_the_gradient(cell):
    cell, tensors = with_passes(cell, "backward"), draw(cell)
    reference = reference_of(cell, tensors)
    leaves = [tensor.float().requires_grad_() for tensor in tensors]
    d_out = gradients.draw_gradient(cell, torch.device("cpu"))
    with torch.enable_grad():
        out = attend(*leaves, cell.causal)
    found = torch.autograd.grad(out, leaves, d_out.float())
    assert reference.check(found).largest < 1e-5
    for i in range(3):
        wrong = list(found)
        wrong[i] = wrong[i] * 1.1
        with pytest.raises(WrongOutput, match=f"error of {gradients.GRADIENTS[i]}"):
            reference.check(tuple(wrong))
    found[1][0, 3, 1, 5] = math.nan
    with pytest.raises(WrongOutput, match="dk is not finite"):
        reference.check(found)


def test_a_run_of_gradients(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradients, "ORDERED", {DENSE.name, RAGGED.name})
    monkeypatch.setattr(bench_backward, "CELLS", DIFFERENTIATED)
    bench_backward.main(["--only", "fa3", ORDERED_OURS])
    rows = results.read(tmp_path / bench_backward.CSV_NAME, GradientRow)
    assert {row.status for row in rows} == {OK} and {row.peak_mib for row in rows} == {1}
    assert len(rows) == len(PASSES) * (2 + 1 + 2) and ("fa3", "host") in compiled
    written = (tmp_path / bench_backward.HOST_NAME).read_text()
    assert {"fa3", "autograd"} < set(json.loads(written))
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out
