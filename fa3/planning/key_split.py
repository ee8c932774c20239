"""How many CTAs of the backward kernel share a key tile.

A CTA has a key tile and all query heads that share its keys. With few key/value heads these are too
few CTAs, and with a causal mask they differ in length. Then CTAs share a key tile: each has a
stretch of the query blocks of the heads (`fa3.primitives.gradient_parts`).
"""

import bisect
import functools
import heapq
import math
from typing import NamedTuple

from fa3.primitives.arithmetic import PlainDivisor
from fa3.primitives.gradient_parts import RISE, parts_of_tile
from fa3.primitives.key_line import KeyLine
from fa3.problem import REMEMBERED

STEPS_OF_TILE = 4.0
"""Time that a key tile takes besides its query blocks, in blocks: the first loads and the end."""

STEPS_OF_PART = 3.0
"""Time that a part takes besides, in blocks: it writes dK and dV in fp32, or reads them."""

SHARE_OF_LONGEST = 0.25
"""Part of the longest CTA's time that is added. CTAs with much work are seldom equally fast, and
hide less of what runs before and after them. With these three numbers the split that was chosen for
16 shapes took 0.6% longer than the best one in the mean, and 5.4% at most (docs/experiments.md)."""

MOST_PARTS_OF_SM = 16
"""Parts of key tiles for each SM, at most: with more of them there is nothing to balance. They take
277 MB of an H200 at head size 128. One more for packed sequences in a fixed order, where parts also
keep CTAs together: four parts of 8k keys of 64/8 heads kept 0.90 of the plain speed, two 0.70."""

BLOCK_PARTS = (2, 3, 4, 6, 8)  # parts of the query blocks of one head

MOST_WAVES_OF_BLOCKS = 2
"""Waves of such parts, at most, where key tiles do not wait. Of 3/3 heads at 4k two waves take 0.87
of the time of one; without a mask three waves take 1.11 times as long (docs/experiments.md)."""

MOST_OF_TIME = 0.98  # A split must take less than this part of the time without, by the model

TILES_OF_WAVE = 140
"""Key tiles of a head group where head groups alternate: about as many as run at the same time.
With 256 instead of 144, 9 of 25 shapes were slower, by up to 28% (docs/experiments.md)."""

MOST_QUERY_HEADS, COST_OF_QUERY_HEADS = 2, 1.2
"""Most query heads of a CTA there without this factor of time. With four or more, CTAs drift apart:
then Q, dO and dQ do not fit into L2."""

MORE_QUERY_HEADS = 7
"""The same for packed sequences whose key tiles add in any order, with a bound to the right. Two
parts of eight heads gained 8 to 27%. Two parts of four gained 4% in one shape and lost 5 to 6% in
three (docs/experiments.md)."""

COST_OF_REST = 3.0
"""What it costs a choice of head groups that the last one is smaller, for each missing part of all
heads. An odd number of groups costs 1, and so do groups with e times as many tiles as wanted."""


MOST_LINES = 4
"""Lines in a fixed order, at most. With 1 to 4 it kept 0.76 to 1.01 of the plain speed, where equal
parts kept 0.57 to 0.95; with 8 lines of 2k keys it kept less than those (docs/experiments.md)."""

DISTANCE = 1.5
"""Units between the parts of a line that come to a unit one after another, below which they have
two dQ accumulators. With 0.5 to 1.3 these gained 0 to 12%, with 1.7 and more they lost 1 to 25%,
since the second one is memory to write and read (docs/experiments.md)."""

MOST_UNITS = 1 << 20  # of a line, and of a part; `KeyLine` multiplies the latter in 32 bits


class KeyShares(NamedTuple):
    """How a key tile is shared: by `head_parts * block_parts` CTAs or fewer."""

    head_parts: int = 1
    block_parts: int = 1
    rise: int = RISE * BLOCK_PARTS[-1]  # see `KeySplit`; all tiles have equally many parts
    # Units of a part of a line, and parts of a line's key tiles, see `KeyLine`; None without lines.
    line_length: int | None = None
    parts_of_line: int | None = None

    @property
    def parts(self) -> int:
        """Most parts of a key tile."""
        return self.head_parts * self.block_parts

    def parts_of_set(self, after: int) -> int:
        """A head set's parts of a key tile that `after` others follow."""
        return parts_of_tile(self.block_parts, self.rise, after)

    def parts_of_all(self, count: int) -> int:
        """A head set's parts of all `count` key tiles of a sequence."""
        if self.parts_of_line is not None:
            return self.parts_of_line
        rising = min(count, RISE * self.block_parts // self.rise)  # all others have `block_parts`
        return sum(map(self.parts_of_set, range(rising))) + (count - rising) * self.block_parts


class KeyTileWork(NamedTuple):
    """A key tile of one query head."""

    blocks: int  # query blocks that see it
    after: int  # key tiles of its sequence that follow it


class Waves(NamedTuple):
    """What head groups are made for where they alternate: see `fa3.primitives.query_tiles`."""

    wanted: int  # key tiles that a head group should have
    fitting: int  # heads with Q, dO and dQ that fit into L2 together

    def heads_per_group(self, heads: int, tiles_of_head: int) -> int:
        """Return heads of each head group, for an even number of groups."""

        def cost(size: int) -> float:
            groups = -(-heads // size)
            rest = COST_OF_REST * (groups * size - heads) / heads
            is_odd = groups % 2 and heads * tiles_of_head > TILES_OF_WAVE
            return abs(math.log(size * tiles_of_head / self.wanted)) + rest + is_odd

        return min(range(1, max(1, min(self.fitting, heads)) + 1), key=cost)


@functools.lru_cache(maxsize=REMEMBERED)
def divisors(number: int) -> tuple[int, ...]:
    """From 1 up."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def most_parts_of(num_tiles: int, num_sms: int, is_packed_in_order: bool = False) -> int:
    """Most parts of each of so many key tiles."""
    return (MOST_PARTS_OF_SM + is_packed_in_order) * num_sms // max(1, num_tiles)


def ways_to_share(
    tiles: tuple[KeyTileWork, ...], group: int, at_once: float, is_ordered: bool, waits: bool
) -> list[KeyShares]:
    """Ways to share key tiles of `group` query heads.
    CTAs have equally many heads each, or some of the query blocks. Up to `at_once` parts of a
    key/value head run at the same time."""
    ways = [KeyShares(n) for n in divisors(group)]
    waves = 1 if waits else MOST_WAVES_OF_BLOCKS
    by_blocks = [KeyShares(group, n) for n in BLOCK_PARTS]
    ways += [x for x in by_blocks if x.parts * len(tiles) <= waves * at_once]
    if is_ordered or len(tiles) > at_once:
        return ways
    longest = max(tile.blocks for tile in tiles)
    # From so many key tiles on there is no more work.
    count = 1 + min(tile.after for tile in tiles if tile.blocks == longest)
    work = group * sum(tile.blocks for tile in tiles)
    least = max(int(work / at_once), longest // BLOCK_PARTS[-1], 1)

    def way(size: int) -> KeyShares:
        """The split with so many blocks in a part."""
        return KeyShares(1, -(-group * longest // size), RISE * group * longest // (count * size))

    sizes, afters = range(least, group * longest), [tile.after for tile in tiles]
    first = bisect.bisect_left(
        sizes, True, key=lambda size: sum(map(way(size).parts_of_set, afters)) <= at_once
    )
    return [*ways, *map(way, sizes[first : first + 1])]


@functools.lru_cache(maxsize=REMEMBERED)
def choose_shares(
    tiles: tuple[KeyTileWork, ...],  # of one head, in their order
    heads: int,  # key/value heads, of all sequences
    group: int,  # query heads that share a key/value head
    num_sms: int,
    most_parts: int,  # of a key tile
    is_ordered: bool,
    waits: bool,  # whether key tiles wait for one another: for their turn, or for a first store
    waves: Waves | None = None,  # of a fixed order in which head groups may alternate; else None
    most_heads: float = math.inf,  # query heads of a CTA with which CTAs do not drift apart
) -> KeyShares:
    """Choose how CTAs share key tiles, by when the last CTA ends."""
    most_heads = most_heads if waves is None else MOST_QUERY_HEADS

    def cost(shares: KeyShares) -> float:
        factor = COST_OF_QUERY_HEADS if group > shares.parts * most_heads else 1.0
        return factor * time_of(tiles, heads, group, num_sms, shares, waves)

    whole, *ways = ways_to_share(tiles, group, num_sms / heads, is_ordered, waits)
    costs = {x: cost(x) for x in ways if x.parts <= most_parts}
    costs[whole] = MOST_OF_TIME * cost(whole)
    return min(costs, key=costs.__getitem__)


def share_lines(
    sequences: tuple[tuple[KeyTileWork, ...], ...],  # key tiles of one head, the first keys first
    heads: int,  # key/value heads; of sequences of equal lengths, of all of them
    group: int,  # query heads that share a key/value head
    num_sms: int,
    fitting: int,  # query heads with Q, dO and dQ that fit into L2 together
    most_sets: int,
    # Of packed sequences: query blocks that a key tile has at most, and parts, whatever the lengths
    # are; None without.
    most: tuple[int, int] | None = None,
) -> KeyShares | None:
    """How CTAs share key tiles by lines; None if none fit."""
    fits = (n for n in divisors(group) if n * fitting >= group)
    sets = next(fits, group)
    units = [[tile.blocks * (group // sets) for tile in tiles] for tiles in sequences]
    lines, longest = heads * sets, max(map(max, units))
    at_once = lines_of_group(lines, group // sets, fitting)
    least, costs = max(1, sum(map(sum, units)) * at_once // num_sms), {}
    if sets > most_sets or lines > MOST_LINES or max(2 * least, longest) > MOST_UNITS:
        return None
    for length in {least * (8 + i) // 8 for i in range(9)}:
        cuts = [
            [cuts_of_line(length, len(line), n, count) for n, count in enumerate(line)]
            for line in units
        ]
        counts = [len(begins) for line in cuts for begins in line]
        parts, has_room = max(counts), sum(counts) * lines <= MOST_PARTS_OF_SM * num_sms
        if most is not None:
            parts = most_parts_of_line(length, most[0] * (group // sets))
            has_room = parts * sets <= most[1]
        shares = KeyShares(sets, parts, RISE * parts, length, sum(counts))
        if has_room:
            costs[shares] = time_of_lines(cuts, units, lines, at_once, num_sms)
    best = min(costs, key=costs.__getitem__, default=None)
    if best is None or best.parts_of_line == sum(map(len, units)):
        return None  # none fits, or no key tile would be cut
    return best


def lines_of_group(lines: int, heads: int, fitting: int) -> int:
    """Lines of a head group; each has `heads` query heads."""
    groups = -(-lines // max(1, fitting // heads))
    return -(-lines // groups)


def accumulators_of_line(length: int, num_tiles: int) -> int:
    """dQ accumulators of a line of so many key tiles.
    Two where parts come to a unit so close after one another that they would wait."""
    return 2 if length < DISTANCE * num_tiles else 1


def most_parts_of_line(length: int, units: int) -> int:
    """Most parts of a key tile with up to so many units.
    Its first cut may be anywhere."""
    return 2 + units // length


def cuts_of_line(length: int, num_tiles: int, n_block: int, units: int) -> list[int]:
    """Where the parts of a key tile begin."""
    line = KeyLine.of(PlainDivisor(length), num_tiles)
    return [line.cut(n_block, row) for row in range(line.parts(n_block, units))]


def time_of_lines(
    cuts: list[list[list[int]]],  # of each sequence and key tile
    units: list[list[int]],
    lines: int,
    at_once: int,
    num_sms: int,
) -> float:
    """When the last CTA ends, in query blocks, if none waits."""
    parts = []
    for i, (line, counts) in enumerate(zip(cuts, units, strict=True)):
        for n, (begins, count) in enumerate(zip(line, counts, strict=True)):
            ends = [*begins[1:], count]
            parts += [(i, -begin, n, end - begin) for begin, end in zip(begins, ends, strict=True)]
    times = [STEPS_OF_TILE + STEPS_OF_PART + count for *_, count in sorted(parts)]
    free = [0.0] * num_sms
    for first in range(0, lines, at_once):
        for time in times:
            for _ in range(min(at_once, lines - first)):
                heapq.heapreplace(free, free[0] + time)
    return max(free)


def time_of(
    tiles: tuple[KeyTileWork, ...],
    heads: int,
    group: int,
    num_sms: int,
    shares: KeyShares,
    waves: Waves | None,
) -> float:
    """The time until the last CTA ends, in query blocks."""
    # With waves nearly all choices have parts, so that their cost would decide nothing.
    costs = shares.block_parts > 1 or (shares.parts > 1 and waves is None)
    besides = STEPS_OF_TILE + (STEPS_OF_PART if costs else 0.0)
    counts = [shares.parts_of_set(tile.after) for tile in tiles]
    work = [tile.blocks * group / shares.head_parts for tile in tiles]
    times = [(besides + n / count, count) for n, count in zip(work, counts, strict=True)]
    sets = heads * shares.head_parts
    per_group = sets
    if waves is not None:
        per_group = waves.heads_per_group(sets, len(tiles) * shares.block_parts)
    free = [0.0] * num_sms
    for first in range(0, sets, per_group):
        for time, count in times:
            for _ in range(min(per_group, sets - first) * count):
                heapq.heapreplace(free, free[0] + time)
        if waves is not None:
            times.reverse()
    return max(free) + SHARE_OF_LONGEST * max(times)[0]
