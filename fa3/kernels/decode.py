"""Decode attention for Hopper: few queries of each sequence against its cache.

`fa3.calls.execution` launches it on the caller's tensors, which receive O and the log-sum-exps.
Reading K and V once takes nearly all the time, so every SM must read equally much, throughout.
A tile is up to 64 query rows of one key/value head of one sequence: all its query heads and
positions. The key blocks of all tiles are cut into one piece for each CTA (`schedules.stream_k`),
which finds its piece from the lengths in device memory. If a tile spans several pieces, each writes
a part to the workspace. With few parts to merge, the CTA that takes the last of a tile's numbers
merges them into O; it waits only for CTAs that have nearly done. With more,
`kernels.combine` merges them. Where tiles may be cut anywhere (`StreamK`), each launch says which.

Roles per CTA
    warpgroup 0    consumer   Q into shared memory; S = Q K^T, softmax, O += P V; epilogue. On an
                              FP8 cache, up to 16 rows, each warp has its own keys of every block
    warp 4 or 4-7  producer   one warp that issues TMA loads, or four that gather rows
    warp 5         prefetcher prefetches the first blocks into L2; none if rows are gathered
    warps 6-7      converters of an FP8 cache's blocks to fp16, with more rows; warps 8-11 if rows
                              are gathered

Pipelines, producer -> consumer (mbarriers; a stage is full when its bytes have landed)
    pipeline_k  one block of K         kv_stages  released after its Q K^T
    pipeline_v  one block of V         kv_stages  released after its P V
    There are as many stages as fit: loads in flight hide the latency of memory.
    Converters, if any, take these blocks, and hand them on in two more pipelines.

Timeline of a launch (programmatic dependent launch)
    barriers, descriptors | find the piece | wait for the previous kernel | segments ...
    A piece that was found from lengths of before is found again. With many sequences it is found
    after the wait.
    The combine kernel is launched early and waits in hardware for the end of this one. This one
    starts in the same way while the previous kernel still runs, if that kernel allows it; the
    prefetcher works during this time. Where calls have no other kernel two CTAs fit on an SM, so
    that CTAs of the next call are there when this one ends. Else two of them would land on one SM.
    On an FP8 cache, up to 16 rows, each CTA has an SM of its own.

Timeline of the consumer in a segment: as in `kernels.forward`, with one warpgroup
    tensor cores   | S = Q K[n-1]^T | O += P[n] V[n] |
    warpgroup      |     waits      | softmax of S: row max, P[n-1], row sum | 16-bit P | ...

Source: Dao et al., Flash-Decoding for long-context inference (2023); Osama et al., Stream-K
(arXiv 2301.03598), section 4.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from fa3.kernels.decode_launch import TILE_N, DecodeArguments
from fa3.kernels.decode_memory import (
    DecodeBuffers,
    DecodeMemory,
    DecodeOperands,
    GatheredAttention,
    consumer_barrier,
)
from fa3.primitives.arguments import operands_of
from fa3.primitives.arithmetic import Divisor, PlainDivisor
from fa3.primitives.attention import Attention, Mmas, NoPingPong
from fa3.primitives.cache_blocks import (
    EVICT_FIRST,
    EVICT_NORMAL,
    CacheTables,
    GatheredBlocks,
    TmaBlocks,
    stream_of_keys,
)
from fa3.primitives.fp8_blocks import CacheConverter, convert_rows
from fa3.primitives.fragments import (
    as_rows_and_columns,
    convert,
    convert_words,
    read_fragment,
)
from fa3.primitives.output_store import PartCounter, RowLse, shared_by
from fa3.primitives.packed_rows import (
    PackedCoords,
    Workspace,
    WorkspaceSize,
    fetch_rows,
    merge_parts,
    store_part,
    store_rows,
)
from fa3.primitives.ragged_lengths import RaggedLengths, read_early
from fa3.primitives.softmax import LOG2_E, OnlineSoftmax
from fa3.primitives.tma import rows_first
from fa3.primitives.warp_attention import WarpAttention, WarpFragments, coords_of_warp
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS
from fa3.problem import Window
from fa3.schedules.order import Segment, Tile
from fa3.schedules.ragged import CTAS_BESIDE
from fa3.schedules.sequences import Cached, capacity_of
from fa3.schedules.stream_k import (
    BY_CTA,
    CtaGroup,
    CtaGroups,
    FixedSplit,
    NoSplit,
    Place,
    StreamK,
    Walk,
)
from fa3.scores.masks import Blocks, Sequence
from fa3.scores.scores import ScorePipeline, bind

EARLY_BLOCKS = 4  # blocks that a CTA prefetches into L2 while the previous kernel still runs

EARLY_SEQUENCES = 1024
"""Most sequences for which a CTA finds its piece that early; with more it prefetches nothing."""


@cute.jit
def is_same(before: tuple, after: tuple):
    """Whether all lanes have the same numbers twice."""
    same = cutlass.Boolean(True)
    for one, other in zip(before, after, strict=True):
        same = same & (one == other)
    return cute.arch.vote_all_sync(same)


@dataclass(frozen=True)
class Decode(DecodeMemory):
    """The decode kernel: its launch and the roles of its warps."""

    entry_name: ClassVar[str] = "fa3_decode"
    arguments_type: ClassVar[type] = DecodeArguments

    @cute.jit
    def launch(self, call: DecodeArguments, stream):
        ratio, page_table = self.qhead_per_kvhead, call.page_table
        q, o = call.q, call.o
        packed_q = packed_k = None
        if cutlass.const_expr(self.is_packed):
            packed_q = RaggedLengths(call.cu_seqlens_q, call.seqused_q, q.shape[0])
            q, o = (
                cute.make_tensor(t.iterator, shared_by(packed_q.num_sequences, t.layout))
                for t in (q, o)
            )
        batch, rows_q, heads_q, _ = q.shape
        if cutlass.const_expr(self.cache.is_packed):
            packed_k = RaggedLengths(call.cu_seqlens_k, call.seqlens, call.k.shape[0])
            seqlens, capacity = None, call.max_seqlen_k
            k, v = (
                cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))
                for t in (call.k, call.v)
            )
        else:
            pages = 1 if page_table is None else page_table.shape[1]
            seqlens, capacity = call.seqlens, capacity_of(call.k.shape[1], pages)
            k, v = map(rows_first, (call.k, call.v))
        if cutlass.const_expr(not self.gathers):
            k = TmaBlocks.descriptor(k, self.columns, self.box)
            v = TmaBlocks.descriptor(v, self.columns_v, self.box)
        seqlen_q = call.max_seqlen_q if self.is_packed else rows_q
        rows = seqlen_q * ratio
        num_m_blocks, num_heads = cute.ceil_div(rows, ROWS), heads_q // ratio
        num_tiles = batch * num_heads * num_m_blocks
        cut = NoSplit()
        if cutlass.const_expr(self.cut_type is StreamK):
            cut = StreamK(call.num_ctas, BY_CTA if self.is_packed else num_tiles)
        if cutlass.const_expr(self.cut_type is CtaGroups):
            cut = CtaGroups(call.num_ctas, call.width)
        if cutlass.const_expr(self.cut_type is FixedSplit):
            unit = call.unit_blocks, call.max_parts, num_tiles, call.longest_unit
            cut = FixedSplit(call.num_splits, *unit)
        workspace = None
        if cutlass.const_expr(self.cut_type.has_parts):
            size = WorkspaceSize(cut.num_records, cut.num_slots, cutlass.min(rows, ROWS))
            workspace = Workspace.of(call.workspace, size, self.spec.head_dim_v)
        lse = RowLse.at(call.lse, (batch, heads_q, rows_q), self.is_packed)
        named = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "workspace": workspace}
        tables = CacheTables(call.batch_idx, call.leftpad, page_table)
        keys = {"packed_q": packed_q, "packed_k": packed_k, "seqlens": seqlens, "tables": tables}
        operands = operands_of(DecodeOperands, call, **named, **keys)
        num_crews, num_groups = call.num_ctas // cut.width, num_heads // cut.width
        divisors = Divisor.of(num_m_blocks), Divisor.of(num_crews), Divisor.of(cut.width)
        window = Window(call.window_left, call.window_right)
        sizes = capacity, seqlen_q, window, *divisors, num_groups
        self.kernel(operands, cut, sizes).launch(
            grid=(call.num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_of_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: DecodeOperands, cut, sizes: tuple):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in () if self.gathers else (operands.k, operands.v):
                cpasync.prefetch_descriptor(tma.atom)
        smem = self.setup_shared_memory()
        if cutlass.const_expr(not self.overlaps_forward):
            cute.arch.griddepcontrol_launch_dependents()
        call = operands, smem, cut, sizes
        is_prefetcher = warp_idx == self.prefetcher
        if cutlass.const_expr(not self.overlaps_forward or self.cache.is_fp8):
            self.find_and_attend(call, is_prefetcher)
        elif not is_prefetcher:
            self.attend_beside(call)

    @cute.jit
    def attend_beside(self, call: tuple):
        """Attend while the forward kernel may run.
        Its table says by how many CTAs."""
        operands, smem, cut, sizes = call
        cute.arch.griddepcontrol_wait()
        # The forward kernel may begin: all before this kernel has ended.
        cute.arch.griddepcontrol_launch_dependents()
        capacity, seqlen_q, window, num_m_blocks, _, *rest = sizes
        count = cute.arch.make_warp_uniform(operands.table[CTAS_BESIDE])
        fewer = capacity, seqlen_q, window, num_m_blocks, PlainDivisor(count), *rest
        cta, _, _ = cute.arch.block_idx()
        if cta < count:
            walk = self.new_walk(operands, cut, fewer, is_early=False)
            self.attend(operands, smem, replace(walk, place=self.locate(walk)))
        elif cute.arch.thread_idx()[0] == 0:
            operands.workspace.clear_record(cta)

    @cute.jit
    def find_and_attend(self, call: tuple, is_prefetcher):
        """Find this CTA's piece while the previous kernel ends; attend after it.
        If a length has changed meanwhile, the piece is found again. Each lane watches one sequence.
        With more sequences than lanes it is found after the wait, unless the cache is full."""
        operands, smem, cut, sizes = call
        batch = operands.q.shape[0]
        early, late = (self.new_walk(operands, cut, sizes, is_early) for is_early in (True, False))
        # Written with `batch - 1`, the compiler would keep that in a register and spill others.
        watched = cutlass.min(cute.arch.lane_idx() + 1, batch) - 1
        before = early.lengths.read(watched)
        # Each lane has the length of one sequence, if there are few.
        place = self.locate(early) if self.cache.is_full else early.locate_among_few(before)
        if is_prefetcher:
            if cutlass.const_expr(self.converts):
                cute.arch.setmaxregister_decrease(self.registers[1])
            if cutlass.const_expr(not self.gathers):
                if cutlass.const_expr(not self.cache.is_full):  # noqa: SIM102
                    if batch > WARP and batch <= EARLY_SEQUENCES:
                        place = self.locate(early)
                self.prefetch(operands, smem, replace(early, place=place))
        else:
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(not self.cache.is_full):  # noqa: SIM102
                if batch > WARP or not is_same(before, late.lengths.read(watched)):
                    place = self.locate(late)
            self.attend(operands, smem, replace(late, place=place))

    @cute.jit
    def attend(self, operands: DecodeOperands, smem: DecodeBuffers, walk: Walk):
        """Do this warp's share of this CTA's piece.
        All warps have found it by the same instructions: copies of these come into the SM late."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx < WARPS:
            if cutlass.const_expr(self.converts):
                cute.arch.setmaxregister_increase(self.registers[0])
            self.mma(operands, smem, walk)
        else:
            if cutlass.const_expr(self.converts):
                cute.arch.setmaxregister_decrease(self.registers[1])
            cursor = walk.first()
            if cutlass.const_expr(not self.converts):  # noqa: SIM114, joined both would be traced
                self.load(operands, smem, walk, cursor)
            elif warp_idx < self.first_converter:
                self.load(operands, smem, walk, cursor)
            else:
                self.convert(smem, walk, cursor)

    def new_walk(self, operands: DecodeOperands, cut, sizes: tuple, is_early: bool) -> Walk:
        """The walk over this CTA's segments, without its place."""
        capacity, seqlen_q, window, num_m_blocks, num_crews, width, num_groups = sizes
        lengths = Cached(
            operands.q.shape[0],
            operands.seqlens,
            operands.seqlen_new,
            operands.tables,
            self.spec.mask,
            seqlen_q,
            capacity,
            window,
            TILE_N,
            is_early,
            operands.packed_q,
            self.qhead_per_kvhead,
            operands.packed_k,
        )
        cta, _, _ = cute.arch.block_idx()
        crew = CtaGroup(cta, 0, 1)
        if self.cut_type is CtaGroups:
            index = width.quotient(cta)
            crew = CtaGroup(index, cta - index * width.value, width.value)
        number = Int32
        if self.is_long:
            number, num_crews = Int64, PlainDivisor(num_crews.value)
        return Walk(cut, lengths, num_m_blocks, num_groups, num_crews, crew, number=number)

    def locate(self, walk: Walk) -> Place:
        """Where the piece of this CTA's crew is."""
        return walk.locate_among_equals() if self.cache.is_full else walk.locate()

    # ------------------------------------------------------------------------------ producer

    @cute.jit
    def load(self, operands: DecodeOperands, smem: DecodeBuffers, walk: Walk, cursor):
        """Stream segments' K and V into shared memory, in the consumer's order."""
        stages, producer = self.config.kv_stages, pipeline.PipelineUserType.Producer
        k_state = pipeline.make_pipeline_state(producer, stages)
        v_state = pipeline.make_pipeline_state(producer, stages)
        # With one tile for each key/value head, each block is read only once.
        policy = Int64(EVICT_FIRST) if walk.num_m_blocks.value == 1 else Int64(EVICT_NORMAL)
        blocks_k = self.blocks_of(operands.k, smem.k.loaded, operands.tables.page_table, policy)
        blocks_v = self.blocks_of(operands.v, smem.v.loaded, operands.tables.page_table, policy)

        while walk.is_valid(cursor):
            following = walk.next(cursor)
            keys = walk.lengths.keys(walk.tile(cursor), cursor.length)
            stream = stream_of_keys(keys, blocks_k, blocks_v, smem.k, smem.v, not self.gathers)
            begin, n_block = walk.lengths.blocks_at(walk, cursor)
            place, k_state = stream.first(n_block, k_state)
            place, k_state, v_state = stream.rest(begin, n_block, place, k_state, v_state)
            k_state, v_state = stream.last(place, k_state, v_state)
            cursor = following

    @cute.jit
    def prefetch(self, operands: DecodeOperands, smem: DecodeBuffers, walk: Walk):
        """Prefetch the first blocks into L2 while the previous kernel ends.
        L2 is coherent, so blocks that the previous kernel still writes are safe. Lengths and page
        tables may be outdated; then wrong blocks are prefetched, but TMA stays inside the cache."""
        if operands.q.shape[0] <= EARLY_SEQUENCES:
            cursor = walk.first()
            if walk.is_valid(cursor):
                keys = walk.lengths.keys(walk.tile(cursor), cursor.length)
                pages = operands.tables.page_table, self.box, Int64(EVICT_NORMAL)
                blocks_k = TmaBlocks(operands.k, smem.k.loaded, *pages, is_early=True)
                blocks_v = TmaBlocks(operands.v, smem.v.loaded, *pages, is_early=True)
                prefetch_k, prefetch_v = blocks_k.loader(keys), blocks_v.loader(keys)
                begin, last = walk.lengths.blocks_at(walk, cursor)
                for i in cutlass.range(cutlass.min(last - begin + 1, EARLY_BLOCKS)):
                    place = blocks_k.find(last - i, keys)
                    prefetch_k(place)
                    prefetch_v(place)

    def blocks_of(self, cache, smem: cute.Tensor, page_table: cute.Tensor | None, policy):
        """The finder and loader of blocks of K or V."""
        if self.gathers:
            thread, _, _ = cute.arch.thread_idx()
            return GatheredBlocks(cache, smem, page_table, thread - WARPGROUP)
        return TmaBlocks(cache, smem, page_table, self.box, policy)

    # ----------------------------------------------------------------------------- converter

    @cute.jit
    def convert(self, smem: DecodeBuffers, walk: Walk, cursor):
        """Convert the blocks of every segment, in the consumer's order."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.first_converter
        converter = CacheConverter((smem.k, smem.v), warp, thread % WARP, self.converters)
        states = converter.states
        while walk.is_valid(cursor):
            following = walk.next(cursor)
            begin, n_block = walk.lengths.blocks_at(walk, cursor)
            states = converter.run(n_block + 1 - begin, states)
            cursor = following

    # ------------------------------------------------------------------------------ consumer

    @cute.jit
    def mma(self, operands: DecodeOperands, smem: DecodeBuffers, walk: Walk):
        """Compute attention for this CTA's segments."""
        thread, _, _ = cute.arch.thread_idx()
        scores, mask, sinks = bind(self.spec, operands.modifiers)
        if cutlass.const_expr(self.config.keys_by_warp):
            warp = cute.arch.make_warp_uniform(thread // WARP)
            mmas, kind = None, WarpAttention
            regs = WarpFragments.of(smem.k.blocks, smem.v.blocks, warp)
        else:
            sources = warpgroup.OperandSource
            source_q = sources.RMEM if self.holds_q else sources.SMEM
            mmas = Mmas.of(self.element, TILE_N, self.columns_v, source_q)
            regs = mmas.fragments(smem.q, smem.k.blocks, smem.v.blocks)
            kind = GatheredAttention if self.gathers and not self.cache.is_fp8 else Attention
        consumer = pipeline.PipelineUserType.Consumer
        k_state = pipeline.make_pipeline_state(consumer, cute.size(smem.k.blocks, mode=[2]))
        v_state = pipeline.make_pipeline_state(consumer, cute.size(smem.v.blocks, mode=[2]))
        if cutlass.const_expr(self.cut_type is StreamK):  # noqa: SIM102
            # `store` fills this CTA's record if a tile with parts begins in this piece.
            if thread == 0 and walk.cut.num_tiles > walk.cut.num_ctas:
                operands.workspace.clear_record(walk.crew.cta)
        cursor, q_stage = walk.first(), Int32(0)
        descales = self.fetch_q(operands, smem.q, walk, cursor, q_stage)
        while walk.is_valid(cursor):
            segment, following = walk.segment(cursor), walk.next(cursor)
            tile, length = segment.tile, cursor.length
            scale, scale_v = operands.softmax_scale, None
            cute.arch.cp_async_wait_group(0)
            sQ = smem.q[None, None, q_stage]
            if cutlass.const_expr(self.converts):
                _, seqlen_q = walk.lengths.queries(length)
                rows = seqlen_q * self.qhead_per_kvhead - tile.m_block * ROWS
                context = smem.largest, consumer_barrier(), thread
                scale *= convert_rows(sQ, operands.q.element_type, rows, *context)
            if cutlass.const_expr(self.cache.is_fp8):
                scale_k, scale_v, *scale_q = descales
                for one in (scale_k, *scale_q):
                    scale *= one
            if cutlass.const_expr(not self.config.keys_by_warp):
                # The warpgroup's WGMMAs see what it has written to shared memory.
                cute.arch.fence_proxy("async.shared", space="cta")
            consumer_barrier().arrive_and_wait()
            if cutlass.const_expr(self.config.keys_by_warp):
                scale *= regs.read_q(sQ, operands.q.element_type)
            elif cutlass.const_expr(self.holds_q):
                read_fragment(sQ, mmas.qk, thread, regs.q)
            if cutlass.const_expr(self.config.q_stages > 1):
                descales = self.fetch_q(operands, smem.q, walk, following, 1 - q_stage)
            sequence, first_block = walk.lengths.sequence(length), walk.lengths.blocks(length).begin
            if cutlass.const_expr(self.config.keys_by_warp):
                coords = coords_of_warp(warp, tile, TILE_N, self.qhead_per_kvhead)
            else:
                coords = PackedCoords.of_tile(mmas.qk, thread, TILE_N, tile, self.qhead_per_kvhead)
            rules = ScorePipeline.of(scores, mask, coords, sequence, scale)
            softmax = OnlineSoftmax.create(2, rules.unit * LOG2_E)
            q = regs.q if self.holds_q else regs.q[None, None, None, q_stage]
            fields = mmas, regs, q, smem.k.pipe, smem.v.pipe, softmax, rules, NoPingPong()
            attention = kind(*fields, scale_v=scale_v)

            blocks = self.key_blocks(tile, sequence)
            # The producer loads what any query of the sequence touches, this tile or not.
            blocks = blocks.walked(first_block + segment.begin, first_block + segment.end)
            k_state = attention.first(blocks.end - 1, k_state)
            if cutlass.const_expr(self.holds_q and self.config.q_stages == 1):  # noqa: SIM102
                if walk.is_valid(following):
                    consumer_barrier().arrive_and_wait()  # All warps have Q in registers.
                    descales = self.fetch_q(operands, smem.q, walk, following, q_stage)
            last, meet = blocks.end - 1, consumer_barrier().arrive_and_wait
            attention.clear_past_end(smem.v.blocks, last, v_state, thread, meet)
            k_state, v_state = attention.rest(blocks, k_state, v_state)
            number = Int32(0)
            if cutlass.const_expr(self.may_merge):
                number = self.take_number(operands.counters, segment, thread)
            v_state = attention.last(v_state)
            if cutlass.const_expr(self.config.keys_by_warp):
                rows = walk.lengths.queries(length)[1] * self.qhead_per_kvhead
                attention = attention.merged(smem.sums, warp, rows, meet)
            if cutlass.const_expr(self.config.q_stages > 1):
                q_stage = 1 - q_stage
            elif cutlass.const_expr(not self.holds_q):
                # A warp knows only that itself has read Q: wait for the others.
                consumer_barrier().arrive_and_wait()
                descales = self.fetch_q(operands, smem.q, walk, following, q_stage)
            queries = walk.lengths.queries(length)
            rows = operands.o, operands.lse, sinks, queries
            self.store(operands.workspace, segment, attention, rows)
            if cutlass.const_expr(self.may_merge):  # noqa: SIM102, joined both would be traced
                if self.merges(operands.counters, segment):
                    self.hand_over(operands, smem.number, number, segment, rows)
            cursor = following

    def key_blocks(self, tile: Tile, sequence: Sequence) -> Blocks:
        """Key blocks that the rows of one tile touch, of all heads.
        The band of the spec's mask gives them: ranges of a user's mask may differ by head."""
        ratio, row = self.qhead_per_kvhead, tile.m_block * ROWS
        first, last = row // ratio, (row + ROWS - 1) // ratio
        return self.spec.mask.key_blocks(first, last - first + 1, TILE_N, sequence)

    @cute.jit
    def fetch_q(self, operands: DecodeOperands, sQ: cute.Tensor, walk: Walk, cursor, stage):
        """Start to copy Q rows of the cursor's tile, if valid.
        Return the descales of the tile."""
        thread, _, _ = cute.arch.thread_idx()
        tile = walk.tile(cursor)
        descales = self.descales(operands, tile)
        if walk.is_valid(cursor):
            ratio = self.qhead_per_kvhead
            queries = walk.lengths.queries(cursor.length)
            fetch_rows(operands.q, sQ[None, None, stage], tile, queries, ratio, thread)
        cute.arch.cp_async_commit_group()
        return descales

    def descales(self, operands: DecodeOperands, tile: Tile) -> tuple:
        """The descales of a tile, () without an FP8 cache.
        If it is past the last tile they may be any.
        The compiler must not move the loads past the wait for Q: they would come after it."""
        if operands.descales is None:
            return ()
        batch = cutlass.min(tile.batch + 1, operands.q.shape[0]) - 1
        return tuple(read_early(one, (batch, tile.head)) for one in operands.descales)

    # ------------------------------------------------------------------------------ epilogue

    # Below, `rows` says where rows of a tile go: O, log-sum-exps, sinks, and queries as in
    # `fa3.primitives.packed_rows`.

    @cute.jit
    def store(self, workspace, segment: Segment, attention: Attention, rows: tuple):
        """Write a tile's rows to O, or a part's to the workspace."""
        part, acc_O = segment.part, as_rows_and_columns(attention.regs.acc_O)
        if cutlass.const_expr(self.cut_type.has_parts):
            if part.num_parts == 1:
                self.store_rows(attention, rows)
            else:
                lse = attention.finish()
                coords, size = attention.rules.coords, attention.neighbours
                store_part(workspace, part.slot, acc_O, lse, coords, size)
            if cutlass.const_expr(self.cut_type is not CtaGroups):
                self.record(workspace, segment, rows[-1])
        else:
            self.store_rows(attention, rows)

    @cute.jit
    def record(self, workspace: Workspace, segment: Segment, queries: tuple):
        """Tell the combine kernel, if any, of a tile's parts.
        The CTA with the tile's first segment does it."""
        part = segment.part
        record = (*segment.tile, part.first_slot, part.num_parts)
        if cutlass.const_expr(self.is_packed):
            record = (*record, *queries)
        if segment.begin == 0 and cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(record)):
                workspace.records[part.record, i] = record[i]

    @cute.jit
    def store_rows(self, attention: Attention, rows: tuple):
        """Finish the rows of a whole tile; write O and the log-sum-exps."""
        acc_O, rules = attention.regs.acc_O, attention.rules
        out, row_lse, sinks, queries = rows
        lse = attention.finish(rules.sinks_of_rows(sinks))
        converted = cute.make_rmem_tensor_like(acc_O, self.dtype)
        # A warp's share of columns may be no multiple of what `convert` takes at once.
        (convert_words if self.config.keys_by_warp else convert)(acc_O, converted)
        context = out, row_lse, rules.coords, queries, attention.neighbours
        store_rows(as_rows_and_columns(converted), lse, *context)

    # --------------------------------------------------------------------------------- merge

    def merges(self, counters, segment: Segment):
        """Whether a segment is a part that this kernel merges."""
        is_part = segment.part.num_parts > 1
        return is_part if self.cut_type is CtaGroups else is_part & (counters != 0)

    def counter(self, counters: Int64, segment: Segment) -> PartCounter:
        first = cute.make_ptr(Int32, counters, cute.AddressSpace.gmem, assumed_align=4)
        return PartCounter(first + segment.part.first_slot, segment.part.num_parts - 1)

    @cute.jit
    def take_number(self, counters: Int64, segment: Segment, thread) -> Int32:
        """Count a part that is nearly done; thread 0 gets its number."""
        number = Int32(0)
        if thread == 0 and self.merges(counters, segment):
            number = self.counter(counters, segment).take_number()
        return number

    @cute.jit
    def hand_over(self, operands, sNumber: cute.Tensor, number, segment: Segment, rows: tuple):
        """Count a part as written; if it is the last, merge all.
        The last CTA waits for the others. These have come, so they run, and until they have left
        they wait for no CTA."""
        thread, _, _ = cute.arch.thread_idx()
        counter = self.counter(operands.counters, segment)
        if thread == 0:
            sNumber[0] = number
        consumer_barrier().arrive_and_wait()
        if not counter.is_last(sNumber[0]):
            if thread == 0:
                counter.leave()
        else:
            if thread == 0:
                counter.await_others()
                counter.reset()
            consumer_barrier().arrive_and_wait()
            merge_parts(operands.workspace, segment, self.qhead_per_kvhead, thread, *rows)
