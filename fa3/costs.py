"""What a plan costs: time predicted from the work of its clusters and the bytes it moves.

    T = (compute^2.5 + memory^2.5)^(1/2.5) + launch

    compute   when the last cluster is done. A unit of work takes tile_us, and full_us or masked_us
              for each of its key blocks; clusters take units as their schedule says.
    memory    bytes through device memory over its bandwidth. The K and V of a section of heads
              are read once if they fit into L2, else once for every wave of clusters; those of
              parts of tiles by each part, if L2 does not hold the keys of all heads.
    launch    what a launch takes when kernels follow each other, and what the schedule adds.

Times hold at the clock of short bursts. Under steady load the power cap lowers the clock, the less
so the less of the time SMs work on key blocks: with every SM at it all the time, compute takes
`steady` times as long; power follows that share and the 2.5th power of the clock.

The parameters are data: `costs_h200.json`, written by `benchmarks.fit_costs`.
"""

import functools
import heapq
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3 import masks
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec, Problem
from fa3.schedules import SplitTiles, TileOrder
from fa3.schedules.split_tiles import UNIT_FIELDS, WHOLE
from fa3.schedules.tile_list import END
from fa3.tiling import Config

EXPONENT = 2.5
"""How sharply the larger of compute and memory wins."""

POWER_EXPONENT = 2.5
"""Power at full load over the clock. Assumed; only measured with all SMs busy."""

APART = 0.6
"""Share of the keys of parts that are read from device memory, where L2 does not hold them all:
clusters that share keys do not walk them together. From 128 queries on 32k keys, 32/8 heads, alone
and in pairs of heads: 117 and 103.5 us, of which compute takes 101."""

ENOUGH_CELLS = 4
"""Shapes on which a tile must have been measured: fewer do not tell its parameters apart."""

MARGIN = 0.01
"""How much faster a way to run must be predicted than what the table says, to be taken."""

LEAST_GAIN_US = 0.5
"""The same in microseconds, for calls that take but a few."""


def least_gain(us: float, margin: float = MARGIN) -> float:
    """Microseconds that a way to run must gain beside one that takes `us`, to count as faster."""
    return max(margin * us, LEAST_GAIN_US)


EXACT_ROUNDS = 2
"""Rounds of units before the last one whose hand-out is followed one by one in a prediction."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the planner knows of a GPU.

    Fields:
        num_sms: streaming multiprocessors.
        l2_bytes: bytes of L2 that the K and V of one section of heads may take.
    """

    name: str
    num_sms: int
    l2_bytes: int


H200 = Gpu("NVIDIA H200", num_sms=132, l2_bytes=32 << 20)
"""Has 60 MB of L2; Q and O pass through it too, so half is left for K and V."""

H100 = Gpu("NVIDIA H100", num_sms=132, l2_bytes=26 << 20)
"""The SXM version: 50 MB of L2."""


AGAIN = "again"
"""The launch that computes marked tiles again."""


class TileKey(NamedTuple):
    """What a tile's times depend on.

    Fields:
        head_dim, head_dim_v: padded.
        masked: whether the spec has a mask.
        cluster: CTAs that share K and V.
        follows: whether the softmax's reference follows the scores.
    """

    head_dim: int
    head_dim_v: int
    masked: bool
    tile_m: int
    tile_n: int
    cluster: int
    follows: bool = True

    @classmethod
    def of(cls, spec: AttentionSpec, config: Config) -> "TileKey":
        return cls(
            padded(spec.head_dim),
            padded(spec.head_dim_v),
            has_mask(spec),
            config.tile_m,
            config.tile_n,
            config.cluster,
            not config.fixed_reference,
        )


class TileCosts(NamedTuple):
    """Times of a cluster's tile at the clock of a burst.

    Fields:
        full_us, masked_us: microseconds of a key block, without and with the mask applied.
        tile_us: microseconds of a tile beside its blocks: prologue, epilogue, fill.
        steady: how many times longer all of it takes under steady load on every SM.
        cells: shapes on which it was measured.
    """

    full_us: float
    masked_us: float
    tile_us: float
    steady: float
    cells: int = 0

    def us(self, full, masked):
        """The time of tiles with so many key blocks, as numbers or arrays."""
        return self.tile_us + full * self.full_us + masked * self.masked_us


class Rule(NamedTuple):
    """How long a tile takes that was not measured.

    Fields:
        tensor, exponential: microseconds of a block for each of the clocks that its WGMMAs, and
            that its exponentials, take.
        masked: a masked block's time over a full one's.
        tile_us, steady: as in `TileCosts`.
        fixed: a block's time with a fixed reference over that with one that follows.
    """

    tensor: float
    exponential: float
    masked: float
    tile_us: float
    steady: float
    fixed: float = 1.0

    def tile(self, key: TileKey) -> TileCosts:
        tensor, exponential = clocks_of_block(key)
        full = self.tensor * tensor + self.exponential * exponential
        tile = TileCosts(full, full * self.masked, self.tile_us, self.steady)
        return tile if key.follows else self.without_maxima(tile)

    def without_maxima(self, tile: TileCosts) -> TileCosts:
        """A tile as it would be with a fixed reference."""
        full_us, masked_us = tile.full_us * self.fixed, tile.masked_us * self.fixed
        return tile._replace(full_us=full_us, masked_us=masked_us)


def clocks_of_block(key: TileKey) -> tuple[float, float]:
    """Clocks that one CTA's key block needs of the tensor cores and of the exponential units."""
    scores = key.tile_m * key.tile_n
    return scores * 2 * (key.head_dim + key.head_dim_v) / 4096, scores / 16


@dataclass(frozen=True)
class Costs:
    """The parameters of one GPU.

    Fields:
        measured: whether they were fitted to this GPU's times; otherwise derived.
        source: what they were fitted to, and when.
        schedules: those that were measured.
        bytes_per_us: through device memory.
        launch_us: a launch among others.
        unit_us: by schedule, what it adds to every unit of work.
        call_us: by schedule, what it adds to a call, like a kernel that merges parts; by `AGAIN`,
            what a launch adds that finds no marked tile.
        partial_us: what a unit adds that is a part of its tile's key range: it writes its output
            in fp32.
        tiles: what was measured.
        rule: what holds for other tiles.
    """

    gpu: str
    measured: bool
    source: dict
    schedules: tuple[str, ...]
    bytes_per_us: float
    launch_us: float
    unit_us: dict[str, float]
    call_us: dict[str, float]
    partial_us: float
    tiles: dict[TileKey, TileCosts]
    rule: Rule

    def tile(self, key: TileKey) -> TileCosts:
        if key in self.tiles:
            return self.tiles[key]
        # The same with a reference that follows is closer than the rule.
        follows = self.tiles.get(key._replace(follows=True))
        return self.rule.without_maxima(follows) if follows else self.rule.tile(key)

    def knows(self, key: TileKey) -> bool:
        """Whether a tile was measured on enough shapes to be compared with others."""
        return self.tile(key).cells >= ENOUGH_CELLS

    def knows_schedule(self, name: str) -> bool:
        """Whether a schedule was measured."""
        return name in self.schedules


def read_costs(path: Path) -> Costs:
    """Read parameters that `write_costs` wrote."""
    content = json.loads(path.read_text())
    content["schedules"] = tuple(content["schedules"])
    content["rule"] = Rule(**content["rule"])
    content["tiles"] = {
        TileKey(**row["tile"]): TileCosts(**row["costs"]) for row in content["tiles"]
    }
    return Costs(**content)


def write_costs(costs: Costs, path: Path) -> None:
    """Write parameters as JSON, one tile a line."""

    def rounded(values: NamedTuple) -> dict:
        return {name: round(value, 6) for name, value in values._asdict().items()}

    content = vars(costs) | {
        "bytes_per_us": round(costs.bytes_per_us),
        "launch_us": round(costs.launch_us, 3),
        "unit_us": {name: round(us, 3) for name, us in costs.unit_us.items()},
        "call_us": {name: round(us, 3) for name, us in costs.call_us.items()},
        "rule": rounded(costs.rule),
    }
    tiles = ",\n".join(
        "    " + json.dumps({"tile": key._asdict(), "costs": rounded(costs.tiles[key])})
        for key in sorted(costs.tiles)
    )
    text = json.dumps(content | {"tiles": "TILES"}, indent=2)
    path.write_text(text.replace('"TILES"', f"[\n{tiles}\n  ]") + "\n")


H200_COSTS = Path(__file__).parent / "costs_h200.json"

H100_BANDWIDTH = 3.35 / 4.8
"""Device memory of an H100 SXM over an H200's, by their data sheets; clocks are equal."""


@functools.cache
def costs_of(gpu_name: str) -> Costs:
    """The parameters of a GPU. Hopper GPUs that were not measured take those of an H200."""
    costs = read_costs(H200_COSTS)
    if gpu_name.startswith(costs.gpu):
        return costs
    if gpu_name.startswith(H100.name):
        bandwidth = costs.bytes_per_us * H100_BANDWIDTH
        return replace(costs, gpu=H100.name, measured=False, bytes_per_us=bandwidth)
    return replace(costs, gpu=gpu_name, measured=False)


class Units(NamedTuple):
    """Units of work in the order in which clusters take them; arrays of one length.

    Fields:
        full, masked: key blocks without and with the mask applied.
        partial: whether the unit is a part of its tile's key range; None if none is.
        owner: the cluster that works on the unit, if the schedule fixes it beforehand; None if
            each unit goes to the cluster that is free first.
    """

    full: np.ndarray
    masked: np.ndarray
    partial: np.ndarray | None = None
    owner: np.ndarray | None = None

    @property
    def num_partial(self) -> int:
        return 0 if self.partial is None else int(self.partial.sum())


def has_mask(spec: AttentionSpec) -> bool:
    """Whether tiles of this spec differ in length."""
    return bool(spec.mask.left or spec.mask.right)


# Remembered from one candidate of a problem to the next.
@functools.lru_cache(maxsize=8)
def blocks_of_tiles(problem: Problem, config: Config, order: TileOrder) -> masks.KeyBlocks:
    """The key blocks of every tile, by its number, in arrays."""
    rows = config.tile_m * config.cluster_m
    sequence = masks.Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
    first_rows = rows * np.arange(order.num_m_blocks)
    blocks = problem.spec.mask.key_blocks(first_rows, rows, config.tile_n, sequence)
    m_blocks = order.m_blocks()
    # Without a mask all tiles have the same blocks, as numbers.
    *arrays, _ = np.broadcast_arrays(*blocks, first_rows)
    return masks.KeyBlocks(*(array[m_blocks] for array in arrays))


def units_of_blocks(blocks: masks.KeyBlocks) -> Units:
    """Units of work that take these blocks."""
    full = blocks.full_end - blocks.full_begin
    return Units(full, blocks.end - blocks.begin - full)


@functools.lru_cache(maxsize=8)
def units_of_tiles(problem: Problem, config: Config, order: TileOrder) -> Units:
    """The tiles of an order as units of work."""
    return units_of_blocks(blocks_of_tiles(problem, config, order))


def units_of_parts(problem: Problem, config: Config, schedule: SplitTiles) -> Units:
    """The whole tiles and parts of tiles that a schedule's clusters work on."""
    entries = schedule.table.reshape(-1, UNIT_FIELDS)
    places = np.flatnonzero(entries[:, 0] != END)
    tile, first, end, part = entries[places].astype(np.int64).T
    blocks = masks.KeyBlocks(
        *(array[tile] for array in blocks_of_tiles(problem, config, schedule.order))
    )
    return units_of_blocks(blocks.between(first, end))._replace(
        partial=part != WHOLE, owner=places % schedule.num_clusters
    )


def durations(units: Units, tile: TileCosts, partial_us: float = 0.0) -> np.ndarray:
    """Microseconds of every unit at the clock of a burst, without what its schedule adds."""
    times = tile.us(units.full, units.masked)
    return times if units.partial is None else times + units.partial * partial_us


def bytes_moved(
    problem: Problem, gpu: Gpu, config: Config, order: TileOrder, units: Units
) -> float:
    """Bytes through device memory."""
    spec = problem.spec
    kv_heads = max(1, order.heads_per_section * config.cluster_h // spec.qhead_per_kvhead)
    bytes_of_key = 2 * (spec.head_dim + spec.head_dim_v)
    section = problem.seqlen_k * bytes_of_key * kv_heads
    waves = order.num_m_blocks * order.heads_per_section * config.cluster / gpu.num_sms
    spilled = max(0, section - gpu.l2_bytes)
    sections = order.num_heads * order.batch / order.heads_per_section
    again = sections * max(0.0, waves - 1) * spilled
    all_keys = problem.batch * problem.num_heads_kv * problem.seqlen_k
    if units.num_partial and all_keys * bytes_of_key > gpu.l2_bytes:
        blocks = units.full + units.masked
        of_parts = float(blocks[units.partial > 0].sum())
        apart = APART * of_parts * config.tile_n * bytes_of_key
        again += max(0.0, apart - all_keys * bytes_of_key * of_parts / float(blocks.sum()))
    rows = config.tile_m * config.cluster
    # Partial outputs and their log-sum-exp, written and read again.
    partials = units.num_partial * rows * (spec.head_dim_v + 1) * 4 * 2
    return problem.bytes + again + partials


def makespan(times: np.ndarray, lanes: int) -> float:
    """When the last lane is done, if each takes the next unit as soon as it is free.

    All but the last rounds count by their mean: the hand-out levels them.
    """
    if len(times) <= lanes:
        return float(times.max(initial=0.0))
    if times.min() == times.max():
        return float(times[0]) * -(-len(times) // lanes)
    head = max(0, len(times) // lanes - EXACT_ROUNDS) * lanes
    level = times[:head].sum() / lanes
    free_at = (level + times[head : head + lanes]).tolist()
    heapq.heapify(free_at)
    replace_first = heapq.heapreplace
    for us in times[head + lanes :].tolist():
        replace_first(free_at, free_at[0] + us)
    return max(free_at)


class Work(NamedTuple):
    """How long units of work take, in microseconds, without what their schedule adds to each.

    Fields:
        last: when the last cluster is done.
        total: of all units together, and `of_blocks` of their key blocks alone.
        longest: the longest unit.
        count: units.
        rounds: units of the cluster that has the most.
    """

    last: float
    total: float
    of_blocks: float
    longest: float
    count: int
    rounds: int

    @classmethod
    def of(cls, units: Units, tile: TileCosts, partial_us: float, lanes: int) -> "Work":
        times = durations(units, tile, partial_us)
        if units.owner is None:
            last, rounds = makespan(times, lanes), -(-len(times) // lanes)
        else:
            last = float(np.bincount(units.owner, times).max(initial=0.0))
            rounds = int(np.bincount(units.owner).max(initial=0))
        total, partial = float(times.sum()), units.num_partial * partial_us
        of_blocks = max(0.0, total - partial - len(times) * tile.tile_us)
        return cls(last, total, of_blocks, float(times.max(initial=0.0)), len(times), rounds)


# Remembered from one schedule that hands tiles out to the next.
@functools.lru_cache(maxsize=8)
def work_handed_out(
    problem: Problem, config: Config, order: TileOrder, tile: TileCosts, lanes: int
) -> Work:
    """The work of an order's tiles, if each goes to the lane that is free first."""
    return Work.of(units_of_tiles(problem, config, order), tile, 0.0, lanes)


def back_and_forth(count: int, lanes: int) -> np.ndarray:
    """The lane of every unit when they are dealt in rounds of changing direction."""
    turn, place = np.divmod(np.arange(count), lanes)
    return np.where(turn % 2, lanes - 1 - place, place)


class Prediction(NamedTuple):
    """A plan's time and what it is made of.

    Fields:
        us: microseconds of a call under steady load.
        burst_us: of a call at full clock.
        compute_us: when the last cluster is done; under steady load.
        memory_us: device memory alone.
        launch_us: a launch among others, with what the schedule adds to a call.
        longest_us: the longest unit of work; under steady load.
        waves: units of work for each cluster that the GPU holds.
        busy: share of the SMs' time until the last cluster is done in which they work.
    """

    us: float
    burst_us: float
    compute_us: float
    memory_us: float
    launch_us: float
    longest_us: float
    waves: float
    busy: float

    @property
    def mean_us(self) -> float:
        """The geometric mean of a call under steady load and at full clock: no planner can know
        which of them it meets."""
        return (self.us * self.burst_us) ** 0.5

    @property
    def bound(self) -> str:
        """What sets the time, in a few words."""
        if self.memory_us > self.compute_us:
            return "device memory"
        if self.busy > 0.9:
            return "work on busy SMs"
        if self.longest_us > 0.9 * self.compute_us:
            return "its longest unit of work" if self.waves > 0.5 else "too few units of work"
        return "an uneven last wave"


def predict(
    costs: Costs,
    problem: Problem,
    gpu: Gpu,
    config: Config,
    order: TileOrder,
    schedule: str,
    units: Units,
) -> Prediction:
    """Predict the time of a plan.

    Args:
        order: the order of its tiles.
        schedule: the name of its schedule in `fa3.schedules.SCHEDULES`.
        units: what its clusters work on.
    """
    tile = costs.tile(TileKey.of(problem.spec, config))
    lanes = max(1, gpu.num_sms // config.cluster)
    unit_us = costs.unit_us.get(schedule, 0.0)
    if units.owner is None:
        work = work_handed_out(problem, config, order, tile, lanes)
    else:
        work = Work.of(units, tile, costs.partial_us, lanes)
    burst = work.last + work.rounds * unit_us
    of_all = config.cluster / (gpu.num_sms * burst) if burst else 0.0
    slowdown = max(1.0, tile.steady * (work.of_blocks * of_all) ** (1 / POWER_EXPONENT))
    memory_us = bytes_moved(problem, gpu, config, order, units) / costs.bytes_per_us
    launch_us = costs.launch_us + costs.call_us.get(schedule, 0.0)
    if config.fixed_reference:
        launch_us += costs.call_us.get(AGAIN, 0.0)
    return Prediction(
        joined(burst * slowdown, memory_us) + launch_us,
        joined(burst, memory_us) + launch_us,
        burst * slowdown,
        memory_us,
        launch_us,
        (work.longest + unit_us) * slowdown if work.count else 0.0,
        work.count / lanes,
        (work.total + work.count * unit_us) * of_all,
    )


def joined(compute_us: float, memory_us: float) -> float:
    """The time of compute and memory side by side."""
    return (compute_us**EXPONENT + memory_us**EXPONENT) ** (1 / EXPONENT)
