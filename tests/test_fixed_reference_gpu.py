"""A softmax with a fixed reference, and the launch that computes tiles again, on a Hopper GPU."""

import random
from dataclasses import replace

import pytest
import torch
from problems import make_operands, make_problem, poisoned_allocations
from reference import check_attention

import fa3
from fa3 import counters, planner
from fa3.api import PreparedCall, prepare, tighten
from fa3.planner import choose_config, plan_forward
from fa3.problem import Problem, Window
from fa3.schedules.marked import HEADER, Marks

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
WAYS = (
    ("single", {}),
    ("static", {"cluster_m": 2}),
    ("list", {}),
    ("list", {"cluster_h": 2}),
    ("dynamic", {}),
    ("dynamic", {"cluster_m": 2}),
    ("split", {}),
    ("split", {"cluster_h": 2}),
)
"""Schedules and clusters."""


@pytest.fixture
def always_fixed(monkeypatch):
    """Calls of any size get a fixed reference."""
    monkeypatch.setattr(planner, "FIXED_FLOPS", 0)
    prepare.cache_clear()
    yield
    prepare.cache_clear()


def plan_of(problem: Problem, schedule: str = "list", fixed: bool = True, **cluster):
    config = replace(choose_config(problem, planner.H200), cluster_m=1)
    return plan_forward(
        problem, config=replace(config, fixed_reference=fixed, **cluster), schedule=schedule
    )


def attend(q, k, v, window: Window, **arguments):
    with poisoned_allocations():
        return fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, **arguments)


def marked(plan, q, k, v) -> set:
    """The tiles that the first launch of a call marks."""
    batch, seqlen_q, heads, _ = q.shape
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(
        batch, heads, seqlen_q, dtype=torch.float32
    )  # fmt: skip
    call, found = PreparedCall.on_gpu(plan, q.device, out.shape, lse.shape), []

    def look(*arguments):
        (words,) = (a for a in arguments[7:] if isinstance(a, torch.Tensor))
        num_m_blocks = -(-seqlen_q // plan.config.tile_m)
        marks = Marks(words, num_m_blocks, heads)
        places = words[HEADER:].nonzero().flatten()
        assert bool(words[0]) == bool(len(places))
        found.extend(marks.tile(place) for place in places.tolist())
        words.zero_()

    replace(call, again=call.again._replace(kernel=look)).launch(
        q, k, v, out, lse, None, q.shape[3] ** -0.5
    )
    return set(found)


def counters_are_zero() -> bool:
    torch.cuda.synchronize()
    return not any(numbers.any() for numbers in counters.BY_STREAM.values())


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(300, 40)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_ordinary_scores(head_dim, window, device):
    problem = make_problem(2, 1100, 1500, 2, 2, head_dim, window)
    q, k, v = make_operands(problem, device=device)
    seen = {}
    for schedule, cluster in WAYS:
        plan = plan_of(problem, schedule, **cluster)
        assert not marked(plan, q, k, v)
        out, lse = attend(q, k, v, window, plan=plan)
        # Parts have references of their own, and pairs of rows that of the pair's first block.
        key = plan.name if schedule == "split" else plan.config.cluster_m
        if key not in seen:
            check_attention(out, lse, q, k, v, window=window)
        expected = seen.setdefault(key, (out, lse))
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]), plan.name
    assert counters_are_zero()


@pytest.mark.parametrize(("schedule", "cluster"), WAYS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_whose_scores_outgrow_the_reference_are_computed_again(
    head_dim, schedule, cluster, device
):
    problem = make_problem(2, 900, 1300, 2, 2, head_dim)
    q, k, v = make_operands(problem, device=device)
    rows = {(0, 5, 1), (0, 600, 3), (1, 899, 0), (1, 301, 2)}
    for batch, row, head in rows:
        toward = q[batch, row, head].float()
        k[batch, 7 + row % 50, head // 2] = 70 * head_dim**0.5 / toward.norm() ** 2 * toward
    plan = plan_of(problem, schedule, **cluster)
    tiles, tile_m = marked(plan, q, k, v), plan.config.tile_m
    assert {(row // tile_m, head, batch) for batch, row, head in rows} <= tiles
    assert len(tiles) < plan.schedule.order.num_tiles
    follows, _ = attend(q, k, v, Window(), plan=plan_of(problem, fixed=False))
    for _ in range(2):
        out, lse = attend(q, k, v, Window(), plan=plan)
        check_attention(out, lse, q, k, v, lse_tolerance=3e-4)
        for m_block, head, batch in tiles:
            those = slice(m_block * tile_m, (m_block + 1) * tile_m)
            assert torch.equal(out[batch, those, head], follows[batch, those, head])
        assert counters_are_zero()


def test_sums_that_vanish(device):
    """The reference is that of keys that most rows do not see, and far above the others."""
    problem = make_problem(1, 128, 256, 1, 2, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    q, k = q.abs() + 5, -k.abs() - 2
    k[:, 250:] *= -1
    plan = plan_of(problem)
    assert marked(plan, q, k, v) == {(0, 0, 0), (0, 1, 0)}
    out, lse = attend(q, k, v, CAUSAL, plan=plan)
    check_attention(out, lse, q, k, v, window=CAUSAL, lse_tolerance=1e-3)


def test_rows_without_a_key(device):
    problem = make_problem(2, 1000, 300, 2, 1, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem)
    assert not marked(plan, q, k, v)
    out, lse = attend(q, k, v, CAUSAL, plan=plan)
    check_attention(out, lse, q, k, v, window=CAUSAL)
    assert counters_are_zero()


def test_nan_stays_in_its_sequence(device):
    problem = make_problem(3, 500, 700, 1, 2, 128)
    q, k, v = make_operands(problem, device=device)
    k[1, 650] = torch.nan
    out, lse = attend(q, k, v, Window(), plan=plan_of(problem))
    assert out[1].isnan().all()
    for i in (0, 2):
        one = slice(i, i + 1)
        check_attention(out[one], lse[one], q[one], k[one], v[one])
    assert counters_are_zero()


def test_a_graph_marks_and_wipes_out(device):
    problem = make_problem(1, 700, 900, 2, 2, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, "dynamic")
    attend(q, k, v, CAUSAL, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, plan=plan)
    for factor in (1, 100, 1, 100, 100, 1):
        q2, k2, _ = make_operands(problem, seed=factor, device=device)
        q.copy_(q2 * factor), k.copy_(k2)
        assert bool(marked(plan, q, k, v)) == (factor > 1)
        out.fill_(torch.nan)
        graph.replay()
        check_attention(out, lse, q, k, v, window=CAUSAL, lse_tolerance=1e-3)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed, device, always_fixed):
    draw = random.Random(seed)
    heads_kv, ratio = draw.choice(((1, 1), (2, 1), (1, 4), (2, 3)))
    seqlen_q, seqlen_k = draw.randint(1, 1200), draw.randint(1, 1500)
    left, right = (draw.choice((-1, draw.randint(0, 600))) for _ in range(2))
    window = draw.choice((Window(), CAUSAL, tighten(Window(left, right), seqlen_q, seqlen_k)))
    head_dim = draw.choice((64, 128, 256, 8 * draw.randint(1, 32)))
    batch = draw.randint(1, 3)
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, window)
    q, k, v = make_operands(problem, seed, device)
    q = q * draw.choice((1, 1, 1, 5, 100))
    modifiers = {}
    if draw.random() < 0.4:
        steepest = draw.choice((0.01, 0.2, 1.0))
        modifiers["alibi_slopes"] = steepest * torch.rand(heads_kv * ratio, device=device)
    if draw.random() < 0.3:
        modifiers["sinks"] = 3 * torch.randn(heads_kv * ratio, device=device)
    out, lse = attend(q, k, v, window, **modifiers)
    check_attention(out, lse, q, k, v, window=window, lse_tolerance=1e-3, **modifiers)
    assert counters_are_zero()


def test_steep_alibi_on_both_sides_of_long_sequences(device, always_fixed):
    """Far from a row's own position biases are below -10,000; the reference is guessed beyond."""
    problem = make_problem(1, 16384, 16384, 1, 2, 128)
    q, k, v = make_operands(problem, device=device)
    slopes = torch.tensor([1.0, 2.0**-8], device=device)
    out, lse = attend(q, k, v, Window(), alibi_slopes=slopes)
    check_attention(out, lse, q, k, v, alibi_slopes=slopes)
