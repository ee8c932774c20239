"""The benchmark of gradients, as far as it needs no GPU: what it runs, checks and prints."""

import json
import math

import pytest
import torch
from bench_stubs import draw, without_gpu

from benchmarks import bench_backward, gradients, results, shapes
from benchmarks.bench_backward import CSV_NAME, HOST_NAME, GradientRow
from benchmarks.gradients import (
    ORDERED_OURS,
    PASSES,
    reference_of,
    with_passes,
)
from benchmarks.harness import WrongOutput
from benchmarks.packed import pack
from benchmarks.results import OK

DENSE = shapes.named("dense", 2, (50, 50), (4, 2), (64, 32))
FULL = shapes.named("full", 1, (40, 70), (2, 2), (64, 64), causal=False)
RAGGED = pack("ragged", "skewed", (4, 2), [40, 1, 70, 33])
SMALL = [with_passes(cell, passes) for cell in (DENSE, FULL, RAGGED) for passes in PASSES]


@pytest.fixture(autouse=True)
def without_gradients():
    """As runs have it."""
    with torch.no_grad():
        yield


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


def test_a_run_from_end_to_end(tmp_path, monkeypatch, capsys):
    compiled = without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(gradients, "ORDERED", {DENSE.name, RAGGED.name})
    monkeypatch.setattr(bench_backward, "CELLS", SMALL)
    options = ["--only", "fa3", ORDERED_OURS]
    bench_backward.main(options)
    rows = results.read(tmp_path / CSV_NAME, GradientRow)
    assert {row.status for row in rows} == {OK} and {row.peak_mib for row in rows} == {1}
    assert len(rows) == len(PASSES) * (2 + 1 + 2) and ("fa3", "host") in compiled
    assert {"fa3", "autograd"} < set(json.loads((tmp_path / HOST_NAME).read_text()))
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out
