"""Which rows ranks send each other, so that each gets the rows that it wants."""

import functools
from collections.abc import Iterable
from itertools import accumulate, product
from typing import NamedTuple

Runs = tuple[tuple[range, ...], ...]  # rows of a sequence, of each rank


class Moves(NamedTuple):
    """Where a rank's rows go, and where other rows get to."""

    total: int  # rows that the rank has in the end
    sent: tuple[tuple[int, slice], ...]  # other ranks, and rows for them
    received: tuple[tuple[int, slice], ...]  # other ranks, and places for their rows
    kept: tuple[tuple[slice, slice], ...]  # rows of the rank, and their places


class RoundTrip(NamedTuple):
    """What a rank sends and gets: rows, and their gradients back."""

    # there, back: both ways. What comes back begins with gradients of rows that were kept; then
    # come gradients of rows that were sent, in the order of `there.sent`.
    there: Moves
    back: Moves


@functools.lru_cache(maxsize=64)
def exchange_of(chunks: Runs, wanted: Runs, rank: int) -> RoundTrip:
    """Return how a rank gets the rows that it wants: all of its own rows, or none of them."""
    pieces: list[tuple[int, int, slice, slice]] = []
    for (source, held), (target, runs) in product(enumerate(chunks), enumerate(wanted)):
        for (chunk, row), (run, place) in product(with_begins(together(held)), with_begins(runs)):
            first, last = max(chunk.start, run.start), min(chunk.stop, run.stop)
            if first < last and rank in (source, target):
                rows = slice(first - chunk.start + row, last - chunk.start + row)
                places = slice(first - run.start + place, last - run.start + place)
                pieces.append((source, target, rows, places))
    sent = [(target, rows) for source, target, rows, _ in pieces if target != rank]
    received = [(source, places) for source, _, _, places in pieces if source != rank]
    kept = [(rows, places) for source, target, rows, places in pieces if source == target]
    back: list[tuple[int, slice]] = []
    end = sum(rows.stop - rows.start for rows, _ in kept)
    for target, rows in sent:
        back.append((target, slice(end, end := end + rows.stop - rows.start)))
    there = Moves(sum(map(len, wanted[rank])), tuple(sent), tuple(received), tuple(kept))
    returned = Moves(end, there.received, tuple(back), tuple(pair[::-1] for pair in kept))
    return RoundTrip(there, returned)


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
