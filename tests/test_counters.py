"""Counters of calls: those of a stream are taken in turns, a capture has its own."""

import contextlib
import random
import threading
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
from gpu_checks import used_counters

from fa3.calls.execution import Prepared
from fa3.planning.launch import Memory
from fa3.running import memory
from fa3.running.memory import (
    FEWEST,
    MOST_FOUND,
    MOST_STREAMS,
    PER_THREAD,
    RESERVE,
    Capture,
    Loan,
    Reserve,
    Table,
    memory_of,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_taken(monkeypatch):
    monkeypatch.setattr(memory, "BY_STREAM", {})
    monkeypatch.setattr(memory, "RESERVES", {CPU: Reserve(torch.zeros(RESERVE).int())})


def places(tensor: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() + 4 * i for i in range(len(tensor))}


def prepared(counters: int, parts: int) -> Prepared:
    """Launches that share so much."""
    shared = Memory((("counters", counters),), kept=(("parts", parts, "int32"),))
    return Prepared((), frozenset(), shared, numbers={"total_q": parts})


def test_every_thread_has_a_default_stream_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(memory_of(CPU, PER_THREAD, None)))
    thread.start()
    thread.join()
    assert found[0] is not memory_of(CPU, PER_THREAD, None)
    assert memory_of(CPU, PER_THREAD, None) is memory_of(CPU, PER_THREAD, None)


def test_captures_share_with_nobody_and_their_launches_with_each_other():
    taken = [places(memory_of(CPU, 1, None).lend(prepared(8, 8), 1).counters["counters"])]
    first, second = Capture(0), Capture(0)
    for capture, stream in ((first, 1), (first, 2), (second, 1)):
        of_capture = memory_of(CPU, stream, capture)
        loan = of_capture.lend(prepared(FEWEST, 1), stream)
        once = loan.counters["counters"]
        of_capture.take_back(loan)
        again = memory_of(CPU, stream, capture).lend(prepared(6, 1), stream)
        assert again.counters["counters"] is once
        assert not once.any() and id(once) in capture.kept
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
                memory_of(CPU, 10**6 + self.disturbances, None)
            return found

    monkeypatch.setattr(memory, "BY_STREAM", Disturbed())
    for stream in range(MOST_STREAMS + 10):
        assert memory_of(CPU, stream, None) is memory_of(CPU, stream, None)
    assert memory.BY_STREAM.disturbances == 0
    assert len(memory.BY_STREAM) <= MOST_STREAMS


def test_an_empty_reserve_is_not_filled_by_a_graph():
    memory.RESERVES.clear()
    capture = Capture(0)
    of_capture = memory_of(CPU, 1, capture)
    loan = of_capture.lend(prepared(7, 1), 1)
    own = loan.counters["counters"]
    assert len(own) == 7 and not own.any() and id(own) not in capture.kept
    # It may be memory of the graph's, which torch wants back.
    of_capture.take_back(loan)
    assert of_capture.free == [Loan()] and memory.RESERVES[CPU].free is None


def test_what_a_graph_used_goes_with_it(monkeypatch):
    monkeypatch.setattr(memory, "LIVE", {})
    libc = memory.c_library()
    for number in (1, 2):
        memory.LIVE[number] = Capture(libc.calloc(1, memory.SEMAPHORE_BYTES))
        memory.LIVE[number].kept[0] = torch.zeros(1)
    libc.sem_post(memory.LIVE[1].gone)
    memory.free_ended_graphs()
    assert list(memory.LIVE) == [2] and not memory.LIVE[2].is_gone()


def test_what_is_left_in_counters_is_found(monkeypatch):
    """Of streams and of captures; the tables that a graph keeps are none."""
    monkeypatch.setattr(memory, "LIVE", {5: (capture := Capture(0))})
    of_stream, of_capture = memory_of(CPU, 1, None), memory_of(CPU, 2, capture)
    assert Table(table := torch.arange(9)).on(2, capture) is table and id(table) in capture.kept
    for one in (of_stream, of_capture):
        one.take_back(one.lend(prepared(3, 1), 1))
    assert used_counters() == []
    of_stream.free[0].counters["counters"][[17, 80]] = 1
    of_capture.free[0].counters["counters"][2] = 1
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


def test_tables_know_the_streams_of_all_threads(monkeypatch):
    """Torch may otherwise use a table's memory again before a thread's launches have read it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    table = Table(Mock(device=CPU))
    for stream in (5, 5, PER_THREAD, PER_THREAD, 6):
        assert table.on(stream, None) is table.numbers
    assert table.numbers.record_stream.call_count == 4


def test_a_finalizer_may_fill_the_reserve_while_it_is_filled(monkeypatch):
    reserve, cuda = Reserve(), Mock(type="cuda")
    fills = iter([lambda: reserve.fill(cuda), lambda: None])

    def make(*_):
        next(fills)()
        return torch.zeros(RESERVE, dtype=torch.int32)

    monkeypatch.setattr(memory, "idle_stream", lambda device: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(memory, "make_in_thread", make)
    reserve.fill(cuda)
    assert not [*fills] and reserve.take(4) is not None


@pytest.mark.parametrize("capture", [None, Capture(0)], ids=["eager", "captured"])
def test_loans_are_apart_and_as_large_as_asked(capture):
    """Calls of three kinds, up to five at a time, of which some are interrupted."""
    draw, of_stream, calls = random.Random(0), memory_of(CPU, 1, capture), []
    kinds = [prepared(3, 9), prepared(5, 90), prepared(FEWEST + 1, FEWEST + 9)]
    for _ in range(300):
        if len(calls) == 5 or (calls and draw.random() < 0.5):
            loan, kind, values = calls.pop(draw.randrange(len(calls)))
            if draw.random() < 0.1:
                values["counters"].fill_(7)
            else:
                of_stream.take_back(loan)
                again = of_stream.lend(kind, 1)
                assert again.values[kind]["counters"] is values["counters"]
                assert (again is loan and again.values[kind] is values) == (capture is None)
                of_stream.take_back(again)
        kind = draw.choice(kinds)
        loan = of_stream.lend(kind, 1)
        calls.append((loan, kind, values := loan.values[kind]))
        assert len(values["counters"]) >= kind.memory.counters[0][1]
        assert not values["counters"].any() and values["total_q"] == len(values["parts"])
        # Memory that was replaced is not kept.
        assert len({one["parts"].data_ptr() for one in loan.values.values()}) == 1
        lent = [places(one[name]) for *_, one in calls for name in ("counters", "parts")]
        assert len(set.union(*lent)) == sum(map(len, lent))


def test_a_loan_remembers_few_kinds_of_calls():
    of_stream = memory_of(CPU, 1, None)
    for total in range(3 * MOST_FOUND):
        of_stream.take_back(loan := of_stream.lend(prepared(1, total), 1))
    assert len(loan.values) == MOST_FOUND and of_stream.free == [loan]
