"""In which order a CTA of the backward kernel comes to the query blocks of a key tile.

Where key tiles add to dQ in a fixed order, CTAs also take them in this order. At every query block
a key tile waits for the key tile before it. Under a causal mask there are two orders in which it
hardly waits, and head groups alternate between them:

    even head groups   Last keys first, query blocks upwards. CTAs that start together keep a
                       distance of one key tile. But the longest key tiles start last.
    odd head groups    First keys first, query blocks downwards. The longest key tiles start first.
                       CTAs keep the distance with which they start.

A head group has about as many key tiles as there are SMs. So the CTAs start together with an even
group, and end one after another, the shortest key tile first. They start the odd group in this
order, with the longest key tile first, and end together (docs/experiments.md).

Source: Qiang et al., DASH (arXiv 2601.21824): query blocks walked downwards, and the longest key
tiles paired with the shortest.
"""

from typing import Any, NamedTuple

from cutlass import Int32


class UpwardWalk(NamedTuple):
    """Query blocks from the first to the last; `blocks` are of `fa3.scores.masks`."""

    blocks: Any

    @property
    def is_either(self) -> bool:
        """Whether unmasked blocks may come before masked ones."""
        return False

    def at(self, i):
        """The query block at a place of the walk, begin <= i < end."""
        return i


class EitherWalk(NamedTuple):
    """Query blocks upwards or downwards."""

    blocks: Any  # places of the walk, [begin, end), and of them the ones with unmasked blocks
    # first, step: the query block at place i is first + step * i.
    first: Int32
    step: Int32

    @property
    def is_either(self) -> bool:
        """Whether unmasked blocks may come before masked ones."""
        return True

    @classmethod
    def of(cls, blocks, is_down) -> "EitherWalk":
        """The walk of these blocks: downwards if `is_down` is 1, upwards if it is 0."""
        begin, full_begin, full_end, end = blocks
        shift = is_down * (begin + end - full_begin - full_end)
        places = blocks._replace(full_begin=full_begin + shift, full_end=full_end + shift)
        return cls(places, is_down * (begin + end - 1), 1 - 2 * is_down)

    def at(self, i):
        """The query block at a place of the walk, begin <= i < end."""
        return self.first + self.step * i
