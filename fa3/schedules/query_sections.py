"""Which query tiles are preprocessed before the backward kernel, and which inside of it; and when
it can convert dQ: as soon as all key tiles of a head group have added to it. The code calls a head
group a *section*.

Before key tiles add to a query tile, its rows' statistics must be there, and what its dQ
accumulator begins with: zeros, or a word. That only moves memory. The preprocess kernel does it for
the first head groups (`TileOrder`). A few CTAs of the backward kernel do it for the others, while
the rest already work on key tiles, and join them afterwards. Key tiles come head group by head
group, and wait until all queries of their head group are preprocessed. So a few head groups are
exposed, not all heads.

Where queries see few keys, a head group is done sooner than a few CTAs preprocess the next one.
Then the preprocess kernel does all of them (`fa3.planning.backward`).

The CTAs that run first preprocess queries. Each takes a share, and another one when it is done,
until none is left, before it comes to key tiles. So no CTA waits for a CTA that does not run,
however few SMs other kernels leave.

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
