"""Gradients of packed sequences on the CPU, and what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gradients import sums_in_float64, without_empty_rows
from score_problems import Recipe
from torch.utils.checkpoint import checkpoint
from varlen_gradients import check_varlen_gradients
from varlen_problems import VarlenProblem, make_call, random_problem

import fa3
from fa3 import flash_attn_varlen_func
from fa3.calls import autograd
from fa3.calls.modifiers import Structure
from fa3.calls.varlen import attend_packed
from fa3.calls.varlen_call import RaggedCall
from fa3.planning.gpu import H200
from fa3.planning.joined import PackedSizes
from fa3.planning.ragged import RaggedPlan
from fa3.problem import Window
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import PackedLengths

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2, head_dim=32)
USED = replace(RAGGED, used_q=(70, 9, 0, 100), used_k=(10, -1, 3, 999), spare=5)


def check(problem: VarlenProblem, seed: int = 0, weights=(True, True)) -> dict[str, torch.Tensor]:
    return check_varlen_gradients(problem, make_call(problem, seed), weights, seed)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    problem = random_problem(seed, ("bfloat16", "float16")[seed % 2], family=seed // 2)
    problem = replace(problem, softmax_scale=None, recipe=problem.recipe._replace(score=None))
    check(problem, seed, ((1, 1), (1, 0), (0, 1))[seed % 3])


@pytest.mark.parametrize("problem", [RAGGED, USED], ids=["all", "used"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (10, 3)},
        {"window": (20, -1)},
        {"window": (-1, 5)},
        {"head_dim": 64, "head_dim_v": 40, "causal": True},
        {"dtype": "float16", "recipe": Recipe(softcap=5.0, alibi_rank=2, sinks="q")},
        {"recipe": Recipe(mask="documents", sinks="float32"), "causal": True},
    ],
    ids=str,
)
def test_options(problem, options):
    check(replace(problem, **options))


def test_equal_lengths_have_the_bits_of_a_dense_call():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 4, 50, 2, 64).bfloat16())
    ends = torch.arange(0, 201, 50, dtype=torch.int32)
    d_out, d_lse = torch.randn_like(q), torch.randn(4, 2, 50)
    dense = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    expected = torch.autograd.grad(dense, (q, k, v), (d_out, d_lse))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    found = flash_attn_varlen_func(*packed, ends, ends, 50, 50, causal=True, return_lse=True)
    given = d_out.flatten(0, 1), d_lse.transpose(0, 1).flatten(1)
    assert all(map(torch.equal, torch.autograd.grad(found, (q, k, v), given), expected))


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_only_one_input(name):
    call = make_call(replace(USED, recipe=Recipe(sinks="float32")))
    of_all = check_varlen_gradients(USED, call, (True, False))
    one = {name: call[name].detach().clone().requires_grad_()}
    out = flash_attn_varlen_func(**call | one)
    generator = torch.Generator().manual_seed(0)
    d_out = torch.zeros_like(out)
    for rows in USED.rows:
        part = d_out[rows.q.start : rows.q.stop]
        part.copy_(torch.randn(part.shape, generator=generator))
        torch.randn(part.shape[1], len(part), generator=generator)
    assert torch.equal(torch.autograd.grad(out, one[name], d_out)[0], of_all[name])


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


def test_part_of_a_model():
    """Under a checkpoint, into views, with a gradient that is expanded from one number."""
    packed = torch.randn(120, 3, 2, 64).half().requires_grad_()
    ends = torch.tensor([0, 50, 120], dtype=torch.int32)

    def run(packed):
        return flash_attn_varlen_func(*packed.unbind(1), ends, ends, 70, 70, causal=True)

    expected = torch.autograd.grad(run(packed), packed, torch.ones(120, 2, 64).half())
    found = torch.autograd.grad(checkpoint(run, packed, use_reentrant=False).sum(), packed)
    assert torch.equal(*expected, *found)


def test_what_is_kept():
    call = make_call(RAGGED)
    kept = []
    call["q"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        flash_attn_varlen_func(**call)
    integers = [call["cu_seqlens_q"].shape, call["cu_seqlens_k"].shape]
    operands = [call[name].shape for name in ("q", "k", "v")]
    assert kept == [*integers, *operands, (201, 4, 64), (4, 201)]


def test_what_is_kept_with_dropout():
    """The seed beside it, and no mask."""
    call = make_call(RAGGED)
    kept = []
    call["q"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = flash_attn_varlen_func(**call, dropout_p=0.3, return_lse=True)
    seed, *tensors = kept
    assert seed.shape == (1,) and seed.dtype == torch.int64
    names = "cu_seqlens_q", "cu_seqlens_k", "q", "k", "v"
    expected = *(call[name] for name in names), out, lse
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in expected]


@pytest.mark.parametrize(
    ("window", "dropout"),
    [(Window(), None), (Window(right=0), Dropout(torch.tensor([7]), 0.4)), (Window(2, 1), None)],
    ids=["", "causal, dropout", "window"],
)
def test_gradcheck(window, dropout):
    """Of every element. In float64 nothing is rounded to 16 bits, nor to 32."""
    inputs = [2 * torch.randn(7, heads, 8).double() for heads in (2, 1, 1)]
    ends = torch.tensor([0, 2, 2, 6, 7], dtype=torch.int32)
    used = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    lengths = PackedLengths(ends, ends, used, None)
    structure = Structure(has_dropout=dropout is not None)
    spec = structure.spec(torch.bfloat16, 8, 8, window)
    plan = RaggedPlan(spec, has_used_q=True, has_used_k=False, gpu=H200)
    call = RaggedCall(plan, structure, window, None, None, None)
    sizes = PackedSizes(4, 2, 7, 7, 4, 4)
    run_packed = call, lengths, sizes, 0.25, dropout, None, False
    attend = partial(attend_packed, run_packed)
    backward = autograd.BackwardCall((spec, window), (4, 4), 0.25, False, 1)
    given = autograd.DifferentiableCall(attend, backward, lengths, dropout, True)
    is_used = torch.tensor([row in (0, 1, 2, 3, 4, 6) for row in range(7)])

    def run(*tensors):
        out, lse = autograd.attend_differentiably(given, *tensors)
        return without_empty_rows(out[is_used], lse[:, is_used])

    with sums_in_float64():
        assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_refusals():
    call = make_call(RAGGED)
    call["k"].requires_grad_()
    out = flash_attn_varlen_func(**call)
    (dk,) = torch.autograd.grad(out.float().square().sum(), call["k"], create_graph=True)
    with pytest.raises(
        NotImplementedError, match="flash_attn_varlen_func has no second derivative"
    ):
        dk.float().sum().backward()
    with pytest.raises(ValueError, match=r"^k requires grad, so out must be None"):
        flash_attn_varlen_func(**call, out=torch.empty_like(out))
    recipe = Recipe(score="relative")
    call = make_call(replace(RAGGED, recipe=recipe))
    call["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^v requires grad, but score has no derivative"):
        flash_attn_varlen_func(**call)
    call = make_call(replace(RAGGED, recipe=Recipe(alibi_rank=1)))
    call["alibi_slopes"].requires_grad_()
    with pytest.raises(ValueError, match=r"^alibi_slopes requires grad, but would get no"):
        flash_attn_varlen_func(**call)
