"""Dense calls in the kernel of decoding on a Hopper GPU, against dense attention in float64."""

import random

import pytest
import torch
from problems import make_operands, make_problem, poisoned_allocations
from reference import check_attention
from score_problems import Recipe

import fa3
from fa3.planning.grouped import GroupedPlan
from fa3.planning.planner import plan_dense
from fa3.problem import Problem, Window

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
WINDOWS = (Window(), CAUSAL, Window(100, 30), Window(left=70))
GROUPS = (1, 2, 4, 7, 8, 16)


def attend(problem: Problem, device, seed: int = 0, **options):
    """Operands, and what they give packed, in memory that is NaN wherever nothing is written."""
    operands = make_operands(problem, seed, device)
    with poisoned_allocations():
        found = fa3.flash_attn_func(
            *operands, window_size=problem.window, pack_gqa=True, return_lse=True, **options
        )
    return operands, found


def random_problem(seed: int) -> Problem:
    """Draw a problem: few queries or some hundreds, keys of all orders of magnitude."""
    draw = random.Random(seed)
    seqlen_q = draw.randint(1, draw.choice((1, 16, 300)))
    return make_problem(
        batch=draw.randint(1, draw.choice((2, 40))),
        seqlen_q=seqlen_q,
        seqlen_k=draw.choice((seqlen_q, draw.randint(1, draw.choice((60, 1000, 9000))))),
        num_heads_kv=draw.randint(1, 4),
        qhead_per_kvhead=draw.choice(GROUPS),
        head_dim=draw.choice((64, 128)),
        window=draw.choice(WINDOWS),
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed, device):
    problem = random_problem(seed)
    operands, (out, lse) = attend(problem, device, seed)
    check_attention(out, lse, *operands, window=problem.window)
    cached = fa3.flash_attn_with_kvcache(*operands, window_size=problem.window, return_lse=True)
    assert torch.equal(out, cached[0]) and torch.equal(lse, cached[1])


@pytest.mark.parametrize(
    ("head_dims", "dtype"),
    [
        *(((40, 40), "float16"), ((96, 80), "bfloat16"), ((192, 128), "float16")),
        *(((64, 256), "bfloat16"), ((256, 256), "float16")),
    ],
)
def test_any_head_dim(head_dims, dtype, device):
    head_dim, head_dim_v = head_dims
    problem = make_problem(3, 5, 777, 2, 4, head_dim, CAUSAL, dtype, head_dim_v)
    operands, (out, lse) = attend(problem, device)
    check_attention(out, lse, *operands, window=CAUSAL)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("alibi_rank", [1, 2])
def test_scores_and_sinks(window, alibi_rank, device):
    problem = make_problem(3, 5, 1500, 2, 4, 128, window)
    q, _, _ = make_operands(problem, device=device)
    modifiers = Recipe(30.0, alibi_rank, "q").make(problem, q, steepest=0.05)
    operands, (out, lse) = attend(problem, device, **modifiers)
    check_attention(out, lse, *operands, window=window, **modifiers)


@pytest.mark.parametrize("batch", [1, 33, 1500])
def test_pieces_are_found_without_lengths(batch, device):
    """In one step of the search, in two, and without looking ahead."""
    problem = make_problem(batch, 1, 130, 2, 4, 64)
    operands, (out, lse) = attend(problem, device)
    check_attention(out, lse, *operands)


@pytest.mark.parametrize(
    ("problem", "is_packed"),
    [
        (make_problem(4, 1, 8192, 8, 4, 128, CAUSAL), True),
        (make_problem(2, 512, 8192, 8, 4, 128, CAUSAL), False),
    ],
)
def test_calls_choose(problem, is_packed, device):
    operands = make_operands(problem, device=device)
    assert isinstance(plan_dense(problem), GroupedPlan) == is_packed
    chosen, packed, other = (
        fa3.flash_attn_func(*operands, causal=True, pack_gqa=pack) for pack in (None, True, False)
    )
    assert torch.equal(chosen, packed if is_packed else other)
    torch.testing.assert_close(packed, other, rtol=0.02, atol=0.002)


def test_gradients_are_of_the_forward_kernel(device):
    problem = make_problem(4, 1, 8192, 8, 4, 128, CAUSAL)
    q, k, v = (x.requires_grad_() for x in make_operands(problem, device=device))
    out = fa3.flash_attn_func(q, k, v, causal=True)
    with torch.no_grad():
        assert torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True, pack_gqa=False))
        assert torch.equal(
            fa3.flash_attn_func(q, k, v, causal=True),
            fa3.flash_attn_func(q, k, v, causal=True, pack_gqa=True),
        )
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_cuda_graph_replays_on_new_inputs(device):
    """Captured with other sizes than were called before: nothing is copied from the host."""
    before, problem = (make_problem(n, 1, 5000, 8, 4, 128, CAUSAL) for n in (3, 4))
    attend(before, device)
    q, k, v = make_operands(problem, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, pack_gqa=True)
    for seed in (1, 2):
        for tensor, value in zip((q, k, v), make_operands(problem, seed, device), strict=True):
            tensor.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        check_attention(out, lse, q, k, v, window=CAUSAL)


def test_sms_are_left_to_others(device):
    problem = make_problem(4, 1, 5000, 8, 4, 128, CAUSAL)
    operands, (out, lse) = attend(problem, device, sm_margin=100)
    check_attention(out, lse, *operands, window=CAUSAL)
