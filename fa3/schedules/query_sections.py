"""Which tiles of queries are begun before the backward kernel, and which inside of it; and of which
it can make dQ: those of sections whose tiles of keys have all added to them.

Before keys add to a tile of queries, its rows' statistics and what its sums begin with must be
there, zeros or a word. That only moves memory. A kernel before does it for the first sections of
heads (`TileOrder`); a few CTAs of the backward kernel do it for the others, while the rest work on
tiles of keys already, and join them when they are done. Tiles of keys come section by section, and
those of a section wait until all its queries are begun. So what is exposed is a few sections, not
all heads.

Where queries see few keys, a section is done sooner than a few CTAs begin the next one; then the
kernel before begins all (`fa3.planning.backward`).

The CTAs that begin queries are those that run first. Each takes a share, and another one when it is
done, until none is left, before it comes to tiles of keys: so nobody waits for a CTA that does not
run, however few SMs other kernels leave.

Plain arithmetic: it runs on Python ints, and on Int32 values inside of kernels.
"""

from typing import NamedTuple

from fa3.primitives.arithmetic import smaller
from fa3.primitives.divisor import Divisor, PlainDivisor

BEGINNERS = 24
"""Shares of the queries to begin inside of the backward kernel, and CTAs that take one at first."""


class QuerySections(NamedTuple):
    """The tiles of queries of all heads, numbered head by head, in sections.

    Fields:
        num_tiles: of all sections.
        of_section: tiles of a section; the last one may have fewer.
    """

    num_tiles: int
    of_section: Divisor | PlainDivisor

    def tiles_before(self, section):
        """How many tiles there are before a section; all if there is no such section."""
        return smaller(section * self.of_section.value, self.num_tiles)

    def section_of(self, number):
        """The section of a tile."""
        return self.of_section.quotient(number)

    def tiles_in(self, section):
        """How many tiles a section has."""
        return smaller(self.num_tiles - section * self.of_section.value, self.of_section.value)
