"""Counters of calls: those of a stream are taken in turns, a capture has its own."""

import contextlib
import threading
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
from gpu_checks import used_counters

from fa3.running import memory
from fa3.running.memory import (
    FEWEST,
    MOST_STREAMS,
    PER_THREAD,
    RESERVE,
    Capture,
    Reserve,
    Table,
    counters_of,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch):
    monkeypatch.setattr(memory, "BY_STREAM", {})
    monkeypatch.setattr(memory, "RESERVES", {CPU: Reserve(torch.zeros(RESERVE).int())})


def places(tensor: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() + 4 * i for i in range(len(tensor))}


def test_a_call_between_the_launches_of_another_has_its_own():
    of_stream = counters_of(CPU, 1, None)
    first, between = of_stream.take(5), of_stream.take(5)
    assert not places(first) & places(between)


def test_what_an_interrupted_call_left_is_not_used_again():
    of_stream = counters_of(CPU, 1, None)
    of_stream.take(5).fill_(7)
    assert not of_stream.take(5).any()
    assert not of_stream.free


def test_a_call_gets_more_when_it_needs_more():
    of_stream = counters_of(CPU, 1, None)
    of_stream.give_back(of_stream.take(1))
    many = of_stream.take(2 * FEWEST)
    assert len(many) == 2 * FEWEST and not many.any()
    of_stream.give_back(many)
    assert of_stream.take(3).data_ptr() == many.data_ptr()
    assert not of_stream.free


def test_every_thread_has_a_default_stream_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(counters_of(CPU, PER_THREAD, None)))
    thread.start()
    thread.join()
    assert found[0] is not counters_of(CPU, PER_THREAD, None)
    assert counters_of(CPU, PER_THREAD, None) is counters_of(CPU, PER_THREAD, None)


def test_streams_that_come_and_go_are_not_remembered_for_ever():
    for stream in range(10, 10 + 3 * MOST_STREAMS):
        counters_of(CPU, stream, None).give_back(torch.zeros(1))
    assert len(memory.BY_STREAM) == MOST_STREAMS


def test_captures_share_with_nobody_and_their_launches_with_each_other():
    eager = counters_of(CPU, 1, None).take(8)
    taken = [places(eager)]
    first, second = Capture(0), Capture(0)
    for capture, stream in ((first, 1), (first, 2), (second, 1)):
        of_capture = counters_of(CPU, stream, capture)
        once = of_capture.take(FEWEST)
        of_capture.give_back(once)
        assert counters_of(CPU, stream, capture).take(6).data_ptr() == once.data_ptr()
        assert not once.any() and capture.keeps(once)
        taken.append(places(once))
    assert len(set.union(*taken)) == 4 * FEWEST


def test_what_captures_got_stays_theirs():
    reserve = Reserve(torch.zeros(RESERVE, dtype=torch.int32))
    taken = [reserve.take(RESERVE // 4) for _ in range(4)]
    assert len(set.union(*map(places, taken))) == 4 * (RESERVE // 4)
    assert reserve.take(RESERVE // 4) is None


def test_a_finalizer_may_bring_a_stream_while_others_are_forgotten(monkeypatch):
    """It runs whenever memory is allocated, also when the dictionary is gone through."""

    class Disturbed(dict):
        disturbances = 3

        def __iter__(self):
            found = super().__iter__()
            if self.disturbances:
                self.disturbances -= 1
                counters_of(CPU, 10**6 + self.disturbances, None)
            return found

    monkeypatch.setattr(memory, "BY_STREAM", Disturbed())
    for stream in range(MOST_STREAMS + 10):
        assert counters_of(CPU, stream, None) is counters_of(CPU, stream, None)
    assert memory.BY_STREAM.disturbances == 0
    assert len(memory.BY_STREAM) <= MOST_STREAMS


def test_an_empty_reserve_is_not_filled_by_a_graph():
    memory.RESERVES.clear()
    capture = Capture(0)
    of_capture = counters_of(CPU, 1, capture)
    own = of_capture.take(7)
    assert not own.any() and not capture.keeps(own)
    # It may be memory of the graph's, which torch wants back.
    of_capture.give_back(own)
    assert not of_capture.free and memory.RESERVES[CPU].free is None


def test_what_a_graph_used_goes_with_it(monkeypatch):
    monkeypatch.setattr(memory, "LIVE", {})
    libc = memory.c_library()
    for number in (1, 2):
        memory.LIVE[number] = Capture(libc.calloc(1, memory.SEMAPHORE_BYTES))
        memory.LIVE[number].keep(torch.zeros(1))
    libc.sem_post(memory.LIVE[1].gone)
    memory.free_ended_graphs()
    assert list(memory.LIVE) == [2] and not memory.LIVE[2].is_gone()


def test_what_is_left_in_counters_is_found(monkeypatch):
    """Of streams and of captures; the tables that a graph keeps are none."""
    monkeypatch.setattr(memory, "LIVE", {5: (capture := Capture(0))})
    of_stream, of_capture = counters_of(CPU, 1, None), counters_of(CPU, 2, capture)
    assert Table(table := torch.arange(9)).on(2, capture) is table and capture.keeps(table)
    for one in (of_stream, of_capture):
        one.give_back(one.take(3))
    assert used_counters() == []
    of_stream.free[0][[17, 80]] = 1
    of_capture.free[0][2] = 1
    assert used_counters() == [
        f"stream 0x1: 2 of {FEWEST}, the first at 17",
        "capture 5, stream 0x2: 1 of 4, the first at 2",
    ]


@pytest.mark.parametrize(("handle", "waits"), [(PER_THREAD, 1), (7, 0)])
def test_what_another_thread_makes_is_there_for_the_stream_of_this_one(handle, waits, monkeypatch):
    """The same handle of `cudaStreamPerThread` means another stream there."""
    waited, made_on = [], []
    stream = SimpleNamespace(
        cuda_stream=handle, synchronize=lambda: waited.append(threading.get_ident())
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def make():
        made_on.append(threading.get_ident())
        return torch.zeros(1)

    memory.make_in_thread(make, torch.device("cuda"))
    assert made_on != [threading.get_ident()] and waited == made_on * waits


def test_tables_are_made_in_a_thread_of_their_own(monkeypatch):
    """Else they would stay in the memory pool of a compiled graph that is being warmed up."""
    made_apart = Mock(side_effect=lambda make, device: make())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(memory, "idle_stream", lambda device: None)
    monkeypatch.setattr(memory, "make_in_thread", made_apart)
    table = Table.upload(np.arange(3), CPU)
    made_apart.assert_called_once_with(ANY, CPU)
    assert table.numbers.tolist() == [0, 1, 2]


def test_calls_that_follow_each_other_share_the_memory_of_parts():
    of_stream = counters_of(CPU, 1, None)
    first, between = (of_stream.take_parts(5, "float32") for _ in range(2))
    assert not places(first) & places(between)
    of_stream.give_back_parts(first, "float32")
    assert of_stream.take_parts(4, "int32").dtype == torch.int32
    assert counters_of(CPU, 1, None).take_parts(4, "float32").data_ptr() == first.data_ptr()
    of_stream.give_back_parts(first, "float32")
    more = of_stream.take_parts(6, "float32")
    assert len(more) == 6 and not any(of_stream.free_parts.values())
    of_graph = counters_of(CPU, 1, Capture(0))
    of_graph.give_back_parts(of_graph.take_parts(5, "int32"), "int32")
    assert len(of_graph.take_parts(7, "int32")) == 7
