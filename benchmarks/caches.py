"""What `bench_decode` measures: cells of key/value caches, and who attends to them.

Providers are ours on contiguous caches and on pages, peers as far as they take caches, and a stream
of plain reads that shows what the memory gives.
"""

import functools
import importlib
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import torch

import fa3
from benchmarks import harness, peers
from benchmarks.harness import PartsReference
from benchmarks.peers import Call, Provider, Tensors
from benchmarks.shapes import NAMED, Cell, K, named, size

PAGE_SIZES = (1, 16, 64, 128, 256)

READ_BYTES = 2 << 30
"""What the stream of plain reads goes through."""


@dataclass(frozen=True, slots=True)
class DecodeCell(Cell):
    """A cell whose sequences fill their caches as far as `lengths` says; seqlen_k is the room."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, cell: Cell, lengths: tuple[int, ...] = ()) -> "DecodeCell":
        """Give a cell lengths, by default full caches. One query alone needs no mask."""
        lengths = lengths or (cell.seqlen_k,) * cell.batch
        return cls(**asdict(cell) | {"causal": cell.seqlen_q > 1, "lengths": lengths})

    @property
    def is_full(self) -> bool:
        return min(self.lengths) == self.seqlen_k

    @property
    def pairs(self) -> float:
        """Pairs of one head that the mask lets through, on average over the sequences."""
        hidden = self.seqlen_q * (self.seqlen_q - 1) / 2 if self.causal else 0
        return self.seqlen_q * sum(self.lengths) / self.batch - hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that the lengths name."""
        return 2 * sum(self.lengths) * self.heads_kv * (self.head_dim + self.head_dim_v)

    @property
    def label(self) -> str:
        """What it is, for a table."""
        keys = size(sum(self.lengths) // self.batch)
        text = f"{self.heads_q}/{self.heads_kv}, {self.batch} x {keys}"
        if not self.is_full:
            text += f" ({min(self.lengths)} to {max(self.lengths)})"
        return text if self.seqlen_q == 1 else f"{text}, {self.seqlen_q} queries"


def skewed_lengths(batch: int, mean: int, sigma: float = 1.0) -> tuple[int, ...]:
    """Lengths at even quantiles of a lognormal distribution, `mean` on average, shuffled."""
    normal = statistics.NormalDist(0, sigma)
    weights = [math.exp(normal.inv_cdf((i + 0.5) / batch)) for i in range(batch)]
    lengths = [round(weight * batch * mean / sum(weights)) for weight in weights]
    lengths[-1] += batch * mean - sum(lengths)
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def skewed(batch: int, mean: int, heads: tuple[int, int]) -> DecodeCell:
    """Sequences of unequal length in caches that have room for the longest."""
    lengths = skewed_lengths(batch, mean)
    room = -(-max(lengths) // K) * K
    return DecodeCell.of(named("skewed", batch, (1, room), heads), lengths)


def spread(batch: int, longest: int, heads: tuple[int, int]) -> DecodeCell:
    """Sequences of evenly spaced lengths from 1 on, shuffled."""
    lengths = [1 + round(i * (longest - 1) / (batch - 1)) for i in range(batch)]
    random.Random(0).shuffle(lengths)
    return DecodeCell.of(named("spread", batch, (1, longest), heads), tuple(lengths))


CELLS = [
    *map(DecodeCell.of, NAMED["decode"]),
    DecodeCell.of(named("decode", 1, (1, 1024 * K), (32, 8))),
    DecodeCell.of(named("decode", 40, (1, 3 * K), (32, 4))),
    *map(DecodeCell.of, NAMED["short-query"]),
    skewed(64, 8 * K, (32, 8)),
    spread(64, 16 * K, (32, 8)),
]

PAGED_CELL = "decode-h32.8-16x1x8k"
"""Where every page size is measured beside the contiguous cache."""


def lengths_on(cell: DecodeCell, device: torch.device) -> torch.Tensor:
    return torch.tensor(cell.lengths, dtype=torch.int32, device=device)


def in_pages(tensors: Tensors, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut K and V into pages in random places; give both and the page table."""
    batch, seqlen, heads_kv, _ = tensors.k.shape
    device = tensors.k.device
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(batch * seqlen // page_size, device=device, generator=generator)
    k, v = (
        tensor.reshape(-1, page_size, heads_kv, tensor.shape[-1])[order]
        for tensor in (tensors.k, tensors.v)
    )
    return k, v, order.argsort().int().view(batch, -1)


@dataclass(frozen=True)
class Ours:
    """This package, on a contiguous cache or one of pages, in q's dtype or in FP8."""

    name: str
    page_size: int = 0
    batch_invariant: bool = False
    is_fp8: bool = False

    version: ClassVar[str] = fa3.__version__
    is_peer: ClassVar[bool] = False

    def supports(self, cell: DecodeCell) -> str | None:
        return None

    def prepare(self, cell: DecodeCell, tensors: Tensors) -> dict[str, Call]:
        q, k, v = tensors
        table = None
        if self.page_size:
            k, v, table = in_pages(tensors, self.page_size)
        if self.is_fp8:
            k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (k, v))
        call = functools.partial(
            fa3.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths_on(cell, q.device),
            page_table=table, causal=cell.causal, batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return {"": call}


class Fa3Cpp(peers.Fa3Cpp):
    """FlashAttention-3 in C++; where caches are full, also without being told lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = importlib.import_module("fa3_fwd_interface").flash_attn_with_kvcache

    def prepare(self, cell: DecodeCell, tensors: Tensors) -> dict[str, Call]:
        attend = functools.partial(self.attend, *tensors, causal=cell.causal, num_splits=0)
        lengths = lengths_on(cell, tensors.q.device)
        calls = {"lengths": functools.partial(attend, cache_seqlens=lengths)}
        return calls | {"full": attend} if cell.is_full else calls


class Cudnn(peers.Cudnn):
    """cuDNN through PyTorch's scaled_dot_product_attention, on full caches."""

    def supports(self, cell: DecodeCell) -> str | None:
        return super().supports(cell) if cell.is_full else "PyTorch takes no lengths of caches"


class Fa4Cute(peers.Fa4Cute):
    """FlashAttention-4 in CuTe DSL, which does not split keys on Hopper."""

    def __init__(self) -> None:
        super().__init__()
        self.attend_lengths = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def prepare(self, cell: DecodeCell, tensors: Tensors) -> dict[str, Call]:
        if cell.is_full:
            return super().prepare(cell, tensors)
        lengths = lengths_on(cell, tensors.q.device)

        def call() -> torch.Tensor:
            out, _ = self.attend_lengths(*tensors, seqused_k=lengths, causal=cell.causal)
            return out

        return {"": call}


class Read:
    """No attention: a stream of reads by PyTorch, the fastest of its kernels."""

    name = "read"
    version = torch.__version__
    is_peer = False

    @functools.cached_property
    def matrix(self) -> torch.Tensor:
        return torch.randn(READ_BYTES // 4 // 4096, 4096, device="cuda")

    def supports(self, cell: DecodeCell) -> str | None:
        return None

    def prepare(self, cell: DecodeCell, tensors: Tensors) -> dict[str, Call]:
        vector = torch.randn(4096, device="cuda")
        return {"sum": self.matrix.sum, "mv": functools.partial(torch.mv, self.matrix, vector)}


def page_name(page_size: int, batch_invariant: bool = False) -> str:
    return f"fa3-page{page_size}" + ("-invariant" if batch_invariant else "")


DEFAULT, INVARIANT, FP8 = "fa3", "fa3-invariant", "fa3-fp8"
OURS = [Ours(DEFAULT), Ours(INVARIANT, batch_invariant=True), Ours(FP8, is_fp8=True)]
PAGED = [
    Ours(page_name(page_size, batch_invariant), page_size, batch_invariant)
    for page_size in PAGE_SIZES
    for batch_invariant in (False, True)
]
READ = Read()
PEERS = {kind.name: kind for kind in (Fa3Cpp, Cudnn, Fa4Cute)}
NAMES = (*(one.name for one in OURS + PAGED), *PEERS)


def providers_of(cell: DecodeCell, found: list[Provider], only: Sequence[str]) -> list[Provider]:
    """Who is measured on a cell, the stream of reads beside any of them.

    Args:
        found: the peers that could be imported.
        only: names to keep; all if empty.
    """
    ours = OURS + PAGED if cell.name == PAGED_CELL else OURS
    chosen = [one for one in (*ours, *found) if not only or one.name in only]
    return [*chosen, READ] if chosen else []


def in_fp8(tensors: Tensors) -> Tensors:
    """Return the tensors whose keys and values are what an FP8 cache holds."""
    k, v = (tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for tensor in tensors[1:])
    return Tensors(tensors.q, k, v)


class CacheReference(PartsReference):
    """What a cell's output should be, on some heads of some sequences of every length."""

    def __init__(self, cell: DecodeCell, tensors: Tensors) -> None:
        lengths = cell.lengths
        picks = {0, cell.batch - 1, lengths.index(min(lengths)), lengths.index(max(lengths))}
        parts = []
        for i in sorted(picks):
            q, k, v = (tensor[i : i + 1] for tensor in tensors)
            one = replace(cell, batch=1, seqlen_k=lengths[i], lengths=lengths[i : i + 1])
            seen = Tensors(q, k[:, : lengths[i]], v[:, : lengths[i]])
            parts.append((slice(i, i + 1), harness.Reference(one, seen)))
        super().__init__(parts)
