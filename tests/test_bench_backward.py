"""The benchmark of gradients, as far as it needs no GPU: what it runs, checks and prints."""

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
from benchmarks import bench_backward, gradients, harness, results, runs, shapes
from benchmarks.bench_backward import CSV_NAME, HOST_CELL, HOST_NAME, QUICK, GradientRow
from benchmarks.gradients import (
    BY_NAME,
    CELLS,
    DROPPED_OURS,
    FEW,
    ORDERED_FA4,
    ORDERED_OURS,
    PASSES,
    SHAPES,
    Found,
    Gradients,
    Nothing,
    reference_of,
    with_passes,
)
from benchmarks.harness import WrongOutput
from benchmarks.meter import Meter
from benchmarks.packed import PackedCell, pack
from benchmarks.results import FAILED, OK
from fa3.tools.timing import REGIMES, Block, run_block

DENSE = shapes.named("dense", 2, (50, 50), (4, 2), (64, 32))
FULL = shapes.named("full", 1, (40, 70), (2, 2), (64, 64), causal=False)
RAGGED = pack("ragged", "skewed", (4, 2), [40, 1, 70, 33])
SMALL = [with_passes(cell, passes) for cell in (DENSE, FULL, RAGGED) for passes in PASSES]


@pytest.fixture(autouse=True)
def without_gradients():
    """As runs have it."""
    with torch.no_grad():
        yield


def test_cells_have_unique_names_and_their_operations():
    assert len(BY_NAME) == len(CELLS) == 2 * (len(SHAPES) + 1) == 2 * 70
    assert set(QUICK) < set(BY_NAME)
    for cell in SHAPES:
        backward, both = (BY_NAME[f"{passes}-{cell.name}"] for passes in PASSES)
        assert (backward.flops, both.flops) == (2.5 * cell.flops, 3.5 * cell.flops)
        assert backward.graph is False
    assert {cell.name for cell in SHAPES} > gradients.ORDERED | gradients.DROPPED
    labels = [(cell.passes, gradients.label_of(cell)) for cell in CELLS]
    assert len(set(labels)) == len(CELLS)
    assert [cell.name for cell in CELLS if cell.graph] == [
        f"{passes}-{FEW.name}-graph" for passes in PASSES
    ]


def attend(q, k, v, causal):
    """Attention by torch, aligned to the bottom right."""
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        attn_mask=mask if causal else None, enable_gqa=True,
    )  # fmt: skip
    return out.transpose(1, 2)


@pytest.mark.parametrize("cell", [DENSE, FULL], ids=lambda cell: cell.name)
def test_reference_is_the_gradient(cell):
    cell, tensors = with_passes(cell, "backward"), draw(cell)
    reference = reference_of(cell, tensors)
    leaves = [tensor.float().requires_grad_() for tensor in tensors]
    d_out = gradients.draw_gradient(cell, torch.device("cpu"))
    with torch.enable_grad():
        out = attend(*leaves, cell.causal)
    found = torch.autograd.grad(out, leaves, d_out.float())
    assert reference.check(found).largest < 1e-5
    for i in range(3):
        wrong = list(found)
        wrong[i] = wrong[i] * 1.1
        with pytest.raises(WrongOutput, match=f"error of {gradients.GRADIENTS[i]}"):
            reference.check(tuple(wrong))
    found[1][0, 3, 1, 5] = math.nan
    with pytest.raises(WrongOutput, match="dk is not finite"):
        reference.check(found)


@pytest.mark.parametrize("passes", PASSES)
def test_dropout_passes_a_check_of_its_own(passes):
    cell = with_passes(DENSE, passes)
    tensors = draw(cell)
    (call,) = Gradients(gradients.DENSE_KINDS[DROPPED_OURS]()).prepare(cell, tensors).values()
    errors = reference_of(cell, tensors, has_dropout=True).check(call())
    assert errors.largest <= errors.allowed < 0.1
    with pytest.raises(WrongOutput, match="error of"):
        reference_of(cell, tensors).check(call())


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_ours_pass_the_check(cell):
    tensors = draw(cell)
    reference = reference_of(cell, tensors)
    kinds = gradients.PACKED_KINDS if isinstance(cell, PackedCell) else gradients.DENSE_KINDS
    for name in (gradients.OURS, ORDERED_OURS):
        one = Gradients(kinds[name]())
        assert one.name == name and not one.is_peer and one.supports(cell) is None
        (call,) = one.prepare(cell, tensors).values()
        for _ in range(2):
            errors = reference.check(call())
            assert errors.largest <= errors.allowed < 0.1
    assert not any(tensor.requires_grad for tensor in tensors)


def test_the_check_finds_wrong_masks_and_holes_of_packed_sequences():
    cell = with_passes(RAGGED, "both")
    tensors = draw(cell)
    reference = reference_of(cell, tensors)
    one = Gradients(gradients.PACKED_KINDS[gradients.OURS]())
    with pytest.raises(WrongOutput, match="error of"):
        reference.check(one.prepare(replace(cell, causal=False), tensors)[""]())
    found = one.prepare(cell, tensors)[""]()
    found[2][-1, 0, 0] = math.inf
    with pytest.raises(WrongOutput, match="finite"):
        reference.check(found)


@pytest.fixture
def fake_peer(monkeypatch):
    """A module that looks like FlashAttention-4, and the options that it was given."""
    asked = []

    def dense(q, k, v, causal, window_size, softcap, deterministic=False):
        asked.append(deterministic)
        assert torch.is_grad_enabled() and q.requires_grad
        return attend(q, k, v, causal), None

    def varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
        deterministic=False,
    ):  # fmt: skip
        asked.append(deterministic)
        return fa3.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal
        ), None

    functions = {"flash_attn_func": dense, "flash_attn_varlen_func": varlen}
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(**functions))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    return asked


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_peers_are_differentiated(cell, fake_peer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(gradients, "ORDERED", {DENSE.name, RAGGED.name})
    found = Found(gradients.NAMES)
    assert not found.missing
    providers = [one for one in found.providers_of(cell) if not one.name.startswith("fa3")]
    ordered = [ORDERED_FA4] if cell.name.removeprefix(f"{cell.passes}-") != FULL.name else []
    cudnn = [] if isinstance(cell, PackedCell) else ["cudnn"]
    assert [one.name for one in providers] == ["fa4-cute", *ordered, *cudnn]
    assert [one.name for one in providers if one.is_peer] == ["fa4-cute", *cudnn]
    tensors = draw(cell)
    reference = reference_of(cell, tensors)
    for one in providers:
        if one.name == "cudnn":
            continue
        fake_peer.clear()
        (call,) = one.prepare(cell, tensors).values()
        reference.check(call())
        reference.check(call())
        assert set(fake_peer) == {one.name == ORDERED_FA4}
        # Alone, the backward pass is that of one forward pass.
        assert len(fake_peer) == (1 if cell.passes == "backward" else 2)


def test_providers_are_named(fake_peer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    found = Found(["fa3", ORDERED_OURS, DROPPED_OURS, "cudnn"])

    def names(cell: str) -> list[str]:
        return [one.name for one in found.providers_of(BY_NAME[cell])]

    assert names("both-d128-causal-4096") == ["fa3", ORDERED_OURS, DROPPED_OURS, "cudnn"]
    assert names("both-d64-full-4096") == ["fa3", DROPPED_OURS, "cudnn"]
    assert names("backward-d256-full-512") == ["fa3", "cudnn"]
    assert names("backward-lognormal-64k") == ["fa3", ORDERED_OURS]
    assert [one.name for one in found.providers_of(HOST_CELL)] == ["fa3", "cudnn"]
    providers = [found.providers_of(cell) for cell in CELLS]
    assert len({id(one) for of_cell in providers for one in of_cell}) == 6


def test_options_choose_cells_and_regimes():
    def cells(*arguments: str) -> list[str]:
        options = bench_backward.parse_arguments(arguments)
        return [cell.name for cell in runs.chosen_cells(CELLS, QUICK, options)]

    assert cells() == list(BY_NAME)
    assert set(cells("--quick")) == set(QUICK)
    assert len(cells("--quick", "--cells", "both-few")) == 2
    regimes = runs.chosen_regimes(bench_backward.parse_arguments([]))
    assert [regime.name for regime in regimes] == ["burst"]
    with pytest.raises(SystemExit):
        bench_backward.parse_arguments(["--only", "fa3-cpp"])


def test_small_cells_stand_for_large_ones():
    ours, peer = (SimpleNamespace(name=name) for name in ("fa3", "fa4-cute"))
    few = {gradients.shrink(peer, cell) for cell in CELLS if cell.group == "grid"}
    assert {(cell.batch, cell.seqlen_q) for cell in few} == {(1, 512), (1, 1024)}
    assert len(few) == 18 and len({gradients.shrink(ours, cell) for cell in CELLS}) == 69
    one = Gradients(gradients.DENSE_KINDS[gradients.OURS]())
    assert pickle.loads(pickle.dumps(one)).attention.attend is fa3.flash_attn_func


def test_a_cell_is_checked_for_everyone(monkeypatch):
    monkeypatch.setattr(harness, "draw_inputs", lambda cell, data, sets: [draw(cell)] * sets)
    monkeypatch.setattr(harness, "poison_freed_memory", lambda cell: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def broken(cell, tensors):
        raise NotImplementedError("not yet")

    refused = SimpleNamespace(
        name="refused", version="1", is_peer=False, supports=lambda cell: None, prepare=broken
    )
    ours, dropped = (
        Gradients(gradients.DENSE_KINDS[name]()) for name in (gradients.OURS, DROPPED_OURS)
    )
    job = runs.Job(with_passes(DENSE, "both"), [ours, dropped, Gradients(refused)], [])
    verdicts = bench_backward.check_cell(SimpleNamespace(data="normal"), job)
    assert {name: verdict.status for name, verdict in verdicts.items()} == {
        "fa3": OK, "refused": FAILED, DROPPED_OURS: OK
    }  # fmt: skip
    assert verdicts["refused"].reason == "NotImplementedError: not yet"


def test_a_run_from_end_to_end(tmp_path, monkeypatch, capsys, fake_peer):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(gradients, "ORDERED", {DENSE.name, RAGGED.name})
    compiled = without_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(bench_backward, "CELLS", SMALL)
    options = ["--only", "fa3", ORDERED_OURS, "fa4-cute", ORDERED_FA4]
    bench_backward.main(options)
    rows = results.read(tmp_path / CSV_NAME, GradientRow)
    assert {row.status for row in rows} == {OK} and {row.peak_mib for row in rows} == {1}
    assert len(rows) == len(PASSES) * (4 + 2 + 4)
    # Both passes compile all that one needs.
    assert len(compiled) == 2 + 4 + 2 + 4 and ("fa3", "host") in compiled
    measured = {"fa3", "fa4-cute", "autograd"}
    measured |= {f"{name}-one-thread" for name in measured}
    assert set(json.loads((tmp_path / HOST_NAME).read_text())) == measured
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out
    bench_backward.main(options)
    assert len(results.read(tmp_path / CSV_NAME, GradientRow)) == len(rows)


def test_the_floor_is_a_function_with_the_tensors_of_a_call():
    tensors = draw(HOST_CELL)
    for one in (Gradients(Nothing()), gradients.InOneThread(Gradients(Nothing()))):
        assert not one.is_peer and one.supports(HOST_CELL) is None
        found = one.prepare(HOST_CELL, tensors)[""]()
        assert [x.shape for x in found] == [x.shape for x in tensors]
    assert one.name == "autograd-one-thread"


def test_reasons_say_what_failed_first():
    def fail():
        try:
            raise ValueError("not in a capture")
        finally:
            raise RuntimeError("the capture is broken")

    with pytest.raises(RuntimeError) as found:
        fail()
    expected = "RuntimeError: the capture is broken, after ValueError: not in a capture"
    assert runs.reason_of(found.value) == expected
    assert runs.reason_of(ValueError("no")) == "ValueError: no"


@pytest.fixture
def backends():
    """Give torch the attention that it had back: cuDNN's provider leaves it no other."""
    names = "flash", "mem_efficient", "math", "cudnn"
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]
    yield
    for name, is_on in zip(names, before, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [gradients.OURS, "cudnn"])
@pytest.mark.parametrize("passes", PASSES)
def test_gradients_are_replayed_from_graphs(passes, name, backends):
    cell = with_passes(FEW, passes, graph=True)
    (tensors,) = harness.draw_inputs(cell, "normal", sets=1)
    one = Gradients(gradients.DENSE_KINDS[name]())
    harness.check_provider(one, cell, tensors, reference_of(cell, tensors))
    runner = harness.choose_runner(one, cell, [tensors]).runner
    assert runner.launch == "graph" and 0 < run_block(runner, block_ms=1).us < 1000


def timed_rows(cell: shapes.Cell, us: dict[str, list[float]]) -> list[GradientRow]:
    """Rows of providers that took these microseconds, and of cuDNN, which failed."""
    providers = [
        SimpleNamespace(name=name, version="1", is_peer=name == "fa4-cute")
        for name in (*us, "cudnn")
    ]
    verdicts = {one.name: runs.Verdict(OK) for one in providers}
    verdicts["cudnn"] = runs.Verdict(FAILED, "no")
    runner = SimpleNamespace(launch="eager", calls=["call"])
    contenders = {one.name: harness.Contender(one, "", runner) for one in providers[:-1]}
    job = runs.Job(cell, providers, [REGIMES["burst"]])
    blocks = {name: [Block(time, 10, 0, 1) for time in times] for name, times in us.items()}
    timed = runs.Timed(
        SimpleNamespace(data="normal"), job, job.regimes[0], verdicts, contenders, blocks,
        Meter(None),
    )  # fmt: skip
    return bench_backward.make_rows(timed)


def test_report_prints_tables_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness, "peak_bytes", lambda call: 300 << 20)
    us = {
        "fa3": [400.0, 500.0],
        ORDERED_OURS: [500.0, 625.0],
        "fa4-cute": [440.0, 550.0],
        ORDERED_FA4: [880.0, 1100.0],
        DROPPED_OURS: [440.0, 550.0],
    }
    rows = timed_rows(BY_NAME["backward-d128-causal-4096"], us)
    rows += timed_rows(BY_NAME["both-lognormal-64k"], us)
    rows += timed_rows(BY_NAME[f"both-{FEW.name}-graph"], {"fa3": [200.0]})
    assert rows[0].peak_mib == 300 and rows[0].passes == "backward" and rows[5].peak_mib is None
    assert rows[0].tflops == pytest.approx(BY_NAME["backward-d128-causal-4096"].flops / 450 / 1e6)
    results.append(tmp_path / CSV_NAME, rows)
    assert results.read(tmp_path / CSV_NAME, GradientRow)[0].peak_mib == 300
    bench_backward.main(["--report", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"| 128, causal, 4 x 4k, 16/16 | 450.0 ({rows[0].tflops:.0f}) |" in printed
    assert "| failed | 1.10 (1.10-1.10) fa4-cute |  /  /  | 300 / 300 /  |" in printed
    assert bench_backward.joules_text(replace(rows[0], joules=0.0123)) == "12"
    assert "| 128 | causal | 1.100 | 1-0-0 |" in printed
    assert "| 0.80 (0.80-0.80) |" in printed and "| 0.50 (0.50-0.50) |" in printed
    assert "| fa3-dropout | over fa3 |" in printed and "| 0.91 (0.91-0.91) |" in printed
    assert "64, causal, 8 x 1k, 12/12, graph" in printed
    assert "lognormal-64k, 16/16, causal" in printed
    assert "cudnn failed, no: backward-d128-causal-4096, both-lognormal-64k, both-few" in printed
    kept = results.read(tmp_path / CSV_NAME, GradientRow)
    for passes in PASSES:
        for table in bench_backward.markdown(kept, passes).split("\n\n"):
            assert len({len(re.findall(r"\|", line)) for line in table.splitlines()}) == 1
    assert (tmp_path / "backward-burst.png").stat().st_size > 10000


def test_listing_needs_no_gpu(capsys):
    bench_backward.main(["--list", "--cells", "d192.128"])
    assert "both-d192.128-causal-4096" in capsys.readouterr().out
