"""How a problem will run: `plan_forward(problem, gpu) -> Plan`. Pure Python; needs no GPU."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fa3.kernels.forward import Config
from fa3.masks import Sequence
from fa3.problem import Problem
from fa3.schedules import Schedule, SingleTile, StaticPersistent, TileList, TileOrder


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


class Tiling(NamedTuple):
    """A row of the config table: the tiling for a head_dim, with or without a mask.

    Holds for up to `max_seqlen_q` queries.
    """

    head_dim: int
    masked: bool
    max_seqlen_q: float
    config: Config


TILINGS = (
    Tiling(64, False, math.inf, Config(192, 128, q_stages=2)),
    Tiling(64, True, 512, Config(128, 128, q_stages=2, kv_stages=3)),
    Tiling(64, True, math.inf, Config(192, 128, q_stages=2)),
    Tiling(128, False, math.inf, Config(128, 128, q_stages=2, cluster_m=2)),
    Tiling(128, True, math.inf, Config(128, 128, q_stages=2)),
    Tiling(256, False, 4096, Config(128, 80, own_o=False, cluster_m=2)),
    Tiling(256, False, math.inf, Config(128, 80, own_o=False)),
    Tiling(256, True, 512, Config(128, 64, own_o=False)),
    Tiling(256, True, math.inf, Config(128, 80, own_o=False)),
)
"""Best of what was measured on an H200 on 2026-11-21, bf16, steady; the first row that fits holds.

The figures of the others stand in docs/experiments.md.
"""

HEAD_DIMS = tuple(sorted({tiling.head_dim for tiling in TILINGS}))

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
    spec = problem.spec
    masked = spec.mask.left or spec.mask.right
    config = next(
        tiling.config
        for tiling in TILINGS
        if (tiling.head_dim, tiling.masked) == (spec.head_dim, masked)
        and problem.seqlen_q <= tiling.max_seqlen_q
    )
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
    schedule_type: type | None = None,
) -> Plan:
    """Choose the config and the schedule of a problem; both can be given."""
    spec = problem.spec
    config = config or choose_config(problem, gpu)
    config.validate(spec)
    rows = config.tile_m * config.cluster_m
    order = TileOrder(
        -(-problem.seqlen_q // rows),
        problem.num_heads_q,
        problem.batch,
        heads_per_section(problem, gpu),
    )
    if gpu.num_sms < config.cluster_m:
        raise ValueError(f"a cluster of {config.cluster_m} CTAs does not fit {gpu.num_sms} SMs")
    clusters = min(gpu.num_sms // config.cluster_m, order.num_tiles)
    masked = spec.mask.left or spec.mask.right
    schedule_type = schedule_type or (TileList if masked else StaticPersistent)
    if schedule_type is SingleTile:
        schedule = SingleTile(order)
    elif schedule_type is StaticPersistent:
        schedule = StaticPersistent(order, clusters)
    else:
        schedule = TileList.balanced(order, clusters, tile_durations(problem, config, order))
    return Plan(problem, gpu, config, schedule)


def tile_durations(problem: Problem, config: Config, order: TileOrder) -> list[float]:
    """How long a tile of each m_block takes, in key blocks."""
    sequence = Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
    rows = config.tile_m * config.cluster_m
    return [
        TILE_OVERHEAD + blocks.end - blocks.begin
        for m_block in range(order.num_m_blocks)
        for blocks in [problem.spec.mask.key_blocks(m_block * rows, rows, config.tile_n, sequence)]
    ]
