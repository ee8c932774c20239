"""The combinations that tests with many parameters run."""

import itertools

import pytest
from pairs import combine, pairs

SIZES = ((2, 3), (3, 3, 3), (8, 7, 5), (2, 2, 2, 3, 2), (6, 3, 2), (1, 4, 2), (3, 4, 6, 2))


def lists(sizes: tuple[int, ...]) -> list[range]:
    """Values that tell which parameter they are of."""
    return [range(100 * i, 100 * i + size) for i, size in enumerate(sizes)]


def pairs_of(rows) -> set[tuple[int, int]]:
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_two_values_meet_once_at_least(sizes):
    rows = combine(lists(sizes))
    assert pairs_of(rows) == pairs_of(itertools.product(*lists(sizes)))
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("sizes", [one for one in SIZES if len(one) > 2], ids=str)
def test_they_are_few(sizes):
    """As many as the pairs of the two longest lists need, or little more."""
    fewest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert len(combine(lists(sizes))) <= 1.35 * fewest


def test_corners_come_first_and_are_not_repeated():
    rows = combine(lists((4, 3, 2)), [(3, 102, 201), (0, 100, 200)])
    assert rows[:2] == [(3, 102, 201), (0, 100, 200)]
    assert len(set(rows)) == len(rows) and pairs_of(rows) == pairs_of(combine(lists((4, 3, 2))))


def test_values_need_not_be_hashable():
    mark = pairs({"size": 2, "options": {"a": 1}}, size=(1, 2), options=({}, {"a": 1}))
    names, rows = mark.args
    assert names == ("size", "options")
    assert rows == [(2, {"a": 1}), (1, {}), (1, {"a": 1}), (2, {})]


def test_corners_are_of_the_values():
    with pytest.raises(ValueError):
        pairs({"size": 3, "window": 0}, size=(1, 2), window=(0, 1))
