"""Check the numbers in integer tensors that the host can see.

The host sees values on the CPU. Values on a GPU are read back with FA3_ASSERTIONS=1 only, for
finding errors: to read it, the host waits for the GPU. The kernels bound what they find there.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fa3.calls.call import INTEGERS, LENGTHS, LENGTHS_OF_PACKED, AttentionCall, lengths_of
from fa3.calls.operands import used_queries
from fa3.calls.options import PACKED, integer
from fa3.primitives.arithmetic import LARGEST
from fa3.reference.walker import used_rows
from fa3.settings import SETTINGS

ASSERTIONS = SETTINGS["FA3_ASSERTIONS"] == "1"
"""Whether to read back and check what is on a GPU, too."""

MOST_SCORE = 2.0**24
"""Scores, scaled, up to which the softmax is right in float32 but for the rounding of the scores: a
weight's relative error is up to 2**-23 of its score."""

IN_CACHE_ROW = "from 0 to {}, what the cache holds of a sequence"


def is_visible(value: int | torch.Tensor) -> bool:
    """Whether the host may read a tensor without waiting, or must."""
    return isinstance(value, int) or value.is_cpu or ASSERTIONS


def read_back(name: str, tensor: torch.Tensor | None) -> list | None:
    """Return a tensor's values; None if the host must not read them.
    Raises RuntimeError if it would have to be read back while a CUDA graph is captured."""
    if tensor is None or not is_visible(tensor):
        return None
    check_readable(name, tensor)
    return tensor.tolist()


def check_readable(what: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError during a capture, when values cannot be read."""
    if not tensor.is_cpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS=1 can "
            "check a call before the capture, which must run without it"
        )


def check_scores(values: Mapping[str, Any], scale: float) -> None:
    """Raise if scores may be too large for the softmax; for FA3_ASSERTIONS=1.
    `values` are of a call without a cache, by name; `scale` is the softmax scale."""
    q, k, (ends_q, ends_k, used_q, used_k) = values["q"], values["k"], lengths_of(values)
    check_readable("scores", q)
    largest = abs(scale)
    for rows, ends, used in ((q.detach(), ends_q, used_q), (k.detach(), ends_k, used_k)):
        if ends is not None:
            rows = rows[used_queries(len(rows), ends, used)] if len(ends) > 1 else rows[:0]
        if not rows.numel():
            return
        largest *= rows.float().norm(dim=-1).max().item()
    if largest > MOST_SCORE:
        raise ValueError(
            f"scores must be at most {MOST_SCORE:.0f}, got rows of q and k whose score may be "
            f"{largest:.3g} after scaling: its exponential relative to the row max is lost to "
            "rounding in float32"
        )


def check_each(name: str, numbers: Sequence[int], most: int | Sequence[int], accepted: str) -> None:
    """Raise unless each sequence's number is from 0 to `most`."""
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
    """Raise unless packed rows suffice and no sequence exceeds its bound.
    Checks what the host sees. `totals` are the rows of q and of k, `longest` max_seqlen_q and
    max_seqlen_k."""
    ends_q, ends_k, used_q, used_k = map(read_back, LENGTHS_OF_PACKED, integers)
    for side, ends, used, total, most in zip(
        "qk", (ends_q, ends_k), (used_q, used_k), totals, longest, strict=True
    ):
        if ends is None:
            continue
        check_ends(f"cu_seqlens_{side}", ends, total, f"the rows of {side}")
        check_each(f"seqused_{side}", used or (), LARGEST, "0 or more")
        for sequence, rows in enumerate(used_rows(ends, used)):
            if len(rows) > most:
                raise ValueError(
                    f"max_seqlen_{side} must be {len(rows)} or more, the rows of {side} that "
                    f"sequence {sequence} has, got {most}"
                )


def check_ends(name: str, ends: list[int], total: int, what: str) -> None:
    """Raise unless cumulated lengths cut a tensor's rows into sequences."""
    if ends[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {ends[0]}")
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end < begin:
            raise ValueError(
                f"{name} must not decrease, got {begin} to {end} for sequence {sequence}"
            )
    if ends[-1] > total:
        raise ValueError(f"{name} must end at {total}, {what}, or less, got {ends[-1]}")


# ----------------------------------------------------------------------------------- a cache


def check_numbers(
    call: AttentionCall,
    values: dict[str, Any],  # of the call; int32 tensors on the CPU become tensors on q's device
    length: object,  # of each sequence, a number; None if a tensor says it
    query_step: int,  # 1 if each query has a rotary position of its own, 0 if they share one
) -> None:
    """Check what the host can see of the int32 tensors."""
    integers = {name: values[name] for name in INTEGERS}
    if length is not None:
        integers["seqused_k"] = integer("cache_seqlens", length, kind=LENGTHS)
    if not any(value is not None and is_visible(value) for value in integers.values()):
        return
    if call.is_packed:
        rows = values["q"].shape[0], values["k"].shape[0]
        check_lengths(lengths_of(values), rows, values["longest"] or (call.max_seqlen_q, LARGEST))
    if call.kind == PACKED:
        return
    check_values(call, values_on_host(call, integers), query_step)
    values |= {name: on_device(call.name(name), x, call) for name, x in integers.items()}


def on_device(
    name: str, value: int | torch.Tensor | None, call: AttentionCall
) -> torch.Tensor | None:
    """The value as a tensor on q's device, a number per sequence."""
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
    call: AttentionCall, integers: Mapping[str, int | torch.Tensor | None]
) -> dict[str, list | None]:
    """Gather the `INTEGERS` that the host can see; None for others.
    `integers` are the int32 tensors, or a number in place of seqused_k. Comes with `counts`, the
    tokens that each sequence gets."""
    seqlens = integers["seqused_k"]
    # Also in an empty batch, where no sequence has it.
    if isinstance(seqlens, int):
        check_each("cache_seqlens", [seqlens], call.capacity, IN_CACHE_ROW)
    values = {
        name: [x] * call.batch if isinstance(x, int) else read_back(call.name(name), x)
        for name, x in integers.items()
    }
    values["counts"], ends = [call.seqlen_new] * call.batch, values["cu_seqlens_k_new"]
    if call.cu_seqlens_k_new is not None:
        values["counts"] = ends and [end - begin for begin, end in itertools.pairwise(ends)]
    is_whole = not ends or (ends[0] == 0 and ends[-1] == call.seqlen_new)
    if not is_whole or min(values["counts"] or [0]) < 0:
        raise ValueError(
            f"cu_seqlens_k_new must rise from 0 to k's {call.seqlen_new} tokens, got {ends}"
        )
    return values


def check_values(call: AttentionCall, values: dict[str, list | None], query_step: int) -> None:
    """Raise if a sequence exceeds its cache, or points outside of it.
    `query_step` is 1 if each query has a rotary position of its own, 0 if they share one."""
    seqlens, counts = values["seqused_k"], values["counts"]
    leftpads, rows = values["leftpad"], values["batch_idx"]
    if seqlens is not None:
        check_each(call.name("seqused_k"), seqlens, call.capacity, IN_CACHE_ROW)
        for sequence, (seqlen, count) in enumerate(zip(seqlens, counts or (), strict=False)):
            if seqlen + count > call.capacity:
                raise ValueError(
                    f"cache_seqlens must leave room for k: sequence {sequence} has {seqlen} tokens "
                    f"and gets {count}, but the cache holds {call.capacity}"
                )
    if call.rotary_cos is not None:
        check_positions(call, values, query_step)
    if leftpads is not None:
        padding = "from 0 to the sequence's length of {}"
        check_each("cache_leftpad", leftpads, seqlens or call.capacity, padding)
    if rows is not None:
        check_each("cache_batch_idx", rows, call.num_sequences - 1, "from 0 to {}")
        if call.k_new is not None and len(set(rows)) < call.batch:
            twice = next(row for row in rows if rows.count(row) > 1)
            raise ValueError(
                f"cache_batch_idx must not repeat an index when something is appended, got {twice} "
                f"{rows.count(twice)} times"
            )
    tables = "batch_idx", "leftpad"
    is_hidden = any(values[one] is None and getattr(call, one) is not None for one in tables)
    if not is_hidden and None not in (seqlens, counts, values["page_table"]):
        check_pages(call, values)


def check_positions(call: AttentionCall, values: dict[str, list | None], query_step: int) -> None:
    """Raise unless rotary tables reach as far as keys and queries do."""
    positions = call.rotary_cos.shape[0]
    turns = values["seqused_k" if call.rotary_seqlens is None else "rotary_seqlens"]
    if turns is None:
        return
    queries = [call.seqlen_q] * call.batch
    if call.is_packed:
        ends = values["cu_seqlens_q"] or [0] * (call.batch + 1)
        queries = [end - begin for begin, end in itertools.pairwise(ends)]
    counts = values["counts"] or [0] * call.batch
    for sequence, (turn, count, seqlen_q) in enumerate(zip(turns, counts, queries, strict=True)):
        if turn < 0:
            raise ValueError(
                f"rotary_seqlens must be 0 or more, got {turn} for sequence {sequence}"
            )
        end = turn + max(count, 1 + (seqlen_q - 1) * query_step if seqlen_q else 0)
        if end > positions:
            raise ValueError(
                f"rotary_cos has {positions} positions, sequence {sequence} needs {end}"
            )


def check_pages(call: AttentionCall, values: dict[str, list]) -> None:
    """Raise unless sequences' pages exist, and none appends where tokens are."""
    num_pages, page_size = call.k.shape[:2]
    rows = values["batch_idx"] or range(call.batch)
    leftpads = values["leftpad"] or [0] * call.batch
    written: dict[int, list[tuple[int, int, int]]] = {}

    def refuse_overlap(sequence: int, page: int, first: int, end: int, does: str) -> None:
        for other, other_first, other_end in written.get(page, ()):
            if first < other_end and other_first < end:
                raise ValueError(
                    f"page_table must not give page {page} to sequences {other} and {sequence}, "
                    f"{does}"
                )

    for sequence, row in enumerate(rows):
        seqlen, pages = values["seqused_k"][sequence], values["page_table"][row]
        end = seqlen + values["counts"][sequence]
        for entry in range(leftpads[sequence] // page_size, -(-end // page_size)):
            if not 0 <= pages[entry] < num_pages:
                raise ValueError(
                    f"page_table must have pages from 0 to {num_pages - 1} where a sequence has "
                    f"tokens, got {pages[entry]} at ({row}, {entry})"
                )
        for page, *place in page_spans(pages, page_size, seqlen, end):
            refuse_overlap(sequence, page, *place, "which both append to it")
            written.setdefault(page, []).append((sequence, *place))
    for sequence, row in enumerate(rows if written else ()):
        tokens = leftpads[sequence], values["seqused_k"][sequence]
        for page, *place in page_spans(values["page_table"][row], page_size, *tokens):
            refuse_overlap(sequence, page, *place, "where one has tokens and the other appends")


def page_spans(pages: list[int], page_size: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
    """(page, first, end) of a sequence's positions [begin, end), for each of its pages."""
    for entry in range(begin // page_size, -(-end // page_size) if begin < end else 0):
        start = entry * page_size
        yield pages[entry], max(begin - start, 0), min(end - start, page_size)
