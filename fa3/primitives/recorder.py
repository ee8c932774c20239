"""An instrumented kernel notes what every warpgroup did, where and when."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64


class Note(NamedTuple):
    """One row of a recording: a warpgroup's work on a tile or a part of one; times in ns.

    Fields:
        sm: where.
        warpgroup: which consumer of its CTA.
        m_block, head, batch, first_block, end_block: the tile of its cluster, and its key blocks.
        began: it turned to the tile.
        started: it had loaded Q and a first block of keys, and done with its scores.
        computed: O was complete in registers.
        ended: O was on its way to memory.
    """

    sm: int
    warpgroup: int
    m_block: int
    head: int
    batch: int
    first_block: int
    end_block: int
    began: int
    started: int
    computed: int
    ended: int


HEADER = 1
"""Words before the first row; the first counts the rows."""


class Recorder(NamedTuple):
    """Writes notes to `words`: (HEADER + rows * fields,) int64, zero before the launch."""

    words: cute.Tensor

    def now(self) -> Int64:
        """Nanoseconds on a clock that all SMs share."""
        return cute.arch.globaltimer()

    @cute.jit
    def note(self, thread: Int32, warpgroup: Int32, tile, blocks, times: tuple):
        """Write a row; `times` are those of `Note` up to `computed`."""
        if thread == 0:
            now = self.now()
            count = cute.recast_ptr(self.words.iterator, dtype=Int32)
            row = cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")
            place = (tile.m_block, tile.head, tile.batch, blocks.begin, blocks.end)
            note = Note(cute.arch.smid(), warpgroup, *place, *times, now)
            for i, value in enumerate(note):
                self.words[HEADER + row * len(Note._fields) + i] = Int64(value)


class NoRecorder(NamedTuple):
    """What the shipped kernel has: it notes nothing."""

    def now(self) -> None:
        return None

    def note(self, *ignored) -> None:
        pass
