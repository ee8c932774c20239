"""The benchmark of scores, as far as it needs no GPU: what it runs, checks and prints."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_scores, results, shapes
from benchmarks.bench_scores import BUILT_IN, FUNCTIONS, PLAIN, Modified, ModifiedReference
from benchmarks.harness import WrongOutput
from benchmarks.peers import Tensors
from benchmarks.results import FAILED, OK

CELLS = [shapes.named("cost", 2, (150, 150), (4, 2), (64, 64), causal) for causal in (False, True)]


def draw(cell: shapes.Cell) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        shape = (cell.batch, seqlen, heads, head_dim)
        return torch.randn(shape, generator=generator).bfloat16()

    return Tensors(
        normal(cell.seqlen_q, cell.heads_q, cell.head_dim),
        normal(cell.seqlen_k, cell.heads_kv, cell.head_dim),
        normal(cell.seqlen_k, cell.heads_kv, cell.head_dim_v),
    )


def reference_of(provider: Modified, cell: shapes.Cell, tensors: Tensors) -> ModifiedReference:
    return ModifiedReference(cell, tensors, provider.arguments(cell, tensors.q.device))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.mask)
@pytest.mark.parametrize("name", [*BUILT_IN, *FUNCTIONS])
def test_calls_pass_their_own_check_and_no_other(name, cell):
    provider = Modified(name, (BUILT_IN | FUNCTIONS)[name])
    tensors = draw(cell)
    (call,) = provider.prepare(cell, tensors).values()
    errors = reference_of(provider, cell, tensors).check(call())
    assert errors.largest <= errors.allowed < 0.05
    # Beside the plain kernel a prefix of no keys is the causal mask, and a window hides one key.
    same = name in (PLAIN, "window") or (name == "prefix" and cell.causal)
    if not same:
        with pytest.raises(WrongOutput):
            reference_of(Modified(PLAIN, []), cell, tensors).check(call())


def test_quick_runs_leave_functions_to_one_cell():
    def with_functions(quick: bool) -> list[str]:
        return [
            cell.name
            for cell in bench_scores.COST_CELLS
            if "score" in [p.name for p in bench_scores.providers_of(cell, [], quick)]
        ]

    assert with_functions(quick=True) == ["cost-d128-causal-4k"]
    assert len(with_functions(quick=False)) == len(bench_scores.COST_CELLS) == 4


def test_cells_have_unique_names_and_peers_beside_the_plain_kernel():
    cells = bench_scores.COST_CELLS + bench_scores.PEER_CELLS
    assert len({cell.name for cell in cells}) == len(cells)
    peer = Modified("peer", [])
    for cell in bench_scores.PEER_CELLS:
        names = [p.name for p in bench_scores.providers_of(cell, [peer], quick=True)]
        assert names == [PLAIN, "peer"]


def test_rows_are_kept_and_printed(tmp_path):
    cell = CELLS[0]
    row = bench_scores.ScoreRow(
        cell=cell.name, group=cell.group, data="normal", regime="steady", provider=PLAIN,
        status=OK, reason="", version="1", choice="", launch="graph", batch=2, seqlen_q=150,
        seqlen_k=150, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64, causal=False,
        window_left=-1, dtype="bfloat16", us=100.0, tflops=500.0, vs_plain=1.0, vs_plain_q1=1.0,
        vs_plain_q3=1.0, rounds_us=(100.0, 101.0),
    )  # fmt: skip
    slower = replace(
        row, provider="alibi", us=120.0, vs_plain=1.2, vs_plain_q1=1.19, vs_plain_q3=1.21
    )
    broken = replace(row, provider="sinks", status=FAILED, us=None, vs_plain=None)
    path = tmp_path / "scores.csv"
    results.append(path, [row, slower, broken])
    assert results.read(path, bench_scores.ScoreRow) == [row, slower, broken]
    table = bench_scores.markdown([row, slower, broken])
    assert table.splitlines()[0] == "| cell | fa3, us (TFLOP/s) | alibi | sinks |"
    assert table.splitlines()[2] == (
        f"| {cell.name} | 100.0 (500) | 1.200 (1.190-1.210) | failed |"
    )
    assert len({len(re.findall(r"\|", line)) for line in table.splitlines()}) == 1
