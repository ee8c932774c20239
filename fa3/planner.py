"""How a problem will run: `plan_forward(problem, gpu) -> Plan`. Pure Python; needs no GPU."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from fa3.kernels.forward import Config, padded
from fa3.masks import Sequence
from fa3.problem import Problem
from fa3.schedules import (
    SCHEDULES,
    Schedule,
    SingleTile,
    StaticPersistent,
    Tile,
    TileList,
    TileOrder,
)


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
"""Has 60 MB of L2 (H100: 50 MB); Q and O pass through it too, so half is left for K and V."""


ScheduleChoice = str | type | Callable[[list[Tile]], Iterable[Tile]] | None


class Tiling(NamedTuple):
    """A row of the config table: for heads of up to these sizes, with or without a mask.

    Holds for up to `max_seqlen_q` queries.
    """

    head_dim: int
    head_dim_v: int
    masked: bool
    max_seqlen_q: float
    config: Config

    def fits(self, problem: Problem) -> bool:
        spec = problem.spec
        return (
            spec.head_dim <= self.head_dim
            and spec.head_dim_v <= self.head_dim_v
            and (spec.mask.left or spec.mask.right) == self.masked
            and problem.seqlen_q <= self.max_seqlen_q
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
)
"""The first row that fits holds: the best of what was measured on an H200 on 2026-11-21, bf16,
steady, with figures in docs/experiments.md. The 128 x 48 rows for unequal sizes are not measured.
"""

HEAD_DIM_UNIT, MAX_HEAD_DIM = 8, 256
"""Head sizes are multiples of 16 bytes, as TMA wants; a WGMMA has at most 256 columns of O."""

FEW_TILES = 8
"""Query tiles of a head below which an odd one costs a cluster of two more than it saves."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem runs: the kernel's config, and the schedule its clusters walk."""

    problem: Problem
    gpu: Gpu
    config: Config
    schedule: Schedule

    @property
    def grid(self) -> int:
        """CTAs to launch."""
        return self.schedule.num_clusters * self.config.cluster_m

    @property
    def kernel_arguments(self) -> tuple[int, ...]:
        """The integers that the kernel takes after its tensors and the softmax scale."""
        order = self.schedule.order
        return (*self.problem.window, order.heads_per_section, self.schedule.num_clusters)


def choose_config(problem: Problem, gpu: Gpu) -> Config:
    """The best tiling that was measured for problems like this one."""
    config = next(tiling.config for tiling in TILINGS if tiling.fits(problem))
    query_tiles = -(-problem.seqlen_q // config.tile_m)
    wasteful = query_tiles % config.cluster_m and query_tiles < FEW_TILES
    if wasteful or gpu.num_sms < config.cluster_m:
        return replace(config, cluster_m=1)
    return config


def heads_per_section(problem: Problem, gpu: Gpu) -> int:
    """How many consecutive query heads share an L2-sized section of K and V."""
    spec = problem.spec
    kv_bytes = 2 * problem.seqlen_k * (spec.head_dim + spec.head_dim_v)
    kv_heads = max(1, gpu.l2_bytes // max(1, kv_bytes))
    return max(1, min(kv_heads * spec.qhead_per_kvhead, problem.batch * problem.num_heads_q))


TILE_OVERHEAD = 1.0
"""What a tile costs beside its key blocks, in key blocks: prologue, epilogue and fill."""


def plan_forward(
    problem: Problem,
    gpu: Gpu = H200,
    config: Config | None = None,
    schedule: ScheduleChoice = None,
) -> Plan:
    """Choose how a problem runs.

    Args:
        problem: what is asked.
        gpu: what it runs on.
        config: the kernel's tiling; chosen from `TILINGS` if not given.
        schedule: a name of `SCHEDULES`, its class, or a function from the list of all tiles to
            the order in which they are to be worked on; each goes to the cluster that is free
            first. By default lists where a mask makes tiles unequal, else a static order.

    Raises:
        ValueError: the config cannot run the problem, or the schedule has no such name, or its
            order misses, repeats or invents a tile.
    """
    config = config or choose_config(problem, gpu)
    config.validate(problem.spec)
    if gpu.num_sms < config.cluster_m:
        raise ValueError(f"a cluster of {config.cluster_m} CTAs does not fit {gpu.num_sms} SMs")
    order = TileOrder(
        -(-problem.seqlen_q // (config.tile_m * config.cluster_m)),
        problem.num_heads_q,
        problem.batch,
        heads_per_section(problem, gpu),
    )
    return Plan(problem, gpu, config, make_schedule(problem, gpu, config, order, schedule))


def make_schedule(
    problem: Problem, gpu: Gpu, config: Config, order: TileOrder, choice: ScheduleChoice
) -> Schedule:
    """The schedule of a choice; see `plan_forward`."""
    if isinstance(choice, str):
        if choice not in SCHEDULES:
            raise ValueError(f"schedule must be one of {sorted(SCHEDULES)}, got {choice!r}")
        choice = SCHEDULES[choice]
    if choice is None:
        mask = problem.spec.mask
        choice = TileList if mask.left or mask.right else StaticPersistent
    clusters = min(gpu.num_sms // config.cluster_m, order.num_tiles)
    if choice is SingleTile:
        return SingleTile(order)
    if choice is StaticPersistent:
        return StaticPersistent(order, clusters)
    durations = tile_durations(problem, config, order)
    if choice is TileList:
        return TileList.balanced(order, clusters, durations)
    if not callable(choice):
        raise TypeError(f"schedule must be a name, a class or a function, got {choice!r}")
    tiles = [order.tile(index) for index in range(order.num_tiles)]
    return TileList.in_order_of(order, clusters, choice(tiles), durations)


def tile_durations(problem: Problem, config: Config, order: TileOrder) -> list[float]:
    """How long a tile of each m_block takes, in key blocks."""
    sequence = Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
    rows = config.tile_m * config.cluster_m
    return [
        TILE_OVERHEAD + blocks.end - blocks.begin
        for m_block in range(order.num_m_blocks)
        for blocks in [problem.spec.mask.key_blocks(m_block * rows, rows, config.tile_n, sequence)]
    ]
