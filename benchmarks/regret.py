"""What the planner's choice costs: its plan's time over the best measured plan's, cell by cell.

Predictions and choices are those of the present cost model and planner, so a record can be judged
again after either has changed.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.plans import cell_of, name_today
from benchmarks.problems import problem_of
from benchmarks.results import OK, PlanRow
from fa3.planning.costs import Gpu
from fa3.planning.planner import plan_forward
from fa3.planning.prediction import Prediction

NEAR = 0.03
"""A choice within this of the best is as good: the model cannot tell plans apart more finely."""


class Verdict(NamedTuple):
    """One cell in one regime.

    Fields:
        chosen: the planner's plan; None if it was not measured.
        best: the fastest plan that was measured.
        predicted_us: the planner's plan's time by the cost model.
    """

    cell: str
    group: str
    regime: str
    name: str
    chosen: PlanRow | None
    best: PlanRow
    predicted_us: float

    @property
    def regret(self) -> float:
        """How much longer the planner's plan takes than the best one; NaN if not measured."""
        return self.chosen.us / self.best.us - 1 if self.chosen else math.nan


class Standing(NamedTuple):
    """How the planner does over several cells; regrets as fractions."""

    cells: int
    near: float
    mean: float
    worst: float


def by_cell(rows: Iterable[PlanRow]) -> dict[tuple[str, str], list[PlanRow]]:
    """Timed rows on normal data by (cell, regime)."""
    found: dict[tuple[str, str], list[PlanRow]] = {}
    for row in rows:
        if row.status == OK and row.data == "normal":
            found.setdefault((row.cell, row.regime), []).append(row)
    return found


def judge(rows: Iterable[PlanRow], gpu: Gpu) -> list[Verdict]:
    """Hold the planner's choices against what was measured."""
    verdicts = []
    for (cell, regime), found in by_cell(rows).items():
        plan = plan_forward(problem_of(cell_of(found[0])), gpu)
        chosen = next((row for row in found if name_today(row.provider) == plan.name), None)
        best = min(found, key=lambda row: row.us)
        predicted = in_regime(plan.predict(), regime)
        verdicts.append(Verdict(cell, best.group, regime, plan.name, chosen, best, predicted))
    return verdicts


def in_regime(prediction: Prediction, regime: str) -> float:
    """A prediction's microseconds in a regime."""
    return prediction.us if regime == "steady" else prediction.burst_us


def standing(verdicts: Iterable[Verdict]) -> Standing:
    """Sum up the cells whose choice was measured."""
    regrets = [verdict.regret for verdict in verdicts if verdict.chosen]
    if not regrets:
        return Standing(0, math.nan, math.nan, math.nan)
    near = sum(regret <= NEAR for regret in regrets) / len(regrets)
    return Standing(len(regrets), near, statistics.mean(regrets), max(regrets))


def describe(result: Standing) -> str:
    """A standing in one line."""
    return (
        f"{result.cells} cells: {result.near:.0%} within {NEAR:.0%} of the best plan, mean regret "
        f"{result.mean:.1%}, worst {result.worst:.1%}"
    )


def cells_table(verdicts: Sequence[Verdict], title: str) -> Table:
    """One line per cell: the planner's plan with its times, then the best one."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("cell", "planner's plan", "predicted us", "measured us", "regret", "best plan"):
        table.add_column(name, justify="right" if name[-2:] in ("us", "et") else "left")
    table.add_column("joules", justify="right")
    for verdict in verdicts:
        measured, regret, joules = "", "[dim]not measured[/]", ""
        if verdict.chosen:
            measured = f"{verdict.chosen.us:.1f}"
            colour = "green" if verdict.regret <= NEAR else "red"
            regret = f"[{colour}]{verdict.regret:.1%}[/]"
            joules = f"{verdict.chosen.joules:.4g}" if verdict.chosen.joules else ""
        best = "" if verdict.best is verdict.chosen else verdict.best.provider
        table.add_row(
            verdict.cell,
            verdict.name,
            f"{verdict.predicted_us:.1f}",
            measured,
            regret,
            best,
            joules,
        )
    return table


def markdown(verdicts: Sequence[Verdict]) -> str:
    """A table for people: by group of cells and regime, how the planner does."""
    regimes = sorted({verdict.regime for verdict in verdicts}, reverse=True)
    lines = [
        "| cells | " + " | ".join(f"{r}: within {NEAR:.0%}, mean, worst" for r in regimes) + " |",
        "|---|" + "---|" * len(regimes),
    ]
    groups = list(dict.fromkeys(verdict.group for verdict in verdicts))
    for group in [*groups, "all"]:
        columns = []
        for regime in regimes:
            result = standing(
                verdict
                for verdict in verdicts
                if verdict.regime == regime and group in (verdict.group, "all")
            )
            text = f"{result.near:.0%}, {result.mean:.1%}, {result.worst:.1%}"
            columns.append(text if result.cells else "-")
        cells = len({verdict.cell for verdict in verdicts if group in (verdict.group, "all")})
        lines.append(f"| {group} ({cells}) | " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def draw(
    rows: Sequence[PlanRow], predicted: Sequence[float], verdicts: Sequence[Verdict], path: Path
) -> None:
    """Draw predictions over measured times, and the regrets, to a PNG."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    schedules = sorted({row.schedule for row in rows})
    colours = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
    for schedule, colour in zip(schedules, colours * len(schedules), strict=False):
        chosen = [i for i, row in enumerate(rows) if row.schedule == schedule]
        left.scatter(
            [rows[i].us for i in chosen],
            [100 * (predicted[i] / rows[i].us - 1) for i in chosen],
            s=10, color=colour, alpha=0.6, label=schedule, linewidths=0,
        )  # fmt: skip
    left.axhspan(-100 * NEAR, 100 * NEAR, color="#000000", alpha=0.06)
    left.set_xscale("log")
    left.set_xlabel("measured time, microseconds")
    left.set_ylabel("prediction's error, %")
    left.legend(frameon=False, title="schedule")
    for regime, colour in zip(
        sorted({verdict.regime for verdict in verdicts}), colours, strict=False
    ):
        regrets = sorted(
            100 * verdict.regret
            for verdict in verdicts
            if verdict.regime == regime and verdict.chosen
        )
        right.step(range(1, len(regrets) + 1), regrets, where="mid", color=colour, label=regime)
    right.axhline(100 * NEAR, color="#000000", alpha=0.3, linewidth=0.8)
    right.set_xlabel("cells, from the best choice to the worst")
    right.set_ylabel("regret of the planner's choice, %")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
