"""The benchmark of packed sequences, as far as it needs no GPU: what it runs, checks and prints."""

import json
import math
from dataclasses import replace

import pytest
import torch
from bench_stubs import draw, without_gpu

from benchmarks import bench_varlen, packed, results, shapes
from benchmarks.bench_varlen import CSV_NAME, HOST_NAME
from benchmarks.harness import WrongOutput
from benchmarks.packed import BY_NAME, OURS, PackedReference, pack
from benchmarks.results import OK

RAGGED = pack("ragged", "skewed", (4, 2), [70, 1, 130, 33])
EQUAL = pack("equal", "equal", (2, 2), [40, 40, 40], causal=False)
CHUNKS = pack("chunks", "cache", (4, 2), [40, 40, 1, 1], [40, 100, 150, 17])
DECODE = pack("decode", "cache", (4, 2), [1, 1, 1], [100, 100, 100], causal=False)
SMALL = [RAGGED, EQUAL, CHUNKS, DECODE]


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


def test_a_run_from_end_to_end(tmp_path, monkeypatch, capsys):
    compiled = without_gpu(monkeypatch, tmp_path)
    cells = [replace(cell, name=f"{cell.name}-cell") for cell in SMALL]
    monkeypatch.setattr(bench_varlen, "CELLS", cells)
    with torch.no_grad():
        bench_varlen.main(["--rounds", "2"])
        rows = results.read(tmp_path / CSV_NAME)
        assert {row.status for row in rows} == {OK}
        expected = {
            (cell.name, one.name) for cell in cells for one in packed.providers_of(cell, [], [])
        }
        assert expected <= {(row.cell, row.provider) for row in rows}
        assert {("fa3", "host"), ("fa3-dense", "equal-cell")} < set(compiled)
        assert {"fa3"} == set(json.loads((tmp_path / HOST_NAME).read_text()))
        assert "host, us a call: fa3 25.0" in capsys.readouterr().out
        # What there is is not measured again.
        bench_varlen.main(["--rounds", "2"])
        assert len(results.read(tmp_path / CSV_NAME)) == len(rows)
