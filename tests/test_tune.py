"""`python -m fa3 tune` on recorded times: what is measured, kept, fitted, found again and told."""

import contextlib
import io
import json
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import results
from benchmarks.plans import can_run, cell_of, config_of
from benchmarks.problems import problem_of
from benchmarks.results import OK, PlanRow
from fa3.__main__ import main
from fa3.calls import devices, tuned_costs
from fa3.planning.costs import parse_costs, shipped_costs, text_of
from fa3.planning.fit import errors, fit_all
from fa3.planning.gpu import H200, Gpu
from fa3.planning.plan import Plan
from fa3.planning.planner import CHOICES, plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.running.compiler import Kernel
from fa3.scores.masks import Band
from fa3.tools import cost_report, info, plan_command, plan_stopwatch, tune_command
from fa3.tools.arguments import make_parser
from fa3.tools.models import PRESETS
from fa3.tools.plan_stopwatch import GpuWorkbench
from fa3.tools.plan_times import PlanTime, PlanTimes, alone, digest_of_sources
from fa3.tools.timing import Block
from fa3.tools.tuning import (
    DEFAULT_MODELS,
    LONG_CALLS,
    TUNED_SIZES,
    fit_times,
    in_turn,
    observed,
    plans_to_measure,
    regret,
    shapes_of,
)

pytestmark = pytest.mark.filterwarnings("error")

RECORDS = Path(__file__).parents[1] / "benchmarks" / "results"
NAME = "NVIDIA H100 80GB HBM3"
SOURCE = {"fitted": "2026-11-22", "cells": 3, "held_out_error": {"median": 0.01}}


def recorded_times(head_dim: int) -> list[PlanTime]:
    """Times of an H200: causal, 16k tokens, one head size; the plans that the planner considers."""
    names = "h200-2026-11-21-grid", "h200-2026-11-21-grid-steady"
    rows = [
        row
        for name in names
        for row in results.read(RECORDS / name / "schedules.csv", PlanRow)
        if row.status == OK and row.causal and row.head_dim == head_dim
    ]
    return [
        PlanTime(problem_of(cell_of(row)), config_of(row), row.schedule, row.regime, row.us)
        for row in rows
        if can_run(row) and row.schedule in CHOICES
    ]


@pytest.fixture(scope="module")
def recorded() -> list[PlanTime]:
    return recorded_times(128)


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorded:
    """A bench that looks times up; a plan that was not recorded takes its predicted time.

    Fields:
        factor: on all times. plans: so many are measured before Ctrl-C.
        compile_s: seconds that a kernel takes of `processes` that compile side by side. broken:
            kernels that do not compile, by their number.
        measure_s: seconds that a plan takes beside so many `calls` of it.
    """

    def __init__(
        self,
        times: list[PlanTime],
        factor: float = 1.0,
        plans: float = float("inf"),
        compile_s: float = 0.0,
        processes: int = 4,
        broken: Sequence[int] = (),
        measure_s: float = 0.25,
        calls: int = 0,
        on_disk: Iterable[Kernel] = (),
    ):
        self.us = {one[:-1]: factor * one.us for one in times}
        self.factor, self.plans = factor, plans
        self.compile_s, self.processes, self.broken = compile_s, processes, broken
        self.measure_s, self.calls, self.clock = measure_s, calls, Clock()
        self.on_disk = set(on_disk)
        self.asked, self.measured, self.groups = [], [], []

    def has(self, kernel):
        return kernel in self.on_disk

    @contextlib.contextmanager
    def compilers(self, kernels):
        self.asked = list(kernels)
        self.begin = self.clock()
        self.tried = 0
        yield self

    def next_done(self, timeout_s=None):
        if self.tried == len(self.asked):
            self.clock.now += timeout_s
            return None
        done = self.begin + self.compile_s * (self.tried // self.processes + 1)
        if done > self.clock.now + timeout_s:
            self.clock.now += timeout_s
            return None
        self.clock.now = max(self.clock.now, done)
        kernel = self.asked[self.tried]
        if self.tried not in self.broken:
            self.on_disk.add(kernel)
        self.tried += 1
        return kernel

    def measure(self, plans):
        assert len({plan.problem for plan in plans}) == 1
        assert all(self.has(one.kernel) for plan in plans for one in plan.launches())
        if len(self.measured) + len(plans) > self.plans:
            raise KeyboardInterrupt
        call_s = sum(plan.predict().us for plan in plans) / 1e6
        self.clock.now += self.measure_s * len(plans) + self.calls * call_s
        self.measured += [(plan.problem, plan.name) for plan in plans]
        self.groups.append(len(plans))
        found = []
        for plan in plans:
            prediction = plan.predict()
            for regime, us in (("burst", prediction.burst_us), ("steady", prediction.us)):
                key = plan.problem, plan.config, plan.schedule.name, regime
                found.append(PlanTime(*key, self.us.get(key, self.factor * us)))
        return found


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A cache of its own, and a process that has read no costs."""
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned_costs, "READ", {})
    return tmp_path / "cache"


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(NAME, 132, 26 << 20)


def options(*arguments: str) -> Namespace:
    return make_parser("").parse_args(["tune", *arguments])


SHAPES = ("--shapes", "4,4096,4096,16,16,128", "16,1024,1024,16,16,128", "--causal")
"""Two shapes of the record."""


def tune(gpu, bench, *arguments) -> None:
    tune_command.tune(options(*arguments), gpu, bench, bench.clock)


# ------------------------------------------------------------------------------------- shapes


def test_a_preset_s_shapes_are_its_own():
    found = tune_command.problems_to_tune(options("--preset", "llama3-8b"))
    assert len(found) == len(TUNED_SIZES)
    assert {(one.num_heads_q, one.num_heads_kv, one.spec.head_dim) for one in found} == {
        (32, 8, 128)
    }
    assert {one.window for one in found} == {Window(right=0)}
    half = tune_command.problems_to_tune(options("--preset", "llama3-8b", "--dtype", "fp16"))
    assert {one.spec.dtype for one in half} == {"float16"}


def test_every_tile_of_a_preset_is_measured_often_enough_to_be_known():
    for preset in ("llama3-8b", "gpt-oss", "gemma2-9b"):
        tiles = {}
        for problem in shapes_of([PRESETS[preset]]):
            for plan in plans_to_measure(problem, H200):
                tiles.setdefault(plan.tiled.key, set()).add(problem)
        assert len(tiles) >= 4
        assert {key.follows for key in tiles} == {True, False}
        assert sum(len(problems) >= 4 for problems in tiles.values()) >= len(tiles) - 1, preset


def test_scores_are_left_out_and_windows_are_not():
    found = shapes_of([PRESETS["gemma2-9b"]])
    assert not any(one.spec.scores or one.spec.sinks for one in found)
    assert {one.window for one in found} == {Window(right=0), Window(4095, 0)}


def test_default_shapes_come_in_turn():
    found = tune_command.problems_to_tune(options())
    assert [one.spec.head_dim for one in found[:6]] == [128, 64, 256] * 2
    assert len(found) == len(TUNED_SIZES) * len(DEFAULT_MODELS)


def test_only_what_the_planner_considers_is_measured():
    for problem in shapes_of(DEFAULT_MODELS):
        plans = plans_to_measure(problem, H200)
        assert plan_forward(problem).name in {plan.name for plan in plans}
        assert len({plan.name for plan in plans}) == len(plans)
        assert {plan.schedule.name for plan in plans} <= set(CHOICES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "llama3-8b", "--causal"), "a preset says its mask"),
        (("--window", "5", "0"), "go with --shapes"),
    ],
)
def test_wrong_shapes_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        tune_command.problems_to_tune(options(*arguments))


@pytest.mark.parametrize(("text", "value"), [("60s", 60), ("5m", 300), ("90", 90), ("0.5h", 1800)])
def test_budgets(text, value):
    assert options("--budget", text).budget == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "soon"), "needs a time as in 60s or 5m, got 'soon'"),
        (("--shapes", "1,2,3"), "six positive integers B,SQ,SK,HQ,HKV,D, got '1,2,3'"),
    ],
)
def test_wrong_values_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit):
        options(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_tune():
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        main(["tune"])


# ---------------------------------------------------------------------------------------- fit


def test_costs_fitted_to_an_h200_choose_as_well_as_those_that_come_with_fa3(recorded):
    """As good on head sizes that were not measured, too, and closer on those that were."""
    tuning = fit_times(H200, recorded, {})
    assert tuning.accuracy.median < 0.02
    assert tuning.regret < tuning.shipped_regret + 0.002 < 0.01
    tuned = replace(H200, tuned=tuning.costs)
    others = recorded_times(64) + recorded_times(256)
    assert regret(tuned, others) < regret(H200, others) + 0.002


def test_a_fit_from_another_gpu_s_costs_finds_this_one_s(recorded, gpu):
    """An H100 begins with too little bandwidth for these times, a slower GPU with short ones."""
    for factor in (1.0, 1.3):
        times = [one._replace(us=factor * one.us) for one in recorded]
        tuning = fit_times(gpu, times, {})
        assert tuning.costs.measured and tuning.costs.gpu == NAME
        assert tuning.accuracy.median < 0.03
        tuned = replace(gpu, tuned=tuning.costs)
        before = errors(gpu.costs, [observed(one, gpu) for one in times])
        after = errors(tuning.costs, [observed(one, gpu) for one in times])
        assert sum(error**2 for _, error in after) < sum(error**2 for _, error in before) / 4
        assert regret(tuned, times) < 0.01


def test_tiles_that_were_not_measured_are_scaled_with_the_others(recorded, gpu):
    times = [one._replace(us=1.3 * one.us) for one in recorded]
    costs, shipped = fit_times(gpu, times, {}).costs, shipped_costs(NAME)
    assert costs.schedules == shipped.schedules and costs.tiles.keys() == shipped.tiles.keys()
    for key, tile in costs.tiles.items():
        before = shipped.tiles[key]
        assert tile.cells == before.cells + tile.tuned
        assert (tile.tuned == 6) == ((key.head_dim, key.masked) == (128, True) and not key.follows)
        if not tile.tuned:
            assert 1.2 < tile.full_us / before.full_us < 1.4
            assert tile.masked_us / tile.full_us == pytest.approx(before.masked_us / before.full_us)


def test_one_shape_is_enough_to_fit(recorded, gpu):
    some = [one for one in recorded if one.problem == recorded[0].problem]
    tuning = fit_times(gpu, some, {})
    assert tuning.cells == 1 and tuning.accuracy.times == len(some)


def test_a_fit_from_nothing_has_only_what_was_measured(recorded):
    from benchmarks.fit_costs import START

    seen = [observed(one, H200) for one in recorded]
    assert fit_all(START, seen).tiles.keys() == {one.key for one in seen}


# ------------------------------------------------------------------------------- what is kept


def test_times_survive_the_file(folder, recorded):
    record = PlanTimes.read(NAME)
    assert record.times == []
    record.add(recorded[:3])
    record.add(recorded[3:])
    found = PlanTimes.read(NAME)
    assert [one[:-1] for one in found.times] == [one[:-1] for one in recorded]
    assert [one.us for one in found.times] == pytest.approx([one.us for one in recorded], abs=1e-3)
    assert PlanTimes.read(H200.name).times == []


def test_times_of_other_sources_are_not_read(folder, recorded, monkeypatch):
    PlanTimes.read(NAME).add(recorded[:3])
    monkeypatch.setattr("fa3.tools.plan_times.SOURCES", {"kernels/forward.py": (0, "edited")})
    assert PlanTimes.read(NAME).times == []


def test_tuned_costs_reach_calls_in_the_next_process(folder, gpu, recorded, monkeypatch, capsys):
    class Properties:
        major, minor, multi_processor_count, name = 9, 0, 132, NAME

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    find = devices.gpu_of.__wrapped__
    before = find(torch.device("cuda", 0))
    assert before.tuned is None and before.costs == shipped_costs(NAME)
    tune(gpu, Recorded(recorded, 1.3), *SHAPES)
    # What this process plans stays as it is.
    assert find(torch.device("cuda", 0)) == before
    monkeypatch.setattr(tuned_costs, "READ", {})
    after = find(torch.device("cuda", 0))
    assert after != before and hash(after) != hash(before)
    assert after.tuned is not None and after.costs.source["cells"] == 2
    assert devices.reserve_sms(after, 4).costs is after.costs
    problem = tune_command.problems_to_tune(options(*SHAPES))[0]
    shipped, tuned = (plan_forward(problem, one) for one in (before, after))
    assert 1.15 < tuned.predict().us / shipped.predict().us < 1.45
    assert f"Not measured on an {NAME}" in str(shipped.explain())
    assert "Costs    Tuned to this GPU: 20" in str(tuned.explain())
    assert "2 shapes, median error" in str(tuned.explain())
    assert "its tile on 2 of them." in str(tuned.explain())
    assert "Not measured" not in str(tuned.explain())
    assert "Costs" not in str(shipped.explain())


def test_a_remembered_cut_is_not_that_of_other_costs():
    problem = Problem(AttentionSpec("bfloat16", 128, 128, Band()), 1, 8192, 8192, 3)
    costs = H200.costs
    tiles = {key: tile._replace(tile_us=20 * tile.tile_us) for key, tile in costs.tiles.items()}
    tuned = replace(H200, tuned=replace(costs, tiles=tiles))
    config = plan_forward(problem).config
    one, other = (plan_forward(problem, gpu, config, "split").schedule for gpu in (H200, tuned))
    assert one != other


def test_the_plan_command_plans_for_the_gpu_that_is_here(gpu, monkeypatch, capsys):
    tuned = replace(gpu, tuned=replace(gpu.costs, source=SOURCE))
    monkeypatch.setattr(plan_command, "known_gpus", lambda: [tuned, H200])
    main(["plan", "--shape", "1,512,512,2,1,128"])
    assert "Costs    Tuned to this GPU: 2026-11-22, 3 shapes" in capsys.readouterr().out


def tuned_file(gpu: Gpu) -> Path:
    """A file of costs as they come with fa3, as if fitted."""
    costs = replace(gpu.costs, gpu=gpu.name, measured=True, source=SOURCE)
    return tuned_costs.keep_costs(costs)


def test_costs_are_read_once(folder, gpu, monkeypatch):
    path = tuned_file(gpu)
    assert path == folder / "tuned-nvidia-h100-80gb-hbm3.costs"
    first = tuned_costs.tuned_costs(NAME)
    assert first is not None and first.when == "2026-11-22, 3 shapes, median error 1.0%"
    path.unlink()
    assert tuned_costs.tuned_costs(NAME) is first
    monkeypatch.setattr(tuned_costs, "READ", {})
    assert tuned_costs.tuned_costs(NAME) is None


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def foreign(path: Path) -> None:
    path.write_bytes(b"something else")


def writable(path: Path) -> None:
    path.chmod(0o666)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def of_another_version(path: Path) -> None:
    content = json.loads(text_of(shipped_costs(NAME))) | {"gpu": NAME, "more": 1}
    tuned_costs.write_kept(path, json.dumps(content))


def no_object(path: Path) -> None:
    tuned_costs.write_kept(path, "[]")


def of_another_gpu(path: Path) -> None:
    tuned_costs.write_kept(path, text_of(shipped_costs(H200.name)))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (torn, "damaged"),
        (foreign, "damaged"),
        (writable, "others may write to"),
        (link, "not to be trusted"),
        (of_another_version, "not costs of"),
        (no_object, "not costs of"),
        (of_another_gpu, "they are of a NVIDIA H200"),
    ],
)
def test_a_file_that_is_not_ours_is_ignored_and_named(folder, gpu, spoil, why):
    path = tuned_file(gpu)
    spoil(path)
    with pytest.warns(RuntimeWarning, match=f"ignores {path}.*{why}"):
        assert tuned_costs.tuned_costs(NAME) is None
    # Once: from then on it is known.
    assert tuned_costs.tuned_costs(NAME) is None


def test_no_folder_is_no_costs(folder, monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", "~nouser/x")
    assert tuned_costs.tuned_costs(NAME) is None


# ------------------------------------------------------------------------------------- a run


def of_shapes(gpu) -> list[list[Plan]]:
    """The plans of both shapes, the most promising first."""
    return [plans_to_measure(one, gpu) for one in tune_command.problems_to_tune(options(*SHAPES))]


def test_a_run_says_what_it_did(folder, gpu, recorded, capsys):
    tune(gpu, bench := Recorded(recorded, compile_s=3, processes=100), *SHAPES)
    lines = capsys.readouterr().out.splitlines()
    names = "GPU", "Plans", "Kernels", "Spent", "Times", "Fit", "Choice", "Costs"
    assert tuple(line.split()[0] for line in lines) == names
    plans = sum(map(len, of_shapes(gpu)))
    assert lines[1] == f"Plans    {plans} of 2 shapes, 0 of them measured before"
    assert lines[2] == f"Kernels  {len(bench.asked)} to compile"
    assert lines[3] == f"Spent    3.0 s compiling, {plans / 4:.1f} s measuring"
    assert lines[4] == f"Times    {2 * plans}"
    assert lines[5].startswith("Fit      2 shapes; error median ")
    assert str(folder) in lines[-1]
    assert len(bench.measured) == len(set(bench.measured)) == plans


def test_the_most_promising_come_first(gpu):
    plans = of_shapes(gpu)
    for found in plans:
        choice = plan_forward(found[0].problem, gpu)
        assert found[0].name == choice.name
        compared = {(one.config, one.schedule) for one in choice.considered}
        inside = [(plan.config, plan.schedule.name) in compared for plan in found]
        assert inside == sorted(inside, reverse=True) and any(inside)
    first, second = plans
    assert in_turn(plans)[:4] == [first[0], second[0], first[1], second[1]]
    assert len(in_turn(plans)) == len(first) + len(second)


def test_plans_are_measured_while_others_are_compiled(folder, gpu, recorded):
    """Each as soon as its kernels are there, and those of a shape together that are."""
    tune(gpu, bench := Recorded(recorded, compile_s=2, processes=2, measure_s=0.1), *SHAPES)
    plans = [found[0] for found in of_shapes(gpu)]
    kernels = list(dict.fromkeys(one.kernel for plan in plans for one in plan.launches()))
    assert bench.asked[: len(kernels)] == kernels
    assert bench.measured[0] == (plans[0].problem, plans[0].name)
    assert len(bench.groups) > 4
    # Measuring took no time beside the last kernel's compilation but that of a few plans.
    assert bench.clock() - 100 < 2 * -(-len(bench.asked) // 2) + 1


def test_kernels_that_are_there_are_measured_together(folder, gpu, recorded):
    kernels = {one.kernel for found in of_shapes(gpu) for plan in found for one in plan.launches()}
    tune(gpu, bench := Recorded(recorded, on_disk=kernels), *SHAPES)
    assert bench.asked == []
    assert bench.groups == [len(found) for found in of_shapes(gpu)]


def test_a_budget_that_compiling_spends_measures_nothing_and_says_so(folder, gpu, recorded, capsys):
    """As on an H100 where a budget of 8 s was too short; what was compiled is there then."""
    bench = Recorded(recorded, compile_s=5, processes=1)
    with pytest.raises(SystemExit) as ended:
        tune(gpu, bench, *SHAPES, "--budget", "8s")
    left = len(bench.asked) - 1
    assert str(ended.value) == (
        f"fa3: the budget of 8 s ended before any plan was measured: {left} kernels not compiled "
        "yet. What is compiled is kept: the same command goes on, better with --budget 60s"
    )
    assert bench.clock() == 108 and bench.measured == []
    assert "Spent    8.0 s compiling, 0.0 s measuring" in capsys.readouterr().out
    assert not list(folder.glob("*.costs"))
    again = Recorded(recorded, compile_s=5, processes=1, on_disk=bench.on_disk)
    tune(gpu, again, *SHAPES, "--budget", "8s")
    assert again.measured and list(folder.glob("*.costs"))


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_a_budget_holds(folder, gpu, recorded, budget, capsys):
    bench = Recorded(recorded, compile_s=0.5, processes=2, measure_s=0.25)
    tune(gpu, bench, *SHAPES, "--budget", f"{budget}s")
    assert bench.measured and bench.clock() <= 100 + budget + 0.25
    out = capsys.readouterr().out
    left = sum(map(len, of_shapes(gpu))) - len(bench.measured)
    assert out.endswith(f"{left} plans left: the same command goes on\n") == (left > 1)


def test_a_slow_plan_ends_a_run_before_its_budget(folder, gpu, recorded):
    """The first group is as many as should fit; from then on it is known what they take."""
    bench = Recorded(recorded, measure_s=4)
    tune(gpu, bench, *SHAPES, "--budget", "1s")
    assert len(bench.measured) <= 3
    tune(gpu, again := Recorded(recorded, measure_s=4), *SHAPES, "--budget", "0.2s")
    assert len(again.measured) == 1


def test_long_calls_are_measured_as_far_as_the_budget_goes(folder, gpu, recorded):
    """It is known before how long they take; short ones of another shape get the rest."""
    arguments = "--shapes", "1,131072,131072,32,8,128", "1,512,512,8,2,128", "--causal"
    found = [
        plans_to_measure(one, gpu) for one in tune_command.problems_to_tune(options(*arguments))
    ]
    kernels = {one.kernel for plans in found for plan in plans for one in plan.launches()}
    long, _ = (plans[0].problem for plans in found)
    for budget, most in ((20, 4), (2, 0)):
        bench = Recorded(recorded, on_disk=kernels, calls=LONG_CALLS)
        tune(gpu, bench, *arguments, "--budget", f"{budget}s")
        assert bench.clock() <= 100 + budget
        of_long = [problem == long for problem, _ in bench.measured]
        assert of_long.count(True) <= most and not all(of_long)
        tune_command.forget(gpu)


def test_no_budget_measures_nothing_and_fits_what_there_is(folder, gpu, recorded, capsys):
    with pytest.raises(SystemExit, match="the budget of 0 s ended"):
        tune(gpu, Recorded(recorded), *SHAPES, "--budget", "0s")
    assert "Times" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="interrupted"):
        tune(gpu, Recorded(recorded, compile_s=1, plans=3), *SHAPES)
    with pytest.raises(SystemExit, match="the budget of 0 s ended"):
        tune(gpu, Recorded(recorded), *SHAPES, "--budget", "0s")
    assert "Times    " in capsys.readouterr().out
    assert list(folder.glob("*.costs"))


def test_an_interrupted_run_goes_on_where_it_stopped(folder, gpu, recorded, capsys):
    first = Recorded(recorded, compile_s=1, processes=2, plans=4)
    with pytest.raises(SystemExit) as ended:
        tune(gpu, first, *SHAPES)
    kept = len(PlanTimes.read(NAME).times)
    assert kept == 2 * len(first.measured) > 0
    assert str(ended.value) == (
        f"fa3: interrupted; {kept} times kept. The same command goes on where this one stopped"
    )
    assert not list(folder.glob("*.costs"))
    assert "Spent" in capsys.readouterr().out
    tune(gpu, second := Recorded(recorded), *SHAPES)
    assert f", {len(first.measured)} of them measured before" in capsys.readouterr().out
    assert not set(first.measured) & set(second.measured)
    assert len(first.measured) + len(second.measured) == sum(map(len, of_shapes(gpu)))
    tune(gpu, third := Recorded(recorded), *SHAPES)
    assert third.measured == third.asked == []
    assert (
        parse_costs(tuned_costs.read_kept(next(folder.glob("*.costs"))).decode()).source["cells"]
        == 2
    )


def test_ctrl_c_while_costs_are_fitted_keeps_the_times(folder, gpu, recorded, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="fa3: interrupted"):
        patch.setattr(tune_command, "fit_times", interrupt)
        tune(gpu, Recorded(recorded), *SHAPES)
    tune(gpu, again := Recorded(recorded), *SHAPES)
    assert again.measured == [] and list(folder.glob("*.costs"))


def test_a_single_plan_is_enough(folder, gpu, recorded, capsys):
    """Its tile gets times of its own, near those that come with fa3; all others keep to them."""
    bench = Recorded(recorded, factor=1.1, compile_s=1, processes=1)
    tune(gpu, bench, *SHAPES, "--budget", "2.1s")
    assert len(bench.measured) == 1
    (path,) = folder.glob("*.costs")
    costs = parse_costs(tuned_costs.read_kept(path).decode())
    assert costs.source["times"] == 2
    before = shipped_costs(NAME)
    assert sum(tile.tuned for tile in costs.tiles.values()) == 1
    ratios = [tile.full_us / before.tiles[key].full_us for key, tile in costs.tiles.items()]
    assert min(ratios) > 0.8 and max(ratios) < min(1.25, 1.02 * min(ratios))
    out = capsys.readouterr().out
    assert "Fit      1 shape" in out and "nan" not in out


@pytest.mark.parametrize("broken", [(0,), (2, 3)])
def test_a_kernel_that_does_not_compile_leaves_out_its_plans(folder, gpu, recorded, broken, capsys):
    tune(gpu, bench := Recorded(recorded, compile_s=1, broken=broken), *SHAPES)
    lost = {bench.asked[number] for number in broken}
    plans = [plan for found in of_shapes(gpu) for plan in found]
    failed = [plan for plan in plans if lost & {one.kernel for one in plan.launches()}]
    assert failed and len(bench.measured) == len(plans) - len(failed) > 0
    assert f"Failed   {len(failed)} plan" in capsys.readouterr().out
    assert list(folder.glob("*.costs"))


def test_no_kernel_that_compiles_is_an_error(folder, gpu, recorded):
    with pytest.raises(SystemExit, match="no kernel could be compiled"):
        tune(gpu, bench := Recorded(recorded, compile_s=1, broken=range(100)), *SHAPES)
    assert bench.measured == []


def test_a_bar_tells_what_the_time_went_to(folder, gpu, recorded, monkeypatch):
    monkeypatch.setattr(tune_command, "terminal", lambda: stream)
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    tune(gpu, Recorded(recorded, compile_s=2, processes=1), *SHAPES)
    plans = sum(map(len, of_shapes(gpu)))
    lines = [line.rstrip() for line in stream.getvalue().split("\r")]
    assert any(f" 0 of {plans} plans, 0 s: 1.0 s compiling, 0.0 s measuring" in x for x in lines)
    assert f" {plans} of {plans} plans, " in lines[-1] and "left" not in lines[-1]
    assert stream.getvalue().count("\n") == 1


def test_a_torn_record_is_measured_again(folder, gpu, recorded):
    tune(gpu, first := Recorded(recorded), *SHAPES)
    torn(folder / "tuned-nvidia-h100-80gb-hbm3.times")
    with pytest.warns(RuntimeWarning, match="hbm3.times, which is damaged"):
        tune(gpu, second := Recorded(recorded), *SHAPES)
    assert len(second.measured) == len(first.measured)


def test_costs_that_choose_worse_are_not_kept(folder, gpu, recorded, monkeypatch, capsys):
    """Nor are earlier ones, which have seen fewer times."""
    tune(gpu, Recorded(recorded), *SHAPES, "--budget", "0.1s")
    assert list(folder.glob("*.costs"))
    fit = tune_command.fit_times
    monkeypatch.setattr(tune_command, "fit_times", lambda *given: fit(*given)._replace(regret=0.05))
    tune(gpu, Recorded(recorded), *SHAPES)
    assert "Costs    not kept: those that come with fa3 choose better" in capsys.readouterr().out
    assert not list(folder.glob("*.costs"))


def test_what_was_tuned_is_forgotten(folder, gpu, recorded):
    tune(gpu, Recorded(recorded), *SHAPES)
    assert len(list(folder.glob("tuned-*"))) == 3
    tune_command.forget(gpu)
    assert [path.suffix for path in folder.glob("tuned-*")] == [".lock"]


def test_nothing_is_measured_that_could_not_be_kept(folder, gpu, recorded):
    folder.mkdir(mode=0o755)
    folder.chmod(0o775)
    with pytest.raises(PermissionError, match="others may write to"):
        tune(gpu, bench := Recorded(recorded), *SHAPES)
    assert bench.asked == []


def test_one_process_tunes_a_gpu_at_a_time(folder, gpu, recorded):
    with alone(NAME), pytest.raises(RuntimeError, match="another process tunes"):
        tune(gpu, Recorded(recorded), *SHAPES)
    with alone(NAME), alone(H200.name):
        pass


def test_kernels_that_are_cleared_leave_the_costs(folder, gpu):
    path = tuned_file(gpu)
    main(["cache", "clear"])
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "sources", "text"),
    [
        (H200.name, None, "those that come with fa3"),
        (NAME, None, f"those that come with fa3, of an {H200.name}: `fa3 tune` measures"),
        (
            NAME,
            digest_of_sources(),
            f"tuned to the {NAME}: 2026-11-22, 3 shapes, median error 1.0%",
        ),
        (
            NAME,
            "others",
            f"tuned to the {NAME}: 2026-11-22, 3 shapes, median error 1.0%; fa3 has changed since, "
            "so tune again",
        ),
    ],
)
def test_costs_say_where_they_are_from(gpu, name, sources, text, monkeypatch):
    gpu = replace(gpu, name=name)
    if sources:
        costs = replace(gpu.costs, gpu=NAME, source=SOURCE | {"sources": sources})
        gpu = replace(gpu, tuned=costs)
    monkeypatch.setattr(cost_report, "known_gpus", lambda: [gpu])
    assert cost_report.describe_costs() == text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert info.costs_here() == text


# ----------------------------------------------------------------------------------- the bench


def test_times_are_medians_of_rounds(monkeypatch):
    """On the CPU, where plans compute but clocks are made up."""
    ran = []

    def make_runner(calls):
        ran.extend(call() for call in calls)
        return len(ran)

    def run_rounds(runners, regime, rounds, shuffle):
        for us in (1, 2, 9):
            for name, number in runners.items():
                yield name, Block(10 * number + us + (regime.name == "steady"), 1, 0.0, 1.0)

    monkeypatch.setattr(plan_stopwatch, "make_runner", make_runner)
    monkeypatch.setattr(plan_stopwatch, "run_rounds", run_rounds)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    (problem,) = tune_command.problems_to_tune(options("--shapes", "1,150,200,2,1,64", "--causal"))
    plans = plans_to_measure(problem, H200)
    times = GpuWorkbench(torch.device("cpu")).measure(plans)
    assert [(one.config, one.schedule) for one in times] == [
        (plan.config, plan.schedule.name) for plan in plans
    ] * 2
    assert [one.us for one in times] == [
        10 * number + 2 + steady for steady in (0, 1) for number in range(1, len(plans) + 1)
    ]
    assert all(out.shape == (1, 150, 2, 64) for out in ran)


# ------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def first_plans(monkeypatch):
    """Of each shape the plan alone that the planner chooses, so that little is compiled."""

    def first(problem: Problem, gpu: Gpu) -> list[Plan]:
        return plans_to_measure(problem, gpu)[:1]

    monkeypatch.setattr(tune_command, "plans_to_measure", first)


@pytest.mark.gpu
def test_shapes_are_tuned_on_the_gpu(folder, capsys, monkeypatch, first_plans):
    """Two shapes with a kernel each."""
    shapes = "1,1024,1024,8,2,128", "1,256,256,8,2,128"
    arguments = ["tune", "--shapes", *shapes, "--causal", "--budget", "60s"]
    main(arguments)
    printed = capsys.readouterr().out
    assert "Plans    2 of 2 shapes, 0 of them measured before" in printed
    assert "Fit      2 shapes" in printed
    # Nothing is left to measure, and the costs are kept for the next process.
    main(arguments)
    assert "2 of 2 shapes, 2 of them measured before\nKernels  0" in capsys.readouterr().out
    monkeypatch.setattr(tuned_costs, "READ", {})
    gpu = devices.gpu_of.__wrapped__(torch.device("cuda", torch.cuda.current_device()))
    times = PlanTimes.read(gpu.name).times
    assert sorted(one.regime for one in times) == ["burst"] * 2 + ["steady"] * 2
    for one in times:
        plan = plan_forward(one.problem, gpu, one.config, one.schedule)
        # Of the same unit; the GPU may have other work.
        assert 0.5 < one.us / plan.predict().us < 50
        assert "Costs    Tuned to this GPU: " in str(plan.explain())


@pytest.mark.gpu
def test_a_short_budget_holds_on_the_gpu(folder, capsys):
    """Four kernels are compiled anew. The command ends in time, measures or says it could not."""
    arguments = ["tune", "--shapes", "1,256,256,8,2,128", "--causal", "--budget", "8s"]
    begin = time.monotonic()
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert time.monotonic() - begin < 15
    assert "Spent    " in capsys.readouterr().out
