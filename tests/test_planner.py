"""Plans: legal for the kernel, covering the problem, and within the GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import head_dims, make_operands, make_problem, windows
from reference import visible

import fa3
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import H100, H200
from fa3.planning.planner import check_plan, plan_dense, plan_forward
from fa3.planning.tilings import TILINGS, choose_config
from fa3.primitives.shared_memory import CAPACITY
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import SCHEDULES, Dynamic, SingleTile, StaticPersistent, TileList, walk
from fa3.scores.masks import Band
from fa3.scores.scores import Alibi
from fa3.scores.templates import Template

SCHEDULE_TYPES = (None, SingleTile, StaticPersistent, TileList)
HEAD_DIMS = range(8, 257, 8)
TILES = ForwardConfig(128, 64)
CLUSTER_OF_2 = ForwardConfig(128, 64, cluster_m=2)


@st.composite
def problems(draw):
    return make_problem(
        batch=draw(st.integers(0, 5)),
        seqlen_q=draw(st.integers(0, 2000)),
        seqlen_k=draw(st.integers(0, 2000)),
        num_heads_kv=draw(st.integers(0, 5)),
        qhead_per_kvhead=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(head_dims()),
        window=draw(windows(largest=2000)),
        head_dim_v=draw(st.none() | head_dims()),
    )


@given(problems(), st.sampled_from(SCHEDULE_TYPES))
def test_no_cluster_is_launched_for_nothing(problem, schedule_type):
    plan = plan_forward(problem, schedule=schedule_type)
    assert all(any(walk(plan.schedule, cluster)) for cluster in range(plan.schedule.num_clusters))


@given(problems(), st.integers(1, 132))
def test_persistent_ctas_all_fit_on_the_gpu(problem, num_sms):
    assert plan_forward(problem, replace(H200, num_sms=num_sms)).grid <= num_sms


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


def test_clusters_count_as_one_each_and_ctas_in_the_grid():
    problem = make_problem(batch=4, seqlen_q=4096, num_heads_kv=16)
    plan = plan_forward(problem, config=CLUSTER_OF_2)
    assert (plan.schedule.num_clusters, plan.grid) == (66, 132)
    single = plan_forward(problem, config=CLUSTER_OF_2, schedule=SingleTile)
    assert (single.schedule.num_clusters, single.grid) == (4 * 16 * 16, 4 * 16 * 32)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_has_a_plan(schedule, head_dim):
    """Also one for CTAs alone where all that was measured for the problem are pairs."""
    spec = AttentionSpec("bfloat16", head_dim, head_dim, Band())
    problem = Problem(spec, 1, 700, 900, 2, 1, Window())
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


def test_o_can_only_take_qs_place_if_it_has_its_size():
    problem = make_problem(head_dim=64, head_dim_v=128)
    with pytest.raises(ValueError, match="own_o"):
        plan_forward(problem, config=replace(TILES, own_o=False))
    assert plan_forward(problem, config=TILES).config.own_o
    same_padded = make_problem(head_dim=72, head_dim_v=96)
    assert not plan_forward(same_padded, config=replace(TILES, own_o=False)).config.own_o


def test_a_schedule_for_ctas_alone_is_refused_in_pairs():
    config = ForwardConfig(128, 128, q_stages=2, cluster_m=2)
    complaint = r"^schedule 'dynamic' must have a config with clusters of 1 CTA, got clusters of 2$"
    with pytest.raises(ValueError, match=complaint):
        plan_forward(make_problem(), config=config, schedule="dynamic")
    with pytest.raises(ValueError, match=r"^Dynamic must have clusters of 1 CTA, got "):
        Forward(make_problem().spec, config, Dynamic)
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
    spec = AttentionSpec("bfloat16", 128, 128, Band(right=True), (alibi,))
    problem = Problem(spec, 1, 640, 8192, 8, 4, Window(right=0))
    plan = plan_forward(problem)
    assert plan.schedule.name == "split" and not plan.config.fixed_row_max
    assert plan_forward(problem, schedule="list").config.fixed_row_max


def test_parts_are_taken_at_sizes_that_were_not_measured_where_they_gain_much():
    spec = AttentionSpec("bfloat16", 192, 128, Band(right=True))
    problem = Problem(spec, 1, 128, 8192, 16, 1, Window(right=0))
    assert plan_forward(problem).schedule.name == "split"


def test_parts_are_taken_where_whole_tiles_leave_sms_idle():
    spec = AttentionSpec("bfloat16", 128, 128, Band(right=True))
    problem = Problem(spec, 2, 1536, 1536, 1, 6, Window(right=0))
    plan, whole = plan_forward(problem), plan_forward(problem, schedule="list")
    assert plan.schedule.name == "split"
    assert plan.predict().mean_us < 0.95 * whole.predict().mean_us


def test_a_callers_order_is_called_so():
    plan = plan_forward(FEW, schedule=lambda tiles: tiles[::-1])
    assert "in the caller's order" in str(plan.explain())
    assert "last query rows first" in str(plan_forward(FEW, schedule="list").explain())


LENGTH = st.integers(0, 70)


@given(LENGTH, LENGTH, windows(largest=90))
def test_visible_pairs_counts_what_the_mask_lets_through(seqlen_q, seqlen_k, window):
    problem = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=window)
    assert problem.visible_pairs == int(visible(seqlen_q, seqlen_k, window).sum())


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
