"""Counters for launches: shared by a stream, given away once to captured ones."""

import pytest
import torch

from fa3 import counters
from fa3.counters import FEWEST, RESERVE, Reserve, zeros_for_launch

CPU = torch.device("cpu")


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, number: int):
        self.cuda_stream = number


@pytest.fixture
def cuda(monkeypatch):
    """Stand in for the CUDA runtime; set `stream` and `capturing` on it."""

    class Runtime:
        stream, capturing = 1, False

    monkeypatch.setattr(counters, "BY_STREAM", {})
    monkeypatch.setattr(counters, "RESERVES", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(Runtime.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Runtime.capturing)
    return Runtime


def places(tensor: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() + 4 * i for i in range(len(tensor))}


def test_launches_of_a_stream_share_and_streams_do_not(cuda):
    q = torch.empty(0)
    first, again = zeros_for_launch(5, q), zeros_for_launch(9, q)
    assert first.data_ptr() == again.data_ptr()
    cuda.stream = 2
    assert not places(zeros_for_launch(9, q)) & places(again)


def test_a_stream_gets_more_when_it_needs_more(cuda):
    q = torch.empty(0)
    zeros_for_launch(1, q)
    many = zeros_for_launch(2 * FEWEST, q)
    assert len(many) == 2 * FEWEST and not many.any()
    assert zeros_for_launch(3, q).data_ptr() == many.data_ptr()


def test_captured_launches_share_with_nobody(cuda):
    q = torch.empty(0)
    eager = zeros_for_launch(8, q)
    cuda.capturing = True
    captured = [zeros_for_launch(8, q) for _ in range(5)]
    taken = [places(tensor) for tensor in (eager, *captured)]
    assert len(set.union(*taken)) == 6 * 8
    assert not any(tensor.any() for tensor in captured)


def test_an_empty_reserve_is_not_filled_by_a_graph():
    reserve = Reserve()
    assert not reserve.take(7, CPU).any()
    assert reserve.free is None
    reserve.fill(CPU)
    assert len(reserve.take(RESERVE, CPU)) == RESERVE
    assert len(reserve.take(7, CPU)) == 7
    reserve.fill(CPU)
    assert len(reserve.free) == RESERVE
