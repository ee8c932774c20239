"""What is measured: the grid of forward shapes and the named shapes of real models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOKENS = 16384
"""Tokens of every grid cell, whatever its sequence length."""

HIDDEN = 2048
"""Query heads times head dimension in the grid (rounded down to whole heads)."""

HEAD_DIMS = (64, 96, 128, 192, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal")

SHORT_QUERY = 16
"""Up to this many queries a cell is bound by reading K and V, and counted in bytes."""

CACHE_BYTES = 60 << 20
"""L2 of an H200."""

CREDITS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""What passes are credited with, in floating-point operations of the forward pass."""


def count_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window_left: int = -1) -> float:
    """Credited (query, key) pairs of one head of one sequence.

    A square causal mask counts as half of all pairs, as is the custom; every other mask counts
    the pairs that it lets through.
    """
    if not causal:
        return seqlen_q * seqlen_k
    if seqlen_q == seqlen_k and window_left < 0:
        return seqlen_q * seqlen_k / 2
    offset = seqlen_k - seqlen_q
    seen = seqlen_k if window_left < 0 else window_left + 1
    return sum(max(0, min(row + offset + 1, seen)) for row in range(seqlen_q))


def is_decode(seqlen_q: int, seqlen_k: int) -> bool:
    """Whether few queries read so many keys that a call is counted in bytes."""
    return seqlen_q <= SHORT_QUERY < seqlen_k


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape to measure.

    Fields:
        group: "grid", or the key in `NAMED` that it belongs to.
        heads_q, heads_kv: query heads, and key/value heads that they share.
        causal: the mask hides keys after a query, aligned to the bottom right.
        window_left: keys that a query sees before itself; -1 for all of them.
        softcap: bound of the scores; 0 for none.
        passes: what a call computes, a key of `CREDITS`.
        graph: whether calls are replayed from a CUDA graph; None if that depends on their time.
    """

    name: str
    group: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window_left: int = -1
    softcap: float = 0.0
    dtype: str = "bfloat16"
    passes: str = "forward"
    graph: bool | None = None

    @property
    def mask(self) -> str:
        if self.window_left >= 0:
            return f"window {self.window_left}"
        return "causal" if self.causal else "full"

    @property
    def pairs(self) -> float:
        """Credited pairs of one head, on average over the batch."""
        return count_pairs(self.seqlen_q, self.seqlen_k, self.causal, self.window_left)

    @property
    def flops(self) -> float:
        """Credited floating-point operations of one call."""
        products = 2 * (self.head_dim + self.head_dim_v)
        return CREDITS[self.passes] * self.batch * self.heads_q * self.pairs * products

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.seqlen_k * self.heads_kv * (self.head_dim + self.head_dim_v)

    @property
    def is_decode(self) -> bool:
        return is_decode(self.seqlen_q, self.seqlen_k)

    @property
    def num_sets(self) -> int:
        """Input sets to rotate through, so that decoding reads K and V from device memory."""
        return math.ceil(4 * CACHE_BYTES / self.kv_bytes) if self.is_decode else 1

    @property
    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of q, and of k and v, before those of heads."""
        return (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v."""
        rows_q, rows_k = self.rows
        return (
            (*rows_q, self.heads_q, self.head_dim),
            (*rows_k, self.heads_kv, self.head_dim),
            (*rows_k, self.heads_kv, self.head_dim_v),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the forward pass's output."""
        return (*self.rows[0], self.heads_q, self.head_dim_v)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a call returns: its output, or the gradients of q, k and v."""
        return (self.out_shape,) if self.passes == "forward" else self.operand_shapes

    def key_places(self, device: torch.device) -> torch.Tensor:
        """The place of each row of k in its sequence."""
        return torch.arange(self.seqlen_k, device=device)


def grid(head_dims: list[int], masks: list[str], seqlens: list[int]) -> list[Cell]:
    """List the grid: `TOKENS` tokens and `HIDDEN` columns at every length."""
    cells = []
    for head_dim in head_dims:
        for mask in masks:
            for seqlen in seqlens:
                heads = HIDDEN // head_dim
                name = f"d{head_dim}-{mask}-{seqlen}"
                batch = max(1, TOKENS // seqlen)
                sizes = (batch, seqlen, seqlen, heads, heads, head_dim, head_dim)
                cells.append(Cell(name, "grid", *sizes, mask == "causal"))
    return cells


def size(n: int) -> str:
    """Write a length the short way: 8192 is 8k."""
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def named(
    group: str,
    batch: int,
    seqlens: tuple[int, int],
    heads: tuple[int, int],
    head_dims: tuple[int, int] = (128, 128),
    causal: bool = True,
    window_left: int = -1,
) -> Cell:
    """Make a cell of a named group; its name says what differs inside the group."""
    seqlen_q, seqlen_k = seqlens
    lengths = size(seqlen_k) if seqlen_q == seqlen_k else f"{size(seqlen_q)}x{size(seqlen_k)}"
    name = f"{group}-h{heads[0]}.{heads[1]}-{batch}x{lengths}"
    if window_left >= 0:
        name += f"-w{size(window_left)}"
    return Cell(name, group, batch, *seqlens, *heads, *head_dims, causal, window_left)


def square(*seqlens: int) -> list[tuple[int, int]]:
    return [(s, s) for s in seqlens]


K = 1024

FEW_QUERIES_TOKENS = 1 << 20
"""Most keys of a cell of few queries: 4 GB of K and V."""

NAMED: dict[str, list[Cell]] = {
    "llama3-8b": [
        named("llama3-8b", 1, s, (32, 8)) for s in square(K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
    ],
    "llama3-70b-tp8": [
        named("llama3-70b-tp8", 1, s, (8, 1)) for s in square(K, 2 * K, 4 * K, 8 * K)
    ],
    "qwen3-32b": [named("qwen3-32b", 1, (8 * K, 8 * K), (64, 8))],
    "gqa": [named("gqa", TOKENS // s, (s, s), (32, 8)) for s in (2 * K, 8 * K)],
    "cached-prefill": [
        named("cached-prefill", 1, (sq, sk), (32, 8))
        for sk in (8 * K, 32 * K)
        for sq in (128, 512, 640, 1280)
    ],
    "deepseek-prefill": [
        named("deepseek-prefill", 1, s, (128, 128), (192, 128)) for s in square(K, 4 * K)
    ],
    "vit-l": [named("vit-l", 32, (577, 577), (16, 16), (64, 64), causal=False)],
    "flux": [named("flux", 1, (4608, 4608), (24, 24), causal=False)],
    "window": [
        named("window", 1, (16 * K, 16 * K), (16, 16), window_left=left) for left in (K, 4 * K)
    ],
    "few-queries": [
        named("few-queries", batch, (sq, sk), (32, 8))
        for batch in (1, 8, 64)
        for sk in (K, 8 * K, 64 * K)
        for sq in (1, 4, 16, 32, 64, 128)
        if batch * sk <= FEW_QUERIES_TOKENS
    ],
    "short-query": [named("short-query", 16, (sq, 8 * K), (32, 8)) for sq in (2, 4, 8)],
    "decode": [
        named("decode", batch, (1, sk), heads)
        for heads, rows in {
            (32, 8): [
                (1, 8 * K),
                (1, 128 * K),
                (4, 32 * K),
                (16, 8 * K),
                (20, 8 * K),
                (24, 8 * K),
                (33, 8 * K),
                (64, 8 * K),
                (32, 32 * K),
            ],
            (16, 1): [(1, 8 * K), (1, 128 * K), (16, 8 * K), (64, 8 * K)],
            (28, 4): [(5, 3000)],
            (40, 8): [(2, 20 * K)],
            (64, 8): [(48, 4 * K)],
            (8, 1): [(128, 2 * K)],
        }.items()
        for batch, sk in rows
    ],
}
"""Shapes of real models, by group."""

LOW_WAVE_GROUPS = (
    "llama3-70b-tp8",
    "cached-prefill",
    "flux",
    "vit-l",
    "window",
    "qwen3-32b",
    "deepseek-prefill",
)

SETS: dict[str, list[Cell]] = {
    "low-wave": NAMED["llama3-8b"][:3] + [cell for name in LOW_WAVE_GROUPS for cell in NAMED[name]],
}
"""Selections over the groups. low-wave: few or unequal tiles, where their order matters."""


def choose(names: Sequence[str], grid_cells: list[Cell]) -> list[Cell]:
    """The cells of groups and sets, each once, in the order in which they are asked for.

    Args:
        names: "grid" for `grid_cells`, names of `NAMED` and `SETS`, or "all".
    """
    if "all" in names:
        names = ["grid", *NAMED]
    groups = {"grid": grid_cells, **NAMED, **SETS}
    return list({cell.name: cell for name in names for cell in groups[name]}.values())


CHOICES = ("grid", *NAMED, *SETS, "all")
"""What `choose` takes."""


def window_size(cell: Cell) -> tuple[int, int]:
    """The window in FlashAttention's convention."""
    return (cell.window_left, 0) if cell.window_left >= 0 else (-1, -1)
