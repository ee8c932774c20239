"""Dense calls in the decode kernel, whose tiles have all query heads of a key/value head."""

from functools import partial
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from pairs import places
from problems import CAUSAL, make_operands, make_problem, poisoned_allocations
from reference import check_attention
from score_problems import Recipe

import fa3
from fa3.calls import attention
from fa3.planning.costs import H100, H200
from fa3.planning.decode import MOST_ROWS, DecodePlan
from fa3.planning.explanation import duration
from fa3.planning.planner import Plan, plan_dense, plan_forward
from fa3.problem import Problem, Window
from fa3.schedules.sequences import LONGEST
from fa3.schedules.stream_k import CtaGroups, StreamK

WINDOWS = (Window(), CAUSAL, Window(100, 30), Window(left=70))

FEW = make_problem(1, 1, 3000, 4, 4, 64)
MANY = make_problem(1, 4096, 4096, 8, 4, 128, CAUSAL)


def attend(problem: Problem, where="cpu", seed: int = 0, **options):
    """Operands, and what they give packed, in memory that is NaN wherever nothing is written."""
    operands = make_operands(problem, seed, where)
    with poisoned_allocations():
        found = fa3.flash_attn_func(
            *operands, window_size=problem.window, pack_gqa=True, return_lse=True, **options
        )
    return operands, found


def how(problem: Problem, **options) -> Plan | DecodePlan:
    """The plan of a call of the problem."""
    prepare = Mock(wraps=attention.prepare_call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "prepare_call", prepare)
        fa3.flash_attn_func(*make_operands(problem), window_size=problem.window, **options)
    prepare.assert_called_once()
    return attention.prepare_call(*prepare.call_args.args).run.args[0]


# ------------------------------------------------------------------------------------ results

SIZES = (1, 1, 4), (1, 700, 8), (5, 3000, 7), (40, 130, 4), (9, 5, 2), (70, 200, 1), (3, 64, 24)
"""Queries, keys, and query heads of a key/value head."""


@pytest.mark.parametrize("window", WINDOWS)
def test_matches_dense_attention(window, where):
    """With the bits of a call on a cache that is full."""
    for *lengths, group in SIZES[WINDOWS.index(window) % 2 :: 2]:
        problem = make_problem(2, *lengths, 2, group, 64, window)
        operands, (out, lse) = attend(problem, where)
        check_attention(out, lse, *operands, window=window)
        cached = fa3.flash_attn_with_kvcache(*operands, window_size=window, return_lse=True)
        assert torch.equal(out, cached[0]) and torch.equal(lse, cached[1])


@pytest.mark.parametrize(
    ("window", "alibi_rank"),
    [(window, 1 + number % 2) for number, window in enumerate(WINDOWS)],
    ids=str,
)
def test_scores_and_sinks(window, alibi_rank, where):
    problem = make_problem(3, 5, 1500, 2, 4, 128, window)
    q, _, _ = make_operands(problem, device=where)
    modifiers = Recipe(30.0, alibi_rank, "q").make(problem, q, steepest=0.05)
    operands, (out, lse) = attend(problem, where, **modifiers)
    check_attention(out, lse, *operands, window=window, **modifiers)


@places("problem", cpu=[FEW], gpu=[make_problem(4, 1, 8192, 8, 4, 128, CAUSAL)])
def test_gradients_are_of_the_forward_kernel(problem, where):
    q, k, v = (x.requires_grad_() for x in make_operands(problem, device=where))
    window = {"window_size": problem.window}
    out = fa3.flash_attn_func(q, k, v, **window)
    with torch.no_grad():
        assert torch.equal(out, fa3.flash_attn_func(q, k, v, **window, pack_gqa=False))
        assert torch.equal(
            fa3.flash_attn_func(q, k, v, **window),
            fa3.flash_attn_func(q, k, v, **window, pack_gqa=True),
        )
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"num_heads_kv": 0}]
)
def test_nothing_to_compute(sizes):
    given = {"batch": 2, "seqlen_q": 3, "seqlen_k": 50, "num_heads_kv": 2, "qhead_per_kvhead": 4}
    problem = make_problem(**(given | sizes))
    _, (out, lse) = attend(problem)
    assert not out.any() and torch.equal(lse, torch.full_like(lse, -torch.inf))


# ----------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("window", [Window(), CAUSAL])
def test_few_queries_on_many_keys_are_packed(gpu, window):
    for seqlen_q, seqlen_k, batch in product((1, 4, 16), (2048, 8192, 65536), (1, 16)):
        problem = make_problem(batch, seqlen_q, seqlen_k, 8, 4, 128, window)
        assert isinstance(plan_dense(problem, gpu), DecodePlan)
        assert isinstance(plan_dense(problem, gpu, False), Plan)


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_many_queries_are_not(gpu):
    for seqlen_q, seqlen_k, batch in product((128, 512, 4096), (512, 8192), (1, 16)):
        problem = make_problem(batch, seqlen_q, seqlen_k, 8, 4, 128, CAUSAL)
        assert plan_dense(problem, gpu) == plan_forward(problem, gpu)
        assert isinstance(plan_dense(problem, gpu, True), DecodePlan)


def test_calls_choose():
    many = make_problem(1, 300, 300, 1, 4, 64)
    assert how(FEW) == DecodePlan.of_dense(FEW, H200)
    for plan in (how(many), how(FEW, pack_gqa=False), how(FEW, schedule="list")):
        assert isinstance(plan, Plan)
    assert isinstance(how(many, pack_gqa=True), DecodePlan)
    assert how(FEW, plan=plan_forward(FEW)) == plan_forward(FEW)
    margin = how(FEW, sm_margin=100)
    assert margin.num_ctas == margin.cut.num_ctas == H200.num_sms - 100


@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_are_cut_and_keys_bounded_as_on_a_cache(window):
    plan = DecodePlan.of_dense(make_problem(2, 3, 900, 2, 4, 64, window), H200)
    assert isinstance(plan.cut, CtaGroups) and plan.cache.is_full
    assert plan.window.left == window.left and plan.window.right >= 0
    (attends,) = plan.launches()
    assert attends.kernel.cache.is_full


def test_many_rows_of_parts_are_another_kernels():
    plan = DecodePlan.of_dense(make_problem(2, 70, 900, 2, 4, 64), H200)
    assert isinstance(plan.cut, StreamK)
    _, merges = plan.launches()
    assert merges.kernel.qhead_per_kvhead == 4


def test_predictions():
    one, several = (
        DecodePlan.of_dense(make_problem(4, n, 8192, 8, 4, 128), H200) for n in (16, 17)
    )
    assert one.is_measured and not several.is_measured
    assert one.predict().bound == "device memory" and several.predict().compute_us > 0
    assert several.predict().us > one.predict().us
    seen = DecodePlan.of_dense(make_problem(4, 1, 8192, 8, 4, 128, Window(1000, 0)), H200)
    assert seen.predict().memory_us < one.predict().memory_us / 7
    assert not DecodePlan.of_dense(make_problem(1, 1, 512, 1, 1, 256), H200).is_measured


@pytest.mark.parametrize(
    ("problem", "share"), [(FEW, "unless pack_gqa is False"), (MANY, "if pack_gqa is True")]
)
def test_plans_tell_what_packing_would_take(problem, share):
    (line,) = (x for x in str(plan_forward(problem).explain()).splitlines() if "Packing" in x)
    us = f"{DecodePlan.of_dense(problem, H200).predict().us:,.1f} us"[:3]
    assert us in line and line.endswith(f"Calls run so {share}.")


def test_a_packed_plan_explains_itself_and_what_it_was_compared_with():
    plan = plan_dense(FEW)
    explanation, forward = plan.explain(), plan_forward(FEW)
    assert "Kernels  decode, tile 64x64" in explanation
    assert f"{duration(plan.predict().us)} predicted" in explanation
    assert all(one.name in explanation for one in forward.considered)
    forced = plan_dense(MANY, pack_gqa=True).explain()
    assert "not measured" in forced and forced.splitlines()[-1].startswith("Choice")


# ------------------------------------------------------------------------------------- refused


def test_what_is_packed_has_no_gradient():
    q, k, v = make_operands(make_problem(1, 2, 50, 1, 2))
    with pytest.raises(NotImplementedError, match=r"^q requires grad, but pack_gqa=True"):
        fa3.flash_attn_func(q.requires_grad_(), k, v, pack_gqa=True)


def test_problems_that_cannot_be_packed():
    longest = make_problem(1, 1, LONGEST + 1, 1, 2)
    with pytest.raises(ValueError, match=rf"^pack_gqa must be .* more than {LONGEST} keys"):
        DecodePlan.of_dense(longest, H200)
    with pytest.raises(ValueError, match=r"^q must give a key/value head at most"):
        DecodePlan.of_dense(make_problem(1, MOST_ROWS // 4 + 1, 8, 1, 4), H200)
    assert DecodePlan.if_possible(longest, H200) is None
    assert "Packing" not in str(plan_forward(make_problem(1, 1, LONGEST + 1, 1, 2)).explain())


# -------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize(("pack_gqa", "has_gradients"), [(True, False), (None, True)])
def test_graphs_pack_as_calls_do(pack_gqa, has_gradients):
    operands = [x.requires_grad_(has_gradients) for x in make_operands(FEW)]

    def run(q, k, v, pack_gqa=pack_gqa):
        return fa3.flash_attn_func(q, k, v, pack_gqa=pack_gqa)

    def compiled(run):
        torch.compiler.reset()
        return torch.compile(run, backend="aot_eager", fullgraph=True)(*operands)

    assert torch.equal(compiled(run), run(*operands))
    if has_gradients:
        with pytest.raises(Exception, match="pack_gqa=True has no gradient"):
            compiled(partial(run, pack_gqa=True))


def test_pieces_are_found_without_lengths(device):
    """In one step of the search, in two, and without looking ahead."""
    for batch in (1, 33, 1500):
        operands, (out, lse) = attend(make_problem(batch, 1, 130, 2, 4, 64), device)
        check_attention(out, lse, *operands)
