"""The benchmark of packed sequences, as far as it needs no GPU: what it runs, checks and prints."""

import importlib.metadata
import json
import math
import pickle
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench_stubs import draw, without_gpu

import fa3
from benchmarks import bench_varlen, harness, packed, peers, results, runs, shapes
from benchmarks.bench_varlen import CSV_NAME, HOST_CELL, HOST_NAME, QUICK
from benchmarks.harness import WrongOutput
from benchmarks.meter import Meter
from benchmarks.packed import BY_NAME, CELLS, OURS, PackedCell, PackedReference, pack
from benchmarks.results import FAILED, OK, UNSUPPORTED, Row
from fa3.tools.timing import REGIMES, Block

RAGGED = pack("ragged", "skewed", (4, 2), [70, 1, 130, 33])
EQUAL = pack("equal", "equal", (2, 2), [40, 40, 40], causal=False)
CHUNKS = pack("chunks", "cache", (4, 2), [40, 40, 1, 1], [40, 100, 150, 17])
DECODE = pack("decode", "cache", (4, 2), [1, 1, 1], [100, 100, 100], causal=False)
SMALL = [RAGGED, EQUAL, CHUNKS, DECODE]


def test_cells_have_unique_names_and_their_lengths():
    assert len(BY_NAME) == len(CELLS) == 19 and set(QUICK) < set(BY_NAME)
    for cell in CELLS:
        assert len(cell.lengths_q) == len(cell.lengths_k) == cell.batch
        assert cell.seqlen_q == max(cell.lengths_q) and cell.seqlen_k == max(cell.lengths_k)
        assert all(q <= k for q, k in zip(cell.lengths_q, cell.lengths_k, strict=True))
        assert min(cell.lengths_q) > 0
    cached = [cell.name for cell in CELLS if cell.is_cached]
    assert cached == ["chunks-7x512+64x1", "few-512of32k", "decode-64x8k"]
    assert [cell.name for cell in CELLS if cell.is_decode] == ["decode-64x8k"]
    tokens = {cell.name: sum(cell.lengths_q) for cell in CELLS}
    assert tokens["lognormal-16k"] == 16384 and tokens["lognormal-256k"] == 1 << 18
    assert tokens["short-8192x34"] == 8192 * 34
    assert 0.9 < tokens["chat-500"] / 500 / 300 < 1.1
    assert len({cell.label for cell in CELLS}) == len(CELLS)


def test_operations_are_those_of_the_sequences():
    for mask in shapes.MASKS:
        dense = shapes.grid([128], [mask], [1024])[0]
        assert BY_NAME[f"equal-{mask}-16x1k"].flops == dense.flops
        assert BY_NAME[f"equal-{mask}-16x1k"].kv_bytes == dense.kv_bytes
    both = replace(RAGGED, passes="both")
    halves = sum(n * n / 2 for n in RAGGED.lengths_q)
    assert both.flops == pytest.approx(3.5 * 4 * 4 * halves * 128)
    seen = 40 * 41 / 2 + (40 * 60 + 40 * 41 / 2) + 150 + 17
    assert CHUNKS.pairs * CHUNKS.batch == seen - 40 * 41 / 2 + 40 * 40 / 2


def test_caches_and_pages_hold_the_keys():
    tensors = draw(CHUNKS)
    cache = packed.in_caches(CHUNKS, tensors.k)
    assert cache.shape == (4, 150, 2, 128)
    for page_size in packed.PAGE_SIZES:
        k, v, table = packed.in_pages(CHUNKS, tensors, page_size)
        assert (
            k.shape
            == v.shape
            == (sum(-(-n // page_size) for n in (40, 100, 150, 17)), page_size, 2, 128)
        )
        assert not torch.equal(table[2], table[2].sort().values)
        begin = 0
        for i, length in enumerate(CHUNKS.lengths_k):
            rows = slice(begin, begin + length)
            begin += length
            for pages, of_all in ((k, tensors.k), (v, tensors.v)):
                assert torch.equal(pages[table[i].long()].flatten(0, 1)[:length], of_all[rows])
            assert torch.equal(cache[i, :length], tensors.k[rows]) and not cache[i, length:].any()


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_ours_pass_the_check(cell):
    tensors = draw(cell)
    reference = PackedReference(cell, tensors)
    ran = []
    for one in packed.providers_of(cell, [], []):
        assert one.supports(cell) is None
        for call in one.prepare(cell, tensors).values():
            errors = reference.check(call())
            assert errors.largest <= errors.allowed < 0.05
            ran.append(one.name)
    cached = ["fa3", "fa3-metadata", "fa3-kvcache", "fa3-page16", "fa3-page64"]
    packed_keys = ["fa3", "fa3-metadata", "fa3-dense"][: 2 + (cell is EQUAL)]
    assert ran == (cached if cell.is_cached else packed_keys)


def test_the_check_finds_wrong_lengths_masks_and_holes():
    tensors = draw(RAGGED)
    reference = PackedReference(RAGGED, tensors)
    (call,) = OURS[0].prepare(RAGGED, tensors).values()
    other = (71, 1, 129, 33)
    for wrong in (
        replace(RAGGED, causal=False),
        replace(RAGGED, lengths_q=other, lengths_k=other),
    ):
        with pytest.raises(WrongOutput, match="error"):
            reference.check(OURS[0].prepare(wrong, tensors)[""]())
    out = call()
    out[72, 3, 5] = math.nan
    with pytest.raises(WrongOutput, match="finite"):
        reference.check(out)


def test_some_sequences_are_checked():
    for cell in CELLS:
        picks = packed.checked_sequences(cell)
        assert {0, cell.batch - 1} <= set(picks) and len(picks) <= 18
        lengths = [cell.lengths_k[i] for i in picks]
        assert (min(lengths), max(lengths)) == (min(cell.lengths_k), max(cell.lengths_k))
    assert packed.checked_sequences(EQUAL) == [0, 1, 2]


@pytest.fixture
def fake_peers(monkeypatch):
    """Modules that look like the peers' packages."""

    def packed_or_cached(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, causal, longest):
        if cu_seqlens_k is None:
            return fa3.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=seqused_k, cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=longest[0], causal=causal,
            )  # fmt: skip
        return fa3.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, causal=causal
        )

    def varlen_of_3(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_splits, causal
    ):
        longest = max_seqlen_q, max_seqlen_k
        return packed_or_cached(q, k, v, cu_seqlens_q, cu_seqlens_k, None, causal, longest)

    def varlen_of_4(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, seqused_k=None
    ):
        longest = max_seqlen_q, max_seqlen_k
        return packed_or_cached(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, causal, longest
        ), None

    modules = {
        "fa3_fwd_interface": {
            "flash_attn_func": None,
            "flash_attn_varlen_func": varlen_of_3,
            "flash_attn_with_kvcache": fa3.flash_attn_with_kvcache,
        },
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_func": None, "flash_attn_varlen_func": varlen_of_4},
    }
    for name, functions in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_peers_are_called_for_what_they_take(cell, fake_peers):
    found, missing = peers.find(packed.PEERS, packed.PEERS)
    assert [one.name for one in found] == ["fa3-cpp", "fa4-cute"] and not missing
    tensors = draw(cell)
    reference = PackedReference(cell, tensors)
    for one in found:
        assert one.supports(cell) is None
        calls = one.prepare(cell, tensors)
        assert len(calls) == 1 + (one.name == "fa3-cpp" and not cell.is_cached)
        for call in calls.values():
            reference.check(call())


def test_a_cell_is_checked_for_everyone(monkeypatch):
    monkeypatch.setattr(harness, "draw_inputs", lambda cell, data, sets: [draw(cell)] * sets)
    monkeypatch.setattr(harness, "poison_freed_memory", lambda cell: None)
    job = runs.Job(RAGGED, OURS[::2][:2], [])
    verdicts = runs.check_cell(SimpleNamespace(data="normal"), job, PackedReference)
    statuses = {name: verdict.status for name, verdict in verdicts.items()}
    assert statuses == {"fa3": OK, "fa3-dense": UNSUPPORTED}


def test_providers_are_filtered():
    peer = SimpleNamespace(name="fa4-cute")

    def names(cell: PackedCell, *only: str) -> list[str]:
        return [one.name for one in packed.providers_of(cell, [peer], only)]

    assert names(RAGGED) == ["fa3", "fa3-metadata", "fa4-cute"]
    assert names(EQUAL) == ["fa3", "fa3-metadata", "fa3-dense", "fa4-cute"]
    assert len(names(CHUNKS)) == 6 and names(CHUNKS, "fa3-page16") == ["fa3-page16"]
    assert names(HOST_CELL) == ["fa3", "fa3-metadata", "fa4-cute"]
    assert {*names(EQUAL), *names(CHUNKS), "fa3-cpp"} == set(packed.NAMES)


def test_options_choose_cells_and_regimes():
    def cells(*arguments: str) -> list[str]:
        options = bench_varlen.parse_arguments(arguments)
        return [cell.name for cell in runs.chosen_cells(CELLS, QUICK, options)]

    assert cells() == list(BY_NAME)
    assert cells("--quick") == [cell.name for cell in CELLS if cell.name in QUICK]
    assert cells("--quick", "--cells", "lognormal-16k") == ["lognormal-16k"]
    regimes = runs.chosen_regimes(bench_varlen.parse_arguments(["--quick"]))
    assert [(regime.name, regime.block_ms) for regime in regimes] == [("burst", 15)]
    with pytest.raises(SystemExit):
        bench_varlen.parse_arguments(["--only", "nobody"])


def test_small_cells_stand_for_large_ones():
    for cell in CELLS:
        small = packed.shrink(cell)
        assert max(sum(small.lengths_q), sum(small.lengths_k)) <= 120000
        assert (small.batch > 256) == (cell.batch > 256)
        assert (small.seqlen_q > 128) == (cell.seqlen_q > 128)
        assert small.is_cached == cell.is_cached and small.causal == cell.causal
        assert small.has_equal_queries == cell.has_equal_queries
    for one in OURS:
        kept, cell = pickle.loads(pickle.dumps((one, RAGGED)))
        assert (kept.name, cell) == (one.name, RAGGED)


def test_listing_needs_no_gpu(capsys):
    bench_varlen.main(["--list", "--quick"])
    printed = capsys.readouterr().out
    assert "chunks-7x512+64x1" in printed and "lognormal-16k" not in printed


def test_a_run_from_end_to_end(tmp_path, monkeypatch, capsys, fake_peers):
    compiled = without_gpu(monkeypatch, tmp_path)
    cells = [replace(cell, name=f"{cell.name}-cell") for cell in SMALL]
    monkeypatch.setattr(bench_varlen, "CELLS", cells)
    with torch.no_grad():
        bench_varlen.main(["--rounds", "2"])
        rows = results.read(tmp_path / CSV_NAME)
        assert {row.status for row in rows} == {OK}
        expected = {
            (cell.name, one.name) for cell in cells for one in packed.providers_of(cell, [], [])
        }
        assert expected < {(row.cell, row.provider) for row in rows}
        assert {"fa3-cpp", "fa4-cute"} < {row.provider for row in rows}
        assert {("fa3", "host"), ("fa4-cute", "host"), ("fa3-dense", "equal-cell")} < set(compiled)
        assert "fa3-cpp" not in {name for name, _ in compiled}
        of_host = {"fa3", "fa3-metadata", "fa3-cpp", "fa4-cute"}
        assert set(json.loads((tmp_path / HOST_NAME).read_text())) == of_host
        assert "host, us a call: fa3 25.0" in capsys.readouterr().out
        # What there is is not measured again.
        bench_varlen.main(["--rounds", "2"])
        assert len(results.read(tmp_path / CSV_NAME)) == len(rows)


def timed_rows(cell: PackedCell, us: dict[str, list[float]]) -> list[Row]:
    """Rows of providers that took these microseconds, and of one that failed."""
    ours = [one for one in OURS if one.name in us]
    peer, broken = (SimpleNamespace(name=name, version="1", is_peer=True) for name in packed.PEERS)
    providers = [*ours, peer, broken]
    verdicts = {one.name: runs.Verdict(OK) for one in providers}
    verdicts[broken.name] = runs.Verdict(FAILED, "no")
    contenders = {
        one.name: harness.Contender(one, "", SimpleNamespace(launch="graph"))
        for one in providers
        if one is not broken
    }
    job = runs.Job(cell, providers, [REGIMES["burst"]])
    blocks = {name: [Block(time, 10, 0, 1) for time in times] for name, times in us.items()}
    timed = runs.Timed(
        SimpleNamespace(data="normal"), job, job.regimes[0], verdicts, contenders, blocks,
        Meter(None),
    )  # fmt: skip
    return bench_varlen.bench_forward.make_rows(timed)


def test_report_prints_tables_and_draws(tmp_path, capsys):
    rows = timed_rows(
        BY_NAME["equal-causal-4x4k"],
        {"fa3": [400.0, 500.0], "fa3-dense": [360.0, 450.0], "fa3-cpp": [480.0, 600.0]},
    )
    rows += timed_rows(
        BY_NAME["decode-64x8k"],
        {"fa3": [900.0], "fa3-kvcache": [480.0], "fa3-page16": [500.0], "fa3-cpp": [528.0]},
    )
    results.append(tmp_path / CSV_NAME, rows)
    bench_varlen.main(["--report", str(tmp_path)])
    printed = capsys.readouterr().out
    tflops = BY_NAME["equal-causal-4x4k"].flops / 450 / 1e6
    assert f"| equal-causal-4x4k, 16/16, causal | 450.0 ({tflops:.0f}) |  |" in printed
    assert "| failed | 1.20 (1.20-1.20) fa3-cpp | 405.0 (" in printed
    assert "| 0.90 (0.90-0.90) |" in printed
    gbps = BY_NAME["decode-64x8k"].kv_bytes / 480 / 1e3
    assert f"| 480.0 ({gbps:.0f} GB/s) |" in printed
    assert "| 1.10 (1.10-1.10) fa3-cpp |" in printed
    assert "fa4-cute failed, no: equal-causal-4x4k, decode-64x8k" in printed
    kept = results.read(tmp_path / CSV_NAME)
    for table in bench_varlen.markdown(kept).split("\n\n"):
        assert len({len(re.findall(r"\|", line)) for line in table.splitlines()}) == 1
    assert (tmp_path / "varlen-burst.png").stat().st_size > 10000
    bench_varlen.main(["--report", str(tmp_path), "--cells", "equal"])
    assert "fa3-kvcache" not in capsys.readouterr().out
