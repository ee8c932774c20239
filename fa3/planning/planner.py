"""The forward planner: `plan_forward(problem, gpu) -> Plan` chooses tiling and schedule.

It compares the tilings of `fa3.planning.tilings` with every searched schedule by their predicted
times; `plan_dense` compares the best with the decode kernel (`fa3.planning.decode`). Runs on
the host and needs no GPU. A caller may make a `Plan` by hand, too (`check_plan`).
`fa3.calls.execution` launches a plan's kernels, `fa3.reference.walker` walks it on the CPU.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa3.complaints import check_type, shown
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200, LEAST_MARGIN, Gpu, as_gpu, has_mask, least_gain
from fa3.planning.decode import DecodePlan
from fa3.planning.explanation import Candidate, choice_of, counted, describe_config, duration
from fa3.planning.launch import NO_MEMORY, OF_FORWARD, FromCall, Launch, Memory, PlanBase
from fa3.planning.prediction import Load, Prediction, Timeline, loads_of_whole_tiles, predict
from fa3.planning.routes import DECODE, choose_dense
from fa3.planning.tilings import TiledProblem, configs
from fa3.primitives.shared_memory import CAPACITY
from fa3.problem import (
    ELEMENT_BYTES,
    FP8,
    FP8_HEAD_DIM_UNIT,
    HEAD_DIM_UNIT,
    MAX_HEAD_DIM,
    NO_BOUND,
    AttentionSpec,
    Problem,
    Window,
)
from fa3.schedules import (
    SCHEDULES,
    Dynamic,
    Schedule,
    Segment,
    SingleTile,
    SplitTiles,
    Tile,
    TileList,
)
from fa3.schedules.order import check_schedule
from fa3.schedules.recompute import RecomputeTiles
from fa3.scores.masks import Band, Blocks
from fa3.settings import check_settings


@dataclass(frozen=True, slots=True)
class Plan(PlanBase):
    """How one problem runs: the kernel's config, and its clusters' schedule.

    Attributes:
        is_arranged: whether the caller gave the order of the tiles.
        considered: the candidates that the planner compared, with their predicted times.
    """

    problem: Problem
    gpu: Gpu
    config: ForwardConfig
    schedule: Schedule
    is_arranged: bool = False
    considered: tuple[Candidate, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """Schedule and tiling in a few characters: "list 128x128"."""
        return f"{self.schedule.name} {describe_config(self.config)}"

    def kernel(self, is_recorded: bool = False) -> Forward:
        """The kernel to launch; the instrumented one if `is_recorded`."""
        return Forward(self.problem.spec, self.config, type(self.schedule), is_recorded)

    @property
    def recompute(self) -> "Plan | None":
        """The recompute launch, or None with the online softmax."""
        if not self.config.fixed_row_max:
            return None
        config = self.config.recompute
        heads = self.schedule.order.heads_per_group * self.config.cluster_h
        order = replace(TiledProblem(self.problem, self.gpu, config).order, heads_per_group=heads)
        schedule = RecomputeTiles(order, min(self.gpu.num_sms, order.num_tiles))
        return replace(self, config=config, schedule=schedule)

    def launches(self, is_recorded: bool = False) -> tuple[Launch, ...]:
        """Return what is launched: the kernel, perhaps instrumented, then recompute if marked."""
        schedule, recompute = self.schedule, self.recompute
        named: dict[str, Any] = {
            "heads_per_group": schedule.order.heads_per_group,
            "num_clusters": schedule.num_clusters,
            **OF_FORWARD,
        }
        if isinstance(schedule, SplitTiles):
            named["num_slots"] = schedule.num_slots
        if isinstance(schedule, RecomputeTiles):
            named["schedule_state"] = FromCall("marks")
        launch = Launch.of(self.kernel(is_recorded), self.problem.window, **named)
        return (launch, *recompute.launches()) if recompute else (launch,)

    @property
    def table(self) -> np.ndarray | None:
        return self.schedule.table

    @property
    def memory(self) -> Memory:
        schedule, recompute, parts = self.schedule, self.recompute, NO_MEMORY
        if isinstance(schedule, SplitTiles):
            rows = self.config.tile_m * self.config.cluster
            parts = Memory.of_parts(schedule.num_slots, rows, self.problem.spec.head_dim_v)
        counters = {"schedule_state": schedule.num_counters, **dict(parts.counters)}
        if recompute is not None:
            counters["marks"] = recompute.schedule.num_counters
        used = ((name, count) for name, count in counters.items() if count)
        return parts._replace(counters=tuple(used))

    def predict(self) -> Prediction:
        """The time that the cost model predicts, with its components."""
        return scheduled_candidate(self.tiled, self.schedule).prediction

    @property
    def tiled(self) -> TiledProblem:
        """The problem, cut into the plan's tiles."""
        return TiledProblem(self.problem, self.gpu, self.config)

    def simulate(self) -> Timeline:
        """Which SM has which tile when, in microseconds, by the cost model."""
        tiled = self.tiled
        costs, by_m_block = tiled.costs, np.stack(tiled.blocks_of_rows, axis=1).tolist()

        def cost_of(segment: Segment) -> tuple:
            blocks = Blocks(*by_m_block[segment.tile.m_block])
            part_us = 0.0
            if not segment.is_whole:
                part_us = costs.part_us_if(segment.begin == blocks.begin)
            if segment.begin is not None:
                blocks = blocks.between(segment.begin, segment.end)
            full, touched = blocks.full_end - blocks.full_begin, blocks.end - blocks.begin
            return costs.us(full, touched - full) + part_us, touched, full

        # Without owners the first free cluster takes the next tile, as the GPU starts clusters.
        is_owned = self.schedule.owners is not None
        schedule = self.schedule if is_owned else SingleTile(self.schedule.order)
        prediction = self.predict()
        us = prediction.us - prediction.launch_us
        return Timeline.of(schedule, tiled.lanes, us, cost_of)

    def sentences(self) -> dict[str, str]:
        problem, gpu, config, schedule = self.problem, self.gpu, self.config, self.schedule
        chosen = scheduled_candidate(self.tiled, schedule)
        prediction, order, cluster = chosen.prediction, schedule.order, config.cluster
        grouped = DecodePlan.if_possible(problem, gpu)
        timeline = self.simulate()
        lane = "An SM" if cluster == 1 else f"A cluster of {cluster} SMs"
        ctas, tiles = schedule.num_clusters * cluster, order.num_tiles * cluster
        kind = "CTA" if isinstance(schedule, SingleTile) else "persistent CTA"
        heads = problem.num_heads_q * problem.batch
        groups = -(-order.num_heads * order.batch // order.heads_per_group)
        together = counted(heads, "head") + " together"
        if groups > 1:
            together = f"{heads:,} heads in {groups} head groups, one after another"
        arranged = "in the caller's order" if self.is_arranged else "last query rows first"
        own = "in registers only" if problem.spec.has_float32_out else "in a buffer of its own"
        softmax = "Online: subtracts the running row max."
        if config.fixed_row_max:
            softmax = (
                "Subtracts a fixed row max instead of the running one; the recompute launch "
                "repeats rows for which it was too far off."
            )
        unmeasured = "" if gpu.costs.measured else f" Not measured on an {gpu.name}."
        unmeasured += "" if chosen.measured else " Its tile or schedule was not measured."
        return {
            "CTA": f"{config.tile_m} query rows against blocks of {config.tile_n} keys; "
            f"{config.threads} threads in 1 producer and {config.consumers} consumer warpgroups.",
            "Memory": f"{counted(config.q_stages, 'stage')} of Q in shared memory, "
            f"{config.kv_stages} of K and of V, O {own if config.own_o else 'staged where V was'}: "
            f"{config.smem_bytes(problem.spec):,} of {CAPACITY:,} bytes.",
            "Grid": f"{counted(ctas, kind)}"
            f"{f' in clusters of {cluster}' if cluster > 1 else ''} on {gpu.num_sms} SMs, for "
            f"{counted(tiles, 'tile')}: {prediction.waves:,.2f} waves.",
            "Order": f"Schedule {schedule.name}: {together}, {arranged}.",
            # Counted once for every CTA of a cluster.
            "Work": f"{counted(timeline.blocks * cluster, 'key block')}, "
            f"{timeline.full_blocks * cluster:,} of them unmasked.",
            "Softmax": softmax,
            "Balance": f"{lane} works for {duration(min(timeline.busy, default=0.0))} to "
            f"{duration(max(timeline.busy, default=0.0))}, on average {duration(timeline.mean)}: "
            f"{timeline.balance:.1%} of the longest.",
            "Time": f"{duration(prediction.us)} predicted under steady load, "
            f"{problem.flops / prediction.us / 1e6:,.0f} TFLOP/s; {duration(prediction.burst_us)} "
            f"in a burst.{unmeasured}",
            "Bound": f"By {prediction.bound}: compute {duration(prediction.compute_us)} with SMs "
            f"busy for {prediction.busy:.1%} of it, device memory "
            f"{duration(prediction.memory_us)}, launch {prediction.launch_us:.1f} us.",
            "Choice": choice_of(chosen.name, prediction, self.considered),
            "Packing": grouped.compare_with(chosen, self.considered) if grouped else "",
        }


def check_plan(plan: Plan) -> None:
    """Raise TypeError or ValueError unless a plan can run its problem."""
    if plan.config is None:
        raise TypeError("plan must have a config, got None")
    if type(plan.schedule) not in SCHEDULES.values():
        raise TypeError(
            f"plan must have a schedule of one of the classes of {sorted(SCHEDULES)}, got "
            f"{plan.schedule!r:.200}"
        )
    check_arguments(plan.problem, plan.gpu, plan.config, plan.schedule.name)
    tiled = plan.tiled
    if plan.schedule.order != tiled.order:
        raise ValueError(
            f"plan has a schedule with tiles of another problem, GPU or tiling: "
            f"{plan.schedule.order}; here they are {tiled.order}"
        )
    blocks = tiled.blocks_of_tiles()
    check_schedule(plan.schedule, blocks.begin, blocks.end)


def candidate(tiled: TiledProblem, schedule: str, load: Load) -> Candidate:
    """A tiling and a schedule for a problem, with the predicted time."""
    costs = tiled.gpu.costs
    measured = tiled.costs.is_known and schedule in costs.schedules
    return Candidate(tiled.config, schedule, predict(costs, tiled, schedule, load), measured)


def scheduled_candidate(tiled: TiledProblem, schedule: Schedule) -> Candidate:
    """A schedule as a candidate, predicted from its actual segments."""
    segments = schedule.segments(tiled.blocks_of_tiles())
    load = Load.of(segments, tiled.costs, tiled.lanes)
    return candidate(tiled, schedule.name, load)._replace(laid_out=schedule)


def check_arguments(
    problem: Problem, gpu: Gpu, config: ForwardConfig | None, schedule: str | None
) -> None:
    """Raise unless problem and GPU are valid, and the config fits."""
    check_type("problem", problem, Problem)
    check_type("gpu", gpu, Gpu)
    if not isinstance(config, ForwardConfig | None):
        raise TypeError(f"config must be a ForwardConfig or None, got {shown(config)}")
    spec, window = problem.spec, problem.window
    check_type("gpu.name", gpu.name, str)
    check_type("problem.spec", spec, AttentionSpec)
    check_type("problem.window", window, Window)
    for owner, instance, least, names in (
        ("gpu", gpu, 1, ("num_sms", "l2_bytes")),
        ("problem", problem, 0, ("batch", "seqlen_q", "seqlen_k", "num_heads_kv")),
        ("problem", problem, 1, ("qhead_per_kvhead",)),
        ("problem.spec", spec, 1, ("head_dim", "head_dim_v")),
        ("problem.window", window, NO_BOUND, Window._fields),
    ):
        for name in names:
            size = getattr(instance, name)
            check_type(f"{owner}.{name}", size, int)
            if size < least:
                raise ValueError(f"{owner}.{name} must be {least} or more, got {size}")
    if spec.dtype not in ELEMENT_BYTES:
        kinds = [*ELEMENT_BYTES]
        raise ValueError(f"problem.spec.dtype must be one of {kinds}, got {spec.dtype!r}")
    outs = [one for one in ELEMENT_BYTES if one != FP8] if spec.is_fp8 else [None, "float32"]
    if spec.other_out not in outs:
        raise ValueError(
            f"problem.spec.other_out must be one of {outs} with {spec.dtype}, got "
            f"{spec.other_out!r}"
        )
    unit = FP8_HEAD_DIM_UNIT if spec.is_fp8 else HEAD_DIM_UNIT
    for name in ("head_dim", "head_dim_v"):
        size = getattr(spec, name)
        if size % unit or size > MAX_HEAD_DIM:
            raise ValueError(
                f"problem.spec.{name} must be a multiple of {unit} up to {MAX_HEAD_DIM}, got {size}"
            )
    band = getattr(spec.mask, "band", spec.mask)
    check_type("problem.spec.mask", band, Band)
    if band != Band.of(window):
        raise ValueError(
            f"problem.spec.mask must have the bounds that problem.window has, got {band} and "
            f"{window}"
        )
    if schedule == SplitTiles.name and spec.has_user_functions:
        raise ValueError(
            "schedule 'split' cannot run scores or masks of your own: they leave no registers in "
            "which parts of a tile could be merged"
        )
    if config is None:
        return
    # The kernel checks both.
    Forward(spec, config, SCHEDULES[schedule] if schedule else SingleTile)
    if gpu.num_sms < config.cluster:
        raise ValueError(
            f"config has clusters of {config.cluster} CTAs, which do not fit {gpu.num_sms} SMs"
        )
    if problem.qhead_per_kvhead % config.cluster_h:
        raise ValueError(
            f"config has cluster_h={config.cluster_h}, which must divide the "
            f"{problem.qhead_per_kvhead} query heads of a key/value head"
        )


# ------------------------------------------------------------------------------- the choice

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

MARGIN_OF_LIST = 0.01
"""Share by which a list, laid out, must be predicted faster than parts to be taken after all."""

MOST_TILES_IN_PARTS = 2560
"""Tiles up to which `prefers_parts` holds. With more the host would take long to lay out parts."""


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
        online = (replace(tiling, fixed_row_max=False) for tiling in tilings)
        for_parts = list(dict.fromkeys(online))
    if name == SplitTiles.name:
        tilings = for_parts
    compared = candidates(problem, gpu, tilings, (name,) if name else WHOLE)
    if isinstance(schedule, Schedule):
        return plan_of_schedule(problem, gpu, compared, schedule)
    best = choose_candidate(compared)
    may_split = not (name or problem.spec.has_user_functions)
    tiled = TiledProblem(problem, gpu, best.config)
    if may_split and prefers_parts(tiled):
        (best,) = candidates_of(tiled, (SplitTiles.name,))
        compared.append(best)
    elif may_split and best.prediction.busy < 1 - IDLE:
        # Parts of tiles could fill the time in which SMs are idle.
        parts = candidates(problem, gpu, for_parts, (SplitTiles.name,))
        whole, best = best, choose_candidate([best, *parts], MARGIN_OF_PARTS)
        if best in parts and whole.schedule == TileList.name:
            # What was estimated of the list can be 7% too long.
            laid_out = TiledProblem(problem, gpu, whole.config)
            whole = scheduled_candidate(laid_out, TileList.make(laid_out))
            best = choose_candidate([best, whole], MARGIN_OF_LIST)
        compared += parts
    tiled = TiledProblem(problem, gpu, best.config)
    compared_with = tuple([one._replace(laid_out=None) for one in compared])
    if callable(schedule) and not isinstance(schedule, type):
        arranged = TileList.in_order_of(tiled, schedule)
        return Plan(problem, gpu, best.config, arranged, True, compared_with)
    made = best.laid_out or SCHEDULES[best.schedule].make(tiled)
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
    is_faster = grouped is not None and grouped.beats(plan.considered)
    route = choose_dense(problem, gpu, is_faster, pack_gqa=pack_gqa)
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
    plan = Plan(problem, gpu, choose_candidate(fitting).config, schedule, True, tuple(compared))
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
    """All candidates for a problem, with predicted times; `TILINGS`' choice first."""
    # In FP8 without a mask the dynamic schedule is 1 to 10% faster (docs/experiments.md).
    is_full_fp8 = problem.spec.is_fp8 and not has_mask(problem.spec)
    first = Dynamic.name if is_full_fp8 else TileList.name
    names = sorted(schedules, key=lambda name: name != first)
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


def prefers_parts(tiled: TiledProblem) -> bool:
    """Whether to split tiles, whatever times are predicted.
    In FP8 with head size 256 that is up to 9% faster in single CTAs (docs/experiments.md; timed
    with up to 1024 tiles)."""
    spec = tiled.problem.spec
    if not spec.is_fp8 or spec.head_dim != MAX_HEAD_DIM or tiled.config.cluster > 1:
        return False
    return tiled.gpu.num_sms <= tiled.order.num_tiles <= MOST_TILES_IN_PARTS


def candidates_of(tiled: TiledProblem, names: Iterable[str]) -> list[Candidate]:
    """A tiling with schedules that it can run, and their predicted times."""
    greedy, listed = loads_of_whole_tiles(tiled)
    loads = {TileList.name: listed}
    return [
        scheduled_candidate(tiled, SCHEDULES[name].make(tiled))
        if SCHEDULES[name].splits
        else candidate(tiled, name, loads.get(name, greedy))
        for name in names
    ]


def choose_candidate(compared: list[Candidate], least_margin: float = LEAST_MARGIN) -> Candidate:
    """The fastest candidate; the first if none beats it by the margin."""
    first = compared[0]

    def is_faster(one: Candidate) -> bool:
        us = one.prediction.mean_us
        return first.prediction.mean_us - us > least_gain(us, one.measured, least_margin)

    better = filter(is_faster, compared)
    return min(better, key=lambda one: one.prediction.mean_us, default=first)
