"""Schedules, parts of tiles and pairs of heads on a Hopper GPU."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from pairs import pairs
from problems import make_operands, make_problem, poisoned_allocations
from reference import check_attention

import fa3
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.problem import Problem, Window
from fa3.running import counters
from fa3.running.counters import FEWEST

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
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


def attend(q, k, v, window: Window, **arguments):
    with poisoned_allocations():
        return fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, **arguments)


def output(plan, tensors) -> torch.Tensor:
    return fa3.flash_attn_func(*tensors, causal=True, return_lse=True, plan=plan)[0]


def plan_of(problem: Problem, schedule: str, **changes):
    """A plan with the planner's tiling for this schedule, without clusters unless told."""
    config = replace(choose_config(problem, H200), cluster_m=1)
    return plan_forward(problem, config=replace(config, **changes), schedule=schedule)


@pairs(shape=FEW_TILES, head_dim=HEAD_DIMS, window=(Window(), CAUSAL, Window(600, 50)))
def test_parts_of_tiles(shape, head_dim, window, device):
    batch, seqlen_q, seqlen_k, heads_kv, ratio = shape
    window = window.tighten(seqlen_q, seqlen_k)
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, window)
    q, k, v = make_operands(problem, device=device)
    clusters = [{}, {"cluster_m": 2}] + [{"cluster_h": 2}] * (ratio % 2 == 0)
    for cluster in clusters:
        plan = plan_of(problem, "split", **cluster)
        out, lse = attend(q, k, v, window, plan=plan)
        check_attention(out, lse, q, k, v, window=window)


def test_parts_exist_in_these_tests():
    problems = [
        make_problem(*shape, head_dim, CAUSAL) for shape in FEW_TILES for head_dim in HEAD_DIMS
    ]
    parts = [plan_of(problem, "split").schedule.num_slots for problem in problems]
    assert sum(count > 100 for count in parts) >= len(parts) // 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_with_sinks_and_alibi(dtype, device):
    problem = make_problem(1, 500, 3000, 2, 2, 128, CAUSAL, dtype)
    q, k, v = make_operands(problem, device=device)
    modifiers = {
        "alibi_slopes": torch.rand(4, device=device) / 8,
        "sinks": torch.randn(4, device=device) * 3,
    }
    out, lse = attend(q, k, v, CAUSAL, schedule="split", **modifiers)
    check_attention(out, lse, q, k, v, window=CAUSAL, **modifiers)


@pytest.mark.parametrize("schedule", ["split", "dynamic"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_whoever_comes_first_the_bits_are_the_same(head_dim, schedule, device):
    problem = make_problem(1, 1500, 3000, 2, 4, head_dim, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, schedule)
    out, lse = attend(q, k, v, CAUSAL, plan=plan)
    check_attention(out, lse, q, k, v, window=CAUSAL)
    for _ in range(200):
        again, lse_again = attend(q, k, v, CAUSAL, plan=plan)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize(
    ("head_dim", "window"),
    [
        *((128, window) for window in (Window(), CAUSAL, Window(100, 30))),
        *((64, Window(100, 30)), (256, CAUSAL)),
    ],
)
def test_dynamic_and_pairs_of_heads_give_the_same_bits(head_dim, window, device):
    problem = make_problem(3, 1500, 1700, 2, 4, head_dim, window)
    q, k, v = make_operands(problem, device=device)
    out, lse = attend(q, k, v, window, plan=plan_of(problem, "single"))
    check_attention(out, lse, q, k, v, window=window)
    plans = [plan_of(problem, "dynamic")]
    plans += [plan_of(problem, name, cluster_h=2) for name in ("single", "static", "list")]
    for plan in plans:
        same, same_lse = attend(q, k, v, window, plan=plan)
        assert torch.equal(out, same) and torch.equal(lse, same_lse), plan.name


def test_graphs_keep_their_counters(monkeypatch, device):
    """Whatever is captured and allocated after them."""
    monkeypatch.setattr(counters, "RESERVE", FEWEST)
    monkeypatch.setattr(counters, "RESERVES", {})
    problem = make_problem(1, 1500, 3000, 2, 4, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, "split")
    expected, expected_lse = attend(q, k, v, CAUSAL, plan=plan)
    kept = []
    for _ in range(20):
        attend(q, k, v, CAUSAL, plan=plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = attend(q, k, v, CAUSAL, plan=plan)
        others = torch.full((FEWEST,), 12345, dtype=torch.int32, device=device)
        kept.append((graph, *result, others))
    for graph, out, lse, others in kept:
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert (others == 12345).all()


@pytest.mark.parametrize("schedule", ["split", "dynamic"])
def test_counters_are_zero_again(schedule, device):
    """Calls of different sizes on one stream share counters."""
    for seqlen in (300, 3000, 700, 64, 5000):
        problem = make_problem(1, seqlen, seqlen, 2, 2, 128, CAUSAL)
        q, k, v = make_operands(problem, device=device)
        out, lse = attend(q, k, v, CAUSAL, plan=plan_of(problem, schedule))
        check_attention(out, lse, q, k, v, window=CAUSAL)


@pytest.mark.parametrize("schedule", ["split", "dynamic"])
def test_streams_do_not_disturb_each_other(schedule, device):
    problem = make_problem(1, 1100, 2000, 2, 4, 128, CAUSAL)
    plan = plan_of(problem, schedule)
    call = partial(output, plan)
    operands = [make_operands(problem, seed, device) for seed in range(3)]
    expected = [attend(*tensors, CAUSAL, plan=plan)[0] for tensors in operands]
    streams = [torch.cuda.Stream() for _ in operands]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, tensors in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                outs.append(call(tensors))
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("schedule", ["split", "dynamic"])
def test_graphs_replay_beside_each_other(schedule, device):
    """Two graphs captured on one stream and replayed on two at once."""
    problem = make_problem(1, 900, 2500, 2, 4, 128, CAUSAL)
    plan = plan_of(problem, schedule)
    call = partial(output, plan)
    operands = [make_operands(problem, seed, device) for seed in range(2)]
    expected = [call(tensors) for tensors in operands]
    graphs, outs = [], []
    for tensors in operands:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(call(tensors))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)


def test_a_tile_order_cannot_be_copied_during_a_capture(device):
    problem = make_problem(1, 777, 888, 2, 1, 128, CAUSAL)
    tensors = make_operands(problem, device=device)
    attend(*make_operands(make_problem(1, 776, 888, 2, 1, 128, CAUSAL), device=device), CAUSAL)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensors[0] + 1
        with pytest.raises(RuntimeError, match=r"^q, k and v .* call once before capturing"):
            fa3.flash_attn_func(*tensors, causal=True, schedule="list")
    fa3.flash_attn_func(*tensors, causal=True, schedule="list")
