"""The parts of the benchmarks that need no GPU: shapes, ratios, results, meter, report, plot."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from cutlass import Float8E4M3FN
from test_bench_runs import draw

from benchmarks import (
    bench_backward,
    bench_decode,
    bench_forward,
    bench_varlen,
    caches,
    first_call,
    harness,
    meter,
    ratios,
    results,
    shapes,
)
from benchmarks.bench_rates import PAIRS, Rates, clocks_of, compiled
from benchmarks.bench_scores import BUILT_IN, FUNCTIONS, PLAIN, Modified, ModifiedReference
from benchmarks.caches import DecodeCell
from benchmarks.first_call import CALLS, DONE, FIRST, SECOND
from benchmarks.harness import WrongOutput
from benchmarks.meter import Sample
from benchmarks.peers import Tensors


def test_flops_follow_the_protocol():
    full, causal = shapes.grid([128], ["full", "causal"], [1024])
    assert full.flops == 4 * 16 * 16 * 1024 * 1024 * 128
    assert causal.flops == full.flops / 2
    deepseek = shapes.NAMED["deepseek-prefill"][0]
    assert deepseek.flops == 2 * (192 + 128) * 128 * 1024 * 1024 / 2


@pytest.mark.parametrize("seqlens", [(3, 8), (8, 8)])
@pytest.mark.parametrize("window", [-1, 2])
def test_pairs_are_those_that_the_mask_shows(seqlens, window):
    cell = shapes.named("x", 1, seqlens, (1, 1), window_left=window)
    visible = (~harness.hidden(cell, torch.arange(seqlens[0]))).sum().item()
    square_causal = window < 0 and seqlens[0] == seqlens[1]
    assert cell.pairs == (seqlens[0] ** 2 / 2 if square_causal else visible)


def test_speedup_is_paired_by_round():
    # Both slow down together: each round's ratio is 2 whatever the clock did.
    assert ratios.paired_speedup([1.0, 2, 4], [2.0, 4, 8]) == (2, 2, 2)
    with pytest.raises(ValueError):
        ratios.paired_speedup([1.0], [1.0, 2.0])


def test_meter_reads_an_interval():
    # The energy counter steps every 100 ms, at 500 W.
    samples = [Sample(t / 1000, 1500 + t, 690, 4, 500 * (t // 100) / 10) for t in range(0, 1001, 5)]
    reading = meter.read_interval(samples, 0.25, 0.65)
    assert reading.joules == pytest.approx(200)
    assert (reading.sm_mhz, reading.power_w, reading.reasons) == (1950, 690, 4)
    assert meter.read_interval(samples, 0.25, 0.31).joules is None
    assert meter.read_interval(samples, 2, 3) == meter.NO_READING
    assert meter.reason_names(0x04 | 0x20 | 0x01) == "power-cap+sw-thermal"


def test_reference_is_attention():
    cell = shapes.named("x", 2, (40, 72), (4, 2), (64, 32), True, 9)
    tensors = [
        torch.randn(2, seqlen, heads, head_dim, dtype=torch.bfloat16)
        for seqlen, heads, head_dim in ((40, 4, 64), (72, 2, 64), (72, 2, 32))
    ]
    reference = harness.Reference(cell, harness.Tensors(*tensors))
    mask = ~harness.hidden(cell, torch.arange(40))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2).float() for tensor in tensors),
        attn_mask=mask.expand(40, 72),
        enable_gqa=True,
    ).transpose(1, 2)
    assert reference.check(expected).largest < 1e-5
    assert reference.check(expected.bfloat16()).largest > 0
    with pytest.raises(harness.WrongOutput, match="error"):
        reference.check(expected + 0.1)
    expected[1, 39, 3, 31] = math.nan
    with pytest.raises(harness.WrongOutput, match="finite"):
        reference.check(expected)


RECORDS = Path(results.__file__).parent / "results"
REPORTS = {
    bench_backward: RECORDS / "h100-2026-11-25/backward.csv",
    bench_decode: RECORDS / "h200-2026-11-23/decode.csv",
    bench_varlen: RECORDS / "h200-2026-11-23-parts/varlen.csv",
}


@pytest.mark.parametrize("bench", [bench_forward, *REPORTS])
def test_cells_are_listed_without_a_gpu(bench, capsys):
    bench.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) > 10
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--cells"])


@pytest.mark.parametrize("bench", REPORTS)
def test_committed_rows_are_printed_and_drawn(bench, tmp_path, capsys):
    shutil.copy(REPORTS[bench], tmp_path)
    bench.main(["--report", str(tmp_path)])
    assert "fa3" in capsys.readouterr().out
    (png, *_) = tmp_path.glob("*.png")
    assert png.stat().st_size > 10000


CELLS = [shapes.named("cost", 2, (150, 150), (4, 2), (64, 64), causal) for causal in (False, True)]


def reference_of(provider: Modified, cell: shapes.Cell, tensors: Tensors) -> ModifiedReference:
    return ModifiedReference(cell, tensors, provider.arguments(cell, tensors.q.device))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.mask)
@pytest.mark.parametrize("name", [*BUILT_IN, *FUNCTIONS])
def test_calls_pass_their_own_check_and_no_other(name, cell):
    provider = Modified(name, (BUILT_IN | FUNCTIONS)[name])
    tensors = draw(cell)
    (call,) = provider.prepare(cell, tensors).values()
    errors = reference_of(provider, cell, tensors).check(call())
    assert errors.largest <= errors.allowed < 0.05
    # Beside the plain kernel a prefix of no keys is the causal mask, and a window hides one key.
    same = name in (PLAIN, "window") or (name == "prefix" and cell.causal)
    if not same:
        with pytest.raises(WrongOutput):
            reference_of(Modified(PLAIN, []), cell, tensors).check(call())


STEPS = [
    "import torch", "first tensor", "import cutlass", "import fa3", FIRST, DONE, SECOND,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_each_call_runs(call):
    found = first_call.run(call, "cpu", 64, is_compiled=False)
    assert sorted(found) == sorted(STEPS) and min(found.values()) >= 0
    assert found[FIRST] <= found[DONE]


# ------------------------------------------------------------------------------------ decoding

DECODING = {cell.name: cell for cell in caches.CELLS}


def cell_of(seqlen_q: int = 1, lengths: tuple[int, ...] = (512, 130, 300)) -> DecodeCell:
    """A small cell; the cache has room for 512 keys of each sequence."""
    plain = shapes.named("decode", len(lengths), (seqlen_q, 512), (4, 2), (64, 64))
    return DecodeCell.of(plain, lengths)


def test_bytes_are_those_that_the_lengths_name():
    assert DECODING["decode-h32.8-1x1x8k"].kv_bytes == 8192 * 8 * 128 * 2 * 2
    assert DECODING["decode-h32.8-1x1x1024k"].kv_bytes == 4 << 30
    skewed = DECODING["skewed-h32.8-64x1x56k"]
    assert skewed.kv_bytes == DECODING["decode-h32.8-64x1x8k"].kv_bytes
    assert max(skewed.lengths) > 100 * min(skewed.lengths)
    for cell in caches.CELLS:
        assert cell.num_sets * cell.kv_bytes >= 4 * shapes.CACHE_BYTES > 240e6
        plain = shapes.named("decode", cell.batch, (cell.seqlen_q, cell.seqlen_k), (4, 1))
        if cell.is_full:
            assert (cell.pairs, cell.kv_bytes) == (plain.pairs, plain.kv_bytes * cell.heads_kv)
    assert cell_of(2).pairs == (2 * (512 + 130 + 300) - 3) / 3


@pytest.mark.parametrize(
    "cell",
    [cell_of(), cell_of(2), cell_of(lengths=(512, 512, 512))],
    ids=["skewed", "queries", "full"],
)
@pytest.mark.parametrize("one", [*caches.OURS, *caches.PAGED[::3]], ids=lambda one: one.name)
def test_ours_pass_the_check(one, cell):
    tensors = draw(cell)
    if one.is_fp8:
        tensors = caches.in_fp8(tensors)
    reference = caches.CacheReference(cell, tensors)
    errors = reference.check(one.prepare(cell, tensors)[""]())
    assert errors.largest <= errors.allowed < 0.05


# --------------------------------------------------------- rates of instructions beside each other


@pytest.mark.compiles
def test_kernel_compiles():
    compiled(Rates(Float8E4M3FN, ("WGMMA RS", "softmax")))


@pytest.mark.gpu
def test_clocks():
    assert ("WGMMA", "FFMA") in PAIRS
    wgmma, ffma = clocks_of(Rates(Float8E4M3FN, ("WGMMA", "FFMA")))
    # At best 64 clocks for 64 x 128 x 32 products, and one of each instruction in a clock.
    assert wgmma >= 64 and ffma >= 128
