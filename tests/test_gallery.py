"""The gallery of masks and scores: its code runs, and its pictures show what the calls compute."""

import pytest
import torch
from reference import visible

from docs.pages.gallery import positions, run_page
from fa3.problem import Window

SEQLEN = 24
CAUSAL = visible(SEQLEN, SEQLEN, Window(right=0))


@pytest.fixture(scope="module")
def after():
    return run_page()


def expected_masks(after: dict) -> dict[str, torch.Tensor]:
    """What each section's mask lets through, by plain comparisons and by the page's masks."""
    at = positions(SEQLEN)
    return {
        "Causal": CAUSAL,
        "Sliding window": visible(SEQLEN, SEQLEN, Window(5, 0)),
        "Prefix LM": after["Prefix LM"]["prefix"].reference(at).cpu(),
        "Documents": CAUSAL & after["Documents"]["documents"].reference(at).cpu(),
    }


def check_weights(after: dict) -> None:
    """Equal weights on visible keys, and none on the others."""
    for title, seen in expected_masks(after).items():
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
