"""A tile order of your own, and what the planner predicts for it."""

from collections.abc import Iterable

import torch
from torch.utils.benchmark import Timer

import fa3
from fa3.scores.masks import Band


def by_head(tiles: list[fa3.Tile]) -> Iterable[fa3.Tile]:
    """One head after another, the longest tiles of each first."""
    return sorted(tiles, key=lambda tile: (tile.batch, tile.head, -tile.m_block))


def predicted_us(schedule, seqlen: int = 4096) -> float:
    """The predicted time of causal attention with 32 heads of 128 columns on an H200.

    Args:
        schedule: an order as above; None for the planner's choice.
    """
    window = fa3.Window(right=0)
    spec = fa3.AttentionSpec("bfloat16", 128, 128, Band.of(window))
    problem = fa3.Problem(spec, 1, seqlen, seqlen, num_heads_kv=32, window=window)
    return fa3.plan_forward(problem, schedule=schedule).predict().us


def example(device: str = "cpu", seqlen: int = 1000) -> torch.Tensor:
    """Attend in this order, and compare the bits with another order."""
    q, k, v = torch.randn(3, 2, seqlen, 4, 64, dtype=torch.bfloat16, device=device)

    def attend(schedule=by_head) -> torch.Tensor:
        return fa3.flash_attn_func(q, k, v, causal=True, schedule=schedule)

    out = attend()
    assert torch.equal(out, attend("list"))
    seconds = Timer("attend()", globals={"attend": attend}).timeit(3).median
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(f"Checked: another order gives the same bits. {1e6 * seconds:,.0f} us on {where}.")
    return out


if __name__ == "__main__":
    ours, planned = predicted_us(by_head), predicted_us(None)
    print(f"Predicted for an H200, 4k tokens: {ours:.0f} us by head, {planned:.0f} us planned.")
    example("cuda" if torch.cuda.is_available() else "cpu")
