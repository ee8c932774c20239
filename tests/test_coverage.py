"""Schedules that a caller makes by hand: what no kernel could walk is refused, and said."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import make_operands, make_problem

import fa3
from fa3.planning.planner import plan_forward
from fa3.problem import Window
from fa3.schedules import (
    Dynamic,
    KeyRanges,
    SingleTile,
    SplitTiles,
    StaticPersistent,
    TileList,
    TileOrder,
)
from fa3.schedules.order import END, MOST_PARTS, MOST_SLOTS, check_schedule

ORDER = TileOrder(num_m_blocks=3, num_heads=2, batch=1, heads_per_group=2)
BLOCKS = 10
"""Key blocks of each of its tiles."""

LISTED = TileList.balanced(ORDER, 4, np.ones(6))
NONE = np.zeros(6, int)
IN_PARTS = SplitTiles.cut(ORDER, 4, KeyRanges(NONE, np.full(6, BLOCKS), 1.5, 1.4, 0.6, NONE))


def check(schedule) -> None:
    count = schedule.order.num_tiles
    check_schedule(schedule, np.zeros(count, int), np.full(count, BLOCKS))


def table_of(schedule, change):
    """Return the schedule with a table that `change` makes of its own, or changes in place."""
    table = schedule.table.copy()
    changed = change(table)
    return replace(schedule, table=table if changed is None else changed)


def parts_of(change) -> SplitTiles:
    """Return the schedule in parts after `change(units, places)`, which says where parts are.

    `places` are the places of every tile's parts among the units, in the order of their keys.
    """

    def change_units(table):
        units = table.reshape(-1, 4)
        places = defaultdict(list)
        for place in np.lexsort((units[:, 1], units[:, 0])):
            if units[place, 0] != END and units[place, 3] != 1:
                places[int(units[place, 0])].append(place)
        change(units, list(places.values()))

    return table_of(IN_PARTS, change_units)


class Endless:
    """A table without an end."""

    def __getitem__(self, position):
        return 0


def test_they_pass_unchanged():
    schedules = (
        SingleTile(ORDER),
        StaticPersistent(ORDER, 4),
        # More clusters than tiles, or than a GPU holds, are of no use and do no harm.
        StaticPersistent(ORDER, 1000),
        Dynamic(ORDER, 1000),
        TileList.balanced(ORDER, 1000, np.ones(6)),
        LISTED,
        IN_PARTS,
    )
    for schedule in schedules:
        check(schedule)
    check(TileList.balanced(TileOrder(0, 2, 1, 1), 0, np.ones(0)))


@pytest.mark.parametrize("num_clusters", [200, 300, 40_000, 70_000])
def test_any_number_of_clusters_can_be_dealt_to(num_clusters):
    num_tiles = num_clusters + num_clusters // 2
    check(TileList.balanced(TileOrder(num_tiles, 1, 1, 1), num_clusters, np.ones(num_tiles)))


# ------------------------------------------------------------------------------- what is refused


def with_clusters(kind, num_clusters):
    """A schedule of this type, or like this one, for so many clusters."""
    if isinstance(kind, type):
        return kind(ORDER, num_clusters)
    return replace(kind, num_clusters=num_clusters)


def longer(table, place: int, number: int):
    """Add a round, and put an entry to a place."""
    table = np.append(table, [END] * 4).astype(np.int32)
    assert table[place] == END
    table[place] = number
    return table


def first(number: int):
    return lambda table: np.array([number, *table[1:]], np.int32)


def moved(column: int, by: int, part: int | None = None):
    """A change that adds to a number of a part of the first tile, or of all parts."""

    def change(units, places):
        at = np.concatenate(places) if part is None else places[0][part]
        units[at, column] += by

    return change


def swap_slots(units, places):
    """Give the first tile in parts the slots of the second."""
    first, second = places[:2]
    assert len(first) == len(second)
    units[[*first, *second], 3] = units[[*second, *first], 3]


def same_slots(units, places):
    """Let two tiles share their slots."""
    first, second = places[:2]
    units[second, 3] = units[first, 3]


def whole_in_a_slot(units, places):
    units[np.flatnonzero(units[:, 3] == 1)[0], 3] += MOST_PARTS**2


def no_blocks(units, places):
    units[places[0][0], 2] = units[places[0][0], 1]


BEGIN, STOP, NUMBERS = 1, 2, 3
"""Columns of units."""

INTEGER = "must have an integer as its"
CLUSTERS = [
    (0, ValueError, "must have num_clusters from 1 .* got 0$"),
    (-4, ValueError, "must have num_clusters from 1 .* got -4$"),
    (1 << 40, ValueError, r"must have num_clusters .* to \d{10} .* got 1099511627776"),
    (4.0, TypeError, f"{INTEGER} num_clusters, got 4.0"),
    (np.int64(4), TypeError, f"{INTEGER} num_clusters"),
]
OTHERS = [
    (lambda: StaticPersistent(replace(ORDER, heads_per_group=2.0), 4), TypeError,
     f"{INTEGER} order.heads_per_group, got 2.0"),
    (lambda: replace(Dynamic(ORDER, 4), counters=torch.zeros(2).int()), ValueError,
     "must have no counters and no mailbox"),
    (lambda: replace(Dynamic(ORDER, 4), mailbox=Endless()), ValueError,
     "must have no counters and no mailbox"),
    (lambda: SimpleNamespace(order=ORDER, num_clusters=4), TypeError,
     "must be one of fa3.schedules, got "),
]  # fmt: skip
TABLES = [
    (lambda table: table.astype(np.int64), TypeError, "int32 as its table, got int64$"),
    (lambda table: table.astype(">i4"), TypeError, "int32 as its table, got >i4$"),
    (lambda table: table.tolist(), TypeError, "int32 as its table, got list$"),
    (lambda table: torch.from_numpy(table), TypeError, "int32 as its table, got Tensor$"),
    (lambda table: Endless(), TypeError, "int32 as its table, got Endless$"),
    (lambda table: table.reshape(-1, 4), ValueError, r"flat, got shape \(.*, 4\)$"),
    (lambda table: table[:-1], ValueError, "whole rounds, each with . numbers for each of 4"),
    (lambda table: table[:0], ValueError, "whole rounds, .* got 0 numbers"),
]
ENTRIES = [
    (lambda table: table[:-4], r"must have END \(-1\) after the entries of every cluster"),
    (lambda table: longer(table, -5, table[0]), r"has entries after END \(-1\) of cluster 3$"),
    (first(6), "has tile number 6, but its order does not have it: there are 6$"),
    (first(-2), "has tile number -2, but its order does not have it"),
    (first(LISTED.table[1]), r"leaves out Tile\("),
    (lambda table: longer(table, np.flatnonzero(table == END)[0], table[0]),
     r"has Tile\(.*\) 2 times$"),
]  # fmt: skip
INCONSISTENT = "numbers the parts of .* inconsistently"
PARTS = [
    (swap_slots, INCONSISTENT),
    (same_slots, INCONSISTENT),
    (moved(NUMBERS, MOST_PARTS**2), INCONSISTENT),
    (moved(NUMBERS, -3 * MOST_PARTS**2), INCONSISTENT),
    (moved(NUMBERS, MOST_PARTS, part=0), INCONSISTENT),
    (moved(NUMBERS, 1, part=0), INCONSISTENT),
    (whole_in_a_slot, INCONSISTENT),
    (moved(BEGIN, -1, part=1), "has key blocks"),
    (moved(BEGIN, 1, part=1), "has key blocks"),
    (no_blocks, "has key blocks"),
    (moved(STOP, 1, part=-1), "has key blocks"),
    (moved(STOP, -1, part=-1), "has key blocks 5 to 8 of .* where 5 to 9 are left"),
]
WRONG = [
    *(
        (partial(with_clusters, kind, number), *rest)
        for kind in (StaticPersistent, Dynamic, LISTED, IN_PARTS)
        for number, *rest in CLUSTERS
    ),
    *OTHERS,
    *(
        (partial(table_of, schedule, change), error, f"must have a .*{complaint}")
        for schedule in (LISTED, IN_PARTS)
        for change, error, complaint in TABLES
    ),
    *((partial(table_of, LISTED, change), ValueError, complaint) for change, complaint in ENTRIES),
    *((partial(parts_of, change), ValueError, complaint) for change, complaint in PARTS),
]  # fmt: skip
"""(what makes a schedule, the error, what is said of the schedule)."""


@pytest.mark.parametrize(("make", "error", "complaint"), WRONG)
def test_what_no_kernel_could_walk_is_refused(make, error, complaint):
    with pytest.raises(error, match=f"^schedule {complaint}"):
        check(make())


@pytest.mark.parametrize("schedule", ["list", "split"])
def test_nobody_writes_to_a_table_that_was_checked(schedule):
    """Plans share the tables that the planner remembers, and no launch checks one again."""
    problem = make_problem(seqlen_q=700, window=Window(right=0))
    table = plan_forward(problem, schedule=schedule).schedule.table
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        table.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        table[0] = END


@pytest.mark.parametrize("schedule", [LISTED, IN_PARTS], ids=["listed", "in parts"])
def test_a_table_is_that_of_when_it_was_given(schedule):
    given = schedule.table.copy()
    made = replace(schedule, table=given)
    check(made)
    given[:] = 1 << 30
    check(made)
    assert made == schedule


def test_a_tile_in_too_many_parts():
    order, none, most = TileOrder(1, 1, 1, 1), np.zeros(1, int), np.array([3000])
    schedule = SplitTiles.cut(order, 300, KeyRanges(none, most, 0.1, 0.1, 0.1, none))
    with pytest.raises(
        ValueError, match=r"^schedule cuts Tile\(.*\) into 300 parts, more than 255"
    ):
        check_schedule(schedule, np.zeros(1, int), most)


def halves(num_tiles: int) -> SplitTiles:
    """Return a schedule of one cluster that works on each tile in two parts."""
    part = np.arange(2 * num_tiles)
    second, half = part % 2, BLOCKS // 2
    numbers = 2 + MOST_PARTS * (second + MOST_PARTS * part)
    units = np.stack((part // 2, second * half, (second + 1) * half, numbers), axis=1)
    table = np.append(units, [END] * 4).astype(np.int32)
    return SplitTiles(TileOrder(num_tiles, 1, 1, 1), 1, table)


def test_too_many_parts():
    check(halves(MOST_SLOTS // 2))
    with pytest.raises(ValueError, match=r"^schedule has 16386 parts of tiles, more than 16384$"):
        check(halves(MOST_SLOTS // 2 + 1))


def test_a_call_refuses_it():
    problem = make_problem(1, 300, 4000, 1, 2, 64, Window())
    q, k, v = make_operands(problem)
    made = plan_forward(problem, schedule="split").schedule
    assert made.num_slots > 0
    fa3.flash_attn_func(q, k, v, schedule=made)
    with pytest.raises(ValueError, match=r"^schedule must have a table of whole rounds"):
        fa3.flash_attn_func(q, k, v, schedule=replace(made, table=made.table[:-1]))
