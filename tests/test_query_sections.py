"""Tiles of queries in sections: each in one, each begun before keys of its section come, and how
many tiles of keys there are."""

import itertools
from collections import Counter
from types import FunctionType

import pytest
from problems import make_problem

from fa3.planning.backward import KEYS_OF_QUERY, TILES_BEFORE, BackwardPlan
from fa3.primitives.divisor import PlainDivisor
from fa3.problem import Window
from fa3.schedules.order import KernelOrder, TileOrder
from fa3.schedules.query_sections import QuerySections
from fa3.schedules.ragged_keys import RaggedKeyOrder

LOCATE = FunctionType(RaggedKeyOrder.locate.__wrapped__.__code__, {"larger": max})
"""With the code as it is written, taken before the DSL puts its own in its place."""

PROBLEMS = list(itertools.product((1, 3, 8), (1, 2, 7), (1, 5), (1, 2, 4, 35), (1, 2, 6)))
"""Tiles of keys of a head, heads, batch, heads of a section, tiles of queries of a head."""


@pytest.mark.parametrize(("keys", "heads", "batch", "of_section", "queries"), PROBLEMS)
def test_queries_are_in_the_section_of_their_keys(keys, heads, batch, of_section, queries):
    of_section = min(of_section, heads * batch)
    order = TileOrder(keys, heads, batch, of_section)
    total = heads * batch * queries
    sections = QuerySections(total, PlainDivisor(of_section * queries))
    for index in range(order.num_tiles):
        tile, section = order.tile(index), order.section_of(index)
        head = tile.batch * heads + tile.head
        own = range(head * queries, (head + 1) * queries)
        assert {sections.section_of(number) for number in own} == {section}
    count = -(-heads * batch // of_section)
    in_kernel = KernelOrder(
        keys, heads, batch, of_section, PlainDivisor(of_section * keys), *[None] * 3
    )
    found = Counter(map(order.section_of, range(order.num_tiles)))
    assert found == {i: in_kernel.tiles_in(i) for i in range(count)}
    assert sum(map(sections.tiles_in, range(count))) == total
    begins = [sections.tiles_before(section) for section in range(count + 1)]
    assert begins[0] == 0 and begins[-1] == total == sections.tiles_before(count + 3)
    assert all(b - a == sections.tiles_in(i) for i, (a, b) in enumerate(itertools.pairwise(begins)))


@pytest.mark.parametrize("records", [1, 5, 33])
@pytest.mark.parametrize(("heads", "of_section"), [(1, 1), (6, 2), (6, 6), (12, 3)])
def test_packed_tiles_are_walked_section_by_section(records, heads, of_section):
    """Each record once for every head, and queries numbered head by head are in its section."""
    order = RaggedKeyOrder(None, PlainDivisor(of_section), PlainDivisor(heads // of_section))
    of_head, end = 7, records * heads
    sections = QuerySections(of_head * heads, PlainDivisor(of_head * of_section))
    found = []
    for index in range(end):
        first_head, number = LOCATE(order, index, end)
        head, record = first_head + number % of_section, number // of_section
        found.append((order.section_of(head), record, head))
        assert sections.section_of(head * of_head) == order.section_of(head)
        assert sections.section_of(head * of_head + of_head - 1) == order.section_of(head)
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
def test_short_sections_are_begun_before(seqlen, window, inside):
    plan = BackwardPlan.of(make_problem(4, seqlen, seqlen, 64, head_dim=128, window=window))
    assert plan.num_sections > 1
    if not inside:
        assert plan.sections_before == plan.num_sections
        return
    of_section = plan.heads_per_section * plan.key_tiles_of_head * plan.shares.parts
    assert 0 <= plan.sections_before * of_section - TILES_BEFORE < of_section


def test_a_call_of_one_section_is_begun_before():
    plan = BackwardPlan.of(make_problem(1, 2048, 2048, 1, head_dim=128, window=Window()))
    assert plan.num_sections == plan.sections_before == 1
