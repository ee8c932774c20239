"""How the gradients of packed sequences are computed: the plan holds for any lengths.

`fa3.calls.varlen_backward` launches its kernels by one entry: one makes the table of key tiles from
the lengths, the others are those of the backward pass.
"""

import functools
from dataclasses import dataclass

from fa3.kernels.backward import Backward
from fa3.kernels.backward_begin import BackwardBegin
from fa3.kernels.backward_launch import BackwardConfig
from fa3.kernels.backward_pass import BackwardPass
from fa3.kernels.tile_table import TileTable
from fa3.planning.backward import begin_spec, blocks_of_key_tiles, choose_backward_config
from fa3.planning.key_split import KeyShares, choose_shares, may_have_parts, may_split
from fa3.primitives.query_tiles import STATISTICS, number_of_packed_tiles
from fa3.primitives.shared_memory import padded
from fa3.problem import REMEMBERED, AttentionSpec, Window
from fa3.schedules.ragged_keys import RaggedKeyTiles
from fa3.scores.masks import Intersection, Sequence

SECTIONS = 4
"""Sections of heads, so that a quarter of the queries is begun before the backward kernel."""

FEWEST_TILES = 512
"""Tiles of keys of a section: some four for each SM, so that no tile alone is much of its work."""


@dataclass(frozen=True, slots=True)
class RaggedBackwardPlan:
    """The kernels for the gradients of a call on packed sequences.

    Fields:
        spec: what the backward kernel is compiled for, besides its tiling.
        has_used_q, has_used_k: whether the call has `seqused_q` and `seqused_k`.
        is_ordered: whether the sums of dQ are added up in a fixed order.
        splits: whether CTAs share key tiles.
    """

    spec: AttentionSpec
    has_used_q: bool
    has_used_k: bool
    is_ordered: bool
    splits: bool = False

    @property
    def config(self) -> BackwardConfig:
        return choose_backward_config(self.spec)

    @property
    def entry(self) -> BackwardPass:
        """What launches the kernels."""
        spec, config, mask = self.spec, self.config, self.spec.mask
        band = mask.band if isinstance(mask, Intersection) else mask
        lengths = self.has_used_q, self.has_used_k
        main = Backward(spec, config, RaggedKeyTiles, self.is_ordered, self.has_used_q, self.splits)
        return BackwardPass(
            BackwardBegin(begin_spec(spec), config, True, self.has_used_q, main.has_words),
            main,
            TileTable(config.tile_m, config.tile_n, band, *lengths, is_of_keys=True),
        )

    @property
    def statistics_of_tile(self) -> int:
        """float32 that the rows' statistics take for a tile of queries."""
        return self.config.tile_m * STATISTICS

    @property
    def sums_of_tile(self) -> int:
        """float32 that the sums of dQ take for a tile of queries."""
        return self.config.pieces(padded(self.spec.head_dim)).numbers

    @property
    def words_of_tile(self) -> int:
        """int32 that the words of the sums take for a tile of queries."""
        return int(self.entry.main.has_words)


def shares_of_packed(
    spec: AttentionSpec,
    window: Window,
    total_q: int,
    total_k: int,
    num_sequences: int,
    longest_q: int,
    heads_q: int,
    heads_kv: int,
    is_ordered: bool,
    num_sms: int,
) -> KeyShares:
    """How CTAs share the key tiles of packed sequences, whose lengths the host does not know.

    It is chosen for as many sequences of the longest length as the rows hold: long sequences have
    most of the work. Lengths are rounded, so that steps of a training lead to few choices.
    """
    tile_n = config_for(spec).tile_n
    # Memory has room for so many, whatever the lengths are.
    num_tiles = number_of_packed_tiles(total_k, num_sequences, tile_n) * heads_kv
    if not may_split(num_tiles, num_sms):
        return KeyShares()
    longest_q = max(1, min(longest_q, total_q))
    sequences = max(1, total_q // longest_q)
    lengths = rounded_length(longest_q), rounded_length(max(1, total_k // sequences))
    heads = heads_kv * sequences, heads_q // heads_kv
    shares = shares_of_lengths(spec, Sequence(*lengths, window), *heads, is_ordered, num_sms)
    return shares if may_have_parts(num_tiles * shares.parts, num_sms) else KeyShares()


@functools.lru_cache(maxsize=REMEMBERED)
def shares_of_lengths(
    spec: AttentionSpec,
    sequence: Sequence,
    heads: int,
    group: int,
    is_ordered: bool,
    num_sms: int,
) -> KeyShares:
    """How CTAs share the key tiles of equal sequences; `heads` are of all of them."""
    blocks = blocks_of_key_tiles(spec, config_for(spec), sequence, is_ordered)
    return choose_shares(blocks, heads, group, num_sms, is_ordered)


config_for = functools.lru_cache(maxsize=REMEMBERED)(choose_backward_config)


def rounded_length(length: int) -> int:
    """A length to three binary digits, upwards."""
    unit = 1 << max(0, length.bit_length() - 3)
    return -(-length // unit) * unit


@functools.lru_cache(maxsize=REMEMBERED)
def divisors(number: int) -> tuple[int, ...]:
    """From 1 up."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def sections_of_heads(heads_kv: int, tiles: int, fitting: int) -> int:
    """How many sections of equally many key/value heads there are: so many that L2 holds what a
    section's tiles share, and `SECTIONS` if their tiles are not few then.

    Args:
        tiles: of keys, of a head.
        fitting: heads whose Q, dO and dQ of the longest sequence fit into L2 together.
    """
    counts = divisors(heads_kv)
    for_l2 = next(n for n in counts if n * fitting >= heads_kv or n == heads_kv)
    most = min(SECTIONS, max(1, tiles * heads_kv // FEWEST_TILES))
    return max(for_l2, *(n for n in counts if n <= most))
