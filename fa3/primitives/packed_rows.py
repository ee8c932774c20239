"""Packed GQA: tiles of all query heads of a key/value head.

The decode kernel loads Q, stores O and merges parts through this module. Row r of a key/value head
is query position r // heads and query head r % heads of its group. A group has `heads` query heads.
A `Workspace` has parts of tiles and their records; `Sums` adds up parts of a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa3.primitives.fragments import ScoreCoords
from fa3.primitives.output_store import RowLse, store_lse, store_row
from fa3.primitives.softmax import LOG2_E, finite
from fa3.primitives.vectors import QUAD, VECTOR, as_elements, row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

RECORD_STRIDE = 8
"""Integers from one record to the next: each record has its own 32-byte sector of memory."""

UNIT = 32  # sizes are rounded up to this many numbers, so that everything is aligned to 128 bytes


def rounded(size):
    return (size + UNIT - 1) // UNIT * UNIT


class WorkspaceSize(NamedTuple):
    """Sizes of a workspace: integers on the host or inside a kernel."""

    num_records: int  # records, one for each tile that may have parts
    num_slots: int  # slots, each for one part
    rows: int  # rows of a tile

    @property
    def numbers_of_records(self):
        """32-bit numbers of the records, which come first."""
        return rounded(self.num_records * RECORD_STRIDE)

    def numbers(self, head_dim_v: int):
        """32-bit numbers that the workspace takes."""
        fixed = self.numbers_of_records + rounded(self.num_slots * self.rows)
        return fixed + self.num_slots * self.rows * head_dim_v


class Workspace(NamedTuple):
    """Parts of tiles in global memory, and the records that locate them."""

    # (num_records, 8) int32: m_block, head, batch, first slot and number of parts of a tile, and
    # where its sequence's queries begin and how many there are if they are packed. With fewer than
    # two parts there is nothing to merge.
    records: cute.Tensor
    lse: cute.Tensor  # (num_slots, rows), natural logarithm
    o: cute.Tensor  # (num_slots, rows, head_dim_v), float32, each part divided by its own row sums

    def clear_record(self, number):
        """Say that a record has nothing to merge."""
        self.records[number, 4] = 0

    @classmethod
    def of(cls, buffer: cute.Tensor, size: WorkspaceSize, head_dim_v: int) -> "Workspace":
        """Lay out a buffer of float32."""
        num_records, num_slots, rows = (Int32(n) for n in size)
        lse = buffer.iterator + rounded(num_records * RECORD_STRIDE)
        o = lse + rounded(num_slots * rows)
        # 16-byte loads and stores need a stride with a known divisor.
        slot = cute.assume(Int64(rows) * head_dim_v, divby=head_dim_v)
        return cls(
            cute.make_tensor(
                cute.recast_ptr(buffer.iterator, dtype=Int32),
                cute.make_layout((num_records, RECORD_STRIDE), stride=(RECORD_STRIDE, 1)),
            ),
            cute.make_tensor(lse.align(16), cute.make_layout((num_slots, rows), stride=(rows, 1))),
            cute.make_tensor(
                o.align(16),
                cute.make_layout((num_slots, rows, head_dim_v), stride=(slot, head_dim_v, 1)),
            ),
        )


@dataclass(frozen=True)
class Sums:
    """Sums of lanes over parts of a row, relative to their largest."""

    o: cute.Tensor  # sum of exp(lse_i - largest) O_i in this lane's columns
    scalars: cute.Tensor  # the largest, and the sum of exp(lse_i - largest)

    @classmethod
    def create(cls) -> "Sums":
        sums = cls(*(cute.make_rmem_tensor(n, Float32) for n in (QUAD, 2)))
        sums.o.fill(0.0)
        sums.scalars[0], sums.scalars[1] = -Float32.inf, Float32(0.0)
        return sums

    @cute.jit
    def rebase(self, largest: Float32) -> Float32:
        """Raise the largest so far to `largest`; return it, 0 for -inf."""
        self.scalars[0] = cute.arch.fmax(self.scalars[0], largest)
        return finite(self.scalars[0])

    @cute.jit
    def add(self, lse: cute.Tensor, o: cute.Tensor):
        """Add parts: log-sum-exps (n,) and this lane's columns (4, n)."""
        before = self.scalars[0]
        largest = lse[0]
        for i in cutlass.range_constexpr(1, cute.size(lse)):
            largest = cute.arch.fmax(largest, lse[i])
        base = self.rebase(largest)
        correction = exp(before - base)
        acc, total = self.o.load() * correction, self.scalars[1] * correction
        for i in cutlass.range_constexpr(cute.size(lse)):
            factor = exp(lse[i] - base)
            total += factor
            acc = acc + o[None, i].load() * factor
        self.o.store(acc)
        self.scalars[1] = total

    @cute.jit
    def add_sums(self, largest: Float32, total: Float32, o: cute.Tensor):
        """Add other sums: their largest, their sum of exp, and their O."""
        before = self.scalars[0]
        base = self.rebase(largest)
        correction, factor = exp(before - base), exp(largest - base)
        self.o.store(self.o.load() * correction + o.load() * factor)
        self.scalars[1] = self.scalars[1] * correction + total * factor

    @cute.jit
    def store(self, target: cute.Tensor, lse: RowLse, at: tuple, vector, sink):
        """Write a lane's columns of a row; lane 0 writes the log-sum-exp.

        `at` is its place, `vector` the index of the columns. A `sink` is a logit that joins the
        row, or None.
        """
        if cutlass.const_expr(sink is not None):
            nothing = cute.make_rmem_tensor_like(self.o)
            nothing.fill(0.0)
            self.add_sums(Float32(sink), Float32(1.0), nothing)
        total = self.scalars[1]
        hidden = total == 0.0
        inverse = Float32(0.0) if hidden else cute.arch.rcp_approx(total)
        converted = cute.make_rmem_tensor(QUAD, target.element_type)
        converted.store((self.o.load() * inverse).to(target.element_type))
        if vector * QUAD < target.shape[0]:
            cute.autovec_copy(converted, vector_of(target, vector, QUAD))
        if lse.is_wanted() and vector == 0:
            value = self.scalars[0] + cute.math.log(total, fastmath=True)
            lse.tensor[at] = -Float32.inf if hidden else value


def exp(x):
    """exp(x) on the exponential unit (MUFU)."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


PARTS_AT_ONCE = 16  # parts of a row that a warp loads at once when it merges them


@dataclass(frozen=True)
class PackedCoords(ScoreCoords):
    """Coordinates in a packed tile; `head` is the key/value head."""

    qhead_per_kvhead: int

    @classmethod
    def of_tile(cls, mma, thread, tile_n: int, tile, qhead_per_kvhead: int) -> "PackedCoords":
        begins = tile.m_block * ROWS, 0
        base = ScoreCoords.of(mma, thread, (ROWS, tile_n), begins, tile_n, tile)
        return cls(*vars(base).values(), qhead_per_kvhead)

    def query(self, r: int):
        return self.row_at(r) // self.qhead_per_kvhead

    def queries(self):
        first, last = super().queries()
        return first // self.qhead_per_kvhead, last // self.qhead_per_kvhead

    def head_of(self, r: int):
        return self.head * self.qhead_per_kvhead + self.row_at(r) % self.qhead_per_kvhead


@cute.jit
def fetch_rows(
    mQ: cute.Tensor,
    smem: cute.Tensor,
    tile,
    queries: tuple,  # the first row of the sequence's queries, and their number
    qhead_per_kvhead: cutlass.Constexpr,
    thread: Int32,
):
    """Start to copy a tile's rows of Q to shared memory.
    A warpgroup issues cp.async. Rows and columns past the end become 0. If elements of Q are
    smaller than elements of `smem`, each vector takes the first bytes of its place."""
    first, seqlen_q = queries
    head_dim = mQ.shape[3]
    dtype = mQ.element_type
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=VECTOR * dtype.width)
    columns = cute.size(smem, mode=[1])
    zeros = cute.make_rmem_tensor(VECTOR, dtype)
    zeros.fill(0.0)
    for i in cutlass.range(cute.size(smem) // VECTOR // WARPGROUP, unroll=4):
        row, vector = row_and_vector(thread + i * WARPGROUP, columns)
        packed = tile.m_block * ROWS + row
        target = as_elements(vector_of(smem[row, None], vector), dtype)
        if packed < seqlen_q * qhead_per_kvhead and vector * VECTOR < head_dim:
            head = tile.head * qhead_per_kvhead + packed % qhead_per_kvhead
            source = mQ[tile.batch, first + packed // qhead_per_kvhead, head, None]
            cute.copy(atom, vector_of(source, vector), target)
        else:
            cute.autovec_copy(zeros, target)


@cute.jit
def clear_rows(smem: cute.Tensor, begin, thread: Int32):
    """Zero rows of a 16-bit matrix in shared memory from `begin` on."""
    rows, columns = (cute.size(smem, mode=[i]) for i in range(2))
    zeros = cute.make_rmem_tensor(VECTOR, smem.element_type)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(rows * columns // VECTOR // WARPGROUP):
        row, vector = row_and_vector(thread + i * WARPGROUP, columns)
        if row >= begin:
            cute.autovec_copy(zeros, vector_of(smem[row, None], vector))


@cute.jit
def store_rows(
    rows: cute.Tensor,
    lse: cute.Tensor,
    mO: cute.Tensor,
    row_lse,
    coords: PackedCoords,
    queries: tuple,  # the first row of the sequence's queries, and their number
    size: cutlass.Constexpr,  # see `store_row`
):
    """Write a thread's part of a tile's rows, and their log-sum-exps.
    `rows` is (2, columns), O (batch, rows, heads_q, head_dim_v)."""
    first, seqlen_q = queries
    for r in cutlass.range_constexpr(cute.size(lse)):
        query, head = coords.query(r), coords.head_of(r)
        if query < seqlen_q:
            target = mO[coords.batch, first + query, head, None]
            store_row(rows[r, None], target, coords.column, size)
            if row_lse.is_wanted():
                store_lse(row_lse.tensor, (coords.batch, head, first + query), lse[r], coords)


@cute.jit
def store_part(
    workspace: Workspace,
    slot,
    rows: cute.Tensor,
    lse: cute.Tensor,
    coords: PackedCoords,
    size: cutlass.Constexpr,
):
    """Write a thread's part of a tile, and log-sum-exps, to a slot.
    `size` is as in `store_row`."""
    for r in cutlass.range_constexpr(cute.size(lse)):
        row = coords.row_at(r) % ROWS
        if row < workspace.lse.shape[1]:
            store_row(rows[r, None], workspace.o[slot, row, None], coords.column, size)
            store_lse(workspace.lse, (slot, row), lse[r], coords)


@cute.jit
def merge_parts(
    workspace, segment, qhead_per_kvhead: cutlass.Constexpr, thread, mO, row_lse, sinks, queries
):
    """Merge a tile's parts in the order of slots; write its rows.
    The rows of O (batch, rows, heads_q, head_dim_v), the log-sum-exps and `queries` are as in
    `store_rows`. Each warp of a warpgroup has a row at a time."""
    first, seqlen_q = queries
    tile, lane, row = segment.tile, thread % WARP, thread // WARP
    first_row, rows_of_tile = tile.m_block * ROWS, workspace.lse.shape[1]
    rows = cutlass.min(seqlen_q * qhead_per_kvhead - first_row, rows_of_tile)
    vectors = cute.ceil_div(mO.shape[3], QUAD)
    while row < rows:
        packed = first_row + row
        query = first + packed // qhead_per_kvhead
        head = tile.head * qhead_per_kvhead + packed % qhead_per_kvhead
        sink = None
        if cutlass.const_expr(sinks is not None):
            sink = sinks[head]
        for i in cutlass.range_constexpr(cute.ceil_div(vectors, WARP)):
            sums = sums_of_row(workspace, segment.part, row, i * WARP + lane)
            target, at = mO[tile.batch, query, head, None], (tile.batch, head, query)
            sums.store(target, row_lse, at, i * WARP + lane, sink)
        row += WARPS


@cute.jit
def sums_of_row(workspace: Workspace, part, row: Int32, vector: Int32) -> Sums:
    """The sums of a lane's columns over all parts of a row."""
    sums, first = Sums.create(), Int32(0)
    while first < part.num_parts:
        o = cute.make_rmem_tensor((QUAD, PARTS_AT_ONCE), Float32)
        lse = cute.make_rmem_tensor(PARTS_AT_ONCE, Float32)
        o.fill(0.0)
        lse.fill(-Float32.inf)
        for i in cutlass.range_constexpr(PARTS_AT_ONCE):
            if first + i < part.num_parts:
                slot = part.first_slot + first + i
                lse[i] = workspace.lse[slot, row]
                if vector * QUAD < workspace.o.shape[2]:
                    values = workspace.o[slot, row, None]
                    cute.autovec_copy(vector_of(values, vector, QUAD), o[None, i])
        sums.add(lse, o)
        first += PARTS_AT_ONCE
    return sums
