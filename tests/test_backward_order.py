"""In which order CTAs add to dQ on a Hopper GPU: whatever it is, and where it is fixed.

Also where several CTAs share a key tile.
"""

import itertools

import pytest
import torch
from gpu_checks import captured, forget_prepared_calls
from gradients import check_gradients, check_varlen_gradients
from pairs import pairs
from problems import CAUSAL, make_operands, make_problem, poisoned_allocations
from varlen_problems import VarlenProblem, make_call

import fa3
from fa3.planning import backward as planning
from fa3.planning import backward_packed as packed
from fa3.planning.key_split import KeyShares, Waves
from fa3.problem import Window

FORCED = (
    *((1, 1, KeyShares(1, n)) for n in (2, 3, 8)),
    *((2, 2, KeyShares(2, n)) for n in (1, 2, 6)),
    *((1, 7, KeyShares(7, n)) for n in (1, 3)),
    *((2, 6, KeyShares(n, 1)) for n in (2, 3)),
    *((1, 8, KeyShares(n, 1)) for n in (2, 4, 8)),
    (1, 8, KeyShares(8, 8)),
    *((1, 6, KeyShares(n, 5)) for n in (1, 2)),
    *((2, 6, KeyShares(n, 7, 1600)) for n in (1, 3)),
    (1, 8, KeyShares(1, 20, 2800)),
)
"""(key/value heads, query heads of each, shares of a key tile); later key tiles may have fewer."""


@pytest.fixture
def force(monkeypatch):
    """Make all backward passes share key tiles in a given way."""

    def forget():
        forget_prepared_calls()
        packed.shares_of_lengths.cache_clear()

    def force(shares: KeyShares):
        for module in (planning, packed):
            monkeypatch.setattr(module, "choose_shares", lambda *given, **named: shares)
            monkeypatch.setattr(module, "most_parts_of", lambda *given: 100)
        forget()

    yield force
    forget()


LENGTHS = (700, 700), (130, 1000), (900, 300), (1, 200)


@pytest.mark.parametrize(
    ("head_dims", "window"),
    [
        *(((64, 64), CAUSAL), ((128, 128), CAUSAL), ((256, 256), CAUSAL), ((72, 40), CAUSAL)),
        *(((64, 64), Window(300, 0)), ((128, 128), Window()), ((192, 128), CAUSAL)),
        *(((256, 256), Window(40, 20)), ((192, 128), Window(left=70))),
    ],
    ids=str,
)
def test_dense(head_dims, window, force, device):
    """One kernel shares key tiles in all ways."""
    for seed, (heads_kv, group, shares) in enumerate(FORCED):
        force(shares)
        for lengths in (LENGTHS[seed % 4], LENGTHS[(seed + 1) % 4]):
            problem = make_problem(
                2, *lengths, heads_kv, group, head_dims[0], window, head_dim_v=head_dims[1]
            )
            q, k, v = make_operands(problem, seed, device)
            check_gradients(q, k, v, window, (True, False), seed, schedule="list")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed(head_dim, force, device):
    for heads_kv, group, shares in FORCED:
        force(shares)
        for seed, lengths in enumerate(((300, 0, 5, 129, 128, 1000), (17,), (700, 1))):
            sizes = {"heads_kv": heads_kv, "group": group, "head_dim": head_dim}
            problem = VarlenProblem(lengths, lengths, **sizes, causal=seed != 1)
            check_varlen_gradients(problem, make_call(problem, seed, device), (True, False), seed)


@pairs(
    sizes=[
        (6, 1, 1000, 128),
        (8, 1, 2000, 128),
        (16, 1, 1500, 64),
        (8, 2, 1300, 256),
        (64, 8, 1024, 128),
    ],
    deterministic=[False, True],
)
def test_the_same_bits_every_time(sizes, deterministic, device):
    """The planner splits these. dK and dV have the same bits always, dQ if asked for."""
    heads_q, heads_kv, seqlen, head_dim = sizes
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_modifiers(dropout_p, deterministic, force, device):
    """With sinks, a softcap and ALiBi, or dropout, in parts of heads and of blocks, or of lines."""
    problem = make_problem(1, 500, 600, 1, 4, 128, CAUSAL)
    q, k, v = make_operands(problem, 3, device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    modifiers = {"softcap": 20.0, "alibi_slopes": slopes, "sinks": torch.zeros(4, device=device)}
    for shares in (KeyShares(2, 1), KeyShares(4, 3)):
        force(shares)
        if dropout_p:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            state = torch.tensor([7], dtype=torch.int64, device=device)
            options = {"causal": True, "dropout_p": dropout_p, "rng_state": state}
            out = fa3.flash_attn_func(*leaves, **options, deterministic=deterministic)
            found = torch.autograd.grad(out, leaves, torch.ones_like(out))
            force(KeyShares())
            out = fa3.flash_attn_func(*leaves, **options)
            whole = torch.autograd.grad(out, leaves, torch.ones_like(out))
            for ours, theirs in zip(found, whole, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-2)
        else:
            options = modifiers | {"deterministic": deterministic}
            check_gradients(q, k, v, CAUSAL, (True, True), 3, **options)


GRAPHS = make_problem(1, 2048, 2048, 1, 8, 128, CAUSAL), make_problem(2, 170, 190, 2, head_dim=64)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("problem", GRAPHS, ids=["shared", "whole"])
def test_captured_in_a_graph(problem, deterministic, device):
    """Counters and words that tiles wait for are zero in every replay."""
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    d_out = torch.randn_like(operands[0])
    options = {"window_size": tuple(problem.window), "deterministic": deterministic}

    def step():
        return torch.autograd.grad(fa3.flash_attn_func(*operands, **options), operands, d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
        graph, found = captured(step, stream=stream)
        for _ in range(5):
            for gradient in found:
                gradient.fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            check_bits(found, expected, deterministic)


def check_bits(found, expected, deterministic: bool) -> None:
    """Assert that dK and dV have the same bits, and dQ if the order of additions is fixed."""
    assert all(map(torch.equal, found[1:], expected[1:]))
    assert not deterministic or torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[0], expected[0], atol=1e-3, rtol=2e-2)


MANY = (
    make_problem(16, 512, 512, 8, head_dim=64),
    make_problem(8, 1024, 1024, 8, head_dim=64, window=CAUSAL),
    make_problem(16, 512, 512, 8, head_dim=128),
    make_problem(8, 1024, 1024, 8, head_dim=128, window=CAUSAL),
    make_problem(8, 1024, 1024, 2, 4, 128, CAUSAL),
    make_problem(8, 1024, 1024, 8, head_dim=256, window=CAUSAL),
    # Begun by the backward kernel, and tiles of queries that no key comes to.
    make_problem(4, 3000, 1000, 16, head_dim=128, window=CAUSAL),
)


@pytest.mark.parametrize("problem", MANY, ids=lambda p: f"{p.seqlen_q}-{p.spec.head_dim}")
def test_many_tiles_of_keys_come_first(problem, device):
    """None of them is lost, however often; only the order of the additions to dQ differs.

    In a fixed order sums begin with zeros, and query blocks may be walked downwards.
    """
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    options = {"window_size": tuple(problem.window)}
    out = fa3.flash_attn_func(*operands, **options)
    d_out = torch.randn_like(out)
    ordered = fa3.flash_attn_func(*operands, **options, deterministic=True)
    with poisoned_allocations():
        in_order = torch.autograd.grad(ordered, operands, d_out)
        expected = torch.autograd.grad(out, operands, d_out, retain_graph=True)
    hidden = max(0, problem.seqlen_q - problem.seqlen_k) if problem.window == CAUSAL else 0
    for _ in range(50):
        with poisoned_allocations():
            found = torch.autograd.grad(out, operands, d_out, retain_graph=True)
        assert all(map(torch.equal, found[1:], expected[1:]))
        for ours, theirs in zip(found, in_order, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=2e-2)
        assert not found[0][:, :hidden].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_streams(deterministic, device):
    """Launches that share the SMs do not wait for one another's CTAs."""
    problem = MANY[3]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    options = {"causal": True, "deterministic": deterministic}
    calls = []
    for seed in range(2):
        operands = [x.requires_grad_() for x in make_operands(problem, seed, device)]
        d_out = torch.randn_like(operands[0])
        expected = torch.autograd.grad(fa3.flash_attn_func(*operands, **options), operands, d_out)
        calls.append((operands, d_out, expected, []))
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (operands, d_out, _, found) in zip(streams, calls, strict=True):
            # Autograd runs what comes after a call on the call's stream.
            with torch.cuda.stream(stream):
                out = fa3.flash_attn_func(*operands, **options)
                found.append(torch.autograd.grad(out, operands, d_out))
    torch.cuda.synchronize()
    for _, _, expected, found in calls:
        for gradients in found:
            check_bits(gradients, expected, deterministic)


DETERMINISTIC = (
    make_problem(1, 300, 300, 2, head_dim=64),
    # One key tile for each accumulator.
    make_problem(1, 150, 190, 2, 2, 128, Window(70, 20)),
    make_problem(2, 1000, 1000, 2, 2, 128, CAUSAL),
    make_problem(1, 2000, 1500, 2, head_dim=64, window=CAUSAL),
    make_problem(2, 777, 1500, 1, 3, 128, Window(200, 30)),
    make_problem(1, 1500, 700, 2, head_dim=128, window=Window(left=100)),
    make_problem(1, 1300, 1300, 3, head_dim=256, window=CAUSAL),
    make_problem(1, 700, 900, 2, head_dim=192),
    make_problem(4, 2048, 2048, 8, head_dim=128, window=CAUSAL),
    make_problem(4, 2048, 2048, 8, head_dim=64),
    make_problem(1, 20000, 20000, 1, head_dim=128),
)


@pytest.mark.parametrize("problem", DETERMINISTIC, ids=lambda p: f"{p.seqlen_q}-{p.spec.head_dim}")
def test_deterministic_gradients_have_the_same_bits_every_time(problem, device):
    """More tiles than fit on the GPU too: tiles wait for each other, and none may wait forever."""
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    options = {"window_size": tuple(problem.window), "return_lse": True}
    out, lse = fa3.flash_attn_func(*operands, **options, deterministic=True)
    plain, _ = fa3.flash_attn_func(*operands, **options)
    given = torch.randn_like(out), torch.randn_like(lse)
    first = torch.autograd.grad((out, lse), operands, given, retain_graph=True)
    expected = torch.autograd.grad(plain, operands, given[0])
    without_lse = torch.autograd.grad(out, operands, given[0], retain_graph=True)
    for ours, theirs in zip(without_lse, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    for _ in range(200):
        again = torch.autograd.grad((out, lse), operands, given, retain_graph=True)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("window", [Window(), Window(40, 20), Window(left=70)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(head_dim, window, device):
    problem = make_problem(2, 500, 700, 2, 2, head_dim, window)
    q, k, v = make_operands(problem, 0, device)
    check_gradients(q, k, v, window, (True, True), deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_groups_alternate_in_a_fixed_order(head_dim, device, monkeypatch):
    """In groups of a few heads: also where rows or keys are hidden."""
    monkeypatch.setattr(Waves, "heads_per_group", lambda self, heads, tiles: -(-heads // 5))
    monkeypatch.setattr(planning, "share_lines", lambda *given: None)
    forget_prepared_calls()
    for seed, (lengths, heads, window) in enumerate(
        itertools.product(
            ((700, 700), (300, 900), (1000, 500), (1, 600)), ((1, 8), (8, 2)),
            (CAUSAL, Window(right=37)),
        )
    ):  # fmt: skip
        problem = make_problem(2, *lengths, *heads, head_dim, window)
        plan = planning.BackwardPlan.of(problem, is_ordered=True)
        assert plan.alternates == 1 and plan.num_head_groups > 2
        operands = make_operands(problem, seed, device)
        options = {"deterministic": True, "schedule": "list"}
        check_gradients(*operands, window, (True, False), seed, **options)
    forget_prepared_calls()
