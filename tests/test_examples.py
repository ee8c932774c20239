"""The examples of the documentation: they run, compile, and are what the text shows."""

import math
import re
from pathlib import Path

import pytest
import torch
from problems import make_operands, make_problem
from score_problems import NOTHING, modify

from docs.examples import (
    decode_loop,
    documents,
    own_schedule,
    prefill,
    prefix_lm,
    relative_bias,
    training_loop,
)
from fa3.planning.planner import plan_forward
from fa3.reference.forward import steps

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = (prefix_lm, documents, relative_bias)
EXAMPLE_IDS = [module.__name__.rpartition(".")[2] for module in EXAMPLES]

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLE_IDS)


@each_example
def test_the_text_shows_the_file(example):
    source = Path(example.__file__).read_text()
    assert f"```python\n{source}```\n" in (DOCS / "scores-and-masks.md").read_text()


def test_the_prefix_spares_what_it_hides_and_masks_only_the_diagonal():
    problem = make_problem(2, 1024, 1024)
    q, _, _ = make_operands(problem)
    mask = prefix_lm.PrefixLM(torch.tensor([0, 512]).int())
    modified, modifiers = modify(problem, q, NOTHING | {"mask": mask})
    plan = plan_forward(modified)
    tile_n = plan.config.tile_n
    assert {plan.config.tile_m, tile_n} == {128, 64}
    walked = list(steps(plan, modifiers.tensors))
    for step in walked:
        first, last = step.rows.start, step.rows.stop
        prefix = (0, 512)[step.segment.tile.batch]
        assert step.blocks.end == max(prefix, last) // tile_n
        assert step.blocks.full_end == max(prefix, first) // tile_n
    touched = sum(step.blocks.end - step.blocks.begin for step in walked)
    assert touched == sum(2 * m + 2 for m in range(8)) + sum(max(8, 2 * m + 2) for m in range(8))


def check_last_line(capsys) -> None:
    """Assert that a program says at its end what it checked, how fast it ran, and where."""
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"Checked: .+\. .+ (us|ms|TFLOP/s)( per step)? on the CPU; nothing ran on a GPU\.", last
    ), last


def test_prefill(capsys):
    out = prefill.example(seqlen=150)
    assert out.shape == (1, 150, 32, 128) and out.isfinite().all()
    check_last_line(capsys)


def test_decoding_gives_what_one_call_gives(capsys):
    torch.manual_seed(0)
    # The program compares by itself; 20 tokens take two pages.
    assert decode_loop.example(tokens=20, batch=2).shape == (2, 20, 8, 64)
    check_last_line(capsys)


@each_example
def test_masks_and_scores(example, capsys):
    # The programs compare with torch by themselves; other calls with them are in test_scores.
    assert example.example().shape[1:] == (1000, 4, 64)
    check_last_line(capsys)


def test_training_learns(capsys):
    losses = training_loop.example(steps=30)
    check_last_line(capsys)
    guessing = math.log(training_loop.VOCABULARY)
    assert losses[0] > 0.9 * guessing and losses[-1] < 0.5 * guessing


def test_an_order_of_ones_own(capsys):
    # The program compares the bits with those of another order by itself.
    assert own_schedule.example(seqlen=300).isfinite().all()
    check_last_line(capsys)
    planned, own = (own_schedule.predicted_us(one, 2048) for one in (None, own_schedule.by_head))
    assert 0 < planned < own


@pytest.mark.gpu
def test_on_the_gpu(device):
    assert prefill.example(str(device), seqlen=2000).isfinite().all()
    assert decode_loop.example(str(device)).isfinite().all()
    assert own_schedule.example(str(device)).isfinite().all()
    for program in EXAMPLES:
        assert program.example(str(device)).isfinite().all()


@pytest.mark.gpu
def test_training_on_the_gpu(device):
    losses = training_loop.example(str(device))
    assert losses[-1] < 0.1 * losses[0]
