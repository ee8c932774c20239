"""Plans: legal for the kernel, covering the problem, within the GPU; and the cost model.

The model is sane, cheap, true to the schedules' own walks, and fitted to what it is given.
"""

import heapq
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CAUSAL, make_operands, make_problem, problems, windows
from reference import visible
from score_problems import RelativeBias

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H100, H200, Gpu, Rule, TileCosts, TileKey, shipped_costs
from fa3.planning.explanation import Candidate
from fa3.planning.planner import (
    LEAST_MARGIN,
    candidates,
    check_plan,
    choose_candidate,
    plan_dense,
    plan_forward,
)
from fa3.planning.prediction import Load, loads_of_whole_tiles, times_of
from fa3.planning.tilings import TILINGS, TiledProblem, alternatives, choose_config, configs
from fa3.primitives.shared_memory import CAPACITY
from fa3.problem import FP8, Window, visible_pairs
from fa3.schedules import SCHEDULES, SingleTile, StaticPersistent, TileList, walk
from fa3.schedules.split import LEAVE_US, MERGE_US, balance
from fa3.scores.scores import Alibi
from fa3.scores.templates import Template

SCHEDULE_TYPES = (None, SingleTile, StaticPersistent, TileList)
HEAD_DIMS = range(8, 257, 8)
TILES = ForwardConfig(128, 64)
CLUSTER_OF_2 = ForwardConfig(128, 64, cluster_m=2)


MANY = problems(longest=2000, most=5)


@given(MANY, st.sampled_from(SCHEDULE_TYPES))
def test_no_cluster_is_launched_for_nothing(problem, schedule_type):
    plan = plan_forward(problem, schedule=schedule_type)
    assert all(any(walk(plan.schedule, cluster)) for cluster in range(plan.schedule.num_clusters))


@given(MANY, st.integers(1, 132))
def test_persistent_ctas_all_fit_on_the_gpu(problem, num_sms):
    plan = plan_forward(problem, replace(H200, num_sms=num_sms))
    assert plan.schedule.num_clusters * plan.config.cluster <= num_sms


@pytest.mark.parametrize("seqlen_q", [0, 128, 2048, 1 << 16])
@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(64, 64), Window(left=64)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_there_is_a_legal_config_for_every_spec(seqlen_q, window, dtype):
    table = {
        replace(tiling.config, cluster_m=cluster_m, fixed_row_max=fixed)
        for tiling in TILINGS
        for cluster_m in (1, tiling.config.cluster_m)
        for fixed in (False, True)
    }
    for head_dim, head_dim_v in product(HEAD_DIMS, HEAD_DIMS):
        problem = make_problem(
            1, seqlen_q, 256, 1, 1, head_dim, window, dtype, head_dim_v=head_dim_v
        )
        config = choose_config(problem, H200)
        config.validate(problem.spec)
        assert config in table
        assert config.smem_bytes(problem.spec) <= CAPACITY


def test_clusters_count_as_one_each():
    problem = make_problem(batch=4, seqlen_q=4096, num_heads_kv=16)
    plan = plan_forward(problem, config=CLUSTER_OF_2)
    assert plan.schedule.num_clusters == 66
    single = plan_forward(problem, config=CLUSTER_OF_2, schedule=SingleTile)
    assert single.schedule.num_clusters == 4 * 16 * 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_has_a_plan(schedule, head_dim):
    """Also one for CTAs alone where all that was measured for the problem are pairs."""
    problem = make_problem(1, 700, 900, 2, head_dim=head_dim)
    assert plan_forward(problem, H200, schedule=schedule).schedule.name == schedule


def test_keys_and_values_of_a_group_fit_in_the_budget():
    problem = make_problem(batch=4, seqlen_k=8192, num_heads_kv=8, qhead_per_kvhead=4, head_dim=128)
    plan = plan_forward(problem)
    heads = plan.schedule.order.heads_per_group * plan.config.cluster_h
    bytes_per_key_head = 2 * 8192 * (128 + 128)
    assert heads % 4 == 0
    assert heads // 4 * bytes_per_key_head <= H200.l2_bytes
    assert (heads // 4 + 1) * bytes_per_key_head > H200.l2_bytes


def test_one_head_too_long_for_the_budget_is_a_group():
    problem = make_problem(batch=2, seqlen_k=1 << 20, num_heads_kv=4, qhead_per_kvhead=2)
    plan = plan_forward(problem)
    assert plan.schedule.order.heads_per_group * plan.config.cluster_h == 2


@pytest.mark.parametrize(("seqlen", "rows"), [(512, {0, 1, 2, 3}), (1024, {5, 6, 7})])
def test_short_heads_are_read_in_small_groups(seqlen, rows):
    problem = make_problem(64, seqlen, seqlen, 16, head_dim=128, window=Window(right=0))
    schedule = plan_forward(problem, schedule=None if seqlen == 512 else TileList).schedule
    first = schedule.table[: schedule.num_clusters].tolist()
    assert {schedule.order.tile(number).m_block for number in first} == rows


def test_o_is_staged_where_it_has_room():
    config = replace(TILES, own_o=False)
    problem = make_problem(head_dim=64, head_dim_v=128)
    assert not plan_forward(problem, config=config).config.own_o
    with pytest.raises(ValueError, match="tile_n to be 64 or more, got 48"):
        plan_forward(problem, config=replace(config, tile_n=48))
    with pytest.raises(ValueError, match="in Q's place with an FP8 cache"):
        replace(config, converted_stages=2).validate(problem.spec, has_fp8_cache=True)


def test_a_schedule_for_ctas_alone_is_refused_in_pairs():
    config = ForwardConfig(128, 128, q_stages=2, cluster_m=2)
    complaint = r"^schedule 'dynamic' must have clusters of 1 CTA, got clusters of 2$"
    with pytest.raises(ValueError, match=complaint):
        plan_forward(make_problem(), config=config, schedule="dynamic")
    alone = plan_forward(make_problem(), schedule="dynamic")
    with pytest.raises(ValueError, match=complaint):
        check_plan(replace(alone, config=config))


def test_plans_are_values():
    assert plan_forward(make_problem()) == plan_forward(make_problem())
    assert hash(plan_forward(make_problem())) == hash(plan_forward(make_problem()))
    table = plan_forward(make_problem()).schedule
    assert table != replace(table, table=table.table[::-1].copy())
    assert table != StaticPersistent(table.order, table.num_clusters)


FEW = make_problem(1, 2048, 2048, 1, 8, 128, Window(right=0))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_was_made_before_is_kept(name):
    made = plan_forward(FEW, schedule=name)
    plan = plan_forward(FEW, schedule=made.schedule)
    assert plan.schedule is made.schedule
    assert plan.config == made.config


def test_parts_under_a_bias_follow_their_scores():
    """Far from the diagonal their sums vanish, which a fixed reference takes for failing."""
    alibi = Template.of(Alibi(torch.ones(32), is_causal=True))
    problem = make_problem(1, 640, 8192, 8, 4, 128, CAUSAL)
    problem = replace(problem, spec=replace(problem.spec, scores=(alibi,)))
    plan = plan_forward(problem)
    assert plan.schedule.name == "split" and not plan.config.fixed_row_max
    assert plan_forward(problem, schedule="list").config.fixed_row_max


def test_parts_are_taken_at_sizes_that_were_not_measured_where_they_gain_much():
    problem = make_problem(1, 128, 8192, 16, 1, 192, CAUSAL, head_dim_v=128)
    assert plan_forward(problem).schedule.name == "split"


def test_calls_in_fp8_have_the_schedules_that_were_measured():
    for batch, head_dim, expected in ((2, 128, "dynamic"), (6, 256, "dynamic"), (2, 256, "split")):
        problem = make_problem(batch, 8192, 8192, 8, 1, head_dim, dtype=FP8)
        problem = replace(problem, spec=replace(problem.spec, other_out="bfloat16"))
        assert plan_forward(problem).schedule.name == expected
    in_pairs = replace(choose_config(problem, H200), cluster_m=2)
    assert plan_forward(problem, config=in_pairs).schedule.name == "list"


def test_parts_are_taken_where_whole_tiles_leave_sms_idle():
    problem = make_problem(2, 1536, 1536, 1, 6, 128, CAUSAL)
    plan, whole = plan_forward(problem), plan_forward(problem, schedule="list")
    assert plan.schedule.name == "split"
    assert plan.predict().mean_us < 0.95 * whole.predict().mean_us


def test_a_list_is_laid_out_before_its_tiles_are_split():
    plan = plan_forward(make_problem(1, 3000, 3000, 24, 1, 128, CAUSAL), "H100")
    parts = [one for one in plan.considered if one.schedule == "split"]
    assert plan.schedule.name == "list"
    assert plan.predict().mean_us < 0.99 * min(one.prediction.mean_us for one in parts)


def test_a_callers_order_is_called_so():
    plan = plan_forward(FEW, schedule=lambda tiles: tiles[::-1])
    assert "in the caller's order" in str(plan.explain())
    assert "last query rows first" in str(plan_forward(FEW, schedule="list").explain())


LENGTH = st.integers(0, 70)


@given(LENGTH, LENGTH, windows(largest=90))
def test_visible_pairs_counts_what_the_mask_lets_through(seqlen_q, seqlen_k, window):
    sizes = seqlen_q, seqlen_k, window
    assert visible_pairs(*sizes) == int(visible(*sizes).sum())


@given(LENGTH, LENGTH, windows(largest=90))
def test_a_tightened_window_hides_the_same_keys(seqlen_q, seqlen_k, window):
    tight = window.tighten(seqlen_q, seqlen_k)
    assert (visible(seqlen_q, seqlen_k, tight) == visible(seqlen_q, seqlen_k, window)).all()
    assert tight.tighten(seqlen_q, seqlen_k) == tight
    assert tight.left < max(seqlen_k - 1, 0) and tight.right < max(seqlen_q - 1, 1)
    assert (tight.right == 0) == (window.right == 0)


def test_every_query_head_costs_but_key_heads_are_read_once():
    mha = make_problem(seqlen_q=256, seqlen_k=512, num_heads_kv=8)
    gqa = make_problem(seqlen_q=256, seqlen_k=512, num_heads_kv=2, qhead_per_kvhead=4)
    assert gqa.num_heads_q == mha.num_heads_q
    assert gqa.flops == mha.flops
    key_and_value_bytes = 2 * 512 * (64 + 64)
    assert mha.bytes - gqa.bytes == 6 * key_and_value_bytes


# ---------------------------------------------------------------------------------- Problem.of


def of_shapes(problem: fa3.Problem, **options) -> fa3.Problem:
    """The same problem, from the shapes of its tensors."""
    return fa3.Problem.of(*(tuple(x.shape) for x in make_operands(problem)), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, Window()),
        ({"causal": True}, Window(right=0)),
        ({"window_size": (10, 3)}, Window(10, 3)),
        ({"window_size": [10, 3], "causal": True}, Window(10, 0)),
        ({"window_size": (1000, 1000)}, Window()),
    ],
)
def test_a_problem_of_tensors_and_of_shapes(dtype, options, window):
    given = {"batch": 2, "seqlen_q": 70, "seqlen_k": 90, "num_heads_kv": 2, "qhead_per_kvhead": 2}
    expected = make_problem(**given, head_dim=64, head_dim_v=96, dtype=dtype, window=window)
    assert fa3.Problem.of(*make_operands(expected), **options) == expected
    assert of_shapes(expected, dtype=dtype, **options) == expected


def test_scores_sinks_and_dropout_are_those_of_the_call():
    """A plan that was made for the problem is taken by the call."""
    plain = make_problem(1, 70, 90, 2, 2, 64)
    q, k, v = make_operands(plain)
    options = {
        "causal": True, "softcap": 20.0, "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4),
    }  # fmt: skip
    problem = fa3.Problem.of(q, k, v, **options)
    assert problem == of_shapes(plain, **options) != fa3.Problem.of(q, k, v, causal=True)
    out = fa3.flash_attn_func(q, k, v, plan=fa3.plan_forward(problem), **options)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, pack_gqa=False, **options))
    with pytest.raises(ValueError, match="plan was made for"):
        fa3.flash_attn_func(q, k, v, causal=True, plan=fa3.plan_forward(problem))
    assert fa3.Problem.of(q, k, v, dropout_p=0.1).spec.has_dropout


def test_gpus_have_names():
    problem = fa3.Problem.of(*[(1, 70, 4, 64)] * 3)
    for plan in (fa3.plan_forward, plan_dense):
        assert plan(problem, gpu="H100") == plan(problem, H100)
        assert plan(problem, gpu="H100").gpu is H100


# ----------------------------------------------------------------------------------- the cost model

PAIR_TILES = ForwardConfig(128, 128, q_stages=2)

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
    plan = plan_forward(problem, config=PAIR_TILES, schedule="split")
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
    scale = sum(times) / sum(span.us for span in spans)
    for span in spans:
        key = order.index(span.segment.tile), span.segment.begin
        assert span.us * scale == pytest.approx(by_segment[key])


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
    tiled = TiledProblem(problem, gpu, PAIR_TILES)
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
    config = replace(PAIR_TILES, cluster_m=cluster_m)
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
    return Candidate(PAIR_TILES, schedule, prediction, True)


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
    assert plan_forward(problem, config=PAIR_TILES).config is PAIR_TILES
    plan = plan_forward(problem, schedule="static")
    assert type(plan.schedule) is StaticPersistent
    found = candidates(problem, H200, [PAIR_TILES], SCHEDULES)
    assert {one.schedule for one in found} == set(SCHEDULES)
    assert {one.config for one in found} == {PAIR_TILES}


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
