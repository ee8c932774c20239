"""Attention to a cache on the CPU: walks the very cut of the keys that the decode kernel walks.

Appending is plain. Attention works off the segments of `fa3.schedules.stream_k` CTA by CTA, keeps
each part's output and log-sum-exp in float32 in its slot, and merges the slots of a tile in the
order of its keys, as `fa3.kernels.combine` does.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from fa3.kernels.append import Append, AppendArguments, Rotary
from fa3.planning.decode import TILE_N, DecodePlan, Sizes
from fa3.primitives.cache_blocks import CacheTables, Keys
from fa3.primitives.coords import Position
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.wgmma import ROWS
from fa3.reference.block_loop import CPU, HostTensor, RunningSoftmax, attend, merge, with_sink
from fa3.reference.functions import lets_through
from fa3.reference.varlen import RaggedOperands
from fa3.schedules.segment import Segment, Tile
from fa3.schedules.sequences import Cached, PackedQueries, capacity_of
from fa3.schedules.stream_k import records, segments
from fa3.scores.masks import Band, Intersection, Mask
from fa3.scores.scores import Score, bind


class CacheOperands(NamedTuple):
    """The tensors of one call, on one device and already validated.

    Fields:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16; with cu_seqlens_q, here and
            below, (total_q, heads_q, head_dim).
        k_cache: (batch_cache, seqlen_cache, heads_kv, head_dim); with a page table
            (num_pages, page_size, heads_kv, head_dim).
        v_cache: like k_cache with head_dim_v.
        out: (batch, seqlen_q, heads_q, head_dim_v), receives the output.
        lse: (batch, heads_q, seqlen_q) float32, receives the log-sum-exp, or None.
        cache_seqlens: (batch,) int32, keys of each sequence; read on the device only. None if
            keys are packed, or the cache is full.
        cache_batch_idx: (batch,) int32, the row of the cache that a sequence has; its own if None.
        cache_leftpad: (batch,) int32, keys before this one are not there.
        page_table: (batch, max_pages) int32.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32, or None.
        sinks: (heads_q,) float32 or q's dtype, or None.
        cu_seqlens_q: (batch + 1,) int32, where the queries of each sequence begin and end.
        seqlen_new: keys that each sequence has beyond those that cache_seqlens says.
        seqused_q: (batch,) int32, how many of packed queries are used, or None.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    seqlen_new: int = 0
    seqused_q: torch.Tensor | None = None


@dataclass(frozen=True)
class HostAppend:
    """`fa3.kernels.append` on CPU tensors."""

    kernel: Append

    @torch.autocast("cpu", enabled=False)
    def __call__(self, *given) -> None:
        """Take `AppendArguments`: write k and v to the cache, the new lengths, rotated queries."""
        call = AppendArguments(*given)
        k, v, k_cache, v_cache, seqlens, new_seqlens, cu_seqlens, batch_idx, page_table = call[:9]
        q, rotated, cos, sin, ends_q, turns, query_step = call[9:]
        rotary, capacity = self.kernel.rotary, tokens_of_sequence(k_cache, page_table)
        for sequence, seqlen in enumerate(seqlens.clamp(0, capacity).tolist()):
            of_sequence = sequence
            if cu_seqlens is not None:
                of_sequence = slice(*cu_seqlens[sequence : sequence + 2].clamp(min=0).tolist())
            room = capacity - seqlen
            new_k, new_v = k[of_sequence][:room], v[of_sequence][:room]
            positions = torch.arange(seqlen, seqlen + len(new_k), device=CPU)
            if rotary is not None:
                turn = seqlen if turns is None else max(0, int(turns[sequence]))
                new_k = rotate(new_k, positions - seqlen + turn, cos, sin, rotary)
                rows = sequence
                if ends_q is not None:
                    rows = slice(*ends_q[sequence : sequence + 2].clamp(min=0).tolist())
                of_queries = turn + query_step * torch.arange(len(q[rows]), device=CPU)
                rotated[rows] = rotate(q[rows], of_queries, cos, sin, rotary)
            outer, inner, exists = find(sequence, positions, batch_idx, page_table, k_cache)
            places = outer[exists], inner[exists]
            k_cache[places], v_cache[places] = new_k[exists], new_v[exists]
            if new_seqlens is not None:
                new_seqlens[sequence] = seqlen + len(new_k)


def tokens_of_sequence(k_cache: torch.Tensor, page_table: torch.Tensor | None) -> int:
    """Tokens that a sequence may have."""
    return capacity_of(k_cache.shape[1], 1 if page_table is None else page_table.shape[1])


def find(
    sequence: int,
    positions: torch.Tensor,
    batch_idx: torch.Tensor | None,
    page_table: torch.Tensor | None,
    k_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and second index in the cache of a sequence's tokens at these positions, and whether
    there is such a place. If not, the indices name another place.
    """
    row = torch.tensor(sequence, device=CPU) if batch_idx is None else batch_idx[sequence]
    table = k_cache if page_table is None else page_table
    exists = (row == row.clamp(0, len(table) - 1)).expand_as(positions)
    outer, inner = row.clamp(0, len(table) - 1).long().expand_as(positions), positions
    if page_table is not None:
        page, inner = page_table[outer, positions // k_cache.shape[1]], inner % k_cache.shape[1]
        outer = page.clamp(0, len(k_cache) - 1).long()
        exists = exists & (page == outer)
    return outer, inner, exists


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary
) -> torch.Tensor:
    """Turn the first columns of x (tokens, heads, head_dim) to its positions."""
    rows = positions.clamp(max=len(cos) - 1)
    cos, sin = (table[rows, None].float() for table in (cos, sin))
    turning, rest = x.split([rotary.dim, x.shape[2] - rotary.dim], dim=2)
    pairs = (-1, 2) if rotary.interleaved else (2, -1)
    first, second = turning.float().unflatten(2, pairs).unbind(3 if rotary.interleaved else 2)
    turned = torch.stack(
        (first * cos - second * sin, second * cos + first * sin), 3 if rotary.interleaved else 2
    )
    return torch.cat((turned.flatten(2).to(x.dtype), rest), dim=2)


@torch.autocast("cpu", enabled=False)
def execute_decode(
    plan: DecodePlan,
    operands: CacheOperands,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Run a plan on CPU tensors.

    Args:
        tensors: of the spec's scores and sinks.
    """
    sizes, leftpad, ends = plan.sizes, operands.cache_leftpad, operands.cu_seqlens_q
    tables, packed = CacheTables(None, as_table(leftpad), None), None
    if ends is not None:
        used = as_table(operands.seqused_q)
        rows = RaggedLengths(HostTensor(ends), used, operands.q.shape[0])
        packed = PackedQueries(rows, sizes.qhead_per_kvhead, ROWS)
    sequences = Cached(
        sizes.batch, as_table(operands.cache_seqlens), operands.seqlen_new, tables, plan.spec.mask,
        sizes.seqlen_q, sizes.capacity, plan.window, TILE_N, packed=packed,
    )  # fmt: skip
    walk_segments(plan, operands, sequences, softmax_scale, tensors)


@torch.autocast("cpu", enabled=False)
def execute_packed_decode(
    plan: DecodePlan,
    operands: RaggedOperands,
    max_seqlen_k: int,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Run a plan for packed keys on CPU tensors; sequences with more queries than the plan has
    room for are left out.

    Args:
        max_seqlen_k: no sequence has more keys.
        tensors: of the spec's scores and sinks.
    """
    q, k, v, out, lse, ends_q, ends_k, used_q, used_k = operands
    queries, keys = (
        RaggedLengths(HostTensor(ends), as_table(used), len(rows))
        for ends, used, rows in ((ends_q, used_q, q), (ends_k, used_k, k))
    )
    sequences = Cached(
        operands.lengths.batch, None, 0, CacheTables(None, None, None), plan.spec.mask,
        plan.sizes.seqlen_q, max_seqlen_k, plan.window, TILE_N,
        packed=PackedQueries(queries, plan.sizes.qhead_per_kvhead, ROWS), packed_keys=keys,
    )  # fmt: skip
    # All sequences are in one row of a cache, each behind what is padding to it.
    of_all = torch.zeros(operands.lengths.batch, dtype=torch.int32, device=CPU)
    cache = CacheOperands(
        q, k[None], v[None], out, lse, None, cache_batch_idx=of_all, cu_seqlens_q=ends_q
    )
    walk_segments(plan, cache, sequences, softmax_scale, tensors)


def as_table(tensor: torch.Tensor | None) -> HostTensor | None:
    return None if tensor is None else HostTensor(tensor)


def walk_segments(
    plan: DecodePlan,
    operands: CacheOperands,
    sequences: Cached,
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None,
) -> None:
    """Attend in every segment of a plan, and merge the parts of tiles."""
    out, sizes, packed = operands.out, plan.sizes, sequences.packed
    scores, mask, sinks = bind(plan.spec, tensors)
    walked = CacheWalk(operands, sizes, softmax_scale, scores, mask, sinks, sequences)
    known = list(map(sequences.read, range(sequences.num_sequences)))
    begins = [of.begin for of in map(sequences.blocks, known)]
    counts = map(sequences.num_blocks, known)
    blocks = [(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    of_rows = None if packed is None else list(map(sequences.m_blocks, known))
    work = plan.cut, blocks, sizes.num_m_blocks, sizes.heads_kv, plan.num_ctas, of_rows
    slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(tile: Tile, rows_out: torch.Tensor, rows_lse: torch.Tensor) -> None:
        query, head = walked.rows(tile)
        out[walked.places(tile, query, head)] = rows_out.to(out.dtype)
        if operands.lse is not None:
            *batch, row, head = walked.places(tile, query, head)
            operands.lse[(*batch, head, row)] = rows_lse

    for _, segment in segments(*work):
        softmax = walked.attend(segment)
        if segment.is_whole:
            store(segment.tile, *softmax.finish(walked.sinks_of(segment.tile)))
        else:
            slots[segment.part.slot] = softmax.finish()
    for _, tile, of_tile in records(*work):
        merged = merge([slots[i] for i in of_tile])
        store(tile, *with_sink(*merged, walked.sinks_of(tile)))


@dataclass(frozen=True)
class CacheWalk:
    """The tiles of one call and what is needed to work on them."""

    operands: CacheOperands
    sizes: Sizes
    softmax_scale: float
    scores: tuple[Score, ...]
    mask: Band | Intersection
    sinks: torch.Tensor | None
    sequences: Cached

    def rows(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and query head of each row of a tile."""
        group = self.sizes.qhead_per_kvhead
        _, seqlen_q = self.sequences.queries(self.sequences.read(tile.batch))
        begin = tile.m_block * ROWS
        rows = torch.arange(begin, max(begin, min(begin + ROWS, seqlen_q * group)), device=CPU)
        return rows // group, tile.head * group + rows % group

    def places(self, tile: Tile, query: torch.Tensor, head: torch.Tensor) -> tuple:
        """Where rows lie in q and out."""
        first, _ = self.sequences.queries(self.sequences.read(tile.batch))
        row = first + query
        return (tile.batch, row, head) if self.sequences.packed is None else (row, head)

    def sinks_of(self, tile: Tile) -> torch.Tensor | None:
        """The sink of each row of a tile."""
        _, head = self.rows(tile)
        return None if self.sinks is None else self.sinks[head].float()

    def attend(self, segment: Segment) -> RunningSoftmax:
        """Attend the rows of a tile to some of its key blocks."""
        tile, (query, head) = segment.tile, self.rows(segment.tile)
        known = self.sequences.read(tile.batch)
        sequence, keys = self.sequences.sequence(known), self.sequences.keys(tile, known)
        ranges = self.sequences.mask.key_range(query.numpy(), sequence)
        first, end = (torch.as_tensor(bound, device=CPU).reshape(-1, 1) for bound in ranges)

        def load(n_block: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.key_block(tile, keys, key)

        def seen(n_block: int, at: Position, key: torch.Tensor) -> torch.Tensor:
            in_band = (key >= first) & (key < end)
            if isinstance(self.mask, Intersection):
                # It is bound, and no template any more.
                function = cast(Mask, self.mask.function)
                return in_band & lets_through(function, at, in_band.shape)
            return in_band

        return attend(
            self.operands.q[self.places(tile, query, head)],
            (tile.batch, head[:, None], query[:, None]),
            sequence, range(segment.begin, segment.end), TILE_N, load, seen, self.scores,
            self.softmax_scale, self.operands.out.shape[-1],
        )  # fmt: skip

    def key_block(
        self, tile: Tile, keys: Keys, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One head's keys and values of a block, and zeros for those that no query may read: they
        may hold anything, and 0 * NaN is not 0.
        """
        operands = self.operands
        is_readable = (key >= keys.first) & (key <= keys.last)
        first, second, _ = find(
            tile.batch,
            keys.leftpad + key[is_readable],
            operands.cache_batch_idx,
            operands.page_table,
            operands.k_cache,
        )
        caches = operands.k_cache, operands.v_cache
        blocks = tuple(cache.new_zeros(len(key), cache.shape[-1]) for cache in caches)
        for block, cache in zip(blocks, caches, strict=True):
            block[is_readable] = cache[first, second, tile.head]
        return blocks
