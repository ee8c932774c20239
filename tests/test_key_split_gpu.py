"""Gradients on a Hopper GPU where several CTAs share a key tile, against float64."""

import random

import pytest
import torch
from gradients import check_gradients
from problems import make_operands, make_problem, poisoned_allocations
from varlen_gradients import check_varlen_gradients
from varlen_problems import VarlenProblem, make_call

import fa3
from fa3.calls import backward
from fa3.planning import backward as planning
from fa3.planning.key_split import KeyShares
from fa3.problem import Window

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
WINDOWS = (Window(), CAUSAL, Window(300, 0), Window(40, 20), Window(left=70))

FORCED = (
    *((1, 1, KeyShares(1, n)) for n in (2, 3, 8)),
    *((2, 2, KeyShares(2, n)) for n in (1, 2, 6)),
    *((1, 7, KeyShares(7, n)) for n in (1, 3)),
    *((2, 6, KeyShares(n, 1)) for n in (2, 3)),
    *((1, 8, KeyShares(n, 1)) for n in (2, 4, 8)),
    (1, 8, KeyShares(8, 8)),
)
"""(key/value heads, query heads of each, shares of a key tile)."""


@pytest.fixture
def force(monkeypatch):
    """Make all backward passes share key tiles in a given way."""

    def force(shares: KeyShares):
        monkeypatch.setattr(planning, "choose_shares", lambda *given: shares)
        monkeypatch.setattr(planning, "may_split", lambda *given: True)
        backward.prepare_backward.cache_clear()

    yield force
    backward.prepare_backward.cache_clear()


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("forced", FORCED, ids=str)
def test_dense(forced, head_dims, force, device):
    heads_kv, group, shares = forced
    force(shares)
    for seed, window in enumerate(WINDOWS):
        lengths = random.Random(seed).choice([(700, 700), (130, 1000), (900, 300), (1, 200)])
        problem = make_problem(
            2, *lengths, heads_kv, group, head_dims[0], window, head_dim_v=head_dims[1]
        )
        q, k, v = make_operands(problem, seed, device)
        check_gradients(q, k, v, window, (True, False), seed)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("forced", FORCED, ids=str)
def test_packed(forced, head_dim, force, device):
    heads_kv, group, shares = forced
    force(shares)
    for seed, lengths in enumerate(([300, 0, 5, 129, 128, 1000], [17], [700, 1])):
        sizes = {"heads_kv": heads_kv, "group": group, "head_dim": head_dim}
        sizes |= {"head_dim_v": head_dim, "causal": seed != 1}
        problem = VarlenProblem(tuple(lengths), tuple(lengths), **sizes)
        check_varlen_gradients(problem, make_call(problem, seed, device), (True, False), seed)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "seqlen", "head_dim"),
    [(8, 1, 2000, 128), (16, 1, 1500, 64), (8, 2, 1000, 256), (64, 8, 1024, 128)],
)
def test_the_same_bits_every_time(heads_q, heads_kv, seqlen, head_dim, deterministic, device):
    """The planner splits these. dK and dV have the same bits always, dQ if asked for."""
    problem = make_problem(1, seqlen, seqlen, heads_kv, heads_q // heads_kv, head_dim, CAUSAL)
    assert planning.BackwardPlan.of(problem).shares.parts > 1
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    out = fa3.flash_attn_func(*operands, causal=True, deterministic=deterministic)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, operands, d_out, retain_graph=True)
    check_gradients(*operands, CAUSAL, (True, False), deterministic=deterministic)
    for _ in range(100):
        with poisoned_allocations():
            found = torch.autograd.grad(out, operands, d_out, retain_graph=True)
        assert all(map(torch.equal, found[1:], first[1:]))
        assert not deterministic or torch.equal(found[0], first[0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_modifiers(dropout_p, force, device):
    """With sinks, a softcap and ALiBi, or dropout, in parts of heads and of blocks."""
    problem = make_problem(1, 500, 600, 1, 4, 128, CAUSAL)
    q, k, v = make_operands(problem, 3, device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    modifiers = {"softcap": 20.0, "alibi_slopes": slopes, "sinks": torch.zeros(4, device=device)}
    for shares in (KeyShares(2, 1), KeyShares(4, 3)):
        force(shares)
        if dropout_p:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            state = torch.tensor([7], dtype=torch.int64, device=device)
            out = fa3.flash_attn_func(*leaves, causal=True, dropout_p=dropout_p, rng_state=state)
            found = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
            force(KeyShares())
            whole = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for ours, theirs in zip(found, whole, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-2)
        else:
            check_gradients(q, k, v, CAUSAL, (True, True), 3, **modifiers)


def test_captured_graph(device):
    """Counters of parts are zero in every replay."""
    problem = make_problem(1, 2048, 2048, 1, 8, 128, CAUSAL)
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    d_out = torch.randn(1, 2048, 8, 128, device=device).to(operands[0].dtype)

    def step():
        out = fa3.flash_attn_func(*operands, causal=True)
        return torch.autograd.grad(out, operands, d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for _ in range(5):
            for gradient in found:
                gradient.fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            assert all(map(torch.equal, found[1:], expected[1:]))
            torch.testing.assert_close(found[0], expected[0], atol=1e-3, rtol=2e-2)
