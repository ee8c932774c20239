"""Calls on key/value caches that tests draw, and their tensors."""

import random
from dataclasses import dataclass

import torch
from problems import DTYPES

from fa3.problem import NO_BOUND

NO_PAGE = (-1, 1 << 20, 2**31 - 1, -(2**31))
"""What stands in entries of a page table that no sequence uses."""


@dataclass(frozen=True)
class CacheProblem:
    """What is asked of `flash_attn_with_kvcache`, without tensors.

    Fields:
        seqlens: tokens of each sequence before the call.
        counts: tokens that each gets; None if nothing is appended.
        ragged: whether they come with cu_seqlens_k_new; otherwise the counts are equal.
        page_size: tokens of a page; None for a cache without pages.
        room: tokens that a sequence can have beyond the longest.
        rotary: (dim, interleaved, dtype of the tables), or None.
        batch_idx: the row of each sequence, of `rows`; None if it is its own.
        alibi: rank of the slopes, or None.
        sinks: dtype of the sinks, or None.
    """

    seqlens: tuple[int, ...]
    seqlen_q: int = 1
    counts: tuple[int, ...] | None = None
    ragged: bool = False
    dtype: str = "bfloat16"
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    page_size: int | None = None
    room: int = 7
    rotary: tuple[int, bool, str] | None = None
    leftpads: tuple[int, ...] | None = None
    batch_idx: tuple[int, ...] | None = None
    rows: int | None = None
    causal: bool = False
    window: tuple[int, int] = (NO_BOUND, NO_BOUND)
    softcap: float = 0.0
    alibi: int | None = None
    sinks: str | None = None
    softmax_scale: float | None = None

    @property
    def columns_v(self) -> int:
        """Values are as wide as keys unless told."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def totals(self) -> list[int]:
        """Tokens of each sequence after the call."""
        return [n + m for n, m in zip(self.seqlens, self.counts or [0] * self.batch, strict=True)]

    @property
    def num_rows(self) -> int:
        """Rows of the cache, or of the page table."""
        return self.batch if self.batch_idx is None else self.rows

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        wanted = max(self.totals) + self.room
        size = self.page_size or 1
        return -(-wanted // size) * size


def make_call(problem: CacheProblem, seed: int = 0, device="cpu") -> dict:
    """Draw the arguments of a call; its tensors are NaN wherever no sequence has a token."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[problem.dtype]
    draw = random.Random(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    heads_q = problem.heads_kv * problem.group
    call = {
        "q": normal(problem.batch, problem.seqlen_q, heads_q, problem.head_dim),
        "cache_seqlens": integers(problem.seqlens),
        "causal": problem.causal,
        "window_size": problem.window,
        "softcap": problem.softcap,
        "softmax_scale": problem.softmax_scale,
    }
    call |= make_cache(problem, call["q"], normal, integers, draw)
    if problem.counts is not None:
        shape = problem.batch, problem.counts[0] if problem.counts else 0
        if problem.ragged:
            shape = (sum(problem.counts),)
            ends = [sum(problem.counts[:n]) for n in range(problem.batch + 1)]
            call["cu_seqlens_k_new"] = integers(ends)
        call["k"] = normal(*shape, problem.heads_kv, problem.head_dim)
        call["v"] = normal(*shape, problem.heads_kv, problem.columns_v)
    if problem.rotary is not None:
        dim, interleaved, table_dtype = problem.rotary
        positions = max(problem.capacity, max(problem.seqlens) + problem.seqlen_q)
        angles = 3.14 * normal(positions, dim // 2, dtype=torch.float32)
        call["rotary_cos"], call["rotary_sin"] = (
            table.to(DTYPES.get(table_dtype, torch.float32))
            for table in (angles.cos(), angles.sin())
        )
        call["rotary_interleaved"] = interleaved
    if problem.leftpads is not None:
        call["cache_leftpad"] = integers(problem.leftpads)
    if problem.batch_idx is not None:
        call["cache_batch_idx"] = integers(problem.batch_idx)
    if problem.alibi is not None:
        shape = (heads_q,) if problem.alibi == 1 else (problem.batch, heads_q)
        call["alibi_slopes"] = 0.1 * normal(*shape, dtype=torch.float32).abs()
    if problem.sinks is not None:
        call["sinks"] = normal(heads_q, dtype=DTYPES.get(problem.sinks, torch.float32))
    return call


def make_cache(
    problem: CacheProblem, like: torch.Tensor, normal, integers, draw: random.Random
) -> dict:
    """Draw caches, and the page table if there is one."""
    rows = range(problem.batch) if problem.batch_idx is None else problem.batch_idx
    size = problem.page_size or problem.capacity
    pages_of_row = problem.capacity // size if size else 0
    used = [0] * problem.num_rows
    for row, total in zip(rows, problem.totals, strict=True):
        used[row] = max(used[row], total)
    num_pages = (
        problem.num_rows
        if problem.page_size is None
        else 2 + sum(-(-tokens // size) for tokens in used)
    )
    free = draw.sample(range(num_pages), num_pages)
    table = [
        [
            free.pop() if page * size < tokens else draw.choice(NO_PAGE)
            for page in range(pages_of_row)
        ]
        for tokens in used
    ]
    if problem.page_size is None:
        table = [[row] for row in range(problem.num_rows)]
    shape = num_pages, size, problem.heads_kv
    caches = [
        torch.full((*shape, columns), torch.nan, dtype=like.dtype, device=like.device)
        for columns in (problem.head_dim, problem.columns_v)
    ]
    leftpads = problem.leftpads or [0] * problem.batch
    for row, seqlen, leftpad in zip(rows, problem.seqlens, leftpads, strict=True):
        for page in range(-(-seqlen // size) if size else 0):
            tokens = slice(max(0, leftpad - page * size), min(size, seqlen - page * size))
            if tokens.start < tokens.stop:
                for cache in caches:
                    part = cache[table[row][page], tokens]
                    part.copy_(normal(*part.shape))
    call = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    if problem.page_size is not None:
        # Rows of a wider table, as a server's are.
        wide = integers([[*row, *NO_PAGE] for row in table])
        call["page_table"] = wide[:, :pages_of_row]
    return call


def random_problem(
    seed: int, dtype: str, family: int, lengths=(0, 1, 20, 300, 3000)
) -> CacheProblem:
    """Draw any combination of options.

    What changes the generated code follows from the family, since each takes seconds to compile.
    """
    code, draw = random.Random(f"{family} {dtype}"), random.Random(f"{seed} {dtype}")
    head_dim, head_dim_v = code.choice(
        ((64, 64), (128, 128), (128, 128), (256, 256), (192, 128), (96, 80), (8, 40))
    )
    batch = draw.choice((1, 1, 2, 3, 9))
    seqlen_q = draw.choice((1, 1, 2, 5, draw.randint(1, 80)))
    longest = draw.choice(lengths)
    seqlens = tuple(draw.randint(0, longest) for _ in range(batch))

    appends, ragged, turns = (code.random() < chance for chance in (0.5, 0.3, 0.6))
    counts = rotary = None
    if appends:
        count = draw.choice((seqlen_q, 1, draw.randint(0, 40)))
        counts = tuple(draw.randint(0, 5) if ragged else count for _ in range(batch))
        if turns and head_dim >= 16:
            dims = [dim for dim in (16, 32, 64, head_dim) if dim <= head_dim]
            rotary = code.choice(dims), code.random() < 0.5, code.choice((dtype, "float32"))
    batch_idx = rows = leftpads = None
    if code.random() < 0.3:
        rows = batch + draw.randint(0, 3)
        batch_idx = tuple(draw.sample(range(rows), batch))
        if not appends and draw.random() < 0.5:
            batch_idx = tuple(draw.choice(batch_idx) for _ in range(batch))
    if code.random() < 0.2:
        # Keys before the padding are NaN, also those of a row that sequences share.
        shared = batch_idx is not None and len(set(batch_idx)) < batch
        leftpads = tuple(0 if shared else draw.randint(0, seqlen) for seqlen in seqlens)
    kind = code.choice(("none", "causal", "causal", "window", "left"))
    window = {
        "window": (draw.randint(0, longest), draw.randint(0, 30)),
        "left": (draw.choice((0, draw.randint(0, longest))), NO_BOUND),
    }.get(kind, (NO_BOUND, NO_BOUND))
    return CacheProblem(
        seqlens=seqlens,
        seqlen_q=seqlen_q,
        counts=counts,
        ragged=ragged and appends,
        dtype=dtype,
        heads_kv=draw.randint(1, 3),
        group=code.choice((1, 4, 8, 16)),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=code.choice((None, None, 1, 2, 16, 48, 64, 128, 256)),
        room=draw.choice((0, 1, 50)),
        rotary=rotary,
        leftpads=leftpads,
        batch_idx=batch_idx,
        rows=rows,
        causal=kind == "causal",
        window=window,
        softcap=code.choice((0.0, 0.0, 0.0, 20.0)),
        alibi=code.choice((None, None, None, 1, 2)),
        sinks=code.choice((None, None, None, "float32", dtype)),
        softmax_scale=draw.choice((None, 0.3)),
    )
