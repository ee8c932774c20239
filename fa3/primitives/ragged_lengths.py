"""Where packed sequences begin and end: read and clamped on the GPU.

What the previous kernel may still write is read from L2 (`read_early`).
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import larger, smaller
from fa3.problem import KEYS_OF_GROUP


def read_early(tensor: cute.Tensor, coord):
    """Read a number that the previous kernel may still write; skips L1.
    The compiler does not move it past a wait, either."""
    address = tensor.iterator + cute.crd2idx(coord, tensor.layout)
    return cute.arch.load(address, tensor.element_type, sem="relaxed", scope="gpu")


@cute.jit
def ask_l2(vector: cute.Tensor, index: Int32):
    """Have L2, which is coherent, load an entry that is read later.
    It is read when the previous kernel has ended. Its address is looked up meanwhile, too. Nothing
    happens if there is no such entry."""
    if index < vector.shape[0]:
        address = (vector.iterator + index).toint()
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def entry_of(table: cute.Tensor, index) -> Int32:
    """An entry of a table."""
    return table[index]


def key_groups(length):
    """The groups of so many keys in V^T."""
    return (length + KEYS_OF_GROUP - 1) // KEYS_OF_GROUP


def first_group(begin, batch):
    """The first group of a packed sequence's keys in V^T.
    A sequence begins a group, so `total // KEYS_OF_GROUP + sequences` groups hold all."""
    return begin // KEYS_OF_GROUP + batch


class CacheLengths(NamedTuple):
    """How many keys sequences have in a cache, in device memory."""

    used: cute.Tensor  # keys that count
    capacity: Int32  # keys that a sequence has room for; longer lengths are cut to it

    def read(self, batch) -> tuple[Int32, Int32]:
        """A sequence's row in the cache or page table, and its length."""
        return batch, larger(smaller(self.used[batch], self.capacity), 0)

    def prefetch(self, batch) -> None:
        """Ask L2 for what `read` reads."""
        ask_l2(self.used, batch)


class RaggedLengths(NamedTuple):
    """Where packed sequences begin and end, and what bounds them.
    Where methods take `entry`, that reads an entry of a table."""

    # cu, used: cumulated lengths; rows that count, or None.
    cu: cute.Tensor
    used: cute.Tensor | None
    total: Int32  # rows of the tensor. Whatever the lengths say, no row beyond it is named.

    @property
    def num_sequences(self):
        return self.cu.shape[0] - 1

    def begin(self, batch, entry=entry_of) -> Int32:
        """A sequence's first row."""
        return larger(smaller(entry(self.cu, batch), self.total), 0)

    def end(self, batch, begin, entry=entry_of) -> Int32:
        """The row after a sequence's last one, not before its first, `begin`.
        The difference of two ends as they are may leave 32 bits."""
        return larger(smaller(entry(self.cu, batch + 1), self.total), begin)

    def read(self, batch, entry=entry_of) -> tuple[Int32, Int32]:
        """A sequence's first row and its length."""
        begin = self.begin(batch, entry)
        length = self.end(batch, begin, entry) - begin
        if self.used is None:
            return begin, length
        return begin, larger(smaller(length, entry(self.used, batch)), 0)

    def prefetch(self, batch) -> None:
        """Ask L2 for what the lanes of a warp `read`."""
        ask_l2(self.cu, batch)
        if self.used is not None:
            ask_l2(self.used, batch)

    @cute.jit
    def owned(self, batch) -> Int32:
        """Rows from a sequence's first to the next sequence's, or the end.
        They count or not; lengths that are right leave none that no sequence owns."""
        begin = self.begin(batch)
        end = self.end(batch, begin)
        if batch + 1 == self.num_sequences:
            end = self.total
        return end - begin


@cute.jit
def sequence_of(ends: cute.Tensor, row, batch) -> Int32:
    """The last sequence that begins at or before a row, by bisection."""
    sequence, end = Int32(0), Int32(batch)
    while end - sequence > 1:
        middle = (sequence + end) // 2
        if ends[middle] <= row:
            sequence = middle
        else:
            end = middle
    return sequence
