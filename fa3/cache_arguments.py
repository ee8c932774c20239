"""The tensors of a call on a key/value cache: what they are, and whether they fit together.

`check_tensors` looks at shapes, strides, types and devices, which repeated calls share.
`check_values` looks at what lies in the small integer tensors, as far as the host can see it:
those on a GPU are never read here, the kernels bound what they find in them.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa3.api import DTYPES, Operand, check_layout, describe
from fa3.planner import HEAD_DIM_UNIT, MAX_HEAD_DIM

ROTARY_UNIT = 16
"""A rotary embedding turns a multiple of this many columns."""


class CacheCall(NamedTuple):
    """All tensors of a call, each described; None where none is given."""

    q: Operand
    k_cache: Operand
    v_cache: Operand
    k: Operand | None
    v: Operand | None
    rotary_cos: Operand | None
    rotary_sin: Operand | None
    cache_seqlens: Operand | None
    cache_batch_idx: Operand | None
    cache_leftpad: Operand | None
    page_table: Operand | None
    cu_seqlens_k_new: Operand | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        rotary_cos: torch.Tensor | None,
        rotary_sin: torch.Tensor | None,
        *integers: torch.Tensor | None,
    ) -> "CacheCall":
        """Describe a call's tensors; `integers` are those from cache_seqlens on."""
        return cls(
            describe("q", q),
            describe("k_cache", k_cache),
            describe("v_cache", v_cache),
            None if k is None else describe("k", k),
            None if v is None else describe("v", v),
            None if rotary_cos is None else describe("rotary_cos", rotary_cos),
            None if rotary_sin is None else describe("rotary_sin", rotary_sin),
            *map(describe_unaligned, cls._fields[-len(integers) :], integers),
        )

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

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
        return self.page_size * (self.page_table.shape[1] if self.page_table else 1)

    @property
    def seqlen_new(self) -> int:
        """Tokens that a sequence gets; of all sequences with cu_seqlens_k_new."""
        return 0 if self.k is None else self.k.shape[-3]


def describe_unaligned(name: str, tensor: torch.Tensor | None) -> Operand | None:
    """Describe a tensor that may begin at any address, if there is one."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return Operand(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


# ------------------------------------------------------------------------------------ tensors


def check_tensors(call: CacheCall) -> None:
    """Raise if the tensors do not describe one call.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a tensor has a wrong shape, layout or device, is missing, or has no place.
    """
    for name in ("q", "k_cache", "v_cache"):
        check_like_q(name, getattr(call, name), call.q, 4)
    for name, size in (("q", call.head_dim), ("v_cache", call.head_dim_v)):
        if size % HEAD_DIM_UNIT or not 0 < size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head_dim {size}, supported are multiples of {HEAD_DIM_UNIT} "
                f"up to {MAX_HEAD_DIM}"
            )
    outer, inner, heads_kv, _ = call.k_cache.shape
    check_shape("k_cache", call.k_cache, (outer, inner, heads_kv, call.head_dim), "q")
    check_shape("v_cache", call.v_cache, (outer, inner, heads_kv, call.head_dim_v), "k_cache")
    heads_q = call.q.shape[2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv and heads_q % heads_kv):
        raise ValueError(
            f"q must have a multiple of k_cache's heads, got {heads_q} query heads "
            f"and {heads_kv} key/value heads"
        )
    check_indices(call)
    if call.k is not None or call.v is not None:
        check_new_tokens(call)
    elif call.cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new must be None without k and v: nothing is appended")
    if call.rotary_cos is not None or call.rotary_sin is not None:
        check_rotary(call)


def check_like_q(name: str, operand: Operand, q: Operand, rank: int) -> None:
    """Raise unless a tensor has this rank, and q's dtype and device."""
    if len(operand.shape) != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(operand.shape)}")
    if operand.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16 or float16, got {operand.dtype}")
    if operand.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype} like q, got {operand.dtype}")
    if operand.device != q.device:
        raise ValueError(f"{name} must be on {q.device} like q, got {operand.device}")
    if operand.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be a CPU or CUDA tensor, got {operand.device}")
    check_layout(name, operand)


def check_shape(name: str, operand: Operand, shape: tuple[int, ...], other: str) -> None:
    if tuple(operand.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape} to go with {other}, got {tuple(operand.shape)}"
        )


def check_indices(call: CacheCall) -> None:
    """Raise unless the int32 tensors have one row for each sequence of q."""
    shapes = {
        "cache_seqlens": (call.batch,),
        "cache_batch_idx": (call.batch,),
        "cache_leftpad": (call.batch,),
        "cu_seqlens_k_new": (call.batch + 1,),
        "page_table": None,
    }
    for name, shape in shapes.items():
        operand = getattr(call, name)
        if operand is None:
            continue
        if operand.dtype != torch.int32:
            raise TypeError(f"{name} must be torch.int32, got {operand.dtype}")
        if operand.device not in (call.q.device, torch.device("cpu")):
            raise ValueError(
                f"{name} must be on {call.q.device} like q, or on the CPU, got {operand.device}"
            )
        if shape is not None:
            check_shape(name, operand, shape, "q")
        elif len(operand.shape) != 2:
            raise ValueError(
                f"{name} must have 2 dimensions (batch, pages), got shape {tuple(operand.shape)}"
            )
        if operand.shape[-1] > 1 and operand.stride[-1] != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got stride {operand.stride[-1]}"
            )
    if call.cache_batch_idx is None and call.num_sequences != call.batch:
        name = "k_cache" if call.page_table is None else "page_table"
        raise ValueError(
            f"{name} must have {call.batch} rows like q, or cache_batch_idx must say which are "
            f"meant, got {call.num_sequences}"
        )


def check_new_tokens(call: CacheCall) -> None:
    """Raise unless k and v can be appended to the cache."""
    for name, other in (("k", "v"), ("v", "k")):
        if getattr(call, name) is None:
            raise ValueError(f"{name} must be given with {other}")
    ragged = call.cu_seqlens_k_new is not None
    heads_kv = call.k_cache.shape[2]
    for name in ("k", "v"):
        check_like_q(name, getattr(call, name), call.q, 3 if ragged else 4)
    tokens = call.k.shape[:1] if ragged else (call.batch, call.seqlen_new)
    check_shape("k", call.k, (*tokens, heads_kv, call.head_dim), "q and k_cache")
    check_shape("v", call.v, (*tokens, heads_kv, call.head_dim_v), "k and v_cache")
    for name in ("k_cache", "v_cache"):
        operand = getattr(call, name)
        sizes = zip(operand.shape, operand.stride, strict=True)
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise ValueError(
                f"{name} must not overlap itself when something is appended, "
                f"got strides {operand.stride}"
            )


def check_rotary(call: CacheCall) -> None:
    """Raise unless the tables of a rotary embedding fit the heads."""
    for name, other in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        operand = getattr(call, name)
        if operand is None:
            raise ValueError(f"{name} must be given with {other}")
        if call.k is None:
            raise ValueError(f"{name} must be None without k and v: nothing is appended")
        if len(operand.shape) != 2:
            raise ValueError(
                f"{name} must have 2 dimensions (positions, rotary_dim / 2), "
                f"got shape {tuple(operand.shape)}"
            )
        if operand.dtype not in (call.q.dtype, torch.float32):
            raise TypeError(f"{name} must be {call.q.dtype} or torch.float32, got {operand.dtype}")
        if operand.device != call.q.device:
            raise ValueError(f"{name} must be on {call.q.device} like q, got {operand.device}")
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
    """

    seqlens: list[int] | None
    counts: list[int] | None
    leftpads: list[int] | None
    batch_idx: list[int] | None
    pages: list[list[int]] | None


def values_on_host(
    call: CacheCall,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cu_seqlens_k_new: torch.Tensor | None,
) -> HostValues:
    """Gather what the host can see.

    Raises:
        ValueError: cu_seqlens_k_new does not cut k into one piece for each sequence.
    """

    def visible(tensor: torch.Tensor | None) -> list | None:
        return tensor.tolist() if tensor is not None and tensor.device.type == "cpu" else None

    seqlens = visible(cache_seqlens) if isinstance(cache_seqlens, torch.Tensor) else cache_seqlens
    if isinstance(seqlens, int):
        seqlens = [seqlens] * call.batch
    counts = [call.seqlen_new] * call.batch
    if cu_seqlens_k_new is not None:
        bounds = visible(cu_seqlens_k_new)
        counts = None if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        if bounds and (
            bounds[0] != 0 or bounds[-1] != call.seqlen_new or min(counts, default=0) < 0
        ):
            raise ValueError(
                f"cu_seqlens_k_new must rise from 0 to k's {call.seqlen_new} tokens, got {bounds}"
            )
    return HostValues(
        seqlens, counts, visible(cache_leftpad), visible(cache_batch_idx), visible(page_table)
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
        check_leftpads(call, values)
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


def check_batch_idx(call: CacheCall, batch_idx: list[int]) -> None:
    """Raise unless the cache has these rows, and none of them gets tokens of two sequences."""
    for sequence, row in enumerate(batch_idx):
        if not 0 <= row < call.num_sequences:
            raise ValueError(
                f"cache_batch_idx must be from 0 to {call.num_sequences - 1}, got {row} "
                f"for sequence {sequence}"
            )
    if call.k is not None and len(set(batch_idx)) < call.batch:
        raise ValueError(
            f"cache_batch_idx must not repeat an index when something is appended, got {batch_idx}"
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


def check_leftpads(call: CacheCall, values: HostValues) -> None:
    """Raise unless the padding is part of its sequence."""
    limits = values.seqlens or [call.capacity] * call.batch
    for sequence, (leftpad, limit) in enumerate(zip(values.leftpads, limits, strict=True)):
        if not 0 <= leftpad <= limit:
            raise ValueError(
                f"cache_leftpad must be from 0 to the sequence's length of {limit}, got "
                f"{leftpad} for sequence {sequence}"
            )


def check_positions(call: CacheCall, values: HostValues, query_step: int) -> None:
    """Raise unless the rotary tables reach as far as keys and queries do."""
    positions = call.rotary_cos.shape[0]
    queries = 1 + (call.seqlen_q - 1) * query_step if call.seqlen_q else 0
    counts = values.counts or [0] * call.batch
    for sequence, (seqlen, count) in enumerate(zip(values.seqlens, counts, strict=True)):
        if seqlen + max(count, queries) > positions:
            raise ValueError(
                f"rotary_cos has {positions} positions, sequence {sequence} needs "
                f"{seqlen + max(count, queries)}"
            )


def check_pages(call: CacheCall, values: HostValues) -> None:
    """Raise unless the pages that sequences use exist, and no two append to the same place."""
    num_pages, page_size = call.k_cache.shape[:2]
    rows = values.batch_idx or range(call.batch)
    written: dict[tuple[int, int], int] = {}
    for sequence, row in enumerate(rows):
        seqlen, pages = values.seqlens[sequence], values.pages[row]
        begin = values.leftpads[sequence] if values.leftpads else 0
        end = seqlen + values.counts[sequence]
        for entry in range(begin // page_size, -(-end // page_size)):
            if not 0 <= pages[entry] < num_pages:
                raise ValueError(
                    f"page_table must have pages from 0 to {num_pages - 1} where a sequence has "
                    f"tokens, got {pages[entry]} at ({row}, {entry})"
                )
        for position in range(seqlen, end):
            place = pages[position // page_size], position % page_size
            other = written.setdefault(place, sequence)
            if other != sequence:
                raise ValueError(
                    f"page_table must not give page {place[0]} to sequences {other} and "
                    f"{sequence}, which both append to it"
                )
