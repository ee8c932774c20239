"""Division inside a kernel by a number that is known before its launch; its twin on the host."""

from typing import NamedTuple

from cutlass import Int32, Int64, Uint32, Uint64

BITS = 31


class Divisor(NamedTuple):
    """A positive divisor. Dividing by it is a multiplication: `//` takes 40 instructions in a row.

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
    """A divisor by which is divided as usual: on the host, and where numbers have 64 bits."""

    value: int

    def quotient(self, number):
        return number // self.value
