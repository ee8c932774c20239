"""Schedules that a caller makes by hand: what no kernel could walk is refused, and said."""

from collections import defaultdict
from dataclasses import replace
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
from fa3.schedules.coverage import check_schedule
from fa3.schedules.order import END
from fa3.schedules.segment import MOST_PARTS, MOST_SLOTS

ORDER = TileOrder(num_m_blocks=3, num_heads=2, batch=1, heads_per_section=2)
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


def test_some_tiles_are_in_parts():
    assert IN_PARTS.num_slots == 4


@pytest.mark.parametrize("num_clusters", [200, 300, 40_000, 70_000])
def test_any_number_of_clusters_can_be_dealt_to(num_clusters):
    num_tiles = num_clusters + num_clusters // 2
    check(TileList.balanced(TileOrder(num_tiles, 1, 1, 1), num_clusters, np.ones(num_tiles)))


# ----------------------------------------------------------------------------------- clusters


@pytest.mark.parametrize("kind", [StaticPersistent, Dynamic, LISTED, IN_PARTS], ids=str)
@pytest.mark.parametrize(
    ("num_clusters", "error", "complaint"),
    [
        (0, ValueError, "^schedule must have num_clusters from 1 .* got 0$"),
        (-4, ValueError, "^schedule must have num_clusters from 1 .* got -4$"),
        (
            1 << 40,
            ValueError,
            r"^schedule must have num_clusters .* to \d{10} .* got 1099511627776",
        ),
        (4.0, TypeError, "^schedule must have an integer as its num_clusters, got 4.0"),
        (np.int64(4), TypeError, "^schedule must have an integer as its num_clusters"),
    ],
)
def test_numbers_of_clusters(kind, num_clusters, error, complaint):
    made = kind(ORDER, num_clusters) if isinstance(kind, type) else None
    with pytest.raises(error, match=complaint):
        check(made or replace(kind, num_clusters=num_clusters))


def test_sizes_of_an_order_are_integers():
    order = replace(ORDER, heads_per_section=2.0)
    with pytest.raises(TypeError, match=r"integer as its order.heads_per_section, got 2.0"):
        check(StaticPersistent(order, 4))


@pytest.mark.parametrize(
    "field", [{"counters": torch.zeros(2, dtype=torch.int32)}, {"mailbox": Endless()}]
)
def test_counters_are_not_the_callers(field):
    schedule = replace(Dynamic(ORDER, 4), **field)
    with pytest.raises(ValueError, match=r"^schedule must have no counters and no mailbox"):
        check(schedule)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(TypeError, match=r"^schedule must be one of fa3.schedules, got "):
        check(SimpleNamespace(order=ORDER, num_clusters=4))


# ------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        (lambda table: table.astype(np.int64), TypeError, "int32 as its table, got int64$"),
        (lambda table: table.astype(">i4"), TypeError, "int32 as its table, got >i4$"),
        (lambda table: table.tolist(), TypeError, "int32 as its table, got list$"),
        (lambda table: torch.from_numpy(table), TypeError, "int32 as its table, got Tensor$"),
        (lambda table: Endless(), TypeError, "int32 as its table, got Endless$"),
        (lambda table: table.reshape(-1, 4), ValueError, r"flat, got shape \(.*, 4\)$"),
        (lambda table: table[:-1], ValueError, "whole rounds, each with . numbers for each of 4"),
        (lambda table: table[:0], ValueError, "whole rounds, .* got 0 numbers"),
    ],
)
@pytest.mark.parametrize("schedule", [LISTED, IN_PARTS], ids=["listed", "in parts"])
def test_tables(schedule, change, error, complaint):
    with pytest.raises(error, match=f"^schedule must have a .*{complaint}"):
        check(table_of(schedule, change))


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


def longer(table, place: int, number: int):
    """Add a round, and put an entry to a place."""
    table = np.append(table, [END] * 4).astype(np.int32)
    assert table[place] == END
    table[place] = number
    return table


def first(number: int):
    return lambda table: np.array([number, *table[1:]], np.int32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda table: table[:-4], r"must have END \(-1\) after the entries of every cluster"),
        (lambda table: longer(table, -5, table[0]), r"has entries after END \(-1\) of cluster 3$"),
        (first(6), "has tile number 6, but its order does not have it: there are 6$"),
        (first(-2), "has tile number -2, but its order does not have it"),
        (first(LISTED.table[1]), r"leaves out Tile\("),
        (
            lambda table: longer(table, np.flatnonzero(table == END)[0], table[0]),
            r"has Tile\(.*\) 2 times$",
        ),
    ],
)
def test_entries(change, complaint):
    with pytest.raises(ValueError, match=f"^schedule {complaint}"):
        check(table_of(LISTED, change))


# -------------------------------------------------------------------------------------- parts


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


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (swap_slots, "numbers the parts of .* inconsistently"),
        (same_slots, "numbers the parts of .* inconsistently"),
        (moved(NUMBERS, MOST_PARTS**2), "numbers the parts of .* inconsistently"),
        (moved(NUMBERS, -3 * MOST_PARTS**2), "numbers the parts of .* inconsistently"),
        (moved(NUMBERS, MOST_PARTS, part=0), "numbers the parts of .* inconsistently"),
        (moved(NUMBERS, 1, part=0), "numbers the parts of .* inconsistently"),
        (whole_in_a_slot, "numbers the parts of .* inconsistently"),
        (moved(BEGIN, -1, part=1), "has key blocks"),
        (moved(BEGIN, 1, part=1), "has key blocks"),
        (no_blocks, "has key blocks"),
        (moved(STOP, 1, part=-1), "has key blocks"),
        (moved(STOP, -1, part=-1), "leaves out key blocks 9 to 9"),
    ],
)
def test_parts(change, complaint):
    with pytest.raises(ValueError, match=f"^schedule {complaint}"):
        check(parts_of(change))


@pytest.mark.parametrize("num_slots", [0, 3, 5, 1 << 40])
def test_numbers_of_slots(num_slots):
    complaint = f"^schedule must have num_slots 4, as many as .* got {num_slots}$"
    with pytest.raises(ValueError, match=complaint):
        check(replace(IN_PARTS, num_slots=num_slots))
    with pytest.raises(TypeError, match=r"^schedule must have an integer as its num_slots"):
        check(replace(IN_PARTS, num_slots=float(num_slots)))


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
    return SplitTiles(TileOrder(num_tiles, 1, 1, 1), 1, table, 2 * num_tiles)


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
    with pytest.raises(ValueError, match=r"^schedule must have num_slots"):
        fa3.flash_attn_func(q, k, v, schedule=replace(made, num_slots=made.num_slots - 1))
