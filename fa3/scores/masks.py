"""Masks: which key blocks a tile touches, which scores are hidden.

A mask has a compile-time half (the frozen dataclasses here: which bounds exist, which user mask)
and a run-time half (`Window`, the bounds' values, and tensors). It is part of a problem's spec
(`fa3.problem`). A kernel binds the mask to the call's tensors and to a tile's head; its main loop
walks `key_blocks` and does not know the kind of mask. Planner and reference use the same plain
arithmetic.

Your own mask is a subclass of `Mask` with two methods, and two more if it knows ranges:

    @dataclass(frozen=True)
    class Prefix(fa3.Mask):
        length: torch.Tensor  # (batch,), int32: keys that every query sees

        @cute.jit
        def visible(self, at: fa3.Position):
            return at.key < self.length[at.batch]

        def reference(self, at):
            return at.key < self.length[at.batch]

        def key_range(self, rows):
            return 0, self.length[rows.batch]
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.base_dsl.typing import Integer

from fa3.complaints import shown
from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.fragments import Position, ScoreCoords, TransposedCoords
from fa3.problem import NO_BOUND, Window
from fa3.scores.templates import Template, TensorType


class Blocks(NamedTuple):
    """Half-open ranges of blocks: [begin, end) is touched, [full_begin, full_end) unmasked.

    Key blocks that a query tile touches, or query blocks that a key tile touches. begin <=
    full_begin <= full_end <= end and begin < end: a tile always has one block at least; if that
    is fully hidden, the output is 0 and the log-sum-exp -inf, as for any hidden row.
    Numbers, values inside a kernel, or arrays of one length.
    """

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any

    @classmethod
    def of(cls, first: tuple, last: tuple, size) -> "Blocks":
        """Blocks, from the ranges of a tile's first and last row.
        Blocks have `size` elements.
        From row to row, begin and end of the range must not decrease."""
        (first_begin, first_end), (last_begin, last_end) = first, last
        end = larger(1, (larger(0, last_end) + size - 1) // size)
        begin = smaller(larger(0, first_begin) // size, end - 1)
        full_end = smaller(larger(larger(0, first_end) // size, begin), end)
        full_begin = (larger(0, last_begin) + size - 1) // size
        full_begin = smaller(larger(full_begin, begin), full_end)
        return cls(begin, full_begin, full_end, end)

    def walked(self, begin, end) -> "Blocks":
        """The same blocks with `[begin, end)` visited; only full ones need no mask."""
        full_end = smaller(larger(self.full_end, begin), end)
        return Blocks(begin, smaller(larger(self.full_begin, begin), full_end), full_end, end)

    def between(self, first, end) -> "Blocks":
        """The blocks inside [first, end), or one hidden block."""
        end = smaller(larger(self.end, first + 1), end)
        return self.walked(smaller(larger(self.begin, first), end - 1), end)


class Sequence(NamedTuple):
    """A sequence's lengths and window: what a mask needs besides coordinates."""

    seqlen_q: int
    seqlen_k: int
    window: Window

    @property
    def offset(self):
        """Bottom-right alignment: query i has the position of key i + offset."""
        return self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class Band:
    """Query i sees keys around its diagonal, from left to right bound.
    These are i + offset - left to i + offset + right. `left` and `right` say at compile time
    whether the bound exists; the values come at run time. Causal is Band(left=False, right=True)
    with Window(right=0)."""

    left: bool = False
    right: bool = False

    @classmethod
    def of(cls, window: Window) -> "Band":
        """The band with the bounds that the window has."""
        return cls(left=window.left != NO_BOUND, right=window.right != NO_BOUND)

    @property
    def band(self) -> "Band":
        """Itself: an `Intersection` has one."""
        return self

    @property
    def templates(self) -> tuple[Template, ...]:
        """What of it has tensors: nothing."""
        return ()

    def bind(self, tensors) -> "Band":
        """The mask with its tensors, from the iterator `tensors`; bands have none."""
        return self

    def at(self, batch, head) -> "Band":
        """The mask for one head."""
        return self

    def at_rows(self, coords: ScoreCoords, sequence: Sequence) -> "Band":
        """The mask for the rows of one thread, perhaps with loads."""
        return self

    def key_range(self, row, sequence: Sequence):
        """Half-open range of keys that query `row` sees; empty if `end <= begin`."""
        begin, end = 0, sequence.seqlen_k
        if self.left:
            begin = larger(begin, row + sequence.offset - sequence.window.left)
        if self.right:
            end = smaller(end, row + sequence.offset + sequence.window.right + 1)
        return begin, end

    def key_blocks(self, row_begin, num_rows, tile_n, sequence: Sequence) -> Blocks:
        """Blocks of `tile_n` keys that rows [row_begin, row_begin + num_rows) touch."""
        row_last = smaller(row_begin + num_rows, sequence.seqlen_q) - 1
        ranges = (self.key_range(row, sequence) for row in (row_begin, row_last))
        return Blocks.of(*ranges, tile_n)

    def range_at(self, r: int, coords: ScoreCoords, sequence: Sequence):
        """Half-open range of the keys that row r of a thread sees."""
        return self.key_range(coords.query(r), sequence)

    def query_range(self, key, sequence: Sequence):
        """Half-open range of queries that see `key`; empty if `end <= begin`."""
        begin, end = 0, sequence.seqlen_q
        if self.right:
            begin = larger(begin, key - sequence.offset - sequence.window.right)
        if self.left:
            end = smaller(end, key - sequence.offset + sequence.window.left + 1)
        return begin, end

    def query_blocks(self, key_begin, num_keys, tile_m, sequence: Sequence) -> Blocks:
        """Blocks of `tile_m` queries that see keys [key_begin, key_begin + num_keys)."""
        key_last = smaller(key_begin + num_keys, sequence.seqlen_k) - 1
        ranges = (self.query_range(key, sequence) for key in (key_begin, key_last))
        return Blocks.of(*ranges, tile_m)

    @cute.jit
    def apply(self, scores: cute.Tensor, coords: ScoreCoords, n_block, sequence: Sequence):
        """Set the hidden scores of one block to -inf."""
        first_column = coords.first_column(n_block)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            begin, end = self.range_at(r, coords, sequence)
            begin, end = begin - first_column, end - first_column
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                hidden = coords.column_steps[c] >= end
                if cutlass.const_expr(self.left):
                    hidden = hidden or coords.column_steps[c] < begin
                scores[r, c] = -cutlass.Float32.inf if hidden else scores[r, c]

    @cute.jit
    def apply_transposed(
        self, scores: cute.Tensor, coords: TransposedCoords, m_block, sequence: Sequence
    ):
        """Hide scores of a block of S^T, also keys past the end.
        Queries past the last one are left as they are."""
        first_query = coords.first_column(m_block)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            key = coords.row_at(r)
            begin, end = self.query_range(key, sequence)
            begin = begin if key < sequence.seqlen_k else sequence.seqlen_q
            begin, end = begin - first_query, end - first_query
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                hidden = coords.column_steps[c] < begin
                if cutlass.const_expr(self.left):
                    hidden = hidden or coords.column_steps[c] >= end
                scores[r, c] = -cutlass.Float32.inf if hidden else scores[r, c]


class Rows(NamedTuple):
    """Queries first to last, inclusive, of one head."""

    batch: int
    head: int
    first: int
    last: int
    seqlen_q: int
    seqlen_k: int


class Mask:
    """Base class of users' masks: whether a query sees a key."""

    def visible(self, at: Position):
        """Whether the query sees the key; a `@cute.jit` method of the subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define visible(self, at)")

    def reference(self, at: Position):
        """The same in torch, as bool; fields of `at` broadcast to (queries, keys)."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(self, at)")

    def key_range(self, rows: Rows):
        """Half-open range of keys that rows may see; the kernel skips others."""
        return 0, rows.seqlen_k

    def open_range(self, rows: Rows):
        """Half-open range of keys that all rows see; kernels leave them unmasked."""
        return 0, 0


def as_integer(bound):
    """Return a bound of a user's range; raise TypeError unless an integer."""
    if not isinstance(bound, int | Integer):
        raise TypeError(f"a bound of a range must be an integer, got {shown(bound)}")
    return bound


@dataclass(frozen=True)
class Intersection:
    """A query sees keys that a band and a user's mask allow.
    Until `bind`, `function` is the mask's template, and the band alone gives the ranges."""

    band: Band
    function: Template | Mask
    batch: int | None = None
    head: int | None = None

    left = True
    right = True

    @property
    def templates(self) -> tuple[Template, ...]:
        return (self.function,)

    def bind(self, tensors) -> "Intersection":
        return Intersection(self.band, self.function.bind(tensors))

    def at(self, batch, head) -> "Intersection":
        return Intersection(self.band, self.function, batch, head)

    def at_rows(self, coords: ScoreCoords, sequence: Sequence) -> "Intersection":
        return self

    def key_range(self, row, sequence: Sequence):
        return self.band.key_range(row, sequence)

    def range_at(self, r: int, coords: ScoreCoords, sequence: Sequence):
        return self.band.range_at(r, coords, sequence)

    def key_blocks(self, row_begin, num_rows, tile_n, sequence: Sequence) -> Blocks:
        blocks = self.band.key_blocks(row_begin, num_rows, tile_n, sequence)
        if isinstance(self.function, Template):
            return Blocks(blocks.begin, blocks.begin, blocks.begin, blocks.end)
        row_last = smaller(row_begin + num_rows, sequence.seqlen_q) - 1
        rows = Rows(
            self.batch, self.head, row_begin, row_last, sequence.seqlen_q, sequence.seqlen_k
        )
        first, last = map(as_integer, self.function.key_range(rows))
        end = larger(1, smaller(blocks.end, (larger(0, last) + tile_n - 1) // tile_n))
        begin = smaller(larger(blocks.begin, larger(0, first) // tile_n), end - 1)
        first, last = map(as_integer, self.function.open_range(rows))
        full_end = smaller(blocks.full_end, larger(0, last) // tile_n)
        full_begin = larger(blocks.full_begin, (larger(0, first) + tile_n - 1) // tile_n)
        return Blocks(begin, full_begin, full_end, end).walked(begin, end)

    def query_blocks(self, key_begin, num_keys, tile_m, sequence: Sequence) -> Blocks:
        """Blocks of `tile_m` queries that may see keys [key_begin, key_begin + num_keys).
        A user's mask has ranges of keys only, so all blocks of the band count as masked."""
        begin, _, _, end = self.band.query_blocks(key_begin, num_keys, tile_m, sequence)
        return Blocks(begin, begin, begin, end)

    @cute.jit
    def apply(self, scores: cute.Tensor, coords: ScoreCoords, n_block, sequence: Sequence):
        self.band.apply(scores, coords, n_block, sequence)
        self.hide(scores, coords, n_block, sequence)

    @cute.jit
    def apply_transposed(
        self, scores: cute.Tensor, coords: TransposedCoords, m_block, sequence: Sequence
    ):
        self.band.apply_transposed(scores, coords, m_block, sequence)
        self.hide(scores, coords, m_block, sequence)

    @cute.jit
    def hide(self, scores: cute.Tensor, coords, block, sequence: Sequence):
        """Set to -inf what the user's mask hides in a block."""
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                at = coords.position(r, c, block, sequence)
                visible = cutlass.Boolean(self.function.visible(at))
                scores[r, c] = scores[r, c] if visible else -cutlass.Float32.inf


# --------------------------------------------- the mask of tiles with rows of several sequences

# It computes nothing: `fa3.kernels.shared_tile_table` has written to device memory what a row
# sees, whatever bounds there are. So one kernel serves all bands. `sequence` stands for the tile
# here, a `fa3.schedules.shared_tiles.MultiSequenceTile`.

NO_SEQUENCE = -1  # the sequence of a row that is not used


class RowRecord(NamedTuple):
    """A row of a shared tile, as four words of device memory."""

    # first_key, end_key: the rows of k that it sees, [first_key, end_key).
    first_key: int
    end_key: int
    batch: int  # the sequence that it belongs to, or `NO_SEQUENCE`
    query: int  # its place among the queries of the sequence

    @property
    def is_used(self):
        return self.batch >= 0


ROW_RECORD = len(RowRecord._fields)


@dataclass(frozen=True)
class Intervals(Band):
    """A row sees an interval of keys, known after `at_rows`."""

    left: bool = True
    right: bool = True
    # (rows of all tiles, ROW_RECORD), int32, the `RowRecord` of each row; None in a spec.
    table: object = None
    rows: tuple[RowRecord, ...] = ()  # the `RowRecord`s of this thread's rows
    begin_k: object = None  # row of k that the tile's key 0 is

    @property
    def templates(self) -> tuple[Template, ...]:
        return (Template(Intervals, (), (), (TensorType("table", "int32", 2),)),)

    def bind(self, tensors) -> "Intervals":
        return Intervals(table=next(tensors))

    def at_rows(self, coords: ScoreCoords, sequence) -> "Intervals":
        """The mask for a thread's rows; starts loads without waiting."""
        queries = (coords.query(r) for r in range(len(coords.row_steps)))
        rows = tuple(read_row(self.table, query) for query in queries)
        return Intervals(table=self.table, rows=rows, begin_k=sequence.record.begin_k)

    def range_at(self, r: int, coords: ScoreCoords, sequence) -> tuple:
        row = self.rows[r]
        return row.first_key - self.begin_k, row.end_key - self.begin_k

    def key_blocks(self, row_begin, num_rows, tile_n, sequence) -> Blocks:
        keys = sequence.keys_of(row_begin, num_rows)
        begin, _, _, end = Blocks.of(keys, keys, tile_n)
        return Blocks(begin, begin, begin, end)


def read_row(table: cute.Tensor, row: Int32) -> RowRecord:
    """The record of a row, from a contiguous table."""
    first = (table.iterator + row * ROW_RECORD).align(16)
    words = cute.make_rmem_tensor(ROW_RECORD, Int32)
    cute.autovec_copy(cute.make_tensor(first, cute.make_layout(ROW_RECORD)), words)
    return RowRecord(*(words[i] for i in range(ROW_RECORD)))
