"""Whether strided tensors share memory.

Byte ranges that do not meet share nothing. Where they meet, both tensors may step through one
buffer together, as two caches do or the K and V of one allocation: then each step is compared as
if it were all. Anything else counts as shared.
"""

from functools import lru_cache
from typing import NamedTuple

from fa3.problem import REMEMBERED


class Layout(NamedTuple):
    """Where the elements of a tensor lie, with strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(stride, size) of the dimensions that lead anywhere, the shortest stride first."""
        sizes = zip(self.stride, self.shape, strict=True)
        return sorted((stride, size) for stride, size in sizes if size > 1)

    @property
    def bytes(self) -> int:
        """From the first byte of a tensor to its last."""
        if 0 in self.shape:
            return 0
        return self.itemsize * (1 + sum(stride * (size - 1) for stride, size in self.steps))

    @property
    def longest(self) -> int:
        """The bytes of the longest step."""
        return self.itemsize * max((stride for stride, _ in self.steps), default=0)

    @property
    def row(self) -> "Layout":
        """One row, of all dimensions but the first."""
        return Layout(self.shape[1:], self.stride[1:], self.itemsize)

    def with_rows(self, rows: int) -> "Layout":
        """The same with so many rows."""
        return self._replace(shape=(rows, *self.shape[1:]))

    def split(self, stride: int) -> tuple[int, "Layout"]:
        """How often a tensor steps by so many bytes, and one step."""
        if self.longest < stride:
            return 1, self
        *inner, (_, size) = self.steps
        strides, sizes = zip(*inner, strict=True) if inner else ((), ())
        return size, Layout(sizes, strides, self.itemsize)


def overlaps_itself(layout: Layout) -> bool:
    """Whether a tensor may have elements in the same place."""
    extent = 1
    for stride, size in layout.steps:
        if stride < extent:
            return 0 not in layout.shape
        extent += stride * (size - 1)
    return False


# A call's buffers lie the same way again and again.
@lru_cache(maxsize=REMEMBERED)
def share(first: Layout, second: Layout, distance: int) -> bool:
    """Whether two tensors may share a byte; `second` begins `distance` bytes after `first`."""
    if not -second.bytes < distance < first.bytes:
        return False
    stride = max(first.longest, second.longest)
    if not stride:
        return True
    (times, part), (other_times, other_part) = first.split(stride), second.split(stride)
    if max(part.bytes, other_part.bytes) > stride:
        return True
    # By so many steps the second is ahead of the part of the first that it can meet.
    ahead = distance // stride
    return any(
        -other_times < steps < times and share(part, other_part, distance - steps * stride)
        for steps in (ahead, ahead + 1)
    )
