"""First stores to the dQ accumulator: one key tile stores, none adds before, no dQ is lost.

Threads run the kernel's code on plain numbers, one for each CTA that adds.
"""

import random
import threading
import time
from types import FunctionType, SimpleNamespace

import cutlass.cute as cute
import pytest

from fa3.primitives import dq_accumulator
from fa3.primitives.dq_accumulator import CLAIMED, NOTHING, STORED, DqAccumulator


def written(method):
    """A method with the code as it is written, taken before the DSL puts its own in its place."""
    return FunctionType(method.__wrapped__.__code__, method.__wrapped__.__globals__)


CLAIM, HAS_VALUE = written(DqAccumulator.claim), written(DqAccumulator.has_value)


class Memory:
    """Flags in device memory, which count how often one is read or changed."""

    def __init__(self, words: list[int], monkeypatch):
        self.words, self.lock, self.accesses = words, threading.Lock(), 0
        monkeypatch.setattr(cute.arch, "atomic_or", self.atomic_or)
        monkeypatch.setattr(cute.arch, "load", self.load)
        monkeypatch.setattr(cute.arch, "fence_proxy", lambda kind: None)
        monkeypatch.setattr(dq_accumulator, "Int32", int)
        monkeypatch.setattr(dq_accumulator, "Boolean", bool)

    def accumulator(self) -> DqAccumulator:
        """An accumulator with these flags; the address of a tile's flag is its number."""
        tiles = SimpleNamespace(number=lambda tile: tile)
        return DqAccumulator(None, tiles, SimpleNamespace(iterator=0))

    def atomic_or(self, word: int, bits: int, sem: str, scope: str) -> int:
        assert sem == {CLAIMED: "acquire", STORED: "release"}[bits] and scope == "gpu"
        with self.lock:
            self.accesses += 1
            found, self.words[word] = self.words[word], self.words[word] | bits
        return found

    def load(self, word: int, dtype, sem: str, scope: str) -> int:
        assert sem in ("acquire", "relaxed") and scope == "gpu"
        with self.lock:
            self.accesses += 1
            return self.words[word]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_stores_and_all_others_add(seed, monkeypatch):
    draw = random.Random(seed)
    tiles, ctas = draw.randint(1, 12), draw.randint(1, 16)
    memory = Memory([NOTHING] * tiles, monkeypatch)
    sums, stores, locks = (
        [float("nan")] * tiles,
        [0] * tiles,
        [threading.Lock() for _ in range(tiles)],
    )
    start = threading.Barrier(ctas)

    def cta(first: int):
        """Walk the tiles upwards from some tile on, as a key tile does."""
        dq = memory.accumulator()
        start.wait()
        for tile in range(first, tiles):
            is_first = CLAIM(dq, tile, 0)
            if is_first:
                time.sleep(0.002)  # Until the value has arrived; others come meanwhile.
            with locks[tile]:
                stores[tile] += is_first
                sums[tile] = 1 if is_first else sums[tile] + 1
            if is_first:
                dq.publish_first_store(tile)

    begins = [draw.choice((0, draw.randrange(tiles))) for _ in range(ctas)]
    threads = [threading.Thread(target=cta, args=(first,), daemon=True) for first in begins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    expected = [sum(first <= tile for first in begins) for tile in range(tiles)]
    # NaN is equal to nothing: tiles without a key tile are left out.
    assert [n for n, count in zip(sums, expected, strict=True) if count] == [
        n for n in expected if n
    ]
    assert stores == [min(1, count) for count in expected]
    assert memory.words == [STORED if count else NOTHING for count in expected]
    dq = memory.accumulator()
    assert [HAS_VALUE(dq, tile, 0) for tile in range(tiles)] == [count > 0 for count in expected]


def test_an_accumulator_of_zeros_is_only_added_to(monkeypatch):
    memory = Memory([NOTHING] * 3, monkeypatch)
    dq = memory.accumulator()
    assert not any(CLAIM(dq, tile, 1) for tile in range(3))
    assert all(HAS_VALUE(dq, tile, 1) for tile in range(3))
    assert memory.accesses == 0


def test_a_claimed_tile_is_waited_for(monkeypatch):
    memory = Memory([CLAIMED], monkeypatch)
    dq, found = memory.accumulator(), SimpleNamespace(is_first=None)

    def wait():
        found.is_first = CLAIM(dq, 0, 0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive() and found.is_first is None
    dq.publish_first_store(0)
    thread.join(timeout=60)
    assert found.is_first is False
