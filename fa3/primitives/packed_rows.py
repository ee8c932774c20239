"""Packed GQA: tiles whose rows are all query heads of a key/value head at all query positions.

The decode kernel loads Q, stores O and merges parts through this module. Row r of a key/value head
is query position r // heads and query head r % heads of its group, with `heads` query heads in a
group.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa3.primitives.coords import ScoreCoords
from fa3.primitives.output_store import RowLse, store_lse, store_row
from fa3.primitives.vectors import QUAD, VECTOR, as_elements, row_and_vector, vector_of
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS
from fa3.primitives.workspace import Sums, Workspace

PARTS_AT_ONCE = 16  # parts of a row that a warp loads at once when it merges them


@dataclass(frozen=True)
class PackedCoords(ScoreCoords):
    """Coordinates of a thread's scores in a packed tile; `head` is the key/value head."""

    qhead_per_kvhead: int

    @classmethod
    def of_tile(cls, mma, thread, tile_n: int, tile, qhead_per_kvhead: int) -> "PackedCoords":
        base = ScoreCoords.of(mma, thread, (ROWS, tile_n), tile.m_block * ROWS, tile)
        return cls(*vars(base).values(), qhead_per_kvhead)

    def packed(self, r: int):
        """The index of row r among the rows of the key/value head."""
        return self.row + self.row_steps[r]

    def query(self, r: int):
        return self.packed(r) // self.qhead_per_kvhead

    def queries(self):
        first, last = super().queries()
        return first // self.qhead_per_kvhead, last // self.qhead_per_kvhead

    def head_of(self, r: int):
        return self.head * self.qhead_per_kvhead + self.packed(r) % self.qhead_per_kvhead


@cute.jit
def fetch_rows(
    mQ: cute.Tensor,
    smem: cute.Tensor,
    tile,
    queries: tuple,  # the first row of the sequence's queries, and their number
    qhead_per_kvhead: cutlass.Constexpr,
    thread: Int32,
):
    """Start to copy a tile's rows of Q (batch, rows, heads_q, head_dim) to shared memory.
    A warpgroup issues cp.async. Rows and columns past the end become 0. If elements of Q are
    smaller than elements of `smem`, each vector takes the first bytes of its place."""
    first, seqlen_q = queries
    head_dim = mQ.shape[3]
    dtype = mQ.element_type
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=VECTOR * dtype.width)
    columns = cute.size(smem, mode=[1])
    zeros = cute.make_rmem_tensor(VECTOR, dtype)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(ROWS * columns // VECTOR // WARPGROUP):
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
    """Zero the rows of a 16-bit matrix (rows, columns) in shared memory from `begin` on."""
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
):
    """Write a thread's part of a tile's rows (2, columns) to O (batch, rows, heads_q, head_dim_v),
    and their log-sum-exps to `row_lse`."""
    first, seqlen_q = queries
    for r in cutlass.range_constexpr(cute.size(lse)):
        query, head = coords.query(r), coords.head_of(r)
        if query < seqlen_q:
            store_row(rows[r, None], mO[coords.batch, first + query, head, None], coords.column)
            if row_lse.is_wanted():
                row_lse.store((coords.batch, head, first + query), lse[r], coords)


@cute.jit
def store_part(
    workspace: Workspace, slot, rows: cute.Tensor, lse: cute.Tensor, coords: PackedCoords
):
    """Write a thread's part of a tile's rows (2, columns) and their log-sum-exps to a slot."""
    for r in cutlass.range_constexpr(cute.size(lse)):
        row = coords.packed(r) % ROWS
        if row < workspace.lse.shape[1]:
            store_row(rows[r, None], workspace.o[slot, row, None], coords.column)
            store_lse(workspace.lse, (slot, row), lse[r], coords)


@cute.jit
def merge_parts(
    workspace: Workspace,
    segment,
    qhead_per_kvhead: cutlass.Constexpr,
    thread: Int32,
    mO: cute.Tensor,
    row_lse: RowLse,
    sinks,
    queries: tuple,
):
    """Merge the parts of a segment's tile, in the order of slots, and write its rows.
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
    """The sums of a lane's four columns over all parts of a row."""
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
