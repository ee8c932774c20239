"""What `bench_varlen` measures: cells of packed sequences, and who attends inside of them.

Inputs are packed: the rows of q, k and v of one sequence after another. From them providers make
what they take: a batch of equal lengths, contiguous caches with room for the longest sequence, or
pages in random places. Outputs are packed again.
"""

import functools
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import fa3
from benchmarks import harness, peers
from benchmarks.caches import skewed_lengths
from benchmarks.harness import PartsReference
from benchmarks.peers import Call, Provider, Tensors
from benchmarks.problems import plan_name
from benchmarks.shapes import Cell, K, count_pairs, size

PAGE_SIZES = (16, 64)

CHECKED_SEQUENCES = 16
"""Sequences of a cell that are compared with a reference, beside its shortest and longest."""


@dataclass(frozen=True, slots=True)
class PackedCell(Cell):
    """Sequences one after another; seqlen_q and seqlen_k are those of the longest.

    Fields:
        lengths_q, lengths_k: of each sequence.
    """

    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()

    @property
    def pairs(self) -> float:
        """Credited pairs of one head, on average over the sequences."""
        lengths = zip(self.lengths_q, self.lengths_k, strict=True)
        return sum(count_pairs(*pair, self.causal) for pair in lengths) / self.batch

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all sequences."""
        return 2 * sum(self.lengths_k) * self.heads_kv * (self.head_dim + self.head_dim_v)

    @property
    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of q, and of k and v, before those of heads."""
        return (sum(self.lengths_q),), (sum(self.lengths_k),)

    def key_places(self, device: torch.device) -> torch.Tensor:
        """The place of each row of k in its sequence."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths_k])

    @property
    def is_cached(self) -> bool:
        """Whether sequences have keys from before, as in a cache."""
        return self.lengths_q != self.lengths_k

    @property
    def has_equal_queries(self) -> bool:
        return len(set(self.lengths_q)) == 1

    @property
    def label(self) -> str:
        """What it is, for a table."""
        return f"{self.name}, {self.heads_q}/{self.heads_kv}, {self.mask}"


def pack(
    name: str,
    group: str,
    heads: tuple[int, int],
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] = (),
    causal: bool = True,
) -> PackedCell:
    """Make a cell of heads of 128; without `lengths_k` a sequence has as many keys as queries."""
    lengths_q, lengths_k = tuple(lengths_q), tuple(lengths_k or lengths_q)
    sizes = len(lengths_q), max(lengths_q), max(lengths_k), *heads, 128, 128
    return PackedCell(name, group, *sizes, causal, lengths_q=lengths_q, lengths_k=lengths_k)


def equal(batch: int, length: int, causal: bool) -> PackedCell:
    """Sequences of one length, as a dense call has them."""
    name = f"equal-{'causal' if causal else 'full'}-{batch}x{size(length)}"
    return pack(name, "equal", (16, 16), [length] * batch, causal=causal)


def lognormal(tokens: int) -> PackedCell:
    """Lengths from a lognormal distribution, 1k on average."""
    return pack(f"lognormal-{size(tokens)}", "skewed", (16, 16), skewed_lengths(tokens // K, K))


def chat() -> PackedCell:
    """500 prompts of exponential length, 300 on average."""
    draw = random.Random(0)
    lengths = [1 + round(draw.expovariate(1 / 299)) for _ in range(500)]
    return pack("chat-500", "skewed", (32, 8), lengths)


def short() -> PackedCell:
    """8192 sequences of at most 16 tokens."""
    draw = random.Random(0)
    return pack("short-8192x1..16", "short", (16, 16), [draw.randint(1, 16) for _ in range(8192)])


def chunked_prefill() -> PackedCell:
    """One step of a server: chunks of long prompts beside sequences that decode."""
    contexts = [0, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K]
    decoding = skewed_lengths(64, 4 * K)
    chunks = [context + 512 for context in contexts]
    lengths_q = [*[512] * len(chunks), *[1] * len(decoding)]
    return pack("chunks-7x512+64x1", "cache", (32, 8), lengths_q, [*chunks, *decoding])


CELLS = [
    *(
        equal(batch, length, causal)
        for causal in (True, False)
        for batch, length in ((4, 4 * K), (16, K), (32, 512), (1, 16 * K))
    ),
    *map(lognormal, (16 * K, 64 * K, 256 * K)),
    # The long one comes last, where it hurts an order that goes by place.
    pack("long-128x128+1x16k", "skewed", (16, 16), [*[128] * 128, 16 * K]),
    chat(),
    short(),
    pack("short-8192x34", "short", (16, 16), [34] * 8192),
    chunked_prefill(),
    # Few tiles, as one of eight GPUs has that share the heads of a large model.
    pack("few-1x2k", "few", (8, 1), [2 * K]),
    pack("few-512of32k", "cache", (8, 1), [512], [32 * K]),
    pack("decode-64x8k", "cache", (32, 8), [1] * 64, [8 * K] * 64, causal=False),
]

BY_NAME = {cell.name: cell for cell in CELLS}


def integers_on(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """0, then where each sequence ends."""
    return integers_on([0, *lengths], device).cumsum(0, dtype=torch.int32)


def packed_lengths(cell: PackedCell, device: torch.device) -> dict[str, object]:
    """What a call on packed sequences is told of their lengths."""
    return {
        "cu_seqlens_q": ends_of(cell.lengths_q, device),
        "cu_seqlens_k": ends_of(cell.lengths_k, device),
        "max_seqlen_q": cell.seqlen_q,
        "max_seqlen_k": cell.seqlen_k,
    }


def in_caches(cell: PackedCell, packed: torch.Tensor) -> torch.Tensor:
    """K or V in caches that have room for the longest sequence, with zeros behind the others."""
    lengths = integers_on(cell.lengths_k, packed.device)
    cache = packed.new_zeros(cell.batch, cell.seqlen_k, *packed.shape[1:])
    cache[torch.arange(cell.seqlen_k, device=packed.device) < lengths[:, None]] = packed
    return cache


def in_pages(
    cell: PackedCell, tensors: Tensors, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put K and V into pages in random places; give both and the page table."""
    device = tensors.k.device
    lengths = integers_on(cell.lengths_k, device).long()
    counts = -(-lengths // page_size)
    num_pages = int(counts.sum())
    generator = torch.Generator(device).manual_seed(0)
    places = torch.randperm(num_pages, device=device, generator=generator)
    # Of every key: the page of its sequence that it is in, and its row there.
    first_page = (counts.cumsum(0) - counts).repeat_interleave(lengths)
    at = cell.key_places(device)
    rows = places[first_page + at // page_size] * page_size + at % page_size
    pages = []
    for packed in tensors[1:]:
        pool = packed.new_zeros(num_pages * page_size, *packed.shape[1:])
        pool[rows] = packed
        pages.append(pool.view(num_pages, page_size, *packed.shape[1:]))
    table = torch.zeros(cell.batch, int(counts.max()), dtype=torch.int32, device=device)
    table[torch.arange(table.shape[1], device=device) < counts[:, None]] = places.int()
    return *pages, table


def queries_of_caches(cell: PackedCell, q: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
    """q as `flash_attn_with_kvcache` takes it, and what a call is told of it."""
    if cell.has_equal_queries:
        return q.view(cell.batch, cell.seqlen_q, *q.shape[1:]), {}
    ends = ends_of(cell.lengths_q, q.device)
    return q, {"cu_seqlens_q": ends, "max_seqlen_q": cell.seqlen_q}


def packed_again(call: Call, cell: PackedCell) -> Call:
    """A call whose output is packed."""
    return lambda: call().view(cell.out_shape)


class Ours:
    """This package on packed sequences, with options of it."""

    version: ClassVar[str] = fa3.__version__
    is_peer: ClassVar[bool] = False

    def __init__(self, name: str = "fa3", **options: object) -> None:
        self.name, self.options = name, options

    def supports(self, cell: PackedCell) -> str | None:
        return None

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        lengths = packed_lengths(cell, tensors.q.device)
        call = functools.partial(
            fa3.flash_attn_varlen_func, *tensors, **lengths, causal=cell.causal, **self.options
        )
        return {"": call}


class Dense(Ours):
    """The same call on a batch of equal lengths."""

    def supports(self, cell: PackedCell) -> str | None:
        return None if cell.group == "equal" else "not a batch of equal lengths"

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        batch = [tensor.unflatten(0, (cell.batch, -1)) for tensor in tensors]
        call = functools.partial(fa3.flash_attn_func, *batch, causal=cell.causal)
        return {plan_name(cell): packed_again(call, cell)}


class Cached(Ours):
    """`flash_attn_with_kvcache` on contiguous caches."""

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        return {"": packed_again(call_on_caches(fa3.flash_attn_with_kvcache, cell, tensors), cell)}


class Paged(Ours):
    """`flash_attn_varlen_func` on pages."""

    def __init__(self, page_size: int) -> None:
        super().__init__(f"fa3-page{page_size}")
        self.page_size = page_size

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        k, v, table = in_pages(cell, tensors, self.page_size)
        lengths = packed_lengths(cell, k.device) | {"cu_seqlens_k": None}
        used = integers_on(cell.lengths_k, k.device)
        call = functools.partial(
            fa3.flash_attn_varlen_func, tensors.q, k, v, **lengths, seqused_k=used,
            page_table=table, causal=cell.causal,
        )  # fmt: skip
        return {"": call}


def call_on_caches(attend: Call, cell: PackedCell, tensors: Tensors, **options: object) -> Call:
    """A call of a `flash_attn_with_kvcache` on contiguous caches."""
    q, query_options = queries_of_caches(cell, tensors.q)
    caches = (in_caches(cell, packed) for packed in tensors[1:])
    used = integers_on(cell.lengths_k, q.device)
    return functools.partial(
        attend, q, *caches, cache_seqlens=used, **query_options, causal=cell.causal, **options
    )


class Fa3Cpp(peers.Fa3Cpp):
    """FlashAttention-3 in C++: on packed sequences, or on contiguous caches."""

    def __init__(self) -> None:
        super().__init__()
        package = importlib.import_module("fa3_fwd_interface")
        self.attend = package.flash_attn_varlen_func
        self.attend_caches = package.flash_attn_with_kvcache

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        if cell.is_cached:
            call = packed_again(call_on_caches(self.attend_caches, cell, tensors), cell)
            return {"auto splits": call}
        lengths = packed_lengths(cell, tensors.q.device)
        attend = functools.partial(self.attend, *tensors, **lengths, causal=cell.causal)
        return {
            "auto splits": functools.partial(attend, num_splits=0),
            "1 split": functools.partial(attend, num_splits=1),
        }


class Fa4Cute(peers.Fa4Cute):
    """FlashAttention-4 in CuTe DSL: on packed sequences, or on contiguous caches."""

    def __init__(self, name: str = "fa4-cute", **options: object) -> None:
        super().__init__(name, **options)
        self.attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def prepare(self, cell: PackedCell, tensors: Tensors) -> dict[str, Call]:
        q, k, v = tensors
        lengths = packed_lengths(cell, q.device)
        if cell.is_cached:
            k, v = in_caches(cell, k), in_caches(cell, v)
            lengths["cu_seqlens_k"] = None
            lengths["seqused_k"] = integers_on(cell.lengths_k, q.device)

        def call() -> torch.Tensor:
            out, _ = self.attend(q, k, v, **lengths, causal=cell.causal, **self.options)
            return out

        return {"": call}


PACKED, DENSE, CACHED = "fa3", "fa3-dense", "fa3-kvcache"
OURS = [Ours(PACKED, num_splits=0), Dense(DENSE), Cached(CACHED), *map(Paged, PAGE_SIZES)]
PEERS = {kind.name: kind for kind in (Fa3Cpp, Fa4Cute)}
NAMES = (*(one.name for one in OURS), *PEERS)


def providers_of(
    cell: PackedCell, found: Sequence[Provider], only: Sequence[str]
) -> list[Provider]:
    """Who is measured on a cell.

    Args:
        found: the peers that could be imported.
        only: names to keep; all if empty.
    """
    packed, dense, *on_caches = OURS
    beside = on_caches if cell.is_cached else [dense] if dense.supports(cell) is None else []
    return [one for one in (packed, *beside, *found) if not only or one.name in only]


def shrink(cell: PackedCell) -> PackedCell:
    """A small cell that runs on the same kernels.

    FlashAttention-4 has others for more than 256 sequences, and where 128 rows hold all queries of
    a sequence.
    """
    pairs = list(zip(cell.lengths_q, cell.lengths_k, strict=True))[:300]
    lengths_q = tuple(min(queries, 200) for queries, _ in pairs)
    lengths_k = tuple(min(keys, 200 if keys == queries else 400) for queries, keys in pairs)
    sizes = {"batch": len(lengths_q), "seqlen_q": max(lengths_q), "seqlen_k": max(lengths_k)}
    return replace(cell, name="", group="", **sizes, lengths_q=lengths_q, lengths_k=lengths_k)


def checked_sequences(cell: PackedCell) -> list[int]:
    """Some sequences, first, last, shortest and longest among them."""
    last = cell.batch - 1
    spread = {round(i * last / (CHECKED_SEQUENCES - 1)) for i in range(CHECKED_SEQUENCES)}
    by_keys = sorted(range(cell.batch), key=cell.lengths_k.__getitem__)
    return sorted(spread | {by_keys[0], by_keys[-1]})


def sequence_of(cell: PackedCell, i: int, tensors: Tensors) -> tuple[slice, Cell, Tensors]:
    """The rows of a sequence's queries, its cell, and its tensors as a batch of one."""
    begin_q, begin_k = sum(cell.lengths_q[:i]), sum(cell.lengths_k[:i])
    rows_q = slice(begin_q, begin_q + cell.lengths_q[i])
    rows_k = slice(begin_k, begin_k + cell.lengths_k[i])
    one = replace(
        cell, batch=1, seqlen_q=cell.lengths_q[i], seqlen_k=cell.lengths_k[i],
        lengths_q=cell.lengths_q[i : i + 1], lengths_k=cell.lengths_k[i : i + 1],
    )  # fmt: skip
    q, k, v = tensors
    return rows_q, one, Tensors(q[rows_q][None], k[rows_k][None], v[rows_k][None])


class PackedReference(PartsReference):
    """What a cell's output should be, on some heads of some sequences."""

    def __init__(self, cell: PackedCell, tensors: Tensors) -> None:
        parts = []
        for i in checked_sequences(cell):
            rows, one, sequence_tensors = sequence_of(cell, i, tensors)
            parts.append((rows, harness.Reference(one, sequence_tensors)))
        super().__init__(parts)
