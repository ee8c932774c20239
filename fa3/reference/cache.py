"""Attention to a cache on the CPU: the very segments that the decode kernel works on, as steps.

Appending is plain. Attention takes the segments of `fa3.schedules.stream_k` CTA by CTA; the walker
merges the parts of a tile in the order of its keys, as `fa3.kernels.combine` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fa3.kernels.append import Append, AppendArguments, Rotary
from fa3.planning.decode import TILE_N, DecodePlan
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.wgmma import ROWS
from fa3.reference.varlen import RaggedOperands
from fa3.reference.walker import CPU, HostTensor, SequenceRows, Step, Walker, on_pages
from fa3.schedules.sequences import Cached, PackedQueries, capacity_of
from fa3.schedules.stream_k import segments
from fa3.scores.masks import Blocks

NO_TABLES = CacheTables(None, None, None)  # of sequences that are packed, or a whole cache each


@dataclass(frozen=True)
class HostAppend:
    """`fa3.kernels.append` on CPU tensors."""

    kernel: Append

    @torch.autocast("cpu", enabled=False)
    def __call__(self, *arguments) -> None:
        """Take `AppendArguments`: write k and v to the cache, the new lengths, rotated queries."""
        call, rotary = AppendArguments(*arguments), self.kernel.rotary
        (places, page_size), table = call.k_cache.shape[:2], call.page_table
        capacity = capacity_of(page_size, 1 if table is None else table.shape[1])
        rows = places if table is None else len(table)
        # Tokens without a place in the cache are not appended.
        for sequence, seqlen in enumerate(call.seqlens.clamp(0, capacity).tolist()):
            tokens = rows_of_sequence(sequence, call.cu_seqlens)
            new_k, new_v = (x[tokens][: capacity - seqlen] for x in (call.k, call.v))
            if rotary is not None:
                turns, queries = call.rotary_seqlens, rows_of_sequence(sequence, call.cu_seqlens_q)
                turn = seqlen if turns is None else max(0, int(turns[sequence]))
                tables, q = (call.cos, call.sin), call.q[queries]
                new_k = rotate(new_k, turn + torch.arange(len(new_k), device=CPU), *tables, rotary)
                positions = turn + call.query_step * torch.arange(len(q), device=CPU)
                call.rotated[queries] = rotate(q, positions, *tables, rotary)
            row = sequence if call.batch_idx is None else int(call.batch_idx[sequence])
            inner = torch.arange(seqlen, seqlen + len(new_k), device=CPU)
            outer = torch.full_like(inner, row)
            if table is not None and 0 <= row < rows:
                outer, inner = on_pages(table[row], inner, page_size)
            exists = (outer >= 0) & (outer < places) & (0 <= row < rows)
            place = outer[exists], inner[exists]
            if call.descales is not None:
                new_k, new_v = (
                    in_fp8(x, scales[sequence])
                    for x, scales in zip((new_k, new_v), call.descales, strict=True)
                )
            call.k_cache[place], call.v_cache[place] = new_k[exists], new_v[exists]
            if call.new_seqlens is not None:
                call.new_seqlens[sequence] = seqlen + len(new_k)


def in_fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x (tokens, heads, head_dim) divided by its heads' scales, in FP8; limited to its range."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scales[:, None]).clamp(-most, most).to(torch.float8_e4m3fn)


def rows_of_sequence(sequence: int, ends: torch.Tensor | None) -> int | slice:
    """The index of a sequence's rows in a tensor that is dense, or packed with these ends."""
    return sequence if ends is None else slice(*ends[sequence : sequence + 2].clamp(min=0).tolist())


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary
) -> torch.Tensor:
    """Turn the first columns of x (tokens, heads, head_dim) to its positions."""
    positions = positions.clamp(max=len(cos) - 1)
    cos, sin = (table[positions, None].float() for table in (cos, sin))
    turning, rest = x.split([rotary.dim, x.shape[2] - rotary.dim], dim=2)
    pairs, dim = ((-1, 2), 3) if rotary.interleaved else ((2, -1), 2)
    first, second = turning.float().unflatten(2, pairs).unbind(dim)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim)
    return torch.cat((turned.flatten(2).to(x.dtype), rest), dim=2)


def execute_decode(
    plan: DecodePlan,
    # Packed sequences, of which those are left out that have more queries than the plan has room
    # for. Without cu_seqlens_k, k and v are a cache, in which seqused_k says the keys of each
    # sequence, all if None; without cu_seqlens_q, sequences have equally many queries, and q and
    # out are (batch, seqlen_q, ...), lse is (batch, heads_q, seqlen_q).
    operands: RaggedOperands,
    max_seqlen_k: int,  # no sequence has more keys
    # softmax_scale, tensors: as `fa3.reference.walker.Walker` takes them.
    softmax_scale: float,
    tensors: tuple[torch.Tensor, ...] | None = None,
    tables: CacheTables = NO_TABLES,  # where sequences are in a cache, as tensors
    seqlen_new: int = 0,  # keys that each sequence has in addition to seqused_k
    descales: tuple[torch.Tensor, ...] | None = None,  # as `fa3.reference.walker.Walker` takes them
) -> None:
    """Run a plan on CPU tensors."""
    q, k, _, _, _, ends_q, ends_k, used_q, used_k = operands
    sizes, queries, keys = plan.sizes, None, None
    batch = sizes.batch if ends_q is None else len(ends_q) - 1
    if ends_q is not None:
        rows = RaggedLengths(HostTensor(ends_q), host_tensor(used_q), len(q))
        queries = PackedQueries(rows, sizes.qhead_per_kvhead, ROWS)
    if ends_k is not None:
        keys = RaggedLengths(HostTensor(ends_k), host_tensor(used_k), len(k))
    sequences = Cached(
        batch, host_tensor(used_k), seqlen_new, CacheTables(*map(host_tensor, tables)),
        plan.spec.mask, sizes.seqlen_q, max_seqlen_k, plan.window, TILE_N, packed=queries,
        packed_keys=keys,
    )  # fmt: skip
    walk = Walker(
        plan.spec, plan.window, operands[:5], softmax_scale, tensors, None, tables.page_table,
        descales,
    )  # fmt: skip
    walk.run(steps_of_decode(plan, sequences))


def host_tensor(tensor: torch.Tensor | None) -> HostTensor | None:
    """A table that the host reads."""
    return None if tensor is None else HostTensor(tensor)


def steps_of_decode(plan: DecodePlan, sequences: Cached) -> Iterator[Step]:
    """Yield a plan's work CTA by CTA. A tile has rows of all heads of a key/value head."""
    sizes, group, packed = plan.sizes, plan.sizes.qhead_per_kvhead, sequences.packed
    lengths = list(map(sequences.read, range(sequences.num_sequences)))
    work = plan.cut, sequences, sizes.num_m_blocks, sizes.heads_kv, plan.num_ctas
    for cta, segment in segments(*work):
        tile, length = segment.tile, lengths[segment.tile.batch]
        keys, seqlen_k = sequences.keys(tile, length), sequences.sequence(length).seqlen_k
        first, seqlen_q = sequences.queries(length)
        place = SequenceRows(
            tile.batch,
            range(first, first + seqlen_q),
            range(keys.leftpad, keys.leftpad + seqlen_k),
            # Packed rows are one batch entry.
            tile.batch if packed is None else 0,
            keys.row if sequences.packed_keys is None else 0,
            keys.first,
        )
        rows = range(seqlen_q * group)[tile.m_block * ROWS :][:ROWS]
        blocks = Blocks(segment.begin, segment.begin, segment.begin, segment.end)
        yield Step(segment, place, rows, tile.head, blocks, TILE_N, cta, heads=group)
