"""Which rows ranks send each other, so that each gets the rows that it wants."""

import functools
from collections.abc import Iterable
from itertools import accumulate, pairwise, product
from typing import NamedTuple

Runs = tuple[tuple[range, ...], ...]  # rows of a sequence, of each rank


class Move(NamedTuple):
    """Neighbouring rows of a rank that get to neighbouring places of a rank, perhaps the same."""

    source: int
    target: int
    rows: slice
    places: slice


class RowExchange(NamedTuple):
    """How all ranks get rows."""

    totals: tuple[int, ...]  # rows that each rank has in the end
    moves: tuple[Move, ...]

    def kept(self, rank: int) -> list[Move]:
        """Return what a rank has itself."""
        return [move for move in self.moves if move.source == rank == move.target]

    def back(self) -> tuple["RowExchange", tuple[Move, ...]]:
        """Return how gradients of rows go back to other ranks, and the moves that brought the rows.
        A rank gets them one after another, in the order of these moves."""
        ends, moves = [0] * len(self.totals), []
        away = tuple(move for move in self.moves if move.source != move.target)
        for source, target, rows, places in away:
            begin = ends[source]
            ends[source] += rows.stop - rows.start
            moves.append(Move(target, source, places, slice(begin, ends[source])))
        return RowExchange(tuple(ends), tuple(moves)), away


@functools.lru_cache(maxsize=64)
def exchange_of(chunks: Runs, wanted: Runs) -> RowExchange:
    """Return how ranks that have these chunks get the rows that they want."""
    moves = []
    for (source, held), (target, runs) in product(enumerate(chunks), enumerate(wanted)):
        for (chunk, row), (run, place) in product(with_begins(together(held)), with_begins(runs)):
            first, last = max(chunk.start, run.start), min(chunk.stop, run.stop)
            if first < last:
                rows = slice(first - chunk.start + row, last - chunk.start + row)
                places = slice(first - run.start + place, last - run.start + place)
                moves.append(Move(source, target, rows, places))
    return RowExchange(tuple(sum(map(len, runs)) for runs in wanted), tuple(moves))


def everything_of(rows: tuple[int, ...]) -> RowExchange:
    """Return how each rank gets all rows, one rank's after another's, if they have so many."""
    ends = list(accumulate(rows, initial=0))
    each = tuple((range(*pair),) for pair in pairwise(ends))
    return exchange_of(each, ((range(ends[-1]),),) * len(rows))


def together(runs: Iterable[range]) -> tuple[range, ...]:
    """Return runs, of which those that touch or overlap the one before are one with it."""
    results: list[range] = []
    for run in filter(len, runs):
        if results and results[-1].start <= run.start <= results[-1].stop:
            run = range(results[-1].start, max(results.pop().stop, run.stop))
        results.append(run)
    return tuple(results)


def with_begins(runs: Iterable[range]) -> list[tuple[range, int]]:
    """Return runs, each with the number of rows before it."""
    runs = tuple(runs)
    return list(zip(runs, accumulate(map(len, runs), initial=0), strict=False))
