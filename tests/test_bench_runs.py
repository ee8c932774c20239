"""Benchmarks of gradients, of packed sequences and of plans: runs on the CPU, and their checks."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    bench_backward,
    bench_schedules,
    bench_varlen,
    fit_costs,
    gradients,
    harness,
    packed,
    plans,
    regret,
    results,
    runs,
    shapes,
)
from benchmarks.bench_backward import GradientRow
from benchmarks.cost_parameters import predicted_us
from benchmarks.fit_costs import START, Accuracy
from benchmarks.gradients import ORDERED_OURS, PASSES, reference_of, with_passes
from benchmarks.harness import Contender, WrongOutput
from benchmarks.packed import BY_NAME, OURS, PackedReference, pack
from benchmarks.peers import Tensors
from benchmarks.results import OK, PlanRow
from benchmarks.shapes import Cell
from benchmarks.timing import Block
from fa3.planning.costs import H200, parse_costs
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.schedules import SCHEDULES

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
    for wrong in (replace(RAGGED, causal=False), replace(RAGGED, lengths_q=other, lengths_k=other)):
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


CELLS = shapes.grid([64, 128], list(shapes.MASKS), [512, 1024, 2048, 4096])
SMALL = [
    shapes.named("square", 1, (150, 150), (2, 1), (64, 64)),
    shapes.named("full", 1, (40, 70), (1, 1), (64, 32), causal=False),
    shapes.named("window", 1, (150, 150), (1, 1), (64, 64), window_left=30),
    shapes.named("loose-window", 1, (40, 40), (1, 1), (64, 64), window_left=1000),
]


def plan_row(cell: shapes.Cell, plan, us: float, regime: str = "steady") -> PlanRow:
    known = {
        name: getattr(source, name)
        for source in (cell, plan.config)
        for name in results.header_of(PlanRow)
        if hasattr(source, name)
    }
    measured = {
        "cell": cell.name, "data": "normal", "regime": regime, "provider": plan.name, "status": OK,
        "reason": "", "version": "1.0", "choice": "", "launch": "graph", "us": us,
        "schedule": plan.schedule.name, "fixed_reference": plan.config.fixed_row_max,
    }  # fmt: skip
    return PlanRow(**known | measured)


def rows_of(cells, model, schedules=("list", "static", "single")) -> list[PlanRow]:
    """What a GPU would give on which a cost model is exact."""
    rows = []
    for cell in cells:
        problem = plans.problem_of(cell)
        for schedule in schedules:
            for regime in ("burst", "steady"):
                plan = plan_forward(problem, H200, choose_config(problem, H200), schedule)
                row = plan_row(cell, plan, 1.0, regime)
                us = predicted_us(model, fit_costs.observe(row, H200))
                rows.append(replace(row, us=us))
    return rows


# --------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_plans_compute_the_cell_they_are_made_for(cell):
    """A plan of another problem than the call's is refused, so the problem is the call's."""
    tensors = draw(cell)
    reference = harness.Reference(cell, tensors)
    for schedule in SCHEDULES:
        provider = plans.Planned(plan_forward(plans.problem_of(cell), H200, schedule=schedule))
        (call,) = provider.prepare(cell, tensors).values()
        assert provider.supports(cell) is None
        reference.check(call())


# --------------------------------------------------------------------------------- the fit


def test_the_fit_finds_a_model_again():
    """Times that follow the model, with other parameters than the fit starts from."""
    rule = START.rule._replace(tensor=6.5e-4, exponential=3e-4, tile_us=1.5)
    unit_us = {"single": 1.1, "static": 0.1, "single in pairs": 1.3, "dynamic in pairs": 0.8}
    truth = replace(START, rule=rule, unit_us=unit_us, launch_us=3.4)
    seen = [fit_costs.observe(row, H200) for row in rows_of(CELLS, truth)]
    fitted = fit_costs.fit_all(START, seen)
    misses = [predicted_us(fitted, one) / one.us - 1 for one in seen]
    assert Accuracy.of(misses).largest < 0.01
    assert fitted.unit_us["single"] == pytest.approx(1.1, abs=0.15)
    assert fitted.schedules == ("list", "single", "static")
    held_out = fit_costs.held_out_errors(START, seen)
    assert len(held_out) == len(seen)
    assert Accuracy.of(error for _, error in held_out).largest < 0.03


def test_fitting_a_directory_writes_a_model(tmp_path, capsys):
    results.append(tmp_path / fit_costs.SCHEDULES_CSV, rows_of(CELLS[:4], START))
    out = tmp_path / "costs.json"
    fit_costs.main([str(tmp_path), "--out", str(out)])
    assert "held out: median" in capsys.readouterr().out
    model = parse_costs(out.read_text())
    assert model.measured
    assert model.source["cells"] == 4


# --------------------------------------------------------------------------------- regret


def measured(cell: shapes.Cell, factors: dict[str, float]) -> list[PlanRow]:
    """Rows of the planner's plan at 100 us times its factor, and of others by name."""
    found = plans.all_plans(plans.problem_of(cell), H200)
    own = next(iter(found))
    return [
        plan_row(cell, plan, 100 * factors.get("own" if name == own else plan.schedule.name, 2))
        for name, plan in found.items()
    ]


def test_regret_is_over_the_best_plan():
    one, other = CELLS[3], CELLS[4]
    rows = measured(one, {"own": 1.0}) + measured(other, {"own": 1.1, "single": 1.0})
    first, second = regret.judge(rows, H200)
    assert first.regret == 0
    assert second.regret == pytest.approx(0.1)
    assert second.best.schedule == "single"
    result = regret.standing([first, second])
    assert result == (2, 0.5, pytest.approx(0.05), pytest.approx(0.1))
    assert "2 cells: 50% within 3%" in regret.describe(result)


RECORDED = {
    "fixed burst": 0.0037,
    "fixed steady": 0.0066,
    "grid burst": 0.0038,
    "grid-steady steady": 0.0054,
    "grid-steady-first steady": 0.0046,
    "schedules burst": 0.0028,
}
"""Mean regrets of the committed records of 2026-11-21, which no change may raise. Cells of plans
that the records do not have, as full heads of 256 and 512 queries, do not count."""


@pytest.mark.parametrize("record", RECORDED)
def test_regret_over_the_committed_records(record):
    name, regime = record.split()
    directory = Path(results.__file__).parent / "results" / f"h200-2026-11-21-{name}"
    found = results.read(directory / fit_costs.SCHEDULES_CSV, PlanRow)
    rows = [row for row in found if row.regime == regime]
    assert regret.standing(regret.judge(rows, H200)).mean <= RECORDED[record]


def test_a_record_is_reported_without_a_gpu(tmp_path, capsys):
    rows = [row for cell in CELLS for row in measured(cell, {"own": 1.0, "single": 1.2})]
    results.append(tmp_path / fit_costs.SCHEDULES_CSV, rows)
    bench_schedules.main(["--report", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"{len(CELLS)} cells: 100% within 3%" in printed
    assert (tmp_path / "schedules.png").stat().st_size > 10000
    assert "| all (16) | 100%, 0.0%, 0.0% |" in (tmp_path / "schedules.md").read_text()
