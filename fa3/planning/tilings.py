"""A problem in tiles, and the measured `TILINGS` that the planner compares.

Schedules, loads and predictions are made from a `TiledProblem`.
"""

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fa3.kernels.forward_launch import BOUNDED, FP8_KEYS, ForwardConfig
from fa3.planning.costs import Gpu, TileCosts, TileKey, has_mask
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.softmax import SLACK
from fa3.problem import AttentionSpec, Problem
from fa3.schedules import TileOrder
from fa3.schedules.shared_tiles import HALVES
from fa3.scores import masks
from fa3.scores.scores import Alibi, Softcap
from fa3.settings import SETTINGS


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
            max(1, self.heads_per_group // config.cluster_h),
        )

    @property
    def rows(self) -> int:
        """Query rows of a cluster's tile."""
        return self.config.tile_m * self.config.cluster_m

    @property
    def heads_per_group(self) -> int:
        """Consecutive query heads whose K and V fit L2: a head group.
        Without a mask these are as few as `heads_at_once`."""
        return self.heads_in(1.0) if has_mask(self.problem.spec) else self.heads_at_once

    @property
    def heads_at_once(self) -> int:
        """As many heads as fit `FULL_SHARE` of L2.
        Where that is no more than one key/value head, as many as fit all of L2."""
        few = self.heads_in(FULL_SHARE)
        return few if few > self.problem.qhead_per_kvhead else self.heads_in(1.0)

    def heads_in(self, share: float) -> int:
        """Consecutive query heads whose K and V fit a share of L2."""
        problem = self.problem
        kv_bytes = max(1, problem.seqlen_k * problem.spec.key_bytes)
        kv_heads = max(1, int(share * self.gpu.l2_bytes) // kv_bytes)
        heads = problem.batch * problem.num_heads_q
        return max(1, min(kv_heads * problem.qhead_per_kvhead, heads))

    @property
    def spreads_reads(self) -> bool:
        """Whether head groups of a list, except for the last, have `heads_at_once`."""
        problem = self.problem
        if not has_mask(problem.spec) or max(problem.seqlen_q, problem.seqlen_k) > SPREAD_KEYS:
            return False
        return self.heads_in(1.0) < problem.batch * problem.num_heads_q

    @property
    def lanes(self) -> int:
        """Clusters that the GPU holds at once."""
        return max(1, self.gpu.num_sms // self.config.cluster)

    @property
    def num_clusters(self) -> int:
        """Persistent clusters: as many as the GPU holds, or fewer tiles."""
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


class Tiling(NamedTuple):
    """A row of the config table: the best measured config.
    It holds for head sizes up to these, elements of `element_bytes`, and with or without a mask;
    or, with `functions`, for users' scores or masks, which need registers."""

    head_dim: int
    head_dim_v: int
    masked: bool | None  # None: with and without a mask
    max_seqlen_q: float
    config: ForwardConfig
    functions: bool = False
    element_bytes: int = 2
    # Whether the planner, where tiling and schedule are its choice, looks at query heads that share
    # keys in pairs only.
    in_pairs: bool = False

    def fits(self, spec: AttentionSpec) -> bool:
        """Whether the row's config can run a spec."""
        return (
            spec.element_bytes == self.element_bytes
            and spec.head_dim <= self.head_dim
            and spec.head_dim_v <= self.head_dim_v
            and spec.has_user_functions == self.functions
            # With 160 registers a thread there is room for one score next to the fragments, or
            # for random numbers.
            and (len(spec.scores) + spec.has_dropout < 2 or self.config.consumers < 3)
            and self.masked in (None, has_mask(spec))
            and self.config.registers(spec) <= self.config.fragment_registers()
            and (self.config.own_o or padded(spec.head_dim) == padded(spec.head_dim_v))
        )


TILINGS = (
    Tiling(64, 64, False, math.inf, ForwardConfig(192, 128, q_stages=2)),
    Tiling(64, 64, True, 512, ForwardConfig(128, 128, q_stages=2, kv_stages=3)),
    Tiling(64, 64, True, math.inf, ForwardConfig(192, 128, q_stages=2)),
    Tiling(96, 96, False, 1024, ForwardConfig(128, 128, q_stages=2, cluster_m=2)),
    Tiling(96, 96, False, math.inf, ForwardConfig(192, 112, q_stages=2)),
    Tiling(96, 96, True, 1024, ForwardConfig(128, 128, q_stages=2)),
    Tiling(96, 96, True, math.inf, ForwardConfig(192, 112)),
    Tiling(128, 128, False, math.inf, ForwardConfig(128, 128, q_stages=2, cluster_m=2)),
    Tiling(128, 128, True, math.inf, ForwardConfig(128, 128, q_stages=2), in_pairs=True),
    Tiling(192, 128, None, math.inf, ForwardConfig(128, 112)),
    Tiling(192, 192, False, math.inf, ForwardConfig(128, 112, own_o=False)),
    Tiling(192, 192, True, math.inf, ForwardConfig(128, 80)),
    Tiling(256, 256, False, 512, ForwardConfig(128, 64, own_o=False, cluster_m=2)),
    Tiling(256, 256, False, 4096, ForwardConfig(128, 80, own_o=False, cluster_m=2)),
    Tiling(256, 256, False, math.inf, ForwardConfig(128, 80, own_o=False)),
    Tiling(256, 256, True, 512, ForwardConfig(128, 64, own_o=False)),
    Tiling(256, 256, True, math.inf, ForwardConfig(128, 80, own_o=False)),
    Tiling(64, 256, None, math.inf, ForwardConfig(128, 96)),
    Tiling(256, 64, None, math.inf, ForwardConfig(128, 96)),
    Tiling(192, 256, None, math.inf, ForwardConfig(128, 64)),
    Tiling(256, 192, None, math.inf, ForwardConfig(128, 64)),
    Tiling(256, 256, None, math.inf, ForwardConfig(128, 48)),
    Tiling(128, 128, None, math.inf, ForwardConfig(128, 64, q_stages=2), functions=True),
    Tiling(192, 192, None, math.inf, ForwardConfig(128, 64), functions=True),
    Tiling(256, 256, None, math.inf, ForwardConfig(128, 32), functions=True),
)
"""The best configs measured on an H200 on 2026-11-21, bf16, steady load, 16k tokens; figures in
docs/experiments.md. The first row that fits and allows the problem's queries is taken. Another row
that fits replaces it if its times were measured and it is predicted to be faster. Rows for head
sizes that differ were measured on 2026-11-22 at 4 x 4k with 8 heads; 128 x 48 is what fits above.

Causal heads of 128 that share keys run in pairs: over the committed records no other plan is faster
by more than 1.6% in bursts, and under steady load pairs save 2-4%. So a model with such heads meets
as few kernels as it can."""

ONE_LEVEL = SETTINGS["FA3_FP8_SUMS"] == "one-level"
"""Whether O is summed in one level in FP8, by the WGMMAs, instead of in two."""

EXACT = SETTINGS["FA3_FP8_EXP"] == "exact"
"""Whether P in FP8 has exponentials, instead of linear codes."""

TILINGS_IN_FP8 = tuple(
    Tiling(
        head_dim,
        head_dim_v,
        None,
        math.inf,
        replace(config, one_level=ONE_LEVEL, exact=EXACT),
        functions,
        element_bytes=1,
    )
    for functions in (False, True)
    for head_dim, head_dim_v, config in (
        (64, 64, ForwardConfig(128, 192, q_stages=2, kv_stages=3)),
        (128, 128, ForwardConfig(192, 96, kv_stages=3))
        if ONE_LEVEL and not functions
        else (128, 128, ForwardConfig(128, 128, q_stages=2, kv_stages=3)),
        (192, 128, ForwardConfig(128, 128)),
        (256, 256, ForwardConfig(128, 128)),
    )
)
"""The same for q, k and v in FP8, measured on H100s and H200s, head size 192 excepted."""

FULL_SHARE = 0.2
"""Share of L2's bytes for K and V that a head group has without a mask, where no longest tile must
be early. Its tiles then run at about the same time: 2 to 10% faster at 300 to 4k keys, at 16k up to
3% slower with one head instead of four (docs/experiments.md)."""

SPREAD_KEYS = 512
"""Queries and keys up to which groups in lists are small under a mask, too. All K and V of a large
group are read while its first, longest tiles run, and none later. With 512 keys small groups are 3
to 6% faster at head sizes 96 to 256, with 1k by 0.2% slower to 1% faster (docs/experiments.md)."""

FEW_TILES = 8
"""With fewer query tiles per head, an odd number of them makes clusters of two cost more than they
save."""

FIXED_FLOPS = 1.5e10
"""FLOPs of a call, some 30 us, from which a fixed row max saves more time than its second launch
takes."""

ROW_MAX = SETTINGS["FA3_ROW_MAX"]
"""Which row max calls have. With "online" always the running one (online softmax), which never
fails and costs 5-12% of a call. With "auto" the planner chooses between it and a fixed one."""


def takes_fixed_row_max(spec: AttentionSpec) -> bool:
    """Whether a fixed row max is possible and will rarely fail.
    Not with users' scores, which may be anything. A softcap's scores are bounded; with a bound of
    up to `SLACK` powers of two no row can fail, so none needs to be marked."""
    if ROW_MAX == "online" or spec.is_fp8:
        return False
    # In float16 biases of ALiBi to both sides rise too far in a block.
    to_both_sides = (("is_causal", False),)
    if spec.dtype == "float16" and any(x.constants == to_both_sides for x in spec.scores):
        return False
    if [score.kind for score in spec.scores] == [Softcap]:
        (softcap,) = spec.scores
        return SLACK * math.log(2.0) < softcap.bind(iter(())).bound <= BOUNDED
    return all(score.kind is Alibi for score in spec.scores)


def configs(problem: Problem, gpu: Gpu, is_searched: bool = False) -> list[ForwardConfig]:
    """The choice of `TILINGS` for a problem, then other measured configs.
    `is_searched` says that tiling and schedule are the planner's choice."""
    rows, choices = alternatives(problem.spec), [choose_config(problem, gpu)]
    for row in rows:
        for config in with_clusters(with_row_max(row.config, problem), problem):
            if config in choices or config.cluster > gpu.num_sms:
                continue
            if TiledProblem(problem, gpu, config).costs.is_known:
                choices.append(config)
    in_pairs = [config for config in choices if config.cluster_h > 1]
    is_paired = is_searched and all(row.in_pairs for row in rows)
    return in_pairs if in_pairs and is_paired else choices


def with_row_max(config: ForwardConfig, problem: Problem) -> ForwardConfig:
    """The tiling, with a fixed row max if that saves time."""
    if problem.flops >= FIXED_FLOPS and takes_fixed_row_max(problem.spec):
        return replace(config, fixed_row_max=True)
    return config


def with_clusters(config: ForwardConfig, problem: Problem) -> list[ForwardConfig]:
    """The tiling with single CTAs, pairs of rows, and pairs of heads."""
    shares_keys = problem.qhead_per_kvhead % 2 == 0 and not problem.spec.mask.templates
    clusters = [(1, 1), (2, 1), *[(1, 2)] * shares_keys]
    return [replace(config, cluster_m=m, cluster_h=h) for m, h in clusters]


def alternatives(spec: AttentionSpec) -> list[Tiling]:
    """The rows of `TILINGS` that fit, up to the first without limit."""
    rows = [row for row in (*TILINGS, *TILINGS_IN_FP8) if row.fits(spec)]
    if spec.other_out is not None:  # O cannot be staged where V or Q was.
        rows = [row._replace(config=replace(row.config, own_o=True)) for row in rows]
    limits = [row.max_seqlen_q for row in rows]
    return rows[: limits.index(math.inf) + 1]


def general_tiling(spec: AttentionSpec) -> ForwardConfig:
    """The tiling for any lengths, in single CTAs, with online softmax."""
    return replace(alternatives(spec)[-1].config, cluster_m=1)


def halved_tiling(spec: AttentionSpec) -> ForwardConfig:
    """The tiling with a warpgroup for each half of a tile.
    For tiles that sequences share, and for keys in a cache. There the producer needs registers to
    find pages, and queries come in chunks of few tiles."""
    rows = (row.config for row in TILINGS if row.config.consumers == HALVES and row.fits(spec))
    return replace(next(rows), cluster_m=1)


def converting_tiling(spec: AttentionSpec) -> ForwardConfig:
    """The tiling for keys in an FP8 cache.
    As for 16 bits, with smaller blocks if these and loaded ones do not fit. Where blocks have as
    many keys, results in fp16 have the bits of an fp16 cache.
    """
    config = replace(halved_tiling(spec), kv_stages=2, converted_stages=2)
    if config.smem_bytes(spec) > CAPACITY:
        config = replace(config, kv_stages=1)
    if config.smem_bytes(spec) > CAPACITY:
        config = replace(config, q_stages=1)
    config = replace(config, tile_n=config.tile_n // FP8_KEYS * FP8_KEYS)
    while config.smem_bytes(spec) > CAPACITY:
        config = replace(config, tile_n=config.tile_n - FP8_KEYS)
    return config


def choose_config(problem: Problem, gpu: Gpu) -> ForwardConfig:
    """The best tiling that was measured for problems like this one."""
    rows = alternatives(problem.spec)
    config = next(row.config for row in rows if problem.seqlen_q <= row.max_seqlen_q)
    config = with_row_max(config, problem)
    query_tiles = -(-problem.seqlen_q // config.tile_m)
    wasteful = query_tiles % config.cluster_m and query_tiles < FEW_TILES
    if wasteful or gpu.num_sms < config.cluster_m:
        return replace(config, cluster_m=1)
    return config
