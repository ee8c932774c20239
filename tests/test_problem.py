"""What a problem says about its own size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_operands, make_problem, windows
from reference import visible

import fa3
from fa3.planning.gpu import H100
from fa3.planning.planner import plan_dense
from fa3.problem import Window

LENGTH = st.integers(0, 70)


@given(LENGTH, LENGTH, windows(largest=90))
def test_visible_pairs_counts_what_the_mask_lets_through(seqlen_q, seqlen_k, window):
    problem = make_problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=window)
    assert problem.visible_pairs == int(visible(seqlen_q, seqlen_k, window).sum())


@given(LENGTH, LENGTH, windows(largest=90))
def test_a_tightened_window_hides_the_same_keys(seqlen_q, seqlen_k, window):
    tight = window.tighten(seqlen_q, seqlen_k)
    assert (visible(seqlen_q, seqlen_k, tight) == visible(seqlen_q, seqlen_k, window)).all()
    assert tight.tighten(seqlen_q, seqlen_k) == tight
    assert tight.left < max(seqlen_k - 1, 0) and tight.right < max(seqlen_q - 1, 1)
    assert (tight.right == 0) == (window.right == 0)


def test_flops_of_the_textbook_cases():
    full = make_problem(batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_kv=8, head_dim=128)
    assert full.flops == 4 * 2 * 8 * 1024 * 1024 * 128
    causal = make_problem(
        batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_kv=8, head_dim=128, window=Window(right=0)
    )
    assert causal.flops == 4 * 2 * 8 * (1024 * 1025 // 2) * 128


def test_every_query_head_costs_but_key_heads_are_read_once():
    mha = make_problem(seqlen_q=256, seqlen_k=512, num_heads_kv=8)
    gqa = make_problem(seqlen_q=256, seqlen_k=512, num_heads_kv=2, qhead_per_kvhead=4)
    assert gqa.num_heads_q == mha.num_heads_q
    assert gqa.flops == mha.flops
    key_and_value_bytes = 2 * 512 * (64 + 64)
    assert mha.bytes - gqa.bytes == 6 * key_and_value_bytes


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_an_empty_problem_costs_no_flops(sizes):
    assert make_problem(**sizes).flops == 0


def test_problems_are_values():
    assert make_problem(seqlen_q=7) == make_problem(seqlen_q=7)
    assert len({make_problem(), make_problem(), make_problem(batch=2)}) == 2


# ---------------------------------------------------------------------------------- Problem.of


def of_shapes(problem: fa3.Problem, **options) -> fa3.Problem:
    """The same problem, from the shapes of its tensors."""
    return fa3.Problem.of(*(tuple(x.shape) for x in make_operands(problem)), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, Window()),
        ({"causal": True}, Window(right=0)),
        ({"window_size": (10, 3)}, Window(10, 3)),
        ({"window_size": [10, 3], "causal": True}, Window(10, 0)),
        ({"window_size": (1000, 1000)}, Window()),
    ],
)
def test_a_problem_of_tensors_and_of_shapes(dtype, options, window):
    given = {"batch": 2, "seqlen_q": 70, "seqlen_k": 90, "num_heads_kv": 2, "qhead_per_kvhead": 2}
    expected = make_problem(**given, head_dim=64, head_dim_v=96, dtype=dtype, window=window)
    assert fa3.Problem.of(*make_operands(expected), **options) == expected
    assert of_shapes(expected, dtype=dtype, **options) == expected


def test_scores_sinks_and_dropout_are_those_of_the_call():
    """A plan that was made for the problem is taken by the call."""
    plain = make_problem(1, 70, 90, 2, 2, 64)
    q, k, v = make_operands(plain)
    options = {
        "causal": True, "softcap": 20.0, "sinks": torch.zeros(4), "alibi_slopes": torch.ones(4),
    }  # fmt: skip
    problem = fa3.Problem.of(q, k, v, **options)
    assert problem == of_shapes(plain, **options) != fa3.Problem.of(q, k, v, causal=True)
    out = fa3.flash_attn_func(q, k, v, plan=fa3.plan_forward(problem), **options)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, pack_gqa=False, **options))
    with pytest.raises(ValueError, match="plan was made for"):
        fa3.flash_attn_func(q, k, v, causal=True, plan=fa3.plan_forward(problem))
    assert fa3.Problem.of(q, k, v, dropout_p=0.1).spec.has_dropout


def test_gpus_have_names():
    problem = fa3.Problem.of(*[(1, 70, 4, 64)] * 3)
    for plan in (fa3.plan_forward, plan_dense):
        assert plan(problem, gpu="H100") == plan(problem, H100)
        assert plan(problem, gpu="H100").gpu is H100
