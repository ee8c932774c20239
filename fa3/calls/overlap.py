"""Whether strided tensors share memory, by arithmetic on their strides.

Two tensors share an element if some combination of both their strides bridges the distance between
them: x elements of size s further in one, y of size t in the other. That is a subset sum, which is
hard in general and easy for the strides that tensors have, where a step is as long as all smaller
ones together, or nearly. What is not settled after `MOST_TRIES` counts as sharing.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from math import gcd
from typing import NamedTuple

from fa3.problem import REMEMBERED

MOST_TRIES = 10_000
"""Ways to begin a sum that are looked at; some milliseconds. Nested strides take a handful."""


class Layout(NamedTuple):
    """Where the elements of a tensor lie, from its first on; strides are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(stride, size - 1) of the dimensions that lead anywhere, the shortest stride first."""
        sizes = zip(self.stride, self.shape, strict=True)
        return sorted((stride, size - 1) for stride, size in sizes if size > 1)

    @property
    def bytes(self) -> int:
        """From the first byte of a tensor to its last."""
        if 0 in self.shape:
            return 0
        return self.itemsize * (1 + sum(stride * most for stride, most in self.steps))


def repeats(layout: Layout) -> bool:
    """Whether a tensor has elements in the same place."""
    if 0 in layout.shape:
        return False
    steps = layout.steps
    for index, (stride, most) in enumerate(steps):
        # Two places that differ by 1 or more steps here, and by any below: -most to most.
        below = steps[:index]
        back = sum(stride * most for stride, most in below) - stride
        if back >= 0:
            spans = [(stride, 2 * most) for stride, most in below]
            if reaches([*spans, (stride, most - 1)], back, back):
                return True
    return False


# A call's buffers lie the same way again and again.
@lru_cache(maxsize=REMEMBERED)
def share(first: Layout, second: Layout, distance: int) -> bool:
    """Whether two tensors share a byte; `second` begins `distance` bytes after `first`."""
    if not first.bytes or not second.bytes:
        return False
    steps = [
        (stride * layout.itemsize, most)
        for layout in (first, second)
        for stride, most in layout.steps
    ]
    # Counted from the end of the second, so that its steps add up with those of the first.
    end = distance + second.bytes - second.itemsize
    return reaches(steps, end - first.itemsize + 1, end + second.itemsize - 1)


def reaches(steps: Sequence[tuple[int, int]], low: int, high: int) -> bool:
    """Whether a sum of steps, each (length, most) taken 0 to `most` times, lies in [low, high]."""
    steps = merged_steps(steps)
    lengths = [length for length, _ in steps]
    # Of the steps from each on.
    rest = [sum(length * most for length, most in steps[index:]) for index in range(len(steps) + 1)]
    divisors = [gcd(*lengths[index:]) for index in range(len(steps) + 1)]
    tries = count()

    def search(index: int, low: int, high: int) -> bool:
        if high < 0 or low > rest[index]:
            return False
        if low <= 0 or high >= rest[index] or next(tries) >= MOST_TRIES:
            return True
        if high // divisors[index] * divisors[index] < low:
            return False
        length, most = steps[index]
        fewest = max(0, -(-(low - rest[index + 1]) // length))
        return any(
            search(index + 1, low - length * times, high - length * times)
            for times in range(fewest, min(most, high // length) + 1)
        )

    return search(0, low, high)


def merged_steps(steps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same sums of fewer steps, the longest first."""
    found: list[tuple[int, int]] = []
    for length, most in sorted(steps):
        if not length:
            continue
        if found:
            shorter, times = found[-1]
            factor, remainder = divmod(length, shorter)
            if not remainder and factor <= times + 1:
                found[-1] = shorter, times + factor * most
                continue
        found.append((length, most))
    return found[::-1]
