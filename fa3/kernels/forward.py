"""Forward attention for Hopper: O = softmax(scale Q K^T + mask) V.

`fa3.calls.execution` launches it on the caller's tensors, which receive O and the log-sum-exps.
A CTA computes tile after tile: query rows of one head. It streams the key blocks that the mask
touches, from the last to the first, and keeps a running softmax, so scores never leave registers.
With a `cache`, packed queries attend to keys in a cache or its pages, whose blocks come in boxes.
Each consumer warpgroup owns 64 rows of the tile and skips blocks in which they see no key.

Roles per CTA
    warpgroup 0    producer   one warp issues all TMA loads; others convert blocks of FP8 caches
    warpgroup 1..  consumers  64 query rows each: S = Q K^T, softmax, O += P V, epilogue

Pipelines, producer -> consumer (mbarriers; a stage is full when its bytes have landed)
    pipeline_q  Q tile                 q_stages   released after its last Q K^T; see `convert_q`
    pipeline_k  one block of K         kv_stages  released after its Q K^T
    pipeline_v  one block of V         kv_stages  released after its P V
    Blocks of an FP8 cache are converted by warps (`forward_formats`), into `converted_stages`.
    K and V blocks are multicast to all CTAs of the cluster, which walk the same blocks.

Timeline of one consumer warpgroup in the main loop (block n, then block n - 1)
    tensor cores   | S = Q K[n-1]^T | O += P[n] V[n] |  (the other warpgroup's turn)
    this group     |     waits      | softmax of S: row max, P[n-1], row sum | 16-bit P | ...
    A ring of named barriers hands the tensor cores from one warpgroup to the next. So one group's
    softmax runs under another's WGMMA (ping-pong). Within a group the softmax of block n - 1 runs
    under the P V of block n.

Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers as sm90

from fa3.kernels.forward_epilogue import (
    ForwardBuffers,
    ForwardEpilogue,
    ForwardOperands,
    warp_of_tile,
)
from fa3.kernels.forward_formats import Fp8Keys, Fp8Products, SixteenBits
from fa3.kernels.forward_launch import ForwardArguments, ForwardConfig
from fa3.kernels.kernel_base import AttentionKernel
from fa3.primitives.arithmetic import Divisor
from fa3.primitives.attention import BlockStream, Mmas
from fa3.primitives.cache_blocks import EVICT_NORMAL, CacheLayout, TmaBlocks, stream_of_keys
from fa3.primitives.dropout import DropoutArguments, TileDropout
from fa3.primitives.fp8_blocks import (
    CONVERTED,
    CacheConverter,
    convert_registers,
    convert_rows,
    largest_of_warps,
)
from fa3.primitives.fp8_compute import ONES, fill_ones
from fa3.primitives.fragments import ScoreCoords, read_fragment
from fa3.primitives.output_store import PartMerge, RowLse, RowStore, SlabStore
from fa3.primitives.pipelines import lend_stages, skip_stages, tma_pipeline
from fa3.primitives.recorder import NoRecorder, Recorder
from fa3.primitives.shared_memory import LayoutEnum, SmemAllocator
from fa3.primitives.softmax import LOG2_E, OnlineSoftmax
from fa3.primitives.tma import (
    TmaTensor,
    packed_rows,
    ragged_tma_view,
    ragged_view_of_transposed,
    rows_first,
    rows_of_transposed,
    tile_loader,
)
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS, smem_layout
from fa3.problem import AttentionSpec, Window
from fa3.schedules import Segment, Tile
from fa3.schedules.order import KernelOrder
from fa3.schedules.ragged import RaggedOrder
from fa3.schedules.recompute import RecomputeMask, RecomputeTiles
from fa3.schedules.sequences import Dense, MultiSequence, Ragged
from fa3.schedules.shared_tiles import MultiSequenceOrder, MultiSequenceTiles
from fa3.scores.masks import Blocks, Sequence
from fa3.scores.scores import ScorePipeline, bind

FIRST_EPILOGUE_BARRIER = 5


@dataclass(frozen=True)
class Forward(AttentionKernel):
    """The forward kernel, compiled for one (spec, config, schedule type).
    With `is_recorded` it is the instrumented kernel, which records when it worked on which tile."""

    spec: AttentionSpec
    config: ForwardConfig
    schedule_type: type
    is_recorded: bool = False
    # Where packed queries find their keys; None if k and v are packed too, or dense.
    cache: CacheLayout | None = None
    # Whether packed q and o have a batch. The host would take 2 us to view them without.
    has_equal_queries: bool = False

    entry_name: ClassVar[str] = "fa3_forward"
    arguments_type: ClassVar[type] = ForwardArguments

    def __post_init__(self):
        self.config.validate(self.spec, self.cache is not None and self.cache.is_fp8)
        if self.config.cluster > 1 and not self.schedule_type.takes_pairs:
            raise ValueError(
                f"schedule {self.schedule_type.name!r} must have clusters of 1 CTA, got clusters "
                f"of {self.config.cluster}"
            )
        if self.cache is not None and not self.box:
            raise ValueError(f"cache must have its keys in boxes, got {self.cache}")

    @property
    def format(self) -> SixteenBits:
        """How blocks of K and V are given to WGMMAs."""
        kind = Fp8Products if self.spec.is_fp8 else SixteenBits
        if self.cache is not None and self.cache.is_fp8:
            kind = Fp8Keys
        dtype = CONVERTED if kind is Fp8Keys else self.dtype
        return kind(self.config, dtype, self.columns, self.columns_v)

    @property
    def box(self) -> int:
        """Keys of a cache that one TMA copy loads."""
        return self.cache.box(self.config.tile_n)

    @cute.jit
    def launch(self, call: ForwardArguments, stream):
        config = self.config
        window = Window(call.window_left, call.window_right)
        if cutlass.const_expr(self.has_equal_queries):
            call = call._replace(q=packed_rows(call.q), o=packed_rows(call.o))
        if cutlass.const_expr(self.schedule_type.is_ragged):
            sequences = MultiSequence(call.q.shape[0]) if self.packs_sequences else Ragged(window)
            q, o = map(ragged_tma_view, (call.q, call.o))
            view_k = ragged_tma_view if self.cache is None else rows_first
            k = view_k(call.k)
            v = (ragged_view_of_transposed if self.spec.is_fp8 else view_k)(call.v)
        else:
            sequences = Dense(call.q.shape[1], call.k.shape[1], window)
            q, k, o = map(rows_first, (call.q, call.k, call.o))
            v = (rows_of_transposed if self.spec.is_fp8 else rows_first)(call.v)
        blocks_k, blocks_v = self.format.memory
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_kv = load if config.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        rows_q, heads_q, _ = call.q.shape[-3:]
        lse = RowLse.at(call.lse, (self.batch(call), heads_q, rows_q))
        row_store = None
        if cutlass.const_expr(
            self.is_recompute
            or self.packs_sequences
            or self.schedule_type.splits
            or self.spec.has_float32_out
        ):
            row_store = RowStore(rows_first(call.o), lse)
        heads_of_key = Divisor.of(heads_q // k.shape[2])
        if cutlass.const_expr(self.cache is None):
            k = TmaTensor.of(load_kv, k, blocks_k.loaded_layout, config.cluster)
            v = TmaTensor.of(load_kv, v, blocks_v.loaded_layout, config.cluster)
        else:
            k = TmaBlocks.descriptor(k, self.columns, self.box)
            v = TmaBlocks.descriptor(v, self.columns_v, self.box)
        operands = ForwardOperands(
            TmaTensor.of(load, q, self.q_layout),
            k,
            v,
            TmaTensor.of(store, o, self.o_layout),
            lse,
            heads_of_key,
            call.modifiers,
            row_store,
            self.part_merge(call),
            self.marks(call),
            Recorder(call.recording) if self.is_recorded else NoRecorder(),
            call.page_table,
            None if call.dropout is None else DropoutArguments(*call.dropout),
            call.descales,
            call.softmax_scale,
            sequences,
        )
        order = self.order(call, config)
        schedule = self.schedule_type.on_device(order, call.num_clusters, call.schedule_state)
        self.kernel(operands, schedule, call.overlaps_decode).launch(
            grid=(config.cluster * call.num_clusters, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # without it ptxas may drop setmaxnreg (NVIDIA/cutlass#3406)
        )

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        return self.config.thread_registers(self.cache is not None)

    @property
    def stages_o_in_q(self) -> bool:
        """Whether O is staged where Q was, as with an FP8 cache."""
        return not (self.config.own_o or self.format.stages_o_in_v)

    @property
    def releases_q_early(self) -> bool:
        """Whether Q makes room as soon as registers hold it."""
        return self.format.holds_q and not self.stages_o_in_q

    @property
    def slabs_of_q(self) -> int:
        """Slabs in a stage of Q.

        With O in stages of V each warpgroup has its own: the first is done earlier than the others.
        """
        return 1 if self.format.stages_o_in_v else self.config.consumers

    @property
    def stages_of_q(self) -> int:
        """Stages of Q, of all warpgroups."""
        return self.config.q_stages * self.config.consumers // self.slabs_of_q

    @property
    def is_recompute(self) -> bool:
        """Whether this is the second launch, which computes marked rows."""
        return issubclass(self.schedule_type, RecomputeTiles)

    @property
    def packs_sequences(self) -> bool:
        """Whether tiles hold rows of several sequences.
        Rows that values of other sequences may have reached are marked."""
        return issubclass(self.schedule_type, MultiSequenceTiles)

    def batch(self, call: ForwardArguments):
        """The batch of the tensors; packed sequences are in one."""
        return 1 if self.schedule_type.is_ragged else call.q.shape[0]

    def order(self, call: ForwardArguments, config: ForwardConfig) -> KernelOrder | RaggedOrder:
        """The order of clusters' tiles, of a config that may be `recompute`."""
        rows_q, heads_q, _ = call.q.shape[-3:]
        if self.schedule_type.is_ragged:
            kind, table = RaggedOrder, call.table
            if self.packs_sequences and config is self.config:
                kind, table = MultiSequenceOrder, call.schedule_state
            ratio = heads_q // call.k.shape[-2]
            return kind.of(table, Divisor.of(heads_q), ratio, call.heads_per_group)
        return KernelOrder.of(
            cute.ceil_div(rows_q, config.tile_m * config.cluster_m),
            heads_q // config.cluster_h,
            self.batch(call),
            call.heads_per_group * (self.config.cluster_h // config.cluster_h),
        )

    def marks(self, call: ForwardArguments) -> RecomputeMask | None:
        """The marks of rows of Q; None without.
        They are by the tiles of the launch that computes these rows again."""
        words = call.schedule_state if self.is_recompute else call.marks
        if words is None:
            return None
        return RecomputeMask(words, self.order(call, self.config.recompute))

    def part_merge(self, call: ForwardArguments) -> PartMerge | None:
        """The merge of split tiles; a slot holds a cluster's rows."""
        if call.part_buffer is None:
            return None
        rows = self.config.tile_m * self.config.cluster
        buffers = call.part_buffer, call.part_counters, call.num_slots
        return PartMerge.of(*buffers, rows, self.columns_v)

    @property
    def q_layout(self) -> cute.ComposedLayout:
        """The layout of slabs of Q in shared memory, swizzled."""
        shape = ROWS, self.config.tile_n, self.columns
        slabs = self.config.consumers * self.config.q_stages
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, slabs)

    @property
    def o_layout(self) -> cute.ComposedLayout:
        """The same for slabs of O."""
        width, consumers = self.format.columns_pv, self.config.consumers
        return smem_layout(self.out_type, ROWS, self.columns_v, consumers, width)

    @cute.kernel
    def kernel(self, operands: ForwardOperands, schedule, overlaps_decode):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in (operands.q, operands.k, operands.v, operands.o):
                cpasync.prefetch_descriptor(tma.atom)
        smem, schedule = self.setup_shared_memory(schedule)
        cluster, _, _ = cute.arch.cluster_idx()
        # The first tile does not depend on the previous kernel: its table was uploaded earlier.
        cursor = schedule.first(cluster)
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(overlaps_decode is None):
            cute.arch.griddepcontrol_wait()
        elif overlaps_decode == 0:
            # If it is 1, the kernel before is the decode kernel. It waited for earlier ones itself.
            cute.arch.griddepcontrol_wait()
        producer_registers, consumer_registers = self.registers
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_idx == 0:
                self.load(operands, smem, schedule.for_producer(), cursor)
            if cutlass.const_expr(self.format.converters):  # noqa: SIM102, `and` would trace both
                if warp_idx >= WARPS - self.format.converters:
                    self.convert(operands, smem, schedule, cursor)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.mma(operands, smem, schedule, cursor)
        if cutlass.const_expr(overlaps_decode is not None):
            # A kernel that waits for this kernel's end also waits for the decode kernel's.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def setup_shared_memory(self, schedule):
        """Lay out shared memory, initialise the mbarriers and synchronize the cluster."""
        config, (blocks_k, blocks_v) = self.config, self.format.memory
        q_layout, o_layout, warps = self.q_layout, self.o_layout, WARPS * self.config.consumers
        has_o = config.own_o and not self.spec.has_float32_out
        o_elements = has_o * cute.cosize(o_layout)
        maxima = warps * config.q_stages * self.format.converts_q
        fields_k, fields_v = blocks_k.fields, blocks_v.fields
        has_ones = self.spec.is_fp8 and not config.exact

        @cute.struct
        class Storage:
            barriers_q: cute.struct.MemRange[Int64, 2 * self.stages_of_q]
            barriers_k: fields_k.barriers
            barriers_v: fields_v.barriers
            schedule: cute.struct.MemRange[Int64, self.schedule_type.shared_words]
            ones: cute.struct.Align[cute.struct.MemRange[self.dtype, ONES * has_ones], ONES]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: fields_k.blocks
            v: fields_v.blocks
            o: cute.struct.Align[cute.struct.MemRange[self.out_type, o_elements], 1024]
            loaded_k: fields_k.loaded
            loaded_v: fields_v.loaded
            largest: cute.struct.MemRange[Int32, maxima]
            loaded_barriers_k: fields_k.loaded_barriers
            loaded_barriers_v: fields_v.loaded_barriers

        storage = SmemAllocator().allocate(Storage)
        buffer_o, outer_o = storage.o if has_o else storage.q, o_layout.outer
        if cutlass.const_expr(self.format.stages_o_in_v):
            buffer_o = storage.v
            stages = cute.make_layout(config.kv_stages, stride=config.tile_n * self.columns_v)
            outer_o = cute.append(cute.slice_(outer_o, (None, None, 0)), stages)
        sizes = cute.make_layout((WARPS, config.consumers, config.q_stages))
        new_pipeline = partial(tma_pipeline, peers=config.cluster)
        smem = ForwardBuffers(
            storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            tma_pipeline(
                storage.barriers_q,
                self.dtype,
                q_layout,
                warps * self.slabs_of_q // config.consumers,
                self.slabs_of_q,
            ),
            blocks_k.ring(storage, "k", new_pipeline, warps),
            blocks_v.ring(storage, "v", new_pipeline, warps),
            buffer_o.get_tensor(outer_o, swizzle=o_layout.inner, dtype=self.out_type),
            storage.largest.get_tensor(sizes) if maxima else None,
            fill_ones(storage.ones) if has_ones else None,
        )
        schedule = schedule.connected(storage.schedule.data_ptr(), warps + self.format.converters)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        return smem, schedule

    def pipeline_states(self, user: pipeline.PipelineUserType):
        """Initial states of the producer or a consumer: Q, K and V."""
        keys = (self.config.kv_stages,) * 2
        if user is pipeline.PipelineUserType.Consumer:
            keys = tuple(blocks.stages for blocks in self.format.memory)
        return tuple(pipeline.make_pipeline_state(user, n) for n in (self.stages_of_q, *keys))

    def cluster_rank(self):
        """This CTA's rank among those that share K and V."""
        if self.config.cluster == 1:
            return 0
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def tile_of(self, segment: Segment, rank) -> Tile:
        """The tile of one CTA; the segment names the cluster's tile."""
        config, (m_block, head, batch) = self.config, segment.tile
        if config.cluster_h > 1:
            return Tile(m_block, head * config.cluster_h + rank, batch)
        return Tile(m_block * config.cluster_m + rank, head, batch)

    def key_blocks(self, mask, segment: Segment, sequence: Sequence) -> Blocks:
        """Key blocks that any row of the cluster touches.
        All its CTAs receive the same blocks."""
        rows = self.config.tile_m * self.config.cluster_m
        blocks = mask.key_blocks(segment.tile.m_block * rows, rows, self.config.tile_n, sequence)
        if self.schedule_type.splits:
            return blocks.between(segment.begin, segment.end)
        return blocks

    # ------------------------------------------------------------------------------ producer

    @cute.jit
    def load(self, operands: ForwardOperands, smem: ForwardBuffers, schedule, cursor):
        """Stream tiles' Q, K and V into shared memory, in consumers' order."""
        config, sequences = self.config, operands.sequences
        rank = self.cluster_rank()
        copies = 1, rank, config.cluster  # of a block, see `tile_loader`
        _, mask, _ = bind(self.spec, operands.modifiers)
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        stages_of_o = Int32(0)  # of V, for O of the tile before
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            tile = self.tile_of(segment, rank)
            sequence = sequences.sequence(segment)
            blocks = self.key_blocks(mask.at(tile.batch, tile.head), segment, sequence)
            head_kv = operands.heads_of_key.quotient(tile.head)
            rows_of_v = sequences.values_transposed if self.spec.is_fp8 else sequences.keys
            query_rows = tile.head, sequences.queries(segment), self.slabs_of_q
            load_q = tile_loader(operands.q, smem.q, smem.pipe_q, *query_rows)
            if cutlass.const_expr(self.cache is None):
                pairs = (operands.k, smem.k, sequences.keys), (operands.v, smem.v, rows_of_v)
                load_k, load_v = (
                    tile_loader(tma, ring.loaded, ring.loading, head_kv, rows(segment), *copies)
                    for tma, ring, rows in pairs
                )
                stream = BlockStream(lambda n_block: n_block, load_k, load_v)
            else:
                first, _ = mask.key_range(tile.m_block * config.tile_m, sequence)
                keys = sequences.keys_of_cache(segment, head_kv, first)
                pages = operands.page_table, self.box, Int64(EVICT_NORMAL)
                blocks_k = TmaBlocks(operands.k, smem.k.loaded, *pages, copies_at_once=2)
                blocks_v = TmaBlocks(operands.v, smem.v.loaded, *pages, copies_at_once=2)
                stream = stream_of_keys(keys, blocks_k, blocks_v, smem.k, smem.v)
            n_block = blocks.end - 1
            place, k_state = stream.first(n_block, k_state)
            slabs = config.consumers // self.slabs_of_q
            for i in cutlass.range_constexpr(slabs):
                q_state = load_q(tile.m_block * slabs + i, q_state)
            if cutlass.const_expr(self.format.stages_o_in_v):
                v_state = lend_stages(smem.v.loading, stages_of_o, v_state)
                stages_of_o = Int32(config.consumers)
            place, k_state, v_state = stream.rest(blocks.begin, n_block, place, k_state, v_state)
            cursor = schedule.next(cursor)
            k_state, v_state = stream.last(place, k_state, v_state)
        schedule.finish()
        if cutlass.const_expr(self.format.stages_o_in_v):
            v_state = lend_stages(smem.v.loading, stages_of_o, v_state)
        if cutlass.const_expr(config.cluster > 1):
            # The peer arrives on this CTA's mbarriers when it releases blocks: stay until then.
            smem.k.loading.producer_tail(k_state)
            smem.v.loading.producer_tail(v_state)

    @cute.jit
    def convert(self, operands: ForwardOperands, smem: ForwardBuffers, schedule, cursor):
        """Convert loaded blocks of every tile, in the consumers' order."""
        _, mask, _ = bind(self.spec, operands.modifiers)
        thread, _, _ = cute.arch.thread_idx()
        warps = self.format.converters
        warp = cute.arch.make_warp_uniform(thread // WARP) - (WARPS - warps)
        converter = CacheConverter((smem.k, smem.v), warp, thread % WARP, warps)
        states = converter.states
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            tile = self.tile_of(segment, self.cluster_rank())
            sequence = operands.sequences.sequence(segment)
            blocks = self.key_blocks(mask.at(tile.batch, tile.head), segment, sequence)
            states = converter.run(blocks.end - blocks.begin, states)
            cursor = schedule.next(cursor)

    # ------------------------------------------------------------------------------ consumer

    @cute.jit
    def mma(self, operands: ForwardOperands, smem: ForwardBuffers, schedule, cursor):
        """Compute this warpgroup's 64 rows of every tile."""
        config = self.config
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        group = cute.arch.make_warp_uniform(thread_idx // WARPGROUP) - 1
        rank = self.cluster_rank()
        scores, mask, sinks = bind(self.spec, operands.modifiers)
        recorder = operands.recorder
        new_attention, mmas, turns = self.format.consumer(group, smem.ones)
        regs = mmas.fragments(smem.q, smem.k.blocks, smem.v.blocks)
        turns.start()
        out = SlabStore(operands.o, smem.o, mmas.pv, thread, group, FIRST_EPILOGUE_BARRIER)
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        if cutlass.const_expr(self.slabs_of_q == 1):
            for _ in cutlass.range(group, unroll=1):
                q_state.advance()
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            began = recorder.now()
            tile = self.tile_of(segment, rank)
            slab = tile.m_block * config.consumers + group
            shape, begins = (ROWS, config.tile_n), (slab * ROWS, 0)
            coords = ScoreCoords.of(mmas.qk, thread, shape, begins, config.tile_n, tile)
            sequence = operands.sequences.sequence(segment)
            scale, scale_v = self.scales(operands, tile)
            if cutlass.const_expr(self.format.converts_q):
                scale *= self.convert_q(smem, mmas, regs.q, q_state, group, thread, out.barrier)
            mask_of_head = mask.at(tile.batch, tile.head)
            rules = ScorePipeline.of(scores, mask_of_head, coords, sequence, scale)
            blocks = self.key_blocks(rules.mask, segment, sequence)
            touched = self.blocks_of_rows(rules.mask, blocks, slab * ROWS, sequence)
            row_max = self.format.row_max(rules.bound)
            softmax = OnlineSoftmax.create(2, rules.unit * LOG2_E, row_max)
            smem.pipe_q.consumer_wait(q_state)
            q = self.operand_q(regs.q, q_state, group)
            dropout = None
            if cutlass.const_expr(self.spec.has_dropout):
                dropout = TileDropout.of(operands.dropout, coords)
            fields = mmas, regs, q, smem.k.pipe, smem.v.pipe, softmax, rules, turns
            attention = new_attention(*fields, dropout, scale_v)

            k_state, v_state = attention.skip(blocks.end - touched.end, k_state, v_state)
            k_state = attention.first(touched.end - 1, k_state)
            if cutlass.const_expr(self.releases_q_early):
                # Registers hold Q, as the WGMMAs show.
                smem.pipe_q.consumer_release(q_state)
            if cutlass.const_expr(self.cache is not None):
                last = touched.end - 1
                attention.clear_past_end(smem.v.blocks, last, v_state, thread, out.meet)
            started = recorder.now()
            k_state, v_state = attention.rest(touched, k_state, v_state)
            if cutlass.const_expr(not (self.stages_o_in_q or self.releases_q_early)):
                smem.pipe_q.consumer_release(q_state)
            parts = number = None
            if cutlass.const_expr(self.schedule_type.splits):
                warp = rank * (config.consumers * WARPS) + warp_of_tile(thread_idx)
                parts = operands.parts.at(segment.part, warp)
                number = parts.take_number()
            if cutlass.const_expr(not self.skips_before_next):
                cursor = schedule.next(cursor)
            v_state = attention.last(v_state)
            if cutlass.const_expr(self.spec.mask.left):
                num_below = touched.begin - blocks.begin
                k_state, v_state = attention.skip(num_below, k_state, v_state)
            if cutlass.const_expr(self.skips_before_next):
                cursor = schedule.next(cursor)
            computed, here = recorder.now(), out
            if cutlass.const_expr(self.format.stages_o_in_v):
                v_state = skip_stages(smem.v.pipe, group, v_state)
                smem.v.pipe.consumer_wait(v_state)
                here = replace(out, place=v_state.index)
            place = segment, tile, slab, thread_idx
            row_sinks = rules.sinks_of_rows(sinks)
            part = parts, number
            ForwardEpilogue(self, operands, *place, attention, here, row_sinks, *part).finish()
            recorder.note(thread, group, segment.tile, blocks, (began, started, computed))
            if cutlass.const_expr(self.format.stages_o_in_v):
                out.wait()
                cute.arch.sync_warp()
                smem.v.pipe.consumer_release(v_state)
                v_state.advance()
                v_state = skip_stages(smem.v.pipe, config.consumers - 1 - group, v_state)
            elif cutlass.const_expr(self.stages_o_in_q):
                out.wait()
                smem.pipe_q.consumer_release(q_state)
            for _ in cutlass.range_constexpr(config.consumers // self.slabs_of_q):
                q_state.advance()
        turns.finish()
        out.wait()

    def operand_q(self, q: cute.Tensor, q_state, group):
        """This warpgroup's rows of Q, as Q K^T takes them."""
        if self.format.holds_q:
            return cute.recast_tensor(q, self.format.dtype)
        place = q_state.index
        if self.slabs_of_q > 1:
            place = q_state.index * self.config.consumers + group
        return q[None, None, None, place]

    def convert_q(self, smem: ForwardBuffers, mmas: Mmas, q, q_state, group, thread, barrier):
        """Convert this warpgroup's rows of Q to fp16; return the scores' factor.
        Past the sequence's last row TMA has loaded zeros. If registers hold Q, it is released after
        the first Q K^T."""
        smem.pipe_q.consumer_wait(q_state)
        rows = smem.q[None, None, q_state.index * self.config.consumers + group]
        largest = smem.largest[None, group, q_state.index]
        if self.format.holds_q:
            read_fragment(rows, mmas.qk, thread, q)
            shared = largest, thread, barrier.arrive_and_wait
            return convert_registers([q], lambda bits: largest_of_warps(bits, *shared))
        unscale = convert_rows(rows, self.dtype, Int32(ROWS), largest, barrier, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        return unscale

    def scales(self, operands: ForwardOperands, tile: Tile) -> tuple:
        """The scale of a tile's scores, and its values', None for 1."""
        softmax_scale = operands.softmax_scale
        if operands.descales is None:
            return softmax_scale, None
        head_kv = operands.heads_of_key.quotient(tile.head)
        scale_k, scale_v, *scale_q = (one[tile.batch, head_kv] for one in operands.descales)
        for one in (*scale_q, scale_k):
            softmax_scale *= one
        return softmax_scale, scale_v

    @property
    def skips_before_next(self) -> bool:
        """Whether a warpgroup releases skipped blocks before it calls `next`.
        It must where `next` waits until the producer has loaded the tile's last blocks."""
        return self.spec.mask.left and self.schedule_type.shared_words > 0

    @cute.jit
    def blocks_of_rows(self, mask, blocks: Blocks, row_begin, sequence: Sequence) -> Blocks:
        """The cluster's blocks that a warpgroup's rows touch.
        It is one block if no row is a query."""
        tile_n, last_row = self.config.tile_n, sequence.seqlen_q - 1
        first_row = cutlass.min(row_begin, last_row)
        touched = mask.key_blocks(first_row, ROWS, tile_n, sequence)
        if cutlass.const_expr(self.config.fixed_row_max and self.spec.mask.right):
            # Mask the block of the first row's last visible key and all later blocks. After them
            # every row has seen a key, so it has a row max.
            _, end = mask.key_range(first_row, sequence)
            full_end = cutlass.min(touched.full_end, cutlass.max(end - 1, 0) // tile_n)
            full_begin = cutlass.min(touched.full_begin, full_end)
            touched = touched._replace(full_begin=full_begin, full_end=full_end)
        end = blocks.end if row_begin <= last_row else blocks.begin + 1
        return touched.between(blocks.begin, end)
