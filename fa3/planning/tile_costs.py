"""What a tile costs: `TileCosts` by `TileKey`, and the `Rule` for tiles that were not measured.

`fa3.planning.costs` keeps them for a GPU.
"""

from typing import NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec
from fa3.schedules.split import LEAVE_US, MERGE_US

ENOUGH_CELLS = 4
"""Shapes on which a tile must have been measured: fewer cannot determine its parameters."""


def has_mask(spec: AttentionSpec) -> bool:
    """Whether this spec has a causal or window mask, so that its tiles differ in key blocks."""
    return bool(spec.mask.left or spec.mask.right)


class TileKey(NamedTuple):
    """What a tile's time depends on; the key of `Costs.tiles`. Head sizes are padded."""

    head_dim: int
    head_dim_v: int
    masked: bool
    tile_m: int
    tile_n: int
    cluster: int
    online_max: bool = True
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
        """Whether the tile was measured on enough shapes to be compared with others."""
        return self.cells >= ENOUGH_CELLS

    def us(self, full, masked):
        """Microseconds of tiles with `full` and `masked` key blocks, as numbers or arrays."""
        return self.tile_us + full * self.full_us + masked * self.masked_us

    def part_us_if(self, merges):
        """Microseconds that parts take in addition which merge, or leave their output, as a bool or
        an array. The ratio of both is MERGE_US / LEAVE_US."""
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
    # Ratio of a block's time with a fixed reference to that with the running maximum.
    fixed: float = 1.0

    def tile(self, key: TileKey) -> TileCosts:
        tensor, exponential = clocks_of_block(key)
        full = self.tensor * tensor + self.exponential * exponential
        part_us = self.part_us * key.tile_m / 128 * (key.head_dim_v / 128) ** 2
        tile = TileCosts(full, full * self.masked, self.tile_us, self.steady, part_us)
        return tile if key.online_max else self.without_maxima(tile)

    def without_maxima(self, tile: TileCosts) -> TileCosts:
        """The costs of a tile, changed to those with a fixed reference."""
        full_us, masked_us = tile.full_us * self.fixed, tile.masked_us * self.fixed
        return tile._replace(full_us=full_us, masked_us=masked_us)


def clocks_of_block(key: TileKey) -> tuple[float, float]:
    """Clocks that a CTA's key block takes on the tensor cores, and on the exponential units."""
    scores = key.tile_m * key.tile_n
    bytes_of_key = key.element_bytes * (key.head_dim + key.head_dim_v)
    return scores * bytes_of_key / 4096, scores / 16
