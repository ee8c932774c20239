"""The decode benchmark, as far as it needs no GPU: what it runs, checks, counts and prints."""

import importlib.metadata
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import caches, peers, shapes
from benchmarks.caches import CELLS, OURS, PAGED, DecodeCell
from benchmarks.harness import WrongOutput
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


@pytest.mark.parametrize("page_size", caches.PAGE_SIZES)
def test_pages_hold_the_cache(page_size):
    tensors = draw(SMALL[0])
    k, v, table = caches.in_pages(tensors, page_size)
    assert table.shape == (3, 512 // page_size) and table.dtype == torch.int32
    assert not torch.equal(table.flatten(), torch.arange(table.numel()))
    for pages, cache in ((k, tensors.k), (v, tensors.v)):
        assert pages.shape[1] == page_size
        assert torch.equal(pages[table.long()].flatten(1, 2), cache)


@pytest.mark.parametrize("cell", SMALL, ids=["skewed", "queries", "full"])
@pytest.mark.parametrize("one", [*OURS, *PAGED[::3]], ids=lambda one: one.name)
def test_ours_pass_the_check(one, cell):
    tensors = draw(cell)
    reference = caches.CacheReference(cell, tensors)
    errors = reference.check(one.prepare(cell, tensors)[""]())
    assert errors.largest <= errors.allowed < 0.05


def test_the_check_finds_wrong_lengths_masks_and_holes():
    cell = cell_of(2)
    tensors = draw(cell)
    reference = caches.CacheReference(cell, tensors)
    out = OURS[0].prepare(cell, tensors)[""]()
    for wrong in (cell_of(2, (512, 130, 290)), replace(cell, causal=False)):
        with pytest.raises(WrongOutput, match="error"):
            reference.check(OURS[0].prepare(wrong, tensors)[""]())
    out[1, 0, 1, 5] = math.nan
    with pytest.raises(WrongOutput, match="finite"):
        reference.check(out)


def attend(q, k, v, lengths, causal):
    """What a peer computes, by ours."""
    return caches.fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=causal)


@pytest.fixture
def fake_peers(monkeypatch):
    """Modules that look like the peers' packages."""

    def with_kvcache(q, k_cache, v_cache, cache_seqlens=None, causal=False, num_splits=1):
        assert num_splits == 0
        return attend(q, k_cache, v_cache, cache_seqlens, causal)

    def attend_full(q, k, v, causal, window_size, softcap):
        return attend(q, k, v, None, causal), None

    def attend_lengths(q, k, v, seqused_k, causal):
        return attend(q, k, v, seqused_k, causal), None

    modules = {
        "fa3_fwd_interface": {"flash_attn_func": None, "flash_attn_with_kvcache": with_kvcache},
        "flash_attn": {},
        "flash_attn.cute": {
            "flash_attn_func": attend_full,
            "flash_attn_varlen_func": attend_lengths,
        },
    }
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")


@pytest.mark.parametrize("cell", SMALL, ids=["skewed", "queries", "full"])
def test_peers_are_called_for_what_they_take(cell, fake_peers):
    found, missing = peers.find(["fa3-cpp", "fa4-cute"], caches.PEERS)
    assert [one.name for one in found] == ["fa3-cpp", "fa4-cute"] and not missing
    tensors = draw(cell)
    reference = caches.CacheReference(cell, tensors)
    for one in found:
        assert one.supports(cell) is None
        calls = one.prepare(cell, tensors)
        assert (len(calls) == 2) == (one.name == "fa3-cpp" and cell.is_full)
        for call in calls.values():
            reference.check(call())
