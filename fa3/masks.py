"""Masks: which key blocks a query tile touches, and which of its elements are hidden.

A mask has a compile-time half (the frozen dataclass here: which bounds exist) and a run-time half
(`Window`: their values). The kernel's main loop walks `key_blocks` and never asks what the mask
is. The block arithmetic is plain, so the CPU executor walks the very same ranges.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from fa3.primitives.coords import ScoreCoords
from fa3.problem import NO_BOUND, Window


class KeyBlocks(NamedTuple):
    """Half-open ranges of key blocks: [begin, end) is touched, [full_begin, full_end) unmasked.

    begin <= full_begin <= full_end <= end and begin < end: a tile always works on one block, and
    one that is hidden altogether gives 0 and -inf like any hidden row.
    """

    begin: int
    full_begin: int
    full_end: int
    end: int


class Sequence(NamedTuple):
    """Lengths of one sequence and the run-time window: all a mask needs beside coordinates."""

    seqlen_q: int
    seqlen_k: int
    window: Window

    @property
    def offset(self):
        """Bottom-right alignment: query i stands at key i + offset."""
        return self.seqlen_k - self.seqlen_q


@dataclass(frozen=True)
class Band:
    """Keys j of query i with i + offset - left <= j <= i + offset + right.

    `left` and `right` say at compile time whether the bound exists; the values come at run time.
    Causal is Band(left=False, right=True) with Window(right=0).
    """

    left: bool = False
    right: bool = False

    @classmethod
    def of(cls, window: Window) -> "Band":
        """The band whose bounds exist where the window has them."""
        return cls(left=window.left != NO_BOUND, right=window.right != NO_BOUND)

    def key_range(self, row, sequence: Sequence):
        """Half-open range of the keys that query `row` sees; empty when end <= begin."""
        begin, end = 0, sequence.seqlen_k
        if self.left:
            begin = cutlass.max(begin, row + sequence.offset - sequence.window.left)
        if self.right:
            end = cutlass.min(end, row + sequence.offset + sequence.window.right + 1)
        return begin, end

    def key_blocks(self, row_begin, num_rows, tile_n, sequence: Sequence) -> KeyBlocks:
        """Blocks of `tile_n` keys that rows [row_begin, row_begin + num_rows) touch."""
        row_last = cutlass.min(row_begin + num_rows, sequence.seqlen_q) - 1
        first_begin, first_end = self.key_range(row_begin, sequence)
        last_begin, last_end = self.key_range(row_last, sequence)
        end = cutlass.max(1, (cutlass.max(0, last_end) + tile_n - 1) // tile_n)
        begin = cutlass.min(cutlass.max(0, first_begin) // tile_n, end - 1)
        full_end = cutlass.min(cutlass.max(cutlass.max(0, first_end) // tile_n, begin), end)
        full_begin = (cutlass.max(0, last_begin) + tile_n - 1) // tile_n
        full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
        return KeyBlocks(begin, full_begin, full_end, end)

    @cute.jit
    def apply(self, scores: cute.Tensor, coords: ScoreCoords, n_block, sequence: Sequence):
        """Set the hidden scores of one block to -inf."""
        first_column = n_block * coords.tile_n + coords.column
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            begin, end = self.key_range(coords.row + coords.row_steps[r], sequence)
            begin, end = begin - first_column, end - first_column
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                hidden = coords.column_steps[c] >= end
                if cutlass.const_expr(self.left):
                    hidden = hidden or coords.column_steps[c] < begin
                scores[r, c] = -cutlass.Float32.inf if hidden else scores[r, c]
