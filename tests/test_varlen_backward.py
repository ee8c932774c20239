"""Gradients of packed sequences against float64 and against dense calls, and what is refused.

On a GPU memory is NaN wherever a kernel writes nothing.
"""

import random
from dataclasses import replace

import pytest
import torch
from gpu_checks import captured
from gradients import check_random_gradients, check_varlen_gradients
from score_problems import Recipe
from varlen_problems import WRONG_ENDS, VarlenProblem, check_call, integers, make_call

import fa3
from fa3 import flash_attn_varlen_func
from fa3.planning.backward import most_keys_unzeroed
from fa3.problem import Window

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2, head_dim=32)


def check(problem: VarlenProblem, where="cpu", weights=(True, False), seed: int = 0) -> dict:
    return check_varlen_gradients(problem, make_call(problem, seed, where), weights, seed)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    """Those on a GPU are in test_varlen."""
    check_random_gradients(seed, ("bfloat16", "float16")[seed % 2], seed // 2, 150, "cpu")


@pytest.mark.parametrize(
    "problem",
    [
        VarlenProblem((), (), recipe=Recipe(sinks="q")),
        VarlenProblem((), (), spare=9, recipe=Recipe(sinks="q")),
        VarlenProblem((0, 0), (3, 0), recipe=Recipe(sinks="q")),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(9, 3, 99), recipe=Recipe(sinks="q")),
        VarlenProblem((20, 4), (5, 6), used_k=(0, 0)),
    ],
    ids=str,
)
def test_nothing_to_compute(problem):
    call = make_call(problem)
    leaves = {
        name: call[name].requires_grad_()
        for name in ("q", "k", "v", "sinks")
        if call[name] is not None
    }
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    wanted = list(leaves.values())
    found = torch.autograd.grad((out, lse), wanted, (out, torch.ones_like(lse)))
    assert all(x.shape == dx.shape for x, dx in zip(wanted, found, strict=True))
    assert not any(dx.any() for dx in found[:3])
    if "sinks" in leaves:
        # The log-sum-exp of a row without keys is its head's sink.
        assert found[3].tolist() == [sum(len(rows.q) for rows in problem.rows)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_what_is_kept(dropout_p):
    """What the call was given and gave, and no copy; with dropout its seed, and no mask."""
    call = make_call(RAGGED)
    kept = []
    call["q"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = flash_attn_varlen_func(**call, dropout_p=dropout_p, return_lse=True)
    if dropout_p:
        seed = kept.pop(0)
        assert seed.shape == (1,) and seed.dtype == torch.int64
    names = "cu_seqlens_q", "cu_seqlens_k", "q", "k", "v"
    expected = *(call[name] for name in names), *results
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in expected]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 20), (70, -1)])
def test_lengths_around_tiles(window, head_dim, device):
    """Also around the lengths from which on sums begin with zeros."""
    keys = most_keys_unzeroed(Window(*window))
    tiles = (127, 128, 129, 1, 0, 255, 64, 300, 2, 192, 63, 65)
    around = (keys, keys + 1, 1, keys - 1, 0, keys + 64)
    unlike = (keys + 1, 40, 700, 1, keys, 300)
    for lengths in ((tiles, tiles), (tiles, tiles[::-1]), (around, around), (around, unlike)):
        problem = VarlenProblem(*lengths, None, None, 0, 2, 2, head_dim, window=window)
        check(problem, device)
        check_call(problem, device)
    if window == (-1, 0):
        check(VarlenProblem(tiles, tiles, head_dim=head_dim, window=(-1, 100)), device)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_rows_that_are_not_used(causal, head_dim, device):
    problem = VarlenProblem(
        (70, 9, 300, 130, 500), (200, 50, 333, 64, 700), (70, 0, 150, 999, 64), (0, 50, 3, 64, 100),
        spare=300, causal=causal, heads_kv=2, head_dim=head_dim,
    )  # fmt: skip
    check(problem, device, (True, True))
    check(replace(problem, used_q=None), device)
    check(replace(problem, used_k=None), device)
    check(replace(problem, used_q=None, used_k=None), device)


def test_more_heads_than_a_grid_has_rows(device):
    """CUDA takes 65,535 CTAs in a grid's second dimension."""
    torch.manual_seed(0)
    heads, ends = 70_000, integers(0, 3, 5, device=device)
    *leaves, d_out = (torch.randn(5, heads, 8, device=device).bfloat16() for _ in range(4))
    for leaf in leaves:
        leaf.requires_grad_()

    def gradients(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        part = [leaf[:, begin:end] for leaf in leaves]
        out = fa3.flash_attn_varlen_func(*part, ends, ends, 3, 3, causal=True)
        return torch.autograd.grad(out, leaves, d_out[:, begin:end])

    found = gradients(0, heads)
    for begin, end in ((0, 40_000), (40_000, heads)):
        for all_heads, some in zip(found, gradients(begin, end), strict=True):
            assert torch.equal(all_heads[:, begin:end], some[:, begin:end])


def test_a_graph_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    call, other = (make_call(problem, seed, device) for seed, problem in enumerate(problems))
    call["max_seqlen_q"] = call["max_seqlen_k"] = 305
    leaves = [call[name].requires_grad_() for name in "qkv"]
    d_out = torch.randn_like(call["q"])

    def run(call: dict, inputs: list[torch.Tensor]):
        return torch.autograd.grad(fa3.flash_attn_varlen_func(**call), inputs, d_out)

    with torch.cuda.stream(torch.cuda.Stream()):
        run(call, leaves)
    graph, found = captured(lambda: run(call, leaves))
    for values in (dict(call), other):
        with torch.no_grad():
            for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
                call[name].copy_(values[name].clone())
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        alone = {name: values[name].detach().clone().requires_grad_() for name in "qkv"}
        expected = run(values | alone, list(alone.values()))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_wrong_lengths_end(device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    leaves = [call[name].requires_grad_() for name in "qkv"]
    for ends in WRONG_ENDS:
        call["cu_seqlens_q"] = call["cu_seqlens_k"] = integers(*ends, device=device)
        out = fa3.flash_attn_varlen_func(**call)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("head_dim", "window"),
    [
        *((128, window) for window in ((-1, -1), (-1, 0), (40, 20), (70, -1))),
        *((64, (-1, 0)), (64, (40, 20)), (256, (-1, 0)), (256, (-1, -1))),
    ],
)
def test_deterministic_gradients_have_the_same_bits_every_time(window, head_dim, device):
    """Keys without queries, and rows that are not used, add nothing in any order."""
    draw = random.Random(0)
    lengths = (1500, 0, 1, *(draw.randint(0, 600) for _ in range(40)), 3000, 127, 128)
    other = (1000, 300, 0, *(draw.randint(0, 600) for _ in range(40)), 2500, 0, 129)
    problem = VarlenProblem(
        lengths, other, None, tuple(count * 2 // 3 for count in other), 200, heads_kv=2, group=2,
        window=window, head_dim=head_dim,
    )  # fmt: skip
    call = make_call(problem, 0, device)
    check_varlen_gradients(problem, call | {"deterministic": True}, (True, False))
    leaves = [call[name].detach().requires_grad_() for name in "qkv"]
    call = call | dict(zip("qkv", leaves, strict=True)) | {"deterministic": True}
    out = fa3.flash_attn_varlen_func(**call)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    for _ in range(200):
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(map(torch.equal, again, first))
