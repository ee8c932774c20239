"""Shared memory, against the bytes written out."""

import itertools
import time
from collections.abc import Iterator
from random import Random

import pytest

from fa3.calls import overlap
from fa3.calls.overlap import Layout, repeats, share

NUM_DRAWN = 4000
"""Random layouts, or pairs of them: hypothesis would take most of a test's time to draw so many."""


def layouts(count: int = NUM_DRAWN) -> Iterator[Layout]:
    """Draw a few dimensions of any strides, and often nested ones with gaps."""
    draw = Random(0)
    for _ in range(count):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.5:
            stride = [draw.randint(0, 20) for _ in shape]
        else:
            stride, step = [], 1
            for size in shape:
                stride.append(step * draw.randint(1, 3))
                step = stride[-1] * max(size, 1)
            order = draw.sample(range(len(shape)), len(shape))
            shape, stride = [shape[i] for i in order], [stride[i] for i in order]
        yield Layout(tuple(shape), tuple(stride), draw.choice((1, 2, 4)))


def places(layout: Layout) -> list[int]:
    """Where each element begins, in bytes."""
    indices = itertools.product(*map(range, layout.shape))
    strides = layout.stride
    return [
        layout.itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
        for index in indices
    ]


def bytes_of(layout: Layout) -> set[int]:
    return {place + byte for place in places(layout) for byte in range(layout.itemsize)}


def test_shared_bytes():
    drawn, draw = layouts(2 * NUM_DRAWN), Random(0)
    for first, second in zip(drawn, drawn, strict=True):
        mine, theirs = bytes_of(first), bytes_of(second)
        # From just before they meet until they have met.
        distance = draw.randint(-second.bytes - 1, first.bytes + 1)
        are_shared = any(byte + distance in mine for byte in theirs)
        assert share(first, second, distance) == are_shared, (first, second, distance)


def test_elements_in_the_same_place():
    for layout in layouts():
        found = places(layout)
        assert repeats(layout) == (len(set(found)) < len(found)), layout


def test_length():
    for layout in layouts():
        assert layout.bytes == max(bytes_of(layout), default=-1) + 1, layout


def contiguous(*shape: int, itemsize: int = 2) -> Layout:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return Layout(shape, tuple(reversed(stride)), itemsize)


def test_slots_of_real_buffers_are_told_apart():
    """Of a size at which nothing could be counted element by element."""
    pages, page, heads, dim = 100_000, 16, 8, 128
    row = heads * dim
    for slots, stride in (
        # (pages, 2, page_size, heads, dim), (pages, page_size, heads, 2 * dim)
        (page * row, (2 * page * row, row, dim, 1)),
        (dim, (2 * page * row, 2 * row, 2 * dim, 1)),
        # (pages, heads, 2, page_size, dim), as seen with tokens before heads
        (page * dim, (2 * page * row, dim, 2 * page * dim, 1)),
    ):
        cache = Layout((pages, page, heads, dim), stride, 2)
        assert not repeats(cache)
        assert not share(cache, cache, 2 * slots)
        assert share(cache, cache, 2 * (slots - 1)) and share(cache, cache, 2 * (slots + 1))
        # A page of another cache, as one that is appended to could be taken for.
        assert share(cache, contiguous(1, page, heads, dim), 4 * page * row)


def test_a_question_that_is_too_hard_is_answered_in_time(monkeypatch):
    monkeypatch.setattr(overlap, "MOST_TRIES", 2000)
    strides = tuple(2 * (3**14 + 7919 * n * n) for n in range(14))
    hard = Layout((2,) * 14, strides, 1)
    begin = time.monotonic()
    assert share(hard, hard, sum(strides) // 2 + 1)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("distance", [-2, 2])
def test_neighbours_do_not_touch(distance):
    one = contiguous(1)
    assert not share(one, one, distance)
    assert share(one, one, distance // 2)
