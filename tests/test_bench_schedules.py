"""Plans as things to measure, the fit of the cost model, and the planner's regret; on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_bench_runs import draw

from benchmarks import (
    bench_schedules,
    fit_costs,
    harness,
    plans,
    regret,
    results,
    shapes,
)
from benchmarks.cost_parameters import predicted_us
from benchmarks.fit_costs import START, Accuracy
from benchmarks.results import OK, PlanRow
from fa3.planning.costs import H200, parse_costs
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.schedules import SCHEDULES

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
        "schedule": plan.schedule.name,
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
    reference = harness.RowMax(cell, tensors)
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
