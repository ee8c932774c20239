"""A problem cut into tiles by a config: what schedules, loads and predictions are made from."""

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import TileCosts, TileKey
from fa3.planning.gpu import Gpu
from fa3.problem import Problem
from fa3.schedules import TileOrder
from fa3.scores import masks


@dataclass(frozen=True)
class TiledProblem:
    """A problem, cut into the tiles of a config, on a GPU."""

    problem: Problem
    gpu: Gpu
    config: ForwardConfig

    @cached_property
    def order(self) -> TileOrder:
        """The order of the tiles."""
        problem, config = self.problem, self.config
        return TileOrder(
            -(-problem.seqlen_q // self.rows),
            problem.num_heads_q // config.cluster_h,
            problem.batch,
            max(1, self.heads_per_section // config.cluster_h),
        )

    @property
    def rows(self) -> int:
        """Query rows of a cluster's tile."""
        return self.config.tile_m * self.config.cluster_m

    @property
    def heads_per_section(self) -> int:
        """Consecutive query heads whose K and V fit into L2 together: a section of the order."""
        problem, spec = self.problem, self.problem.spec
        kv_bytes = problem.seqlen_k * spec.key_bytes
        kv_heads = max(1, self.gpu.l2_bytes // max(1, kv_bytes))
        heads = problem.batch * problem.num_heads_q
        return max(1, min(kv_heads * problem.qhead_per_kvhead, heads))

    @property
    def lanes(self) -> int:
        """Clusters that the GPU holds at once."""
        return max(1, self.gpu.num_sms // self.config.cluster)

    @property
    def num_clusters(self) -> int:
        """Persistent clusters: as many as the GPU holds, but no more than there are tiles."""
        return min(self.lanes, self.order.num_tiles)

    @property
    def times(self) -> np.ndarray:
        """Microseconds of every tile, by its number."""
        blocks = self.blocks_of_tiles()
        full = blocks.full_end - blocks.full_begin
        return self.costs.us(full, blocks.end - blocks.begin - full)

    @cached_property
    def key(self) -> TileKey:
        """The key of the tiles' costs."""
        return TileKey.of(self.problem.spec, self.config)

    @property
    def costs(self) -> TileCosts:
        """The costs of a tile."""
        return self.gpu.costs.tile(self.key)

    @property
    def blocks_of_rows(self) -> masks.Blocks:
        """The key blocks of a tile, by its m_block, in arrays."""
        return blocks_of_rows(self.problem, self.rows, self.config.tile_n)

    def blocks_of_tiles(self) -> masks.Blocks:
        """The key blocks of every tile, by its number, in arrays."""
        m_blocks = self.order.m_blocks()
        return masks.Blocks(*(array[m_blocks] for array in self.blocks_of_rows))


# Cached for the next config: single CTAs and pairs of heads have the same rows.
@functools.lru_cache(maxsize=8)
def blocks_of_rows(problem: Problem, rows: int, tile_n: int) -> masks.Blocks:
    """The key blocks of each group of `rows` query rows, in arrays."""
    sequence = masks.Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
    first_rows = np.arange(0, problem.seqlen_q, rows)
    blocks = problem.spec.mask.key_blocks(first_rows, rows, tile_n, sequence)
    # Without a mask the blocks are numbers, the same for all rows.
    return masks.Blocks(*(np.broadcast_to(numbers, first_rows.shape) for numbers in blocks))
