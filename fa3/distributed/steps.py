"""Which rows attend to which keys, in what order, on all ranks.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places.
ring: the same, but from a rank at a time.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

from fa3.calls.options import PACKED
from fa3.distributed.alone import KeyPart
from fa3.distributed.transfer import Placed, RowExchange, Runs, exchange_of, together, with_begins
from fa3.problem import NO_BOUND, Window, visible_pairs


def steps_of(
    chunks: Runs, ends: Sequence[int], order: Sequence[int], part: KeyPart, by_ring: bool
) -> tuple[list[list[KeyPart]], list[tuple[RowExchange, list[list[KeyPart]]]]]:
    """Return ranks' parts with their own keys, and steps with others'.
    Documents end there; the order has their numbers, if there are any."""
    local, steps = [list[KeyPart]() for _ in chunks], []
    wholes = tuple(map(range, ends, ends[1:]))
    held = [[Placed() for _ in chunks] for _ in wholes]  # rows of each document, on each rank
    for rank, _, rows, at in exchange_of(chunks, (wholes,)).moves:
        ours = held[bisect_right(ends, at.start) - 1][rank]
        ours.append((range(at.start, at.stop), rows.start))
    documents = [replace(part, documents=tuple(order[i : i + 1])) for i in range(len(wholes))]
    for step in range(len(chunks) if by_ring else 1):
        parts, wanted = list[list[KeyPart]](), list[tuple[range, ...]]()
        for rank in range(len(chunks)):
            source = (rank - step) % len(chunks) if by_ring else None
            sides = [x for x in zip(documents, wholes, held, strict=True) if x[2][rank]]
            seen = list(chain(*(seen_parts(*x, rank, source) for x in sides)))
            local[rank] += [one for _, one in seen if one.keys]
            lacking = [x for x in seen if not x[1].keys]
            wanted.append(together(sorted((keys for keys, _ in lacking), key=lambda x: x.start)))
            places = with_begins(wanted[-1])
            for keys, one in lacking:
                one.keys = placed(keys, places)
            parts.append(with_joined(one for _, one in lacking))
        if any(wanted):
            steps.append((exchange_of(chunks, tuple(wanted)), parts))
    for i, runs in enumerate(chunks):
        if not any(runs):  # a rank without rows has an empty part
            local[i] = [replace(part, rows=slice(0, 0), keys=slice(0, 0))]
    return [with_joined(x) for x in local], steps


def seen_parts(
    part: KeyPart, whole: range, held: Sequence[Placed], rank: int, source: int | None
) -> Iterator[tuple[range, KeyPart]]:
    """Yield parts with keys of one rank, or all, and these keys.
    Ranks hold these rows of a document. Parts have places of keys that are on the rank."""
    runs, window = held[rank], part.options.window
    key_runs = [whole] if source is None else [run for run, _ in held[source]]
    follow = all(x + len(run) == y for (run, x), (_, y) in pairwise(runs))
    if rank == source and window.left < 0 and window.right <= 0 and follow:
        # A rank's chunks are in order, so a causal mask is right inside of them.
        key_runs = [range(sum(map(len, key_runs)))]
        runs = [(key_runs[0], runs[0][1])]
    for (run, _), key_run in product(runs, key_runs):
        rows, keys, seen = seen_by(run, key_run, window)
        if keys:
            one = replace(
                part,
                options=part.options._replace(window=seen),
                rows=placed(rows, runs),
                keys=placed(keys, runs),
                lengths=((len(rows), len(keys)),),
                merges=not (key_run.start <= run.start and run.stop <= key_run.stop),
            )
            yield keys, one


def seen_by(run: range, keys: range, window: Window) -> tuple[range, range, Window]:
    """Return a run's rows that see keys, these keys, and the window.
    Bottom-right alignment puts the last row at the last of the keys."""
    left, right = window
    begin = run.start if right < 0 else max(run.start, keys.start - right)
    end = run.stop if left < 0 else min(run.stop, keys.stop + left)
    first = keys.start if left < 0 else max(keys.start, begin - left)
    last = keys.stop if right < 0 else min(keys.stop, end + right)
    rows, keys = range(begin, max(begin, end)), range(first, max(first, last))
    if not rows or not keys:
        return run[:0], run[:0], window
    after = last - end
    # Where a bound hides nothing there is none.
    is_free = left < 0 or 0 < after >= len(keys) - 1 - left
    left = NO_BOUND if is_free else left + after
    is_free = right < 0 or 0 < -after >= len(rows) - 1 - right
    return rows, keys, Window(left, NO_BOUND if is_free else right - after)


def placed(rows: range, runs: Placed) -> Any:
    """Return where rows are among placed runs, or None."""
    for run, begin in runs:
        if run.start <= rows.start and rows.stop <= run.stop:
            return slice(rows.start - run.start + begin, rows.stop - run.start + begin)
    return None


def with_joined(parts: Iterable[KeyPart]) -> list[KeyPart]:
    """Return parts, with those joined that one call attends to."""
    results = list[KeyPart]()
    for part in sorted(parts, key=lambda part: part.merges):
        for i, last in enumerate(results):
            if last.options == part.options and (both := joined(last, part)):
                results[i] = both
                break
        else:
            results.append(part)
    return results


def joined(one: KeyPart, other: KeyPart) -> KeyPart | None:
    """Return parts with the same options as one, or None.
    They see all of neighbouring keys, or are packed sequences."""
    rows, keys = slice(one.rows.start, other.rows.stop), slice(one.keys.start, other.keys.stop)
    follows, gap = one.rows.stop == other.rows.start, other.keys.start - one.keys.stop
    named: Any = {"rows": rows, "keys": keys}
    are_neighbours = (follows and one.keys == other.keys) or (one.rows == other.rows and not gap)
    if are_neighbours and one.options.window == Window(NO_BOUND, NO_BOUND):
        size = rows.stop - rows.start, keys.stop - keys.start
        return replace(one, lengths=(size,), **named)
    if one.options.kind != PACKED or one.merges != other.merges or not follows or gap < 0:
        return None
    # Keys between them are of a sequence without queries.
    named["lengths"] = one.lengths + ((0, gap),) * (gap > 0) + other.lengths
    named["documents"] = one.documents + one.documents[-1:] * (gap > 0) + other.documents
    return replace(one, **named)


def pairs_of(part: KeyPart) -> int:
    """Return how many pairs of query and key a part has."""
    return sum(visible_pairs(*sizes, part.options.window) for sizes in part.lengths)
