"""The lengths of cached sequences in device memory, and what follows from them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import larger, smaller
from fa3.primitives.cache_blocks import CacheTables, Keys, read_early
from fa3.problem import Window
from fa3.scores.masks import Blocks, Sequence

LONGEST = 2**31 - 2**20
"""Keys of a sequence, at most: 32 bits must do for what is added to them, too."""


def capacity_of(page_size, num_pages=1):
    """Keys that a sequence may have; on the host and inside a kernel.

    A page table may have room for more than `LONGEST`; its last pages are out of use then.
    """
    return page_size * smaller(num_pages, LONGEST // larger(page_size, 1))


@dataclass(frozen=True)
class CacheLengths:
    """The lengths of the sequences, as `schedules.split.Lengths` wants them.

    What is known of a sequence are its keys, padding included, and how many of them are padding.

    Fields:
        seqlens: (batch,) int32, keys of the sequences, padding included.
        capacity: keys for which the cache has room; longer lengths are cut off.
        is_early: whether the kernel before may still be running; see `read_early`.
    """

    seqlens: cute.Tensor
    tables: CacheTables
    mask: object
    seqlen_q: Int32
    capacity: Int32
    window: Window
    tile_n: int
    is_early: bool

    @property
    def num_sequences(self):
        return self.seqlens.shape[0]

    def read(self, batch) -> tuple:
        return self.count(self.seqlens, batch), self.count(self.tables.leftpad, batch)

    def count(self, table: cute.Tensor | None, batch) -> Int32:
        """An entry of a table that counts keys, cut to what the cache holds; 0 if there is none."""
        if table is None:
            return Int32(0)
        return cutlass.max(cutlass.min(self.entry(table, batch), self.capacity), 0)

    def entry(self, table: cute.Tensor, batch) -> Int32:
        return read_early(table, batch) if self.is_early else table[batch]

    def sequence(self, length: tuple) -> Sequence:
        """The sequence as the mask sees it: its keys are counted from behind the padding."""
        seqlen, leftpad = length
        return Sequence(self.seqlen_q, cutlass.max(seqlen - leftpad, 0), self.window)

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
            row = self.entry(tables.batch_idx, cutlass.min(row, self.num_sequences - 1))
        if tables.page_table is not None:
            row = cutlass.max(cutlass.min(row, tables.page_table.shape[0] - 1), 0)
        sequence = self.sequence(length)
        first, _ = self.mask.key_range(0, sequence)
        return Keys(row, tile.head, leftpad, first, sequence.seqlen_k - 1)
