"""Shared-tile table: what rows and tiles of short packed sequences see.

`fa3.calls.execution` launches it before the forward kernel that walks `MultiSequenceTiles`. It
reads the lengths from device memory, so that the host need not wait for them, and writes three
tables: the `RowRecord` of each row, which the mask reads (`fa3.scores.masks`), the
`MultiSequenceRecord` of each tile, and a `TileRecord` of each sequence, for rows that are computed
again.

A CTA has the rows of a tile, a thread each. It finds its row's sequence by bisection, with as many
steps as the number of sequences has bits. What the halves of the tile see follows by reductions.

Timeline
    wait for the previous kernel | records of sequences | find, records of rows | reduce, record
    The next kernel is launched early and waits in hardware for the end of this one.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa3.kernels.kernel_base import KernelBase
from fa3.kernels.tile_table import TileTableArguments
from fa3.primitives import arguments
from fa3.primitives.ragged_lengths import sequence_of
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.vectors import store_words
from fa3.primitives.wgmma import ROWS, WARP
from fa3.schedules.ragged import NUM_RECORDS, TABLE_HEADER, TileRecord, write_record
from fa3.schedules.shared_tiles import HALVES, MultiSequenceRecord, keys_seen
from fa3.scores.masks import NO_SEQUENCE, ROW_RECORD, Band, RowRecord, Sequence

WARPS_OF_HALF = ROWS // WARP


@dataclass(frozen=True)
class MultiSequenceTable(KernelBase):
    """The kernel that makes the tables."""

    tile_m: int  # rows of a tile
    band: Band  # the mask
    # has_used_q, has_used_k: whether there are `seqused_q` and `seqused_k`.
    has_used_q: bool
    has_used_k: bool

    entry_name: ClassVar[str] = "fa3_joined_table"
    arguments_type: ClassVar[type] = TileTableArguments

    def arguments(self) -> list:
        rows = arguments.compact_tensor("int32", (cute.sym_int(), ROW_RECORD))
        own = {"rows": rows, "tiles": arguments.int32_vector(), "num_tiles": Int32(0)}
        return [*TileTableArguments.symbolic(self, **own), arguments.symbolic_stream()]

    def __post_init__(self):
        if self.tile_m != HALVES * ROWS:
            raise ValueError(f"tile_m must be {HALVES * ROWS}, got {self.tile_m}")

    @cute.jit
    def launch(self, call: TileTableArguments, stream):
        self.kernel(call).launch(
            grid=(call.num_tiles, 1, 1), block=(self.tile_m, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, call: TileTableArguments):
        smem = SmemAllocator()
        # Of each warp: the first and the last key that its rows see, and whether all are used.
        warp_ranges = smem.allocate_tensor(
            Int32, cute.make_layout((3, HALVES * WARPS_OF_HALF)), byte_alignment=16
        )
        thread, _, _ = cute.arch.thread_idx()
        m_block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        self.write_sequences(call)
        row = m_block * self.tile_m + thread
        record = self.record_of_row(call, row)
        store_words(record, call.rows.iterator + row * ROW_RECORD)
        sees = record.first_key < record.end_key
        first = record.first_key if sees else call.keys.total
        end = record.end_key if sees else Int32(0)
        first = cute.arch.warp_redux_sync(first, "min")
        end = cute.arch.warp_redux_sync(end, "max")
        is_whole = cute.arch.vote_all_sync(record.is_used or row >= call.queries.total)
        if cute.arch.lane_idx() == 0:
            warp = thread // WARP
            warp_ranges[0, warp], warp_ranges[1, warp] = first, end
            warp_ranges[2, warp] = Int32(1) if is_whole else Int32(0)
        cute.arch.sync_threads()
        if thread == 0:
            self.write_tile(call.tiles, m_block, warp_ranges)
            if m_block == 0:
                num_tiles, _, _ = cute.arch.grid_dim()
                for i in cutlass.range_constexpr(TABLE_HEADER):
                    call.tiles[i] = num_tiles if i == NUM_RECORDS else Int32(0)

    @cute.jit
    def write_sequences(self, call: TileTableArguments):
        """Write a record of each sequence, whose queries are one tile."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        batch = block * self.tile_m + thread
        while batch < call.queries.num_sequences:
            ends = (*call.queries.read(batch), *call.keys.read(batch))
            record = TileRecord(Int32(0), batch, *ends, Int32(1))
            write_record(call.table, batch, record, Boolean(True))
            batch += num_blocks * self.tile_m

    @cute.jit
    def record_of_row(self, call: TileTableArguments, row: Int32) -> RowRecord:
        """The record of a row of q, or past the last one."""
        queries, keys = call.queries, call.keys
        batch = sequence_of(queries.cu, row, queries.num_sequences)
        begin_q, seqlen_q = queries.read(batch)
        begin_k, seqlen_k = keys.read(batch)
        query = row - begin_q
        sequence = Sequence(seqlen_q, seqlen_k, call.window)
        first_key, end_key = keys_seen(query, sequence, begin_k, self.band)
        is_used = query >= 0 and query < seqlen_q
        return RowRecord(
            first_key if is_used else end_key,
            end_key,
            batch if is_used else Int32(NO_SEQUENCE),
            query,
        )

    @cute.jit
    def write_tile(self, tiles: cute.Tensor, m_block: Int32, warp_ranges: cute.Tensor):
        """Write the record of a tile, from what its warps found."""
        firsts, ends, whole = [], [], Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            warp = half * WARPS_OF_HALF
            firsts.append(cutlass.min(warp_ranges[0, warp], warp_ranges[0, warp + 1]))
            ends.append(cutlass.max(warp_ranges[1, warp], warp_ranges[1, warp + 1]))
            whole = whole | ((warp_ranges[2, warp] & warp_ranges[2, warp + 1]) << half)
        record = MultiSequenceRecord.of(m_block, tuple(firsts), tuple(ends), whole)
        write_record(tiles, m_block, record, Boolean(True))
