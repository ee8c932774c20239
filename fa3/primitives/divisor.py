"""Division inside a kernel by a number that is the same throughout a launch."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64


class Divisor(NamedTuple):
    """A divisor known before a kernel starts: dividing by it takes no division.

    Fields:
        value: from 1.
        magic: 2**37 / value, rounded up or one more.

    Source: Granlund and Montgomery, Division by invariant integers using multiplication (1994).
    """

    value: Int32
    magic: Int64

    @classmethod
    def of(cls, value: Int32) -> "Divisor":
        return cls(value, (Int64(1) << 37) // Int64(value) + 1)

    def divides(self, number: Int32) -> Int32:
        """number // value, for numbers from 0 to 2**25."""
        quotient = Int32((Int64(number) * self.magic) >> 37)
        # It may be one too large.
        return quotient - cutlass.min(cutlass.max(quotient * self.value - number, 0), 1)
