"""The parts of the benchmarks that need no GPU: shapes, ratios, results, meter, report, plot."""

import datetime
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    bench_forward,
    environment,
    harness,
    meter,
    plot,
    ratios,
    report,
    results,
    runs,
    shapes,
)
from benchmarks.meter import Sample
from benchmarks.results import FAILED, OK, UNSUPPORTED, Row
from fa3.tools.timing import REGIMES


def make_row(provider: str = "fa3", **changes) -> Row:
    values = {
        "cell": "d128-full-1024",
        "group": "grid",
        "data": "normal",
        "regime": "steady",
        "provider": provider,
        "status": OK,
        "reason": "",
        "version": "1.0",
        "choice": "",
        "launch": "eager",
        "batch": 16,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "heads_q": 16,
        "heads_kv": 16,
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": False,
        "window_left": -1,
        "dtype": "bfloat16",
        "us": 250.0,
        "tflops": 549.8,
        "gbps": 100.0,
        "rounds_us": (250.0, 251.5, 249.0),
    }
    return Row(**(values | changes))


def test_grid_keeps_tokens_and_columns():
    cells = shapes.grid(list(shapes.HEAD_DIMS), list(shapes.MASKS), list(shapes.SEQLENS))
    assert len({cell.name for cell in cells}) == len(cells) == 60
    assert {cell.batch * cell.seqlen_q for cell in cells} == {16384}
    assert {cell.head_dim: cell.heads_q for cell in cells} == {
        64: 32, 96: 21, 128: 16, 192: 10, 256: 8
    }  # fmt: skip


def test_named_cells_have_unique_names_and_known_groups():
    cells = [(group, cell) for group, found in shapes.NAMED.items() for cell in found]
    assert len({cell.name for _, cell in cells}) == len(cells)
    assert all(cell.group == group for group, cell in cells)
    assert all(cell.heads_q % cell.heads_kv == 0 for _, cell in cells)


def test_flops_follow_the_protocol():
    full, causal = shapes.grid([128], ["full", "causal"], [1024])
    assert full.flops == 4 * 16 * 16 * 1024 * 1024 * 128
    assert causal.flops == full.flops / 2
    deepseek = shapes.NAMED["deepseek-prefill"][0]
    assert deepseek.flops == 2 * (192 + 128) * 128 * 1024 * 1024 / 2


@pytest.mark.parametrize("seqlens", [(3, 8), (8, 8), (5, 5)])
@pytest.mark.parametrize("window", [-1, 0, 2, 20])
def test_pairs_are_those_that_the_mask_shows(seqlens, window):
    cell = shapes.named("x", 1, seqlens, (1, 1), window_left=window)
    visible = (~harness.hidden(cell, torch.arange(seqlens[0]))).sum().item()
    square_causal = window < 0 and seqlens[0] == seqlens[1]
    assert cell.pairs == (seqlens[0] ** 2 / 2 if square_causal else visible)


def test_decode_rotates_more_than_four_caches():
    for cell in shapes.NAMED["decode"]:
        assert cell.num_sets * cell.kv_bytes >= 4 * shapes.CACHE_BYTES
    assert shapes.NAMED["llama3-8b"][0].num_sets == 1


def test_summaries():
    assert ratios.summarise([3.0]) == (3, 3, 3)
    assert ratios.summarise([1.0, 2, 3, 4, 5]) == (3, 2, 4)


def test_speedup_is_paired_by_round():
    # Both slow down together: each round's ratio is 2 whatever the clock did.
    assert ratios.paired_speedup([1.0, 2, 4], [2.0, 4, 8]) == (2, 2, 2)
    with pytest.raises(ValueError):
        ratios.paired_speedup([1.0], [1.0, 2.0])


def test_ties_and_geometric_mean():
    assert ratios.is_tie(1.014) and ratios.is_tie(0.986)
    assert not ratios.is_tie(1.016) and not ratios.is_tie(0.984)
    assert ratios.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2)
    assert math.isnan(ratios.geometric_mean([]))


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "forward.csv"
    rows = [
        make_row(causal=True, vs_fa3_cpp=1.05, throttle="power-cap"),
        make_row("cudnn", status=UNSUPPORTED, us=None, tflops=None, gbps=None, rounds_us=()),
    ]
    results.append(path, rows)
    assert results.read(path) == rows


def test_a_later_row_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "forward.csv"
    results.append(path, [make_row(us=1.0), make_row("cudnn")])
    results.append(path, [make_row(us=2.0)])
    assert {row.provider: row.us for row in results.read(path)} == {"fa3": 2.0, "cudnn": 250.0}


def test_resuming_measures_what_is_missing():
    cells = shapes.grid([128], ["full"], [1024, 2048])
    providers = [SimpleNamespace(name="fa3"), SimpleNamespace(name="cudnn")]
    regimes = [REGIMES["burst"], REGIMES["steady"]]
    rows = [make_row(), make_row("cudnn", status=FAILED)]

    def pending(data: str, rows: list[Row], chosen: list) -> dict[str, list[str]]:
        found = runs.find_jobs(cells, regimes, lambda cell: chosen, data, rows)
        return {job.cell.name: [regime.name for regime in job.regimes] for job in found}

    everything = {cell.name: ["burst", "steady"] for cell in cells}
    assert pending("normal", [], providers) == everything
    assert pending("normal", rows, providers) == everything | {cells[0].name: ["burst"]}
    assert pending("scaled", rows, providers) == everything
    assert pending("normal", rows, [*providers, SimpleNamespace(name="new")]) == everything


def test_arguments_choose_cells_and_regimes():
    options = bench_forward.parse_arguments(
        ["--shapes", "flux", "vit-l", "--regimes", "steady", "--block-ms", "300"]
    )
    assert [cell.group for cell in bench_forward.chosen_cells(options)] == ["flux", "vit-l"]
    assert [regime.block_ms for regime in runs.chosen_regimes(options)] == [300]
    everything = bench_forward.parse_arguments(["--shapes", "all"])
    assert {cell.group for cell in bench_forward.chosen_cells(everything)} == {
        "grid",
        *shapes.NAMED,
    }
    few = bench_forward.parse_arguments(["--shapes", "low-wave", "--cells", "70b", "x640x"])
    assert {cell.group for cell in bench_forward.chosen_cells(few)} == {
        "llama3-70b-tp8",
        "cached-prefill",
    }


def test_quick_runs_are_short():
    options = bench_forward.parse_arguments(["--quick"])
    for quick, usual in zip(runs.chosen_regimes(options), REGIMES.values(), strict=True):
        assert quick.name == usual.name
        assert quick.block_ms < usual.block_ms / 3


def test_no_cell_is_chosen_twice():
    cells = shapes.choose(["all", "low-wave", "grid"], shapes.grid([64], ["full"], [512]))
    assert len({cell.name for cell in cells}) == len(cells)
    low_wave = shapes.choose(["low-wave"], [])
    assert {cell.name for cell in low_wave} < {cell.name for cell in cells}
    assert "llama3-8b-h32.8-1x16k" not in {cell.name for cell in low_wave}


def test_listing_needs_no_gpu(capsys):
    bench_forward.main(["--list", "--head-dims", "64", "--masks", "causal"])
    assert "d64-causal-16384" in capsys.readouterr().out


def test_meter_reads_an_interval():
    # The energy counter steps every 100 ms, at 500 W.
    samples = [Sample(t / 1000, 1500 + t, 690, 4, 500 * (t // 100) / 10) for t in range(0, 1001, 5)]
    reading = meter.read_interval(samples, 0.25, 0.65)
    assert reading.joules == pytest.approx(200)
    assert (reading.sm_mhz, reading.power_w, reading.reasons) == (1950, 690, 4)
    assert meter.read_interval(samples, 0.25, 0.31).joules is None
    assert meter.read_interval(samples, 2, 3) == meter.NO_READING
    assert meter.reason_names(0x04 | 0x20 | 0x01) == "power-cap+sw-thermal"


@pytest.mark.parametrize("group", ["flux", "window", "decode"])
def test_reference_is_attention(group):
    cell = shapes.named(
        "x", 2, (40, 72), (4, 2), (64, 32), group != "flux", 9 if group == "window" else -1
    )
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


def test_checked_heads_are_spread():
    small, large = shapes.grid([128], ["full"], [512, 16384])
    assert harness.checked_heads(large) == [(0, 0), (0, 15)]
    heads = harness.checked_heads(small)
    assert len(set(heads)) == 8 and heads[0] == (0, 0) and heads[-1] == (31, 15)


def test_standing_counts_wins_ties_and_losses():
    rows = [
        make_row(vs_fa3_cpp=ratio, vs_best_peer=ratio) for ratio in (1.21, 1.0, 1 / 1.21, 1.014)
    ]
    result = report.standing([*rows, make_row(status=FAILED)])
    assert result[2:] == (1, 2, 1)
    assert result.vs_best_peer == pytest.approx(1.014**0.25)


def test_tables_and_pictures(tmp_path):
    rows = []
    for cell in shapes.grid([64, 128], ["full", "causal"], [512, 1024]):
        sizes = {
            "cell": cell.name,
            "seqlen_q": cell.seqlen_q,
            "head_dim": cell.head_dim,
            "causal": cell.causal,
        }
        ratio = {
            "vs_fa3_cpp": 1.1, "vs_fa3_cpp_q1": 1.09, "vs_fa3_cpp_q3": 1.11,
            "vs_best_peer": 1.0, "vs_best_peer_q1": 0.99, "vs_best_peer_q3": 1.01,
            "best_peer": "cudnn",
        }  # fmt: skip
        rows += [make_row(**sizes, **ratio), make_row("cudnn", **sizes)]
        rows.append(make_row("fa3-cpp", **sizes, status=UNSUPPORTED))
    assert report.providers_of(rows) == ["fa3", "fa3-cpp", "cudnn"]
    assert report.cells_table(rows, "steady").row_count == 8
    assert report.standings_table(rows, "steady").row_count == 9
    assert plot.draw_all(rows, tmp_path) == [tmp_path / "forward-steady.png"]
    assert (tmp_path / "forward-steady.png").stat().st_size > 10000
    # A head size that was measured with one of the masks only.
    some = [row for row in rows if not row.causal or row.head_dim == 128]
    assert plot.draw_all(some, tmp_path) == [tmp_path / "forward-steady.png"]


def test_results_directory_is_named_for_gpu_and_day():
    day = datetime.date(2026, 1, 31)
    assert environment.directory_name("NVIDIA H200", day) == "h200-2026-01-31"
    assert environment.directory_name("NVIDIA H100 80GB HBM3", day) == "h100-80gb-hbm3-2026-01-31"
