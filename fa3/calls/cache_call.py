"""The tensors of a call on a key/value cache: what they are, and whether they fit together.

`check_tensors` looks at shapes, strides, types and devices, which repeated calls share.
`check_values` looks at what lies in the small integer tensors, as far as the host can see it. What
is on a GPU is read back with FA3_ASSERTIONS=1 only; the kernels bound what they find there.
"""

import itertools
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa3.calls.assertions import check_counts, read_back
from fa3.calls.modifiers import ModifierSpec, check_alibi_slopes, check_sinks, describe_modifier
from fa3.calls.operands import (
    ALIGNMENT,
    DIMENSIONS,
    PACKED_DIMENSIONS,
    Description,
    check_contiguous,
    check_device,
    check_dtype,
    check_head_dim,
    check_heads_divide,
    check_layout,
    check_like_q,
    check_no_overlap,
    check_output,
    check_q,
    check_rank,
    check_shape,
    check_stride,
    describe,
    operand_of,
)
from fa3.planning.decode import Sizes
from fa3.primitives.arithmetic import LARGEST
from fa3.schedules.sequences import LONGEST, capacity_of

PAGED_DIMENSIONS = ("num_pages", "page_size", "heads", "head_dim")
RAGGED_DIMENSIONS = ("total_new", "heads", "head_dim")

LENGTHS = "an integer or an int32 torch.Tensor"
"""What cache_seqlens may be."""

ROTARY_UNIT = 16
"""A rotary embedding turns a multiple of this many columns."""


class CacheTensors(NamedTuple):
    """All tensors of a call, except the tensors of the user's functions. From cache_seqlens
    to seqused_q they are int32.

    Calls hand them on as plain tuples in this order, which take the host less time. Shapes are
    as in `flash_attn_with_kvcache`. It has no seqused_q: (batch,), how many of packed queries are
    used. A number in place of cache_seqlens is no tensor.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    page_table: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None


OF_INTEGERS = slice(7, 15)
INTEGERS = CacheTensors._fields[OF_INTEGERS]
"""The int32 tensors: where they are among the `CacheTensors`, and their names."""

OF_TOTAL = CacheTensors._fields.index("q"), CacheTensors._fields.index("out")
"""The tensors that have as many rows as there are packed queries."""

OF_ANY_ADDRESS = {*INTEGERS, "alibi_slopes", "sinks"}
CACHE_ALIGNMENTS = tuple(
    1 if name in OF_ANY_ADDRESS else ALIGNMENT for name in CacheTensors._fields
)
"""Bytes to which each of the tensors must be aligned."""

ANY_TOTAL = 1
"""In a description, the rows of packed queries: calls with more or fewer are remembered as one."""


def describe_tensors(tensors: tuple[torch.Tensor | None, ...]) -> tuple[Description | None, ...]:
    """Describe each of the `CacheTensors` that is given.

    Raises:
        TypeError, ValueError, NotImplementedError: see `fa3.calls.operands.describe`.
    """
    (
        q, k_cache, v_cache, k, v, cos, sin, seqlens, batch_idx, leftpad, pages, ends_new, ends_q,
        turns, used_q, slopes, sinks, out,
    ) = tensors  # fmt: skip
    # A loop over the names would take four times as long.
    return (
        describe("q", q),
        describe("k_cache", k_cache),
        describe("v_cache", v_cache),
        None if k is None else describe("k", k),
        None if v is None else describe("v", v),
        None if cos is None else describe("rotary_cos", cos),
        None if sin is None else describe("rotary_sin", sin),
        None if seqlens is None else describe("cache_seqlens", seqlens, 1),
        None if batch_idx is None else describe("cache_batch_idx", batch_idx, 1),
        None if leftpad is None else describe("cache_leftpad", leftpad, 1),
        None if pages is None else describe("page_table", pages, 1),
        None if ends_new is None else describe("cu_seqlens_k_new", ends_new, 1),
        None if ends_q is None else describe("cu_seqlens_q", ends_q, 1),
        None if turns is None else describe("rotary_seqlens", turns, 1),
        None if used_q is None else describe("seqused_q", used_q, 1),
        None if slopes is None else describe_modifier("alibi_slopes", slopes),
        None if sinks is None else describe_modifier("sinks", sinks),
        None if out is None else describe("out", out),
    )


def without_total(described: tuple[Description | None, ...]) -> tuple[Description | None, ...]:
    """What calls with packed queries have in common that differ in their total only: no output
    that is given, and of q all but its rows. Strides do not depend on them."""
    shape, stride, dtype, device = described[0]
    if len(shape) != len(PACKED_DIMENSIONS):
        # It is refused, as it is.
        return described
    _, heads, head_dim = shape
    q_described = (ANY_TOTAL, heads, head_dim), stride, dtype, device
    return (q_described, *described[1:-1], None)


class CacheCall(
    namedtuple(
        "CacheCall", (*CacheTensors._fields, "max_seqlen_q", "functions"), defaults=(None,) * 8
    )
):
    """What each of the `CacheTensors` is like, and what follows from that.

    Fields:
        max_seqlen_q: the most queries of a sequence, if they are packed.
        functions: the structure of the user's score and mask; None without.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        described: Sequence[Description | None],
        max_seqlen_q: int | None = None,
        functions: ModifierSpec | None = None,
    ) -> "CacheCall":
        """The call whose tensors are described."""
        return cls(*map(operand_of, described), max_seqlen_q, functions)

    @property
    def is_packed(self) -> bool:
        """Whether the queries of sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.is_packed else self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence; of packed ones the most."""
        return self.max_seqlen_q if self.is_packed else self.q.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v_cache.shape[3]

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache has room for."""
        return (self.page_table or self.k_cache).shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page; of a whole sequence in a cache without pages."""
        return self.k_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return capacity_of(self.page_size, self.page_table.shape[1] if self.page_table else 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.head_dim_v

    @property
    def seqlen_new(self) -> int:
        """Tokens that a sequence gets; of all sequences with cu_seqlens_k_new."""
        return 0 if self.k is None else self.k.shape[-3]


# ------------------------------------------------------------------------------------ tensors


def check_tensors(call: CacheCall) -> None:
    """Raise if the tensors do not describe one call.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a tensor has a wrong shape, layout or device, is missing, or has no place.
    """
    check_q(call.q, PACKED_DIMENSIONS if call.is_packed else DIMENSIONS)
    if call.is_packed:
        check_packed(call)
    dimensions = DIMENSIONS if call.page_table is None else PAGED_DIMENSIONS
    check_like_q("k_cache", call.k_cache, call.q, dimensions)
    check_like_q("v_cache", call.v_cache, call.q, dimensions)
    check_head_dim("q", call.q)
    check_head_dim("v_cache", call.v_cache)
    outer, inner, heads_kv, _ = call.k_cache.shape
    if call.page_table is not None and inner == 0:
        raise ValueError(
            "k_cache must have pages of 1 token or more to go with page_table, got shape "
            f"{tuple(call.k_cache.shape)}"
        )
    check_shape("k_cache", call.k_cache, (outer, inner, heads_kv, call.head_dim), "q")
    check_shape("v_cache", call.v_cache, (outer, inner, heads_kv, call.head_dim_v), "k_cache")
    check_heads_divide(call.q, "k_cache", call.k_cache)
    check_indices(call)
    if call.k is not None or call.v is not None:
        check_new_tokens(call)
    if call.rotary_cos is not None or call.rotary_sin is not None:
        check_rotary(call)
    elif call.rotary_seqlens is not None:
        raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin")
    check_cache_counts(call)
    if call.alibi_slopes is not None:
        check_alibi_slopes(call.alibi_slopes, call.q, call.batch)
    if call.sinks is not None:
        check_sinks(call.sinks, call.q)
    if call.out is not None:
        check_output(call.out, call.out_shape, call.q)


def check_cache_counts(call: CacheCall) -> None:
    """Raise if 32 bits, in which kernels count, do not do for a size or what follows from it."""
    for name in CacheTensors._fields:
        operand = getattr(call, name)
        if operand is not None and max(operand.shape, default=0) > LARGEST:
            raise ValueError(
                f"{name} must have sizes of at most {LARGEST}, got shape {tuple(operand.shape)}"
            )
    if call.page_size > LONGEST:
        raise ValueError(
            f"k_cache must have at most {LONGEST} tokens of a sequence, or in a page, got "
            f"{call.page_size}"
        )
    heads_kv = call.k_cache.shape[2]
    group = call.heads_q // max(1, heads_kv)
    Sizes(call.batch, call.seqlen_q, heads_kv, group, call.capacity).check("q")


def check_indices(call: CacheCall) -> None:
    """Raise unless the int32 tensors have one row for each sequence of q."""
    shapes = {
        "cache_seqlens": (call.batch,),
        "cache_batch_idx": (call.batch,),
        "cache_leftpad": (call.batch,),
        "cu_seqlens_k_new": (call.batch + 1,),
        "cu_seqlens_q": (call.batch + 1,),
        "rotary_seqlens": (call.batch,),
        "seqused_q": (call.batch,),
        "page_table": None,
    }
    for name, shape in shapes.items():
        operand = getattr(call, name)
        if operand is None:
            continue
        check_dtype(name, operand, torch.int32)
        if operand.device not in (call.q.device, torch.device("cpu")):
            raise ValueError(
                f"{name} must be on {call.q.device} like q, or on the CPU, got {operand.device}"
            )
        if shape is not None:
            check_shape(name, operand, shape, "q")
        else:
            check_rank(name, operand, ("batch", "pages"))
        check_contiguous(name, operand)
    if call.cache_batch_idx is None and call.num_sequences != call.batch:
        name = "k_cache" if call.page_table is None else "page_table"
        raise ValueError(
            f"{name} must have {call.batch} rows like q, or cache_batch_idx must say which are "
            f"meant, got {call.num_sequences}"
        )


def check_packed(call: CacheCall) -> None:
    """Raise unless packed queries can be cut into sequences."""
    ends = call.cu_seqlens_q
    if len(ends.shape) != 1 or not ends.shape[0]:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(ends.shape)}")
    if call.max_seqlen_q is None:
        raise ValueError("max_seqlen_q must be given with cu_seqlens_q")
    # Kernels step to rows where other sequences would be, also along a single one.
    check_stride("q", call.q, 0)
    check_stride("q", call.q, 1)


def check_new_tokens(call: CacheCall) -> None:
    """Raise unless k and v can be appended to the cache."""
    for name, other in (("k", "v"), ("v", "k")):
        if getattr(call, name) is None:
            raise ValueError(f"{name} must be given with {other}")
    ragged = call.cu_seqlens_k_new is not None
    dimensions = RAGGED_DIMENSIONS if ragged else DIMENSIONS
    heads_kv = call.k_cache.shape[2]
    for name in ("k", "v"):
        check_like_q(name, getattr(call, name), call.q, dimensions)
    tokens = call.k.shape[:1] if ragged else (call.batch, call.seqlen_new)
    check_shape("k", call.k, (*tokens, heads_kv, call.head_dim), "q and k_cache")
    check_shape("v", call.v, (*tokens, heads_kv, call.head_dim_v), "k and v_cache")
    for name in ("k_cache", "v_cache"):
        check_no_overlap(name, getattr(call, name))


def check_rotary(call: CacheCall) -> None:
    """Raise unless the tables of a rotary embedding fit the heads."""
    for name, other in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        operand = getattr(call, name)
        if operand is None:
            raise ValueError(f"{name} must be given with {other}")
        if call.k is None:
            raise ValueError(f"{name} must be None without k and v: nothing is appended")
        check_rank(name, operand, ("positions", "rotary_dim / 2"))
        check_dtype(name, operand, call.q.dtype, torch.float32)
        check_device(name, operand, "q", call.q)
        check_layout(name, operand)
    check_shape("rotary_sin", call.rotary_sin, tuple(call.rotary_cos.shape), "rotary_cos")
    if call.rotary_sin.dtype != call.rotary_cos.dtype:
        raise TypeError(
            f"rotary_sin must be {call.rotary_cos.dtype} like rotary_cos, "
            f"got {call.rotary_sin.dtype}"
        )
    positions, half = call.rotary_cos.shape
    if positions == 0:
        raise ValueError("rotary_cos must have a position, got none")
    if 2 * half % ROTARY_UNIT or not 0 < 2 * half <= call.head_dim:
        raise ValueError(
            f"rotary_cos has {half} columns for a rotary_dim of {2 * half}, supported are "
            f"multiples of {ROTARY_UNIT} up to the head_dim of {call.head_dim}"
        )


# ------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class HostValues:
    """What the host can see of the small tensors; None where it cannot.

    Fields:
        seqlens: tokens of each sequence before the call.
        counts: tokens that each gets.
        leftpads, batch_idx: as given.
        pages: each row of the page table.
        query_ends, turns, used_queries: cu_seqlens_q, rotary_seqlens and seqused_q, if given.
    """

    seqlens: list[int] | None
    counts: list[int] | None
    leftpads: list[int] | None
    batch_idx: list[int] | None
    pages: list[list[int]] | None
    query_ends: list[int] | None = None
    turns: list[int] | None = None
    used_queries: list[int] | None = None


def values_on_host(call: CacheCall, integers: Sequence[int | torch.Tensor | None]) -> HostValues:
    """Gather what the host can see.

    Args:
        integers: the int32 tensors, or a number in place of cache_seqlens.

    Raises:
        RuntimeError: a tensor would have to be read back while a CUDA graph is captured.
        ValueError: cache_seqlens is a number that does not fit the cache, or cu_seqlens_k_new
            does not cut k into one piece for each sequence.
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
        seqlens = read_back("cache_seqlens", cache_seqlens)
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


def check_values(call: CacheCall, values: HostValues, query_step: int) -> None:
    """Raise if a sequence is longer than its cache, or points outside of it.

    Args:
        query_step: 1 if each query has a rotary position of its own, 0 if they share one.

    Raises:
        ValueError: naming the argument and the sequence.
    """
    if values.seqlens is not None:
        check_seqlens(call, values)
    if call.rotary_cos is not None:
        check_positions(call, values, query_step)
    if values.leftpads is not None:
        check_leftpads(values.leftpads, values.seqlens or [call.capacity] * call.batch)
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


def check_query_ends(call: CacheCall, ends: list[int], used: list[int] | None) -> None:
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
        check_counts("seqused_q", used)
        counts = list(map(min, counts, used))
    if max(counts, default=0) > call.max_seqlen_q:
        raise ValueError(
            f"max_seqlen_q must be {max(counts)} or more, the most queries of a sequence, got "
            f"{call.max_seqlen_q}"
        )


def check_batch_idx(call: CacheCall, batch_idx: list[int]) -> None:
    """Raise unless the cache has these rows, and none of them gets tokens of two sequences."""
    for sequence, row in enumerate(batch_idx):
        if not 0 <= row < call.num_sequences:
            raise ValueError(
                f"cache_batch_idx must be from 0 to {call.num_sequences - 1}, got {row} "
                f"for sequence {sequence}"
            )
    if call.k is not None and len(set(batch_idx)) < call.batch:
        twice = next(row for row in batch_idx if batch_idx.count(row) > 1)
        raise ValueError(
            f"cache_batch_idx must not repeat an index when something is appended, got {twice} "
            f"{batch_idx.count(twice)} times"
        )


def check_seqlens(call: CacheCall, values: HostValues) -> None:
    """Raise unless the tokens of each sequence, and those it gets, fit its cache."""
    for sequence, seqlen in enumerate(values.seqlens):
        if not 0 <= seqlen <= call.capacity:
            raise ValueError(
                f"cache_seqlens must be from 0 to {call.capacity}, what the cache holds of a "
                f"sequence, got {seqlen} for sequence {sequence}"
            )
    if values.counts is None:
        return
    for sequence, (seqlen, count) in enumerate(zip(values.seqlens, values.counts, strict=True)):
        if seqlen + count > call.capacity:
            raise ValueError(
                f"cache_seqlens must leave room for k: sequence {sequence} has {seqlen} tokens "
                f"and gets {count}, but the cache holds {call.capacity}"
            )


def check_leftpads(leftpads: list[int], limits: list[int]) -> None:
    """Raise unless the padding is part of its sequence."""
    for sequence, (leftpad, limit) in enumerate(zip(leftpads, limits, strict=True)):
        if not 0 <= leftpad <= limit:
            raise ValueError(
                f"cache_leftpad must be from 0 to the sequence's length of {limit}, got "
                f"{leftpad} for sequence {sequence}"
            )


def check_positions(call: CacheCall, values: HostValues, query_step: int) -> None:
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


def check_pages(call: CacheCall, values: HostValues) -> None:
    """Raise unless the pages that sequences use exist, and none appends where tokens are."""
    num_pages, page_size = call.k_cache.shape[:2]
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
