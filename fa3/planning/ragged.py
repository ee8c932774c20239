"""How calls on packed sequences run: the plan holds for any lengths.

`fa3.calls.packed_calls` launches its kernels: one makes the table of tiles from the lengths, the
other is the forward kernel, which walks the table (`fa3.schedules.ragged`). Few tiles may be split
(`fa3.kernels.segment_table`), short sequences may share tiles (`fa3.schedules.joined`) or run in
the decode kernel: `fa3.planning.routes` decides.
"""

from dataclasses import dataclass, replace

from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardArguments, ForwardConfig
from fa3.kernels.joined_table import MultiSequenceTable, MultiSequenceTableArguments
from fa3.kernels.segment_table import (
    MOST_SEQUENCES,
    MOST_SPLIT_TILES,
    MOST_WORK,
    SegmentTable,
    SegmentTableArguments,
)
from fa3.kernels.tile_table import AMOUNTS, TileTable, TileTableArguments
from fa3.planning.gpu import Gpu
from fa3.planning.launch import Launch, template_of
from fa3.planning.tilings import general_tiling, halved_tiling, takes_fixed_reference
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import AttentionSpec, Window
from fa3.schedules.joined import MultiSequenceTiles
from fa3.schedules.marked import RecomputeRaggedTiles
from fa3.schedules.ragged import RECORD, TABLE_HEADER, RaggedTiles
from fa3.schedules.split import RaggedSegments
from fa3.schedules.stretches import BLOCKS_OF_TILE
from fa3.scores.intervals import Intervals
from fa3.scores.masks import Band, Intersection
from fa3.scores.scores import Alibi, Softcap

BITS_OF_AMOUNTS = AMOUNTS.bit_length() - 1
"""Bits of the amounts of work that the kernel tells apart."""


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """The kernels of a call on packed sequences."""

    spec: AttentionSpec  # what the forward kernel is compiled for, besides its tiling
    # has_used_q, has_used_k: whether the call has `seqused_q` and `seqused_k`.
    has_used_q: bool
    has_used_k: bool
    gpu: Gpu  # what the forward kernel may use of it
    # Where queries find their keys, as many as `seqused_k` says; None if they are packed.
    cache: CacheLayout | None = None

    @property
    def config(self) -> ForwardConfig:
        """The tiling for long sequences; it depends on the spec only, so no length compiles."""
        tiling = general_tiling if self.cache is None else halved_tiling
        return replace(tiling(self.spec), fixed_reference=takes_fixed_reference(self.spec))

    @property
    def finds_keys(self) -> bool:
        """Whether the forward kernel can load its blocks from the cache."""
        cache = self.cache
        if cache is None or cache.batch_indexed or cache.left_padded:
            return False
        return cache.box(self.config.tile_n) > 0

    def kernels(self, splits: bool = False) -> tuple[Forward, ...]:
        """The forward kernel for whole or for split tiles, then recompute if rows can fail."""
        config = self.config
        if splits and any(score.kind is Alibi for score in self.spec.scores):
            # The sums of a part far from the diagonal rightly vanish: it would look like a failure.
            config = config.recompute
        schedule = RaggedSegments if splits else RaggedTiles
        kernel = Forward(self.spec, config, schedule, cache=self.cache)
        if not config.fixed_reference:
            return (kernel,)
        return kernel, Forward(self.spec, config.recompute, RecomputeRaggedTiles, cache=self.cache)

    def launches(self, window: Window, splits: bool = False) -> list[Launch]:
        """Return the launches of a call: tables, the forward kernel, recompute."""
        named = {
            "window_left": window.left, "window_right": window.right, "num_ctas": self.gpu.num_sms,
        }  # fmt: skip
        table = Launch(self.tile_table(), template_of(TileTableArguments, **named))
        if splits:
            named["rows_of_section"] = self.rows_of_section
            template = template_of(SegmentTableArguments, **named)
            table = Launch(SegmentTable(self.tile_table()), template)
        return [table, *(self.launch_of(kernel, window) for kernel in self.kernels(splits))]

    def launch_of(self, kernel: Forward, window: Window) -> Launch:
        """Return the launch of a forward kernel."""
        template = template_of(
            ForwardArguments,
            window_left=window.left,
            window_right=window.right,
            heads_per_section=self.rows_of_section,
            overlaps_decode=0,
        )
        return Launch(kernel, template)

    @property
    def rows_of_section(self) -> int:
        """Rows of K and V of one head that fit in L2."""
        spec = self.spec
        row = (spec.head_dim + spec.head_dim_v) * spec.element.bytes
        return self.gpu.l2_bytes // row

    @property
    def band(self) -> Band:
        """The band of the mask."""
        mask = self.spec.mask
        return mask.band if isinstance(mask, Intersection) else mask

    def tile_table(self) -> TileTable:
        """The kernel that makes the table of tiles."""
        config = self.config
        return TileTable(
            config.tile_m, config.tile_n, self.band, self.has_used_q, self.has_used_k,
            has_cache=self.cache is not None,
        )  # fmt: skip

    @property
    def may_share(self) -> bool:
        """Whether sequences may share tiles: not where scores, a mask or dropout ask for a row's
        place in its sequence, nor in FP8, whose scales are by sequence."""
        spec = self.spec
        of_rows = spec.mask.templates or any(score.kind is not Softcap for score in spec.scores)
        return not (of_rows or spec.has_dropout or spec.is_fp8)

    @property
    def shared_spec(self) -> AttentionSpec:
        """What the kernel for shared tiles is compiled for: a table says what rows see."""
        return replace(self.spec, mask=Intervals())

    @property
    def shared_config(self) -> ForwardConfig:
        """The tiling of shared tiles: they are too short to gain by a fixed row max."""
        return halved_tiling(self.shared_spec)

    def num_shared_tiles(self, total_q: int) -> int:
        """Shared tiles of a head."""
        return -(-total_q // self.shared_config.tile_m)

    def shared_launches(self, window: Window) -> list[Launch]:
        """Return the launches of a call with shared tiles: their tables, the forward kernel, and
        recompute for rows that are not finite, sequence by sequence."""
        kind = self.spec.mask, self.has_used_q, self.has_used_k
        table = MultiSequenceTable(self.shared_config.tile_m, *kind)
        rows = {"window_left": window.left, "window_right": window.right}
        shared = Forward(self.shared_spec, self.shared_config, MultiSequenceTiles)
        again = Forward(self.spec, general_tiling(self.spec), RecomputeRaggedTiles)
        return [
            Launch(table, template_of(MultiSequenceTableArguments, **rows)),
            self.launch_of(shared, window),
            self.launch_of(again, window),
        ]

    @property
    def can_split(self) -> bool:
        """Whether tiles can be split: without functions of the user's and without dropout."""
        return not (self.spec.has_user_functions or self.spec.has_dropout)

    def may_split(self, batch: int, heads: int, total_q: int, most_keys: int) -> bool:
        """Whether tiles of sequences with at most `most_keys` are so few that a GPU may split
        them."""
        num_tiles = capacity_of_table(total_q, batch, self.config.tile_m) * heads
        work = num_tiles * (-(-most_keys // self.config.tile_n) + BLOCKS_OF_TILE)
        has_few = num_tiles <= self.gpu.num_sms <= MOST_SPLIT_TILES and batch <= MOST_SEQUENCES
        return self.can_split and has_few and work < MOST_WORK


def capacity_of_table(total_q: int, batch: int, tile_m: int) -> int:
    """The most records that the table of a call can need: a tile may be partly full only where a
    sequence ends."""
    return max(1, total_q // tile_m + batch)


def words_of_table(capacity: int) -> int:
    """int32 words of a table."""
    return TABLE_HEADER + RECORD * capacity


def shift_of_work(max_seqlen_k: int, tile_n: int) -> int:
    """The shift of `TileTableArguments`: with it all amounts of work can be told apart."""
    return max(0, (-(-max_seqlen_k // tile_n)).bit_length() - BITS_OF_AMOUNTS)
