"""Arithmetic for code that runs on the host and inside kernels.

The DSL's own `min` and `max` take 20 us for Python integers and do not accept arrays. A `Divisor`
divides inside a kernel by a number that is known before its launch.
"""

from typing import NamedTuple

import cutlass
import numpy as np
from cutlass import Int32, Int64, Uint32, Uint64

HOST_TYPES = (int, np.integer, np.ndarray)

LARGEST = 2**31 - 1
"""The largest 32-bit integer. Kernels use 32-bit sizes and indices, and 64-bit strides."""


def smaller(a, b):
    """The smaller of two integers, arrays (by element) or values in kernels."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
    return cutlass.min(a, b)


def larger(a, b):
    """The larger of two integers, arrays (by element) or values in kernels."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)
    return cutlass.max(a, b)


def either(condition, a, b):
    """`a` if a condition holds, else `b`: integers, or kernel values."""
    if isinstance(condition, bool):
        return a if condition else b
    return Int32(cutlass.select_(condition, Int32(a), Int32(b)))


BITS = 31


class Divisor(NamedTuple):
    """A positive divisor; dividing multiplies, as `//` takes 40 instructions.

    Source: Granlund and Montgomery, Division by invariant integers using multiplication (1994).
    """

    value: Int32
    magic: Uint32
    shift: Int32  # number // value is number * magic >> shift

    @classmethod
    def of(cls, value: Int32) -> "Divisor":
        """Prepare a division; on the host."""
        shift = Int32(BITS)
        for bit in range(BITS):
            shift += Int32(value > (1 << bit))
        magic = (Int64(1) << Int64(shift)) // Int64(value) + 1
        return cls(value, Uint32(magic), shift)

    def quotient(self, number: Int32) -> Int32:
        """number // value; the number is not negative."""
        return Int32((Uint64(number) * Uint64(self.magic)) >> Uint64(self.shift))


class PlainDivisor(NamedTuple):
    """A divisor for the host, and for numbers of 64 bits."""

    value: int

    def quotient(self, number):
        return number // self.value
