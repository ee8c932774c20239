"""Tokens appended to a cache, in torch: what the append kernel writes."""

import torch

from fa3.kernels.append import Append, AppendArguments, Rotary
from fa3.kernels.quantize import MOST
from fa3.reference.walker import CPU, on_pages
from fa3.schedules.sequences import capacity_of


@torch.autocast("cpu", enabled=False)
def append_tokens(kernel: Append, *arguments) -> None:
    """Do what an append kernel does, with `AppendArguments` on the CPU.
    Writes k and v to caches, new lengths, rotated queries."""
    call, rotary = AppendArguments(*arguments), kernel.rotary
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
                (x.float() / scales[sequence, :, None]).clamp(-MOST, MOST).to(call.k_cache.dtype)
                for x, scales in zip((new_k, new_v), call.descales, strict=True)
            )
        call.k_cache[place], call.v_cache[place] = new_k[exists], new_v[exists]
        if call.new_seqlens is not None:
            call.new_seqlens[sequence] = seqlen + len(new_k)


def rows_of_sequence(sequence: int, ends: torch.Tensor | None) -> int | slice:
    """The index of a sequence's rows in a dense or packed tensor."""
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
