"""Tiles in parts: every key block of every tile once, and clusters that end together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_operands, make_problem, windows
from reference import check_attention

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.problem import Window
from fa3.schedules import KeyRanges, Segment, SplitTiles, TileOrder, walk
from fa3.schedules.coverage import check_schedule
from fa3.schedules.split import TimedSegments
from fa3.scores.masks import Sequence

OVERHEADS = TILE, MERGE, LEAVE = 1.5, 1.4, 0.6


def time_of(segment: Segment, ranges: KeyRanges) -> float:
    """A segment's time in key blocks, without masks; tiles begin at block 0, and the first part
    merges."""
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


@given(
    st.integers(1, 5),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 8),
    windows(),
)
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
    leaves, merges = np.array([0, 1, 1, 0], bool), np.array([1, 0, 0, 0], bool)
    timed = TimedSegments(tile, owner, np.array([4.0, 3.0, 2.5, 1.0]), leaves, merges)
    assert timed.end(np.zeros(3), 1.0) == 4
    assert timed.end(np.array([0.0, 3.0, 0.0]), 1.0) == 7
    assert timed.end(np.array([0.0, 0.0, 3.5]), 1.0) == 7
    assert timed.end(np.array([0.0, 0.0, 6.5]), 1.0) == 10


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
