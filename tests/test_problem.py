"""What a problem says about its own size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem, windows
from reference import visible

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
