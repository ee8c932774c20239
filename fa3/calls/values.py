"""Check the numbers in a call's small integer tensors, as far as the host sees them.

What is on a GPU is read back with FA3_ASSERTIONS=1 only (`fa3.calls.assertions`); the kernels bound
what they find there.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fa3.calls.assertions import is_visible, read_back
from fa3.calls.call import (
    LENGTHS,
    LENGTHS_OF_PACKED,
    NAMES_BY_KIND,
    OF_INTEGERS,
    AttentionCall,
    K,
    Q,
    lengths_of,
)
from fa3.calls.options import PACKED, integer
from fa3.primitives.arithmetic import LARGEST
from fa3.reference.walker import used_rows

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


def check_lengths(
    integers: Sequence[torch.Tensor | None], totals: tuple[int, int], longest: tuple[int, int]
) -> None:
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


class HostValues(NamedTuple):
    """What the host can see of the `INTEGERS`, in their order; None where it cannot.

    Fields:
        seqlens: tokens of each sequence before the call.
        pages: each row of the page table.
        counts: tokens that each sequence gets.
        turns: rotary_seqlens.
    """

    seqlens: list[int] | None
    batch_idx: list[int] | None
    leftpads: list[int] | None
    pages: list[list[int]] | None
    counts: list[int] | None
    query_ends: list[int] | None = None
    turns: list[int] | None = None
    used_queries: list[int] | None = None


def checked_integers(
    call: AttentionCall,
    tensors: tuple[torch.Tensor | None, ...],  # the `TENSORS`
    length: object,  # of each sequence, a number; None if a tensor says it
    longest: tuple[int, int] | None,  # max_seqlen_q and max_seqlen_k of packed keys
    query_step: int,  # 1 if each query has a rotary position of its own, 0 if they share one
) -> tuple[torch.Tensor | None, ...]:
    """Check what the host can see of the int32 tensors; the `TENSORS` with them on q's device."""
    integers = tensors[OF_INTEGERS]
    if length is not None:
        integers = integer("cache_seqlens", length, kind=LENGTHS), *integers[1:]
    if not any(value is not None and is_visible(value) for value in integers):
        return tensors
    if call.is_packed:
        rows = tensors[Q].shape[0], tensors[K].shape[0]
        check_lengths(lengths_of(tensors), rows, longest or (call.max_seqlen_q, LARGEST))
    if call.kind == PACKED:
        return tensors
    check_values(call, values_on_host(call, integers), query_step)
    names = NAMES_BY_KIND[call.kind][OF_INTEGERS]
    on_gpu = (on_device(name, x, call) for name, x in zip(names, integers, strict=True))
    return *tensors[: OF_INTEGERS.start], *on_gpu, *tensors[OF_INTEGERS.stop :]


def on_device(
    name: str, value: int | torch.Tensor | None, call: AttentionCall
) -> torch.Tensor | None:
    """The value as a tensor on q's device; a number for each sequence."""
    device = call.q.device
    if isinstance(value, int):
        return torch.full((call.batch,), value, dtype=torch.int32, device=device)
    if value is None or value.device == device:
        return value
    if torch.cuda.is_current_stream_capturing():
        # The graph would copy it from the host again at every replay.
        raise RuntimeError(
            f"{name} must be on {device} while a CUDA graph is captured, got {value.device}"
        )
    # From pinned memory the copy would still run when the caller writes the next lengths.
    return (value.clone() if value.is_pinned() else value).to(device, non_blocking=True)


def values_on_host(
    call: AttentionCall, integers: Sequence[int | torch.Tensor | None]
) -> HostValues:
    """Gather what the host can see.

    Args:
        integers: the int32 tensors, or a number in place of cache_seqlens.
    """
    seqlens, *others = integers
    is_number = isinstance(seqlens, int)
    # Also in an empty batch, where no sequence has it.
    if is_number and not 0 <= seqlens <= call.capacity:
        raise ValueError(
            f"cache_seqlens must be from 0 to {call.capacity}, what the cache holds of a "
            f"sequence, got {seqlens}"
        )
    names = NAMES_BY_KIND[call.kind][OF_INTEGERS]
    values = HostValues(*map(read_back, names, (None if is_number else seqlens, *others)))
    if is_number:
        values = values._replace(seqlens=[seqlens] * call.batch)
    if call.cu_seqlens_k_new is None:
        return values._replace(counts=[call.seqlen_new] * call.batch)
    ends = values.counts
    if ends is None:
        return values
    counts = [b - a for a, b in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] != call.seqlen_new or min(counts, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_k_new must rise from 0 to k's {call.seqlen_new} tokens, got {ends}"
        )
    return values._replace(counts=counts)


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
