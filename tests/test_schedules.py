"""Schedules: every tile exactly once, whole or in parts; clusters equally busy; on a Hopper GPU.

Of those that a caller makes by hand, what no kernel could walk is refused, and said.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairs
from problems import CAUSAL, attend, make_operands, make_problem, plan_of, windows
from reference import check_attention

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.primitives.arithmetic import Divisor
from fa3.problem import Window
from fa3.schedules import (
    Dynamic,
    Segment,
    SingleTile,
    SplitTiles,
    StaticPersistent,
    Tile,
    TileList,
    TileOrder,
    walk,
)
from fa3.schedules.order import END, MOST_PARTS, MOST_SLOTS, KernelOrder, Segments, check_schedule
from fa3.schedules.split import KeyRanges, end_of_last
from fa3.scores.masks import Sequence

SCHEDULE_TYPES = (SingleTile, StaticPersistent, TileList)


@st.composite
def orders(draw):
    num_m_blocks, num_heads, batch = (draw(st.integers(0, n)) for n in (9, 7, 5))
    return TileOrder(
        num_m_blocks, num_heads, batch, draw(st.integers(1, max(1, num_heads * batch)))
    )


@st.composite
def schedules(draw, types=SCHEDULE_TYPES):
    """Draw schedules with no more clusters than tiles, as the planner makes them."""
    order = draw(orders())
    schedule_type = draw(st.sampled_from(types))
    num_clusters = min(order.num_tiles, draw(st.integers(1, 40)))
    if schedule_type is SingleTile:
        return SingleTile(order)
    if schedule_type is StaticPersistent:
        return StaticPersistent(order, num_clusters)
    durations = draw(st.lists(st.integers(1, 20), min_size=9, max_size=9))
    return TileList.balanced(order, num_clusters, tile_times(order, durations))


def tile_times(order: TileOrder, durations: list[float]) -> np.ndarray:
    """The time of every tile, given that of each m_block."""
    return np.asarray(durations, np.float64)[order.m_blocks()]


def shares(schedule) -> list[list[Tile]]:
    return [
        [segment.tile for segment in walk(schedule, cluster)]
        for cluster in range(schedule.num_clusters)
    ]


@given(schedules())
def test_every_tile_is_worked_on_once(schedule):
    visits = Counter(tile for share in shares(schedule) for tile in share)
    order = schedule.order
    all_tiles = product(*map(range, (order.num_m_blocks, order.num_heads, order.batch)))
    assert visits == Counter(Tile(*coordinates) for coordinates in all_tiles)


@given(schedules(types=(SingleTile, StaticPersistent)))
def test_shares_differ_by_one_tile_at_most(schedule):
    sizes = [len(share) for share in shares(schedule)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(schedules())
def test_a_cluster_keeps_to_the_order(schedule):
    number = {schedule.order.tile(i): i for i in range(schedule.order.num_tiles)}
    for share in shares(schedule):
        numbers = [number[tile] for tile in share]
        assert numbers == sorted(numbers)


@given(orders(), st.integers(1, 12), st.integers(1, 12))
def test_heads_come_in_groups_of_any_size_and_the_last_rows_first(order, few, more):
    whole, tiles = order.heads_per_group, [order.tile(i) for i in range(order.num_tiles)]
    for most, last in ((whole, whole), (few, few + more)):
        end = -(-max(0, order.num_heads * order.batch - last) // most)
        heads = (tile.batch * order.num_heads + tile.head for tile in tiles)
        places = [(min(h // most, end), -t.m_block, h) for t, h in zip(tiles, heads, strict=True)]
        numbers = order.in_smaller_groups(most, last).tolist()
        assert [places[number] for number in numbers] == sorted(places)
        assert most != last or numbers == list(range(order.num_tiles))


def test_static_persistent_deals_back_and_forth():
    schedule = StaticPersistent(TileOrder(10, 1, 1, 1), num_clusters=4)
    first_rows = [[tile.m_block for tile in share] for share in shares(schedule)]
    assert first_rows == [[9, 2, 1], [8, 3, 0], [7, 4], [6, 5]]


@given(schedules(types=(TileList,)), st.lists(st.integers(1, 20), min_size=9, max_size=9))
def test_a_balanced_list_ends_within_one_tile(schedule, durations):
    order = schedule.order
    times = tile_times(order, durations)
    balanced = TileList.balanced(order, schedule.num_clusters, times)
    ends = [sum(durations[tile.m_block] for tile in share) for share in shares(balanced)]
    longest = max(durations[: order.num_m_blocks], default=0)
    assert max(ends, default=0) - min(ends, default=0) <= longest


# ---------------------------------------------------------------------------- an order of one's own


def test_index_is_the_inverse_of_tile():
    order = TileOrder(num_m_blocks=5, num_heads=3, batch=3, heads_per_group=4)
    assert [order.index(order.tile(i)) for i in range(order.num_tiles)] == list(range(45))
    assert order.m_blocks().tolist() == [order.tile(i).m_block for i in range(45)]


ORDER = TileOrder(num_m_blocks=4, num_heads=2, batch=2, heads_per_group=3)
TILES = [ORDER.tile(index) for index in range(ORDER.num_tiles)]


def arranged(num_clusters: int, tiles: list) -> TileList:
    """Assign tiles of equal times in an order."""
    tiled = SimpleNamespace(order=ORDER, num_clusters=num_clusters, times=np.ones(len(TILES)))
    return TileList.in_order_of(tiled, lambda _: tiles)


@given(st.permutations(TILES), st.integers(1, 20))
def test_any_order_is_dealt_as_it_comes(tiles, num_clusters):
    walks = shares(arranged(num_clusters, tiles))
    assert sorted(tile for column in walks for tile in column) == sorted(tiles)
    # Tiles of equal length go round the clusters.
    for cluster, column in enumerate(walks):
        assert column == tiles[cluster::num_clusters]


@pytest.mark.parametrize(
    ("tiles", "error", "complaint"),
    [
        (TILES[1:], ValueError, r"leaves out Tile\(m_block=3, head=0, batch=0\)"),
        ([*TILES, TILES[5]], ValueError, r"has Tile\(.*\) 2 times$"),
        ([*TILES[:-1], Tile(4, 0, 0)], ValueError, r"gives Tile\(m_block=4, .*\) at 15"),
        ([*TILES[:-1], Tile(0, -1, 0)], ValueError, r"gives Tile\(.* head=-1, .*\) at 15"),
        ([Tile(0, 0.5, 0)], TypeError, r"gives Tile\(m_block=0, head=0.5, batch=0\) at 0, not a"),
        ([Tile(0, 0, 0), 7], TypeError, "gives 7 at 1, not a Tile"),
        (["abc"], TypeError, "gives 'abc' at 0, not a Tile"),
        ([(0, 0)], TypeError, r"gives \(0, 0\) at 0, not a Tile"),
    ],
)
def test_an_order_that_is_not_one_is_refused(tiles, error, complaint):
    with pytest.raises(error, match=f"^schedule[ .]{complaint}"):
        arranged(3, tiles)


HEAD_DIMS = (64, 128, 256)

FEW_TILES = (
    (1, 2048, 2048, 1, 8),
    (1, 1000, 1000, 2, 4),
    (1, 640, 4096, 8, 4),
    (1, 128, 8000, 2, 4),
    (2, 1, 20000, 2, 1),
    (3, 700, 333, 2, 2),
)
"""(batch, queries, keys, key/value heads, query heads of each)."""


@pairs(head_dim=HEAD_DIMS, window=(Window(), CAUSAL, Window(600, 50)))
def test_parts_of_tiles(head_dim, window, device):
    for *sizes, ratio in FEW_TILES:
        tight = window.tighten(*sizes[1:3])
        problem = make_problem(*sizes, ratio, head_dim, tight)
        q, k, v = make_operands(problem, device=device)
        clusters = [{}, {"cluster_m": 2}] + [{"cluster_h": 2}] * (ratio % 2 == 0)
        for cluster in clusters:
            plan = plan_of(problem, "split", **cluster)
            out, lse = attend(q, k, v, tight, plan=plan)
            check_attention(out, lse, q, k, v, window=tight)


@pytest.mark.parametrize(
    ("head_dim", "schedule"), [(64, "split"), (128, "split"), (128, "dynamic"), (256, "split")]
)
def test_whoever_comes_first_the_bits_are_the_same(head_dim, schedule, device):
    problem = make_problem(1, 1500, 3000, 2, 4, head_dim, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, schedule)
    out, lse = attend(q, k, v, CAUSAL, plan=plan)
    check_attention(out, lse, q, k, v, window=CAUSAL)
    for _ in range(200):
        again, lse_again = attend(q, k, v, CAUSAL, plan=plan)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_a_tile_order_cannot_be_copied_during_a_capture(device):
    problem = make_problem(1, 777, 888, 2, 1, 128, CAUSAL)
    tensors = make_operands(problem, device=device)
    attend(*make_operands(make_problem(1, 776, 888, 2, 1, 128, CAUSAL), device=device), CAUSAL)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensors[0] + 1
        with pytest.raises(RuntimeError, match=r"^q, k and v .* call once before capturing"):
            fa3.flash_attn_func(*tensors, causal=True, schedule="list")
    fa3.flash_attn_func(*tensors, causal=True, schedule="list")


LARGEST = 2**31 - 1


@cute.jit
def write_tiles(tiles: cute.Tensor, num_m_blocks: Int32, heads: Int32, batch: Int32, most: Int32):
    order = KernelOrder.of(num_m_blocks, heads, batch, most)
    for i in cutlass.range(tiles.shape[0]):
        tile = order.tile(Int32(i))
        for field in cutlass.range_constexpr(3):
            tiles[i, field] = tile[field]


@cute.jit
def divide(numbers: cute.Tensor, divisors: cute.Tensor, quotients: cute.Tensor):
    for i in cutlass.range(numbers.shape[0]):
        quotients[i] = Divisor.of(divisors[i]).quotient(numbers[i])


@pytest.mark.compiles
@pytest.mark.parametrize(
    "sizes", [(5, 3, 4, 5), (4, 2, 2, 3), (1, 1, 1, 1), (7, 33, 1, 33), (3, 5, 2, 1), (9, 4, 8, 31)]
)
def test_tiles_are_those_of_the_plan(sizes):
    order = TileOrder(*sizes)
    found = torch.full((order.num_tiles, 3), -1, dtype=torch.int32)
    write_tiles(from_dlpack(found), *map(Int32, sizes))
    assert found.tolist() == [list(order.tile(i)) for i in range(order.num_tiles)]


@pytest.mark.compiles
def test_quotients_are_exact():
    draw = random.Random(0)
    sizes = [1, 2, 3, 7, 2**16 - 1, 2**16, 2**25, 2**30, 2**30 + 1, LARGEST - 1, LARGEST]
    sizes += [int(2 ** draw.uniform(0, 31)) for _ in range(2000)]
    numbers, divisors = [], []
    for divisor in sizes:
        multiple = draw.randint(0, LARGEST // divisor) * divisor
        for number in (0, divisor - 1, divisor, multiple - 1, multiple, LARGEST):
            numbers.append(max(0, number))
            divisors.append(divisor)
    found = torch.full((len(numbers),), -1, dtype=torch.int32)
    given = (torch.tensor(values, dtype=torch.int32) for values in (numbers, divisors))
    divide(*map(from_dlpack, (*given, found)))
    assert found.tolist() == [n // d for n, d in zip(numbers, divisors, strict=True)]


# ----------------------------------------------------------------------------------- tiles in parts

OVERHEADS = TILE, MERGE, LEAVE = 1.5, 1.4, 0.6


def time_of(segment: Segment, ranges: KeyRanges) -> float:
    """A segment's time in key blocks, without masks. The part at block 0 merges."""
    blocks = segment.end - segment.begin + ranges.unit
    if segment.is_whole:
        return blocks
    return blocks + (ranges.leave if segment.begin else ranges.merge)


@st.composite
def cuts(draw):
    """Draw an order, the tiles' key blocks and a number of clusters."""
    num_m_blocks, heads, batch = (draw(st.integers(1, n)) for n in (24, 12, 3))
    order = TileOrder(num_m_blocks, heads, batch, draw(st.integers(1, heads * batch)))
    lengths = draw(st.lists(st.integers(1, 80), min_size=num_m_blocks, max_size=num_m_blocks))
    firsts = draw(st.lists(st.integers(0, 9), min_size=num_m_blocks, max_size=num_m_blocks))
    m_blocks = order.m_blocks()
    first = np.array(firsts)[m_blocks]
    masks = np.full(order.num_tiles, draw(st.sampled_from((0.0, 0.25))))
    ranges = KeyRanges(first, first + np.array(lengths)[m_blocks], *OVERHEADS, masks)
    return order, ranges, draw(st.integers(1, 140))


@given(cuts())
def test_every_key_block_of_every_tile_once(case):
    order, ranges, num_clusters = case
    schedule = SplitTiles.cut(order, num_clusters, ranges)
    check_schedule(schedule, ranges.first_blocks, ranges.end_blocks)


@given(st.integers(1, 5), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 8), windows())
def test_plans_cover_what_the_mask_touches(batch, seqlen_q, seqlen_k, heads, window):
    problem = make_problem(batch, seqlen_q, seqlen_k, heads, head_dim=128, window=window)
    plan = plan_forward(problem, schedule="split")
    config, order = plan.config, plan.schedule.order
    rows = config.tile_m * config.cluster_m
    sequence = Sequence(seqlen_q, seqlen_k, window)
    blocks = [
        problem.spec.mask.key_blocks(m_block * rows, rows, config.tile_n, sequence)
        for m_block in order.m_blocks().tolist()
    ]
    check_schedule(plan.schedule, *np.array([(one.begin, one.end) for one in blocks]).T)


@pytest.mark.parametrize(
    ("num_m_blocks", "heads", "blocks", "most"),
    [(5, 32, 64, 1.03), (36, 24, 36, 1.02), (64, 32, 64, 1.02), (1, 32, 64, 1.1), (2, 66, 9, 1.02)],
)
def test_clusters_end_together(num_m_blocks, heads, blocks, most):
    order = TileOrder(num_m_blocks, heads, 1, heads)
    end = np.full(order.num_tiles, blocks)
    none = np.zeros_like(end)
    ranges = KeyRanges(none, end, *OVERHEADS, none)
    schedule = SplitTiles.cut(order, 132, ranges)
    work = [sum(time_of(u, ranges) for u in walk(schedule, c)) for c in range(132)]
    assert max(work) <= most * sum(work) / len(work)


def test_a_merge_waits_for_the_last_part():
    """Tile 0 in three parts: the first is done at 4, of which a merge takes 1, the last at 6."""
    tile, owner = np.array([0, 0, 0, 1]), np.array([0, 1, 2, 2])
    partial, merging = np.array([1, 1, 1, 0], bool), np.array([1, 0, 0, 0], bool)
    segments = Segments(tile, tile, tile, owner, partial, merging)
    for loads, end in ((None, 4), ((0, 3, 0), 7), ((0, 0, 3.5), 7), ((0, 0, 6.5), 10)):
        loads = None if loads is None else np.array(loads, float)
        assert end_of_last(segments, np.array([4.0, 3.0, 2.5, 1.0]), 1.0, loads) == end


def test_whole_tiles_stay_whole_where_they_come_out_even():
    order = TileOrder(4, 33, 1, 33)
    end = np.full(order.num_tiles, 10)
    none = np.zeros_like(end)
    schedule = SplitTiles.cut(order, 132, KeyRanges(none, end, *OVERHEADS, none))
    assert schedule.num_slots == 0


@pytest.mark.parametrize(
    ("window", "config"),
    [
        *((window, None) for window in (Window(), Window(right=0), Window(3000, 20))),
        (Window(right=0), ForwardConfig(128, 128, cluster_m=2)),
        (Window(right=0), ForwardConfig(128, 128, cluster_h=2)),
    ],
    ids=str,
)
def test_parts_merge_to_attention(window, config):
    problem = make_problem(1, 300, 4000, 1, 2, 64, window)
    q, k, v = make_operands(problem)
    config = config or choose_config(problem, H200)
    plan = plan_forward(problem, config=config, schedule="split")
    assert plan.schedule.num_slots > 0
    out, lse = fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, plan=plan)
    check_attention(out, lse, q, k, v, window=window)


# -------------------------------------------------------------------- schedules that a caller makes

SMALL_ORDER = TileOrder(num_m_blocks=3, num_heads=2, batch=1, heads_per_group=2)
BLOCKS = 10  # key blocks of each of its tiles

LISTED = TileList.balanced(SMALL_ORDER, 4, np.ones(6))
NONE = np.zeros(6, int)
IN_PARTS = SplitTiles.cut(SMALL_ORDER, 4, KeyRanges(NONE, np.full(6, BLOCKS), 1.5, 1.4, 0.6, NONE))


def check(schedule) -> None:
    count = schedule.order.num_tiles
    check_schedule(schedule, np.zeros(count, int), np.full(count, BLOCKS))


def table_of(schedule, change):
    """Return the schedule with a table that `change` makes of its own, or changes in place."""
    table = schedule.table.copy()
    changed = change(table)
    return replace(schedule, table=table if changed is None else changed)


def parts_of(change) -> SplitTiles:
    """Return the schedule in parts after `change(units, places)`.
    `places` are the places of every tile's parts among the units, in the order of their keys."""

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
        SingleTile(SMALL_ORDER),
        StaticPersistent(SMALL_ORDER, 4),
        # More clusters than tiles, or than a GPU holds, are of no use and do no harm.
        StaticPersistent(SMALL_ORDER, 1000),
        Dynamic(SMALL_ORDER, 1000),
        TileList.balanced(SMALL_ORDER, 1000, np.ones(6)),
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
        return kind(SMALL_ORDER, num_clusters)
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
    units[[*first, *second], 3] = units[[*second, *first], 3]


def same_slots(units, places):
    """Let two tiles share their slots."""
    units[places[1], 3] = units[places[0], 3]


def whole_in_a_slot(units, places):
    units[np.flatnonzero(units[:, 3] == 1)[0], 3] += MOST_PARTS**2


def no_blocks(units, places):
    units[places[0][0], 2] = units[places[0][0], 1]


BEGIN, STOP, NUMBERS = 1, 2, 3
"""Columns of units."""

CLUSTERS = [
    (0, ValueError, "must have num_clusters from 1 .* got 0$"),
    (-4, ValueError, "must have num_clusters from 1 .* got -4$"),
    (1 << 40, ValueError, r"must have num_clusters .* to \d{10} .* got 1099511627776"),
    (4.0, TypeError, "num_clusters must be of type int, got 4.0"),
    (np.int64(4), TypeError, "num_clusters must be of type int"),
]
OTHERS = [
    (lambda: StaticPersistent(replace(SMALL_ORDER, heads_per_group=2.0), 4), TypeError,
     "order.heads_per_group must be of type int, got 2.0"),
    (lambda: replace(Dynamic(SMALL_ORDER, 4), counters=torch.zeros(2).int()), ValueError,
     "must have no counters and no mailbox"),
    (lambda: replace(Dynamic(SMALL_ORDER, 4), mailbox=Endless()), ValueError,
     "must have no counters and no mailbox"),
    (lambda: SimpleNamespace(order=SMALL_ORDER, num_clusters=4), TypeError,
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
    with pytest.raises(error, match=f"^schedule[ .]{complaint}"):
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
