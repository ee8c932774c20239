"""The cost model: sane, cheap, true to the schedules' own walks, and fitted to what it is given."""

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CAUSAL, make_problem
from score_problems import RelativeBias

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H100, H200, Gpu, Rule, TileCosts, TileKey, shipped_costs
from fa3.planning.explanation import Candidate
from fa3.planning.planner import LEAST_MARGIN, candidates, choose_candidate, plan_forward
from fa3.planning.prediction import Load, loads_of_whole_tiles, times_of
from fa3.planning.tilings import TiledProblem, alternatives, choose_config, configs
from fa3.problem import Window
from fa3.schedules import SCHEDULES, SingleTile, StaticPersistent, TileList
from fa3.schedules.split import LEAVE_US, MERGE_US, balance
from fa3.scores.templates import Template

TILES = ForwardConfig(128, 128, q_stages=2)

GRID = [
    (batch, 16384 // batch, heads, head_dim)
    for batch in (1, 2, 4, 8, 16, 32)
    for heads, head_dim in ((32, 64), (16, 128), (8, 256))
]
"""The benchmarks' grid: 16k tokens, 2048 columns."""


def grid_problem(batch, seqlen, heads, head_dim, window=CAUSAL):
    return make_problem(batch, seqlen, seqlen, heads, head_dim=head_dim, window=window)


def greedy(times, lanes: int) -> float:
    """When the last lane is done, each unit going to the lane that is free first."""
    free_at = [0.0] * lanes
    for us in times:
        heapq.heapreplace(free_at, free_at[0] + us)
    return max(free_at)


TILE = TileCosts(1.5, 1.8, 1.1, 1.1, 2.0)


# --------------------------------------------------------------------------------- parameters


def test_shipped_parameters_say_where_they_come_from():
    costs = shipped_costs("NVIDIA H200")
    assert costs.measured
    assert costs.source["held_out_error"]["median"] < 0.05
    assert costs.source["results"]


def test_an_h100_is_derived_and_says_so():
    measured, derived = shipped_costs("NVIDIA H200"), shipped_costs("NVIDIA H100 80GB HBM3")
    assert not derived.measured
    assert derived.bytes_per_us < measured.bytes_per_us
    assert derived.tiles == measured.tiles
    problem = grid_problem(4, 4096, 16, 128)
    assert plan_forward(problem, H100).predict().us > plan_forward(problem, H200).predict().us
    assert "Not measured on an NVIDIA H100" in str(plan_forward(problem, H100).explain())
    assert not shipped_costs("some other GPU").measured


def test_a_tile_that_was_not_measured_follows_the_rule():
    rule = Rule(tensor=1e-3, exponential=0, masked=2, tile_us=3, steady=1, part_us=5)
    # 128 x 128 scores take 2 * 256 FLOP each, of 4096 in a clock.
    tile = rule.tile(TileKey(128, 128, True, 128, 128, 1))
    assert tile == TileCosts(2.048, 4.096, 3, 1, 5)
    assert tile.us(10, 1) == pytest.approx(3 + 20.48 + 4.096)
    assert not tile.is_known
    assert rule.tile(TileKey(64, 64, True, 192, 128, 1)).part_us == 5 * 1.5 / 4


def test_the_part_that_merges_costs_more_than_one_that_leaves():
    merging, leaving = TILE.part_us_if(True), TILE.part_us_if(False)
    assert merging / leaving == pytest.approx(MERGE_US / LEAVE_US)
    assert merging + leaving == pytest.approx(2 * TILE.part_us)
    problem = make_problem(1, 4096, 4096, 1, 4, head_dim=128, window=CAUSAL)
    plan = plan_forward(problem, config=TILES, schedule="split")
    segments = plan.schedule.segments(plan.tiled.blocks_of_tiles())
    order, tiles = plan.schedule.order, segments.tile
    in_parts = np.unique(tiles[segments.partial])
    assert len(in_parts) > 0
    # Each tile has one that merges, and a simulation gives each segment the same time.
    assert sorted(tiles[segments.merging]) == sorted(in_parts)
    times = times_of(segments, plan.tiled.costs)
    first_blocks = plan.schedule.entries[:, 1]
    by_segment = dict(zip(zip(tiles, first_blocks, strict=True), times, strict=True))
    spans = plan.simulate().spans
    scale = sum(times) / sum(span.cost.us for span in spans)
    for span in spans:
        key = order.index(span.segment.tile), span.segment.begin
        assert span.cost.us * scale == pytest.approx(by_segment[key])


# ----------------------------------------------------------------------------- segments and time


@given(
    st.integers(1, 3),
    st.integers(0, 9000),
    st.sampled_from([1, 2, 7, 32]),
    st.sampled_from([Window(), CAUSAL, Window(300, 20), Window(left=100)]),
    st.sampled_from([1, 5, 132]),
)
@settings(max_examples=60, deadline=None)
def test_loads_of_whole_tiles_are_those_of_schedules(batch, seqlen, heads, window, lanes):
    """What the planner compares by, without making schedules."""
    problem = make_problem(batch, seqlen, 5000, heads, head_dim=128, window=window)
    gpu = Gpu(H200.name, lanes, H200.l2_bytes)
    tiled = TiledProblem(problem, gpu, TILES)
    first_free, listed = loads_of_whole_tiles(tiled)
    segments = SingleTile(tiled.order).segments(tiled.blocks_of_tiles())
    of_all = Load.of(segments, tiled.costs, tiled.lanes)
    assert tuple(first_free) == pytest.approx(tuple(of_all))
    # Tiles before the last rounds count by their mean; lanes are apart by a tile at most.
    assert first_free.last <= greedy(tiled.times, lanes) + first_free.longest + 1e-6
    assert listed._replace(last=first_free.last) == first_free
    assert listed.total / lanes - 1e-6 <= listed.last <= first_free.last + 1e-6


def test_a_million_sequences_are_planned_without_a_look_at_each(monkeypatch):
    monkeypatch.delattr(TiledProblem, "blocks_of_tiles")
    plan = plan_forward(make_problem(1 << 20, 1, 1, 16, head_dim=64))
    assert plan.schedule.name == "dynamic" and plan.tiled.order.num_tiles == 1 << 24


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster_m", [1, 2])
def test_predictions_agree_with_the_simulation(schedule, cluster_m):
    if cluster_m > 1 and not SCHEDULES[schedule].takes_pairs:
        pytest.skip("takes tiles CTA by CTA")
    problem = grid_problem(2, 3000, 5, 128)
    config = replace(TILES, cluster_m=cluster_m)
    plan = plan_forward(problem, config=config, schedule=schedule)
    balance, busy = plan.simulate().balance, plan.predict().busy
    lanes_used = plan.simulate().num_lanes * cluster_m / H200.num_sms
    assert busy == pytest.approx(balance * lanes_used, rel=0.03)


def test_what_bounds_a_plan_is_named():
    usual = plan_forward(grid_problem(4, 4096, 16, 128)).predict()
    assert usual.bound == "compute"
    assert usual._replace(memory_us=1e4).bound == "device memory"
    assert usual._replace(busy=0.8).bound == "an uneven last wave"
    few = make_problem(1, 2048, 2048, 1, 8, head_dim=128, window=CAUSAL)
    assert plan_forward(few, schedule="list").predict().bound == "its longest tile"
    one = make_problem(1, 128, 1024, 1, head_dim=128)
    assert plan_forward(one, schedule="list").predict().bound == "too few tiles"


def test_nothing_to_do_takes_a_launch():
    prediction = plan_forward(make_problem(batch=0)).predict()
    assert prediction.us == prediction.launch_us
    assert "us" in str(plan_forward(make_problem(batch=0)).explain())


# --------------------------------------------------------------------------------- choosing


def candidate(us: float, schedule: str) -> Candidate:
    prediction = plan_forward(make_problem()).predict()._replace(us=us, burst_us=us)
    return Candidate(TILES, schedule, prediction, True)


def test_the_table_s_choice_gives_way_to_clear_gains_only():
    table, near, far = (
        candidate(100, "list"),
        candidate(100 / (1 + LEAST_MARGIN) + 0.1, "static"),
        candidate(100 / (1 + LEAST_MARGIN) - 0.1, "single"),
    )
    assert choose_candidate([table, near]) is table
    assert choose_candidate([table, near, far]) is far
    assert choose_candidate([table, candidate(150, "static")]) is table
    assert choose_candidate([table, far._replace(measured=False)]) is table
    assert choose_candidate([candidate(5, "list"), candidate(4.6, "static")]).schedule == "list"


@pytest.mark.parametrize("window", [Window(), CAUSAL])
@pytest.mark.parametrize("shape", GRID)
def test_candidates_begin_with_the_table_s_choice(shape, window):
    problem = grid_problem(*shape, window)
    found = candidates(problem, H200, configs(problem, H200), SCHEDULES)
    assert found[0].config == choose_config(problem, H200)
    assert found[0].schedule == "list"
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert (
            one.config == found[0].config or TiledProblem(problem, H200, one.config).costs.is_known
        )
    plan = plan_forward(problem)
    assert plan.name in {one.name for one in found}
    assert plan.predict().us <= found[0].prediction.us * 1.01


def test_alternatives_end_with_a_row_for_all_lengths():
    for shape in GRID:
        found = alternatives(grid_problem(*shape).spec)
        assert [row.max_seqlen_q == math.inf for row in found] == [False] * (len(found) - 1) + [
            True
        ]


def test_what_is_given_is_kept_when_the_rest_is_chosen():
    problem = grid_problem(4, 4096, 16, 128)
    assert plan_forward(problem, config=TILES).config is TILES
    plan = plan_forward(problem, schedule="static")
    assert type(plan.schedule) is StaticPersistent
    found = candidates(problem, H200, [TILES], SCHEDULES)
    assert {one.schedule for one in found} == set(SCHEDULES)
    assert {one.config for one in found} == {TILES}


def test_a_schedule_that_does_not_fit_the_problem_is_refused():
    """With a score of the user's there are no registers to merge parts."""
    problem = make_problem(1, 2048, 2048, 1, 8, head_dim=128, window=CAUSAL)
    score = Template.of(RelativeBias(torch.zeros(8, 33), reach=16))
    problem = replace(problem, spec=replace(problem.spec, scores=(score,)))
    with pytest.raises(ValueError, match="schedule 'split' cannot run"):
        plan_forward(problem, schedule="split")
    assert plan_forward(problem, schedule="dynamic").schedule.name == "dynamic"


# --------------------------------------------------------------------------------- planning time


@pytest.mark.parametrize("shape", GRID)
def test_a_balanced_list_ends_like_the_hand_out(shape):
    problem = grid_problem(*shape)
    chosen = choose_config(problem, H200)
    for config in {chosen, replace(chosen, cluster_m=2)}:
        tiled = TiledProblem(problem, H200, config)
        order, clusters = tiled.order, min(tiled.lanes, tiled.order.num_tiles)
        times = tiled.times
        owners = balance(times, clusters)
        assert np.bincount(owners, times).max() <= 1.005 * greedy(times, clusters)
        assert len(owners) == order.num_tiles
        schedule = TileList.balanced(order, clusters, times)
        assert (schedule.owners == owners).all()
