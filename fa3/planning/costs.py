"""The parameters of the cost model: what tiles, schedules and launches cost on a GPU.

They are data. `benchmarks.fit_costs` fits them to measured times and writes `costs_h200.json`. A
`Gpu` has its costs; `fa3.planning.prediction`, `load` and `tiled` use them.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

from fa3.planning.tile_costs import Rule, TileCosts, TileKey

LEAST_MARGIN = 0.005
"""Share by which a candidate must be predicted faster than the choice of `TILINGS` to be taken."""

UNSURE = 0.25  # the same for candidates that were not measured
LEAST_GAIN_US = 0.5  # `LEAST_MARGIN` in microseconds, for calls that take only a few


def least_gain(us: float, margin: float = LEAST_MARGIN) -> float:
    """Microseconds that a candidate which takes `us` must gain over another to count as faster."""
    return max(margin * us, LEAST_GAIN_US)


AGAIN = "again"  # key in `Costs.call_us` of the second launch, which repeats marked tiles


@dataclass(frozen=True)
class Costs:
    """The cost model's parameters for one GPU."""

    gpu: str
    # Whether they were fitted to times of this GPU; otherwise derived from another's. Tiles that
    # were not measured on it may still be derived.
    measured: bool
    source: dict  # what they were fitted to, and when
    schedules: tuple[str, ...]  # names of the schedules that were measured
    bytes_per_us: float  # bandwidth of device memory
    launch_us: float  # microseconds of a launch when kernels follow each other
    # Microseconds that a schedule adds to every segment, by `prediction.unit_name`.
    unit_us: dict[str, float]
    # Microseconds that a schedule adds to a call, such as a kernel that merges parts; at `AGAIN`,
    # the costs of a second launch that finds no marked tile.
    call_us: dict[str, float]
    # Power of device memory at full bandwidth, over the power of SMs at key blocks.
    memory_power: float
    tiles: dict[TileKey, TileCosts]  # costs of the tiles that were measured
    rule: Rule  # estimates the costs of other tiles

    def tile(self, key: TileKey) -> TileCosts:
        if key in self.tiles:
            return self.tiles[key]
        # The same tile with a running maximum, if measured, is a better base than the rule.
        online_max = self.tiles.get(key._replace(online_max=True))
        return self.rule.without_maxima(online_max) if online_max else self.rule.tile(key)


def parse_costs(text: str) -> Costs:
    """The parameters in a text that `benchmarks.fit_costs` wrote."""
    content = json.loads(text)
    content["schedules"] = tuple(content["schedules"])
    content["rule"] = Rule(**content["rule"])
    content["tiles"] = {
        TileKey(**row["tile"]): TileCosts(**row["costs"]) for row in content["tiles"]
    }
    return Costs(**content)


H200_COSTS = Path(__file__).parent / "costs_h200.json"

H100_NAME = "NVIDIA H100"  # what the names of all H100 begin with

H100_BANDWIDTH = 3.35 / 4.8
"""Memory bandwidth of an H100 SXM over an H200's, by their data sheets; clocks are equal."""


@functools.cache
def shipped_costs(gpu_name: str) -> Costs:
    """A GPU's parameters as they come with fa3: other Hopper GPUs use the H200's."""
    costs = parse_costs(H200_COSTS.read_text())
    if gpu_name.startswith(costs.gpu):
        return costs
    if gpu_name.startswith(H100_NAME):
        bandwidth = costs.bytes_per_us * H100_BANDWIDTH
        return replace(costs, gpu=H100_NAME, measured=False, bytes_per_us=bandwidth)
    return replace(costs, gpu=gpu_name, measured=False)
