"""How a problem will run: `plan_forward(problem, gpu) -> Plan`. Pure Python; needs no GPU."""

import functools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa3 import masks
from fa3.costs import H200, MARGIN, Gpu, costs_of, has_mask, least_gain
from fa3.explanation import Candidate, Explanation, describe_config
from fa3.kernels.forward import Forward
from fa3.plan_checks import check_types
from fa3.prediction import Prediction, predict
from fa3.primitives.shared_memory import padded
from fa3.primitives.softmax import SLACK
from fa3.problem import AttentionSpec, Problem
from fa3.schedules import (
    SCHEDULES,
    Dynamic,
    KeyRanges,
    Schedule,
    SingleTile,
    SplitTiles,
    StaticPersistent,
    Tile,
    TileList,
    Unit,
)
from fa3.schedules.coverage import check_schedule
from fa3.schedules.marked import Marked
from fa3.schedules.split_tiles import WHOLE
from fa3.scores import Alibi, Softcap
from fa3.tiled import Tiled
from fa3.tiling import BOUNDED, HOLDS_POWERS, Config
from fa3.timeline import Cost, Timeline
from fa3.work import (
    RowWork,
    Units,
    Work,
    back_and_forth,
    durations,
    units_of_parts,
    units_of_tiles,
)

ScheduleChoice = str | type | Schedule | Callable[[list[Tile]], Iterable[Tile]] | None


class Tiling(NamedTuple):
    """A row of the config table: for heads of up to these sizes, with or without a mask, or for
    scores or masks of the user's, which need registers.

    Was the best that was measured up to `max_seqlen_q` queries.
    """

    head_dim: int
    head_dim_v: int
    masked: bool
    max_seqlen_q: float
    config: Config
    functions: bool = False

    def fits(self, problem: Problem) -> bool:
        spec = problem.spec
        return (
            spec.head_dim <= self.head_dim
            and spec.head_dim_v <= self.head_dim_v
            and spec.has_user_functions == self.functions
            # With 160 registers a thread there is room for one score beside the fragments.
            and (len(spec.scores) < 2 or self.config.consumers < 3)
            and (self.functions or has_mask(spec) == self.masked)
            and (self.config.own_o or padded(spec.head_dim) == padded(spec.head_dim_v))
        )


TILINGS = (
    Tiling(64, 64, False, math.inf, Config(192, 128, q_stages=2)),
    Tiling(64, 64, True, 512, Config(128, 128, q_stages=2, kv_stages=3)),
    Tiling(64, 64, True, math.inf, Config(192, 128, q_stages=2)),
    Tiling(96, 96, False, 1024, Config(128, 128, q_stages=2, cluster_m=2)),
    Tiling(96, 96, False, math.inf, Config(192, 112, q_stages=2)),
    Tiling(96, 96, True, 1024, Config(128, 128, q_stages=2)),
    Tiling(96, 96, True, math.inf, Config(192, 112)),
    Tiling(128, 128, False, math.inf, Config(128, 128, q_stages=2, cluster_m=2)),
    Tiling(128, 128, True, math.inf, Config(128, 128, q_stages=2)),
    Tiling(192, 128, False, math.inf, Config(128, 112)),
    Tiling(192, 128, True, math.inf, Config(128, 112)),
    Tiling(192, 192, False, math.inf, Config(128, 112, own_o=False)),
    Tiling(192, 192, True, math.inf, Config(128, 80)),
    Tiling(256, 256, False, 4096, Config(128, 80, own_o=False, cluster_m=2)),
    Tiling(256, 256, False, math.inf, Config(128, 80, own_o=False)),
    Tiling(256, 256, True, 512, Config(128, 64, own_o=False)),
    Tiling(256, 256, True, math.inf, Config(128, 80, own_o=False)),
    Tiling(256, 256, False, math.inf, Config(128, 48)),
    Tiling(256, 256, True, math.inf, Config(128, 48)),
    Tiling(128, 128, True, math.inf, Config(128, 64, q_stages=2), functions=True),
    Tiling(192, 192, True, math.inf, Config(128, 64), functions=True),
    Tiling(256, 256, True, math.inf, Config(128, 32), functions=True),
)
"""The best of what was measured on an H200 on 2026-11-21, bf16, steady, 16k tokens, with figures in
docs/experiments.md. The first row that fits and reaches up to the problem's queries holds, unless
the cost model has measured times of another one that fits and predicts it to be faster. The
128 x 48 rows for unequal sizes are not measured.
"""

FEW_TILES = 8
"""Query tiles of a head below which an odd one costs a cluster of two more than it saves."""


PART_US = 2.3
"""Microseconds that a part takes more than a whole tile, as the cut counts them: about what the
instrumented kernel saw (docs/experiments.md). Predictions add a fitted number instead; if the cut
went by that, a fit would change the plans that it was fitted to."""

FIXED_FLOPS = 1.5e10
"""Work of a call, some 30 us, from which a fixed reference saves more than its second launch
takes."""

CHOICES = ("list", "static", "dynamic", "split")
"""Schedules that the planner chooses from. The one left out hands out the same tiles as "dynamic",
with a CTA for each."""

REFERENCE = os.environ.get("FA3_REFERENCE") or "auto"
"""What the planner's softmax takes scores relative to: "following" never fails and costs 5-12% of
a call; "auto" lets it choose."""

UNSURE = 0.25
"""`MARGIN` for ways to run that were not measured."""

IDLE = 0.02
"""Share of the SMs' time that whole tiles must leave for parts of tiles to be compared."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem runs: the kernel's config, and the schedule its clusters walk.

    `is_arranged` says that the tiles are in an order of the caller's.
    """

    problem: Problem
    gpu: Gpu
    config: Config
    schedule: Schedule
    is_arranged: bool = False

    @property
    def schedule_name(self) -> str:
        """The schedule's name in `SCHEDULES`."""
        return next(name for name, kind in SCHEDULES.items() if kind is type(self.schedule))

    @property
    def name(self) -> str:
        """Schedule and tiling in a few characters: "list 128x128"."""
        return f"{self.schedule_name} {describe_config(self.config)}"

    @property
    def grid(self) -> int:
        """CTAs to launch."""
        return self.schedule.num_clusters * self.config.cluster

    def kernel(self, is_recorded: bool = False) -> Forward:
        """The kernel to launch; the instrumented one if it `is_recorded`."""
        return Forward(self.problem.spec, self.config, type(self.schedule), is_recorded)

    @property
    def again(self) -> "Plan | None":
        """The second launch: that of the rows for which a fixed reference did not do."""
        if not self.config.fixed_reference:
            return None
        config = self.config.again
        heads = self.schedule.order.heads_per_section * self.config.cluster_h
        order = replace(Tiled(self.problem, self.gpu, config).order, heads_per_section=heads)
        schedule = Marked(order, min(self.gpu.num_sms, order.num_tiles))
        return replace(self, config=config, schedule=schedule)

    @property
    def kernel_arguments(self) -> tuple[int, ...]:
        """The integers that the kernel takes after its tensors and the softmax scale."""
        order = self.schedule.order
        return (*self.problem.window, order.heads_per_section, self.schedule.num_clusters)

    def predict(self) -> Prediction:
        """The time that the cost model predicts, and what it is made of."""
        return self.as_candidate().prediction

    def as_candidate(self) -> Candidate:
        """The plan with its prediction, to stand beside those that the planner compares."""
        tiled = self.tiled
        work = Work.of(self.units, tiled.costs, tiled.lanes)
        return candidate(tiled, self.schedule_name, work)

    @property
    def tiled(self) -> Tiled:
        """The problem in the plan's tiles."""
        return Tiled(self.problem, self.gpu, self.config)

    @property
    def units(self) -> Units:
        """The units of work of its clusters; exactly, where the planner compares by estimates."""
        tiled, schedule = self.tiled, self.schedule
        if isinstance(schedule, SplitTiles):
            return units_of_parts(tiled, schedule)
        units = units_of_tiles(tiled)
        if isinstance(schedule, TileList):
            return units._replace(owner=schedule.owners)
        if isinstance(schedule, StaticPersistent):
            owners = back_and_forth(schedule.order.num_tiles, schedule.num_clusters)
            return units._replace(owner=owners)
        return units

    def simulate(self) -> Timeline:
        """Which SM works on which tile when, in microseconds, by the cost model."""
        tiled = self.tiled
        costs, by_m_block = tiled.costs, np.stack(tiled.blocks_of_rows, axis=1).tolist()

        def cost_of(tile: Tile | Unit) -> Cost:
            blocks, part_us = masks.KeyBlocks(*by_m_block[tile.m_block]), 0.0
            if isinstance(tile, Unit):
                blocks = blocks.between(tile.first_block, tile.end_block)
                part_us = costs.part_us * (tile.part != WHOLE)
            full, touched = blocks.full_end - blocks.full_begin, blocks.end - blocks.begin
            return Cost(costs.us(full, touched - full) + part_us, touched, full)

        schedule = self.schedule
        if isinstance(schedule, Dynamic):
            # Who takes which tile follows from time, as when the GPU hands CTAs out.
            schedule = SingleTile(schedule.order)
        timeline = Timeline.of(schedule, tiled.lanes, cost_of)
        prediction = self.predict()
        return timeline.stretched(prediction.us - prediction.launch_us)

    def explain(self) -> Explanation:
        """What the plan does, how long it should take, what bounds it, and what else there was."""
        found = [
            as_cut(Tiled(self.problem, self.gpu, one.config)) if one.schedule == "split" else one
            for one in candidates(self.problem, self.gpu)
        ]
        found.sort(key=lambda candidate: candidate.prediction.us)
        return Explanation(
            self.problem,
            self.gpu,
            self.schedule,
            self.is_arranged,
            self.as_candidate(),
            tuple(found),
            self.simulate(),
            costs_of(self.gpu.name),
        )


def plan_forward(
    problem: Problem,
    gpu: Gpu = H200,
    config: Config | None = None,
    schedule: ScheduleChoice = None,
) -> Plan:
    """Choose how a problem runs.

    What is not given is chosen by the times that `fa3.costs` predicts.

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
    return Plan(problem, gpu, best.config, made, arrange is not None)


def check_plan(plan: Plan) -> None:
    """Raise unless a plan, which may have been put together by hand, can run its problem.

    Raises:
        TypeError: its problem, GPU, config or schedule is of a wrong type.
        ValueError: its config or its schedule cannot run the problem.
    """
    check_types(plan.problem, plan.gpu, plan.config)
    if plan.config is None:
        raise TypeError("plan must have a config, got None")
    plan.config.validate(plan.problem.spec)
    if plan.gpu.num_sms < plan.config.cluster:
        raise ValueError(
            f"plan has clusters of {plan.config.cluster} CTAs, which do not fit "
            f"{plan.gpu.num_sms} SMs"
        )
    if type(plan.schedule) not in SCHEDULES.values():
        raise TypeError(
            f"plan must have a schedule of one of the classes of {sorted(SCHEDULES)}, got "
            f"{plan.schedule!r:.200}"
        )
    if plan.schedule.splits and plan.problem.spec.has_user_functions:
        raise ValueError("plan must not split tiles with scores or masks of the user's")
    tiled = plan.tiled
    if plan.schedule.order != tiled.order:
        raise ValueError(
            f"plan has a schedule with tiles of another problem, GPU or tiling: "
            f"{plan.schedule.order}; here they are {tiled.order}"
        )
    blocks = tiled.blocks_of_tiles()
    check_schedule(plan.schedule, blocks.begin, blocks.end)


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
    return Plan(problem, gpu, config, schedule, is_arranged=True)


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
    return "list"


def candidates(
    problem: Problem,
    gpu: Gpu,
    config: Config | None = None,
    schedules: Iterable[str] = tuple(SCHEDULES),
) -> list[Candidate]:
    """The ways to run a problem, with their predicted times; the table's choice first.

    Args:
        config: the only tiling to look at; those of `TILINGS` with measured times if not given.
        schedules: the schedules to look at.
    """
    default = "list" if has_mask(problem.spec) else "static"
    names = sorted(schedules, key=lambda name: name != default)
    found = []
    for tiling in [config] if config else configs(problem, gpu):
        for run, run_names in with_parts(tiling, names, problem, is_given=config is not None):
            tiled = Tiled(problem, gpu, run)
            rows = RowWork.of(tiled)
            found += [candidate(tiled, name, work_of(name, rows)) for name in run_names]
    return found


def with_parts(
    config: Config, schedules: list[str], problem: Problem, is_given: bool
) -> list[tuple[Config, list[str]]]:
    """A tiling with the schedules that it can run."""
    parts = [name for name in schedules if SCHEDULES[name].splits]
    whole = [name for name in schedules if name not in parts]
    if problem.spec.has_user_functions:
        return [(config, whole)]
    if is_given or not (parts and problem.spec.scores and config.fixed_reference):
        return [(config, schedules)]
    # Under a bias parts far from the diagonal vanish, as they should; a fixed reference could not
    # tell that from failing.
    return [(config, whole), (replace(config, fixed_reference=False), parts)]


def work_of(schedule: str, rows: RowWork) -> Work:
    """The work of a schedule's clusters: exactly, or nearly."""
    match schedule:
        case "split":
            return rows.cut_evenly
        case "list":
            return rows.balanced
        case "static":
            return rows.dealt_back_and_forth
        case _:
            return rows.handed_out


def takes_fixed_reference(spec: AttentionSpec) -> bool:
    """Whether a reference of the softmax that does not follow is possible, and likely to do.

    Scores of the user's may be anything. Those of a softcap are bounded; up to `SLACK` powers of
    two nothing can go wrong, so nothing needs to be marked.
    """
    if REFERENCE not in ("auto", "following"):
        raise ValueError(f"FA3_REFERENCE must be 'auto' or 'following', got {REFERENCE!r}")
    if REFERENCE == "following" or not HOLDS_POWERS[spec.dtype]:
        return False
    if [score.kind for score in spec.scores] == [Softcap]:
        (softcap,) = spec.scores
        return SLACK * math.log(2.0) < softcap.bind(iter(())).bound <= BOUNDED
    return all(score.kind is Alibi for score in spec.scores)


def candidate(tiled: Tiled, schedule: str, work: Work) -> Candidate:
    """One way to run a problem, with its predicted time."""
    costs = costs_of(tiled.gpu.name)
    measured = tiled.costs.is_known and costs.knows(schedule)
    return Candidate(tiled.config, schedule, predict(costs, tiled, schedule, work), measured)


def as_cut(tiled: Tiled) -> Candidate:
    """The candidate that splits tiles with this tiling, predicted from its parts as they are."""
    units = units_of_parts(tiled, split_tiles(tiled))
    return candidate(tiled, "split", Work.of(units, tiled.costs, tiled.lanes))


def choose(found: list[Candidate]) -> Candidate:
    """The first, unless others are predicted to gain more than the model can tell: the fastest."""
    first = found[0]

    def is_faster(one: Candidate) -> bool:
        us = one.prediction.mean_us
        margin = MARGIN if one.measured else UNSURE
        return first.prediction.mean_us - us > least_gain(us, margin)

    better = filter(is_faster, found)
    return min(better, key=lambda one: one.prediction.mean_us, default=first)


def configs(problem: Problem, gpu: Gpu) -> list[Config]:
    """The table's choice for a problem, then others of it whose times are measured."""
    first = choose_config(problem, gpu)
    found = [first]
    for tiling in alternatives(problem):
        for config in with_clusters(with_reference(tiling.config, problem), problem):
            if config in found or config.cluster > gpu.num_sms:
                continue
            if Tiled(problem, gpu, config).costs.is_known:
                found.append(config)
    return found


def with_reference(config: Config, problem: Problem) -> Config:
    """A tiling with a fixed reference where that pays."""
    if problem.flops >= FIXED_FLOPS and takes_fixed_reference(problem.spec):
        return replace(config, fixed_reference=True)
    return config


def with_clusters(config: Config, problem: Problem) -> list[Config]:
    """A tiling with its CTAs alone, in pairs of rows, and if heads share keys in pairs of heads."""
    found = [replace(config, cluster_m=n, cluster_h=1) for n in (1, 2)]
    if problem.spec.qhead_per_kvhead % 2 == 0 and not problem.spec.mask.templates:
        found.append(replace(config, cluster_m=1, cluster_h=2))
    return found


def alternatives(problem: Problem) -> list[Tiling]:
    """The table's rows for heads like these: those that fit, up to the first without a limit."""
    found = []
    for tiling in TILINGS:
        if tiling.fits(problem):
            found.append(tiling)
            if tiling.max_seqlen_q == math.inf:
                break
    return found


def choose_config(problem: Problem, gpu: Gpu) -> Config:
    """The best tiling that was measured for problems like this one."""
    config = next(
        tiling.config for tiling in alternatives(problem) if problem.seqlen_q <= tiling.max_seqlen_q
    )
    config = with_reference(config, problem)
    query_tiles = -(-problem.seqlen_q // config.tile_m)
    wasteful = query_tiles % config.cluster_m and query_tiles < FEW_TILES
    if wasteful or gpu.num_sms < config.cluster_m:
        return replace(config, cluster_m=1)
    return config


def make_schedule(
    tiled: Tiled, name: str, arrange: Callable[[list[Tile]], Iterable[Tile]] | None
) -> Schedule:
    """The schedule of this name; `arrange` puts the tiles of a list in order."""
    kind, order = SCHEDULES[name], tiled.order
    if kind is SingleTile:
        return SingleTile(order)
    clusters = min(tiled.lanes, order.num_tiles)
    if kind is StaticPersistent:
        return StaticPersistent(order, clusters)
    if kind is Dynamic:
        return Dynamic(order, clusters)
    if kind is SplitTiles:
        return split_tiles(tiled)
    times = durations(units_of_tiles(tiled), tiled.costs)
    if arrange is None:
        return TileList.balanced(order, clusters, times)
    arranged = arrange([order.tile(index) for index in range(order.num_tiles)])
    if not isinstance(arranged, Iterable):
        raise TypeError(f"schedule must return the tiles in their order, got {arranged!r}")
    return TileList.in_order_of(order, clusters, arranged, times)


# Remembered from the choice to the plan.
@functools.lru_cache(maxsize=4)
def split_tiles(tiled: Tiled) -> SplitTiles:
    """Tiles in whole and in parts, for all clusters that the GPU holds."""
    tile, blocks = tiled.costs, tiled.blocks_of_tiles()
    unit, part = tile.tile_us / tile.full_us, PART_US / tile.full_us
    return SplitTiles.cut(tiled.order, tiled.lanes, KeyRanges(blocks.begin, blocks.end, unit, part))
