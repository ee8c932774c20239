"""What parts of a plan cost: the parameters of the cost model (`fa3.planning.prediction`).

They are data: `costs_h200.json`, written by `benchmarks.fit_costs`.
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
"""Shapes on which a tile must have been measured: fewer do not tell its parameters apart."""

MARGIN = 0.005
"""How much faster a way to run must be predicted than what the table says, to be taken."""

LEAST_GAIN_US = 0.5
"""The same in microseconds, for calls that take but a few."""


def least_gain(us: float, margin: float = MARGIN) -> float:
    """Microseconds that a way to run must gain beside one that takes `us`, to count as faster."""
    return max(margin * us, LEAST_GAIN_US)


AGAIN = "again"
"""The launch that computes marked tiles again."""


def has_mask(spec: AttentionSpec) -> bool:
    """Whether tiles of this spec differ in length."""
    return bool(spec.mask.left or spec.mask.right)


class TileKey(NamedTuple):
    """What a tile's times depend on.

    Fields:
        head_dim, head_dim_v: padded.
        masked: whether the spec has a mask.
        cluster: CTAs that share K and V.
        follows: whether the softmax's reference follows the scores.
        element_bytes: of q, k and v.
        kernel: whose tile it is.
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
    """Times of a cluster's tile at the clock of a burst.

    Fields:
        full_us, masked_us: microseconds of a key block, without and with the mask applied.
        tile_us: microseconds of a tile beside its blocks: prologue, epilogue, fill.
        steady: how many times longer all of it takes under steady load on every SM.
        part_us: what it adds to be a part of a tile's key range: its output is written in fp32,
            and merged.
        cells: shapes on which it was measured.
    """

    full_us: float
    masked_us: float
    tile_us: float
    steady: float
    part_us: float
    cells: int = 0

    @property
    def is_known(self) -> bool:
        """Whether it was measured on enough shapes to be compared with others."""
        return self.cells >= ENOUGH_CELLS

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
        part_us: the same for 128 rows and 128 columns of output. It grows with the rows and with
            the square of the columns, since the more of them there are, the fewer registers are
            left to merge them in.
        fixed: a block's time with a fixed reference over that with one that follows.
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
        """A tile as it would be with a fixed reference."""
        full_us, masked_us = tile.full_us * self.fixed, tile.masked_us * self.fixed
        return tile._replace(full_us=full_us, masked_us=masked_us)


def clocks_of_block(key: TileKey) -> tuple[float, float]:
    """Clocks that one CTA's key block needs of the tensor cores and of the exponential units."""
    scores = key.tile_m * key.tile_n
    bytes_of_key = key.element_bytes * (key.head_dim + key.head_dim_v)
    return scores * bytes_of_key / 4096, scores / 16


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
        memory_power: power of device memory at full bandwidth, over that of SMs at key blocks.
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
    memory_power: float
    tiles: dict[TileKey, TileCosts]
    rule: Rule

    def tile(self, key: TileKey) -> TileCosts:
        if key in self.tiles:
            return self.tiles[key]
        # The same with a reference that follows is closer than the rule.
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
