"""Shared memory, against the bytes written out."""

import itertools
from collections.abc import Iterator
from random import Random

import pytest

from fa3.calls.overlap import Layout, is_recompute, share

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


def test_whatever_is_shared_is_found():
    drawn, draw = layouts(2 * NUM_DRAWN), Random(0)
    for first, second in zip(drawn, drawn, strict=True):
        mine, theirs = bytes_of(first), bytes_of(second)
        # From just before they meet until they have met.
        distance = draw.randint(-second.bytes - 1, first.bytes + 1)
        are_shared = any(byte + distance in mine for byte in theirs)
        assert share(first, second, distance) >= are_shared, (first, second, distance)


def test_views_of_one_buffer_are_told_apart():
    """Views with the strides of a buffer, at any place in it and of any sizes."""
    draw = Random(0)
    for _ in range(NUM_DRAWN):
        sizes = [draw.randint(1, 4) for _ in range(4)]
        strides = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * size)
        views, begins = [], []
        for _ in range(2):
            begin = [draw.randint(0, size - 1) for size in sizes]
            shape = [draw.randint(1, size - at) for size, at in zip(sizes, begin, strict=True)]
            views.append(Layout(tuple(shape), tuple(strides), 2))
            begins.append(2 * sum(i * s for i, s in zip(begin, strides, strict=True)))
        distance = begins[1] - begins[0]
        theirs = {byte + distance for byte in bytes_of(views[1])}
        assert share(*views, distance) == bool(bytes_of(views[0]) & theirs), (views, distance)


def test_elements_in_the_same_place():
    for layout in layouts():
        in_place = places(layout)
        assert is_recompute(layout) >= (len(set(in_place)) < len(in_place)), layout
        assert layout.bytes == max(bytes_of(layout), default=-1) + 1, layout


PAGES, PAGE, HEADS, DIM = 100_000, 16, 8, 128
ROW = HEADS * DIM


@pytest.mark.parametrize(
    ("distance", "stride"),
    [
        # (pages, 2, page_size, heads, dim), (pages, page_size, heads, 2 * dim)
        (PAGE * ROW, (2 * PAGE * ROW, ROW, DIM, 1)),
        (DIM, (2 * PAGE * ROW, 2 * ROW, 2 * DIM, 1)),
        # (pages, heads, 2, page_size, dim), as seen with tokens before heads
        (PAGE * DIM, (2 * PAGE * ROW, DIM, 2 * PAGE * DIM, 1)),
    ],
)
def test_slots_of_real_buffers_are_told_apart(distance, stride):
    """Of a size at which nothing could be counted element by element."""
    cache = Layout((PAGES, PAGE, HEADS, DIM), stride, 2)
    assert not is_recompute(cache)
    assert not share(cache, cache, 2 * distance)
    assert share(cache, cache, 2 * (distance - 1)) and share(cache, cache, 2 * (distance + 1))
    # A page of another cache, as one that is appended to could be taken for.
    assert share(cache, Layout((1, PAGE, HEADS, DIM), (1, ROW, DIM, 1), 2), 4 * PAGE * ROW)


def test_keys_and_values_of_other_sizes_share_an_allocation():
    """Pages that begin with the keys and end with the values."""
    key_dim, page = 192, PAGE * HEADS * (192 + 128)
    keys = Layout((PAGES, PAGE, HEADS, key_dim), (page, HEADS * key_dim, key_dim, 1), 2)
    values = Layout((PAGES, PAGE, HEADS, DIM), (page, ROW, DIM, 1), 2)
    for wrong in (-1, 0, 1):
        assert share(keys, values, 2 * (PAGE * HEADS * key_dim + wrong)) == (wrong != 0)
