"""Check the numbers in a call's small integer tensors, as far as the host sees them.

What is on a GPU is read back with FA3_ASSERTIONS=1 only (`fa3.calls.assertions`); the kernels bound
what they find there.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fa3.calls.assertions import read_back
from fa3.calls.call import INTEGERS, LENGTHS_OF_PACKED, AttentionCall, Integers
from fa3.primitives.arithmetic import LARGEST
from fa3.reference.varlen import used_rows

COUNT = "0 or more"
IN_CACHE_ROW = "from 0 to {}, what the cache holds of a sequence"
PADDING = "from 0 to the sequence's length of {}"


def check_each(name: str, numbers: Sequence[int], most: int | Sequence[int], accepted: str) -> None:
    """Raise unless the number of each sequence is from 0 to `most`, as `accepted` says."""
    limits = [most] * len(numbers) if isinstance(most, int) else most
    for sequence, (number, limit) in enumerate(zip(numbers, limits, strict=True)):
        if not 0 <= number <= limit:
            raise ValueError(
                f"{name} must be {accepted.format(limit)}, got {number} for sequence {sequence}"
            )


# --------------------------------------------------------------------------- packed sequences


def check_lengths(integers: Integers, totals: tuple[int, int], longest: tuple[int, int]) -> None:
    """Raise unless q and k have the rows of all sequences, and none is longer than the call says.

    Checks what the host sees.

    Args:
        totals: rows of q and of k.
        longest: max_seqlen_q and max_seqlen_k.
    """
    ends_q, ends_k, used_q, used_k = map(read_back, LENGTHS_OF_PACKED, integers)
    for side, ends, used, total, most in zip(
        "qk", (ends_q, ends_k), (used_q, used_k), totals, longest, strict=True
    ):
        if ends is None:
            continue
        check_ends(f"cu_seqlens_{side}", ends, side, total)
        check_each(f"seqused_{side}", used or (), LARGEST, COUNT)
        for sequence, rows in enumerate(used_rows(ends, used)):
            if len(rows) > most:
                raise ValueError(
                    f"max_seqlen_{side} must be {len(rows)} or more, the rows of {side} that "
                    f"sequence {sequence} has, got {most}"
                )


def check_ends(name: str, ends: list[int], side: str, total: int) -> None:
    """Raise unless cumulated lengths cut a tensor's rows into sequences."""
    if ends[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {ends[0]}")
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end < begin:
            raise ValueError(
                f"{name} must not decrease, got {begin} to {end} for sequence {sequence}"
            )
    if ends[-1] > total:
        raise ValueError(f"{name} must end at {total}, the rows of {side}, or less, got {ends[-1]}")


# ----------------------------------------------------------------------------------- a cache


@dataclass(frozen=True)
class HostValues:
    """What the host can see of the small tensors; None where it cannot."""

    seqlens: list[int] | None  # tokens of each sequence before the call
    counts: list[int] | None  # tokens that each gets
    # leftpads, batch_idx: as given.
    leftpads: list[int] | None
    batch_idx: list[int] | None
    pages: list[list[int]] | None  # each row of the page table
    # query_ends, turns, used_queries: cu_seqlens_q, rotary_seqlens and seqused_q, if given.
    query_ends: list[int] | None = None
    turns: list[int] | None = None
    used_queries: list[int] | None = None


def values_on_host(
    call: AttentionCall, integers: Sequence[int | torch.Tensor | None]
) -> HostValues:
    """Gather what the host can see.

    Args:
        integers: the int32 tensors, or a number in place of cache_seqlens.
    """
    cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_k_new, *rest = integers
    if isinstance(cache_seqlens, int):
        # Also in an empty batch, where no sequence has it.
        if not 0 <= cache_seqlens <= call.capacity:
            raise ValueError(
                f"cache_seqlens must be from 0 to {call.capacity}, what the cache holds of a "
                f"sequence, got {cache_seqlens}"
            )
        seqlens = [cache_seqlens] * call.batch
    else:
        seqlens = read_back(call.name("seqused_k"), cache_seqlens)
    counts = [call.seqlen_new] * call.batch
    if cu_seqlens_k_new is not None:
        bounds = read_back("cu_seqlens_k_new", cu_seqlens_k_new)
        counts = None if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        if bounds and (
            bounds[0] != 0 or bounds[-1] != call.seqlen_new or min(counts, default=0) < 0
        ):
            raise ValueError(
                f"cu_seqlens_k_new must rise from 0 to k's {call.seqlen_new} tokens, got {bounds}"
            )
    return HostValues(
        seqlens,
        counts,
        read_back("cache_leftpad", cache_leftpad),
        read_back("cache_batch_idx", cache_batch_idx),
        read_back("page_table", page_table),
        *map(read_back, INTEGERS[-len(rest) :], rest),
    )


def check_values(call: AttentionCall, values: HostValues, query_step: int) -> None:
    """Raise if a sequence is longer than its cache, or points outside of it.

    Args:
        query_step: 1 if each query has a rotary position of its own, 0 if they share one.
    """
    if values.seqlens is not None:
        check_seqlens(call, values)
    if call.rotary_cos is not None:
        check_positions(call, values, query_step)
    if values.leftpads is not None:
        check_each("cache_leftpad", values.leftpads, values.seqlens or call.capacity, PADDING)
    if values.batch_idx is not None:
        check_batch_idx(call, values.batch_idx)
    if values.query_ends is not None:
        check_query_ends(call, values.query_ends, values.used_queries)
    seen = values.seqlens, values.counts, values.pages
    hidden = [
        name
        for name, value in (
            ("cache_batch_idx", values.batch_idx),
            ("cache_leftpad", values.leftpads),
        )
        if getattr(call, name) is not None and value is None
    ]
    if None not in seen and not hidden:
        check_pages(call, values)


def check_query_ends(call: AttentionCall, ends: list[int], used: list[int] | None) -> None:
    """Raise unless the queries of each sequence exist, and are no more than there may be."""
    total = call.q.shape[0]
    counts = [end - begin for begin, end in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] > total or min(counts, default=0) < 0:
        falls = [i for i, count in enumerate(counts) if count < 0]
        at = f", falls after sequence {falls[0]}" if falls else ""
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to at most q's {total} rows, got {ends[0]} to "
            f"{ends[-1]}{at}"
        )
    if used is not None:
        check_each("seqused_q", used, LARGEST, COUNT)
        counts = list(map(min, counts, used))
    if max(counts, default=0) > call.max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be {max(counts)} or more, the most queries of a sequence, got "
            f"{call.max_seqlen_q}"
        )


def check_batch_idx(call: AttentionCall, batch_idx: list[int]) -> None:
    """Raise unless the cache has these rows, and none of them gets tokens of two sequences."""
    check_each("cache_batch_idx", batch_idx, call.num_sequences - 1, "from 0 to {}")
    if call.k_new is not None and len(set(batch_idx)) < call.batch:
        twice = next(row for row in batch_idx if batch_idx.count(row) > 1)
        raise ValueError(
            f"cache_batch_idx must not repeat an index when something is appended, got {twice} "
            f"{batch_idx.count(twice)} times"
        )


def check_seqlens(call: AttentionCall, values: HostValues) -> None:
    """Raise unless the tokens of each sequence, and those it gets, fit its cache."""
    check_each(call.name("seqused_k"), values.seqlens, call.capacity, IN_CACHE_ROW)
    if values.counts is None:
        return
    for sequence, (seqlen, count) in enumerate(zip(values.seqlens, values.counts, strict=True)):
        if seqlen + count > call.capacity:
            raise ValueError(
                f"cache_seqlens must leave room for k: sequence {sequence} has {seqlen} tokens "
                f"and gets {count}, but the cache holds {call.capacity}"
            )


def check_positions(call: AttentionCall, values: HostValues, query_step: int) -> None:
    """Raise unless the rotary tables reach as far as keys and queries do."""
    positions = call.rotary_cos.shape[0]
    turns = values.seqlens if call.rotary_seqlens is None else values.turns
    if turns is None:
        return
    queries = [call.seqlen_q] * call.batch
    if call.is_packed:
        ends = values.query_ends or [0] * (call.batch + 1)
        queries = [end - begin for begin, end in itertools.pairwise(ends)]
    counts = values.counts or [0] * call.batch
    for sequence, (turn, count, seqlen_q) in enumerate(zip(turns, counts, queries, strict=True)):
        if turn < 0:
            raise ValueError(
                f"rotary_seqlens must be 0 or more, got {turn} for sequence {sequence}"
            )
        turned_positions = 1 + (seqlen_q - 1) * query_step if seqlen_q else 0
        if turn + max(count, turned_positions) > positions:
            raise ValueError(
                f"rotary_cos has {positions} positions, sequence {sequence} needs "
                f"{turn + max(count, turned_positions)}"
            )


def check_pages(call: AttentionCall, values: HostValues) -> None:
    """Raise unless the pages that sequences use exist, and none appends where tokens are."""
    num_pages, page_size = call.k.shape[:2]
    rows = values.batch_idx or range(call.batch)
    leftpads = values.leftpads or [0] * call.batch
    written: dict[int, list[tuple[int, int, int]]] = {}

    def refuse_overlap(sequence: int, page: int, first: int, end: int, does: str) -> None:
        for other, other_first, other_end in written.get(page, ()):
            if first < other_end and other_first < end:
                raise ValueError(
                    f"page_table must not give page {page} to sequences {other} and {sequence}, "
                    f"{does}"
                )

    for sequence, row in enumerate(rows):
        seqlen, pages = values.seqlens[sequence], values.pages[row]
        end = seqlen + values.counts[sequence]
        for entry in range(leftpads[sequence] // page_size, -(-end // page_size)):
            if not 0 <= pages[entry] < num_pages:
                raise ValueError(
                    f"page_table must have pages from 0 to {num_pages - 1} where a sequence has "
                    f"tokens, got {pages[entry]} at ({row}, {entry})"
                )
        for page, *place in places(pages, page_size, seqlen, end):
            refuse_overlap(sequence, page, *place, "which both append to it")
            written.setdefault(page, []).append((sequence, *place))
    for sequence, row in enumerate(rows if written else ()):
        tokens = leftpads[sequence], values.seqlens[sequence]
        for page, *place in places(values.pages[row], page_size, *tokens):
            refuse_overlap(sequence, page, *place, "where one has tokens and the other appends")


def places(pages: list[int], page_size: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
    """(page, first, end) of a sequence's positions [begin, end), for each of its pages."""
    for entry in range(begin // page_size, -(-end // page_size) if begin < end else 0):
        start = entry * page_size
        yield pages[entry], max(begin - start, 0), min(end - start, page_size)
