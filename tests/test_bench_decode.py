"""The decode benchmark, as far as it needs no GPU: what it runs, checks, counts and prints."""

import importlib.metadata
import math
import pickle
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_decode, caches, harness, peers, results, runs, shapes
from benchmarks.bench_decode import CSV_NAME, DecodeRow
from benchmarks.caches import CELLS, OURS, PAGED, PAGED_CELL, READ, READ_BYTES, DecodeCell, Ours
from benchmarks.harness import WrongOutput
from benchmarks.meter import Meter
from benchmarks.peers import Tensors
from benchmarks.results import FAILED, OK, UNSUPPORTED, WRONG
from fa3.tools.timing import REGIMES, Block

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


def test_cells_have_unique_names_and_lengths_that_fit():
    assert len(BY_NAME) == len(CELLS) == 23
    assert {cell.name for cell in shapes.NAMED["decode"]} < set(BY_NAME)
    for cell in CELLS:
        assert len(cell.lengths) == cell.batch
        assert cell.seqlen_q <= min(cell.lengths) <= max(cell.lengths) <= cell.seqlen_k
        assert cell.causal == (cell.seqlen_q > 1)
        assert cell.is_decode and cell.head_dim == cell.head_dim_v == 128
    assert [cell.name for cell in CELLS if not cell.is_full] == [
        "skewed-h32.8-64x1x56k",
        "spread-h32.8-64x1x16k",
    ]
    assert len({cell.label for cell in CELLS}) == len(CELLS)


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


def test_skewed_lengths_have_the_mean():
    lengths = caches.skewed_lengths(64, 8192)
    assert lengths == caches.skewed_lengths(64, 8192)
    assert sum(lengths) == 64 * 8192
    assert list(lengths) != sorted(lengths)


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


def test_a_cell_is_checked_for_everyone_but_the_reads(monkeypatch):
    cell = cell_of()
    monkeypatch.setattr(harness, "draw_inputs", lambda cell, data, sets: [draw(cell)] * sets)
    monkeypatch.setattr(harness, "poison_freed_memory", lambda cell: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    hole = SimpleNamespace(
        name="hole",
        supports=lambda cell: None,
        prepare=lambda cell, tensors: {"": lambda: tensors.q * math.nan},
    )
    job = runs.Job(cell, [*OURS, caches.Cudnn(), hole, READ], [])
    verdicts = bench_decode.check_cell(SimpleNamespace(data="normal"), job)
    assert {name: verdict.status for name, verdict in verdicts.items()} == {
        "fa3": OK, "fa3-invariant": OK, "cudnn": UNSUPPORTED, "hole": WRONG, "read": OK
    }  # fmt: skip
    assert verdicts["fa3"].errors.largest > 0 and verdicts["read"].errors is None


def test_cudnn_wants_full_caches(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    cudnn = caches.Cudnn()
    assert "lengths" in cudnn.supports(SMALL[0])
    assert cudnn.supports(SMALL[2]) is None


def test_providers_are_filtered():
    peer = Ours("cudnn")

    def names(cell: str, *only: str) -> list[str]:
        return [one.name for one in caches.providers_of(BY_NAME[cell], [peer], only)]

    other = "decode-h32.8-64x1x8k"
    assert names(other) == ["fa3", "fa3-invariant", "cudnn", "read"]
    assert len(names(PAGED_CELL)) == 4 + 2 * len(caches.PAGE_SIZES)
    assert names(PAGED_CELL, "fa3-page16", "fa3") == ["fa3", "fa3-page16", "read"]
    assert names(other, "fa3-page16") == []
    assert set(names(PAGED_CELL)) <= {*caches.NAMES, "read"}


def test_options_choose_cells_and_are_checked():
    options = bench_decode.parse_arguments(["--quick", "--cells", "h16.1", "56k"])
    assert len(runs.with_names_like(CELLS, options.cells)) == 5
    assert options.only == [] and options.report is None
    assert sum(regime.block_ms for regime in runs.chosen_regimes(options)) <= 65
    with pytest.raises(SystemExit):
        bench_decode.parse_arguments(["--only", "nobody"])


def test_small_cells_stand_for_large_ones():
    small = {bench_decode.shrink(cell) for cell in CELLS}
    shapes_of_small = {(cell.heads_q, cell.heads_kv, cell.seqlen_q) for cell in small}
    heads = {(32, 8), (16, 1), (28, 4), (40, 8), (64, 8), (8, 1)}
    assert shapes_of_small == {(*of, 1) for of in heads} | {(32, 8, 2)} and len(small) == 7
    for call in ((one, cell) for one in OURS + PAGED for cell in small):
        assert pickle.loads(pickle.dumps(call)) == call


def test_listing_needs_no_gpu(capsys):
    bench_decode.main(["--list", "--cells", "skewed"])
    assert "skewed-h32.8-64x1x56k" in capsys.readouterr().out


def timed_rows(cell: DecodeCell, blocks: dict[str, list[float]]) -> list[DecodeRow]:
    """Rows of ours, a peer and reads that took these microseconds, and of one that failed."""
    peer, broken = (
        SimpleNamespace(name=name, version="1", is_peer=True) for name in ("cudnn", "fa4-cute")
    )
    providers = [*OURS, peer, broken, READ]
    verdicts = {one.name: runs.Verdict(OK) for one in providers}
    verdicts["fa4-cute"] = runs.Verdict(FAILED, "no")
    contenders = {
        one.name: harness.Contender(one, "sum", SimpleNamespace(launch="graph"))
        for one in providers
        if one is not broken
    }
    job = runs.Job(cell, providers, [REGIMES["burst"]])
    run = SimpleNamespace(data="normal")
    times = {name: [Block(us, 10, 0, 1) for us in found] for name, found in blocks.items()}
    return bench_decode.make_rows(
        runs.Timed(run, job, job.regimes[0], verdicts, contenders, times, Meter(None))
    )


def test_ratios_are_paired(tmp_path):
    cell = BY_NAME["decode-h32.8-64x1x8k"]
    us = {
        "fa3": [500.0, 1000.0],
        "fa3-invariant": [1000.0, 2000.0],
        "cudnn": [600.0, 1200.0],
        "read": [READ_BYTES / 4e6, READ_BYTES / 2e6],
    }
    rows = timed_rows(cell, us)
    ours, invariant, cudnn, broken, read = rows
    assert (ours.vs_fa3, invariant.vs_fa3) == (1, 0.5)
    assert (ours.best_peer, ours.vs_best_peer) == ("cudnn", 1.2)
    assert cudnn.vs_fa3 == pytest.approx(1 / 1.2)
    assert ours.gbps == pytest.approx(cell.kv_bytes / 750 / 1e3)
    assert ours.share == pytest.approx(cell.kv_bytes / 500 / 4e6)
    assert read.gbps == pytest.approx(READ_BYTES / (READ_BYTES / 8 * 3 / 1e6) / 1e3)
    assert read.share is None and not read.best_peer
    assert broken.status == FAILED and broken.share is None
    results.append(tmp_path / CSV_NAME, rows)
    kept = results.read(tmp_path / CSV_NAME, DecodeRow)
    assert [row.provider for row in kept] == [row.provider for row in rows]
    assert kept[0].share == pytest.approx(ours.share, rel=1e-5)


def test_report_prints_tables_and_draws(tmp_path, capsys):
    plain = {
        "fa3": [500.0, 500.0],
        "fa3-invariant": [510.0, 510.0],
        "cudnn": [600.0, 600.0],
        "read": [500.0, 500.0],
    }
    rows = []
    for name in (PAGED_CELL, "skewed-h32.8-64x1x56k"):
        rows += timed_rows(BY_NAME[name], plain)
    page = replace(rows[0], provider="fa3-page16", us=505.0, vs_fa3=0.99)
    rows += [page, replace(rows[0], provider="fa3-page1", us=None, status=UNSUPPORTED)]
    results.append(tmp_path / CSV_NAME, rows)
    bench_decode.main(["--report", str(tmp_path)])
    printed = capsys.readouterr().out
    gbps = BY_NAME[PAGED_CELL].kv_bytes / 500 / 1e3
    share = BY_NAME[PAGED_CELL].kv_bytes / READ_BYTES
    assert f"| 32/8, 16 x 8k | 500.0 ({gbps:.0f}, {share:.0%}) |" in printed
    assert "| 1.20 (1.20-1.20) cudnn | 0.98 (0.98-0.98) |" in printed
    assert f"| 16 | 505.0 ({gbps:.0f}, {share:.0%}) | 0.99" in printed
    assert "| 1 | unsupported |" in printed
    assert f"fa4-cute failed, no: {PAGED_CELL}, skewed-h32.8-64x1x56k" in printed
    assert "reads of 2048 MiB by torch sum: 4295 GB/s" in printed
    for block in bench_decode.markdown(results.read(tmp_path / CSV_NAME, DecodeRow)).split("\n\n"):
        assert len({len(re.findall(r"\|", line)) for line in block.splitlines()}) == 1
    assert (tmp_path / "decode-burst.png").stat().st_size > 10000
    bench_decode.main(["--report", str(tmp_path), "--cells", "skewed"])
    assert "page size" not in capsys.readouterr().out
