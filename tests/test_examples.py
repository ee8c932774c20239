"""The examples of the documentation: they run, compile, and are what the text shows."""

import math
import re
from pathlib import Path

import pytest
import torch
from reference import visible

from docs.examples import (
    decode_loop,
    documents,
    own_schedule,
    prefill,
    prefix_lm,
    relative_bias,
    training_loop,
)
from docs.pages.gallery import positions, run_page
from fa3.problem import Window

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = (prefix_lm, documents, relative_bias)
EXAMPLE_IDS = [module.__name__.rpartition(".")[2] for module in EXAMPLES]

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=EXAMPLE_IDS)


@each_example
def test_the_text_shows_the_file(example):
    source = Path(example.__file__).read_text()
    assert f"```python\n{source}```\n" in (DOCS / "scores-and-masks.md").read_text()


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


# -------------------------------------------------------------------------------------- the gallery

SEQLEN = 24
CAUSAL = visible(SEQLEN, SEQLEN, Window(right=0))


@pytest.fixture(scope="module")
def after():
    return run_page()


def check_weights(after: dict) -> None:
    """Equal weights on visible keys, by plain comparisons and the page's masks; none on others."""
    at = positions(SEQLEN)
    expected_masks = {
        "Causal": CAUSAL,
        "Sliding window": visible(SEQLEN, SEQLEN, Window(5, 0)),
        "Prefix LM": after["Prefix LM"]["prefix"].reference(at).cpu(),
        "Documents": CAUSAL & after["Documents"]["documents"].reference(at).cpu(),
    }
    for title, seen in expected_masks.items():
        out = after[title]["out"][0].float().cpu()
        expected = (seen / seen.sum(dim=1, keepdim=True)).float()
        for head in range(8):
            torch.testing.assert_close(out[:, head], expected, rtol=2**-8, atol=0, msg=title)


def test_weights_are_those_of_the_masks(after):
    check_weights(after)


def test_masks_are_what_the_text_says(after):
    prefix = after["Prefix LM"]["prefix"].reference(positions(SEQLEN))
    assert prefix[:, :8].all() and torch.equal(prefix[:, 8:], CAUSAL[:, 8:])
    documents = after["Documents"]["documents"].reference(positions(SEQLEN))
    sizes = torch.block_diag(*(torch.ones(n, n) for n in (6, 11, 7)))
    assert torch.equal(documents, sizes.bool())


@pytest.mark.gpu
def test_the_page_runs_on_the_gpu(device):
    with torch.device(device):
        after = run_page()
        check_weights(after)
