"""Plans as things to measure: all ways to run a cell, and what the planner makes of it."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import fa3
from benchmarks.peers import Call, Tensors
from benchmarks.problems import problem_of
from benchmarks.results import Measurement, PlanRow
from benchmarks.shapes import Cell, window_size
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200, Gpu, has_mask
from fa3.planning.explanation import describe_config
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.tilings import alternatives, choose_config, with_clusters, with_row_max
from fa3.problem import Problem
from fa3.schedules import SCHEDULES

HOPELESS = 1.5
"""Plans that are predicted to take so many times the best one's time are not measured."""

NAME = re.compile(r"(\w+) (\d+x\d+(?: in pairs of \w+)?(?:, fixed row max)?)")
"""`Plan.name`: schedule and tiling."""


def name_today(recorded: str) -> str:
    """The `Plan.name` of a record in the words of today's names."""
    return recorded.replace("fixed reference", "fixed row max")


def cell_of(row: Measurement) -> Cell:
    """The cell that a row tells of."""
    return Cell(
        row.cell,
        row.group,
        row.batch,
        row.seqlen_q,
        row.seqlen_k,
        row.heads_q,
        row.heads_kv,
        row.head_dim,
        row.head_dim_v,
        row.causal,
        row.window_left,
        dtype=row.dtype,
    )


def configs_to_measure(problem: Problem) -> list[ForwardConfig]:
    """The table's tilings for a problem, their CTAs alone and in pairs."""
    return [
        config
        for tiling in alternatives(problem.spec)
        for config in with_clusters(with_row_max(tiling.config, problem), problem)
    ]


def all_plans(problem: Problem, gpu: Gpu) -> dict[str, Plan]:
    """Every way to run a problem that may be fast, by name, the planner's own first."""
    choice = plan_forward(problem, gpu)
    plans = {choice.name: choice}
    for config in configs_to_measure(problem):
        for schedule in SCHEDULES:
            try:
                plan = plan_forward(problem, gpu, config, schedule)
            except ValueError:
                continue  # This schedule or tiling is not for this problem.
            plans.setdefault(plan.name, plan)
    times = {name: plan.predict().us for name, plan in plans.items()}
    limit = HOPELESS * min(times.values())
    return {name: plan for name, plan in plans.items() if plan is choice or times[name] < limit}


def can_run(row: PlanRow) -> bool:
    """Whether there still is the plan that was measured: `Dynamic` no longer takes pairs."""
    return config_of(row).cluster == 1 or SCHEDULES[row.schedule].takes_pairs


def config_of(row: PlanRow) -> ForwardConfig:
    """The tiling of a row."""
    return ForwardConfig(
        row.tile_m,
        row.tile_n,
        row.q_stages,
        row.kv_stages,
        row.cluster_m,
        row.own_o,
        row.cluster_h,
        row.fixed_reference,
    )


def recorded_config(row: Measurement) -> tuple[ForwardConfig, str]:
    """Tiling and schedule of a row of ours; those of the table where the row has no plan's name."""
    problem = problem_of(cell_of(row))
    match = NAME.fullmatch(name_today(row.choice))
    if match is None:
        config = replace(choose_config(problem, H200), fixed_row_max=False)
        return config, "list" if has_mask(problem.spec) else "static"
    schedule, tiling = match.groups()
    for config in configs_to_measure(problem):
        for fixed in (True, False):
            either = replace(config, fixed_row_max=fixed)
            if describe_config(either) == tiling:
                return either, schedule
    raise ValueError(f"{row.cell}: {row.choice} is no plan of the present table")


class Planned:
    """Ours with a given plan."""

    version = fa3.__version__
    is_peer = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = plan.name

    def supports(self, cell: Cell) -> str | None:
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        attend: Callable = fa3.flash_attn_func
        return {
            "": functools.partial(
                attend,
                *tensors,
                causal=cell.causal,
                window_size=window_size(cell),
                plan=self.plan,
            )
        }
