"""Head groups of query tiles: each tile is in the head group of its keys."""

import itertools
from collections import Counter
from types import FunctionType

import pytest
from problems import make_problem

from fa3.planning.backward import KEYS_OF_QUERY, TILES_PREPROCESSED, BackwardPlan
from fa3.primitives.divisor import PlainDivisor
from fa3.problem import Window
from fa3.schedules.order import KernelOrder, TileOrder
from fa3.schedules.query_index import QueryHeadGroups
from fa3.schedules.ragged_keys import RaggedKeyOrder

LOCATE = FunctionType(RaggedKeyOrder.locate.__wrapped__.__code__, {"larger": max})
"""With the code as it is written, taken before the DSL puts its own in its place."""

PROBLEMS = list(itertools.product((1, 3, 8), (1, 2, 7), (1, 5), (1, 2, 4, 35), (1, 2, 6)))
"""Key tiles of a head, heads, batch, heads of a head group, query tiles of a head."""


@pytest.mark.parametrize(("keys", "heads", "batch", "per_group", "queries"), PROBLEMS)
def test_queries_are_in_the_head_group_of_their_keys(keys, heads, batch, per_group, queries):
    per_group = min(per_group, heads * batch)
    order = TileOrder(keys, heads, batch, per_group)
    total = heads * batch * queries
    groups = QueryHeadGroups(total, PlainDivisor(per_group * queries))
    for index in range(order.num_tiles):
        tile, group = order.tile(index), order.section_of(index)
        head = tile.batch * heads + tile.head
        own = range(head * queries, (head + 1) * queries)
        assert {groups.group_of(number) for number in own} == {group}
    count = -(-heads * batch // per_group)
    in_kernel = KernelOrder(
        keys, heads, batch, per_group, PlainDivisor(per_group * keys), *[None] * 3
    )
    found = Counter(map(order.section_of, range(order.num_tiles)))
    assert found == {i: in_kernel.tiles_in(i) for i in range(count)}
    assert sum(map(groups.tiles_in, range(count))) == total
    begins = [groups.tiles_before(group) for group in range(count + 1)]
    assert begins[0] == 0 and begins[-1] == total == groups.tiles_before(count + 3)
    assert all(b - a == groups.tiles_in(i) for i, (a, b) in enumerate(itertools.pairwise(begins)))


@pytest.mark.parametrize("records", [1, 5, 33])
@pytest.mark.parametrize(("heads", "per_group"), [(1, 1), (6, 2), (6, 6), (12, 3)])
def test_packed_tiles_are_walked_group_by_group(records, heads, per_group):
    """Each record once for every head, and queries numbered head by head are in its head group."""
    order = RaggedKeyOrder(None, PlainDivisor(per_group), PlainDivisor(heads // per_group))
    of_head, end = 7, records * heads
    groups = QueryHeadGroups(of_head * heads, PlainDivisor(of_head * per_group))
    found = []
    for index in range(end):
        first_head, number = LOCATE(order, index, end)
        head, record = first_head + number % per_group, number // per_group
        found.append((order.group_of(head), record, head))
        assert groups.group_of(head * of_head) == order.group_of(head)
        assert groups.group_of(head * of_head + of_head - 1) == order.group_of(head)
    assert LOCATE(order, 0, 0) == (0, 0)
    assert found == sorted(found)
    assert len({(record, head) for _, record, head in found}) == end


@pytest.mark.parametrize(
    ("seqlen", "window", "inside"),
    [
        (KEYS_OF_QUERY, Window(), True),
        (KEYS_OF_QUERY - 1, Window(), False),
        (2 * KEYS_OF_QUERY, Window(right=0), True),
        (2 * KEYS_OF_QUERY - 2, Window(right=0), False),
        (16384, Window(KEYS_OF_QUERY - 1, 0), True),
        (16384, Window(KEYS_OF_QUERY - 2, 0), False),
        (16384, Window(100, 100), False),
    ],
)
def test_short_head_groups_are_preprocessed_before(seqlen, window, inside):
    plan = BackwardPlan.of(make_problem(4, seqlen, seqlen, 64, head_dim=128, window=window))
    assert plan.num_head_groups > 1
    if not inside:
        assert plan.groups_preprocessed == plan.num_head_groups
        return
    per_group = plan.heads_per_group * plan.key_tiles_of_head * plan.shares.parts
    assert 0 <= plan.groups_preprocessed * per_group - TILES_PREPROCESSED < per_group


def test_a_call_of_one_head_group_is_preprocessed_before():
    plan = BackwardPlan.of(make_problem(1, 2048, 2048, 1, head_dim=128, window=Window()))
    assert plan.num_head_groups == plan.groups_preprocessed == 1
