"""Counters for launches: shared by those of a stream, or of a capture's stream."""

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
        stream, capturing, capture = 1, False, 1

    monkeypatch.setattr(counters, "BY_STREAM", {})
    monkeypatch.setattr(counters, "RESERVES", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(Runtime.stream))
    monkeypatch.setattr(counters, "capture_of", lambda stream: Runtime.capture)
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


def test_captures_share_with_nobody_and_their_launches_with_each_other(cuda):
    q = torch.empty(0)
    eager = zeros_for_launch(8, q)
    cuda.capturing = True
    taken = [places(eager)]
    for cuda.capture, cuda.stream in ((7, 1), (7, 2), (8, 1)):
        first, again = zeros_for_launch(8, q), zeros_for_launch(6, q)
        assert first.data_ptr() == again.data_ptr() and not first.any()
        taken.append(places(first))
    assert len(set.union(*taken)) == 4 * 8


def test_a_larger_launch_of_a_capture_gets_more(cuda):
    q = torch.empty(0)
    zeros_for_launch(8, q)
    cuda.capturing = True
    few, many = zeros_for_launch(8, q), zeros_for_launch(9, q)
    assert not places(few) & places(many)
    assert zeros_for_launch(8, q).data_ptr() == many.data_ptr()


def test_what_captures_got_stays_theirs():
    reserve = Reserve()
    taken = []
    for capture in range(10):
        reserve.fill(1, CPU)
        taken.append(places(reserve.take(RESERVE // 3, (capture, 0), CPU)))
    assert len(set.union(*taken)) == 10 * (RESERVE // 3)


def test_an_empty_reserve_is_not_filled_by_a_graph():
    reserve = Reserve()
    assert not reserve.take(7, (1, 0), CPU).any()
    assert reserve.free is None
    reserve.fill(2 * RESERVE, CPU)
    assert len(reserve.take(2 * RESERVE, (2, 0), CPU)) == 2 * RESERVE
