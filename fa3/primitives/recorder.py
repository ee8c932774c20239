"""When and where an instrumented kernel's warpgroups compute tiles, for `fa3.tools.recording`."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64


class Note(NamedTuple):
    """A row of a recording: work on a tile; times in ns."""

    sm: int  # the SM that did it
    warpgroup: int  # index of the consumer warpgroup in its CTA
    # m_block, head, batch, first_block, end_block: the cluster's tile, and its key blocks.
    m_block: int
    head: int
    batch: int
    first_block: int
    end_block: int
    began: int  # the warpgroup began the tile
    started: int  # Q and a first key block had arrived, and their softmax was done
    computed: int  # O was complete in registers
    ended: int  # the store of O had been issued


HEADER = 1
"""Words before the first row. The first word counts the rows."""


class Recorder(NamedTuple):
    """Writes notes to `words`, (HEADER + rows * fields,) int64, zero before launches."""

    words: cute.Tensor

    def now(self) -> Int64:
        """Nanoseconds on a clock that all SMs share."""
        return cute.arch.globaltimer()

    @cute.jit
    def note(self, thread: Int32, warpgroup: Int32, tile, blocks, times: tuple):
        """Write a row; `times` are `Note`'s `began`, `started` and `computed`."""
        if thread == 0:
            now = self.now()
            count = cute.recast_ptr(self.words.iterator, dtype=Int32)
            row = cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")
            place = (tile.m_block, tile.head, tile.batch, blocks.begin, blocks.end)
            # In a branch, version 4.7 of the DSL takes no name for a NamedTuple.
            for i, value in enumerate(Note(cute.arch.smid(), warpgroup, *place, *times, now)):
                self.words[HEADER + row * len(Note._fields) + i] = Int64(value)


class NoRecorder(NamedTuple):
    """The recorder of an ordinary kernel: records nothing."""

    def now(self) -> None:
        return None

    def note(self, *ignored) -> None:
        pass
