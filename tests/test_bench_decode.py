"""The decode benchmark, as far as it needs no GPU: what it runs, checks, counts and prints."""

import pytest
import torch

from benchmarks import caches, shapes
from benchmarks.caches import CELLS, OURS, PAGED, DecodeCell
from benchmarks.peers import Tensors

BY_NAME = {cell.name: cell for cell in CELLS}


def cell_of(seqlen_q: int = 1, lengths: tuple[int, ...] = (512, 130, 300)) -> DecodeCell:
    """A small cell; the cache has room for 512 keys of each sequence."""
    plain = shapes.named("decode", len(lengths), (seqlen_q, 512), (4, 2), (64, 64))
    return DecodeCell.of(plain, lengths)


SMALL = [cell_of(), cell_of(2), cell_of(lengths=(512, 512, 512))]


def draw(cell: DecodeCell) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        shape = (cell.batch, seqlen, heads, cell.head_dim)
        return torch.randn(shape, generator=generator).bfloat16()

    keys = cell.seqlen_k, cell.heads_kv
    return Tensors(normal(cell.seqlen_q, cell.heads_q), normal(*keys), normal(*keys))


def test_bytes_are_those_that_the_lengths_name():
    assert BY_NAME["decode-h32.8-1x1x8k"].kv_bytes == 8192 * 8 * 128 * 2 * 2
    assert BY_NAME["decode-h32.8-1x1x1024k"].kv_bytes == 4 << 30
    skewed = BY_NAME["skewed-h32.8-64x1x56k"]
    assert skewed.kv_bytes == BY_NAME["decode-h32.8-64x1x8k"].kv_bytes
    assert max(skewed.lengths) > 100 * min(skewed.lengths)
    for cell in CELLS:
        assert cell.num_sets * cell.kv_bytes >= 4 * shapes.CACHE_BYTES > 240e6
        plain = shapes.named("decode", cell.batch, (cell.seqlen_q, cell.seqlen_k), (4, 1))
        if cell.is_full:
            assert (cell.pairs, cell.kv_bytes) == (plain.pairs, plain.kv_bytes * cell.heads_kv)
    assert cell_of(2).pairs == (2 * (512 + 130 + 300) - 3) / 3


@pytest.mark.parametrize("cell", SMALL, ids=["skewed", "queries", "full"])
@pytest.mark.parametrize("one", [*OURS, *PAGED[::3]], ids=lambda one: one.name)
def test_ours_pass_the_check(one, cell):
    tensors = draw(cell)
    if one.is_fp8:
        tensors = caches.in_fp8(tensors)
    reference = caches.CacheReference(cell, tensors)
    errors = reference.check(one.prepare(cell, tensors)[""]())
    assert errors.largest <= errors.allowed < 0.05
