"""A softmax with a fixed reference: who gets it, and what of it runs on the host."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from problems import make_problem
from score_problems import RelativeBias

import fa3
from fa3.api import ALIGNED, PreparedCall
from fa3.costs import Costs, Rule, TileCosts, TileKey, costs_of
from fa3.planner import FIXED_FLOPS, H200, choose_config, plan_forward, takes_fixed_reference
from fa3.problem import Window
from fa3.schedules import SCHEDULES, Tile
from fa3.schedules.marked import Marks
from fa3.scores import Alibi, Softcap
from fa3.templates import Template
from fa3.tiling import Config

CAUSAL = Window(right=0)
LARGE = make_problem(4, 4096, 4096, 4, 4, 128, CAUSAL)
SLOPES = torch.zeros(16)


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


def test_scores_get_it_that_leave_logits_where_they_are():
    assert takes_fixed_reference(with_scores(Alibi(SLOPES, behind=True)).spec)
    assert takes_fixed_reference(with_scores(Alibi(SLOPES, behind=False)).spec)
    for score in (Softcap(30.0), RelativeBias(torch.zeros(16, 33), reach=16)):
        problem = with_scores(score)
        assert not takes_fixed_reference(problem.spec)
        assert not plan_forward(problem).config.fixed_reference


def test_the_second_launch_needs_no_cluster():
    config = Config(128, 128, q_stages=2, cluster_m=2, fixed_reference=True)
    assert config.again == Config(128, 128, q_stages=2)


def test_every_tile_has_a_mark_of_its_own():
    marks = Marks(None, num_m_blocks=5, num_heads=3)
    tiles = [Tile(m, head, batch) for batch, head, m in product(range(4), range(3), range(5))]
    assert [marks.place(tile) for tile in tiles] == list(range(60))
    assert [marks.tile(place) for place in range(60)] == tiles


@pytest.mark.parametrize("counts", [(0, 0, 0), (8, 0, 0), (0, 0, 4), (12, 4, 0), (12, 0, 8)])
def test_counters_of_a_launch_do_not_overlap(counts, monkeypatch):
    monkeypatch.setattr(fa3.api, "zeros_for_launch", lambda count, q: torch.arange(count))
    call = PreparedCall(None, None, (), (), (), num_counters=counts)
    found = call.counters(torch.zeros(1))
    assert [0 if part is None else len(part) for part in found] == list(counts)
    numbers = [number for part in found if part is not None for number in part.tolist()]
    assert numbers == list(range(sum(counts)))
    assert all(part is None or part[0] % ALIGNED == 0 for part in found)


def test_a_tile_that_was_not_measured_with_it_is_like_the_same_without():
    rule = Rule(tensor=1e-3, exponential=0, masked=2, tile_us=3, steady=1, part_us=2, fixed=0.9)
    follows = TileKey(128, 128, True, 128, 128, 1)
    fixed, other = follows._replace(follows=False), follows._replace(follows=False, tile_n=64)
    costs = costs_of(H200.name)
    costs = Costs(
        **vars(costs) | {"rule": rule, "tiles": {follows: TileCosts(1.0, 2.0, 3.0, 1.1, 2.0)}}
    )
    assert costs.tile(fixed) == TileCosts(0.9, 1.8, 3.0, 1.1, 2.0)
    assert costs.tile(other).full_us == pytest.approx(0.9 * rule.tile(follows).full_us / 2)


def test_the_plan_says_so():
    plan = plan_forward(LARGE)
    assert plan.name.endswith("fixed reference")
    assert plan.predict().launch_us > costs_of(H200.name).launch_us
