"""Which rows attend to which keys, in what order, on all ranks.

gather: each rank gets the keys that its rows see. A chunk of queries attends to the keys up to the
last one it sees, which bottom-right alignment puts in their places.
ring: the same, but from a rank at a time.

Source: Llama Team (arXiv 2407.21783), section 3.3.2; Liu et al., Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, product, takewhile
from operator import add
from typing import Any, NamedTuple

import torch

from fa3.calls.options import DENSE, PACKED
from fa3.distributed.alone import KeyPart
from fa3.distributed.transfer import (
    Placed,
    RowExchange,
    Runs,
    exchange_of,
    num_rows_of,
    together,
    with_begins,
)
from fa3.problem import NO_BOUND, Window

KeyStep = tuple[RowExchange, list[list[KeyPart]]]
"""Keys that come to ranks together, and each rank's parts that see them."""


def steps_of(
    chunks: Runs, order: Sequence[int], part: KeyPart, by_ring: bool
) -> tuple[list[list[KeyPart]], list[KeyStep]]:
    """Return each rank's parts with its own keys, and steps with others'.
    The order has the documents' numbers."""
    local, cut = whole_and_cut(chunks, order, part)
    steps = list[KeyStep]()
    for step in range(len(chunks) if by_ring else 1):
        parts, wanted = list[list[KeyPart]](), list[tuple[range, ...]]()
        for rank in range(len(chunks)):
            source = (rank - step) % len(chunks) if by_ring else None
            seen = list(chain(*(document.parts(rank, source) for document in cut)))
            local[rank] += [one for _, one in seen if one.keys]
            lacking = [x for x in seen if not x[1].keys]
            wanted.append(together(sorted((keys for keys, _ in lacking), key=lambda x: x.start)))
            places = with_begins(wanted[-1])
            parts.append(with_joined(replace(x, keys=placed(keys, places)) for keys, x in lacking))
        if any(wanted):
            steps.append((exchange_of(chunks, tuple(wanted)), parts))
    return [with_joined(x) for x in local], steps


def whole_and_cut(
    chunks: Runs, order: Sequence[int], part: KeyPart
) -> tuple[list[list[KeyPart]], list["CutDocument"]]:
    """Return each rank's whole documents, a packed part, and cut ones.
    Each one that is cut is a sequence of its own."""
    is_packed, most = part.options.kind == PACKED, max(map(len, chunks))
    size = 2 if is_packed else max(1, most)  # chunks of a document or sequence, on each rank
    documents = [[held[i : i + size] for held in chunks] for i in range(0, most, size)]
    rows = [num_rows_of(held) for held in documents]
    num_whole = len(list(takewhile(lambda x: max(x) == sum(x), rows))) * is_packed
    # Rows before each document, on each rank.
    begins = [*accumulate(rows, lambda x, y: tuple(map(add, x, y)), initial=(0,) * len(chunks))]
    local, cut = list[list[KeyPart]](), list[CutDocument]()
    for rank in range(len(chunks)):
        whole = [i for i in range(num_whole) if rows[i][rank]]
        lengths = tuple(rows[i][rank] for i in whole)
        named: Any = {"documents": tuple(order[i] for i in whole), "is_alone": True}
        named |= dict.fromkeys(("rows", "keys"), slice(0, sum(lengths)))
        one = replace(part, lengths=lengths if is_packed else None, **named)
        # A rank without rows has an empty part.
        local.append([one] if whole or not begins[-1][rank] else [])
    for i, held in enumerate(documents[num_whole:], num_whole):
        runs = [with_begins(together(x), y) for x, y in zip(held, begins[i], strict=True)]
        options = part.options._replace(kind=DENSE)
        one = replace(part, options=options, documents=tuple(order[i : i + 1]))
        cut.append(CutDocument(one, whole_of(chain(*held)), runs))
    return local, cut


class CutDocument(NamedTuple):
    """A document that is cut, or a sequence.

    Attributes:
        part: without rows and keys; whole: all rows; held: each rank's rows, with their places.
    """

    part: KeyPart
    whole: range
    held: list[Placed]

    def parts(self, rank: int, source: int | None) -> Iterator[tuple[range, KeyPart]]:
        """Yield parts with keys of one rank, or all, and these keys.
        Parts have places of keys that are on the rank."""
        runs, window = self.held[rank], self.part.options.window
        key_runs = [self.whole] if source is None else [run for run, _ in self.held[source]]
        if runs and rank == source and window.left < 0 and window.right <= 0:
            # A rank's chunks are in order, so a causal mask is right inside of them.
            key_runs = [range(sum(map(len, key_runs)))]
            runs = [(key_runs[0], runs[0][1])]
        for key_run, (run, _) in product(key_runs, runs):
            rows, keys, seen = seen_by(run, key_run, window)
            if keys:
                sees_itself = key_run.start <= run.start and run.stop <= key_run.stop
                at: Any = {"rows": placed(rows, runs), "keys": placed(keys, runs)}
                options = self.part.options._replace(window=seen)
                yield keys, replace(self.part, options=options, merges=not sees_itself, **at)


def whole_of(chunks: Iterable[range]) -> range:
    """Return neighbouring chunks as one."""
    begins, ends = zip(*((x.start, x.stop) for x in chunks), strict=True)
    return range(min(begins), max(ends))


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


def placed(rows: range, runs: Placed) -> slice | None:
    """Return where rows are among placed runs, if one has them all."""
    for run, begin in runs:
        if run.start <= rows.start and rows.stop <= run.stop:
            return slice(rows.start - run.start + begin, rows.stop - run.start + begin)
    return None


def with_joined(parts: Iterable[KeyPart]) -> list[KeyPart]:
    """Return parts, with those joined that see all of neighbouring keys."""
    results = list[KeyPart]()
    for part in sorted(parts, key=lambda part: part.merges):
        last = results[-1] if results else part
        is_whole = bool(results) and part.options.window == Window(NO_BOUND, NO_BOUND)
        is_whole = is_whole and part.options == last.options
        if is_whole and part.keys == last.keys and last.rows.stop == part.rows.start:
            results[-1] = replace(last, rows=slice(last.rows.start, part.rows.stop))
        elif is_whole and part.rows == last.rows and last.keys.stop == part.keys.start:
            results[-1] = replace(last, keys=slice(last.keys.start, part.keys.stop))
        else:
            results.append(part)
    return results


def pairs_of(part: KeyPart) -> int:
    """Return how many pairs of query and key a part has."""
    (left, right), rows, keys = part.options.window, part.rows, part.keys
    lengths, pairs = part.lengths, 0
    sizes = [(rows.stop - rows.start, keys.stop - keys.start)]
    for num_rows, num_keys in sizes if lengths is None else zip(lengths, lengths, strict=True):
        places = torch.arange(num_keys - num_rows, num_keys)
        first = places - left if left >= 0 else 0 * places
        last = places + right + 1 if right >= 0 else 0 * places + num_keys
        pairs += int((last.clamp(max=num_keys) - first.clamp(min=0)).clamp(min=0).sum())
    return pairs
