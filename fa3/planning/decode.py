"""`DecodePlan`: how attention to a key/value cache will run.

`fa3.calls.execution` launches its kernels; `fa3.reference.walker` walks them on the CPU. The decode
kernel reads the cache, cut so that all SMs read equally many keys, and merges the parts if they are
few; else `kernels.combine` does. The kernels read the sequences' lengths on the device and derive
the cut, so a plan serves all lengths that the cache has room for.

A dense call with few queries is one on a cache that is full. The forward kernel has tiles of one
query head. With few queries most of their rows are empty, and the query heads of a key/value head
read the same keys one by one. In the decode kernel these heads share a tile, which reads keys once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fa3.kernels.combine import GROUPS, Combine
from fa3.kernels.decode import Decode
from fa3.kernels.decode_launch import TILE_N, DecodeConfig
from fa3.planning.costs import Gpu, least_gain
from fa3.planning.explanation import Candidate, choice_of, counted, duration
from fa3.planning.launch import OF_FORWARD, FromCall, Launch, Memory, PlanBase
from fa3.planning.prediction import Prediction
from fa3.primitives.arithmetic import LARGEST, PlainDivisor
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.fp8_blocks import COLUMNS_OF_HELD_Q
from fa3.primitives.packed_rows import UNIT, WorkspaceSize
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.vectors import FLOAT_BYTES
from fa3.primitives.warp_attention import MMA_ROWS
from fa3.primitives.wgmma import ROWS
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.schedules.sequences import LONGEST
from fa3.schedules.stream_k import (
    BY_CTA,
    MOST_ROOM,
    ONE_IDLE_IN,
    Chunks,
    CtaGroups,
    Cut,
    FixedSplit,
    NoSplit,
    StreamK,
    crew_width,
)
from fa3.scores.masks import Band, Sequence

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

FP8_TILINGS = (2, 2, 2), (2, 1, 2), (2, 2, 1), (2, 1, 1), (1, 2, 2), (1, 2, 1)
"""CTAs on an SM, Q tiles, and converted blocks of K and of V, by preference: the first with enough
room for blocks in flight, where converter warps write blocks. Both CTAs are of one call, since one
MMA warpgroup cannot keep up with the memory at half the bytes of a key. The second row is for a Q
that stays in registers: at head size 128 it takes 1 to 4% less time than the third on an H200."""

FP8_BYTES_IN_FLIGHT = {1: 64 << 10, 2: 32 << 10}
"""CTAs on an SM -> bytes of an FP8 cache that each has in flight. More take longer. On an H100,
16 x 8k with 32/8 heads of 128 took 96.0 us with 32 KB, 101.1 us with 48 KB; with 16/4 heads of 256,
95.4 us with 64 KB, 100.2 us with 96 KB. These tiles of 4 rows have no converter warps any more."""

SHARED_ROWS = MMA_ROWS
"""Rows of a tile up to which each warp has its own keys of an FP8 cache, unless keys are gathered.
On an H200, 16 x 8k with 32/8 heads takes 68 us, with converter warps 81. With 32 rows it would take
79 instead of 86, with 64 rows 143 instead of 94, and with gathered keys 126 instead of 104."""

SHARED_BYTES_IN_FLIGHT = 80 << 10
"""Bytes that a CTA has in flight there. It has an SM of its own. With 48, 64, 80 and 96 KB, 64 x 8k
with 32/8 heads takes 257.6, 251.6, 250.5 and 251.5 us, 128 x 2k with 8/1 heads 22.7, 22.2, 21.8 and
22.5. Two CTAs on an SM with 64 KB each take 255.7 and 25.7."""

COLUMNS_OF_TWO = 128  # columns of V up to which there are registers for two CTAs

UNITS_OF_SEQUENCE = 32
"""Units of a sequence in batch-invariant calls, if they may have as few keys as that takes."""

MERGE_BYTES = 100_000
"""What an SM reads while a launch merges parts: some 3 us, at a 132nd of an H200's 4.8 TB/s."""

MOST_MERGED = 512  # rows of parts of a tile, at most, that a CTA merges by itself

MOST_MERGED_ROWS = 16
"""The same for rows of the tile: a warp merges one row at a time. With 16/16 heads, 8 queries on
2048 keys took 8.9 us on an H100, and 10.3 where combine merges; 16 queries 10.6 and 10.6, 32
queries 13.6 and 11.2, 64 queries 20.9 and 14.0."""

MOST_WHOLE_BLOCKS = 8
"""Key blocks up to which tiles with so many rows stay whole, if each CTA has one at most. With 32/8
heads on 512 keys, whole tiles of 65 queries took 9.0 us; split and merged by combine 11.5, inside
31.8. On 1024 keys 13.4, 13.2 and 22.2."""

MOST_ROWS = 1 << 30  # most query rows of a key/value head of a sequence
MOST_TILES = 1 << 27  # most tiles of a call: 32 bits must index all numbers of their records


FIXED_US = 6.5  # what a call takes besides reading: launches, the first blocks' latency, the merge

READS = 0.9
"""Bandwidth that the kernel reaches over `Costs.bytes_per_us`. With both, 16 of the 17 times of
`benchmarks/results/h200-2026-11-21-decode` are met within 3%; for 8.3 us it says 7.4."""

MEASURED_HEAD_DIM = 128  # the largest heads that these times are of

BLOCK_US, BLOCK_COLUMNS = 1.09, 256
"""An SM's time for a key block of so many columns of K and V, where tiles share keys:
chunks-7x512+64x1 of `benchmarks/results/h200-2026-11-22-gradients`, 305,000 blocks in 2.5 ms."""

FULL = CacheLayout(has_seqlens=False)  # K and V of a dense call


class Sizes(NamedTuple):
    """Sizes of a call; `capacity` is the most keys of a sequence."""

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
        """Raise ValueError if 32 bits cannot count all rows and keys.
        It names the queries."""
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
                f"{queries} must give a sequence at most {most} queries with a cache of "
                f"{self.capacity} tokens, got {self.seqlen_q}"
            )

    def bounds(self, window: Window) -> Window:
        """The window as kernels get it, always with a right bound.
        A bound to the left that hides nothing is left out. So calls with one query and with
        several, causal or not, have one kernel."""
        left, right = window.tighten(self.seqlen_q, self.capacity)
        return Window(left, self.seqlen_q - 1 if right == NO_BOUND else right)

    def most_blocks(self, window: Window) -> int:
        """Most key blocks that a tile may have."""
        keys = self.capacity
        if window.left != NO_BOUND:
            # The queries' own keys, `left` keys before, and TILE_N: both ends may cut a block.
            keys = min(keys, window.left + self.seqlen_q + TILE_N)
        return max(1, -(-keys // TILE_N))


@dataclass(frozen=True)
class DecodePlan(PlanBase):
    """How calls of one shape run, for any lengths.

    The time of a dense call, with keys in a cache that is full, is predicted:

        T = max(memory, work) + fixed

        memory  bytes over the bandwidth that the kernel reaches
        work    key blocks over the SMs, if a head of K and V has several tiles
    """

    # What is asked. A cache has room for `seqlen_k` keys, and `seqlen_q` is the most queries of a
    # sequence; packed keys have any number.
    problem: Problem
    gpu: Gpu  # what of it may be used
    cache: CacheLayout
    cut: Cut  # where tiles may be cut; with `CtaGroups` no other kernel ever merges
    num_ctas: int  # CTAs of the decode kernel, one for each SM that it may use
    # Whether sequences have different numbers of queries; the problem has the most.
    is_packed: bool = False
    has_used_q: bool = False  # whether not all of packed queries count
    # Whether the forward kernel has the call's other sequences, at the same time.
    overlaps_forward: bool = False
    has_fp8_q: bool = False  # whether the queries are FP8, as the cache is
    appends: bool = False  # whether a kernel appends to the cache before; see `choose_cut`
    # Plans of the forward kernel that the planner compared with it.
    considered: tuple[Candidate, ...] = field(default=(), repr=False, compare=False)

    name: ClassVar[str] = "packed"

    @classmethod
    def of(
        cls,
        problem: Problem,
        gpu: Gpu,
        cache: CacheLayout = FULL,
        # num_splits, batch_invariant: see `choose_cut`.
        num_splits: int = 0,
        batch_invariant: bool = False,
        **kinds: Any,  # the fields from `is_packed` on
    ) -> "DecodePlan":
        """Return the plan of calls whose K and V are a cache."""
        plan = cls(problem, gpu, cache, NoSplit(), gpu.num_sms, **kinds)
        # With 16 bits a second CTA of an SM would be of the next call.
        config = config_of(plan.spec, cache, StreamK, plan.sizes.rows)
        num_ctas = gpu.num_sms * config.ctas_of_sm
        options = num_splits, batch_invariant, plan.is_packed, plan.appends
        cut = choose_cut(plan.sizes, plan.window, num_ctas, *options)
        return replace(plan, cut=cut, num_ctas=num_ctas)

    @classmethod
    def of_dense(cls, problem: Problem, gpu: Gpu) -> "DecodePlan":
        """Return the plan of a dense call.
        Raises NotImplementedError for a score or a mask of the user's or dropout, and ValueError
        for more queries or keys than the kernel counts."""
        spec = problem.spec
        refused = {
            "a score or a mask of your own": spec.has_user_functions,
            "q in FP8": spec.is_fp8,
            "out in float32": spec.has_float32_out,
            "dropout_p": spec.has_dropout,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise NotImplementedError(f"pack_gqa must be None or False with {what}")
        if problem.seqlen_k > LONGEST:
            raise ValueError(
                f"pack_gqa must be None or False with more than {LONGEST} keys, got "
                f"{problem.seqlen_k}"
            )
        plan = cls.of(problem, gpu)
        plan.sizes.check("q")
        return plan

    @classmethod
    def if_possible(cls, problem: Problem, gpu: Gpu) -> "DecodePlan | None":
        """A dense call's plan; None if the kernel cannot run it."""
        try:
            return cls.of_dense(problem, gpu)
        except (NotImplementedError, ValueError):
            return None

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of a call."""
        problem = self.problem
        heads = problem.num_heads_kv, problem.qhead_per_kvhead
        return Sizes(problem.batch, problem.seqlen_q, *heads, problem.seqlen_k)

    @cached_property
    def window(self) -> Window:
        """The bounds of the window as kernels get them."""
        window = self.problem.window
        return window if self.cache.is_packed else self.sizes.bounds(window)

    @cached_property
    def spec(self) -> AttentionSpec:
        """What kernels are compiled for, besides their tiling."""
        spec = self.problem.spec
        return replace(spec, mask=Band.of(self.window)) if isinstance(spec.mask, Band) else spec

    def kernel(self) -> Decode:
        """The decode kernel."""
        blocks = self.sizes.num_tiles // self.cut.width * self.sizes.most_blocks(self.window)
        # Pieces of whole tiles may go beyond the end of the line.
        is_long = (2 if isinstance(self.cut, CtaGroups) else 1) * blocks > LARGEST
        cut_type = type(self.cut)
        config = config_of(self.spec, self.cache, cut_type, self.sizes.rows)
        ratio = self.sizes.qhead_per_kvhead
        kind = (
            cut_type, is_long, self.is_packed, self.has_used_q, self.overlaps_forward,
            self.has_fp8_q,
        )  # fmt: skip
        return Decode(self.spec, config, ratio, self.cache, *kind)

    @property
    def merges_inside(self) -> bool:
        """Whether the kernel that attends also merges: no other is launched."""
        if not isinstance(self.cut, StreamK):
            return isinstance(self.cut, CtaGroups)
        if self.overlaps_forward:
            return False
        blocks = MOST_ROOM if self.cache.is_packed else self.sizes.most_blocks(self.window)
        parts = rows_of_parts(self.sizes, self.num_ctas, self.sizes.heads_kv, blocks)
        return parts <= MOST_MERGED and self.sizes.rows <= MOST_MERGED_ROWS

    def combine(self) -> Combine | None:
        """The kernel that merges parts where decode does not; or None.
        None if the decode kernel always merges, or the cut leaves no parts."""
        if isinstance(self.cut, CtaGroups) or not self.cut.has_parts:
            return None
        spec = self.spec
        ratio = self.sizes.qhead_per_kvhead
        return Combine(spec.dtype, spec.head_dim_v, ratio, spec.sinks, self.is_packed)

    @cached_property
    def workspace(self) -> WorkspaceSize:
        """Size of the workspace for the parts and their records."""
        return WorkspaceSize(self.cut.num_records, self.cut.num_slots, min(self.sizes.rows, ROWS))

    def launches(self) -> tuple[Launch, ...]:
        """Return the decode kernel, and the merging kernel where needed."""
        cut, combine, size = self.cut, self.combine(), self.workspace
        num_splits = unit_blocks = max_parts = longest = 1
        if isinstance(cut, FixedSplit):
            num_splits, unit_blocks = cut.num_splits, cut.unit_blocks
            max_parts, longest = cut.max_parts, cut.longest
        attend = Launch.of(
            self.kernel(),
            self.window,
            seqlens=FromCall("seqused_k"),
            counters=FromCall("address_of_counters") if self.merges_inside else 0,
            lse=OF_FORWARD["lse"],
            num_splits=num_splits,
            unit_blocks=unit_blocks,
            max_parts=max_parts,
            longest_unit=longest,
            max_seqlen_q=self.sizes.seqlen_q,
            num_ctas=self.num_ctas,
            width=cut.width,
        )
        if combine is None or self.merges_inside:
            return (attend,)
        # CTAs that share a tile's rows: enough for one CTA per SM.
        sets = min(size.rows, max(self.num_ctas // size.num_records, -(-size.rows // GROUPS)))
        return attend, Launch.of(combine, lse=OF_FORWARD["lse"], **size._asdict(), sets=sets)

    @property
    def memory(self) -> Memory:
        size = self.workspace
        numbers = size.numbers(self.spec.head_dim_v)
        if self.merges_inside:
            return Memory(
                (("counters", size.num_slots),), kept=(("workspace", numbers, "float32"),)
            )
        # There is a record for each tile that a call may have; short sequences have fewer.
        clears_records = self.is_packed and isinstance(self.cut, FixedSplit)
        cleared = size.numbers_of_records if clears_records else 0
        return Memory(parts=(("workspace", numbers),) if numbers else (), cleared=cleared)

    @property
    def is_measured(self) -> bool:
        """Whether such calls were measured: one-tile heads of sizes up to 128."""
        head_dim = max(self.problem.spec.head_dim, self.problem.spec.head_dim_v)
        return self.sizes.num_m_blocks == 1 and head_dim <= MEASURED_HEAD_DIM

    def beats(self, others: Iterable[Candidate]) -> bool:
        """Whether it is predicted to be faster than all forward plans.
        By more than the margin."""
        us = self.predict().mean_us
        best = min(other.prediction.mean_us for other in others)
        return best - us > least_gain(us, self.is_measured)

    def compare_with(self, plan: Candidate, others: Iterable[Candidate]) -> str:
        """Compare it in a sentence with the plans of the forward kernel."""
        us, forward_us = self.predict().us, plan.prediction.us
        when = "unless pack_gqa is False" if self.beats((plan, *others)) else "if pack_gqa is True"
        remark = "" if self.is_measured else ", not measured"
        return (
            f"In the decode kernel, where query heads that share keys share tiles: {duration(us)}, "
            f"{us / forward_us - 1:+.1%}{remark}. Calls run so {when}."
        )

    @property
    def all_kernels(self) -> list[Any]:
        return ["append"] * self.appends + super().all_kernels

    def sentences(self) -> dict[str, str]:
        prediction, sizes, config = self.predict(), self.sizes, self.kernel().config
        merge = "Combine merges" if len(self.launches()) > 1 else "The decode kernel merges"
        cut = f"All CTAs get equally many keys. {merge} the parts of split tiles."
        filled = "" if self.cache.is_full else ", if all sequences fill the cache"
        unmeasured = "" if self.is_measured else "; such calls were not measured"
        return {
            "CTA": f"{SHARED_ROWS if config.keys_by_warp else ROWS} query rows against blocks of "
            f"{TILE_N} keys. The query heads that share keys are rows of the same tile, so keys "
            "are read once for all of them.",
            "Memory": f"{config.q_stages} stages of Q in shared memory, {config.kv_stages} of K "
            f"and of V: {config.smem_bytes(self.spec):,} of {CAPACITY:,} bytes.",
            "Grid": f"{counted(self.num_ctas, 'CTA')} on {self.gpu.num_sms} SMs, for "
            f"{counted(sizes.num_tiles, 'tile')}.",
            "Cut": cut if self.cut.has_parts else "Tiles stay whole.",
            "Time": f"{duration(prediction.us)} predicted, "
            f"{self.flops / prediction.us / 1e6:,.0f} TFLOP/s{filled}{unmeasured}.",
            "Bound": f"By {prediction.bound}: device memory {duration(prediction.memory_us)}, "
            f"compute {duration(prediction.compute_us)}, launches {prediction.launch_us:.1f} us.",
            "Choice": choice_of("decode kernel", prediction, self.considered),
        }

    def predict(self) -> Prediction:
        """The time that the call is predicted to take, with its components."""
        problem, spec, sizes = self.problem, self.spec, self.sizes
        sequence = Sequence(problem.seqlen_q, problem.seqlen_k, self.window)
        seen = self.spec.mask.key_blocks(0, problem.seqlen_q, TILE_N, sequence)
        blocks = seen.end - seen.begin
        hidden = max(0, problem.seqlen_k - blocks * TILE_N)
        unread = problem.batch * problem.num_heads_kv * hidden * spec.key_bytes
        memory_us = (problem.bytes - unread) / (READS * self.gpu.costs.bytes_per_us)
        work_us = 0.0
        if sizes.num_m_blocks > 1:
            columns = padded(spec.head_dim) + padded(spec.head_dim_v)
            most = -(-sizes.num_tiles * blocks // self.gpu.num_sms)
            work_us = most * BLOCK_US * columns / BLOCK_COLUMNS
        us = max(memory_us, work_us)
        return Prediction(
            us=us + FIXED_US,
            burst_us=us + FIXED_US,
            compute_us=work_us,
            memory_us=memory_us,
            launch_us=FIXED_US,
            longest_us=us,
        )


def check_workspace(size: WorkspaceSize, head_dim_v: int, capacity: int, memory: int) -> None:
    """Raise ValueError if a call's parts need more than `memory` bytes.
    Only with `FixedSplit` do the slots grow with the capacity of the cache."""
    num_bytes = size.numbers(head_dim_v) * FLOAT_BYTES
    if num_bytes > memory or size.num_slots * size.rows > LARGEST - UNIT:
        raise ValueError(
            f"num_splits or batch_invariant takes {num_bytes / 2**30:.1f} GB of workspace, for "
            f"{size.num_slots} parts of sequences of up to {capacity} tokens: give a cache or a "
            "page_table that has room for fewer"
        )


def config_of(
    spec: AttentionSpec, cache: CacheLayout, cut_type: type, rows: int = ROWS
) -> DecodeConfig:
    """Blocks of 64 keys, with stages that hold the bytes in flight.
    Two CTAs share an SM with `CtaGroups`, if they fit; to gather rows takes two more warps."""
    gathers = cache.box(TILE_N) == 0
    elements = TILE_N * (padded(spec.head_dim) + padded(spec.head_dim_v))  # of blocks of K and V
    if cache.is_fp8:
        if rows <= SHARED_ROWS and not gathers:
            return shared_config(spec, elements)
        return fp8_config(spec, elements, gathers)
    block = spec.element_bytes * elements
    one, two = (
        DecodeConfig(max(2, -(-in_flight // block)), q_stages=2, ctas_of_sm=ctas)
        for ctas, in_flight in ((1, BYTES_IN_FLIGHT), (2, BYTES_OF_TWO))
    )
    if cut_type is not CtaGroups or gathers or padded(spec.head_dim_v) > COLUMNS_OF_TWO:
        return one
    return two if two.ctas_of_sm * two.smem_bytes(spec) <= CAPACITY else one


def shared_config(spec: AttentionSpec, block_bytes: int) -> DecodeConfig:
    """The same where each warp has FP8 keys of its own."""
    stages = max(3, -(-SHARED_BYTES_IN_FLIGHT // block_bytes))
    config = DecodeConfig(stages, q_stages=1, keys_by_warp=True)
    while 2 * config.smem_bytes(spec) <= CAPACITY:
        # Where another kernel has taken an SM, two CTAs would land on the next.
        config = replace(config, kv_stages=config.kv_stages + 1)
    return config


def fp8_config(spec: AttentionSpec, block_bytes: int, gathers: bool) -> DecodeConfig:
    """The same with converter warps: stages for the bytes in flight."""
    for ctas, q_stages, converted in FP8_TILINGS:
        empty = DecodeConfig(0, q_stages, ctas, converted)
        stages = -(-FP8_BYTES_IN_FLIGHT[ctas] // block_bytes)
        fits = stages * block_bytes <= CAPACITY // ctas - empty.smem_bytes(spec)
        has_registers = not gathers and padded(spec.head_dim_v) <= COLUMNS_OF_TWO
        # With one Q tile the next is late, unless registers hold this one.
        is_early = q_stages >= converted or padded(spec.head_dim) <= COLUMNS_OF_HELD_Q
        if fits and is_early and (ctas == 1 or has_registers):
            break
    return replace(empty, kv_stages=stages)


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
    blocks, num_tiles = sizes.most_blocks(window), sizes.num_tiles
    if num_splits:
        # Depends on a sequence's own length only, so this is batch-invariant, too.
        parts = min(num_splits, blocks)
        return FixedSplit(parts, 1, parts, num_tiles) if parts > 1 else NoSplit()
    if batch_invariant:
        fewest, longest = (keys // TILE_N for keys in keys_of_unit(sizes.rows))
        units = max(1, UNITS_OF_SEQUENCE // (sizes.heads_kv * sizes.num_m_blocks))
        parts = max(min(units, -(-blocks // fewest)), -(-blocks // longest))
        return FixedSplit(units, fewest, parts, num_tiles, longest) if parts > 1 else NoSplit()
    if is_packed:
        return StreamK(num_ctas, BY_CTA)
    has_many_rows = sizes.rows >= MOST_MERGED_ROWS
    if has_many_rows and blocks <= MOST_WHOLE_BLOCKS and num_tiles <= num_ctas:
        return NoSplit()
    width = crew_width(sizes.heads_kv, num_tiles, num_ctas)
    idle = -num_tiles % num_ctas
    # Then `CtaGroups` keeps equally long tiles whole, such as all tiles of a single sequence.
    are_busy = ONE_IDLE_IN * idle <= num_tiles + idle
    has_few_parts = rows_of_parts(sizes, num_ctas, width, blocks) <= MOST_MERGED
    has_few_parts = has_few_parts and (are_busy or sizes.rows <= MOST_MERGED_ROWS)
    if not appends and (has_few_parts or (are_busy and sizes.batch == 1)):
        return CtaGroups(num_ctas, width)
    return StreamK(num_ctas, num_tiles)


def rows_of_parts(sizes: Sizes, num_ctas: int, num_heads: int, blocks: int) -> int:
    """Rows of all parts of a tile, at most or nearly.
    So many heads of a sequence are equally long, and so many CTAs share them."""
    return min(sizes.rows, ROWS) * min(num_ctas // num_heads, blocks)


def keys_of_unit(rows: int) -> tuple[int, int]:
    """Fewest and most keys of a unit in batch-invariant calls.
    By the query rows of a key/value head.

    A unit writes its rows in float32, which costs relatively more with fewer keys: 32 rows on
    16 x 8k keys took 157 us with 512, 127 us with 2048. But short sequences need many units to
    keep the SMs busy: 16 rows on 1 x 8k took 14.8 us with 1024, 10.8 us with 512, 9.1 us with 256.
    """
    return (256, 512) if rows <= 16 else (2048, 2048)


def whole_tiles_suffice(
    sizes: Sizes, window: Window, key_bytes: int, lengths: list[int], num_ctas: int
) -> bool:
    """Whether whole tiles take less time than equal pieces and their merge."""
    most, total = most_of_whole_tiles(sizes, sizes.bounds(window), lengths, num_ctas)
    return most <= -(-total // num_ctas) + MERGE_BYTES / (TILE_N * key_bytes)


def most_of_whole_tiles(
    sizes: Sizes, window: Window, lengths: list[int], num_ctas: int
) -> tuple[int, int]:
    """With whole tiles: a CTA's most key blocks, and the call's total."""
    mask, tiles = Band.of(window), sizes.heads_kv * sizes.num_m_blocks
    blocks = (
        mask.key_blocks(0, sizes.seqlen_q, TILE_N, Sequence(sizes.seqlen_q, max(0, n), window))
        for n in lengths
    )
    tile_blocks = np.array([seen.end - seen.begin for seen in blocks], np.int64)
    ends = (tiles * tile_blocks).cumsum()
    total = int(ends[-1])
    pieces = Chunks(total, PlainDivisor(num_ctas), total)
    cuts = pieces.begin(np.arange(num_ctas + 1))
    sequence = np.minimum(np.searchsorted(ends, cuts, side="right"), sizes.batch - 1)
    length = tile_blocks[sequence]
    begin = ends[sequence] - tiles * length
    # A piece goes on to where the next tile begins.
    cuts = begin + -((begin - cuts) // length) * length
    return int(np.diff(cuts).max()), total
