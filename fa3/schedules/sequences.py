"""The sequences of a call: how long each is and where its keys lie.

`read` gives what is known of a sequence as a tuple of integers, which a cursor can carry;
`sequence` makes of it what masks work on. The same arithmetic runs on Python integers (reference,
tests) and on values inside a kernel.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.cache_blocks import CacheTables, Keys, read_early
from fa3.problem import Problem, Window
from fa3.scores.masks import Blocks, Sequence

LONGEST = 2**31 - 2**20
"""Keys of a sequence, at most: 32 bits must do for what is added to them, too."""


def capacity_of(page_size, num_pages=1):
    """Keys that a sequence may have; on the host and inside a kernel.

    A page table may have room for more than `LONGEST`; its last pages are out of use then.
    """
    return page_size * smaller(num_pages, LONGEST // larger(page_size, 1))


class Sequences(Protocol):
    """The sequences of a call."""

    def read(self, batch) -> tuple:
        """What is known of a sequence."""

    def sequence(self, known: tuple) -> Sequence:
        """Its lengths, as a mask sees them."""


class Dense(NamedTuple):
    """Sequences of equal lengths, each in its own row of the tensors."""

    seqlen_q: int
    seqlen_k: int
    window: Window

    @classmethod
    def of(cls, problem: Problem) -> "Dense":
        return cls(problem.seqlen_q, problem.seqlen_k, problem.window)

    def read(self, batch) -> tuple:
        return ()

    def sequence(self, known: tuple) -> Sequence:
        return Sequence(self.seqlen_q, self.seqlen_k, self.window)


@dataclass(frozen=True)
class Cached:
    """Sequences whose keys lie in a cache, and whose lengths lie in memory.

    What is known of one are its keys, padding included, and how many of them are padding.

    Fields:
        seqlens: (batch,) int32, keys of the sequences, padding included.
        capacity: keys for which the cache has room; longer lengths are cut off.
        is_early: whether the kernel before may still be running; see `read_early`.
    """

    seqlens: cute.Tensor
    tables: CacheTables
    mask: object
    seqlen_q: int
    capacity: int
    window: Window
    tile_n: int
    is_early: bool = False

    @property
    def num_sequences(self):
        return self.seqlens.shape[0]

    def read(self, batch) -> tuple:
        return self.count(self.seqlens, batch), self.count(self.tables.leftpad, batch)

    def count(self, table: cute.Tensor | None, batch):
        """An entry of a table that counts keys, cut to what the cache holds; 0 if there is none."""
        if table is None:
            # A cursor carries it: in a kernel it must be one of the kernel's numbers.
            return 0 if isinstance(self.capacity, int) else Int32(0)
        return larger(smaller(self.entry(table, batch), self.capacity), 0)

    def entry(self, table: cute.Tensor, batch):
        return read_early(table, batch) if self.is_early else table[batch]

    def sequence(self, length: tuple) -> Sequence:
        """The sequence as the mask sees it: its keys are counted from behind the padding."""
        seqlen, leftpad = length
        return Sequence(self.seqlen_q, larger(seqlen - leftpad, 0), self.window)

    def blocks(self, length: tuple) -> Blocks:
        """Blocks that the queries of a sequence touch; all of its tiles walk them."""
        return self.mask.key_blocks(0, self.seqlen_q, self.tile_n, self.sequence(length))

    def num_blocks(self, length: tuple):
        blocks = self.blocks(length)
        return blocks.end - blocks.begin

    def blocks_at(self, walk, cursor):
        """First and last key block of the segment at a cursor."""
        first = self.blocks(cursor.length).begin
        return first + cursor.block, first + walk.end(cursor) - 1

    def keys(self, tile, length: tuple) -> Keys:
        """The keys of a tile's sequence and head."""
        tables, row, (_, leftpad) = self.tables, tile.batch, length
        if tables.batch_idx is not None:
            # Behind the last sequence only if lengths change while they are read early.
            row = self.entry(tables.batch_idx, smaller(row, self.num_sequences - 1))
        if tables.page_table is not None:
            row = larger(smaller(row, tables.page_table.shape[0] - 1), 0)
        sequence = self.sequence(length)
        first, _ = self.mask.key_range(0, sequence)
        return Keys(row, tile.head, leftpad, first, sequence.seqlen_k - 1)
