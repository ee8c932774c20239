"""The mask of shared tiles: each row sees an interval of keys.

Unlike the masks of `fa3.scores.masks` it computes nothing: what a row sees, whatever bounds there
are, `fa3.kernels.joined_table` has written to device memory. So one kernel serves all bands.
`sequence` stands for the tile here, a `fa3.schedules.joined.MultiSequenceTile`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.fragments import ScoreCoords
from fa3.scores.masks import Band, Blocks
from fa3.scores.templates import Template, TensorType

NO_SEQUENCE = -1  # the sequence of a row that is not used


class RowRecord(NamedTuple):
    """A row of sequences that share tiles, as four words of device memory."""

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
