"""A softmax with a fixed reference: who gets it, and what of it runs on the host."""

import math
import runpy
from dataclasses import replace

import pytest
import torch
from problems import make_problem
from score_problems import RelativeBias

from fa3 import settings
from fa3.calls.forward import ALIGNED, PreparedCall
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning import tilings
from fa3.planning.costs import Costs
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tile_costs import Rule, TileCosts, TileKey
from fa3.planning.tilings import FIXED_FLOPS, choose_config, takes_fixed_reference
from fa3.primitives.softmax import Reference
from fa3.primitives.wgmma import REGISTERS, ROWS, ROWS_OF_WARP
from fa3.problem import Window
from fa3.schedules import SCHEDULES, TileList, TileOrder
from fa3.schedules.marked import MARKS_HEADER, MOST_WARPS, Marks
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

CAUSAL = Window(right=0)
LARGE = make_problem(4, 4096, 4096, 4, 4, 128, CAUSAL)
SLOPES = torch.zeros(16)
BIAS = RelativeBias(torch.zeros(16, 33), reach=16)


def with_scores(*scores):
    return replace(LARGE, spec=replace(LARGE.spec, scores=tuple(map(Template.of, scores))))


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_large_calls_get_it(schedule):
    assert plan_forward(LARGE, schedule=schedule).config.fixed_reference


def test_small_calls_do_not():
    small = make_problem(1, 1024, 1024, 1, 8, 128, CAUSAL)
    assert small.flops < FIXED_FLOPS < LARGE.flops
    assert not plan_forward(small).config.fixed_reference


def test_float16_does_not():
    half = make_problem(4, 4096, 4096, 4, 4, 128, CAUSAL, "float16")
    assert not plan_forward(half).config.fixed_reference
    config = replace(choose_config(half, H200), fixed_reference=True)
    with pytest.raises(ValueError, match="fixed_reference must be False with float16"):
        plan_forward(half, config=config)


def test_scores_get_it_that_are_bounded_or_leave_logits_where_they_are():
    for score in (Alibi(SLOPES, is_causal=True), Alibi(SLOPES, is_causal=False), Softcap(50.0)):
        problem = with_scores(score)
        assert takes_fixed_reference(problem.spec)
        assert plan_forward(problem).config.fixed_reference
    few, many = Softcap(5.0), Softcap(61.0)
    for scores in ([few], [many], [Softcap(50.0), Alibi(SLOPES, is_causal=True)], [BIAS]):
        problem = with_scores(*scores)
        assert not takes_fixed_reference(problem.spec)
        assert not plan_forward(problem).config.fixed_reference


def test_a_reference_of_0_where_nothing_overflows_or_somebody_looks():
    follows, fixed = ForwardConfig(128, 128), ForwardConfig(128, 128, fixed_reference=True)
    for config, bound, expected in (
        (follows, 5.0, Reference.ZERO),
        (follows, 6.0, Reference.FOLLOWING),
        (fixed, 6.0, Reference.ZERO),
        (fixed, 61.0, Reference.FIXED),
        (fixed, math.inf, Reference.FIXED),
    ):
        assert Forward(LARGE.spec, config, TileList).reference(bound) is expected


def test_a_variable_turns_it_off(monkeypatch):
    monkeypatch.setattr(tilings, "REFERENCE", "following")
    assert not plan_forward(LARGE).config.fixed_reference


def test_the_variable_is_read(monkeypatch):
    monkeypatch.setitem(settings.SETTINGS, "FA3_REFERENCE", "following")
    assert runpy.run_path(tilings.__file__)["REFERENCE"] == "following"


def test_the_second_launch_needs_no_cluster():
    config = ForwardConfig(128, 128, q_stages=2, cluster_m=2, fixed_reference=True)
    assert config.again == ForwardConfig(128, 128, q_stages=2)


@pytest.mark.parametrize(
    "order", [TileOrder(5, 3, 4, 5), TileOrder(1, 1, 1, 1), TileOrder(8, 4, 2, 8)]
)
def test_every_tile_has_marks_of_its_own(order):
    marks = Marks(None, order)
    words = [marks.rows(i, warp) for i in range(order.num_tiles) for warp in range(MOST_WARPS)]
    words += [marks.group(i) for i in range(-(-order.num_tiles // 32))]
    assert sorted(words) == list(range(MARKS_HEADER, marks.size))


@pytest.mark.parametrize("cluster", [{}, {"cluster_m": 2}, {"cluster_h": 2}])
def test_both_launches_number_tiles_alike(cluster):
    """The first one marks tiles of CTAs by the numbers that they have for the second."""
    problem = make_problem(3, 5000, 5000, 3, 2, 128, CAUSAL)
    plan = plan_forward(problem, config=ForwardConfig(128, 128, fixed_reference=True, **cluster))
    first, again = plan.schedule.order, plan.again.schedule.order
    heads = first.heads_per_section * plan.config.cluster_h
    assert again == TileOrder(40, 6, 3, heads)


def test_a_tile_has_no_more_warps_than_there_are_marks_for():
    assert max(REGISTERS) * ROWS // ROWS_OF_WARP <= MOST_WARPS


@pytest.mark.parametrize("counts", [(0, 0, 4), (8, 0, 0), (12, 4, 0), (12, 0, 8), (0, 4, 0)])
def test_counters_of_a_launch_do_not_overlap(counts):
    call = PreparedCall(None, (), (), num_counters=counts, total_counters=sum(counts))
    found = call.divide(torch.arange(100))
    sizes = [0 if part is None else len(part) for part in found]
    assert sizes == list(counts) or sizes == [100 if count else 0 for count in counts]
    numbers = [
        n for part, size in zip(found, counts, strict=True) if size for n in part[:size].tolist()
    ]
    assert numbers == list(range(sum(counts)))
    assert all(part is None or part[0] % ALIGNED == 0 for part in found)


def test_a_tile_that_was_not_measured_with_it_is_like_the_same_without():
    rule = Rule(tensor=1e-3, exponential=0, masked=2, tile_us=3, steady=1, part_us=2, fixed=0.9)
    follows = TileKey(128, 128, True, 128, 128, 1)
    fixed, other = follows._replace(follows=False), follows._replace(follows=False, tile_n=64)
    costs = H200.costs
    costs = Costs(
        **vars(costs) | {"rule": rule, "tiles": {follows: TileCosts(1.0, 2.0, 3.0, 1.1, 2.0)}}
    )
    assert costs.tile(fixed) == TileCosts(0.9, 1.8, 3.0, 1.1, 2.0)
    assert costs.tile(other).full_us == pytest.approx(0.9 * rule.tile(follows).full_us / 2)


def test_the_plan_says_so():
    plan = plan_forward(LARGE)
    assert plan.name.endswith("fixed row max")
    assert plan.predict().launch_us > H200.costs.launch_us
