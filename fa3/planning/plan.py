"""A plan: how one problem runs, as a value. What there is to say about it follows from it."""

import functools
from dataclasses import dataclass, field, replace

import numpy as np

from fa3.kernels.forward import Forward
from fa3.kernels.forward_config import Config
from fa3.planning.checks import check_types
from fa3.planning.costs import costs_of
from fa3.planning.explanation import Candidate, Explanation, describe_config
from fa3.planning.gpu import Gpu
from fa3.planning.load import Units, Work, back_and_forth, units_of_parts, units_of_tiles
from fa3.planning.prediction import Prediction, predict
from fa3.planning.tiled import Tiled
from fa3.planning.timeline import Cost, Timeline
from fa3.problem import Problem
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
from fa3.schedules.split import WHOLE
from fa3.scores import masks

PART_US = 2.3
"""Microseconds that a part takes more than a whole tile, as the cut counts them: about what the
instrumented kernel saw (docs/experiments.md). Predictions add a fitted number instead; if the cut
went by that, a fit would change the plans that it was fitted to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem runs: the kernel's config, and the schedule its clusters walk.

    Fields:
        is_arranged: whether the tiles are in an order of the caller's.
        considered: the ways to run it that it was chosen among, with their predicted times.
    """

    problem: Problem
    gpu: Gpu
    config: Config
    schedule: Schedule
    is_arranged: bool = False
    considered: tuple[Candidate, ...] = field(default=(), repr=False, compare=False)

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
            for one in self.considered
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


def candidate(tiled: Tiled, schedule: str, work: Work) -> Candidate:
    """One way to run a problem, with its predicted time."""
    costs = costs_of(tiled.gpu.name)
    measured = tiled.costs.is_known and costs.knows(schedule)
    return Candidate(tiled.config, schedule, predict(costs, tiled, schedule, work), measured)


def as_cut(tiled: Tiled) -> Candidate:
    """The candidate that splits tiles with this tiling, predicted from its parts as they are."""
    units = units_of_parts(tiled, split_tiles(tiled))
    return candidate(tiled, "split", Work.of(units, tiled.costs, tiled.lanes))


# Remembered from the choice to the plan.
@functools.lru_cache(maxsize=4)
def split_tiles(tiled: Tiled) -> SplitTiles:
    """Tiles in whole and in parts, for all clusters that the GPU holds."""
    tile, blocks = tiled.costs, tiled.blocks_of_tiles()
    unit, part = tile.tile_us / tile.full_us, PART_US / tile.full_us
    return SplitTiles.cut(tiled.order, tiled.lanes, KeyRanges(blocks.begin, blocks.end, unit, part))
