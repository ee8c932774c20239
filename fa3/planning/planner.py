"""The forward planner: `plan_forward(problem, gpu) -> Plan` chooses tiling and schedule.

It compares the tilings of `fa3.planning.tilings` with every searched schedule by their predicted
times; `plan_dense` compares the best with the decode kernel (`fa3.planning.decode`). Runs on
the host and needs no GPU. `fa3.calls.prepare` and the command line call it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from fa3.complaints import shown
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200, LEAST_MARGIN, UNSURE, Gpu, as_gpu, least_gain
from fa3.planning.decode import DecodePlan
from fa3.planning.explanation import Candidate
from fa3.planning.plan import Plan, candidate, check_arguments, check_plan, laid_out
from fa3.planning.prediction import loads_of_whole_tiles
from fa3.planning.routes import DECODE, choose_dense
from fa3.planning.tilings import TiledProblem, configs
from fa3.problem import Problem
from fa3.schedules import SCHEDULES, Schedule, SplitTiles, Tile, TileList
from fa3.settings import check_settings

ScheduleChoice = str | type | Schedule | Callable[[list[Tile]], Iterable[Tile]] | None


CHOICES = tuple(name for name, kind in SCHEDULES.items() if kind.is_searched)
"""Schedules that the planner chooses from. The others need no table, so a CUDA graph can capture
them for a problem not planned before; searching them as well did not lower the regret over the
committed records (docs/experiments.md)."""

WHOLE = tuple(name for name in CHOICES if not SCHEDULES[name].splits)

IDLE = 0.02
"""Tiles are split only if whole tiles leave SMs idle for this share of the time."""

MARGIN_OF_PARTS = 0.008
"""Share by which parts of tiles must be predicted faster than whole tiles to be taken."""


def plan_forward(
    problem: Problem,
    gpu: Gpu | str = H200,
    config: ForwardConfig | None = None,
    schedule: ScheduleChoice = None,
) -> Plan:
    """Choose how a problem runs: config and schedule, by predicted times.

    Args:
        problem: the problem to run.
        gpu: the GPU to run it on: a `Gpu`, "H100" or "H200".
        config: the kernel's tiling; chosen from `TILINGS` if not given.
        schedule: a name in `SCHEDULES`, its class, a schedule of one of these classes, or a
            function that takes the list of all tiles and returns them in the order to work on:
            each then goes to the first free cluster.

    Raises:
        TypeError: an argument has the wrong type, or the function returns something else.
        ValueError: the config or the schedule cannot run the problem, no schedule has the name, or
            the schedule leaves out, repeats or invents a tile.
    """
    check_settings()
    gpu = as_gpu(gpu)
    name = schedule_name(schedule)
    check_arguments(problem, gpu, config, name)
    tilings = [config] if config else configs(problem, gpu, is_searched=not name)
    for_parts = tilings
    if problem.spec.scores and not config:
        # With a bias, sums of a part far from the diagonal rightly vanish. With a fixed row max
        # that would look like a failure.
        online = (replace(tiling, fixed_reference=False) for tiling in tilings)
        for_parts = list(dict.fromkeys(online))
    if name == SplitTiles.name:
        tilings = for_parts
    compared = candidates(problem, gpu, tilings, (name,) if name else WHOLE)
    if isinstance(schedule, Schedule):
        return plan_of_schedule(problem, gpu, compared, schedule)
    best = choose(compared)
    may_split = not (name or problem.spec.has_user_functions)
    if may_split and best.prediction.busy < 1 - IDLE:
        # Parts of tiles could fill the time in which SMs are idle.
        parts = candidates(problem, gpu, for_parts, (SplitTiles.name,))
        best = choose([best, *parts], MARGIN_OF_PARTS)
        compared += parts
    tiled, compared_with = TiledProblem(problem, gpu, best.config), tuple(compared)
    if callable(schedule) and not isinstance(schedule, type):
        arranged = TileList.in_order_of(tiled, schedule)
        return Plan(problem, gpu, best.config, arranged, True, compared_with)
    made = SCHEDULES[best.schedule].make(tiled)
    return Plan(problem, gpu, best.config, made, considered=compared_with)


def plan_dense(
    problem: Problem, gpu: Gpu | str = H200, pack_gqa: bool | None = None
) -> Plan | DecodePlan:
    """Choose the plan of a dense call: forward or decode kernel.
    `pack_gqa` says whether query heads share tiles, as in the decode kernel; None leaves that to
    predicted times. If it is True, and they cannot, that raises an error."""
    gpu = as_gpu(gpu)
    if pack_gqa:
        return DecodePlan.of_dense(problem, gpu)
    plan, grouped = plan_forward(problem, gpu), DecodePlan.if_possible(problem, gpu)

    def decode_is_faster() -> bool:
        return grouped is not None and grouped.beats(plan.considered)

    route = choose_dense(problem, gpu, pack_gqa, decode_is_faster=decode_is_faster)
    if grouped is not None and route.name == DECODE:
        return replace(grouped, considered=plan.considered)
    return plan


def plan_of_schedule(
    problem: Problem, gpu: Gpu, compared: list[Candidate], schedule: Schedule
) -> Plan:
    """Return the plan with the caller's schedule and the best tiling.
    Raises ValueError if no tiling has its tiles, or it does not work on each tile exactly once."""
    orders = {one.config: TiledProblem(problem, gpu, one.config).order for one in compared}
    fitting = [one for one in compared if orders[one.config] == schedule.order]
    if not fitting:
        raise ValueError(
            f"schedule has tiles of another problem or tiling: {schedule.order}; here they are "
            f"one of {list(dict.fromkeys(orders.values()))}"
        )
    plan = Plan(problem, gpu, choose(fitting).config, schedule, True, tuple(compared))
    check_plan(plan)
    return plan


def schedule_name(choice: ScheduleChoice) -> str | None:
    """The name of the caller's schedule; None if the planner chooses."""
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in SCHEDULES:
            raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {choice!r}")
        return choice
    for name, kind in SCHEDULES.items():
        if choice is kind or type(choice) is kind:
            return name
    if isinstance(choice, type) or not callable(choice):
        raise TypeError(
            f"schedule must be one of {sorted(SCHEDULES)}, the class or an object of one of them, "
            f"or a function from the list of tiles to their order, got {shown(choice)}"
        )
    return TileList.name


def candidates(
    problem: Problem, gpu: Gpu, tilings: list[ForwardConfig], schedules: Iterable[str]
) -> list[Candidate]:
    """All candidates for a problem, with their predicted times; the choice of `TILINGS` first."""
    names = sorted(schedules, key=lambda name: name != TileList.name)
    compared = [
        one
        for tiling in tilings
        for one in candidates_of(
            TiledProblem(problem, gpu, tiling),
            [name for name in names if tiling.cluster == 1 or SCHEDULES[name].takes_pairs],
        )
    ]
    if compared:
        return compared
    # They have CTAs alone, and all that was measured for the problem are pairs.
    alone = replace(tilings[0], cluster_m=1, cluster_h=1)
    return candidates_of(TiledProblem(problem, gpu, alone), names)


def candidates_of(tiled: TiledProblem, names: Iterable[str]) -> list[Candidate]:
    """A tiling with schedules that it can run, and their predicted times."""
    greedy, listed = loads_of_whole_tiles(tiled)
    loads = {TileList.name: listed}
    return [
        laid_out(tiled, SCHEDULES[name].make(tiled))
        if SCHEDULES[name].splits
        else candidate(tiled, name, loads.get(name, greedy))
        for name in names
    ]


def choose(compared: list[Candidate], least_margin: float = LEAST_MARGIN) -> Candidate:
    """The fastest candidate, or the first if none is faster by the margin."""
    first = compared[0]

    def is_faster(one: Candidate) -> bool:
        us = one.prediction.mean_us
        margin = least_margin if one.measured else UNSURE
        return first.prediction.mean_us - us > least_gain(us, margin)

    better = filter(is_faster, compared)
    return min(better, key=lambda one: one.prediction.mean_us, default=first)
