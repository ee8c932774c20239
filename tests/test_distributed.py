"""Attention over the ranks of a group, compared with attention in one process."""

import pytest
import torch
from ranks import NUM_RANKS, Ranks, refusal, seeded

import fa3
from fa3.distributed import contiguous, documents, flash_attn_func, zigzag

SIZES = 1, 2, NUM_RANKS
METHODS = "gather", "ulysses"
HEADS, HEAD_DIM, HEAD_DIM_V = 4, 16, 24

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3), "softcap": 3.0},
    "left": {"window_size": (6, -1), "softmax_scale": 0.3},
    "right": {"window_size": (-1, 4)},
    "sinks": {"causal": True, "sinks": True, "deterministic": True},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def operands_of(batch, seqlen, heads_kv):
    """Return q, k, v, gradients of out and of the log-sum-exp, and sinks."""
    q = seeded(batch, seqlen, HEADS, HEAD_DIM)
    k = seeded(batch, seqlen, heads_kv, HEAD_DIM, seed=1)
    v = seeded(batch, seqlen, heads_kv, HEAD_DIM_V, seed=2)
    d_out = seeded(batch, seqlen, HEADS, HEAD_DIM_V, seed=3)
    d_lse = seeded(batch, HEADS, seqlen, seed=4).float()
    return q, k, v, d_out, d_lse, seeded(HEADS, seed=5).float()


def both_passes(function, q, k, v, d_out, d_lse, sinks, options):
    """Return out, the log-sum-exp, and the gradients of q, k, v and the sinks."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    if options.get("sinks"):
        options = options | {"sinks": inputs[3]}
    else:
        del inputs[3]
    out, lse = function(*inputs[:3], return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (d_out, d_lse))


def compare(group, layout, method, shape, options, knows_length=False):
    """Return the largest difference from one process of each result, over its largest value."""
    operands = operands_of(*shape)
    dims = 1, 2, 1, 1, 1
    expected = list(both_passes(fa3.flash_attn_func, *operands, options))
    for i, (x, dim) in enumerate(zip(expected[:5], dims, strict=True)):
        expected[i] = layout.shard(x, dim, group)
    *split, sinks = operands
    split = [layout.shard(x, dim, group) for x, dim in zip(split, (1, 1, 1, 1, 2), strict=True)]
    named = {"layout": layout, "method": method, "group": group}
    if knows_length:
        named["seqlen"] = shape[1]
    results = list(both_passes(flash_attn_func, *split, sinks, options | named))
    if options.get("sinks"):
        torch.distributed.all_reduce(results[5], group=group)
    for mine, alone in zip(results, expected, strict=True):
        assert mine.shape == alone.shape and mine.dtype == alone.dtype
    return [
        ((mine - alone).abs().max() / alone.abs().max()).item() if alone.numel() else 0.0
        for mine, alone in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", [zigzag, contiguous], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_both_passes_are_as_in_one_process(ranks, size, method, layout, options):
    for errors in ranks.run(size, compare, layout, method, (2, 41, 2), options, size == 2):
        assert max(errors) < 0.02, errors


@pytest.mark.parametrize("seqlen", [1, 5, 16])
@pytest.mark.parametrize("method", METHODS)
def test_any_length_will_do(ranks, method, seqlen):
    for errors in ranks.run(NUM_RANKS, compare, zigzag, method, (1, seqlen, 2), {"causal": True}):
        assert max(errors) < 0.02, errors


@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_may_be_more_than_key_value_heads(ranks, method, heads_kv):
    for errors in ranks.run(NUM_RANKS, compare, zigzag, method, (1, 24, heads_kv), {}):
        assert max(errors) < 0.02, errors


def compare_with_slopes(group, method, options):
    q, k, v, *_ = operands_of(2, 19, 2)
    options = options | {"alibi_slopes": seeded(2, HEADS, seed=6).float().abs()}
    alone = zigzag.shard(fa3.flash_attn_func(q, k, v, **options), group=group)
    q, k, v = (zigzag.shard(x, group=group) for x in (q, k, v))
    over = flash_attn_func(q, k, v, layout=zigzag, method=method, group=group, **options)
    return (over - alone).abs().max().item()


@pytest.mark.parametrize("method, options", [("gather", {"causal": True}), ("ulysses", {})])
def test_slopes_belong_to_heads(ranks, method, options):
    assert max(ranks.run(NUM_RANKS, compare_with_slopes, method, options)) < 0.02


class Everything(fa3.Mask):
    """Hides nothing."""


WRONG = {
    "heads": ({}, "ulysses", "ValueError: rank 0: heads_q must be a multiple of 4 ranks, got 3"),
    "method": ({"method": "ring"}, "", "ValueError: rank 1: method must be 'gather' or"),
    "layout": ({"layout": contiguous}, "", "ValueError: layout must be the same on all ranks"),
    "documents": ({"layout": documents([0, 7])}, "", "NotImplementedError: rank 1: layout must be"),
    "no layout": ({"layout": "zigzag"}, "", "TypeError: rank 1: layout must be one of"),
    "causal": ({"causal": True}, "", "ValueError: causal must be the same on all ranks, got False"),
    "window": ({"window_size": (-2, 0)}, "", "ValueError: rank 1: window_size must be two"),
    "rows": ({"q": (1, 5, 3, 16), "k": (1, 5, 3, 16)}, "", "ValueError: rank 1 must have 4 of 15"),
    "keys": ({"k": (1, 5, 3, 16)}, "", "ValueError: rank 1: k must have 3 rows like q, got 5"),
    "shape": ({"q": (1, 3, 6, 16)}, "", "ValueError: q must be the same on all ranks, got torch"),
    "dropout": ({"dropout_p": 0.5}, "", "NotImplementedError: rank 1: dropout_p is not supported"),
    "mask": ({"mask": Everything()}, "", "NotImplementedError: rank 1: mask is not supported"),
    "slopes": (
        {"alibi_slopes": (3,)}, "", "NotImplementedError: rank 1: alibi_slopes is supported"
    ),
}  # fmt: skip
"""What rank 1 does otherwise, the method of all, and what all say."""


def call_wrongly(group, changed, method):
    rows = zigzag.split(13, group).rows[group.rank()]
    named = {"q": (1, rows, 3, 16), "k": (1, rows, 3, 16)}
    named |= changed if group.rank() == 1 else {}
    named = {name: seeded(*x) if name in "qk" else x for name, x in named.items()}
    if "alibi_slopes" in named:
        named["alibi_slopes"] = torch.ones(named["alibi_slopes"])
    named = {"layout": zigzag, "method": method or "gather", "group": group} | named
    return refusal(flash_attn_func, v=named["k"], **named)


@pytest.mark.parametrize("changed, method, message", WRONG.values(), ids=WRONG)
def test_all_ranks_raise_the_same(ranks, changed, method, message):
    texts = ranks.run(NUM_RANKS, call_wrongly, changed, method)
    assert len(set(texts)) == 1
    assert texts[0].startswith(message)


def call_with_length(group, seqlen, rows):
    q = seeded(1, rows, 4, 16)
    return refusal(flash_attn_func, q, q, q, layout=zigzag, group=group, seqlen=seqlen)


def test_a_wrong_length_is_refused(ranks):
    (text,) = ranks.run(1, call_with_length, 9, 8)
    assert text == "ValueError: q must have 9 of 9 rows by Zigzag(), got 8"
