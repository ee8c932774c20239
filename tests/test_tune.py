"""`fa3 tune`: what is measured, which plan is kept, and which calls run by it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import noting_launches
from problems import CAUSAL, make_operands, make_problem

import fa3
from fa3.__main__ import main
from fa3.calls import tuned_plans
from fa3.calls.devices import gpu_of
from fa3.calls.tuned_plans import plan_call, plans_path
from fa3.planning.costs import H200, Gpu
from fa3.planning.planner import CHOICES, plan_dense, plan_forward
from fa3.problem import Problem
from fa3.running import code_cache
from fa3.settings import SETTINGS
from fa3.tools import compile_pool
from fa3.tools import tune as module
from fa3.tools.tune import MOST_PLANS, fastest, plans_to_measure, tune

pytestmark = pytest.mark.filterwarnings("error")

LONG = make_problem(1, 4096, 4096, 8, 4, 128, CAUSAL)
MANY = make_problem(4, 4096, 4096, 16, 1, 128, CAUSAL)
"""The planner has several good plans in the forward kernel for these."""

SHORT = make_problem(1, 300, 300, 1, 4, 64)
"""The decode kernel is a good plan for it, but not the planner's choice."""

FEW = make_problem(1, 4, 3000, 4, 4, 64, CAUSAL)
"""The planner chooses the decode kernel for it."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A cache of its own, and a process that has read no plans."""
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    next_process(monkeypatch)
    return tmp_path / "cache"


def next_process(monkeypatch) -> None:
    """Forget what this process has read."""
    monkeypatch.setattr(tuned_plans, "READ", {})


class Compiler:
    """Stands for the compilation of kernels: notes what is asked for and puts it on disk.

    Attributes:
        broken: says of a kernel whether it does not compile.
    """

    def __init__(self) -> None:
        self.on_disk, self.asked = set(), []
        self.broken = lambda kernel: False

    def compile_all(self, kernels) -> None:
        self.asked += kernels
        self.on_disk |= {kernel for kernel in kernels if not self.broken(kernel)}


@pytest.fixture
def compiler(monkeypatch, folder) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(module, "compile_all", made.compile_all)
    monkeypatch.setattr(module, "is_on_disk", lambda kernel: kernel in made.on_disk)
    return made


class Stopwatch:
    """Says what plans take: the microseconds that are given for a name, else 100."""

    def __init__(self, **us: float) -> None:
        self.us, self.measured = us, []

    def __call__(self, plans: Sequence) -> list[float]:
        assert len({plan.problem for plan in plans}) == 1
        self.measured += [(plan.problem, plan.name) for plan in plans]
        return [self.us.get(plan.name, 100.0) for plan in plans]


def tuned_to(problem: Problem, name: str, us: float = 90.0, gpu: Gpu = H200) -> None:
    """Tune a problem on a GPU on which the plan of this name takes so long, and others 100 us."""
    tune([problem], gpu, Stopwatch(**{name: us}))


# ----------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("problem", [LONG, MANY, SHORT, FEW])
def test_the_choice_comes_first_then_the_best_of_the_others(problem):
    plans = plans_to_measure(problem, H200)
    assert plans[0].name == plan_dense(problem, H200).name
    assert len({plan.name for plan in plans}) == len(plans) <= MOST_PLANS
    predicted = [plan.predict().mean_us for plan in plans[1:]]
    assert predicted == sorted(predicted)
    assert all(us <= module.HOPELESS * plans[0].predict().mean_us for us in predicted)
    assert {plan.schedule.name for plan in plans if plan.name != "packed"} <= set(CHOICES)


def test_kernels_are_compiled_once(compiler):
    tune([LONG, MANY], H200, Stopwatch())
    assert len(set(compiler.asked)) == len(compiler.asked) > MOST_PLANS
    compiler.asked.clear()
    tune([LONG], H200, Stopwatch())
    assert not compiler.asked


def test_a_kernel_that_does_not_compile_leaves_out_its_plans(compiler):
    choice, *others = (plan for plan in plans_to_measure(LONG, H200))
    broken = choice.launches()[0].kernel
    compiler.broken = lambda kernel: kernel == broken
    tune([LONG], H200, stopwatch := Stopwatch(**{choice.name: 1.0}))
    assert 0 < len(stopwatch.measured) < MOST_PLANS
    assert plan_call(LONG, H200).name in {plan.name for plan in others}


def test_nothing_is_measured_that_could_not_be_kept(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o775)
    monkeypatch.setattr(compile_pool.subprocess, "Popen", lambda *_, **named: pytest.fail("runs"))
    with pytest.raises(RuntimeError, match="others may write to"):
        tune([LONG], H200, stopwatch := Stopwatch())
    assert not stopwatch.measured


# -------------------------------------------------------------------------------- what is kept


def test_the_fastest_is_kept_if_it_is_clearly_faster():
    times_of = {0: [90, 100, 95], 1: [100, 90, 95], 2: [100, 98.9, 98.8]}
    assert [*map(fastest, times_of.values())] == [*times_of]
    # No more than two measurements of one plan differ.
    assert fastest([100, 99.5, 99.2]) == fastest([100]) == 0


def launched(problem: Problem, **options) -> list:
    """The kernels that a call on a GPU launches."""
    q, k, v = make_operands(problem)
    with noting_launches() as notes:
        notes.begin({"q": q, "k": k, "v": v})
        fa3.flash_attn_func(q, k, v, window_size=problem.window, **options)
        return [kernel for kernel, _ in notes.launches]


def kernels_of(plan) -> list:
    return [launch.kernel for launch in plan.launches()]


@pytest.mark.parametrize("problem", [SHORT, make_problem(1, 700, 900, 2, 2, 128, CAUSAL)])
def test_calls_run_by_the_plan_that_is_kept(problem, compiler, monkeypatch):
    choice, *others = plans_to_measure(problem, H200)
    assert launched(problem) == kernels_of(choice)
    for plan in others:
        tuned_to(problem, plan.name)
        next_process(monkeypatch)
        assert launched(problem) == kernels_of(plan)
        # What the caller asks for comes first.
        assert launched(problem, schedule="static") == kernels_of(
            plan_forward(problem, H200, schedule="static")
        )
        assert launched(problem, plan=choice) == kernels_of(choice)


def test_calls_of_other_shapes_run_as_planned(compiler, monkeypatch):
    problems = [
        replace(SHORT, seqlen_q=301),
        replace(SHORT, batch=2),
        make_problem(1, 300, 300, 1, 4, 64, CAUSAL),
        make_problem(1, 300, 300, 2, 2, 64),
        make_problem(1, 300, 300, 1, 4, 64, dtype="float16"),
    ]
    tuned_to(SHORT, "packed")
    for problem in problems:
        assert plan_call(problem, H200) == plan_dense(problem, H200)
    with_dropout = replace(SHORT, spec=replace(SHORT.spec, has_dropout=True))
    assert plan_call(with_dropout, H200) == plan_dense(with_dropout, H200)
    # Fewer SMs are another GPU to the planner.
    fewer = replace(H200, num_sms=H200.num_sms - 4)
    assert plan_call(SHORT, fewer) == plan_dense(SHORT, fewer)
    with monkeypatch.context() as patch:
        patch.setitem(SETTINGS, "FA3_ROW_MAX", "online")
        assert plan_call(SHORT, H200) == plan_dense(SHORT, H200)
    assert plan_call(SHORT, H200).name == "packed"


# ------------------------------------------------------------------------------------ the file

SPOILT = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "of another GPU": lambda path: path.write_bytes(
        code_cache.with_digest(plans_path("NVIDIA H100 80GB HBM3"), b"{}")
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_file_that_is_not_whole_is_ignored_and_written_anew(spoil, compiler, monkeypatch):
    tuned_to(SHORT, "packed")
    path = plans_path(H200.name)
    spoil(path)
    with pytest.warns(RuntimeWarning, match=f"fa3 ignores {re.escape(str(path))}: "):
        assert plan_call(SHORT, H200) == plan_dense(SHORT, H200)
    # It is named once, and the next run replaces it.
    assert plan_call(SHORT, H200) == plan_dense(SHORT, H200)
    with pytest.warns(RuntimeWarning, match="ignores"):
        tuned_to(SHORT, "packed")
    next_process(monkeypatch)
    assert plan_call(SHORT, H200).name == "packed"


# -------------------------------------------------------------------------------- the commands


def test_the_command_tunes_its_shapes(compiler, monkeypatch, capsys):
    """Afterwards `fa3 plan` shows their plans."""
    stopwatch = Stopwatch(packed=50.0)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"fa3 tune: needs a Hopper GPU .*: torch sees no GPU"):
        main(["tune", "--forget"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "hopper_device", lambda: device)
    monkeypatch.setattr(module, "gpu_of", lambda of: H200)
    monkeypatch.setattr(module, "time_plans", stopwatch)
    shapes = "1,300,300,4,1,64", "1,200,300,4,1,64", "1,300,300,4,1,64"
    main(["plan", "--gpu", "H200", "--shape", shapes[0], "--causal"])
    assert "Tuned" not in capsys.readouterr().out
    main(["tune", "--shapes", *shapes, "--causal"])
    assert capsys.readouterr().out.count("kept   50.0 us  packed\n") == 2
    assert len({problem for problem, _ in stopwatch.measured}) == 2
    next_process(monkeypatch)
    assert len(tuned_plans.tuned_plans(H200.name)) == 2
    main(["plan", "--gpu", "H200", "--shape", shapes[0], "--causal"])
    printed = capsys.readouterr().out
    assert "Kernels  decode" in printed
    assert "Tuned    The fastest plan that `fa3 tune` measured on this GPU." in printed
    main(["tune", "--forget"])
    assert capsys.readouterr().out == "the planner chooses all plans for a NVIDIA H200\n"
    next_process(monkeypatch)
    assert not tuned_plans.tuned_plans(H200.name)


# ----------------------------------------------------------------------------------- stopwatch


@pytest.mark.gpu
def test_shapes_are_tuned_on_the_gpu(folder, monkeypatch, capsys, device):
    """With two plans a shape, so that little is compiled."""
    monkeypatch.setattr(module, "MOST_PLANS", 2)
    main(["tune", "--shapes", "1,1024,1024,8,2,128", "2,300,300,4,1,64", "--causal"])
    rows = re.findall(r"^(kept|    ) +([\d.]+) us  (.+)$", capsys.readouterr().out, re.MULTILINE)
    best = [(float(us), name) for mark, us, name in rows if mark == "kept"]
    assert len(rows) == 4 and len(best) == 2
    problems = (
        make_problem(1, 1024, 1024, 2, 4, 128, CAUSAL),
        make_problem(2, 300, 300, 1, 4, 64, CAUSAL),
    )
    for problem, (us, name) in zip(problems, best, strict=True):
        plan = plan_call(problem, gpu_of(device))
        assert plan.name == name
        # Of the same unit; the GPU may have other work.
        assert 0.3 < us / plan.predict().us < 50
        operands = make_operands(problem)
        out = fa3.flash_attn_func(*(one.cuda() for one in operands), causal=True)
        expected = fa3.flash_attn_func(*operands, causal=True)
        assert torch.allclose(out.cpu(), expected, atol=0.02)
