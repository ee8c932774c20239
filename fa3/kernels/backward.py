"""Backward attention for Hopper: dK, dV and dQ.

Runs after the preprocess kernel, which computes log-sum-exp and delta of each row. For long
sequences that covers only the first head groups; the first CTAs of this kernel do the rest. CTAs
are persistent and take one key tile of a key/value head after another. K and V stay in shared
memory. The query blocks that see the keys pass by, of one query head of the key/value head after
another. So dK and dV stay in registers until they are done. dQ of a block is added to an
accumulator in memory. CTAs without a key tile left convert it to 16 bits.

    P^T = exp(K Q^T - lse)           dV += P^T dO
    dS^T = P^T (V dO^T - delta)      dK += dS^T Q       dQ += dS K

S and dP are computed transposed, keys by queries: then P^T and dS^T in registers are already the
operands of dV and dK. dS goes through shared memory for dQ, which needs all keys of the tile.

Roles per CTA (`fa3.kernels.backward_roles`), and registers of a thread, or with `q_splits`
    warpgroup 0    producer, 32 or 24
        warp 0     loads Q and dO
        warp 1     loads K and V
        warp 2     reduce warp: adds dQ to the accumulator, signals finished key tiles
        warp 3     only in a fixed order: signals each block and, instead of warp 2, key tiles
    warpgroup 1, 2 MMA warpgroups, 208 or 216
                   dK and dV of 64 keys each. Or both have the same 64 keys
                   (`warpgroups_share_keys`): each has half of the queries of S and dP, and half of
                   the columns of dK and dV. At a CTA's end they convert dQ
    warpgroup 3    dQ warpgroup, 64 or 56
                   dQ = dS K of each block. At a tile's end one warp stores dK and dV

Pipelines (mbarriers; `BackwardPipelines`)
    pipeline_k   K of a tile                  k_stages   producer -> MMA and dQ, released when dK,
                                                         which takes its place, is stored
    pipeline_v   V of a tile                  1 stage    the same with dV
    pipeline_q   Q and the rows' statistics   2 stages   producer -> MMA, released after dK
    pipeline_do  dO                           do_stages  producer -> MMA, released after dV
    pipeline_ds  dS in shared memory          2 stages   MMA -> dQ warpgroup
    staged       a piece of dQ                in_flight  dQ warpgroup -> reduce warp
    added        a block's dQ is in memory    2 stages   reduce warp -> signalling warp; only in a
                                                         fixed order

Timeline of an MMA warpgroup in a step; the others multiply while it does not
    tensor cores   | S = K Q^T |              | dP = V dO^T | dV += P^T dO         | dK += dS^T Q |
    this warpgroup | waits     | P, in 16 bits| waits       | dS, to shared memory | waits
    So either S or dP is live next to dK, dV and P in 16 bits. The three warpgroups run on their
    own, two blocks apart at most. They meet at the tile's end only.

Timeline of a tile's end
    MMA          | dV to V's place | waits for the last dQ | dK to K's place | S of the next tile
    dQ           | last dQ         | stores dV, then dK, and releases V and K
    producer     | K, Q, dO of the next tile are there     | V of the next tile

Timeline of a CTA's end
    MMA          | no tile is left | pieces of dQ, each when its head group is complete
    dQ, producer | no tile is left | end

Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), appendix B.1; Dao, FlashAttention-2
(arXiv 2307.08691), section 3.1.2.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa3.kernels.backward_launch import LISTENING_WARPS, MMA_GROUPS, BackwardConfig, PassArguments
from fa3.kernels.backward_queries import BackwardPreprocess, FusedPrePostprocess
from fa3.kernels.backward_roles import (
    BackwardBuffers,
    BackwardPipelines,
    BackwardRoles,
    BackwardTensors,
)
from fa3.kernels.kernel_base import AttentionKernel, KernelBase
from fa3.kernels.tile_table import TileTable, TileTableArguments
from fa3.primitives import arguments
from fa3.primitives.arithmetic import Divisor
from fa3.primitives.dq_accumulator import DqPieces
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.gradient_mmas import GradientLayouts
from fa3.primitives.gradient_parts import KeySplit, SharedKeyTiles, parts_of_last
from fa3.primitives.key_line import KeyLine
from fa3.primitives.pipelines import thread_pipeline, tma_pipeline
from fa3.primitives.query_tiles import STATISTICS, PackedQueryTiles, QueryTiles
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.tma import TmaTensor, in_batch, ragged_tma_view, rows_first
from fa3.primitives.wgmma import WARPS
from fa3.problem import AttentionSpec, Window
from fa3.schedules.order import KernelOrder
from fa3.schedules.query_index import QueryHeadGroups
from fa3.schedules.ragged import RaggedKeyOrder
from fa3.schedules.sequences import Dense, Ragged
from fa3.scores.scores import bind


@dataclass(frozen=True)
class Backward(AttentionKernel):
    """The backward kernel, compiled for one (spec, config, schedule type)."""

    spec: AttentionSpec
    config: BackwardConfig
    schedule_type: type
    is_ordered: bool = False  # whether key tiles add to dQ in a fixed order
    has_used_q: bool = False  # whether packed sequences have `seqused_q`
    splits: bool = False  # whether CTAs share key tiles, see `fa3.primitives.gradient_parts`
    # Whether dK and dV are fp32. Then `splits` is True, if only with one part.
    writes_fp32: bool = False
    accumulators: int = 1  # of dQ, see `DqSemaphore`; two only dense and in a fixed order
    has_lines: bool = False  # whether parts of key tiles are of lines, see `KeyLine`

    entry_name: ClassVar[str] = "fa3_backward"
    arguments_type: ClassVar[type] = PassArguments

    @property
    def is_ragged(self) -> bool:
        """Whether sequences are packed."""
        return self.schedule_type.is_ragged

    @property
    def dq_flags(self) -> int:
        """Flags of a query tile: of its first store, or accumulators' semaphores."""
        return self.accumulators if self.is_ordered else int(not self.is_ragged)

    @property
    def may_alternate(self) -> bool:
        """Whether head groups may alternate: see `fa3.primitives.query_tiles`."""
        mask = self.spec.mask
        may_be = self.is_ordered and not self.is_ragged and not self.has_lines
        return may_be and mask.right and not mask.left

    @cute.jit
    def launch(self, call: PassArguments, stream):
        config, rows, state = self.config, call.query_rows(self), call.counters
        window = Window(call.window_left, call.window_right)
        heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
        tensors = call.q, call.k, call.v, call.d_out, call.dk, call.dv
        shared, heads = self.shared_key_tiles(call), heads_kv
        if cutlass.const_expr(self.splits):
            heads = heads_kv * call.head_parts
        if cutlass.const_expr(self.is_ragged):
            sequences = Ragged(window)
            state = call.integers(call.table_at, call.counters_at)
            order = RaggedKeyOrder.of(state, heads, call.heads_per_group)
            q, k, v, d_out, dk, dv = map(ragged_tma_view, tensors)
        else:
            batch, seqlen_k = call.q.shape[0], call.k.shape[1]
            sequences = Dense(call.q.shape[1], seqlen_k, window)
            num_key_tiles = cute.ceil_div(seqlen_k, config.tile_n)
            if cutlass.const_expr(self.has_lines):
                num_key_tiles = call.parts_of_line
            elif cutlass.const_expr(self.splits):
                num_key_tiles = parts_of_last(call.block_parts, call.rise, num_key_tiles)
            order = KernelOrder.of(num_key_tiles, heads, batch, call.heads_per_group)
            q, k, v, d_out, dk, dv = map(rows_first, tensors)
        tiles = self.numbers_of_tiles(call, call.q, config.tile_m)
        layouts = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tensors = BackwardTensors(
            TmaTensor.of(load, q, layouts.q),
            TmaTensor.of(load, k, layouts.k),
            TmaTensor.of(load, v, layouts.v),
            TmaTensor.of(load, d_out, layouts.d_out),
            None if self.writes_fp32 else TmaTensor.of(store, dk, layouts.dk),
            None if self.writes_fp32 else TmaTensor.of(store, dv, layouts.dv),
            rows.statistics,
            tiles,
            rows.dq(tiles),
            heads_q // heads_kv,
            call.modifiers,
            None if call.dropout is None else DropoutArguments(*call.dropout),
            FusedPrePostprocess(
                rows,
                rows.index(config.tile_m),
                self.query_head_groups(call),
                in_batch(call.dq),
                call.softmax_scale,
            ),
            shared,
            call.alternates,
            call.softmax_scale,
            sequences,
        )
        schedule = self.schedule_type.on_device(order, call.num_clusters, state)
        self.kernel(tensors, schedule).launch(
            grid=(call.num_clusters, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # without it ptxas may drop setmaxnreg (NVIDIA/cutlass#3406)
        )

    def shared_key_tiles(self, call: PassArguments) -> SharedKeyTiles | None:
        """The key tiles that CTAs share; on the host."""
        if not self.splits:
            return None
        ratio = call.q.shape[-2] // call.k.shape[-2]
        sets = Divisor.of(call.head_parts)
        split = KeySplit(sets, call.block_parts, call.rise, ratio // call.head_parts)
        parts = call.numbers(call.parts_at, call.buffer.shape[0])
        counters = call.integers(call.part_counters_at, call.dq_flags_at)
        tiles = self.numbers_of_tiles(call, call.k, self.config.tile_n)
        line = None
        if self.has_lines:
            length, heads = map(Divisor.of, (call.line_length, Int32(split.num_heads)))
            num_tiles = Int32(1)  # of packed sequences each has its own line
            if not self.is_ragged:
                num_tiles = cute.ceil_div(call.k.shape[1], self.config.tile_n)
            line = KeyLine.of(length, num_tiles, call.block_parts, heads)
        gradients = in_batch(call.dk), in_batch(call.dv)
        return SharedKeyTiles(split, line, tiles, parts, counters, *gradients)

    def numbers_of_tiles(self, call: PassArguments, tensor: cute.Tensor, rows: int):
        """Return what numbers tiles of q or k; on the host."""
        if self.is_ragged:
            return PackedQueryTiles.of(tensor.shape[0], call.num_sequences, rows)
        return QueryTiles(cute.ceil_div(tensor.shape[1], rows), tensor.shape[2])

    def query_head_groups(self, call: PassArguments) -> QueryHeadGroups:
        """The query tiles in head groups; on the host."""
        heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
        batch = 1 if self.is_ragged else call.q.shape[0]
        per_head = self.numbers_of_tiles(call, call.q, self.config.tile_m).tiles_per_head
        per_group = per_head * call.heads_per_group * (heads_q // heads_kv)
        if self.splits:
            per_group = per_group // call.head_parts
        return QueryHeadGroups(per_head * heads_q * batch, Divisor.of(per_group))

    @property
    def pieces(self) -> DqPieces:
        """The pieces of a block's dQ."""
        return self.config.pieces(self.columns)

    def layouts(self) -> GradientLayouts:
        return GradientLayouts.of(self.dtype, self.config, self.columns, self.columns_v)

    @cute.kernel
    def kernel(self, tensors: BackwardTensors, schedule):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma in tensors[:6]:
                if cutlass.const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma.atom)
        smem, pipelines, schedule = self.setup_shared_memory(schedule)
        cluster, _, _ = cute.arch.block_idx()
        cursor = schedule.first(cluster)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        tensors.fused.preprocess(self, smem.ticket, warp_idx)
        registers, context = self.config.registers_of_roles, (tensors, smem, pipelines)
        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(registers.producer)
            if warp_idx == 0:
                self.roles(*context, schedule.for_producer(), cursor).load_queries()
            elif warp_idx == 1:
                self.roles(*context, schedule, cursor).load_keys()
            elif warp_idx == 2:
                self.roles(*context, schedule, cursor).reduce_dq()
            elif cutlass.const_expr(self.is_ordered):
                self.roles(*context, schedule, cursor).signal_blocks()
        elif warp_idx >= WARPS * (1 + MMA_GROUPS):
            cute.arch.setmaxregister_decrease(registers.dq)
            self.roles(*context, schedule, cursor).compute_dq()
        else:
            cute.arch.setmaxregister_increase(registers.mma)
            self.roles(*context, schedule, cursor).mma()

    def roles(self, tensors, smem, pipelines, schedule, cursor) -> BackwardRoles:
        """The roles of a CTA.
        No variable has them: a branch would carry all their fields."""
        scores, mask, _ = bind(self.spec, tensors.modifiers)
        context = tensors, smem, pipelines, schedule, cursor
        return BackwardRoles(self, *context, scores, mask)

    @cute.jit
    def setup_shared_memory(self, schedule):
        """Lay out shared memory, initialise the mbarriers and synchronize the CTA."""
        config, layouts = self.config, self.layouts()
        rows = cute.make_layout((config.tile_m, STATISTICS, config.stages))
        pieces = cute.make_layout(self.pieces.numbers_in_flight)

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
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(rows)], 128]
            q: buffer(layouts.q)
            k: buffer(layouts.k)
            v: buffer(layouts.v)
            d_out: buffer(layouts.d_out)
            ds: buffer(layouts.scores)
            p: buffer(layouts.scores, config.warpgroups_share_keys)
            staged: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(pieces)], 128]

        storage = SmemAllocator().allocate(Storage)

        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        smem = BackwardBuffers(
            tensor(storage.q, layouts.q),
            tensor(storage.k, layouts.k),
            tensor(storage.v, layouts.v),
            tensor(storage.d_out, layouts.d_out),
            tensor(storage.ds, layouts.scores),
            tensor(storage.p, layouts.scores) if config.warpgroups_share_keys else None,
            tensor(storage.k, layouts.dk),
            tensor(storage.v, layouts.dv),
            storage.statistics.get_tensor(rows),
            storage.staged.get_tensor(pieces),
            storage.ticket.get_tensor(cute.make_layout(1)),
        )

        mma_warps, in_flight = WARPS * MMA_GROUPS, self.pieces.in_flight
        row_bytes = cute.size_in_bytes(Float32, cute.slice_(rows, (None, None, 0)))

        def from_tma(barriers, layout, *readers_and_copies):
            return tma_pipeline(barriers, self.dtype, layout, *readers_and_copies)

        pipelines = BackwardPipelines(
            from_tma(storage.barriers_q, layouts.q, mma_warps, 1, 1, row_bytes),
            from_tma(storage.barriers_k, layouts.k, 1, config.slabs),
            from_tma(storage.barriers_v, layouts.v, 1, config.slabs),
            from_tma(storage.barriers_do, layouts.d_out, mma_warps),
            thread_pipeline(storage.barriers_ds, config.stages, mma_warps * config.q_splits, WARPS),
            thread_pipeline(storage.barriers_staged, in_flight, WARPS, 1),
            thread_pipeline(storage.barriers_added, config.stages, 1, 1)
            if self.is_ordered
            else None,
        )
        listening = LISTENING_WARPS + self.is_ordered
        schedule = schedule.connected(storage.schedule.data_ptr(), listening)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return smem, pipelines, schedule


@dataclass(frozen=True)
class BackwardPass(KernelBase):
    """One entry that launches the kernels of a backward pass in turn.

    They always run together and take mostly the same tensors, which are handed over and checked
    once here. What they write for each other is in one buffer, which is cut here.
    """

    main: Backward
    table: TileTable | None = None  # makes the table of packed sequences; None without

    entry_name: ClassVar[str] = "fa3_backward_pass"
    arguments_type: ClassVar[type] = PassArguments

    @property
    def preprocess(self) -> BackwardPreprocess:
        return BackwardPreprocess(self.main)

    @property
    def spec(self) -> AttentionSpec:
        return self.main.spec

    @property
    def is_storable(self) -> bool:
        return self.main.is_storable

    def arguments(self) -> list:
        """Symbolic arguments of a call, and the stream."""
        return [*PassArguments.symbolic(self.main, self.table), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *call):
        """Launch on `PassArguments` and a stream."""
        *call, stream = call
        call = PassArguments(*call)
        if cutlass.const_expr(self.table is not None):
            named = {"total_q": call.q.shape[0], "total_k": call.k.shape[0]}
            named |= {"short_queries": Int32(0), "qhead_per_kvhead": Int32(1), "num_ctas": Int32(1)}
            named["table"] = call.integers(call.table_at, call.counters_at)
            ratio = call.q.shape[-2] // call.k.shape[-2]
            named["line_heads"] = ratio // call.head_parts if self.table.has_lines else None
            self.table(*arguments.operands_of(TileTableArguments, call, **named), stream)
        self.preprocess(*call, stream)
        self.main(*call, stream)
