"""Roles of a CTA of the backward kernel, loops over key tiles.

All roles find a key tile, its query heads and their query blocks in the same way. What a role does
with a query block is in `fa3.primitives`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

from fa3.kernels.backward_launch import ACCUMULATED, MMA_GROUPS, BackwardConfig
from fa3.kernels.backward_queries import FusedPrePostprocess
from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.dq_accumulator import (
    DqAccumulator,
    DqOperands,
    DqReduction,
    DqSemaphore,
    DqStep,
    LineSemaphore,
)
from fa3.primitives.dropout import DropoutArguments, TransposedDropout
from fa3.primitives.fragments import TransposedCoords
from fa3.primitives.gradient_mmas import GradientMmas, GradientOperands
from fa3.primitives.gradient_parts import (
    GradientParts,
    KeyRows,
    KeyWork,
    SharedKeyTiles,
    blocks_of_head,
    find_part,
)
from fa3.primitives.gradient_step import GradientStep
from fa3.primitives.key_line import KeyLine
from fa3.primitives.output_store import GradientStore
from fa3.primitives.query_tiles import (
    LineWalk,
    PackedQueryTiles,
    QueryTiles,
    QueryWalk,
    statistics_of_tile,
)
from fa3.primitives.tma import TmaTensor, load_run, tile_loader
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS
from fa3.schedules import Tile
from fa3.schedules.sequences import Dense, Ragged
from fa3.scores.masks import Blocks
from fa3.scores.scores import TransposedScorePipeline

KEYS_BARRIER = pipeline.NamedBarrier(1, WARPGROUP * (MMA_GROUPS + 1))
"""Where K has been read for the last time."""

SCORES_BARRIER = pipeline.NamedBarrier(2, WARPGROUP * MMA_GROUPS)
"""Where P and dS of both MMA warpgroups are in shared memory."""

DK_BARRIER = pipeline.NamedBarrier(3, WARPGROUP * (MMA_GROUPS + 1))
"""Where dK is in shared memory. The whole dQ warpgroup waits. Otherwise it could reach
`KEYS_BARRIER` of the next tile before the MMA warpgroups have left the barrier of this tile."""

DV_BARRIER = pipeline.NamedBarrier(4, WARPGROUP * MMA_GROUPS + WARP)
"""Where dV is in shared memory, for the warp that stores it."""


class BackwardTensors(NamedTuple):
    """The global tensors."""

    # q, k, v, d_out, dk, dv: (seqlen, head_dim, heads, batch), or of `ragged_tma_view`. dk and dv
    # are None where no TMA store writes them, in fp32.
    q: TmaTensor
    k: TmaTensor
    v: TmaTensor
    d_out: TmaTensor
    dk: TmaTensor | None
    dv: TmaTensor | None
    statistics: cute.Tensor  # of all query tiles, see `statistics_of_tile`
    tiles: QueryTiles | PackedQueryTiles  # numbers the query tiles
    dq: DqAccumulator
    qhead_per_kvhead: int  # query heads that share one key/value head
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks
    dropout: DropoutArguments | None  # None without
    fused: FusedPrePostprocess  # the preprocessing and the dQ conversion inside this kernel
    # The key tiles that CTAs share; None if each CTA has key tiles alone.
    shared: SharedKeyTiles | None
    alternates: Int32 | None  # of `PassArguments`
    softmax_scale: Float32  # factor of Q K^T
    sequences: Dense | Ragged  # how long sequences are, and where their rows are


class BackwardBuffers(NamedTuple):
    """The buffers in shared memory, with the layouts of `GradientLayouts`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    d_out: cute.Tensor
    # ds, p: blocks of scores; no P if it stays in registers.
    ds: cute.Tensor
    p: cute.Tensor | None
    # dk, dv: share their memory with K and V.
    dk: cute.Tensor
    dv: cute.Tensor
    statistics: cute.Tensor  # (tile_m, STATISTICS, q_stages), float32
    staged: cute.Tensor  # pieces of dQ on their way to the accumulator, float32
    ticket: cute.Tensor  # (1,), int32: the next share of the preprocessing


class BackwardPipelines(NamedTuple):
    """The mbarrier pipelines; `added` is None without a fixed order."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    d_out: pipeline.PipelineTmaAsync
    ds: pipeline.PipelineAsync
    staged: pipeline.PipelineAsync
    added: pipeline.PipelineAsync | None


class KeyTile(NamedTuple):
    """A CTA's work on a key tile."""

    work: KeyWork
    segment: object  # names the key tile
    sequence: object  # the lengths of its sequence
    is_down: Int32 | None  # 1 if query blocks are walked downwards, else 0; None if they never are


class QueryHead(NamedTuple):
    """A query head of a key tile: mask, query blocks to visit."""

    head: Int32
    mask: object
    walk: QueryWalk | LineWalk


@dataclass(frozen=True)
class BackwardRoles:
    """The roles of a CTA."""

    kernel: object  # the `Backward` kernel
    tensors: BackwardTensors
    smem: BackwardBuffers
    pipelines: BackwardPipelines
    schedule: object  # for the warp that fetches tiles, its `for_producer`
    cursor: object  # the schedule's first one
    # scores, mask: bound to their tensors.
    scores: tuple
    mask: object

    @property
    def config(self) -> BackwardConfig:
        return self.kernel.config

    # ------------------------------------------------------------------- what roles have in common

    def tile(self, cursor) -> KeyTile:
        """The key tile of a cursor."""
        segment = self.schedule.segment(cursor)
        if self.kernel.splits:
            if self.kernel.has_lines:
                return self.part_of_line(segment)
            # The order's `m_block` is the number of parts of the sequence and head that follow.
            split, left = self.tensors.shared.split, segment.tile.m_block
            after, before, parts = find_part(split.block_parts, split.rise, left)
            tile = segment.tile._replace(m_block=after)
            segment = segment._replace(tile=tile, part=(left - before, parts))
        is_down = None
        if self.kernel.may_alternate:
            is_down = self.head_group(cursor) & self.tensors.alternates
        work = self.work(segment, *self.keys_of(segment, is_down))
        return KeyTile(work, segment, self.tensors.sequences.sequence(segment), is_down)

    def part_of_line(self, segment) -> KeyTile:
        """The part of a line that a cursor's segment is."""
        split, (left, number, batch) = self.tensors.shared.split, segment.tile
        sequence, line = self.tensors.sequences.sequence(segment), self.line(segment)
        units_of, is_ragged = self.units_of(sequence), self.kernel.is_ragged
        count = (segment.record if is_ragged else self.schedule.order).num_m_blocks
        n_block, row = line.find(units_of, count - 1 - left)
        units = units_of(n_block)
        ends = (smaller(line.cut(n_block, one), units) for one in (row, row + 1))
        head_kv, parts = split.sets.quotient(number), line.parts(n_block, units)
        part = (number - head_kv * split.sets.value) * parts + row
        parts *= split.sets.value
        first_head = number * split.num_heads
        work = KeyWork(n_block, head_kv, batch, first_head, 1, part, parts, *ends)
        return KeyTile(work, segment, sequence, None)

    def line(self, segment) -> KeyLine:
        """The line of a segment's sequence."""
        line = self.tensors.shared.line
        return line.of_sequence(self.num_key_tiles(segment)) if self.kernel.is_ragged else line

    def units_of(self, sequence) -> Callable:
        """A function: how many units of its line a key tile visits."""

        def units_of(n_block):
            blocks = visited_blocks(self.kernel, self.mask, n_block, sequence)
            return (blocks.end - blocks.begin) * self.tensors.shared.line.heads.value

        return units_of

    def query_head(self, tile: KeyTile, h) -> QueryHead:
        """Query head `h` of a key tile, or all of a line."""
        work = tile.work
        head = work.first_head + h
        mask = self.mask.at(work.batch, head)
        blocks = visited_blocks(self.kernel, mask, work.n_block, tile.sequence)
        if self.kernel.has_lines:
            heads = self.tensors.shared.line.heads
            return QueryHead(head, mask, LineWalk.of(blocks, heads, work.begin, work.end))
        if self.kernel.splits:
            divided = blocks.begin, blocks.end - blocks.begin
            if self.kernel.is_ordered:
                # All key tiles divide the same blocks.
                num_blocks = cute.ceil_div(tile.sequence.seqlen_q, self.config.tile_m)
                divided = 0, larger(1, num_blocks)
            blocks = blocks_of_head(work, h, blocks, *divided)
        return QueryHead(head, mask, QueryWalk.of(blocks, tile.is_down))

    def keys_of(self, segment, is_down) -> Tile:
        """A segment's key tile; `m_block` is its index in the sequence.
        The order counts from the last tile down. The first keys have most queries, so it is turned
        around. In a fixed order that is done only where query blocks are walked downwards."""
        m_block, head, batch = segment.tile
        turned = self.num_key_tiles(segment) - 1 - m_block
        if self.kernel.may_alternate:
            return Tile(m_block + is_down * (turned - m_block), head, batch)
        if self.kernel.is_ordered:
            return segment.tile
        return Tile(turned, head, batch)

    def work(self, segment, n_block, head, batch) -> KeyWork:
        """A CTA's work on a key tile, whole or a part."""
        ratio = self.tensors.qhead_per_kvhead
        if self.kernel.splits:
            return self.tensors.shared.split.work(n_block, head, batch, segment.part, ratio)
        return KeyWork(n_block, head, batch, head * ratio, ratio)

    def key_rows(self, segment) -> KeyRows:
        """Where dK and dV have the rows of a segment's sequence."""
        if self.kernel.is_ragged:
            return KeyRows(Int32(0), segment.record.begin_k, segment.record.owned_k)
        return KeyRows(segment.tile.batch, Int32(0), self.tensors.sequences.seqlen_k)

    def head_group(self, cursor):
        """The head group of a key tile."""
        if self.kernel.is_ragged:
            return self.schedule.order.group_of(self.schedule.segment(cursor).tile.head)
        return self.schedule.order.group_of_tile(cursor.index)

    def num_key_tiles(self, segment):
        """Key tiles of a segment's sequence and head."""
        if self.kernel.splits:
            return cute.ceil_div(self.key_rows(segment).length, self.config.tile_n)
        if self.kernel.is_ragged:
            return segment.record.num_m_blocks
        return self.schedule.order.num_m_blocks

    def pipeline_states(self, user: pipeline.PipelineUserType):
        """Initial states of a producer or a consumer: Q, dO, K, V."""
        stages = self.config.stages, self.config.do_stages, self.config.k_stages, 1
        return tuple(pipeline.make_pipeline_state(user, n) for n in stages)

    def semaphore(self, tile: KeyTile, mask) -> DqSemaphore | LineSemaphore:
        """A key tile's and query head's semaphores in a fixed order."""
        if self.kernel.has_lines:
            line, work = self.line(tile.segment), tile.work
            before = line.before(self.units_of(tile.sequence), work.n_block, work.begin)
            dq = self.tensors.dq.at(self.config.tile_m, tile.segment)
            return LineSemaphore(dq, self.kernel.pieces, self.kernel.accumulators, before)
        segment, m_block, step = tile.segment, tile.segment.tile.m_block, self.kernel.accumulators
        last = self.num_key_tiles(segment) - 1
        n_block = tile.work.n_block + step
        if self.kernel.may_alternate:
            n_block -= 2 * step * tile.is_down
        before = visited_blocks(self.kernel, mask, n_block, tile.sequence)
        # The first tile of the order waits for no other tile.
        end = before.end * Int32(m_block + step <= last)
        rank = (last - m_block) // step + 1
        return DqSemaphore(self.dq(segment), rank, before.begin, end)

    def dq(self, segment) -> DqAccumulator:
        """The dQ accumulator to which a key tile adds."""
        count, dq = self.kernel.accumulators, self.tensors.dq.at(self.config.tile_m, segment)
        if self.kernel.has_lines:
            return dq
        return dq.one_of(self.kernel.pieces, count, segment.tile.m_block % count)

    def stores(self) -> tuple[GradientStore, GradientStore]:
        """The stores of dK and dV."""
        shared = MMA_GROUPS, self.config.warpgroups_share_keys
        return (
            GradientStore(self.tensors.dk, self.smem.dk, *shared, DK_BARRIER),
            GradientStore(self.tensors.dv, self.smem.dv, *shared, DV_BARRIER),
        )

    # -------------------------------------------------------------------------- producer warpgroup

    @cute.jit
    def load_queries(self):
        """Load Q and dO of the query blocks of each key tile."""
        tensors, smem, pipelines = self.tensors, self.smem, self.pipelines
        config, schedule, sequences = self.config, self.schedule, tensors.sequences
        q_state, do_state, _, _ = self.pipeline_states(pipeline.PipelineUserType.Producer)
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            tiles = tensors.tiles.at(config.tile_m, tile.segment)
            group = self.head_group(cursor)
            tensors.fused.wait_until_preprocessed(self.kernel, group)
            for h in cutlass.range(tile.work.num_heads, unroll=1):
                head, _, walk = self.query_head(tile, h)
                if cutlass.const_expr(self.kernel.has_lines):
                    q_state, do_state = self.load_line(tile, tiles, head, walk, q_state, do_state)
                else:

                    def load_statistics(m_block, state, head=head, tile=tile, tiles=tiles):
                        number = tiles.number((m_block, head, tile.work.batch))
                        source = statistics_of_tile(tensors.statistics, config.tile_m, number)
                        target = smem.statistics[None, None, state.index]
                        load_run(source, target, pipelines.q.producer_get_barrier(state))

                    rows = head, sequences.queries(tile.segment)
                    load_q = tile_loader(
                        tensors.q, smem.q, pipelines.q, *rows, load_more=load_statistics
                    )
                    load_do = tile_loader(tensors.d_out, smem.d_out, pipelines.d_out, *rows)
                    for i in cutlass.range(walk.blocks.begin, walk.blocks.end, unroll=1):
                        m_block = walk.at(i)
                        q_state = load_q(m_block, q_state)
                        do_state = load_do(m_block, do_state)
            cursor = schedule.next(cursor)
        schedule.finish()

    @cute.jit
    def load_line(self, tile: KeyTile, tiles, head, walk, q_state, do_state):
        """Load Q and dO along a line: every place has another head."""
        for i in cutlass.range(walk.blocks.begin, walk.blocks.end, unroll=1):
            m_block, place_head = walk.place(i, head)
            load_q, load_do = self.query_loaders(tile, tiles, place_head)
            q_state = load_q(m_block, q_state)
            do_state = load_do(m_block, do_state)
        return q_state, do_state

    def query_loaders(self, tile: KeyTile, tiles, head) -> tuple[Callable, Callable]:
        """Functions that load a query block: Q with its statistics, and dO."""
        tensors, smem, pipelines = self.tensors, self.smem, self.pipelines

        def load_statistics(m_block, state):
            number = tiles.number((m_block, head, tile.work.batch))
            source = statistics_of_tile(tensors.statistics, self.config.tile_m, number)
            target = smem.statistics[None, None, state.index]
            load_run(source, target, pipelines.q.producer_get_barrier(state))

        rows = head, tensors.sequences.queries(tile.segment)
        return (
            tile_loader(tensors.q, smem.q, pipelines.q, *rows, load_more=load_statistics),
            tile_loader(tensors.d_out, smem.d_out, pipelines.d_out, *rows),
        )

    @cute.jit
    def load_keys(self):
        """Load K and V of each tile when their buffers are free.
        A warp of its own does it, so that the first Q loads do not wait for a free V buffer."""
        tensors, smem, pipelines = self.tensors, self.smem, self.pipelines
        schedule, sequences = self.schedule, tensors.sequences
        _, _, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            n_block = tile.work.n_block
            rows = tile.work.head_kv, sequences.keys(tile.segment), self.config.slabs
            k_state = tile_loader(tensors.k, smem.k, pipelines.k, *rows)(n_block, k_state)
            v_state = tile_loader(tensors.v, smem.v, pipelines.v, *rows)(n_block, v_state)
            cursor = schedule.next(cursor)

    @cute.jit
    def reduce_dq(self):
        """Add pieces of dQ to the accumulator; signal finished key tiles."""
        config, schedule, tensors = self.config, self.schedule, self.tensors
        user = pipeline.PipelineUserType
        state = pipeline.make_pipeline_state(user.Consumer, self.kernel.pieces.in_flight)
        added_state = pipeline.make_pipeline_state(user.Producer, config.stages)
        pending = Int32(0)
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            dq = self.dq(tile.segment)
            is_zeroed = tensors.fused.call.dq_is_zeroed
            for h in cutlass.range(tile.work.num_heads, unroll=1):
                head, mask, walk = self.query_head(tile, h)
                semaphore = self.semaphore(tile, mask) if self.kernel.is_ordered else None
                memory = self.smem.staged, self.pipelines
                reduction = DqReduction(self.kernel.pieces, dq, *memory, semaphore, is_zeroed)
                states = state, added_state, pending
                state, added_state, pending = reduction.all(walk, head, tile.work.batch, *states)
            # In a fixed order `signal_blocks` does that.
            if cutlass.const_expr(not self.kernel.is_ordered):  # noqa: SIM102
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                    tensors.fused.add_to_flag(self.head_group(cursor), ACCUMULATED, 1)
            cursor = schedule.next(cursor)

    @cute.jit
    def signal_blocks(self):
        """Signal query blocks and key tiles that have been added, in order.
        The next key tile may then add to such a block. The conversion of dQ takes a block without
        a signal for one without a value. So the key tile is signalled after its blocks."""
        schedule, pipelines, stages = self.schedule, self.pipelines, self.config.stages
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            for h in cutlass.range(tile.work.num_heads, unroll=1):
                head, mask, walk = self.query_head(tile, h)
                semaphore = self.semaphore(tile, mask)
                for i in cutlass.range(walk.blocks.begin, walk.blocks.end, unroll=1):
                    turn = semaphore.at(i)
                    pipelines.added.consumer_wait(state)
                    with cute.arch.elect_one():
                        turn.signal((*walk.place(i, head), tile.work.batch))
                        pipelines.added.consumer_release(state)
                    state.advance()
            with cute.arch.elect_one():
                self.tensors.fused.add_to_flag(self.head_group(cursor), ACCUMULATED, 1)
            cursor = schedule.next(cursor)

    # ------------------------------------------------------------------------------ MMA warpgroups

    @cute.jit
    def mma(self):
        """Compute this warpgroup's part of dK, dV and dS of each tile.
        After the last tile it converts dQ."""
        kernel, config, schedule = self.kernel, self.config, self.schedule
        tensors, smem, pipelines = self.tensors, self.smem, self.pipelines
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        group = cute.arch.make_warp_uniform(thread_idx // WARPGROUP) - 1
        mmas = GradientMmas.of(kernel.dtype, config, kernel.columns, kernel.columns_v)
        regs = GradientOperands.of(mmas, config, smem, group)
        states = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        q_state, do_state, k_state, v_state = states
        dk, dv = self.stores()
        if cutlass.const_expr(kernel.splits):
            warp = cute.arch.make_warp_uniform(thread_idx // WARP) - WARPS
            groups = WARPS * MMA_GROUPS, config.warpgroups_share_keys
            parts = GradientParts(tensors.shared, warp, *groups)
        seed, softmax_scale = None, tensors.softmax_scale
        if cutlass.const_expr(kernel.spec.has_dropout):
            # Once: each step would wait for the load.
            seed = tensors.dropout.seed()
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            regs.acc_dK.fill(0.0)
            regs.acc_dV.fill(0.0)
            pipelines.k.consumer_wait(k_state)
            for h in cutlass.range(tile.work.num_heads, unroll=1):
                scores = Tile(tile.work.n_block, tile.work.first_head + h, tile.work.batch)
                coords = score_coords(config, mmas, thread, group, scores)
                _, mask, walk = self.query_head(tile, h)
                rules = TransposedScorePipeline.of(
                    self.scores, mask, coords, tile.sequence, softmax_scale
                )
                dropout = None
                if cutlass.const_expr(kernel.spec.has_dropout):
                    dropout = TransposedDropout(tensors.dropout, seed, coords)
                context = config, smem, pipelines, k_state.index, thread
                operands = mmas, regs, v_state, rules, group, SCORES_BARRIER, dropout
                step = GradientStep(*context, *operands)
                q_state, do_state = step.all(walk, q_state, do_state)
            if cutlass.const_expr(not kernel.splits):
                cursor = schedule.next(cursor)
            # Where no query sees the keys, V may still be on its way.
            pipelines.v.consumer_wait(v_state)
            if cutlass.const_expr(not kernel.splits):
                dv.write(regs.acc_dV, mmas.dv, thread, group)
            else:
                dv.written.arrive()
            regs.acc_dK.store(regs.acc_dK.load() * softmax_scale)
            KEYS_BARRIER.arrive_and_wait()
            if cutlass.const_expr(not kernel.splits):
                dk.write(regs.acc_dK, mmas.dk, thread, group, k_state.index)
            else:
                # The next K and V may be loaded while parts are added up.
                dk.written.arrive()
                tiles = tensors.shared.tiles.at_keys(config.tile_n, tile.segment)
                rows = self.key_rows(tile.segment)
                parts.finish((regs.acc_dK, regs.acc_dV), tile.work, tiles, rows)
                # Not earlier: the next tile takes registers, too.
                cursor = schedule.next(cursor)
            k_state.advance()
            v_state.advance()
        tensors.fused.convert_dq(kernel, schedule.order)

    # -------------------------------------------------------------------------------- dQ warpgroup

    @cute.jit
    def compute_dq(self):
        """Compute dQ of each block; store dK and dV of each tile.
        One warp stores, and then releases V and K."""
        config, schedule, pipelines = self.config, self.schedule, self.pipelines
        thread_idx, _, _ = cute.arch.thread_idx()
        thread = thread_idx % WARPGROUP
        is_storing = cute.arch.make_warp_uniform(thread // WARP) == 0
        user = pipeline.PipelineUserType
        regs = DqOperands.of(self.kernel.dtype, config, self.smem)
        dk, dv = self.stores()
        _, _, k_state, v_state = self.pipeline_states(user.Consumer)
        ds_state = pipeline.make_pipeline_state(user.Consumer, config.stages)
        staged_state = pipeline.make_pipeline_state(user.Producer, self.kernel.pieces.in_flight)
        cursor = schedule.begin(self.cursor)
        while schedule.is_valid(cursor):
            tile = self.tile(cursor)
            pipelines.k.consumer_wait(k_state)
            for h in cutlass.range(tile.work.num_heads, unroll=1):
                blocks = self.query_head(tile, h).walk.blocks
                step = DqStep(config, self.smem, pipelines, k_state.index, thread, regs)
                for _ in cutlass.range(blocks.begin, blocks.end, unroll=1):
                    ds_state, staged_state = step.next(ds_state, staged_state)
            KEYS_BARRIER.arrive()
            cursor = schedule.next(cursor)
            rows = self.tensors.sequences.gradients_of_keys(tile.segment)
            place = tile.work.n_block, tile.work.head_kv, rows
            if is_storing:
                dv.written.arrive_and_wait()
                if cutlass.const_expr(not self.kernel.splits):
                    dv.store(*place)
                pipelines.v.consumer_release(v_state)
            dk.written.arrive_and_wait()
            if is_storing:
                if cutlass.const_expr(not self.kernel.splits):
                    dk.store(*place, k_state.index)
                pipelines.k.consumer_release(k_state)
            k_state.advance()
            v_state.advance()
        # TMA must have read shared memory before the CTA ends.
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def score_coords(
    config: BackwardConfig, mmas: GradientMmas, thread, group, tile: Tile
) -> TransposedCoords:
    """The coordinates of a thread's scores; `tile` has a query head."""
    key, column = tile.m_block * config.tile_n, 0
    if config.warpgroups_share_keys:
        column = group * config.queries
    else:
        key += group * ROWS
    shape = ROWS, config.queries
    return TransposedCoords.of(mmas.scores, thread, shape, (key, column), config.tile_m, tile)


@cute.jit
def visited_blocks(kernel: cutlass.Constexpr, mask, n_block, sequence) -> Blocks:
    """Query blocks that see keys of a tile.
    All are masked where the keys end. A block in which the queries end needs no mask for that: its
    rows' statistics hide them."""
    config = kernel.config
    begin = n_block * config.tile_n
    blocks = mask.query_blocks(begin, config.tile_n, config.tile_m, sequence)
    full_begin, full_end = blocks.full_begin, blocks.full_end
    is_masked = begin + config.tile_n > sequence.seqlen_k
    if cutlass.const_expr(kernel.is_ragged):
        # Unused keys: their gradients are 0, for which one block is enough.
        if cutlass.const_expr(kernel.is_ordered):
            # The last block, as the last used keys do: each then knows which tile is before it.
            first = blocks.begin if begin < sequence.seqlen_k else blocks.end - 1
            blocks = blocks.between(first, blocks.end)
        else:
            end = blocks.end if begin < sequence.seqlen_k else blocks.begin + 1
            blocks = blocks.between(blocks.begin, end)
    if cutlass.const_expr(not mask.left):
        # Without a full block it is not known whether the diagonal masks the last one.
        is_masked = is_masked or full_begin == full_end
        full_end = blocks.end
    full_begin = blocks.end if is_masked else full_begin
    full_end = blocks.end if is_masked else full_end
    return Blocks(blocks.begin, full_begin, full_end, blocks.end)
