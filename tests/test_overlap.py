"""Shared memory, against the bytes written out."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.calls import overlap
from fa3.calls.overlap import Layout, repeats, share


@st.composite
def layouts(draw) -> Layout:
    """Draw a few dimensions of any strides, and often nested ones with gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if draw(st.booleans()):
        stride = [draw(st.integers(0, 20)) for _ in shape]
    else:
        stride, step = [], 1
        for size in shape:
            stride.append(step * draw(st.integers(1, 3)))
            step = stride[-1] * max(size, 1)
        order = draw(st.permutations(range(len(shape))))
        shape, stride = [shape[i] for i in order], [stride[i] for i in order]
    return Layout(tuple(shape), tuple(stride), draw(st.sampled_from((1, 2, 4))))


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


@settings(max_examples=1500)
@given(layouts(), layouts(), st.integers(-150, 150))
def test_shared_bytes(first, second, distance):
    theirs = {byte + distance for byte in bytes_of(second)}
    assert share(first, second, distance) == bool(bytes_of(first) & theirs)


@settings(max_examples=1000)
@given(layouts())
def test_elements_in_the_same_place(layout):
    found = places(layout)
    assert repeats(layout) == (len(set(found)) < len(found))


@given(layouts())
def test_length(layout):
    assert layout.bytes == max(bytes_of(layout), default=-1) + 1


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
