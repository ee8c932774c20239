"""Benchmarks without a GPU: runs on the CPU, their checks, shapes, ratios, results and reports."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cutlass import Float8E4M3FN

from benchmarks import (
    bench_backward,
    bench_decode,
    bench_forward,
    bench_rates,
    bench_schedules,
    bench_varlen,
    caches,
    first_call,
    fit_costs,
    gradients,
    harness,
    meter,
    packed,
    plans,
    ratios,
    regret,
    results,
    runs,
    shapes,
)
from benchmarks.bench_backward import GradientRow
from benchmarks.bench_rates import PAIRS, Rates, clocks_of
from benchmarks.bench_scores import BUILT_IN, FUNCTIONS, PLAIN, Modified, ModifiedReference
from benchmarks.caches import DecodeCell
from benchmarks.cost_parameters import predicted_us
from benchmarks.first_call import CALLS, DONE, FIRST, SECOND
from benchmarks.fit_costs import START, Accuracy
from benchmarks.gradients import ORDERED_OURS, PASSES, reference_of, with_passes
from benchmarks.harness import Contender, WrongOutput
from benchmarks.meter import Sample
from benchmarks.packed import BY_NAME, OURS, PackedReference, pack
from benchmarks.peers import Tensors
from benchmarks.results import OK, PlanRow
from benchmarks.shapes import Cell
from benchmarks.timing import Block
from fa3.planning.costs import H200, parse_costs
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.schedules import SCHEDULES

RAGGED = pack("ragged", "skewed", (4, 2), [70, 1, 130, 33])
EQUAL = pack("equal", "equal", (2, 2), [40, 40, 40], causal=False)
CHUNKS = pack("chunks", "cache", (4, 2), [40, 40, 1, 1], [40, 100, 150, 17])
DECODE = pack("decode", "cache", (4, 2), [1, 1, 1], [100, 100, 100], causal=False)
DENSE = shapes.named("dense", 2, (50, 50), (4, 2), (64, 32))
FULL = shapes.named("full", 1, (40, 70), (2, 2), (64, 64), causal=False)
DIFFERENTIATED = [with_passes(cell, passes) for cell in (DENSE, FULL, RAGGED) for passes in PASSES]


def draw(cell: Cell) -> Tensors:
    """Draw inputs of a cell on the CPU."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=generator) for shape in cell.operand_shapes)
    return Tensors(*(tensor.bfloat16() for tensor in drawn))


@pytest.fixture(autouse=True)
def without_gradients():
    """As runs have it."""
    with torch.no_grad():
        yield


@pytest.fixture
def compiled(monkeypatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Let runs work on the CPU and take no time; give the calls that are compiled before.

    Checks are those of real runs; all calls are said to take 100 us.
    """
    found = []

    def open_run(options, console, csv_name, rows, missing):
        return runs.Run(console, options.data, 2, tmp_path / csv_name, math.inf, None)

    def choose_runner(provider, cell, inputs):
        choice, call = next(iter(provider.prepare(cell, inputs[0]).items()))
        call()
        return Contender(provider, choice, SimpleNamespace(launch="eager", calls=[call]))

    def measure(contenders, regime, rounds, shuffle, meter):
        return {one.provider.name: [Block(100.0, 10, 0, 1)] * rounds for one in contenders}

    def compile_all(calls, console):
        found.extend((one.name, cell.name) for one, cell in dict.fromkeys(calls))

    monkeypatch.setattr(runs, "need_gpu", lambda: None)
    monkeypatch.setattr(runs, "open_run", open_run)
    monkeypatch.setattr(runs, "compile_all", compile_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replacements = {
        "draw_inputs": lambda cell, data, sets: [draw(cell)] * sets,
        "poison_freed_memory": lambda cell: None,
        "choose_runner": choose_runner,
        "measure": measure,
        "peak_bytes": lambda call: 1 << 20,
        "host_microseconds": lambda call: [20.0, 30.0],
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(harness, name, replacement)
    return found


# ------------------------------------------------------------------------------------ packed


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


def test_the_check_finds_wrong_lengths_masks_and_holes():
    tensors = draw(RAGGED)
    reference = PackedReference(RAGGED, tensors)
    (call,) = OURS[0].prepare(RAGGED, tensors).values()
    other = (71, 1, 129, 33)
    for wrong in (replace(RAGGED, causal=False), replace(RAGGED, lengths_q=other, lengths_k=other)):
        with pytest.raises(WrongOutput, match="error"):
            reference.check(OURS[0].prepare(wrong, tensors)[""]())
    out = call()
    out[72, 3, 5] = math.nan
    with pytest.raises(WrongOutput, match="finite"):
        reference.check(out)


def test_a_run_of_packed_sequences(compiled, tmp_path, monkeypatch, capsys):
    cells = [replace(cell, name=f"{cell.name}-cell") for cell in (RAGGED, EQUAL, CHUNKS, DECODE)]
    monkeypatch.setattr(bench_varlen, "CELLS", cells)
    bench_varlen.main(["--rounds", "2"])
    rows = results.read(tmp_path / bench_varlen.CSV_NAME)
    assert {row.status for row in rows} == {OK}
    expected = {
        (cell.name, one.name) for cell in cells for one in packed.providers_of(cell, [], [])
    }
    assert expected <= {(row.cell, row.provider) for row in rows}
    assert {("fa3", "host"), ("fa3-dense", "equal-cell")} < set(compiled)
    assert {"fa3"} == set(json.loads((tmp_path / bench_varlen.HOST_NAME).read_text()))
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out
    # What there is is not measured again.
    bench_varlen.main(["--rounds", "2"])
    assert len(results.read(tmp_path / bench_varlen.CSV_NAME)) == len(rows)


# --------------------------------------------------------------------------------- gradients


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


def test_a_run_of_gradients(compiled, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradients, "ORDERED", {DENSE.name, RAGGED.name})
    monkeypatch.setattr(bench_backward, "CELLS", DIFFERENTIATED)
    bench_backward.main(["--only", "fa3", ORDERED_OURS])
    rows = results.read(tmp_path / bench_backward.CSV_NAME, GradientRow)
    assert {row.status for row in rows} == {OK} and {row.peak_mib for row in rows} == {1}
    assert len(rows) == len(PASSES) * (2 + 1 + 2) and ("fa3", "host") in compiled
    written = (tmp_path / bench_backward.HOST_NAME).read_text()
    assert {"fa3", "autograd"} < set(json.loads(written))
    assert "host, us a call: fa3 25.0" in capsys.readouterr().out


CELLS = shapes.grid([64, 128], list(shapes.MASKS), [512, 1024, 2048, 4096])
SMALL = [
    shapes.named("square", 1, (150, 150), (2, 1), (64, 64)),
    shapes.named("full", 1, (40, 70), (1, 1), (64, 32), causal=False),
    shapes.named("window", 1, (150, 150), (1, 1), (64, 64), window_left=30),
    shapes.named("loose-window", 1, (40, 40), (1, 1), (64, 64), window_left=1000),
]


def plan_row(cell: shapes.Cell, plan, us: float, regime: str = "steady") -> PlanRow:
    known = {
        name: getattr(source, name)
        for source in (cell, plan.config)
        for name in results.header_of(PlanRow)
        if hasattr(source, name)
    }
    measured = {
        "cell": cell.name, "data": "normal", "regime": regime, "provider": plan.name, "status": OK,
        "reason": "", "version": "1.0", "choice": "", "launch": "graph", "us": us,
        "schedule": plan.schedule.name, "fixed_reference": plan.config.fixed_row_max,
    }  # fmt: skip
    return PlanRow(**known | measured)


def rows_of(cells, model, schedules=("list", "static", "single")) -> list[PlanRow]:
    """What a GPU would give on which a cost model is exact."""
    rows = []
    for cell in cells:
        problem = plans.problem_of(cell)
        for schedule in schedules:
            for regime in ("burst", "steady"):
                plan = plan_forward(problem, H200, choose_config(problem, H200), schedule)
                row = plan_row(cell, plan, 1.0, regime)
                us = predicted_us(model, fit_costs.observe(row, H200))
                rows.append(replace(row, us=us))
    return rows


# --------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_plans_compute_the_cell_they_are_made_for(cell):
    """A plan of another problem than the call's is refused, so the problem is the call's."""
    tensors = draw(cell)
    reference = harness.Reference(cell, tensors)
    for schedule in SCHEDULES:
        provider = plans.Planned(plan_forward(plans.problem_of(cell), H200, schedule=schedule))
        (call,) = provider.prepare(cell, tensors).values()
        assert provider.supports(cell) is None
        reference.check(call())


# --------------------------------------------------------------------------------- the fit


def test_the_fit_finds_a_model_again():
    """Times that follow the model, with other parameters than the fit starts from."""
    rule = START.rule._replace(tensor=6.5e-4, exponential=3e-4, tile_us=1.5)
    unit_us = {"single": 1.1, "static": 0.1, "single in pairs": 1.3, "dynamic in pairs": 0.8}
    truth = replace(START, rule=rule, unit_us=unit_us, launch_us=3.4)
    seen = [fit_costs.observe(row, H200) for row in rows_of(CELLS, truth)]
    fitted = fit_costs.fit_all(START, seen)
    misses = [predicted_us(fitted, one) / one.us - 1 for one in seen]
    assert Accuracy.of(misses).largest < 0.01
    assert fitted.unit_us["single"] == pytest.approx(1.1, abs=0.15)
    assert fitted.schedules == ("list", "single", "static")
    held_out = fit_costs.held_out_errors(START, seen)
    assert len(held_out) == len(seen)
    assert Accuracy.of(error for _, error in held_out).largest < 0.03


def test_fitting_a_directory_writes_a_model(tmp_path, capsys):
    results.append(tmp_path / fit_costs.SCHEDULES_CSV, rows_of(CELLS[:4], START))
    out = tmp_path / "costs.json"
    fit_costs.main([str(tmp_path), "--out", str(out)])
    assert "held out: median" in capsys.readouterr().out
    model = parse_costs(out.read_text())
    assert model.measured
    assert model.source["cells"] == 4


# --------------------------------------------------------------------------------- regret


def measured(cell: shapes.Cell, factors: dict[str, float]) -> list[PlanRow]:
    """Rows of the planner's plan at 100 us times its factor, and of others by name."""
    found = plans.all_plans(plans.problem_of(cell), H200)
    own = next(iter(found))
    return [
        plan_row(cell, plan, 100 * factors.get("own" if name == own else plan.schedule.name, 2))
        for name, plan in found.items()
    ]


def test_regret_is_over_the_best_plan():
    one, other = CELLS[3], CELLS[4]
    rows = measured(one, {"own": 1.0}) + measured(other, {"own": 1.1, "single": 1.0})
    first, second = regret.judge(rows, H200)
    assert first.regret == 0
    assert second.regret == pytest.approx(0.1)
    assert second.best.schedule == "single"
    result = regret.standing([first, second])
    assert result == (2, 0.5, pytest.approx(0.05), pytest.approx(0.1))
    assert "2 cells: 50% within 3%" in regret.describe(result)


RECORDED = {
    "fixed burst": 0.0037,
    "fixed steady": 0.0066,
    "grid burst": 0.0038,
    "grid-steady steady": 0.0054,
    "grid-steady-first steady": 0.0046,
    "schedules burst": 0.0028,
}
"""Mean regrets of the committed records of 2026-11-21, which no change may raise. Cells of plans
that the records do not have, as full heads of 256 and 512 queries, do not count."""


@pytest.mark.parametrize("record", RECORDED)
def test_regret_over_the_committed_records(record):
    name, regime = record.split()
    directory = Path(results.__file__).parent / "results" / f"h200-2026-11-21-{name}"
    found = results.read(directory / fit_costs.SCHEDULES_CSV, PlanRow)
    rows = [row for row in found if row.regime == regime]
    assert regret.standing(regret.judge(rows, H200)).mean <= RECORDED[record]


def test_a_record_is_reported_without_a_gpu(tmp_path, capsys):
    rows = [row for cell in CELLS for row in measured(cell, {"own": 1.0, "single": 1.2})]
    results.append(tmp_path / fit_costs.SCHEDULES_CSV, rows)
    bench_schedules.main(["--report", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"{len(CELLS)} cells: 100% within 3%" in printed
    assert (tmp_path / "schedules.png").stat().st_size > 10000
    assert "| all (16) | 100%, 0.0%, 0.0% |" in (tmp_path / "schedules.md").read_text()


# ------------------------------------------------------------------- shapes, ratios, meter, reports


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


SQUARES = [
    shapes.named("cost", 2, (150, 150), (4, 2), (64, 64), causal) for causal in (False, True)
]


def modified_reference_of(
    provider: Modified, cell: shapes.Cell, tensors: Tensors
) -> ModifiedReference:
    return ModifiedReference(cell, tensors, provider.arguments(cell, tensors.q.device))


@pytest.mark.parametrize("cell", SQUARES, ids=lambda cell: cell.mask)
@pytest.mark.parametrize("name", [*BUILT_IN, *FUNCTIONS])
def test_calls_pass_their_own_check_and_no_other(name, cell):
    provider = Modified(name, (BUILT_IN | FUNCTIONS)[name])
    tensors = draw(cell)
    (call,) = provider.prepare(cell, tensors).values()
    errors = modified_reference_of(provider, cell, tensors).check(call())
    assert errors.largest <= errors.allowed < 0.05
    # Beside the plain kernel a prefix of no keys is the causal mask, and a window hides one key.
    same = name in (PLAIN, "window") or (name == "prefix" and cell.causal)
    if not same:
        with pytest.raises(WrongOutput):
            modified_reference_of(Modified(PLAIN, []), cell, tensors).check(call())


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
    bench_rates.compiled(Rates(Float8E4M3FN, ("WGMMA RS", "softmax")))


@pytest.mark.gpu
def test_clocks():
    assert ("WGMMA", "FFMA") in PAIRS
    wgmma, ffma = clocks_of(Rates(Float8E4M3FN, ("WGMMA", "FFMA")))
    # At best 64 clocks for 64 x 128 x 32 products, and one of each instruction in a clock.
    assert wgmma >= 64 and ffma >= 128
