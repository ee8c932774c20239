"""A schedule, a mask, a score, a tiling or a kernel is one file, and a line if there is a table.

`docs/changes` has a small example of each as a diff. It is applied to a copy of the sources, and
what it adds is used there in a new process, by the function here that is named for it.
"""

import math
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import test_layering
import torch
from problems import CAUSAL, make_operands, make_problem
from reference import check_attention
from score_problems import NOTHING, modify

import fa3
from benchmarks.cubin import compile_kernel, inspect
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200, Gpu
from fa3.planning.planner import check_plan, plan_forward
from fa3.schedules import walk

ROOT = Path(__file__).parent.parent
CHANGES = ROOT / "docs" / "changes"


class Change(NamedTuple):
    """What a diff may touch: the new file, the table, and lines of the table (removed, added)."""

    new: str | None
    table: str | None = None
    lines: tuple[int, int] = (0, 0)


EXAMPLES = {
    # The import, and the entry, whose line is full and becomes two.
    "schedule": Change("fa3/schedules/reverse.py", "fa3/schedules/__init__.py", (0, 2)),
    "mask": Change("docs/examples/dilated.py"),
    "score": Change("docs/examples/log_distance.py"),
    "tiling": Change(None, "fa3/planning/tilings.py", (0, 1)),
    "kernel": Change("fa3/kernels/scale_rows.py"),
}

compiles = pytest.mark.compiles


# ------------------------------------------------------------------------------- in a new process


def use_schedule():
    """Walk, explain, simulate and run with `reverse`; `use_all` compiles with it."""
    gpu = Gpu("few SMs", num_sms=3, l2_bytes=1 << 20)
    problem = make_problem(2, 400, 460, 1, 2, window=CAUSAL)
    plan = plan_forward(problem, gpu, schedule="reverse")
    check_plan(plan)
    schedule, order = plan.schedule, plan.schedule.order
    shares = [
        [order.index(segment.tile) for segment in walk(schedule, cluster)]
        for cluster in range(schedule.num_clusters)
    ]
    assert len(shares) == 3
    assert sorted(chain(*shares)) == list(range(order.num_tiles))
    for cluster, share in enumerate(shares):
        assert share == np.flatnonzero(schedule.owners == cluster)[::-1].tolist()
    assert "Schedule reverse" in str(plan.explain())
    assert len(plan.simulate().spans) == order.num_tiles

    operands = make_operands(problem)
    expected = fa3.flash_attn_func(*operands, causal=True, return_lse=True, schedule="static")
    for choice in ({"schedule": "reverse"}, {"plan": plan}):
        found = fa3.flash_attn_func(*operands, causal=True, return_lse=True, **choice)
        assert all(map(torch.equal, found, expected))


def use_mask():
    """Attend through a dilated window."""
    from docs.examples.dilated import Dilated

    own = torch.arange(150)[:, None] + 60
    seen = torch.zeros(150, 210, dtype=torch.bool)
    seen.scatter_(1, (own - torch.arange(0, 3 * 20, 3)).clamp(min=0), True)
    seen[:, 0] &= (own[:, 0] % 3 == 0) & (own[:, 0] < 3 * 20)
    bias = torch.zeros(150, 210).masked_fill(~seen, -math.inf)
    check_against(bias, mask=Dilated(step=3, count=20))


def use_score():
    """Attend with a logarithmic bias."""
    from docs.examples.log_distance import LogDistance

    rate = torch.tensor([0.5, 1.5])
    distance = (torch.arange(150)[:, None] + 60 - torch.arange(210)).abs()
    check_against(-rate[:, None, None] * (1 + distance).log(), score=LogDistance(rate))


def check_against(bias: torch.Tensor, **modifiers):
    """Compare a call with attention as it is written down, with this added to the logits."""
    problem = make_problem(2, 150, 210, 2, dtype="float16")
    q, k, v = make_operands(problem)
    found = fa3.flash_attn_func(q, k, v, **modifiers).double()
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(64)
    expected = torch.einsum("bhqk,bkhd->bqhd", (logits + bias).softmax(dim=-1), v.double())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=3e-3)


def use_tiling():
    """Plan and attend with heads of 160 columns."""
    config = ForwardConfig(128, 128, own_o=False)
    for head_dim, takes_it in ((128, False), (136, True), (160, True), (168, False)):
        plan = plan_forward(make_problem(1, 200, 200, head_dim=head_dim), H200)
        assert (plan.config == config) == takes_it
        check_plan(plan)
    problem = make_problem(1, 200, 200, head_dim=160)
    q, k, v = make_operands(problem)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    check_attention(out, lse, q, k, v)


def use_kernel():
    """Compile the kernel; it moves vectors of 16 bytes, and waits for the one before."""
    from fa3.kernels.scale_rows import THREADS, ScaleRows

    report = inspect(compile_kernel(ScaleRows("bfloat16", 128)).cubin)
    assert report.threads == THREADS and report.stack_bytes == 0
    assert [report.opcodes[name] for name in ("LDG.E.128", "STG.E.128", "ACQBULK")] == [1, 1, 1]


def use_all():
    """Compile a forward kernel with the schedule, the mask and the score at once."""
    from docs.examples.dilated import Dilated
    from docs.examples.log_distance import LogDistance

    modifiers = {"mask": Dilated(3, 20), "score": LogDistance(torch.tensor([0.5, 1.5]))}
    problem = make_problem(1, 150, 210, 1, 2, head_dim=64, window=CAUSAL)
    modified, _ = modify(problem, make_operands(problem)[0], NOTHING | modifiers)
    kernel = plan_forward(modified, H200, schedule="reverse").kernel()
    assert inspect(compile_kernel(kernel).cubin).stack_bytes == 0
    # The rooms' rules hold for what the examples touch; no rule names their files.
    touched = {path for change in EXAMPLES.values() for path in (change.new, change.table)}
    for path in (Path(path) for path in touched if path and path.startswith("fa3/")):
        assert path in test_layering.MODULES
    test_layering.test_imports_point_down()
    test_layering.test_torch_stays_at_the_edge()
    test_layering.test_only_the_compiler_compiles()
    test_layering.test_no_circles()


# -------------------------------------------------------------------------------------- the tests


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the sources and the examples."""
    for folder in ("fa3", "docs/examples", "benchmarks"):
        left_out = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    return tmp_path


def apply(name: str, root: Path):
    """Apply a diff of `docs/changes` to a copy."""
    if shutil.which("patch"):
        command = ["patch", "-p1", "-i"]
    elif shutil.which("git"):
        command = ["git", "apply"]
    else:
        pytest.skip("needs patch or git, and neither is there")
    run([*command, str(CHANGES / f"{name}.diff")], root, GIT_CEILING_DIRECTORIES=str(root.parent))


def run(command: list[str], root: Path, **environment: str):
    """Run a program in a copy; what it says is what the test says if it fails."""
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def run_here(root: Path, *functions: str):
    """Run functions of this file in a new process that imports fa3 from a copy."""
    # Python takes most of a second to take torch and the DSL down; `os._exit` leaves that out.
    program = (
        "import os, fa3, test_extending as examples\n"
        f"assert fa3.__file__.startswith({str(root)!r}), fa3.__file__\n"
        + "".join(f"examples.{function}()\n" for function in functions)
        + "os._exit(0)"
    )
    places = os.pathsep.join((str(root), str(Path(__file__).parent)))
    run([sys.executable, "-c", program], root, PYTHONPATH=places, OMP_NUM_THREADS="1")


def lines_of(diff: str) -> dict[str, tuple[bool, int, int]]:
    """Of every file of a diff: whether it is new, and how many lines go and come."""
    found = {}
    for part in f"\n{diff}".split("\ndiff --git ")[1:]:
        head, _, hunks = part.partition("\n@@")
        path = head.rpartition("\n+++ b/")[2].strip()
        signs = [line[:1] for line in hunks.splitlines()[1:]]
        found[path] = ("\n--- /dev/null" in head, signs.count("-"), signs.count("+"))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_is_one_file_and_a_line_in_a_table(name):
    new, table, lines = EXAMPLES[name]
    found = lines_of((CHANGES / f"{name}.diff").read_text())
    if new is not None:
        is_new, removed, _ = found.pop(new)
        assert is_new and not removed
    if table is not None:
        assert found.pop(table) == (False, *lines)
    assert not found


@compiles
def test_can_be_used(copy):
    """Each by itself, and all of them in one kernel."""
    for name in EXAMPLES:
        apply(name, copy)
    run_here(copy, *(f"use_{name}" for name in (*EXAMPLES, "all")))


def test_the_text_names_every_diff():
    text = (ROOT / "docs" / "extending.md").read_text()
    assert {path.stem for path in CHANGES.iterdir()} == set(EXAMPLES)
    assert all(f"](changes/{name}.diff)" in text for name in EXAMPLES)
