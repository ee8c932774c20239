"""The parameters of the cost model: what tiles, schedules and launches cost on a GPU.

They are data: `benchmarks.fit_costs` fits them to measured times and writes `costs_h200.json`.
`fa3.planning.prediction`, `load` and `tiled` use them.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import H100
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec

ENOUGH_CELLS = 4
"""Shapes on which a tile must have been measured: fewer cannot determine its parameters."""

LEAST_MARGIN = 0.005
"""Share by which a candidate must be predicted faster than the choice of `TILINGS` to be taken."""


LEAST_GAIN_US = 0.5
"""The same in microseconds, for calls that take only a few."""


def least_gain(us: float, margin: float = LEAST_MARGIN) -> float:
    """Microseconds that a candidate which takes `us` must gain over another to count as faster."""
    return max(margin * us, LEAST_GAIN_US)


AGAIN = "again"
"""Key in `Costs.call_us` of the second launch, which repeats marked tiles."""


def has_mask(spec: AttentionSpec) -> bool:
    """Whether this spec has a causal or window mask, so that its tiles differ in key blocks."""
    return bool(spec.mask.left or spec.mask.right)


class TileKey(NamedTuple):
    """What a tile's time depends on; the key of `Costs.tiles`.

    Fields:
        head_dim, head_dim_v: padded.
        masked: whether the spec has a mask.
        cluster: CTAs that share K and V.
        follows: whether the softmax follows the running maximum, or has a fixed reference.
        element_bytes: bytes of an element of q, k and v.
        kernel: the kernel that works on the tile.
    """

    head_dim: int
    head_dim_v: int
    masked: bool
    tile_m: int
    tile_n: int
    cluster: int
    follows: bool = True
    element_bytes: int = 2
    kernel: str = "forward"

    @classmethod
    def of(cls, spec: AttentionSpec, config: ForwardConfig) -> "TileKey":
        return cls(
            padded(spec.head_dim),
            padded(spec.head_dim_v),
            has_mask(spec),
            config.tile_m,
            config.tile_n,
            config.cluster,
            not config.fixed_reference,
            spec.element.bytes,
        )


class TileCosts(NamedTuple):
    """Times of a cluster's tile at burst clock.

    Fields:
        full_us, masked_us: microseconds of a key block, without and with the mask applied.
        tile_us: microseconds of a tile besides its blocks: prologue, epilogue, pipeline fill.
        steady: factor on all of these under steady load on every SM.
        part_us: microseconds that a part of a tile takes in addition: its output is written in
            fp32, and merged.
        cells: number of shapes on which the tile was measured.
    """

    full_us: float
    masked_us: float
    tile_us: float
    steady: float
    part_us: float
    cells: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the tile was measured on enough shapes to be compared with others."""
        return self.cells >= ENOUGH_CELLS

    def us(self, full, masked):
        """Microseconds of tiles with `full` and `masked` key blocks, as numbers or arrays."""
        return self.tile_us + full * self.full_us + masked * self.masked_us


class Rule(NamedTuple):
    """Estimates the times of a tile that was not measured.

    Fields:
        tensor, exponential: microseconds per clock that a key block's WGMMAs, and that its
            exponentials, take.
        masked: ratio of a masked block's time to a full block's.
        tile_us, steady: as in `TileCosts`.
        part_us: as in `TileCosts`, for 128 rows and 128 columns of output. It grows with the rows
            and with the square of the columns: more columns leave fewer registers for merging.
        fixed: ratio of a block's time with a fixed reference to that with the running maximum.
    """

    tensor: float
    exponential: float
    masked: float
    tile_us: float
    steady: float
    part_us: float
    fixed: float = 1.0

    def tile(self, key: TileKey) -> TileCosts:
        tensor, exponential = clocks_of_block(key)
        full = self.tensor * tensor + self.exponential * exponential
        part_us = self.part_us * key.tile_m / 128 * (key.head_dim_v / 128) ** 2
        tile = TileCosts(full, full * self.masked, self.tile_us, self.steady, part_us)
        return tile if key.follows else self.without_maxima(tile)

    def without_maxima(self, tile: TileCosts) -> TileCosts:
        """The costs of a tile, changed to those with a fixed reference."""
        full_us, masked_us = tile.full_us * self.fixed, tile.masked_us * self.fixed
        return tile._replace(full_us=full_us, masked_us=masked_us)


def clocks_of_block(key: TileKey) -> tuple[float, float]:
    """Clocks that a CTA's key block takes on the tensor cores, and on the exponential units."""
    scores = key.tile_m * key.tile_n
    bytes_of_key = key.element_bytes * (key.head_dim + key.head_dim_v)
    return scores * bytes_of_key / 4096, scores / 16


@dataclass(frozen=True)
class Costs:
    """The cost model's parameters for one GPU.

    Fields:
        measured: whether they were fitted to times of this GPU; otherwise derived from another's.
        source: what they were fitted to, and when.
        schedules: names of the schedules that were measured.
        bytes_per_us: bandwidth of device memory.
        launch_us: microseconds of a launch when kernels follow each other.
        unit_us: microseconds that a schedule adds to every segment, by `prediction.unit_name`.
        call_us: microseconds that a schedule adds to a call, such as a kernel that merges parts;
            at `AGAIN`, those of a second launch that finds no marked tile.
        memory_power: power of device memory at full bandwidth, over that of SMs at key blocks.
        tiles: costs of the tiles that were measured.
        rule: estimates the costs of other tiles.
    """

    gpu: str
    measured: bool
    source: dict
    schedules: tuple[str, ...]
    bytes_per_us: float
    launch_us: float
    unit_us: dict[str, float]
    call_us: dict[str, float]
    memory_power: float
    tiles: dict[TileKey, TileCosts]
    rule: Rule

    def tile(self, key: TileKey) -> TileCosts:
        if key in self.tiles:
            return self.tiles[key]
        # The same tile with a running maximum, if measured, is a better base than the rule.
        follows = self.tiles.get(key._replace(follows=True))
        return self.rule.without_maxima(follows) if follows else self.rule.tile(key)

    def knows(self, schedule: str) -> bool:
        """Whether a schedule was measured."""
        return schedule in self.schedules


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
    """Write parameters as JSON, one line per tile."""

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
"""Memory bandwidth of an H100 SXM over an H200's, by their data sheets; clocks are equal."""


@functools.cache
def costs_of(gpu_name: str) -> Costs:
    """The parameters of a GPU. Hopper GPUs that were not measured use the H200's parameters."""

    costs = read_costs(H200_COSTS)
    if gpu_name.startswith(costs.gpu):
        return costs
    if gpu_name.startswith(H100.name):
        bandwidth = costs.bytes_per_us * H100_BANDWIDTH
        return replace(costs, gpu=H100.name, measured=False, bytes_per_us=bandwidth)
    return replace(costs, gpu=gpu_name, measured=False)
