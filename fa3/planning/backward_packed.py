"""Plans of the backward pass of packed sequences.

Only the GPU knows their lengths.
"""

import functools
import math

from fa3.kernels.backward import Backward, BackwardPass
from fa3.kernels.tile_table import shift_of_work, words_of_table
from fa3.planning.backward import (
    BufferLayout,
    backward_pass,
    choose_backward_config,
    convert_ctas,
    fuses_preprocess,
    heads_in_lines,
    key_tiles_of,
    launch_of_pass,
    most_keys_unzeroed,
    rows_in_l2,
)
from fa3.planning.key_split import (
    MORE_QUERY_HEADS,
    MOST_LINES,
    MOST_QUERY_HEADS,
    KeyShares,
    KeyTileWork,
    accumulators_of_line,
    choose_shares,
    divisors,
    lines_of_group,
    most_parts_of,
    share_lines,
)
from fa3.planning.launch import Launch
from fa3.planning.routes import PackedSizes
from fa3.primitives.key_line import TILES_OF_LINE
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.problem import REMEMBERED, AttentionSpec, Problem
from fa3.scores.masks import Sequence

HEAD_GROUPS = 4
"""Head groups of packed sequences, so that the preprocess kernel does a quarter of the queries."""

PACKED_L2 = 1.5
"""Times what L2 holds of Q, dO and dQ that a head group may have for key tiles to come by their
work. Four sequences of 1k were 1.18 times faster, with 1.4 times L2 0.99 to 1.05, with four or more
times 0.80 to 0.99 (docs/experiments.md)."""

PACKED_L2_SINGLE = 0.75
"""The same where CTAs have one query head each: so many head groups there are then. With 0.67 or
less instead of 1.33 times L2 six cells gained 1 to 24% (docs/experiments.md)."""

QUERIES_BY_WORK = 2048
"""Where CTAs have several query heads: queries of sequences of equal lengths from which on there
are up to `HEAD_GROUPS` head groups, so that key tiles come by their work. With a bound to the right
ten shapes gained 0 to 18%. With 1024 queries four lost 0 to 16%, and one gained 3%."""

ORDERED_L2, ORDERED_L2_DRIFTING = 3, 8
"""In a fixed order with a bound to the right, a head group has one part of so many of L2 for Q, dO
and dQ of the longest sequence. The latter with several query heads of a CTA: CTAs drift apart, so
that all of them count. 4 kept 0.90 instead of 0.54 of the plain speed with 64/8 heads, and 8 was 1
to 7% faster in 14 shapes. Not for one query head where key tiles are a block apart: they would wait
for one another, which cost up to 15% (docs/experiments.md)."""

LINES_IN_L2 = 2
"""Times what L2 holds of Q, dO and dQ of all sequences that lines which run at the same time may
have, with a bound to the right. With 1.3 times L2 they beat equal parts, with 2.7 times those were
18 and 22% faster (docs/experiments.md)."""

DIGITS = 3  # binary digits of what is rounded of packed sequences

FEWEST_TILES = 512
"""Key tiles of a head group of packed sequences: some four for each SM, so that no tile alone is
much of its work."""


def launch_of_packed(
    kernels: BackwardPass, problem: Problem, sizes: PackedSizes, shares: KeyShares, num_sms: int
) -> tuple[Launch, BufferLayout]:
    """Return the launch for packed sequences, and the kernels' shared buffer."""
    main, (num_sequences, heads_q, total_q, total_k, longest_q, _) = kernels.main, sizes
    config, heads_kv, window = main.config, problem.num_heads_kv, problem.window
    tiles, heads = sizes.tiles(config.tile_m), heads_kv * shares.head_parts
    # Lines of a head group run at the same time, so that there are not more groups than must be.
    tiles_of_head = 0 if main.has_lines else total_k // config.tile_n * shares.block_parts
    fitting = heads_in_l2(main, sizes, heads_q // heads)
    groups = head_groups_of_packed(heads, tiles_of_head, fitting)
    times_l2 = total_q * heads_q / rows_in_l2(main.spec)
    has_several = main.spec.mask.right and heads < heads_q and not main.is_ordered
    if has_several and 1 < num_sequences == total_q / max(QUERIES_BY_WORK, longest_q):
        fits = (n for n in divisors(heads) if times_l2 <= n * PACKED_L2)
        groups = max(groups, next((n for n in fits if n <= HEAD_GROUPS), 1))
    is_by_work = not main.is_ordered and times_l2 <= groups * PACKED_L2
    if is_by_work and num_sequences > 1 and heads == heads_q:
        fits = (n for n in divisors(heads) if times_l2 <= n * PACKED_L2_SINGLE)
        groups = max(groups, next(fits, heads))
    is_fused = fuses_preprocess(total_k / max(1, num_sequences), window)
    tiles_of_keys = number_of_packed_tiles(total_k, num_sequences, config.tile_n)
    capacity = tiles_of_keys * shares.block_parts
    most_ctas = max(capacity * heads, convert_ctas(tiles))
    num_parts = heads_kv * shares.parts * tiles_of_keys if shares.parts > 1 else 0
    layout = BufferLayout.of(main, tiles, num_parts, groups, words_of_table(capacity))
    launch = launch_of_pass(
        kernels,
        layout,
        shares,
        window,
        num_clusters=min(most_ctas, num_sms),
        heads_per_group=heads // groups,
        groups_preprocessed=1 if is_fused else groups,
        dq_is_zeroed=not main.is_ordered,
        capacity=capacity,
        shift=shift_of_work(longest_q, config.tile_m),
        is_by_work=is_by_work,
    )
    return launch, layout


def shares_of_packed(
    problem: Problem, sizes: PackedSizes, is_ordered: bool, num_sms: int
) -> KeyShares:
    """How CTAs share the key tiles of packed sequences.
    One sequence is taken to be the longest, and all others to be equally long. Lengths are rounded,
    so that steps of a training lead to few choices."""
    num_sequences, heads_q, total_q, total_k, longest_q, _ = sizes
    spec, heads_kv = problem.spec, problem.num_heads_kv
    # Memory has room for so many, whatever the lengths are.
    config = choose_backward_config(spec)
    num_tiles = number_of_packed_tiles(total_k, num_sequences, config.tile_n) * heads_kv
    most_parts = most_parts_of(num_tiles, num_sms, is_ordered)
    if most_parts < 2:
        return KeyShares()
    keys_of_query, others = total_k / max(1, total_q), num_sequences - 1

    def sequence(queries: float) -> Sequence:
        keys = queries * keys_of_query
        return Sequence(rounded_length(int(queries)), rounded_length(int(keys)), problem.window)

    sequences = sequence(longest_q), sequence((total_q - longest_q) / max(1, others))
    counts = 1, rounded_length(others) if others else 0
    heads = heads_kv, heads_q // heads_kv
    zeros = max(0, most_parts.bit_length() - DIGITS)
    most_parts = most_parts >> zeros << zeros
    # With other lengths than planned for, the last parts of lines would end late.
    are_equal, blocks = num_sequences * longest_q == total_q, None
    has_lanes = total_k <= TILES_OF_LINE * config.tile_n
    if is_ordered and not spec.mask.left and has_lanes and are_equal:
        blocks = rounded_length(-(-total_q // config.tile_m))
    rest = *heads, is_ordered, num_sms, most_parts, blocks
    return shares_of_lengths(spec, sequences, counts, *rest)


def kernels_of_packed(
    spec: AttentionSpec,
    is_ordered: bool,
    writes_fp32: bool,
    sizes: PackedSizes,
    shares: KeyShares,
    has_used_q: bool = False,  # whether there is `seqused_q`
    has_used_k: bool = False,
) -> BackwardPass:
    """The kernels of packed sequences."""
    kind = spec, is_ordered, writes_fp32 or shares.parts > 1, True, has_used_q, has_used_k
    accumulators = 1
    if shares.line_length is not None:
        longest_k = sizes.max_seqlen_q * sizes.total_k // sizes.total_q
        num_tiles = -(-longest_k // choose_backward_config(spec).tile_n)
        accumulators = accumulators_of_line(shares.line_length, num_tiles)
    return backward_pass(*kind, writes_fp32, accumulators, shares.line_length is not None)


@functools.lru_cache(maxsize=REMEMBERED)
def shares_of_lengths(
    spec: AttentionSpec,
    sequences: tuple[Sequence, ...],
    counts: tuple[int, ...],  # how many there are of each
    heads_kv: int,
    group: int,
    is_ordered: bool,
    num_sms: int,
    most_parts: int,  # of a key tile
    blocks: int | None,  # query blocks of a key tile at most, where it may have parts of lines
) -> KeyShares:
    """How CTAs share packed sequences' key tiles.
    In parts of lines, or those with most blocks first."""
    config, tiles = choose_backward_config(spec), list[KeyTileWork]()
    if blocks is not None:
        lines = list[tuple[KeyTileWork, ...]]()
        for one, count in zip(sequences, counts, strict=True):
            lines += count * [key_tiles_of(spec, config, one, False)]
        limits = heads_in_lines(spec, sequences[0].seqlen_q), MOST_LINES, (blocks, most_parts)
        shares = share_lines(tuple(lines), heads_kv, group, num_sms, *limits)
        if shares is not None:
            heads = group // shares.head_parts
            at_once = heads * lines_of_group(heads_kv * shares.head_parts, heads, limits[0])
            queries = sum(n * one.seqlen_q for n, one in zip(counts, sequences, strict=True))
            if not spec.mask.right or at_once * queries <= LINES_IN_L2 * rows_in_l2(spec):
                return shares
    for one, count in zip(sequences, counts, strict=True):
        tiles += count * key_tiles_of(spec, config, one, is_ordered)
    if not is_ordered:
        tiles.sort(reverse=True)
    waits = is_ordered or sequences[0].seqlen_k <= most_keys_unzeroed(sequences[0].window)
    sizes = tuple(tiles), heads_kv, group, num_sms, most_parts
    most_heads = MOST_QUERY_HEADS if is_ordered else MORE_QUERY_HEADS
    return choose_shares(
        *sizes, is_ordered, waits, most_heads=most_heads if spec.mask.right else math.inf
    )


def rounded_length(length: int) -> int:
    """A length to `DIGITS`, upwards, and at least 1."""
    unit = 1 << max(0, length.bit_length() - DIGITS)
    return max(1, -(-length // unit) * unit)


def heads_in_l2(main: Backward, sizes: PackedSizes, query_heads: int) -> int:
    """Heads with Q, dO and dQ of the longest sequence in L2.
    Of a head a CTA has `query_heads`, which it takes one after another."""
    spec, config, longest = main.spec, main.config, max(1, sizes.max_seqlen_q)
    if main.has_lines:
        return heads_in_lines(spec, longest) // query_heads
    fitting = rows_in_l2(spec) // longest
    if main.is_ordered and spec.mask.right:
        if query_heads > 1:
            fitting //= ORDERED_L2_DRIFTING * query_heads
        elif config.tile_n > config.tile_m:
            fitting //= ORDERED_L2
    return fitting


def head_groups_of_packed(heads_kv: int, tiles: int, fitting: int) -> int:
    """Return the number of head groups, with equally many key/value heads each.
    So many that L2 holds what the tiles of a group share, and up to `HEAD_GROUPS` if each has many
    tiles. `fitting` are the heads with Q, dO and dQ of the longest sequence that fit into L2."""
    counts = divisors(heads_kv)
    for_l2 = next(n for n in counts if n * fitting >= heads_kv or n == heads_kv)
    most = min(HEAD_GROUPS, max(1, tiles * heads_kv // FEWEST_TILES))
    return max(for_l2, *(n for n in counts if n <= most))
