"""The plan, walked on the CPU, against dense attention in float64."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import head_dims, make_operands, make_problem, run_plan, windows
from reference import check_attention

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import Gpu
from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.reference.forward import steps
from fa3.schedules import SingleTile, StaticPersistent, TileList
from fa3.scores.masks import Intersection
from fa3.scores.templates import Template

SCHEDULE_TYPES = (SingleTile, StaticPersistent, TileList)
SMALL_TILES = ForwardConfig(128, 32)
CONFIGS = (None, SMALL_TILES, ForwardConfig(192, 48), ForwardConfig(128, 16, cluster_m=2))
SMALL_GPU = Gpu("small", num_sms=6, l2_bytes=1 << 17)


@st.composite
def problems(draw, dtypes=("bfloat16", "float16")):
    return make_problem(
        batch=draw(st.integers(0, 2)),
        seqlen_q=draw(st.integers(0, 300)),
        seqlen_k=draw(st.integers(0, 300)),
        num_heads_kv=draw(st.integers(1, 2)),
        qhead_per_kvhead=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(head_dims()),
        window=draw(windows(largest=320)),
        dtype=draw(st.sampled_from(dtypes)),
        head_dim_v=draw(st.none() | head_dims()),
    )


def plans(problem: Problem):
    return st.builds(
        lambda config, schedule_type: plan_forward(problem, SMALL_GPU, config, schedule_type),
        st.sampled_from([config for config in CONFIGS if is_legal(config, problem.spec)]),
        st.sampled_from(SCHEDULE_TYPES),
    )


def is_legal(config: ForwardConfig | None, spec: AttentionSpec) -> bool:
    try:
        return config is None or config.validate(spec) is None
    except ValueError:
        return False


def run(problem: Problem, plan=None, softmax_scale: float = 0.125, seed: int = 0):
    """Execute a problem on drawn operands, and check the result."""
    q, k, v = make_operands(problem, seed)
    plan = plan or plan_forward(problem, SMALL_GPU, SMALL_TILES)
    out, lse = run_plan(plan, q, k, v, softmax_scale)
    check_attention(out, lse, q, k, v, softmax_scale, problem.window, lse_tolerance=1e-5)
    return out, lse


@settings(max_examples=80)
@given(st.data(), problems(), st.sampled_from([1e-4, 0.125, 1.0]), st.integers(0, 1000))
def test_matches_dense_attention(data, problem, softmax_scale, seed):
    run(problem, data.draw(plans(problem)), softmax_scale, seed)


@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(100, 30), Window(left=10)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 257), (257, 1), (129, 65)])
def test_odd_lengths(seqlen_q, seqlen_k, window, poisoned_memory):
    run(make_problem(2, seqlen_q, seqlen_k, 2, 2, window=window))


def test_rows_without_keys_are_zero(poisoned_memory):
    out, lse = run(make_problem(seqlen_q=200, seqlen_k=60, window=Window(right=0)))
    assert (out[:, :140] == 0).all() and (lse[:, :, :140] == -math.inf).all()
    assert (out[:, 140:] != 0).any(dim=-1).all() and lse[:, :, 140:].isfinite().all()


def test_probabilities_are_rounded_before_they_meet_the_values():
    """Two keys with scores 0 and -x: the output is P(x) / (1 + P(x)), its numerator rounded."""
    problem = make_problem(seqlen_q=128, seqlen_k=2)
    q, k, v = (torch.zeros_like(tensor) for tensor in make_operands(problem))
    q[0, :, 0, 0] = torch.linspace(4.0, 0.25, 128)
    k[0, 1, 0, 0] = -1.0
    v[0, 1] = 1.0
    out, _ = run_plan(plan_forward(problem), q, k, v, 1.0)
    p = torch.exp(-q[0, :, 0, 0].float())
    rounded = (p.bfloat16().float() / (1 + p)).bfloat16()
    assert torch.equal(out[0, :, 0, 0], rounded)
    assert not torch.equal((p / (1 + p)).bfloat16(), rounded)


def test_large_scores_do_not_overflow():
    problem = make_problem(seqlen_q=130, seqlen_k=200)
    q, k, v = make_operands(problem)
    q, k = q * 60, k * 60
    out, lse = run_plan(plan_forward(problem, config=SMALL_TILES), q, k, v, 1.0)
    assert out.isfinite().all() and lse.isfinite().all()
    check_attention(out, None, q, k, v, 1.0)


@settings(max_examples=15)
@given(problems(dtypes=("bfloat16",)), st.integers(1, 12), st.integers(1, 4))
def test_the_order_of_tiles_does_not_change_a_bit(problem, num_sms, heads_in_l2):
    operands = make_operands(problem)
    row_bytes = 2 * (problem.spec.head_dim + problem.spec.head_dim_v)
    key_head_bytes = row_bytes * max(1, problem.seqlen_k)
    gpu = Gpu("small", num_sms, heads_in_l2 * key_head_bytes)
    results = [
        run_plan(plan_forward(problem, gpu, SMALL_TILES, schedule_type), *operands, 0.125)
        for schedule_type in SCHEDULE_TYPES
    ]
    for single_tile, *others in zip(*results, strict=True):
        assert all(torch.equal(single_tile, other) for other in others)


def test_a_cluster_of_two_gives_the_bits_of_one():
    """Rows above the diagonal blocks of their own CTA walk blocks that hide them altogether."""
    problem = make_problem(1, 500, 450, 2, window=Window(right=0))
    operands = make_operands(problem)
    one, two = (
        run_plan(plan_forward(problem, config=config), *operands, 0.125)
        for config in (SMALL_TILES, replace(SMALL_TILES, cluster_m=2))
    )
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@given(st.data(), problems())
def test_steps_visit_every_row_once(data, problem):
    plan = data.draw(plans(problem))
    visits = Counter(
        (step.segment.tile.batch, step.segment.tile.head, row)
        for step in steps(plan)
        for row in step.rows
    )
    assert len(visits) == problem.batch * problem.num_heads_q * problem.seqlen_q
    assert set(visits.values()) <= {1}


def test_steps_go_round_by_round():
    problem = make_problem(seqlen_q=9 * 128)
    gpu = Gpu("small", num_sms=4, l2_bytes=1 << 20)
    plan = plan_forward(problem, gpu, SMALL_TILES, StaticPersistent)
    assert [step.cluster for step in steps(plan)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [step.rows.start // 128 for step in steps(plan)] == [8, 7, 6, 5, 1, 2, 3, 4, 0]


def test_ctas_of_a_cluster_share_their_key_blocks():
    problem = make_problem(seqlen_q=300, seqlen_k=300, window=Window(right=0))
    plan = plan_forward(problem, config=replace(SMALL_TILES, cluster_m=2))
    visits = [(step.rank, step.rows, step.blocks.end) for step in steps(plan)]
    assert visits == [
        *((0, range(256, 300), 10), (1, range(300, 300), 10)),
        *((0, range(128), 8), (1, range(128, 256), 8)),
    ]


@dataclass(frozen=True)
class FirstKeys(fa3.Mask):
    """The first keys, and ranges that may say less."""

    end: int

    def visible(self, at):
        return at.key < 100

    def key_range(self, rows):
        return 0, self.end

    def reference(self, at):
        return at.key < 100


def test_ranges_of_a_mask_without_tensors_count():
    q, k, v = make_operands(make_problem(1, 64, 1000, 1))
    out = fa3.flash_attn_func(q, k, v, mask=FirstKeys(100))
    few = fa3.flash_attn_func(q, k[:, :100], v[:, :100])
    torch.testing.assert_close(out, few, atol=1e-2, rtol=1e-2)
    steps_of = steps(plan_forward(problem_of_mask(FirstKeys(100))))
    config = plan_forward(problem_of_mask(FirstKeys(100))).config
    assert {step.blocks.end for step in steps_of} == {-(-100 // config.tile_n)}


def problem_of_mask(mask: fa3.Mask) -> Problem:
    problem = make_problem(1, 64, 1000, 1)
    joined = Intersection(problem.spec.mask, Template.of(mask))
    return replace(problem, spec=replace(problem.spec, mask=joined))
