"""The cost model: predicts a plan's time from its clusters' load and the bytes that it moves.

`fa3.planning.load` gives the load, `fa3.planning.costs` the parameters; the planner and `Plan` use
the `Prediction`.

    T = (compute^2.5 + memory^2.5)^(1/2.5) + launch

    compute   when the last cluster is done. A segment takes tile_us, and full_us or masked_us
              for each of its key blocks; clusters take segments as their schedule says.
    memory    bytes through device memory over its bandwidth. The K and V of a section of heads
              are read once if they fit into L2, else once for every wave of clusters. Each part of
              a tile reads its own keys, if L2 does not hold the keys of all heads.
    launch    the time of a launch when kernels follow each other, and the schedule's overhead.

Costs are measured at burst clock. Under steady load the power cap lowers the clock. Power grows
with the 2.5th power of the clock, with the share of time in which SMs work on key blocks, and with
memory traffic. With every SM at key blocks all the time and no traffic, compute takes `steady`
times as long.
"""

from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import AGAIN, Costs
from fa3.planning.load import Load
from fa3.planning.tiled import TiledProblem

EXPONENT = 2.5
"""Exponent that joins compute and memory: the higher, the more the larger one alone counts."""

POWER_EXPONENT = 2.5
"""Power at full load grows with this power of the clock. Assumed; only measured with all SMs busy.
"""

APART = 0.6
"""Share of the parts' keys that are read from device memory, where L2 does not hold all keys:
clusters that share keys do not read them at the same time. From 128 queries on 32k keys, 32/8
heads, single CTAs and pairs of heads: 117 and 103.5 us, of which compute takes 101."""


def bytes_moved(tiled: TiledProblem, load: Load) -> float:
    """Bytes that a call moves through device memory."""
    problem, gpu, config, order = tiled.problem, tiled.gpu, tiled.config, tiled.order
    spec = problem.spec
    kv_heads = max(1, order.heads_per_section * config.cluster_h // problem.qhead_per_kvhead)
    bytes_of_key = spec.key_bytes
    section = problem.seqlen_k * bytes_of_key * kv_heads
    waves = order.num_m_blocks * order.heads_per_section * config.cluster / gpu.num_sms
    spilled = max(0, section - gpu.l2_bytes)
    sections = order.num_heads * order.batch / order.heads_per_section
    again = sections * max(0.0, waves - 1) * spilled
    all_keys = problem.batch * problem.num_heads_kv * problem.seqlen_k
    if load.num_parts and all_keys * bytes_of_key > gpu.l2_bytes:
        apart = APART * load.blocks_of_parts * config.tile_n
        together = all_keys * load.blocks_of_parts / load.blocks
        again += max(0.0, apart - together) * bytes_of_key
    rows = config.tile_m * config.cluster
    # Partial outputs and their log-sum-exp, in fp32, written and read again.
    partials = load.num_parts * rows * (spec.head_dim_v + 1) * 4 * 2
    return problem.bytes + again + partials


def unit_name(schedule: str, config: ForwardConfig) -> str:
    """The key in `Costs.unit_us` of a schedule; clusters of two have a key of their own."""
    return schedule if config.cluster == 1 else f"{schedule} in pairs"


class Prediction(NamedTuple):
    """A plan's predicted time and its components."""

    us: float  # microseconds of a call under steady load
    burst_us: float  # microseconds of a call at burst clock
    compute_us: float  # when the last cluster is done, under steady load
    memory_us: float  # time of the device memory traffic alone
    # A launch when kernels follow each other, and the schedule's overhead per call.
    launch_us: float
    longest_us: float  # the longest segment, under steady load
    waves: float  # segments per cluster that the GPU holds
    busy: float  # share of the SMs' time, until the last cluster is done, in which they work

    @property
    def mean_us(self) -> float:
        """The geometric mean of the times under steady load and at burst clock: the planner cannot
        know which of them a call will meet."""
        return (self.us * self.burst_us) ** 0.5

    @property
    def bound(self) -> str:
        """The bottleneck, in a few words."""
        if self.memory_us > self.compute_us:
            return "device memory"
        if self.busy > 0.9:
            return "compute"
        if self.longest_us > 0.9 * self.compute_us:
            return "its longest tile" if self.waves > 0.5 else "too few tiles"
        return "an uneven last wave"


def predict(costs: Costs, tiled: TiledProblem, schedule: str, load: Load) -> Prediction:
    """Predict the time of a plan from its tiles, the name of its schedule, and its clusters'
    load."""
    tile, config, lanes = costs.tile(tiled.key), tiled.config, tiled.lanes
    unit_us = costs.unit_us.get(unit_name(schedule, config), 0.0)
    burst = load.last + load.rounds * unit_us
    per_sm = config.cluster / (tiled.gpu.num_sms * burst) if burst else 0.0
    memory_us = bytes_moved(tiled, load) / costs.bytes_per_us
    busy_share = load.of_blocks * per_sm
    if burst:
        busy_share += costs.memory_power * min(1.0, memory_us / burst)
    slowdown = max(1.0, tile.steady * busy_share ** (1 / POWER_EXPONENT))
    launch_us = costs.launch_us + costs.call_us.get(schedule, 0.0)
    if config.fixed_reference:
        launch_us += costs.call_us.get(AGAIN, 0.0)
    return Prediction(
        joined(burst * slowdown, memory_us) + launch_us,
        joined(burst, memory_us) + launch_us,
        burst * slowdown,
        memory_us,
        launch_us,
        (load.longest + unit_us) * slowdown if load.num_segments else 0.0,
        load.num_segments / lanes,
        (load.total + load.num_segments * unit_us) * per_sm,
    )


def joined(compute_us: float, memory_us: float) -> float:
    """The time of compute and memory traffic that overlap."""
    return (compute_us**EXPONENT + memory_us**EXPONENT) ** (1 / EXPONENT)
