"""Combine: merges attention over parts of the keys into one result.

A part is an O divided by its own row sums (fp32), and the log-sum-exps of its rows. For each row
lse = log sum_i exp(lse_i) and O = sum_i exp(lse_i - lse) O_i. The order of the sums depends only
on the number of parts, so equal parts give equal bits.

A source says where a row's parts are and where the result goes: `RecordedParts` for the parts that
the decode kernel wrote to its workspace, `DenseParts` for the tensors (parts, batch, seqlen, heads,
head_dim) of `fa3.calls.combine`. The caller's tensors receive O and the log-sum-exps.

A CTA computes 64 columns with 16 groups of 16 lanes. With few parts, each group has its own row.
With many, up to 16 groups share a row: each sums every 16th part, and shared memory joins the sums.
CTA (x, y, z) takes the tile of record x, its sets of rows y, y + sets, ..., and columns from 64 z.

Timeline of a CTA
    launched during the previous kernel | wait for its end | record | load the row's log-sum-exps
    and parts, all in flight together | sums of the groups | O and log-sum-exp

Source: Dao et al., Flash-Decoding for long-context inference (2023).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.kernels.kernel_base import KernelBase
from fa3.primitives import arguments
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.output_store import RowLse, shared_by
from fa3.primitives.packed_rows import Sums, Workspace, WorkspaceSize, exp
from fa3.primitives.shared_memory import SmemAllocator
from fa3.primitives.softmax import finite
from fa3.primitives.vectors import QUAD, vector_of

GROUPS = 16
LANES = 16
COLUMNS = LANES * QUAD

IN_FLIGHT = 9
"""Parts that a group loads at once. With 16 groups that is all, if 132 CTAs share a tile."""

FEW = 4  # parts up to which a group has a row to itself; with more, more groups share it


class TileParts(NamedTuple):
    """The parts of a tile."""

    # first, count: the first slot, and the number of slots.
    first: Int32
    count: Int32
    rows: Int32  # rows of the tile
    # m_block, head and batch of a recorded tile, and where the queries of its sequence begin.
    place: tuple = ()


class Row(NamedTuple):
    """One row: values in all slots, and the place of the result."""

    o: cute.Tensor  # (slots, head_dim_v)
    lse: cute.Tensor  # (slots,)
    batch: Int32
    query: Int32
    head: Int32


@dataclass(frozen=True)
class RecordedParts:
    """Parts in the decode kernel's workspace."""

    workspace: Workspace
    seqlen_q: Int32 | None  # query positions; None if the records have them
    qhead_per_kvhead: int  # query heads in a tile's rows; row r is head r % qhead_per_kvhead

    def parts(self, record) -> TileParts:
        words = [
            self.workspace.records[record, i] for i in range(7 if self.seqlen_q is None else 5)
        ]
        m_block, head, batch, first, count, *queries = words
        first_query, seqlen_q = queries if queries else (0, self.seqlen_q)
        rows_of_tile = self.workspace.lse.shape[1]
        rows = cutlass.min(seqlen_q * self.qhead_per_kvhead - m_block * rows_of_tile, rows_of_tile)
        return TileParts(first, count, rows, (m_block, head, batch, first_query))

    def row(self, parts: TileParts, row) -> Row:
        workspace, ratio = self.workspace, self.qhead_per_kvhead
        m_block, head, batch, first_query = parts.place
        packed = m_block * workspace.lse.shape[1] + row
        return Row(
            workspace.o[None, row, None],
            workspace.lse[None, row],
            batch,
            first_query + packed // ratio,
            head * ratio + packed % ratio,
        )


@dataclass(frozen=True)
class DenseParts:
    """Parts o (parts, batch, seqlen, heads, head_dim_v) and lse without columns."""

    o: cute.Tensor
    lse: cute.Tensor

    def parts(self, record) -> TileParts:
        count, batch, seqlen, heads, _ = self.o.shape
        return TileParts(Int32(0), count, batch * seqlen * heads)

    def row(self, parts: TileParts, row) -> Row:
        _, _, seqlen, heads, _ = self.o.shape
        position = row // heads
        head, batch = row - position * heads, position // seqlen
        query = position - batch * seqlen
        o, lse = self.o[None, batch, query, head, None], self.lse[None, batch, query, head]
        return Row(o, lse, batch, query, head)


class CombineArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    # (batch, seqlen, heads, head_dim_v), receives the output; (total, heads, head_dim_v) if queries
    # are packed.
    o: object
    # Address of (batch, heads, seqlen) float32, which receives the log-sum-exp; 0 for none.
    lse: Int64
    sinks: object = None  # (heads,), or None
    # dense_o, dense_lse: (parts, batch, seqlen, heads, head_dim_v) and (parts, batch, seqlen,
    # heads) float32; None for the decode kernel's parts.
    dense_o: object = None
    dense_lse: object = None
    workspace: object = None  # the decode kernel's, float32; None for dense parts
    # num_records, num_slots, rows: see `WorkspaceSize`; 1, 0, 0 for dense parts.
    num_records: int = 1
    num_slots: int = 0
    rows: int = 0
    sets: int = 1  # CTAs that share the rows of a tile

    @classmethod
    def symbolic(cls, kernel: "Combine") -> "CombineArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        batch, seqlen, heads = (cute.sym_int() for _ in range(3))
        rows = (seqlen,) if kernel.is_packed else (batch, seqlen)
        source = {"workspace": arguments.float32_buffer()}
        if kernel.qhead_per_kvhead is None:
            parts = cute.sym_int(), batch, seqlen, heads
            strides = tuple(cute.sym_int64() for _ in parts)
            source = {
                "dense_o": arguments.tma_tensor("float32", (*parts, kernel.head_dim_v)),
                "dense_lse": cute.runtime.make_fake_tensor(
                    Float32, parts, strides, assumed_align=4
                ),
            }
        return cls(
            **arguments.scalars(cls) | source,
            o=arguments.tma_tensor(kernel.dtype, (*rows, heads, kernel.head_dim_v)),
            sinks=arguments.strided_tensor(kernel.sinks, 1) if kernel.sinks else None,
        )


@dataclass(frozen=True)
class Combine(KernelBase):
    """The combine kernel."""

    dtype: str  # element type of O
    head_dim_v: int  # columns of O
    # Query heads in a tile's rows, for recorded parts; None for dense parts.
    qhead_per_kvhead: int | None
    sinks: str | None  # dtype of the heads' sinks, or None
    # Whether the queries of sequences are packed, in tensors without a batch.
    is_packed: bool = False

    entry_name: ClassVar[str] = "fa3_combine"
    arguments_type: ClassVar[type] = CombineArguments

    @cute.jit
    def launch(self, call: CombineArguments, stream):
        if cutlass.const_expr(call.workspace is None):
            source = DenseParts(call.dense_o, call.dense_lse)
        else:
            size = WorkspaceSize(call.num_records, call.num_slots, call.rows)
            source = Workspace.of(call.workspace, size, self.head_dim_v)
        o = call.o
        if cutlass.const_expr(self.is_packed):
            # Whatever sequence a record names: its rows count from the first one.
            o = cute.make_tensor(o.iterator, shared_by(LARGEST, o.layout))
        batch, seqlen, heads, _ = o.shape
        lse = RowLse.at(call.lse, (batch, heads, seqlen), self.is_packed)
        self.kernel(source, o, lse, call.sinks).launch(
            # Only x may be larger than 65,535.
            grid=(call.num_records, call.sets, cute.ceil_div(self.head_dim_v, COLUMNS)),
            block=(GROUPS * LANES, 1, 1),
            stream=stream,
            # 80 registers a thread, so that a CTA fits on an SM with one of the decode kernel
            # and waits there. Both need the same carve-out: an SM has only one at a time.
            min_blocks_per_mp=3,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, source, mO: cute.Tensor, row_lse: RowLse, sinks):
        """`source` is the decode kernel's `Workspace`, or `DenseParts`."""
        smem = SmemAllocator()
        o = cute.make_layout((QUAD, LANES, GROUPS), stride=(1, QUAD, COLUMNS))
        scalars = cute.make_layout((2, GROUPS), stride=(1, 2))
        # Through it groups that share a row exchange their sums.
        exchange = Sums(
            *(smem.allocate_tensor(Float32, n, byte_alignment=16) for n in (o, scalars))
        )
        if cutlass.const_expr(self.qhead_per_kvhead is not None):
            # Here, and not on the host: what the launch hands over is no constant any more.
            seqlen_q = None if self.is_packed else mO.shape[1]
            source = RecordedParts(source, seqlen_q, self.qhead_per_kvhead)
        record, first_set, _ = cute.arch.block_idx()
        _, sets, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        parts = source.parts(record)
        if parts.count > 1 or cutlass.const_expr(self.qhead_per_kvhead is None):
            # A power of two of groups shares a row: shifts, since a division takes 100 cycles.
            share = cutlass.min((parts.count + FEW - 1) // FEW, GROUPS)
            shift = Int32(32 - cute.arch.clz(cutlass.max(share, 1) - 1))
            rows_of_set = GROUPS >> shift
            nth = first_set
            while nth * rows_of_set < parts.rows:
                self.merge(source, parts, nth, shift, exchange, (mO, row_lse, sinks))
                nth += sets

    @cute.jit
    def merge(self, source, parts: TileParts, nth, shift, exchange: Sums, results: tuple):
        """Merge a set of rows; 2 ** shift groups share each row."""
        mO, row_lse, sinks = results
        thread, _, _ = cute.arch.thread_idx()
        group, lane = thread // LANES, thread % LANES
        share, index = 1 << shift, nth * (GROUPS >> shift) + (group >> shift)
        row = source.row(parts, cutlass.min(index, parts.rows - 1))
        sums = Sums.create()
        first = group & (share - 1)
        is_first = first == 0
        while first < parts.count:
            self.add_parts(row, parts, first, share, sums)
            first += IN_FLIGHT * share
        if share > 1:
            cute.autovec_copy(sums.o, exchange.o[None, lane, group])
            if lane == 0:
                cute.autovec_copy(sums.scalars, exchange.scalars[None, group])
            cute.arch.sync_threads()
            if is_first:
                self.add_groups(exchange, sums, group, share)
            cute.arch.sync_threads()
        if is_first and index < parts.rows:
            self.store(row, sums, mO, row_lse, sinks)

    @cute.jit
    def add_groups(self, exchange: Sums, sums: Sums, group, share):
        """Add up the sums of a row's groups, in the first one."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        scalars = cute.make_rmem_tensor((2, GROUPS), Float32)
        for i in cutlass.range_constexpr(GROUPS):
            # Always 16 independent reads; sums that are read twice count once.
            cute.autovec_copy(exchange.scalars[None, group + (i & (share - 1))], scalars[None, i])
            sums.rebase(scalars[0, i])
        base = finite(sums.scalars[0])
        sums.o.fill(0.0)
        sums.scalars[1] = Float32(0.0)
        for i in cutlass.range_constexpr(GROUPS):
            o = cute.make_rmem_tensor(QUAD, Float32)
            cute.autovec_copy(exchange.o[None, lane, group + (i & (share - 1))], o)
            factor = exp(scalars[0, i] - base) if i < share else Float32(0.0)
            sums.o.store(sums.o.load() + o.load() * factor)
            sums.scalars[1] = sums.scalars[1] + scalars[1, i] * factor

    def vector(self):
        """The index of this lane's vector in a row."""
        thread, _, _ = cute.arch.thread_idx()
        _, _, column_block = cute.arch.block_idx()
        return column_block * LANES + thread % LANES

    @cute.jit
    def add_parts(self, row: Row, parts: TileParts, first, share, sums: Sums):
        """Add the group's next IN_FLIGHT parts, from `first` in steps of `share`."""
        vector = self.vector()
        o = cute.make_rmem_tensor((QUAD, IN_FLIGHT), Float32)
        lse = cute.make_rmem_tensor(IN_FLIGHT, Float32)
        o.fill(0.0)
        lse.fill(-Float32.inf)
        for i in cutlass.range_constexpr(IN_FLIGHT):
            part = first + i * share
            if part < parts.count:
                slot = parts.first + part
                lse[i] = row.lse[slot]
                if vector * QUAD < self.head_dim_v:
                    cute.autovec_copy(vector_of(row.o[slot, None], vector, QUAD), o[None, i])
        sums.add(lse, o)

    @cute.jit
    def store(self, row: Row, sums: Sums, mO: cute.Tensor, row_lse: RowLse, sinks):
        """Add the sink, divide by the total, write O and log-sum-exp."""
        sink = None
        if cutlass.const_expr(sinks is not None):
            sink = sinks[row.head]
        target = mO[row.batch, row.query, row.head, None]
        sums.store(target, row_lse, (row.batch, row.head, row.query), self.vector(), sink)
