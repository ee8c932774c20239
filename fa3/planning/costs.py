"""GPUs, and the cost model's parameters of tiles, schedules and launches.

Parameters are data. `benchmarks.fit_costs` fits them to measured times and writes
`costs_h200.json`. `fa3.planning.prediction` uses them. `fa3.calls.devices` finds the `Gpu` that a
tensor is on.
"""

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fa3.complaints import shown
from fa3.kernels.forward_launch import ForwardConfig
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec
from fa3.schedules.split import LEAVE_US, MERGE_US

LEAST_MARGIN = 0.005
"""Share by which a candidate must be predicted faster than the choice of `TILINGS` to be taken."""

UNSURE = 0.25  # the same for candidates that were not measured
LEAST_GAIN_US = 0.5  # `LEAST_MARGIN` in microseconds, for calls that take only a few


def least_gain(us: float, is_measured: bool = True, margin: float = LEAST_MARGIN) -> float:
    """Microseconds that a candidate must gain to count as faster."""
    return max((margin if is_measured else UNSURE) * us, LEAST_GAIN_US)


ENOUGH_CELLS = 4
"""Shapes on which a tile must have been measured: fewer cannot determine its parameters."""

AGAIN = "again"  # key in `Costs.call_us` of the second launch, which repeats marked tiles


def has_mask(spec: AttentionSpec) -> bool:
    """Whether a causal or window mask makes tiles differ in key blocks."""
    return bool(spec.mask.left or spec.mask.right)


class TileKey(NamedTuple):
    """What a tile's time depends on: `Costs.tiles`' key. Head sizes are padded."""

    head_dim: int
    head_dim_v: int
    masked: bool
    tile_m: int
    tile_n: int
    cluster: int
    online_max: bool = True
    element_bytes: int = 2

    @classmethod
    def of(cls, spec: AttentionSpec, config: ForwardConfig) -> "TileKey":
        return cls(
            padded(spec.head_dim),
            padded(spec.head_dim_v),
            has_mask(spec),
            config.tile_m,
            config.tile_n,
            config.cluster,
            not config.fixed_row_max,
            spec.element_bytes,
        )


class TileCosts(NamedTuple):
    """Times of a cluster's tile at burst clock."""

    # full_us, masked_us: microseconds of a key block, without and with the mask applied.
    full_us: float
    masked_us: float
    tile_us: float  # microseconds of a tile besides its blocks: prologue, epilogue, pipeline fill
    steady: float  # factor on all of these under steady load on every SM
    # Microseconds that a part of a tile takes in addition: the mean of a part that leaves its
    # output in fp32 and of one that merges.
    part_us: float
    cells: int = 0  # number of shapes on which the tile was measured

    @property
    def is_known(self) -> bool:
        """Whether the tile was measured on enough shapes to compare with others."""
        return self.cells >= ENOUGH_CELLS

    def us(self, full, masked):
        """Microseconds of tiles with `full` and `masked` key blocks, numbers or arrays."""
        return self.tile_us + full * self.full_us + masked * self.masked_us

    def part_us_if(self, merges):
        """Microseconds that a part adds: one that merges, or another.
        `merges` is a bool or an array. The ratio of both is MERGE_US / LEAVE_US."""
        share = 2 / (MERGE_US + LEAVE_US) * (LEAVE_US + merges * (MERGE_US - LEAVE_US))
        return self.part_us * share


class Rule(NamedTuple):
    """Estimates the times of a tile that was not measured."""

    # tensor, exponential: microseconds per clock that a key block's WGMMAs, and that its
    # exponentials, take.
    tensor: float
    exponential: float
    masked: float  # ratio of a masked block's time to a full block's
    # tile_us, steady: as in `TileCosts`.
    tile_us: float
    steady: float
    # As in `TileCosts`, for 128 rows and 128 columns of output. It grows with the rows and with the
    # square of the columns: more columns leave fewer registers for merging.
    part_us: float
    # Ratio of a block's time with a fixed row max to the time with the running one.
    fixed: float = 1.0

    def tile(self, key: TileKey) -> TileCosts:
        # Clocks that a CTA's key block takes on the tensor cores, and on the exponential units.
        scores = key.tile_m * key.tile_n
        bytes_of_key = key.element_bytes * (key.head_dim + key.head_dim_v)
        tensor, exponential = scores * bytes_of_key / 4096, scores / 16
        full = self.tensor * tensor + self.exponential * exponential
        part_us = self.part_us * key.tile_m / 128 * (key.head_dim_v / 128) ** 2
        tile = TileCosts(full, full * self.masked, self.tile_us, self.steady, part_us)
        return tile if key.online_max else self.without_maxima(tile)

    def without_maxima(self, tile: TileCosts) -> TileCosts:
        """A tile's costs, changed to those with a fixed row max."""
        full_us, masked_us = tile.full_us * self.fixed, tile.masked_us * self.fixed
        return tile._replace(full_us=full_us, masked_us=masked_us)


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
    """A GPU's parameters in fa3: other Hopper GPUs use the H200's."""
    costs = parse_costs(H200_COSTS.read_text())
    if gpu_name.startswith(costs.gpu):
        return costs
    if gpu_name.startswith(H100_NAME):
        bandwidth = costs.bytes_per_us * H100_BANDWIDTH
        return replace(costs, gpu=H100_NAME, measured=False, bytes_per_us=bandwidth)
    return replace(costs, gpu=gpu_name, measured=False)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the planner needs to know of a GPU."""

    name: str
    num_sms: int  # streaming multiprocessors
    l2_bytes: int  # bytes of L2 that the K and V of one head group may take

    @property
    def costs(self) -> Costs:
        """The parameters of the cost model."""
        return shipped_costs(self.name)


H200 = Gpu("NVIDIA H200", num_sms=132, l2_bytes=32 << 20)
"""Has 60 MB of L2; Q and O pass through it too, so half is left for K and V."""

H100 = Gpu(H100_NAME, num_sms=132, l2_bytes=26 << 20)  # the SXM version: 50 MB of L2
GPUS = {"H100": H100, "H200": H200}  # GPUs by the names that a caller may give instead of a `Gpu`


def as_gpu(gpu: Gpu | str) -> Gpu:
    """Return a GPU by its name in `GPUS`, or a `Gpu` unchanged."""
    if isinstance(gpu, Gpu):
        return gpu
    is_name = isinstance(gpu, str)
    if is_name and gpu in GPUS:
        return GPUS[gpu]
    raise (ValueError if is_name else TypeError)(
        f"gpu must be a Gpu or one of {list(GPUS)}, got {shown(gpu)}"
    )
