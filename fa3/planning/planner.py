"""How a problem will run: `plan_forward(problem, gpu) -> Plan`. Pure Python; needs no GPU."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.checks import check_types
from fa3.planning.costs import MARGIN, least_gain
from fa3.planning.explanation import Candidate
from fa3.planning.gpu import H200, Gpu
from fa3.planning.load import RowLoad
from fa3.planning.plan import Plan, as_cut, candidate, check_pairs
from fa3.planning.tiled import Tiled
from fa3.planning.tilings import configs
from fa3.problem import Problem
from fa3.schedules import SCHEDULES, Schedule, Tile, TileList
from fa3.schedules.coverage import check_schedule

ScheduleChoice = str | type | Schedule | Callable[[list[Tile]], Iterable[Tile]] | None


CHOICES = tuple(name for name, kind in SCHEDULES.items() if kind.is_searched)
"""Schedules that the planner chooses from. The others need no table, so with them a graph can
capture a problem that was not planned before; as choices they gained 0.04% on average."""

UNSURE = 0.25
"""`MARGIN` for ways to run that were not measured."""

IDLE = 0.02
"""Share of the SMs' time that whole tiles must leave for parts of tiles to be compared."""


def plan_forward(
    problem: Problem,
    gpu: Gpu = H200,
    config: ForwardConfig | None = None,
    schedule: ScheduleChoice = None,
) -> Plan:
    """Choose how a problem runs.

    What is not given is chosen by the times that `fa3.planning.costs` predicts.

    Args:
        problem: what is asked.
        gpu: what it runs on.
        config: the kernel's tiling; chosen from `TILINGS` if not given.
        schedule: a name of `SCHEDULES`, its class, a schedule of one of these classes, or a
            function from the list of all tiles to the order in which they are to be worked on;
            each goes to the cluster that is free first.

    Raises:
        TypeError: an argument has the wrong type, or the function gives something else.
        ValueError: the config or the schedule cannot run the problem, or the schedule has no such
            name, or misses, repeats or invents a tile.
    """
    check_types(problem, gpu, config)
    name = schedule_name(schedule)
    if config is not None:
        config.validate(problem.spec)
        if gpu.num_sms < config.cluster:
            raise ValueError(f"a cluster of {config.cluster} CTAs does not fit {gpu.num_sms} SMs")
    if name == "split" and problem.spec.has_user_functions:
        raise ValueError(
            "schedule 'split' cannot run scores or masks of the user's: they leave no registers in "
            "which parts of a tile could be merged"
        )
    if name and config is not None:
        check_pairs(name, config)
    found = candidates(problem, gpu, config, (name,) if name else CHOICES)
    if isinstance(schedule, tuple(SCHEDULES.values())):
        return plan_of_schedule(problem, gpu, found, schedule)
    whole = [candidate for candidate in found if not SCHEDULES[candidate.schedule].splits]
    best = choose(whole or found)
    if best.prediction.busy < 1 - IDLE:
        # SMs have time left, which parts of tiles could fill.
        best = choose(found)
    if SCHEDULES[best.schedule].splits:
        best = choose([*whole, as_cut(Tiled(problem, gpu, best.config))])
    arrange = schedule if callable(schedule) and not isinstance(schedule, type) else None
    made = make_schedule(Tiled(problem, gpu, best.config), best.schedule, arrange)
    return Plan(problem, gpu, best.config, made, arrange is not None, tuple(found))


def plan_of_schedule(
    problem: Problem, gpu: Gpu, found: list[Candidate], schedule: Schedule
) -> Plan:
    """The plan with a schedule that was made before, and the candidate's tiling whose tiles it has.

    Raises:
        ValueError: no tiling has its tiles, or it does not work on each of them once.
    """
    orders = {one.config: Tiled(problem, gpu, one.config).order for one in found}
    fitting = [one for one in found if orders[one.config] == schedule.order]
    if not fitting:
        raise ValueError(
            f"schedule has tiles of another problem or tiling: {schedule.order}; here they are "
            f"one of {list(dict.fromkeys(orders.values()))}"
        )
    config = choose(fitting).config
    blocks = Tiled(problem, gpu, config).blocks_of_tiles()
    check_schedule(schedule, blocks.begin, blocks.end)
    return Plan(problem, gpu, config, schedule, is_arranged=True, considered=tuple(found))


def schedule_name(choice: ScheduleChoice) -> str | None:
    """The name of a schedule that was asked for; None if it is the planner's to choose."""
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
            f"or a function from the list of tiles to their order, got {choice!r:.200}"
        )
    return TileList.name


def candidates(
    problem: Problem,
    gpu: Gpu,
    config: ForwardConfig | None = None,
    schedules: Iterable[str] = tuple(SCHEDULES),
) -> list[Candidate]:
    """The ways to run a problem, with their predicted times; the table's choice first.

    Args:
        config: the only tiling to look at; those of `TILINGS` with measured times if not given.
        schedules: the schedules to look at.
    """
    names = sorted(schedules, key=lambda name: name != TileList.name)
    found = []
    for tiling in [config] if config else configs(problem, gpu):
        for run, run_names in with_parts(tiling, names, problem, is_given=config is not None):
            tiled = Tiled(problem, gpu, run)
            rows = RowLoad.of(tiled)
            found += [candidate(tiled, name, SCHEDULES[name].load(rows)) for name in run_names]
    return found


def with_parts(
    config: ForwardConfig, schedules: list[str], problem: Problem, is_given: bool
) -> list[tuple[ForwardConfig, list[str]]]:
    """A tiling with the schedules that it can run."""
    if config.cluster > 1:
        schedules = [name for name in schedules if SCHEDULES[name].takes_pairs]
    parts = [name for name in schedules if SCHEDULES[name].splits]
    whole = [name for name in schedules if name not in parts]
    if problem.spec.has_user_functions:
        return [(config, whole)]
    if is_given or not (parts and problem.spec.scores and config.fixed_reference):
        return [(config, schedules)]
    # Under a bias parts far from the diagonal vanish, as they should; a fixed reference could not
    # tell that from failing.
    return [(config, whole), (replace(config, fixed_reference=False), parts)]


def choose(found: list[Candidate]) -> Candidate:
    """The first, unless others are predicted to gain more than the model can tell: the fastest."""
    first = found[0]

    def is_faster(one: Candidate) -> bool:
        us = one.prediction.mean_us
        margin = MARGIN if one.measured else UNSURE
        return first.prediction.mean_us - us > least_gain(us, margin)

    better = filter(is_faster, found)
    return min(better, key=lambda one: one.prediction.mean_us, default=first)


def make_schedule(
    tiled: Tiled, name: str, arrange: Callable[[list[Tile]], Iterable[Tile]] | None
) -> Schedule:
    """The schedule of this name; `arrange` puts the tiles of a list in order."""
    if arrange is None:
        return SCHEDULES[name].make(tiled)
    order = tiled.order
    arranged = arrange([order.tile(index) for index in range(order.num_tiles)])
    if not isinstance(arranged, Iterable):
        raise TypeError(f"schedule must return the tiles in their order, got {arranged!r}")
    return TileList.in_order_of(order, tiled.num_clusters, arranged, tiled.times)
