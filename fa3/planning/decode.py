"""`DecodePlan`: how attention to a key/value cache will run. Runs on the host; needs no GPU.

`fa3.calls.decode` makes plans with `choose_cut` and launches them; `fa3.reference.cache` walks
them on the CPU. `kernels.decode` reads the cache, cut so that all SMs read equally many keys, and
merges the parts if they are few; else `kernels.combine` does. The kernels read the sequences'
lengths on the device and derive the cut, so a plan serves all lengths that the cache has room for.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa3.kernels.combine import GROUPS, Combine, CombineArguments
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import DecodeArguments, DecodeConfig
from fa3.planning.launch import FromCall, Launch, Memory
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.divisor import PlainDivisor
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.vectors import FLOAT_BYTES
from fa3.primitives.wgmma import ROWS
from fa3.primitives.workspace import UNIT, WorkspaceSize
from fa3.problem import NO_BOUND, AttentionSpec, Window
from fa3.schedules.stream_k import (
    BY_CTA,
    MOST_ROOM,
    Chunks,
    CtaGroups,
    Cut,
    FixedSplit,
    NoSplit,
    StreamK,
    crew_width,
)
from fa3.scores.masks import Band, Sequence

TILE_N = 64  # keys of a key block

BYTES_IN_FLIGHT = 128 << 10
"""Bytes of K and V that a CTA loads ahead. Measured on an H200, 2026-11-21, head_dim 128, 16 x 8k,
for 96, 128, 160 and 192 KB: pages of 64 keys 121.4, 122.7, 124.4 and 127.3 us; head_dim 64: 76.8,
64.0, 64.2 and 64.3 us.
"""

BYTES_OF_TWO = 64 << 10
"""The same where two CTAs share an SM, one of this call and, early, one of the next. With
`CtaGroups` only: with another kernel in between, CTAs land two on one SM, which took the speed to
0.69-0.98 on an H200, 2026-11-22.
"""

FP8_TILINGS = (2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 2, 2), (1, 2, 1)
"""CTAs on an SM, Q tiles, and converted blocks of K and of V, by preference: the first with enough
room for blocks in flight. Both CTAs are of one call, since one MMA warpgroup cannot keep up with
the memory at half the bytes of a key."""

FP8_BYTES_IN_FLIGHT = {1: 64 << 10, 2: 32 << 10}
"""CTAs on an SM -> bytes of an FP8 cache that each has in flight. More take longer. On an H100,
16 x 8k with 32/8 heads of 128 took 96.0 us with 32 KB, 101.1 us with 48 KB; with 16/4 heads of 256,
95.4 us with 64 KB, 100.2 us with 96 KB."""

FEW_PARTS, FEW_BLOCKS = 16, 8
"""A call on an FP8 cache has one CTA on an SM where two would cut tiles into more than `FEW_PARTS`
parts, and an SM has up to `FEW_BLOCKS` blocks: 1 x 8k with 8/1 heads takes 9.2 us instead of 11.0.
"""

COLUMNS_OF_TWO = 128  # columns of V up to which there are registers for two CTAs

UNITS_OF_SEQUENCE = 32
"""Units of a sequence in batch-invariant calls, if they may have as few keys as that takes."""

MERGE_BYTES = 100_000
"""What an SM reads while a launch merges parts: some 3 us, at a 132nd of an H200's 4.8 TB/s."""

MOST_MERGED = 512  # rows of parts of a tile, at most, that a CTA merges by itself
MOST_ROWS = 1 << 30  # most query rows of a key/value head of a sequence
MOST_TILES = 1 << 27  # most tiles of a call: 32 bits must index all numbers of their records


class Sizes(NamedTuple):
    """Sizes of a call; `capacity` is the most keys that a sequence may have."""

    batch: int
    seqlen_q: int
    heads_kv: int
    qhead_per_kvhead: int
    capacity: int

    @property
    def rows(self) -> int:
        """Query rows of a key/value head, in one sequence."""
        return self.seqlen_q * self.qhead_per_kvhead

    @property
    def num_m_blocks(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def num_tiles(self) -> int:
        return self.batch * self.heads_kv * self.num_m_blocks

    def check(self, queries: str) -> None:
        """Raise ValueError, with the name of the queries, if 32 bits cannot count all rows and
        keys."""
        if self.rows > MOST_ROWS:
            raise ValueError(
                f"{queries} must give a key/value head at most {MOST_ROWS} rows, got {self.rows}"
            )
        if self.num_tiles > MOST_TILES:
            raise ValueError(
                f"{queries} must give at most {MOST_TILES} tiles of {ROWS} rows, got "
                f"{self.num_tiles}: {self.num_m_blocks} for each of {self.heads_kv} key/value "
                f"heads of {self.batch} sequences"
            )
        # 32 bits must hold a query's last key plus what a window and a block add to it.
        most = (LARGEST - self.capacity) // 2 - ROWS
        if self.seqlen_q > most:
            raise ValueError(
                f"{queries} must have at most {most} queries with a cache of {self.capacity} "
                f"tokens, got {self.seqlen_q}"
            )

    def bounds(self, window: Window) -> Window:
        """The window as kernels get it: without a bound to the left that hides nothing, but always
        with one to the right, so that calls with one query and with several, causal or not, have
        one kernel."""
        left, right = window.tighten(self.seqlen_q, self.capacity)
        return Window(left, self.seqlen_q - 1 if right == NO_BOUND else right)

    def most_blocks(self, window: Window) -> int:
        """Most key blocks that a tile may have."""
        keys = self.capacity
        if window.left != NO_BOUND:
            # The queries' own keys, `left` keys before, and TILE_N: both ends may cut a block.
            keys = min(keys, window.left + self.seqlen_q + TILE_N)
        return max(1, -(-keys // TILE_N))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How calls of one shape run, for any lengths."""

    # spec, cache: what the kernels are compiled for, besides their tiling.
    spec: AttentionSpec
    cache: CacheLayout
    sizes: Sizes
    window: Window  # as `Sizes.bounds` gives it
    cut: Cut  # where tiles may be cut; with `CtaGroups` no other kernel ever merges
    num_ctas: int  # CTAs of the decode kernel, one for each SM that it may use
    # Whether sequences have different numbers of queries; sizes have the most.
    is_packed: bool = False
    has_used_q: bool = False  # whether not all of packed queries count
    # Whether the forward kernel has the call's other sequences, at the same time.
    overlaps_forward: bool = False
    has_fp8_q: bool = False  # whether the queries are FP8, as the cache is

    def kernel(self) -> Decode:
        """The decode kernel."""
        blocks = self.sizes.num_tiles // self.cut.width * self.sizes.most_blocks(self.window)
        # Pieces of whole tiles may go beyond the end of the line.
        is_long = (2 if isinstance(self.cut, CtaGroups) else 1) * blocks > LARGEST
        cut_type = type(self.cut)
        config, ratio = config_of(self.spec, self.cache, cut_type), self.sizes.qhead_per_kvhead
        kind = (
            cut_type, is_long, self.is_packed, self.has_used_q, self.overlaps_forward,
            self.has_fp8_q,
        )  # fmt: skip
        return Decode(self.spec, config, ratio, self.cache, *kind)

    @property
    def launch(self) -> Launch:
        """The launch of the kernel that attends."""
        cut = self.cut
        num_splits = unit_blocks = max_parts = longest = 1
        if isinstance(cut, FixedSplit):
            num_splits, unit_blocks = cut.num_splits, cut.unit_blocks
            max_parts, longest = cut.max_parts, cut.longest
        return Launch.of(
            self.kernel(),
            DecodeArguments,
            seqlens=FromCall("seqused_k"),
            workspace=FromCall("workspace") if cut.has_parts else None,
            counters=FromCall("counters") if self.merges_inside else 0,
            window_left=self.window.left,
            window_right=self.window.right,
            num_splits=num_splits,
            unit_blocks=unit_blocks,
            max_parts=max_parts,
            longest_unit=longest,
            max_seqlen_q=self.sizes.seqlen_q,
            num_ctas=self.num_ctas,
            width=cut.width,
            table=FromCall("table") if self.overlaps_forward else None,
        )

    @property
    def merges_inside(self) -> bool:
        """Whether the kernel that attends merges parts, so that no other is launched."""
        if not isinstance(self.cut, StreamK):
            return isinstance(self.cut, CtaGroups)
        if self.overlaps_forward:
            return False
        blocks = MOST_ROOM if self.cache.is_packed else self.sizes.most_blocks(self.window)
        return rows_of_parts(self.sizes, self.num_ctas, self.sizes.heads_kv, blocks) <= MOST_MERGED

    def combine(self) -> Combine | None:
        """The kernel that merges parts where the other one does not; None if that always does, or
        the cut leaves no parts."""
        if isinstance(self.cut, CtaGroups) or not self.cut.has_parts:
            return None
        spec = self.spec
        ratio = self.sizes.qhead_per_kvhead
        return Combine(spec.dtype, spec.head_dim_v, ratio, spec.sinks, self.is_packed)

    @property
    def workspace(self) -> WorkspaceSize:
        """Size of the workspace for the parts and their records."""
        return WorkspaceSize(self.cut.num_records, self.cut.num_slots, min(self.sizes.rows, ROWS))

    @property
    def clears_records(self) -> bool:
        """Whether records must be zero before the launches: there is one for each tile that a call
        may have, and sequences with fewer queries have fewer."""
        return self.is_packed and isinstance(self.cut, FixedSplit)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What is launched: the kernel that attends, and the one that merges where the former does
        not."""
        combine, size = self.combine(), self.workspace
        if combine is None or self.merges_inside:
            return (self.launch,)
        # CTAs that share a tile's rows: enough for one CTA per SM.
        sets = min(size.rows, max(self.num_ctas // size.num_records, -(-size.rows // GROUPS)))
        sinks = FromCall("sinks") if self.spec.sinks else None
        named = {**size._asdict(), "sets": sets, "sinks": sinks, "workspace": FromCall("workspace")}
        return self.launch, Launch.of(combine, CombineArguments, **named)

    @property
    def memory(self) -> Memory:
        """What the kernels share: parts of tiles, and counters where the first kernel merges."""
        size = self.workspace
        numbers = size.numbers(self.spec.head_dim_v)
        if self.merges_inside:
            return Memory((("counters", size.num_slots),), workspace=numbers)
        cleared = size.numbers_of_records if self.clears_records else 0
        return Memory(parts=(("workspace", numbers),) if numbers else (), cleared=cleared)


def check_workspace(size: WorkspaceSize, head_dim_v: int, capacity: int, memory: int) -> None:
    """Raise ValueError if a GPU with `memory` bytes has no room for a call's parts.
    Only with `FixedSplit` do the slots grow with the capacity of the cache."""
    num_bytes = size.numbers(head_dim_v) * FLOAT_BYTES
    if num_bytes > memory or size.num_slots * size.rows > LARGEST - UNIT:
        raise ValueError(
            f"num_splits or batch_invariant takes {num_bytes / 2**30:.1f} GB of workspace, for "
            f"{size.num_slots} parts of sequences of up to {capacity} tokens: give a cache or a "
            "page_table that has room for fewer"
        )


def config_of(spec: AttentionSpec, cache: CacheLayout, cut_type: type) -> DecodeConfig:
    """Blocks of 64 keys, in as many stages as hold the bytes in flight, at least two.
    Two CTAs share an SM with `CtaGroups`, if they fit; to gather rows takes two more warps."""
    if cache.is_fp8:
        return fp8_config(spec, cache.box(TILE_N) == 0)
    columns = padded(spec.head_dim) + padded(spec.head_dim_v)
    block = spec.element.bytes * TILE_N * columns
    one, two = (
        DecodeConfig(TILE_N, max(2, -(-in_flight // block)), q_stages=2, ctas_of_sm=ctas)
        for ctas, in_flight in ((1, BYTES_IN_FLIGHT), (2, BYTES_OF_TWO))
    )
    gathers = cache.box(TILE_N) == 0
    if cut_type is not CtaGroups or gathers or padded(spec.head_dim_v) > COLUMNS_OF_TWO:
        return one
    return two if two.ctas_of_sm * two.smem_bytes(spec) <= CAPACITY else one


def fp8_config(spec: AttentionSpec, gathers: bool) -> DecodeConfig:
    """Blocks of 64 keys of an FP8 cache, in as many stages as hold the bytes in flight."""
    block = TILE_N * (padded(spec.head_dim) + padded(spec.head_dim_v))
    for ctas, q_stages, converted in FP8_TILINGS:
        empty = DecodeConfig(TILE_N, 0, q_stages, ctas, converted)
        stages = -(-FP8_BYTES_IN_FLIGHT[ctas] // block)
        fits = stages * block <= CAPACITY // ctas - empty.smem_bytes(spec)
        has_registers = not gathers and padded(spec.head_dim_v) <= COLUMNS_OF_TWO
        if fits and (ctas == 1 or has_registers):
            break
    return replace(empty, kv_stages=stages)


def ctas_of_call(
    spec: AttentionSpec, cache: CacheLayout, sizes: Sizes, window: Window, num_sms: int
) -> int:
    """How many CTAs a call has that may use so many SMs."""
    if not cache.is_fp8:
        return num_sms
    num_ctas = num_sms * config_of(spec, cache, StreamK).ctas_of_sm
    blocks = sizes.num_tiles * sizes.most_blocks(window)
    is_short = num_ctas > FEW_PARTS * sizes.num_tiles and blocks <= FEW_BLOCKS * num_sms
    return num_sms if is_short else num_ctas


def choose_cut(
    sizes: Sizes,
    window: Window,
    num_ctas: int,
    # 0 cuts keys so that all SMs read equally many; 1 never cuts; n cuts the keys of every sequence
    # into n parts.
    num_splits: int = 0,
    # Make a sequence's result bitwise independent of the other sequences.
    batch_invariant: bool = False,
    is_packed: bool = False,  # whether sequences have different numbers of queries
    # Whether a kernel that appends to the cache runs before. As its CTAs take but some SMs, two
    # CTAs of `CtaGroups` would land on each of the others: 0.76-1.04 of the speed on an H200.
    # `StreamK` has one on each, and merges in the same kernel where parts are few.
    appends: bool = False,
) -> Cut:
    """Choose where tiles may be cut."""
    blocks = sizes.most_blocks(window)
    if num_splits:
        # Depends on a sequence's own length only, so this is batch-invariant, too.
        num_splits = min(num_splits, blocks)
        return units_of(sizes, num_splits, 1, num_splits)
    if batch_invariant:
        fewest, longest = (keys // TILE_N for keys in keys_of_unit(sizes.rows))
        num_splits = max(1, UNITS_OF_SEQUENCE // (sizes.heads_kv * sizes.num_m_blocks))
        max_parts = max(min(num_splits, -(-blocks // fewest)), -(-blocks // longest))
        return units_of(sizes, num_splits, fewest, max_parts, longest)
    width = crew_width(sizes.heads_kv, sizes.num_tiles, num_ctas)
    few = rows_of_parts(sizes, num_ctas, width, blocks) <= MOST_MERGED
    if few and not (is_packed or appends):
        return CtaGroups(num_ctas, width)
    return StreamK(num_ctas, BY_CTA if is_packed else sizes.num_tiles)


def rows_of_parts(sizes: Sizes, num_ctas: int, num_heads: int, blocks: int) -> int:
    """Rows of all parts of a tile, at most or nearly: so many heads of a sequence are equally long,
    and so many CTAs share them."""
    return min(sizes.rows, ROWS) * min(num_ctas // num_heads, blocks)


def keys_of_unit(rows: int) -> tuple[int, int]:
    """Fewest and most keys of a unit in batch-invariant calls, by the query rows of a key/value
    head.

    A unit writes its rows in float32, which costs relatively more with fewer keys: 32 rows on
    16 x 8k keys took 157 us with 512, 127 us with 2048. But short sequences need many units to
    keep the SMs busy: 16 rows on 1 x 8k took 14.8 us with 1024, 10.8 us with 512, 9.1 us with 256.
    """
    return (256, 512) if rows <= 16 else (2048, 2048)


def units_of(
    sizes: Sizes, num_splits: int, unit_blocks: int, max_parts: int, longest: int = MOST_ROOM
) -> FixedSplit | NoSplit:
    if max_parts == 1:
        return NoSplit()
    return FixedSplit(num_splits, unit_blocks, max_parts, sizes.num_tiles, longest)


def whole_tiles_suffice(
    sizes: Sizes, window: Window, key_bytes: int, lengths: list[int], num_ctas: int
) -> bool:
    """Whether the SM with most whole tiles is done before equal pieces are read and merged."""
    most, total = most_of_whole_tiles(sizes, sizes.bounds(window), lengths, num_ctas)
    return most <= -(-total // num_ctas) + MERGE_BYTES / (TILE_N * key_bytes)


def most_of_whole_tiles(
    sizes: Sizes, window: Window, lengths: list[int], num_ctas: int
) -> tuple[int, int]:
    """Key blocks of the CTA that has the most if tiles stay whole, and of all CTAs."""
    mask, tiles = Band.of(window), sizes.heads_kv * sizes.num_m_blocks
    blocks = (
        mask.key_blocks(0, sizes.seqlen_q, TILE_N, Sequence(sizes.seqlen_q, max(0, n), window))
        for n in lengths
    )
    of_tile = np.array([of_sequence.end - of_sequence.begin for of_sequence in blocks], np.int64)
    ends = (tiles * of_tile).cumsum()
    pieces = Chunks.even(int(ends[-1]), PlainDivisor(num_ctas))
    cuts = pieces.begin(np.arange(num_ctas + 1))
    sequence = np.minimum(np.searchsorted(ends, cuts, side="right"), sizes.batch - 1)
    begin, blocks_of_tile = ends[sequence] - tiles * of_tile[sequence], of_tile[sequence]
    # A piece goes on to where the next tile begins.
    cuts = begin + -((begin - cuts) // blocks_of_tile) * blocks_of_tile
    return int(np.diff(cuts).max()), pieces.total
