"""Which kernels serve a call, and why: the only place that decides.

`choose_route` maps a `Signature`, which repeated calls share, and the `PackedSizes` of a call to a
`Route`. It looks at no tensor: a call on the CPU, on a GPU or in `fa3 plan` has the same route. Of
the `RULES` for a kind of calls the first one that holds counts; docs/kernels.md has them as tables.

A tile of the forward kernel has 128 queries of one head. A tile of the decode kernel has 64 rows of
all heads that share keys. It splits the keys so that all SMs read equally many. A sequence with few
queries is therefore the decode kernel's. Lengths are known on the GPU only, so both kernels are
launched at the same time, and each leaves out the sequences of the other: the decode kernel those
with more than `Route.most_queries` (`fa3.schedules.sequences.Cached`), the tile table the rest
(`fa3.kernels.tile_table`). The table says how many CTAs the decode kernel gets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fa3.kernels.decode_launch import TILE_N
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import FEWEST_ROWS, ForwardConfig
from fa3.kernels.segment_table import (
    MOST_SEQUENCES,
    MOST_SPLIT_CTAS,
    MOST_SPLIT_TILES,
    MOST_WORK,
    SegmentTable,
)
from fa3.kernels.shared_tile_table import MultiSequenceTable
from fa3.kernels.tile_table import TileTable
from fa3.planning.costs import Gpu, has_mask
from fa3.planning.decode import DecodePlan
from fa3.planning.launch import OF_FORWARD, FromCall, Launch
from fa3.planning.tilings import (
    converting_tiling,
    general_tiling,
    halved_tiling,
    takes_fixed_row_max,
)
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.wgmma import ROWS
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.schedules.ragged import RaggedTiles
from fa3.schedules.recompute import RecomputeRaggedTiles
from fa3.schedules.shared_tiles import MultiSequenceTiles
from fa3.schedules.split import RaggedSegments
from fa3.schedules.stretches import BLOCKS_OF_TILE
from fa3.scores.masks import Intervals
from fa3.scores.scores import Alibi, Softcap

DENSE, PACKED, CACHE = "dense", "packed", "cache"  # kinds of calls: by their keys

NOTHING, ZEROS, FORWARD, DECODE, SHARED, BOTH, SPLIT, BOTH_SPLIT = (
    "none", "none; the output is 0", "forward", "decode", "shared tiles", "decode and forward",
    "tiles split on the GPU", "decode and tiles split on the GPU",
)  # fmt: skip
"""Names of routes. SHARED is the forward kernel on tiles that sequences share, SPLIT the forward
kernel on tiles that are split on the GPU."""

MOST_OF_DECODE = ROWS
"""Queries of a sequence up to which tiles of the forward kernel are half empty: the decode kernel
takes less time for them."""

MOST_SHORT_ROWS = 2 * ROWS
"""Rows of a key/value head up to which a sequence is short: with more the keys are read, and
multiplied, by more than two tiles of one warpgroup each."""

FEWEST_EARLIER_KEYS = 4096
"""Keys beyond one for each query from which on a call with long sequences has two kernels: fewer
take the forward kernel no longer than the launch of another one. Also the keys that a sequence must
have room for where the GPU splits tiles: of fewer that does not pay."""

IDLE_SHARE = 0.5
"""Up to this share of SMs with a tile of the forward kernel, the others count as idle. It holds
where the forward kernel cannot split tiles, or tiles are half empty. The decode kernel takes 1.6
times as long for a query and a key, but splits the keys."""

MOST_SPLIT_ROUNDS, FEWEST_KEYS_OF_ROUNDS = 2, 1 << 14
"""Calls on a cache: full tiles for each SM up to which the GPU may split tiles. With more than one,
a sequence must have room for so many keys. Others take whole tiles as CTAs become free: 1024
queries on 4k keys with 31 sequences of 2k 186 us on an H100, 193 where the GPU splits; 1024 on 32k
with 31 of 4k 1015, and 787 where it does."""

LITTLE_WORK = 1 << 24
"""Scores of a call on a cache: with fewer, the decode kernel takes less time. On an H100, with 8/1
heads of 128 and 4096 keys, it took 16.5 us for 128 queries and the forward kernel 24.8; for 512
queries 29.3 and 26.6. With 32/8 heads, 512 queries on 1024 keys took 34.0 and 19.5."""

PACKED_SHARE = 0.4
"""Share of L2's bytes for K and V of a head group of packed sequences without a mask. There no
longest tile must be early. 4 x 4k gained 3%, with 0.2 another 0.4%; but 16 x 1k then lost 1.4%."""

MOST_SHARED_TILE_KEYS = 256
"""Keys of a sequence up to which sequences share tiles: all rows of a tile wait for all of them."""

MOST_SHARED_TILE_ROWS = 1 << 28
"""Rows of q up to which sequences share tiles: 32 bits count the words of their records."""


@dataclass(frozen=True)
class Signature:
    """What a route depends on besides lengths: repeated calls share it."""

    call: str  # DENSE, PACKED or CACHE
    spec: AttentionSpec
    window: Window
    heads_q: int
    heads_kv: int
    gpu: Gpu  # what kernels may use of it, without the `sm_margin` that is reserved
    sm_margin: int = 0
    cache: CacheLayout | None = None  # how the keys of a cache are laid out
    capacity: int = TILE_N  # keys that a sequence has room for in a cache
    batch: int = 1  # sequences, or 1 where 32 bits count the key blocks of all of them
    has_packed_queries: bool = True  # whether queries are packed; always where keys are
    has_equal_queries: bool = False  # whether packed q and out have a batch, as dense ones have
    # has_used_q, has_used_k: whether not all of packed rows count.
    has_used_q: bool = False
    has_used_k: bool = False
    # Whether a gradient is wanted. Then no keys are split, so that the bits of a sequence do not
    # depend on the others.
    has_gradients: bool = False
    is_planned: bool = False  # whether the caller gives a plan or a schedule
    # num_splits, batch_invariant, pack_gqa: of the call.
    num_splits: int = 0
    batch_invariant: bool = False
    pack_gqa: bool | None = None
    has_fp8_q: bool = False  # whether queries are FP8, as the cache is
    appends: bool = False  # whether a kernel appends to the cache before; see `DecodePlan`

    @classmethod
    def of(cls, call: str, problem: Problem, gpu: Gpu, **kinds: Any) -> "Signature":
        """The signature of calls like a problem; `kinds` are other fields."""
        heads = problem.num_heads_q, problem.num_heads_kv
        return cls(call, problem.spec, problem.window, *heads, gpu, **kinds)

    @cached_property
    def short_limit(self) -> int:
        """The most queries of a short sequence; at least 1.
        Without heads to pack, more than one tile of rows is as much work for either kernel."""
        rows_of_query = self.heads_q // max(1, self.heads_kv)
        return max(1, min(ROWS, MOST_SHORT_ROWS // max(1, rows_of_query)))

    @cached_property
    def most_queries_of_few(self) -> int:
        """No sequence of a call with few tiles has more queries."""
        few = int(IDLE_SHARE * self.gpu.num_sms) // self.heads_q * FEWEST_ROWS
        return max(1 + self.short_limit, few)  # FP8 caches have another kernel for few rows

    @cached_property
    def may_decode(self) -> bool:
        """Whether the decode kernel may have sequences, whatever the lengths are."""
        spec = self.spec
        if self.call == CACHE:
            return True
        is_plain = not (spec.has_user_functions or spec.has_dropout or self.has_gradients)
        is_plain = is_plain and spec.other_out is None
        return self.heads_q > 0 and is_plain and (self.call == DENSE or not self.sm_margin)

    @cached_property
    def may_have_both(self) -> bool:
        """Whether both kernels may have sequences. They would take reserved SMs."""
        if self.call != CACHE:
            return self.call == PACKED and self.may_decode
        is_free = self.may_split and not self.sm_margin
        return self.has_packed_queries and is_free and self.finds_keys

    @cached_property
    def shared_tiling(self) -> ForwardConfig | None:
        """The tiling of shared tiles, with an online softmax; or None.
        None if they cannot: where scores, a mask or dropout ask for a row's place in its sequence,
        in FP8, whose scales are by sequence, and with out in float32."""
        spec = self.spec
        has_rows = spec.mask.templates or any(score.kind is not Softcap for score in spec.scores)
        may_share = self.call == PACKED and not (has_rows or spec.has_dropout or spec.other_out)
        return halved_tiling(self.shared_spec) if may_share else None

    def decode_plan(self, most_queries: int, overlaps_forward: bool) -> DecodePlan:
        """Return the plan for this many queries, at most if packed."""
        heads = self.heads_kv, self.heads_q // self.heads_kv
        problem = Problem(self.spec, self.batch, most_queries, self.capacity, *heads, self.window)
        layout = self.cache or CacheLayout(is_packed=True, has_seqlens=self.has_used_k)
        # With packed keys these options say how the forward kernel works.
        options = (self.num_splits, self.batch_invariant) if self.cache else (0, False)
        return DecodePlan.of(
            problem, self.gpu, layout, *options, is_packed=self.has_packed_queries,
            has_used_q=self.has_used_q, overlaps_forward=overlaps_forward,
            has_fp8_q=self.has_fp8_q, appends=self.appends,
        )  # fmt: skip

    @property
    def names(self) -> list[str]:
        """The routes with kernels that packed keys of any lengths may have."""
        shared = [SHARED] * (self.shared_tiling is not None)
        split = [SPLIT] * (self.may_split and self.can_split)
        return [FORWARD, *shared, *split, *[DECODE, BOTH] * self.may_decode]

    @property
    def may_split(self) -> bool:
        """Whether tiles may be split: then bits depend on the whole call."""
        return not (self.has_gradients or self.num_splits or self.batch_invariant)

    # ---------------------------------------------------- the forward kernel on packed queries

    @cached_property
    def config(self) -> ForwardConfig:
        """The tiling for long sequences; it depends on the spec only."""
        tiling = general_tiling
        if self.cache is not None:
            tiling = converting_tiling if self.cache.is_fp8 else halved_tiling
        # On FP8 caches, whose P is in fp16, a fixed row max gains nothing.
        is_fixed = takes_fixed_row_max(self.spec) and not (self.cache and self.cache.is_fp8)
        return replace(tiling(self.spec), fixed_row_max=is_fixed)

    @property
    def finds_keys(self) -> bool:
        """Whether the forward kernel can load its blocks from the cache."""
        cache = self.cache
        if cache is None or cache.batch_indexed or cache.left_padded:
            return False
        return cache.box(self.config.tile_n) > 0

    @property
    def can_split(self) -> bool:
        """Whether tiles can be split: without users' functions and without dropout."""
        return not (self.spec.has_user_functions or self.spec.has_dropout)

    @property
    def shared_spec(self) -> AttentionSpec:
        """The spec of the kernel for shared tiles, whose table holds masks."""
        return replace(self.spec, mask=Intervals())

    def launches(self, splits: bool = False, overlaps_decode: bool = False) -> list[Launch]:
        """Return the launches of a call: tables, forward, perhaps recompute.
        `overlaps_decode` says whether the decode kernel runs at the same time."""
        config, window = self.config, self.window
        kernel = TileTable(
            config.tile_m, config.tile_n, self.spec.mask.band, self.has_used_q, self.has_used_k,
            has_cache=self.cache is not None,
        )  # fmt: skip
        table = Launch.of(kernel, window, num_ctas=self.gpu.num_sms)
        values: dict[str, Any] = {"schedule_state": FromCall("table")}
        if splits:
            named = {"num_ctas": self.gpu.num_sms, "rows_of_group": self.rows_of_group}
            table = Launch.of(SegmentTable(kernel), window, **named)
            values = {"schedule_state": FromCall("segments"), "num_slots": FromCall("num_slots")}
        if splits and any(score.kind is Alibi for score in self.spec.scores):
            # The sums of a part far from the diagonal rightly vanish: it would look like a failure.
            config = config.recompute
        schedule = RaggedSegments if splits else RaggedTiles
        rest: dict[str, Any] = {"cache": self.cache, "has_equal_queries": self.has_equal_queries}
        main = Forward(self.spec, config, schedule, **rest)
        launches = [table, self.launch_of(main, overlaps_decode=int(overlaps_decode), **values)]
        if config.fixed_row_max:
            kind = self.spec, config.recompute, RecomputeRaggedTiles
            launches.append(self.recompute_of(Forward(*kind, **rest)))
        return launches

    def shared_launches(self) -> list[Launch]:
        """Return the launches of a call with shared tiles.
        Tables, the forward kernel, and recompute for rows that are not finite, by sequence."""
        config = self.shared_tiling
        assert config is not None
        kind = self.spec.mask, self.has_used_q, self.has_used_k
        table = MultiSequenceTable(config.tile_m, *kind)
        shared = Forward(self.shared_spec, config, MultiSequenceTiles)
        again = Forward(self.spec, general_tiling(self.spec), RecomputeRaggedTiles)
        # Softcaps have no tensors, so the mask's comes first.
        values: dict[str, Any] = {
            "schedule_state": FromCall("tiles"),
            "modifiers": FromCall("shared_modifiers"),
        }
        return [
            Launch.of(table, self.window),
            self.launch_of(shared, **values),
            self.recompute_of(again),
        ]

    def launch_of(self, kernel: Forward, overlaps_decode: int = 0, **named: Any) -> Launch:
        """Return a launch of the forward kernel."""
        named |= {"heads_per_group": self.rows_of_group, "overlaps_decode": overlaps_decode}
        return Launch.of(kernel, self.window, **OF_FORWARD, **named)

    def recompute_of(self, kernel: Forward) -> Launch:
        """Return the launch of recompute."""
        clusters = FromCall("num_recompute")
        return self.launch_of(kernel, schedule_state=FromCall("marks"), num_clusters=clusters)

    @property
    def rows_of_group(self) -> int:
        """Rows of K and V of one head that fit in L2."""
        share = 1.0 if self.cache or has_mask(self.spec) else PACKED_SHARE
        return int(share * self.gpu.l2_bytes) // self.spec.key_bytes


class PackedSizes(NamedTuple):
    """What the host knows of the lengths of a call's sequences."""

    batch: int  # number of sequences
    heads: int  # query heads
    # total_q, total_k: rows of q and of k.
    total_q: int
    total_k: int
    # max_seqlen_q, max_seqlen_k: no sequence has more queries or keys; a cache has room for
    # `max_seqlen_k`.
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, problem: Problem) -> "PackedSizes":
        """The sizes of sequences that are all equally long."""
        batch, longest_q, longest_k = problem.batch, problem.seqlen_q, problem.seqlen_k
        rows = batch * longest_q, batch * longest_k
        return cls(batch, problem.num_heads_q, *rows, longest_q, longest_k)

    def tiles(self, tile_m: int) -> int:
        """The most tiles with so many rows of one sequence."""
        return number_of_packed_tiles(self.total_q, self.batch, tile_m) * self.heads


class Route(NamedTuple):
    """Which kernels serve a call."""

    name: str  # one of the names above
    most_queries: int  # queries of a sequence that is the decode kernel's, at most; 0 if none is
    reason: str  # the rule that holds, as in docs/kernels.md

    @property
    def has_forward(self) -> bool:
        """Whether sequences may be the forward kernel's, in tiles of one sequence."""
        return self.name in (FORWARD, BOTH, SPLIT, BOTH_SPLIT)

    def explain(self) -> str:
        """Which kernels serve which sequences, in a sentence."""
        return SENTENCES[self.name].format(self.most_queries)


SENTENCES = {
    NOTHING: "No kernel runs.",
    ZEROS: "No kernel runs; the output is 0.",
    FORWARD: "The forward kernel attends; each tile has rows of one sequence.",
    DECODE: "The decode kernel attends.",
    SHARED: "Sequences are short, so several share a tile of the forward kernel.",
    BOTH: "Sequences of up to {} queries are the decode kernel's, others the forward kernel's. "
    "Both run at the same time.",
    SPLIT: "The forward kernel attends; the GPU splits its tiles where SMs would be idle.",
    BOTH_SPLIT: "Sequences of up to {} queries are the decode kernel's, others the forward "
    "kernel's, where the GPU splits tiles if SMs would be idle. Both run at the same time.",
}


def choose_route(signature: Signature, sizes: PackedSizes, decode_is_faster: bool = False) -> Route:
    """Choose the kernels of a call: by the first rule that holds."""
    for name, reason, holds in RULES[signature.call]:
        most_queries = holds(signature, sizes)
        if most_queries and (reason != PREDICTED or decode_is_faster):
            return Route(name, most_queries if name in (DECODE, BOTH, BOTH_SPLIT) else 0, reason)
    raise AssertionError("the last rule always holds")


def choose_dense(problem: Problem, gpu: Gpu, decode_is_faster: bool = False, **kinds: Any) -> Route:
    """Choose the kernels of a dense call.
    `kinds` are other fields of its `Signature`."""
    signature = Signature.of(DENSE, problem, gpu, **kinds)
    return choose_route(signature, PackedSizes.of(problem), decode_is_faster)


def launches_of_route(signature: Signature, name: str, most_queries: int = 1) -> list[Launch]:
    """Return the launches of a route of packed queries.
    `most_queries` only decide which kernel serves an FP8 cache, and whether combine merges."""
    if name in (NOTHING, ZEROS):
        return []
    if name == SHARED:
        return signature.shared_launches()
    decode: tuple[Launch, ...] = ()
    if name in (DECODE, BOTH, BOTH_SPLIT):
        decode = signature.decode_plan(most_queries, name != DECODE).launches()
    if name == DECODE:
        return list(decode)
    table, main, *recompute = signature.launches(name in (SPLIT, BOTH_SPLIT), bool(decode))
    # The forward kernel takes the SMs that the decode kernel leaves.
    return [table, *decode[:1], main, *decode[1:], *recompute]


# --------------------------------------------------------------------- what rules ask for


def has_no_query(_: Signature, sizes: PackedSizes) -> bool:
    return 0 in (sizes.batch, sizes.heads, sizes.total_q, sizes.max_seqlen_q)


def has_no_key(_: Signature, sizes: PackedSizes) -> bool:
    return sizes.max_seqlen_k == 0


def suits_shared_tiles(signature: Signature, sizes: PackedSizes) -> bool:
    """Whether shared tiles are likely to take less time."""
    config, num_sms = signature.shared_tiling, signature.gpu.num_sms
    batch, heads, total_q, total_k, longest_q, longest_k = sizes
    if (
        config is None
        or longest_q > config.tile_m // 2
        or longest_k > MOST_SHARED_TILE_KEYS
        or total_q > MOST_SHARED_TILE_ROWS
        # Each tile would have an SM to itself, and read the keys of one sequence only.
        or batch * heads <= num_sms
    ):
        return False

    def steps(tiles: int, blocks: int) -> int:
        return -(-tiles // num_sms) * (BLOCKS_OF_TILE + blocks)

    # The sequences at both ends of a tile have rows in another one too.
    keys_of_tile = total_k * config.tile_m // total_q + longest_k
    shared = steps(-(-total_q // config.tile_m) * heads, -(-keys_of_tile // config.tile_n))
    return shared < steps(batch * heads, -(-total_k // (batch * config.tile_n)))


def if_counted(signature: Signature, sizes: PackedSizes, most_queries: int) -> int:
    """`most_queries`, if 32 bits count the key blocks of all tiles."""
    rows = most_queries * (signature.heads_q // signature.heads_kv)
    tiles = sizes.batch * signature.heads_kv * -(-rows // ROWS)
    return most_queries if tiles * -(-sizes.max_seqlen_k // TILE_N) <= LARGEST else 0


def queries_if_all_are_short(signature: Signature, sizes: PackedSizes) -> int:
    longest = sizes.max_seqlen_q
    is_short = longest <= signature.short_limit and sizes.total_k > sizes.total_q
    return if_counted(signature, sizes, longest) if signature.may_decode and is_short else 0


def has_keys_to_split(signature: Signature, sizes: PackedSizes) -> bool:
    longest_k, left = sizes.max_seqlen_k, signature.window.left
    if left != NO_BOUND and signature.call == PACKED:
        # All other keys are hidden from all queries of a sequence.
        longest_k = min(longest_k, left + sizes.max_seqlen_q)
    return longest_k >= FEWEST_EARLIER_KEYS


def splits_on_gpu(signature: Signature, sizes: PackedSizes) -> bool:
    """Whether the GPU should split tiles of the forward kernel.
    Of a cache, sequences that decode have no tiles, so tiles count as if all of them were full."""
    batch, heads, total_q, total_k, longest_q, longest_k = sizes
    config, num_sms = signature.config, signature.gpu.num_sms
    num_tiles = sizes.tiles(config.tile_m)
    has_few, most_keys = num_tiles <= num_sms, total_k
    if signature.call == CACHE:
        rounds = MOST_SPLIT_ROUNDS if longest_k >= FEWEST_KEYS_OF_ROUNDS else 1
        has_few = total_q // config.tile_m * heads <= rounds * num_sms
        has_few, most_keys = has_few and num_tiles <= MOST_SPLIT_TILES, longest_k
    work = num_tiles * (-(-most_keys // config.tile_n) + BLOCKS_OF_TILE)
    has_room = batch <= MOST_SEQUENCES and num_sms <= MOST_SPLIT_CTAS and work < MOST_WORK
    may_split = signature.may_split and signature.can_split and longest_q > MOST_OF_DECODE
    return may_split and has_few and has_room and has_keys_to_split(signature, sizes)


def queries_if_short_and_split(signature: Signature, sizes: PackedSizes) -> int:
    if not splits_on_gpu(signature, sizes):
        return 0
    if signature.call == PACKED:
        return queries_if_some_are_short(signature, sizes)
    return 0 if are_equal(signature, sizes) else signature.short_limit


def queries_if_few_tiles(signature: Signature, sizes: PackedSizes) -> int:
    """The most queries that decode serves if forward would leave SMs idle.
    Keys must be enough to split. Not `max_seqlen_q`: calls of all lengths have one plan."""
    may_split = signature.may_decode and not signature.num_splits
    is_few = may_split and sizes.tiles(FEWEST_ROWS) <= IDLE_SHARE * signature.gpu.num_sms
    if not (is_few and has_keys_to_split(signature, sizes)):
        return 0
    return if_counted(signature, sizes, signature.most_queries_of_few)


def are_equal(signature: Signature, sizes: PackedSizes) -> bool:
    """Whether all sequences have `max_seqlen_q` queries, as far as the host knows.
    Padding may add up to the same rows. Then the result is right, but may take longer."""
    return sizes.total_q == sizes.batch * sizes.max_seqlen_q and not signature.has_used_q


def is_little_work(signature: Signature, sizes: PackedSizes) -> bool:
    """Whether the tile table costs more than the forward kernel saves."""
    work = sizes.total_q * sizes.heads * sizes.max_seqlen_k
    return are_equal(signature, sizes) and work < LITTLE_WORK


def queries_if_some_are_short(signature: Signature, sizes: PackedSizes) -> int:
    has_keys = sizes.total_k - sizes.total_q >= FEWEST_EARLIER_KEYS
    if are_equal(signature, sizes) or not (signature.may_have_both and has_keys):
        return 0
    return if_counted(signature, sizes, signature.short_limit)


# ----------------------------------------------------------------------------------- the rules


class Case(NamedTuple):
    """A row of a table in docs/kernels.md."""

    name: str  # the route where the rule holds
    reason: str  # when it holds, in words
    # Whether it does; for the decode kernel the most queries of its sequences, 0 if not.
    holds: Callable[[Signature, PackedSizes], int | None]


PREDICTED = "decode is predicted to be faster than every forward plan, by a margin"

RULES = {
    DENSE: (
        Case(ZEROS, "no query, no batch or no head", has_no_query),
        Case(ZEROS, "no key", has_no_key),
        Case(FORWARD, "`plan` or `schedule` is given", lambda sig, _: sig.is_planned),
        Case(DECODE, "`pack_gqa=True`", lambda sig, n: sig.pack_gqa and n.max_seqlen_q),
        Case(FORWARD, "a gradient is wanted, or `pack_gqa=False`",
             lambda sig, _: sig.has_gradients or sig.pack_gqa is False),
        Case(FORWARD, "q in FP8, `out` in float32, dropout, or a score or a mask of your own",
             lambda sig, _: not sig.may_decode),
        Case(DECODE, PREDICTED, lambda _, n: n.max_seqlen_q),
        Case(FORWARD, "all others", lambda *_: True),
    ),
    PACKED: (
        Case(NOTHING, "no row, no sequence or no head, or `max_seqlen_q` is 0", has_no_query),
        Case(ZEROS, "`max_seqlen_k` is 0", has_no_key),
        Case(SHARED, "`max_seqlen_q` up to 64, `max_seqlen_k` up to 256, more sequences x query "
             "heads than SMs, and fewer steps with shared tiles than without; no FP8, `out` in "
             "float32, ALiBi, dropout, or score or mask of your own", suits_shared_tiles),
        Case(DECODE, "decoding is possible, k has more rows than q, and `max_seqlen_q` is at most "
             "the short limit", queries_if_all_are_short),
        Case(BOTH_SPLIT, "decoding is possible, k has at least 4096 more rows than q, lengths may "
             "differ (other than sequences x `max_seqlen_q` rows, or `seqused_q`), and the GPU "
             "can split tiles", queries_if_short_and_split),
        Case(SPLIT, "the GPU can split tiles", splits_on_gpu),
        Case(DECODE, "decoding is possible, `num_splits` is 0 (the default; FlashAttention-3's is "
             "1), and few tiles meet long keys", queries_if_few_tiles),
        Case(BOTH, "decoding is possible, k has at least 4096 more rows than q, and lengths may "
             "differ (other than sequences x `max_seqlen_q` rows, or `seqused_q`)",
             queries_if_some_are_short),
        Case(FORWARD, "all others", lambda *_: True),
    ),
    CACHE: (
        Case(NOTHING, "no row, no sequence or no head", has_no_query),
        Case(ZEROS, "the cache has room for no key", has_no_key),
        Case(DECODE, "no `cu_seqlens_q`, and at most 64 queries, or gaps between sequences of q or "
             "`out`",
             lambda sig, n: 0 if sig.has_packed_queries else n.max_seqlen_q),
        Case(DECODE, "`max_seqlen_q` is at most the short limit",
             lambda sig, n: n.max_seqlen_q if n.max_seqlen_q <= sig.short_limit else 0),
        Case(DECODE, "`num_splits` is not 0, or `batch_invariant` or `sm_margin` is set; or "
             "`cache_leftpad` or `cache_batch_idx` is given, or the page size and the keys of a "
             "block (often 128) share no divisor of at least 8",
             lambda sig, n: 0 if sig.may_have_both else n.max_seqlen_q),
        Case(DECODE, "all sequences have `max_seqlen_q` queries, and (rows of q) x (query heads) x "
             "(keys that a sequence has room for) is less than 2^24",
             lambda sig, n: n.max_seqlen_q if is_little_work(sig, n) else 0),
        Case(BOTH_SPLIT, "lengths may differ, and the GPU can split tiles",
             queries_if_short_and_split),
        Case(SPLIT, "the GPU can split tiles", splits_on_gpu),
        Case(DECODE, "few tiles meet long keys",
             lambda sig, n: min(n.max_seqlen_q, queries_if_few_tiles(sig, n))),
        Case(FORWARD, "all sequences have `max_seqlen_q` queries", are_equal),
        Case(BOTH, "all others", lambda sig, _: sig.short_limit),
    ),
}  # fmt: skip
"""The rules of each kind of calls; docs/kernels.md explains their terms."""
