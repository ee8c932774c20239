"""Which rows ranks send each other, so that each gets the rows that it wants."""

import functools
from collections.abc import Iterable
from itertools import accumulate, pairwise, product
from typing import NamedTuple

Runs = tuple[tuple[range, ...], ...]  # rows of a sequence, of each rank


class RowExchange(NamedTuple):
    """Where rows get to; their gradients go back the same way."""

    total: int  # rows that the rank has in the end
    kept: tuple[tuple[slice, slice], ...]  # rows of the rank, and their places
    sent: tuple[tuple[int, slice], ...]  # other ranks, and rows for them, or their places
    received: tuple[tuple[int, slice], ...]  # other ranks, and places for their rows


def keeps_keys(heads_q: int, heads_kv: int, num_ranks: int) -> bool:
    """Whether gathered keys stay for the backward pass.
    Then they take no more memory than q and out, of which each rank has its part."""
    return heads_kv * num_ranks <= heads_q


@functools.lru_cache(maxsize=64)
def exchange_of(chunks: Runs, wanted: Runs, rank: int, is_placed: bool = False) -> RowExchange:
    """Return how a rank gets the rows that it wants: all of its own rows, or none of them.
    If they are placed, ranks send rows from where they have put them among those that they want."""
    kept, sent, received = [], [], []
    for (source, held), (target, runs) in product(enumerate(chunks), enumerate(wanted)):
        for (chunk, row), (run, place) in product(with_begins(together(held)), with_begins(runs)):
            first, last = max(chunk.start, run.start), min(chunk.stop, run.stop)
            if first >= last or rank not in (source, target):
                continue
            rows = slice(first - chunk.start + row, last - chunk.start + row)
            places = slice(first - run.start + place, last - run.start + place)
            if source == target:
                kept.append((rows, places))
            elif target == rank:
                received.append((source, places))
            elif is_placed:
                begin = wanted[rank][0].start
                sent.append((target, slice(first - begin, last - begin)))
            else:
                sent.append((target, rows))
    return RowExchange(sum(map(len, wanted[rank])), tuple(kept), tuple(sent), tuple(received))


def everything_of(rows: tuple[int, ...], rank: int, is_placed: bool) -> RowExchange:
    """Return how a rank gets all rows, one rank's after another's, if the ranks have so many."""
    ends = list(accumulate(rows, initial=0))
    each = tuple((range(*pair),) for pair in pairwise(ends))
    return exchange_of(each, ((range(ends[-1]),),) * len(rows), rank, is_placed)


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
