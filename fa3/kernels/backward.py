"""Backward attention for Hopper: dK, dV and dQ.

`fa3.calls.backward` launches it behind `BackwardBegin`, which gives rows their log-sum-exp and
delta; of long sequences for some heads only, and the first CTAs here do so for the others
(`QueriesInside`). Persistent CTAs take one tile of keys of one key/value head after another. K and
V stay in shared memory, and the query blocks that see the keys pass by, of one query head of the
group after another; so dK and dV stay in registers until they are done. dQ of a block is added to
sums in memory; CTAs for which no tile is left make dQ of them.

    P^T = exp(K Q^T - lse)           dV += P^T dO
    dS^T = P^T (V dO^T - delta)      dK += dS^T Q       dQ += dS K

S and dP are computed transposed, keys by queries: then P^T and dS^T in registers are already the
operands of dV and dK. dS goes through shared memory for dQ, which needs all keys of the tile.

Roles per CTA
    warpgroup 0    producer       one warp loads Q and dO, one K and V, and one adds dQ to the sums
                                  and makes known which tiles have added all; if sums have a fixed
                                  order, the last one makes known what was added to each block; 32
                                  registers a thread, 24 beside parts
    warpgroup 1, 2 MMA warpgroups 64 keys each, dK and dV; or both the same 64 keys (`shares_keys`),
                                  each half of the queries of S and dP, and half of the columns of
                                  dK and dV; at the end dQ of the sums; 208 registers, 216 where a
                                  block goes in `parts`
    warpgroup 3    dQ             dQ = dS K of every block; at the end of a tile one warp stores dK
                                  and dV; 64 registers, 56 beside parts

BackwardPipelines (mbarriers)
    pipeline_k   K of a tile                  k_stages   producer -> all that multiply, released
                                                         when dK, which takes its place, is stored
    pipeline_v   V of a tile                  1 stage    the same with dV
    pipeline_q   Q and the rows' statistics   2 stages   producer -> MMA, released after dK
    pipeline_do  dO                           do_stages  producer -> MMA, released after dV
    pipeline_ds  dS in shared memory          2 stages   MMA -> dQ's warpgroup
    staged       a piece of dQ                in_flight  dQ's warpgroup -> who adds
    added        nothing but that a block's   2 stages   who adds -> who makes it known; only in a
                 dQ is in memory                         fixed order

Timeline of an MMA warpgroup in a step; the others multiply while it does not
    tensor cores | S = K Q^T |              | dP = V dO^T | dV += P^T dO         | dK += dS^T Q |
    this group   | waits     | P, in 16 bits| waits       | dS, to shared memory | waits
    So no more than S or dP is live beside dK, dV and P in 16 bits. The three warpgroups run on
    their own, two blocks apart at most; nothing makes them meet but the tile's end and, with blocks
    of 128 queries, turns: P takes the MMA warpgroups long, so one computes S and P, then the other.

Timeline of a tile's end
    MMA          | dV to V's place | waits for the last dQ | dK to K's place | S of the next tile
    dQ           | last dQ         | stores dV, then dK, and gives V and K back
    producer     | K, Q, dO of the next tile are there     | V of the next tile

Timeline of a CTA's end
    MMA          | no tile is left | pieces of dQ, each when its section has all that is added to it
    dQ, producer | no tile is left | end

Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), appendix B.1; Dao, FlashAttention-2
(arXiv 2307.08691), section 3.1.2.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from fa3.kernels.attention_kernel import AttentionKernel
from fa3.kernels.backward_launch import (
    LISTENING_WARPS,
    MMA_GROUPS,
    BackwardArguments,
    BackwardConfig,
    CallSizes,
)
from fa3.kernels.backward_queries import QueriesInside
from fa3.primitives import arguments
from fa3.primitives.bulk import load_run
from fa3.primitives.coords import TransposedCoords
from fa3.primitives.divisor import Divisor
from fa3.primitives.dropout import DropoutArguments, TransposedDropout
from fa3.primitives.dsl import SmemAllocator
from fa3.primitives.first_additions import FirstAdditions
from fa3.primitives.gradient_addition import GradientAddition
from fa3.primitives.gradient_mmas import GradientLayouts, GradientMmas, GradientOperands
from fa3.primitives.gradient_parts import (
    GradientParts,
    KeyRows,
    KeySplit,
    KeyWork,
    SharedKeyTiles,
)
from fa3.primitives.gradient_step import GradientStep
from fa3.primitives.gradient_store import GradientStore
from fa3.primitives.ordered_gradients import TurnsToAdd
from fa3.primitives.query_gradient_step import QueryGradientOperands, QueryGradientStep
from fa3.primitives.query_tiles import (
    STATISTICS,
    PackedQueryTiles,
    QueryGradients,
    QueryPieces,
    QueryTiles,
    RowStatistics,
    SumWords,
    number_of_packed_tiles,
)
from fa3.primitives.rows_of_sequence import in_batch, with_movable_end
from fa3.primitives.tile_load import tile_loader
from fa3.primitives.tma import TmaTensor
from fa3.primitives.turns import NoTurns, Turns
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS
from fa3.problem import AttentionSpec, Window
from fa3.schedules import Tile
from fa3.schedules.order import KernelOrder
from fa3.schedules.query_sections import QuerySections
from fa3.schedules.query_work import DenseQueryWork, PackedQueryWork
from fa3.schedules.ragged_keys import RaggedKeyOrder
from fa3.schedules.sequences import Dense, Ragged
from fa3.scores.masks import Blocks
from fa3.scores.scores import TransposedRules, bind

KEYS_BARRIER, SCORES_BARRIER, DK_BARRIER, DV_BARRIER, FIRST_TURN_BARRIER = 1, 2, 3, 4, 5
"""Named barriers."""


def keys_barrier() -> pipeline.NamedBarrier:
    """Where K has been read for the last time."""
    return pipeline.NamedBarrier(KEYS_BARRIER, WARPGROUP * (MMA_GROUPS + 1))


def scores_barrier() -> pipeline.NamedBarrier:
    """Where P and dS of both MMA warpgroups are in shared memory."""
    return pipeline.NamedBarrier(SCORES_BARRIER, WARPGROUP * MMA_GROUPS)


def dk_barrier() -> pipeline.NamedBarrier:
    """Where dK is in shared memory. All of dQ's warpgroup waits, so as not to come to the
    next tile's `keys_barrier` before the MMA warpgroups have left this tile's."""
    return pipeline.NamedBarrier(DK_BARRIER, WARPGROUP * (MMA_GROUPS + 1))


def dv_barrier() -> pipeline.NamedBarrier:
    """Where dV is in shared memory, for the warp that stores it."""
    return pipeline.NamedBarrier(DV_BARRIER, WARPGROUP * MMA_GROUPS + WARP)


class BackwardTensors(NamedTuple):
    """The global tensors.

    Fields:
        q, k, v, d_out, dk, dv: (seqlen, head_dim, heads, batch), or of `with_movable_end`.
        words: what is known of the sums; None without.
        qhead_per_kvhead: query heads that share one key/value head.
        modifiers: the tensors of the spec's scores, mask and sinks.
        dropout: None without.
        queries: as far as they are begun and ended here.
        shared: the key tiles that CTAs share; None if each has its own.
    """

    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    d_out: TmaTensor
    dk: TmaTensor
    dv: TmaTensor
    statistics: RowStatistics
    sums: QueryGradients
    words: SumWords | None
    qhead_per_kvhead: int
    modifiers: tuple | None
    dropout: DropoutArguments | None
    queries: QueriesInside
    shared: SharedKeyTiles | None


class BackwardBuffers(NamedTuple):
    """The buffers in shared memory, with the layouts of `GradientLayouts`.

    Fields:
        ds, p: blocks of scores; no P if it stays in registers.
        dk, dv: lie where K and V do.
        statistics: (tile_m, STATISTICS, q_stages), float32.
        staged: pieces of dQ on their way to the sums, float32.
        ticket: (1,), int32: which share of the queries to begin is next.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    d_out: cute.Tensor
    ds: cute.Tensor
    p: cute.Tensor | None
    dk: cute.Tensor
    dv: cute.Tensor
    statistics: cute.Tensor
    staged: cute.Tensor
    ticket: cute.Tensor


class BackwardPipelines(NamedTuple):
    """The mbarrier pipelines; the last is None where sums have no fixed order."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    d_out: pipeline.PipelineTmaAsync
    ds: pipeline.PipelineAsync
    staged: pipeline.PipelineAsync
    added: pipeline.PipelineAsync | None


@dataclass(frozen=True)
class Backward(AttentionKernel):
    """The backward kernel, compiled for one (spec, config, schedule type).

    With `is_ordered` the sums of dQ are added up in a fixed order; `has_used_q` says whether packed
    sequences have `seqused_q`; with `splits` CTAs share key tiles, see
    `fa3.primitives.gradient_parts`.
    """

    spec: AttentionSpec
    config: BackwardConfig
    schedule_type: type
    is_ordered: bool = False
    has_used_q: bool = False
    splits: bool = False

    entry_name: ClassVar[str] = "fa3_backward"

    def __post_init__(self):
        self.config.validate(self.spec)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences are packed."""
        return self.schedule_type.is_ragged

    @property
    def has_words(self) -> bool:
        """Whether there is a word for each tile of queries: for turns, or to say who was first."""
        return self.is_ordered or not self.is_ragged

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream."""
        sizes = CallSizes.symbolic(self.is_ragged)
        return [*BackwardArguments.symbolic(self, sizes), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *given):
        """Launch on `BackwardArguments` and a stream."""
        *given, stream = given
        call = BackwardArguments(*given)
        config = self.config
        window = Window(call.window_left, call.window_right)
        heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
        tensors = call.q, call.k, call.v, call.d_out, call.dk, call.dv
        shared, parts = self.shared_key_tiles(call), 1
        if cutlass.const_expr(self.splits):
            parts = shared.split.parts.value
        heads_of_order = heads_kv * parts, call.heads_per_section
        if cutlass.const_expr(self.is_ragged):
            sequences = Ragged(window)
            tiles = PackedQueryTiles.of(call.q.shape[0], call.num_sequences, config.tile_m)
            order = RaggedKeyOrder.of(call.table, *heads_of_order)
            q, k, v, d_out, dk, dv = map(with_movable_end, tensors)
            lengths = call.begin.cu_seqlens_q, call.begin.seqused_q
            work = PackedQueryWork.of(call.q, *lengths, config.tile_m)
            begin, dq = call.begin.in_batch(), in_batch(call.dq)
        else:
            batch, seqlen_q, seqlen_k = call.q.shape[0], call.q.shape[1], call.k.shape[1]
            sequences = Dense(seqlen_q, seqlen_k, window)
            tiles = QueryTiles(cute.ceil_div(seqlen_q, config.tile_m), heads_q)
            heads, of_section = heads_of_order
            order = KernelOrder.of(cute.ceil_div(seqlen_k, config.tile_n), heads, batch, of_section)
            q, k, v, d_out, dk, dv = (
                cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
                for t in tensors
            )
            work, begin, dq = DenseQueryWork.of(call.q, config.tile_m), call.begin, call.dq
        layouts = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        of_call = call.heads_per_section, call.num_sequences, call.split
        sections = self.sections(call.q, call.k, *of_call)
        operands = BackwardTensors(
            TmaTensor.of(load, q, layouts.q),
            TmaTensor.of(load, k, layouts.k),
            TmaTensor.of(load, v, layouts.v),
            TmaTensor.of(load, d_out, layouts.d_out),
            TmaTensor.of(store, dk, layouts.dk),
            TmaTensor.of(store, dv, layouts.dv),
            RowStatistics(call.statistics, tiles),
            QueryGradients(call.sums, tiles),
            SumWords(call.begin.words) if self.has_words else None,
            heads_q // heads_kv,
            call.modifiers,
            None if call.dropout is None else DropoutArguments(*call.dropout),
            QueriesInside(begin, work, sections, dq, call.softmax_scale),
            shared,
        )
        schedule = self.schedule_type.on_device(order, call.num_clusters, call.schedule_state)
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        self.kernel(operands, call.softmax_scale, sequences, schedule).launch(
            grid=(call.num_clusters, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # without it ptxas may drop setmaxnreg (NVIDIA/cutlass#3406)
        )

    def shared_key_tiles(self, call: BackwardArguments) -> SharedKeyTiles | None:
        """The key tiles that CTAs share; on the host."""
        if not self.splits:
            return None
        heads_q, heads_kv, tile_n = call.q.shape[-2], call.k.shape[-2], self.config.tile_n
        split = KeySplit.of(call.split.head_parts, call.split.block_parts, heads_q // heads_kv)
        if self.is_ragged:
            tiles = PackedQueryTiles.of(call.k.shape[0], call.num_sequences, tile_n)
            dk, dv = in_batch(call.dk), in_batch(call.dv)
        else:
            tiles = QueryTiles(cute.ceil_div(call.k.shape[1], tile_n), heads_kv)
            dk, dv = call.dk, call.dv
        return SharedKeyTiles(split, tiles, call.split.parts, call.split.part_counters, dk, dv)

    def sections(
        self, q: cute.Tensor, k: cute.Tensor, heads_per_section, num_sequences, split
    ) -> QuerySections:
        """The tiles of queries in sections; on the host."""
        tile_m, heads_q, heads_kv = self.config.tile_m, q.shape[-2], k.shape[-2]
        if self.is_ragged:
            batch, of_head = 1, number_of_packed_tiles(q.shape[0], num_sequences, tile_m)
        else:
            batch, of_head = q.shape[0], cute.ceil_div(q.shape[1], tile_m)
        of_section = of_head * heads_per_section * (heads_q // heads_kv)
        if cutlass.const_expr(self.splits):
            of_section = of_section // (split.head_parts * split.block_parts)
        return QuerySections(of_head * heads_q * batch, Divisor.of(of_section))

    @property
    def pieces(self) -> QueryPieces:
        """Those of a block's dQ."""
        return self.config.pieces(self.columns)

    def layouts(self) -> GradientLayouts:
        return GradientLayouts.of(self.dtype, self.config, self.columns, self.columns_v)

    @cute.kernel
    def kernel(self, operands: BackwardTensors, softmax_scale: Float32, sequences, schedule):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in operands[:6]:
                cpasync.prefetch_descriptor(tma.atom)
        smem, pipelines, schedule = self.setup_shared_memory(schedule)
        cluster, _, _ = cute.arch.block_idx()
        cursor = schedule.first(cluster)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        operands.queries.begin(self.spec, self.config, smem.ticket, warp_idx)
        registers = self.config.registers_of_roles
        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(registers.producer)
            given = operands, smem, pipelines, sequences
            if warp_idx == 0:
                self.load(*given, schedule.for_producer(), cursor)
            elif warp_idx == 1:
                self.load_keys(*given, schedule, cursor)
            elif warp_idx == 2:
                self.add(*given, schedule, cursor)
            elif cutlass.const_expr(self.is_ordered):
                self.make_known(*given, schedule, cursor)
        elif warp_idx >= WARPS * (1 + MMA_GROUPS):
            cute.arch.setmaxregister_decrease(registers.dq)
            self.compute_dq(operands, smem, pipelines, sequences, schedule, cursor)
        else:
            cute.arch.setmaxregister_increase(registers.mma)
            self.mma(operands, smem, pipelines, softmax_scale, sequences, schedule, cursor)

    @cute.jit
    def setup_shared_memory(self, schedule):
        """Lay out shared memory, initialise the mbarriers and synchronize the CTA."""
        config, layouts = self.config, self.layouts()
        of_rows = cute.make_layout((config.tile_m, STATISTICS, config.stages))
        of_pieces = cute.make_layout(self.pieces.numbers_in_flight)

        def buffer(layout, exists: bool = True):
            size = cute.cosize(layout) if exists else 0
            return cute.struct.Align[cute.struct.MemRange[self.dtype, size], 1024]

        @cute.struct
        class Storage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * config.k_stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2 * config.do_stages]
            barriers_ds: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
            barriers_staged: cute.struct.MemRange[cutlass.Int64, 2 * self.pieces.in_flight]
            barriers_added: cute.struct.MemRange[cutlass.Int64, 2 * config.stages * self.is_ordered]
            schedule: cute.struct.MemRange[cutlass.Int64, self.schedule_type.shared_words]
            ticket: cute.struct.MemRange[Int32, 4]
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(of_rows)], 128]
            q: buffer(layouts.q)
            k: buffer(layouts.k)
            v: buffer(layouts.v)
            d_out: buffer(layouts.d_out)
            ds: buffer(layouts.scores)
            p: buffer(layouts.scores, config.shares_keys)
            staged: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(of_pieces)], 128]

        storage = SmemAllocator().allocate(Storage)

        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        smem = BackwardBuffers(
            tensor(storage.q, layouts.q),
            tensor(storage.k, layouts.k),
            tensor(storage.v, layouts.v),
            tensor(storage.d_out, layouts.d_out),
            tensor(storage.ds, layouts.scores),
            tensor(storage.p, layouts.scores) if config.shares_keys else None,
            tensor(storage.k, layouts.dk),
            tensor(storage.v, layouts.dv),
            storage.statistics.get_tensor(of_rows),
            storage.staged.get_tensor(of_pieces),
            storage.ticket.get_tensor(cute.make_layout(1)),
        )

        def warps(groups: int) -> pipeline.CooperativeGroup:
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS * groups)

        of_mma, of_one = warps(MMA_GROUPS), pipeline.CooperativeGroup(pipeline.Agent.Thread)

        def tma_pipeline(barriers, stages, layout, copies, readers, more_bytes=0):
            stage_bytes = cute.size_in_bytes(self.dtype, cute.slice_(layout, (None, None, 0)))
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=of_one,
                consumer_group=readers,
                tx_count=copies * stage_bytes + more_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )

        def thread_pipeline(barriers, stages, writers, readers):
            return pipeline.PipelineAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=writers,
                consumer_group=readers,
                defer_sync=True,
            )

        row_bytes = cute.size_in_bytes(Float32, cute.slice_(of_rows, (None, None, 0)))
        pipelines = BackwardPipelines(
            tma_pipeline(storage.barriers_q, config.stages, layouts.q, 1, of_mma, row_bytes),
            tma_pipeline(storage.barriers_k, config.k_stages, layouts.k, config.slabs, of_one),
            tma_pipeline(storage.barriers_v, 1, layouts.v, config.slabs, of_one),
            tma_pipeline(storage.barriers_do, config.do_stages, layouts.d_out, 1, of_mma),
            thread_pipeline(
                storage.barriers_ds, config.stages, warps(MMA_GROUPS * config.parts), warps(1)
            ),
            thread_pipeline(storage.barriers_staged, self.pieces.in_flight, warps(1), of_one),
            thread_pipeline(storage.barriers_added, config.stages, of_one, of_one)
            if self.is_ordered
            else None,
        )
        listening = LISTENING_WARPS + self.is_ordered
        schedule = schedule.connected(storage.schedule.data_ptr(), listening)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return smem, pipelines, schedule

    def pipeline_states(self, user: pipeline.PipelineUserType):
        """Initial pipeline states of a producer or a consumer: Q, dO, K, V."""
        stages = self.config.stages, self.config.do_stages, self.config.k_stages, 1
        return tuple(pipeline.make_pipeline_state(user, n) for n in stages)

    def keys_of(self, schedule, segment) -> Tile:
        """The tile of keys of a segment, `m_block` being its index among the keys' tiles.

        The order counts from the last block down. The first keys have most queries, so it is
        turned around; unless the last keys must come first, to add to dQ first.
        """
        m_block, head, batch = segment.tile
        if self.is_ordered:
            return segment.tile
        return Tile(self.num_key_tiles(schedule, segment) - 1 - m_block, head, batch)

    def work_of(self, operands: BackwardTensors, schedule, segment) -> KeyWork:
        """What a segment is of a tile of keys: all of it, or a part."""
        n_block, head, batch = self.keys_of(schedule, segment)
        ratio = operands.qhead_per_kvhead
        if self.splits:
            return operands.shared.split.work(n_block, head, batch, ratio)
        return KeyWork(n_block, head, batch, head * ratio, ratio, 0)

    def blocks_of(self, operands: BackwardTensors, mask, work: KeyWork, sequence) -> Blocks:
        """The blocks of queries that a segment walks, of one query head."""
        blocks = self.query_blocks(mask, work.n_block, sequence)
        if self.splits:
            return operands.shared.split.blocks(blocks, work.part)
        return blocks

    def key_rows(self, sequences, segment) -> KeyRows:
        """Where the rows of a segment's sequence lie in dK and dV, in a batch."""
        if self.is_ragged:
            return KeyRows(Int32(0), segment.record.begin_k, segment.record.owned_k)
        return KeyRows(segment.tile.batch, Int32(0), sequences.seqlen_k)

    def section_of(self, schedule, cursor):
        """The section of a tile of keys."""
        if self.is_ragged:
            return schedule.order.section_of(schedule.segment(cursor).tile.head)
        return schedule.order.section_of(cursor.index)

    def num_key_tiles(self, schedule, segment):
        """Tiles of keys of a segment's sequence and head."""
        if self.is_ragged:
            return segment.record.num_m_blocks
        return schedule.order.num_m_blocks

    @cute.jit
    def query_blocks(self, mask, n_block, sequence) -> Blocks:
        """Blocks of queries that see keys of a tile; all are masked where the keys end.

        A block in which the queries end needs no mask for that: its rows' statistics hide them.
        """
        config = self.config
        begin = n_block * config.tile_n
        blocks = mask.query_blocks(begin, config.tile_n, config.tile_m, sequence)
        full_begin, full_end = blocks.full_begin, blocks.full_end
        is_masked = begin + config.tile_n > sequence.seqlen_k
        if cutlass.const_expr(self.is_ragged):
            # Keys that are not used: their gradients are 0, which one block is enough for.
            end = blocks.end if begin < sequence.seqlen_k else blocks.begin + 1
            blocks = blocks.between(blocks.begin, end)
        if cutlass.const_expr(not mask.left):
            # Without a full block it is not known whether the last one is masked by the diagonal.
            is_masked = is_masked or full_begin == full_end
            full_end = blocks.end
        full_begin = blocks.end if is_masked else full_begin
        full_end = blocks.end if is_masked else full_end
        return Blocks(blocks.begin, full_begin, full_end, blocks.end)

    # ------------------------------------------------------------------------------ producer

    @cute.jit
    def load(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        sequences,
        schedule,
        cursor,
    ):
        """Stream Q and dO of the blocks that see the keys of every tile."""
        config = self.config
        _, mask, _ = bind(self.spec, operands.modifiers)
        q_state, do_state, _, _ = self.pipeline_states(pipeline.PipelineUserType.Producer)
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            batch, sequence = work.batch, sequences.sequence(segment)
            statistics = operands.statistics.at(config.tile_m, segment)
            section = self.section_of(schedule, cursor)
            operands.queries.wait_until_begun(self.spec, config, section)
            for h in cutlass.range(work.num_heads, unroll=1):
                head = work.first_head + h
                blocks = self.blocks_of(operands, mask.at(batch, head), work, sequence)

                def load_statistics(m_block, state, head=head, batch=batch, statistics=statistics):
                    source = statistics.of_tile(config.tile_m, (m_block, head, batch))
                    target = smem.statistics[None, None, state.index]
                    load_run(source, target, pipelines.q.producer_get_barrier(state))

                rows = sequences.queries(segment)
                load_q = tile_loader(
                    operands.q, smem.q, pipelines.q, head, rows, beside=load_statistics
                )
                load_do = tile_loader(operands.d_out, smem.d_out, pipelines.d_out, head, rows)
                for m_block in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    q_state = load_q(m_block, q_state)
                    do_state = load_do(m_block, do_state)
            cursor = schedule.next(cursor)
        schedule.finish()

    @cute.jit
    def load_keys(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        sequences,
        schedule,
        cursor,
    ):
        """Load K and V of every tile as soon as there is room, by a warp of its own: the first
        queries need not wait for the room of V."""
        _, _, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            n_block, of_keys = work.n_block, (work.head_kv, sequences.keys(segment))
            of_keys = *of_keys, self.config.slabs
            k_state = tile_loader(operands.k, smem.k, pipelines.k, *of_keys)(n_block, k_state)
            v_state = tile_loader(operands.v, smem.v, pipelines.v, *of_keys)(n_block, v_state)
            cursor = schedule.next(cursor)

    @cute.jit
    def add(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        sequences,
        schedule,
        cursor,
    ):
        """Add every piece of dQ to the sums, in turn if they have a fixed order; and make known
        when a tile of keys has added all that it adds."""
        config, user = self.config, pipeline.PipelineUserType
        _, mask, _ = bind(self.spec, operands.modifiers)
        state = pipeline.make_pipeline_state(user.Consumer, self.pieces.in_flight)
        added_state = pipeline.make_pipeline_state(user.Producer, config.stages)
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            batch, sequence = work.batch, sequences.sequence(segment)
            sums = operands.sums.at(config.tile_m, segment)
            claims = None
            if cutlass.const_expr(self.has_words and not self.is_ordered):
                has_zeros = operands.queries.call.has_zeros
                claims = FirstAdditions(operands.words, sums.tiles, has_zeros)
            for h in cutlass.range(work.num_heads, unroll=1):
                head = work.first_head + h
                of_head = mask.at(batch, head)
                blocks = self.blocks_of(operands, of_head, work, sequence)
                turns = None
                if cutlass.const_expr(self.is_ordered):
                    turns = self.turns(operands, sequences, schedule, segment, of_head)
                of_sums = self.pieces, sums, smem.staged, pipelines
                addition = GradientAddition(*of_sums, claims, turns)
                state, added_state = addition.all(blocks, head, batch, state, added_state)
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0)
                operands.queries.make_known(self.section_of(schedule, cursor))
            cursor = schedule.next(cursor)

    @cute.jit
    def make_known(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        sequences,
        schedule,
        cursor,
    ):
        """Let others add to a block of queries as soon as this tile of keys has."""
        config = self.config
        _, mask, _ = bind(self.spec, operands.modifiers)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            batch, sequence = work.batch, sequences.sequence(segment)
            for h in cutlass.range(work.num_heads, unroll=1):
                head = work.first_head + h
                of_head = mask.at(batch, head)
                blocks = self.blocks_of(operands, of_head, work, sequence)
                turns = self.turns(operands, sequences, schedule, segment, of_head)
                for m_block in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    pipelines.added.consumer_wait(state)
                    with cute.arch.elect_one():
                        turns.pass_on((m_block, head, batch))
                        pipelines.added.consumer_release(state)
                    state.advance()
            cursor = schedule.next(cursor)

    def turns(self, operands: BackwardTensors, sequences, schedule, segment, mask) -> TurnsToAdd:
        """The turns of a segment's tile of keys; `mask` is that of a query head."""
        n_block, _, _ = self.keys_of(schedule, segment)
        tiles = operands.sums.tiles.at(self.config.tile_m, segment)
        last = self.num_key_tiles(schedule, segment) - 1
        before = self.query_blocks(mask, n_block + 1, sequences.sequence(segment))
        # The last keys have nobody to wait for.
        end = before.end * Int32(n_block < last)
        return TurnsToAdd(operands.words, tiles, last - n_block + 1, before.begin, end)

    # ------------------------------------------------------------------------ MMA warpgroups

    @cute.jit
    def mma(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        softmax_scale: Float32,
        sequences,
        schedule,
        cursor,
    ):
        """Compute this warpgroup's part of dK and dV of every tile, and of dS on the way. Where no
        tile is left, make dQ of the sums."""
        config = self.config
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        group = cute.arch.make_warp_uniform(thread_idx // WARPGROUP) - 1
        scores, mask, _ = bind(self.spec, operands.modifiers)
        mmas = GradientMmas.of(self.dtype, config, self.columns, self.columns_v)
        regs = GradientOperands.of(mmas, config, smem, group)
        states = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        q_state, do_state, k_state, v_state = states
        dk, dv = self.stores(operands, smem)
        if cutlass.const_expr(self.splits):
            warp = cute.arch.make_warp_uniform(thread_idx // WARP) - WARPS
            parts = GradientParts(operands.shared, warp, WARPS * MMA_GROUPS, config.shares_keys)
        seed = None
        if cutlass.const_expr(self.spec.has_dropout):
            # Once: in every step its latency would be waited for.
            seed = operands.dropout.seed()
        turns = NoTurns()
        if cutlass.const_expr(config.takes_turns):
            turns = Turns(FIRST_TURN_BARRIER, MMA_GROUPS, group)
        turns.start()
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            sequence = sequences.sequence(segment)
            regs.acc_dK.fill(0.0)
            regs.acc_dV.fill(0.0)
            pipelines.k.consumer_wait(k_state)
            for h in cutlass.range(work.num_heads, unroll=1):
                tile = Tile(work.n_block, work.first_head + h, work.batch)
                coords = self.coords(mmas, thread, group, tile)
                of_head = mask.at(work.batch, tile.head)
                rules = TransposedRules.of(scores, of_head, coords, sequence, softmax_scale)
                blocks = self.blocks_of(operands, of_head, work, sequence)
                dropout = None
                if cutlass.const_expr(self.spec.has_dropout):
                    dropout = TransposedDropout(operands.dropout, seed, coords)
                of_keys = k_state.index, v_state
                own = thread, group, scores_barrier(), turns, dropout
                step = GradientStep(config, mmas, regs, smem, pipelines, *of_keys, rules, *own)
                q_state, do_state = step.all(blocks, q_state, do_state)
            if cutlass.const_expr(not self.splits):
                cursor = schedule.next(cursor)
            # Where no query sees the keys, V may still be on its way.
            pipelines.v.consumer_wait(v_state)
            if cutlass.const_expr(not self.splits):
                dv.write(regs.acc_dV, mmas.dv, thread, group)
            else:
                dv.written.arrive()
            regs.acc_dK.store(regs.acc_dK.load() * softmax_scale)
            keys_barrier().arrive_and_wait()
            if cutlass.const_expr(not self.splits):
                dk.write(regs.acc_dK, mmas.dk, thread, group, k_state.index)
            else:
                # K and V may be loaded anew while parts are added up.
                dk.written.arrive()
                tiles = operands.shared.tiles.at_keys(config.tile_n, segment)
                rows = self.key_rows(sequences, segment)
                parts.finish((regs.acc_dK, regs.acc_dV), work, tiles, rows)
                # Not before: what is known of the next tile takes registers, too.
                cursor = schedule.next(cursor)
            k_state.advance()
            v_state.advance()
        turns.finish()
        operands.queries.end(self.spec, config, schedule.order)

    def stores(
        self, operands: BackwardTensors, smem: BackwardBuffers
    ) -> tuple[GradientStore, GradientStore]:
        """Those of dK and dV."""
        shared = MMA_GROUPS, self.config.shares_keys
        return (
            GradientStore(operands.dk, smem.dk, *shared, dk_barrier()),
            GradientStore(operands.dv, smem.dv, *shared, dv_barrier()),
        )

    def coords(self, mmas: GradientMmas, thread, group, tile: Tile) -> TransposedCoords:
        """The coordinates of a thread's scores, of keys of a tile and of its query head."""
        config = self.config
        key, column = tile.m_block * config.tile_n, 0
        if config.shares_keys:
            column = group * config.queries
        else:
            key += group * ROWS
        shape = ROWS, config.queries
        return TransposedCoords.of(mmas.scores, thread, shape, (key, column), config.tile_m, tile)

    # ----------------------------------------------------------------------- dQ's warpgroup

    @cute.jit
    def compute_dq(
        self,
        operands: BackwardTensors,
        smem: BackwardBuffers,
        pipelines: BackwardPipelines,
        sequences,
        schedule,
        cursor,
    ):
        """Compute dQ of every block that a tile's keys give; then store the tile's dK and dV, and
        give K and V back."""
        config, user = self.config, pipeline.PipelineUserType
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        is_storing = cute.arch.make_warp_uniform(thread // WARP) == 0
        _, mask, _ = bind(self.spec, operands.modifiers)
        regs = QueryGradientOperands.of(self.dtype, config, smem)
        dk, dv = self.stores(operands, smem)
        _, _, k_state, v_state = self.pipeline_states(user.Consumer)
        ds_state = pipeline.make_pipeline_state(user.Consumer, config.stages)
        staged_state = pipeline.make_pipeline_state(user.Producer, self.pieces.in_flight)
        cursor = schedule.begin(cursor)
        while schedule.is_valid(cursor):
            segment = schedule.segment(cursor)
            work = self.work_of(operands, schedule, segment)
            sequence = sequences.sequence(segment)
            pipelines.k.consumer_wait(k_state)
            for h in cutlass.range(work.num_heads, unroll=1):
                of_head = mask.at(work.batch, work.first_head + h)
                blocks = self.blocks_of(operands, of_head, work, sequence)
                step = QueryGradientStep(config, regs, smem, pipelines, k_state.index, thread)
                for _ in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    ds_state, staged_state = step.next(ds_state, staged_state)
            keys_barrier().arrive()
            cursor = schedule.next(cursor)
            place = work.n_block, work.head_kv, sequences.gradients_of_keys(segment)
            if is_storing:
                dv.written.arrive_and_wait()
                if cutlass.const_expr(not self.splits):
                    dv.store(*place)
                pipelines.v.consumer_release(v_state)
            dk.written.arrive_and_wait()
            if is_storing:
                if cutlass.const_expr(not self.splits):
                    dk.store(*place, k_state.index)
                pipelines.k.consumer_release(k_state)
            k_state.advance()
            v_state.advance()
        # What is being stored is read from shared memory, which must not be given back before.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
