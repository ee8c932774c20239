"""Every tile exactly once, in an order that keeps clusters equally busy."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from fa3.planning.planner import plan_forward
from fa3.problem import Window
from fa3.schedules import SingleTile, StaticPersistent, Tile, TileList, TileOrder, walk
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


def all_tiles(order: TileOrder) -> set[Tile]:
    ranges = (range(n) for n in (order.num_m_blocks, order.num_heads, order.batch))
    return {Tile(*coordinates) for coordinates in product(*ranges)}


def shares(schedule) -> list[list[Tile]]:
    return [
        [segment.tile for segment in walk(schedule, cluster)]
        for cluster in range(schedule.num_clusters)
    ]


@given(schedules())
def test_every_tile_is_worked_on_once(schedule):
    visits = Counter(tile for share in shares(schedule) for tile in share)
    assert visits == Counter(all_tiles(schedule.order))


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


@given(orders())
def test_heads_come_in_sections_and_rows_run_one_way_in_each(order):
    tiles = [order.tile(index) for index in range(order.num_tiles)]
    flat_head = [tile.batch * order.num_heads + tile.head for tile in tiles]
    section = [head // order.heads_per_section for head in flat_head]
    assert section == sorted(section)
    for number in set(section):
        rows = [t.m_block for t, of in zip(tiles, section, strict=True) if of == number]
        down = sorted(rows, reverse=True)
        assert rows == down or (rows == down[::-1] and number != section[-1])


def test_neighbours_in_a_section_are_the_same_rows_of_different_heads():
    order = TileOrder(num_m_blocks=2, num_heads=2, batch=2, heads_per_section=4)
    assert [tuple(order.tile(index)) for index in range(order.num_tiles)] == [
        *((1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)),
        *((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)),
    ]


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


def key_blocks_per_cluster(plan) -> list[int]:
    """Count the key blocks that each cluster walks."""
    problem, config = plan.problem, plan.config
    sequence = Sequence(problem.seqlen_q, problem.seqlen_k, problem.window)
    rows = config.tile_m * config.cluster_m

    def cost(tile: Tile) -> int:
        blocks = problem.spec.mask.key_blocks(tile.m_block * rows, rows, config.tile_n, sequence)
        return blocks.end - blocks.begin

    return [sum(cost(tile) for tile in share) for share in shares(plan.schedule)]


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "head_dim"),
    [(4, 4096, 16, 128), (2, 8192, 16, 128), (1, 16384, 16, 128), (4, 4096, 32, 64)],
)
def test_causal_work_is_balanced(batch, seqlen, heads, head_dim):
    problem = make_problem(batch, seqlen, seqlen, heads, head_dim=head_dim, window=Window(right=0))
    work = key_blocks_per_cluster(plan_forward(problem))
    mean = sum(work) / len(work)
    assert max(work) <= 1.06 * mean


# ---------------------------------------------------------------------------- an order of one's own


def test_index_is_the_inverse_of_tile():
    order = TileOrder(num_m_blocks=5, num_heads=3, batch=3, heads_per_section=4)
    assert [order.index(order.tile(i)) for i in range(order.num_tiles)] == list(range(45))
    assert order.m_blocks().tolist() == [order.tile(i).m_block for i in range(45)]


ORDER = TileOrder(num_m_blocks=4, num_heads=2, batch=2, heads_per_section=3)
TILES = [ORDER.tile(index) for index in range(ORDER.num_tiles)]


@given(st.permutations(TILES), st.integers(1, 20))
def test_any_order_is_dealt_as_it_comes(tiles, num_clusters):
    schedule = TileList.in_order_of(ORDER, num_clusters, tiles, np.ones(len(TILES)))
    walks = [
        [segment.tile for segment in walk(schedule, cluster)] for cluster in range(num_clusters)
    ]
    assert sorted(tile for column in walks for tile in column) == sorted(tiles)
    # Tiles of equal length go round the clusters.
    for cluster, column in enumerate(walks):
        assert column == tiles[cluster::num_clusters]


@pytest.mark.parametrize(
    ("tiles", "error", "complaint"),
    [
        (TILES[1:], ValueError, r"leaves out Tile\(m_block=3, head=0, batch=0\)"),
        ([*TILES, TILES[5]], ValueError, r"gives Tile\(.*\) twice, at 5 and 16"),
        ([*TILES[:-1], Tile(4, 0, 0)], ValueError, r"gives Tile\(m_block=4, .*\) at 15"),
        ([*TILES[:-1], Tile(0, -1, 0)], ValueError, r"gives Tile\(.* head=-1, .*\) at 15"),
        ([Tile(0, 0.5, 0)], TypeError, r"gives Tile\(m_block=0, head=0.5, batch=0\) at 0, not a"),
        ([Tile(0, 0, 0), 7], TypeError, "gives 7 at 1, not a Tile"),
        (["abc"], TypeError, "gives 'abc' at 0, not a Tile"),
        ([(0, 0)], TypeError, r"gives \(0, 0\) at 0, not a Tile"),
    ],
)
def test_an_order_that_is_not_one_is_refused(tiles, error, complaint):
    with pytest.raises(error, match=f"^schedule {complaint}"):
        TileList.in_order_of(ORDER, 3, tiles, np.ones(len(TILES)))
