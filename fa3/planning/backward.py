"""Plans of the backward pass: tiling, order of key tiles, launches.

A CTA of the backward kernel has a key tile of one key/value head, and all query heads that share
it. The tiles of the first keys come first: with a causal mask most queries see them.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fa3.kernels.backward import Backward, BackwardPass
from fa3.kernels.backward_launch import MMA_GROUPS, BackwardConfig, place_of_group_flag
from fa3.kernels.tile_table import TileTable
from fa3.planning.costs import H200, Gpu
from fa3.planning.explanation import NOT_PREDICTED, counted, quantity
from fa3.planning.key_split import (
    MOST_LINES,
    TILES_OF_WAVE,
    KeyShares,
    KeyTileWork,
    Waves,
    accumulators_of_line,
    choose_shares,
    lines_of_group,
    most_parts_of,
    share_lines,
)
from fa3.planning.launch import Launch, PlanBase
from fa3.primitives.key_line import TILES_OF_LINE
from fa3.primitives.query_tiles import STATISTICS
from fa3.primitives.shared_memory import padded
from fa3.primitives.vectors import FLOAT_BYTES, QUAD
from fa3.primitives.wgmma import WARPS
from fa3.problem import NO_BOUND, REMEMBERED, AttentionSpec, Problem, Window
from fa3.schedules.dynamic import InOrderQueue
from fa3.schedules.ragged import RaggedKeyTiles
from fa3.scores.masks import Sequence

L2_BYTES = 48 << 20
"""Bytes of Q, dO and dQ that tiles which run at the same time should share in L2. They take the
query heads of their key/value head one after another, at about the same time."""

TILES_PER_GROUP = 64
"""Key tiles of a head group, unless a head alone has more: half as many as run at the same time.
With more, dQ leaves L2 between two additions: 1 to 5% of the time of sequences of up to 2k
(docs/experiments.md). Twice as many in a fixed order: with fewer heads all their tiles run at once
and wait for one another; that cost up to 7%."""

HEADS_PER_GROUP, MORE_HEADS_PER_GROUP = 4, 8
"""Fewest heads of a head group with a bound to the right, as with a causal mask. A group's longest
tiles come first, one of each head, and the ones of the last group would end long after all others.
The latter with few tiles, where it took 6 to 12%, or in a fixed order (docs/experiments.md)."""

ENOUGH_TILES = 1536  # key tiles of all head groups, from which on the last group is a small part

MOST_TILES_PER_GROUP = 256
"""Most key tiles of these heads; with longer sequences there are fewer heads."""

MORE_TILES_OF_WAVE = 2 * TILES_OF_WAVE
"""Where a key tile has no more keys than a block has queries, so that CTAs of a head group keep a
distance of one block only."""

MOST_ALTERNATING = 1024  # key tiles up to which it pays there that head groups alternate

TILES_PREPROCESSED = 128
"""Key tiles of the head groups that the preprocess kernel does: work for other CTAs while some CTAs
of the backward kernel preprocess the next groups."""

QUERY_TILES_AT_ONCE = 512  # about as many as the preprocess kernel does at the same time

MOST_OF_TWO_GROUPS = 400
"""Most parts of key tiles that are in one or two head groups, longest tiles first, not in more.
With 224 to 320 parts of 1k keys that gained 4 to 20%, with 512 of 2k it lost 1%
(docs/experiments.md)."""

MOST_WAVES_FULL = 4
"""Waves of parts up to which the preprocess kernel does all queries where nothing bounds the keys
to the right. With two and four waves that gained 2 to 11%, with eight it lost 1%; under a causal
mask two waves gained up to 10%, three lost 1 to 3% (docs/experiments.md)."""

KEYS_OF_QUERY = 384
"""Keys that a query sees in the mean, from which on the backward kernel preprocesses queries. With
256 it lost 7 to 10%, with 512 it gained 4 to 6% (docs/experiments.md)."""

KEYS_UNZEROED, MORE_KEYS_UNZEROED = 512, 1024
"""Most keys of a sequence for which the dQ accumulator is not zeroed; the latter with a bound to
the right, where key tiles begin at different queries. Without zeros 512 keys gained 5 to 22% and
1024 up to 9%, at head size 256 nothing; longer ones lost up to 19% (docs/experiments.md)."""

KEYS_OF_ONE_DQ = 1024  # keys up to which a second dQ accumulator does not pay for its memory

WIDE = BackwardConfig(64, 128)
NARROW = BackwardConfig(64, 64, warpgroups_share_keys=True)
SPLIT = BackwardConfig(64, 128, k_stages=1, q_splits=2)
BACKWARD_TILINGS = (
    (64, 64, BackwardConfig(128, 128)),
    (64, 64, BackwardConfig(128, 128, stats_vector=2)),
    (192, 192, WIDE),
    (192, 192, replace(WIDE, k_stages=1)),
    (192, 192, replace(WIDE, stats_vector=2)),
    (192, 192, replace(WIDE, k_stages=1, stats_vector=2)),
    (192, 192, SPLIT),
    (192, 128, replace(SPLIT, stats_vector=2)),
    (128, 192, replace(SPLIT, stats_vector=2)),
    (192, 192, NARROW),
    (192, 192, replace(NARROW, k_stages=1)),
    (256, 256, replace(NARROW, do_stages=1)),
    (256, 256, replace(NARROW, do_stages=1, k_stages=1)),
)
"""Configs for head sizes of q and v up to these; the first one that fits is taken. Tiles have
FlashAttention-3's sizes where they fit; only some have been compared with others
(docs/experiments.md)."""


@functools.lru_cache(maxsize=REMEMBERED)
def choose_backward_config(spec: AttentionSpec) -> BackwardConfig:
    """The config for a spec."""
    for head_dim, head_dim_v, config in BACKWARD_TILINGS:
        if spec.head_dim <= head_dim and spec.head_dim_v <= head_dim_v and config.fits(spec):
            return config
    raise NotImplementedError(
        f"no tiling of the backward kernel has registers for {spec}; without dropout, a softcap or "
        "a mask of your own there is one"
    )


@functools.lru_cache(maxsize=REMEMBERED)
def backward_pass(
    spec: AttentionSpec,
    is_ordered: bool = False,
    splits: bool = False,
    is_packed: bool = False,
    has_used_q: bool = False,
    has_used_k: bool = False,
    writes_fp32: bool = False,
    accumulators: int = 1,
    has_lines: bool = False,
) -> BackwardPass:
    """The kernels of a pass, for any sizes; arguments as in `Backward`.
    Remembered: the object keeps its constants. Loaded kernels are looked up for each new size."""
    config, table = choose_backward_config(spec), None
    schedule = RaggedKeyTiles if is_packed else InOrderQueue
    kind = is_ordered, has_used_q, splits, writes_fp32, accumulators, has_lines
    if is_packed:
        table = TileTable(
            config.tile_m, config.tile_n, spec.mask.band, has_used_q, has_used_k, is_of_keys=True,
            has_lines=has_lines,
        )  # fmt: skip
    return BackwardPass(Backward(spec, config, schedule, *kind), table)


class BufferLayout(NamedTuple):
    """The places in the buffer that the kernels share, in 32-bit numbers."""

    dq_at: int  # the dQ accumulator; before it are the rows' statistics
    table_at: int  # the table of packed key tiles
    # counters_at, dq_flags_at: counters, and the flags of the accumulator.
    counters_at: int
    dq_flags_at: int
    # part_counters_at, parts_at: counters and sums of shared key tiles; None without.
    part_counters_at: int | None
    parts_at: int | None
    end: int  # numbers of the whole buffer

    @classmethod
    def of(
        cls, main: Backward, query_tiles: int, num_parts: int, head_groups: int, table_words=0
    ) -> "BufferLayout":
        """Lay out the buffer of a call of these sizes."""
        dq_at = query_tiles * main.config.tile_m * STATISTICS
        table_at = dq_at + main.accumulators * query_tiles * main.pieces.numbers
        counters_at = table_at + table_words
        dq_flags_at = counters_at + words_of_counters(head_groups)
        end = dq_flags_at + query_tiles * main.dq_flags
        if not main.splits:
            return cls(dq_at, table_at, counters_at, dq_flags_at, None, None, end)
        # For each part one of each warp.
        part_counters = num_parts * WARPS * MMA_GROUPS
        parts_at = part_counters + -(-end // QUAD) * QUAD
        end = parts_at + numbers_of_key_parts(num_parts, main.spec, main.config)
        flags_at = dq_flags_at + part_counters
        return cls(dq_at, table_at, counters_at, flags_at, dq_flags_at, parts_at, end)


def launch_of_pass(
    kernels: BackwardPass, layout: BufferLayout, shares: KeyShares, window: Window, **named: Any
) -> Launch:
    """Return the launch of all kernels; `named` are other fields of `PassArguments`."""
    named |= layout._asdict() | shares._asdict()
    del named["end"]
    return Launch.of(kernels, window, **named)


BACKWARD_PRODUCTS = 2.5
"""Matrix products of the backward pass over the forward pass's: five instead of two."""


@dataclass(frozen=True)
class BackwardPlan(PlanBase):
    """How gradients are computed, with at least one query and key."""

    problem: Problem
    gpu: Gpu = H200
    is_ordered: bool = False  # whether key tiles add to dQ in a fixed order
    shares: KeyShares = KeyShares()  # noqa: RUF009  # how CTAs share key tiles
    writes_fp32: bool = False  # whether dK and dV are fp32

    @classmethod
    def of(
        cls, problem: Problem, gpu: Gpu = H200, is_ordered: bool = False, writes_fp32: bool = False
    ) -> "BackwardPlan":
        whole = cls(problem, gpu, is_ordered, writes_fp32=writes_fp32)
        num_sms = gpu.num_sms
        heads = problem.num_heads_kv * problem.batch
        most_parts = most_parts_of(whole.num_key_tiles, num_sms)
        if most_parts < 2:
            return whole
        sequence = Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
        tiles = key_tiles_of(problem.spec, whole.config, sequence, is_ordered)
        mask, sizes = problem.spec.mask, (heads, problem.qhead_per_kvhead, num_sms)
        # Whether key tiles may have parts of lines: see `fa3.primitives.key_line`.
        if is_ordered and not mask.left and whole.key_tiles_of_head <= TILES_OF_LINE:
            fitting = heads_in_lines(problem.spec, problem.seqlen_q)
            # Two sets under a causal mask lost 1 to 2% (docs/experiments.md).
            most_sets = 1 if mask.right else MOST_LINES
            # Lines have the first keys first, a fixed order the last ones.
            lines = share_lines((tiles[::-1],), *sizes, fitting, most_sets)
            if lines is not None:
                return replace(whole, shares=lines)
        kind = most_parts, is_ordered, not whole.is_long, whole.waves
        return replace(whole, shares=choose_shares(tiles, *sizes, *kind))

    @property
    def kernels(self) -> BackwardPass:
        splits = self.writes_fp32 or self.shares.parts > 1
        return backward_pass(
            self.problem.spec, self.is_ordered, splits, writes_fp32=self.writes_fp32,
            accumulators=self.accumulators, has_lines=self.shares.line_length is not None,
        )  # fmt: skip

    @property
    def config(self) -> BackwardConfig:
        return choose_backward_config(self.problem.spec)

    @property
    def layout(self) -> BufferLayout:
        """The buffer that the kernels share."""
        slots = self.num_key_tiles * self.shares.parts if self.shares.parts > 1 else 0
        sizes = self.num_query_tiles, slots, self.num_head_groups
        return BufferLayout.of(self.kernels.main, *sizes)

    def launches(self) -> tuple[Launch, ...]:
        """Return one launch, whose entry has both kernels."""
        most_ctas = max(self.num_parts, convert_ctas(self.num_query_tiles))
        launch = launch_of_pass(
            self.kernels,
            self.layout,
            self.shares,
            self.problem.window,
            num_clusters=min(most_ctas, self.gpu.num_sms),
            heads_per_group=self.heads_per_group,
            groups_preprocessed=self.groups_preprocessed,
            dq_is_zeroed=self.dq_is_zeroed,
            alternates=self.alternates,
        )
        return (launch,)

    @property
    def all_kernels(self) -> list[Any]:
        return [self.kernels.preprocess, self.kernels.main]

    @property
    def flops(self) -> int:
        return int(BACKWARD_PRODUCTS * self.problem.flops)

    def sentences(self) -> dict[str, str]:
        config, shares = self.config, self.shares
        up_to = "up to " * (self.num_parts < self.num_key_tiles * shares.parts)
        parts = f", each shared by {up_to}{shares.parts} CTAs" * (shares.parts > 1)
        sums = "parts of dK and dV, " * (shares.parts > 1)
        groups = counted(self.num_head_groups, "head group")
        one_by_one = " one after another" * (self.num_head_groups > 1)
        heads = self.heads_per_group * self.query_heads_of_cta
        heads = min(heads, self.problem.num_heads_q * self.problem.batch)
        return {
            "CTA": f"A tile of {config.tile_n} keys of one key/value head, against blocks of "
            f"{config.tile_m} queries of {counted(self.query_heads_of_cta, 'query head')}; "
            f"{config.threads} threads.",
            "Grid": f"{counted(self.num_key_tiles, 'tile')} of keys{parts}, "
            f"{counted(self.num_query_tiles, 'tile')} of queries, on {self.gpu.num_sms} SMs.",
            "Order": f"{counted(heads, 'query head')} together, whose Q, dO "
            f"and dQ stay in L2; {groups}{one_by_one}.",
            "Memory": f"{quantity(FLOAT_BYTES * self.layout.end, 'B')} of device memory for the "
            f"fp32 dQ accumulator, {sums}and row statistics, besides dQ, dK and dV.",
            "Time": NOT_PREDICTED,
        }

    @property
    def num_query_tiles(self) -> int:
        problem = self.problem
        return -(-problem.seqlen_q // self.config.tile_m) * problem.num_heads_q * problem.batch

    @property
    def key_tiles_of_head(self) -> int:
        """Key tiles of a head."""
        return -(-self.problem.seqlen_k // self.config.tile_n)

    @property
    def num_key_tiles(self) -> int:
        return self.key_tiles_of_head * self.problem.num_heads_kv * self.problem.batch

    @property
    def num_parts(self) -> int:
        """Parts of all key tiles."""
        return self.heads * self.shares.parts_of_all(self.key_tiles_of_head)

    @property
    def groups_preprocessed(self) -> int:
        """Head groups that the preprocess kernel does."""
        if not fuses_preprocess(self.problem.seqlen_k, self.problem.window):
            return self.num_head_groups
        # CTAs come to the second of two groups at once, with the first one's shortest tiles.
        is_full = self.problem.window.right == NO_BOUND and not self.is_ordered
        if self.num_parts <= (MOST_WAVES_FULL if is_full else 2) * TILES_OF_WAVE:
            return self.num_head_groups
        tiles_per_group = self.heads_per_group * self.key_tiles_of_head
        return min(self.num_head_groups, -(-TILES_PREPROCESSED // tiles_per_group))

    @property
    def is_long(self) -> bool:
        """Whether sequences are so long that first stores cost more than zeros."""
        problem = self.problem
        return not self.is_ordered and problem.seqlen_k > most_keys_unzeroed(problem.window)

    @property
    def dq_is_zeroed(self) -> bool:
        """Whether the dQ accumulator starts with zeros.
        Where all parts run at once, first stores would hold up others: zeros gained 2 to 5%."""
        is_wave = self.num_parts <= TILES_OF_WAVE and self.num_query_tiles <= QUERY_TILES_AT_ONCE
        return not self.is_ordered and (self.is_long or is_wave)

    @property
    def is_small(self) -> bool:
        """Whether one or two head groups should have all parts.
        That is so for few parts; with a bound to the right not in a fixed order."""
        is_free = not self.is_ordered or self.problem.window.right == NO_BOUND
        return is_free and self.num_parts <= MOST_OF_TWO_GROUPS

    @property
    def heads_in_l2(self) -> int:
        """Heads with Q, dO and dQ that fit into L2 together."""
        return rows_in_l2(self.problem.spec) // self.problem.seqlen_q

    @property
    def accumulators(self) -> int:
        """dQ accumulators: two where handing on takes longer than a step.
        That is so where all parts of query blocks begin at once, or where key tiles are one short
        block apart, and sequences long enough to pay for the memory (docs/experiments.md)."""
        if (length := self.shares.line_length) is not None:
            return accumulators_of_line(length, self.key_tiles_of_head)
        is_slow = (
            self.shares.block_parts > 1
            or (self.config.warpgroups_share_keys and self.problem.seqlen_k > KEYS_OF_ONE_DQ)
            or (self.problem.window.right == NO_BOUND and self.is_small)
        )
        return 2 if self.is_ordered and is_slow else 1

    @property
    def has_long_key_tiles(self) -> bool:
        """Whether key tiles of an accumulator are over a query block apart."""
        return self.accumulators > 1 or self.config.tile_n > self.config.tile_m

    @property
    def waves(self) -> Waves | None:
        """What head groups are made for where they may alternate; else None."""
        if not self.kernels.main.may_alternate:
            return None
        wanted = TILES_OF_WAVE if self.has_long_key_tiles else MORE_TILES_OF_WAVE
        return Waves(wanted, self.heads_in_l2)

    @property
    def alternates(self) -> int | None:
        """As `PassArguments` has it."""
        if self.waves is None:
            return None
        return int(self.has_long_key_tiles or self.num_parts <= MOST_ALTERNATING)

    @property
    def query_heads_of_cta(self) -> int:
        """Query heads whose blocks a CTA walks."""
        return self.problem.qhead_per_kvhead // self.shares.head_parts

    @property
    def num_head_groups(self) -> int:
        return -(-self.heads // self.heads_per_group)

    @property
    def heads(self) -> int:
        """Key/value heads of all sequences; sets of query heads count as heads."""
        return self.problem.num_heads_kv * self.problem.batch * self.shares.head_parts

    @property
    def heads_per_group(self) -> int:
        """Heads of a head group: their Q, dO and dQ fit L2.
        So a head's tiles add to dQ at the same time. Sets of query heads count as heads. A few
        heads more or less make groups about equal, so that the last one is not small."""
        problem, waves = self.problem, self.waves
        if self.shares.line_length is not None:
            fitting = heads_in_lines(problem.spec, problem.seqlen_q)
            return lines_of_group(self.heads, self.query_heads_of_cta, fitting)
        tiles = self.key_tiles_of_head * self.shares.block_parts
        if waves is not None and self.alternates:
            return waves.heads_per_group(self.heads, tiles)
        if self.is_small:
            # Two head groups if L2 does not hold all, or if the preprocess kernel does all. Two
            # unequal groups would lose more than that gains.
            fits = problem.num_heads_q * problem.batch <= self.heads_in_l2
            is_short = TILES_OF_WAVE < self.num_parts <= 2 * TILES_OF_WAVE and not self.is_ordered
            is_halved = self.heads % 2 == 0 and (is_short or not fits)
            wanted = self.heads // (2 if is_halved else 1)
        elif problem.window.right == NO_BOUND:
            wanted = TILES_PER_GROUP * (2 if self.is_ordered else 1) // tiles
        else:
            has_many = self.num_parts >= ENOUGH_TILES and not self.is_ordered
            least = HEADS_PER_GROUP if has_many else MORE_HEADS_PER_GROUP
            wanted = max(TILES_PER_GROUP // tiles, min(least, MOST_TILES_PER_GROUP // tiles))
        groups = max(1, round(self.heads / max(1, min(self.heads_in_l2, wanted))))
        return -(-self.heads // groups)


def numbers_of_key_parts(num_parts: int, spec: AttentionSpec, config: BackwardConfig) -> int:
    """float32 numbers for sums of dK and dV of so many parts."""
    return num_parts * config.tile_n * (padded(spec.head_dim) + padded(spec.head_dim_v))


def key_tiles_of(
    spec: AttentionSpec, config: BackwardConfig, sequence: Sequence, is_ordered: bool
) -> tuple[KeyTileWork, ...]:
    """A head's key tiles, in the order in which CTAs take them."""
    tile_m, tile_n, band = config.tile_m, config.tile_n, spec.mask.band
    begins = range(0, sequence.seqlen_k, tile_n)
    visited = (band.query_blocks(begin, tile_n, tile_m, sequence) for begin in begins)
    counts = [max(0, blocks.end - blocks.begin) for blocks in visited]
    tiles = tuple(map(KeyTileWork, counts, reversed(range(len(counts)))))
    return tiles[::-1] if is_ordered else tiles


def words_of_counters(groups: int) -> int:
    """The backward kernel's counters for these head groups, a multiple of 4."""
    return -(-place_of_group_flag(groups, 0) // QUAD) * QUAD


def convert_ctas(tiles: int) -> int:
    """CTAs that convert dQ, with a query tile for each warp."""
    return -(-tiles // (WARPS * MMA_GROUPS))


def fuses_preprocess(seqlen_k: float, window: Window) -> bool:
    """Whether the backward kernel has time to preprocess some queries."""
    left, right = window
    keys = seqlen_k if right == NO_BOUND else seqlen_k / 2
    if left != NO_BOUND:
        keys = min(keys, left + 1 + max(right, 0))
    return keys >= KEYS_OF_QUERY


def most_keys_unzeroed(window: Window) -> int:
    """Most keys of a sequence whose dQ accumulator is not zeroed."""
    return KEYS_UNZEROED if window.right == NO_BOUND else MORE_KEYS_UNZEROED


def rows_in_l2(spec: AttentionSpec) -> int:
    """Queries with Q, dO and dQ that fit into L2 together."""
    return L2_BYTES // (spec.key_bytes + FLOAT_BYTES * padded(spec.head_dim))


def heads_in_lines(spec: AttentionSpec, seqlen_q: int) -> int:
    """Query heads of the lines that run at the same time.
    Under a causal mask all that fit into L2. Else parts are spread over whole lines: with 0.67 of
    L2 a fixed order kept 0.95 to 0.96 of the plain speed, with 0.88 0.90, with all of it 0.73 to
    0.76 (docs/experiments.md)."""
    return rows_in_l2(spec) // seqlen_q * (4 if spec.mask.right else 3) // 4
