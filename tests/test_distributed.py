"""Attention over the ranks of a group, compared with attention in one process.

On the CPU ranks are processes with gloo; on GPUs, of which tests need two, with NCCL.
"""

import ctypes
import functools
import math
import os
import time
from bisect import bisect_right
from contextlib import ExitStack
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import NUM_RANKS, SECONDS, Ranks, device_of, refusal, seeded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

import fa3
from benchmarks import bench_distributed as bench
from docs.examples import context_parallel
from fa3.calls.options import DENSE, PACKED, Options
from fa3.distributed import (
    SequenceLayout,
    attention,
    contiguous,
    documents,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    plan,
    transfer,
    zigzag,
)
from fa3.distributed.alone import KeyPart
from fa3.distributed.steps import pairs_of, steps_of
from fa3.problem import Window

SIZES = 1, 2, NUM_RANKS
METHODS = "gather", "ring", "ulysses"
HEADS = 4
HEAD_DIMS = {"cpu": (16, 24), "cuda": (64, 64)}
"""Of K and of V; on GPUs those that other tests have, so that few kernels compile."""

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "none later": {"window_size": (-1, 0)},
    "window": {"window_size": (5, 3), "softcap": 3.0},
    "left": {"window_size": (6, -1), "softmax_scale": 0.3},
    "right": {"window_size": (-1, 4)},
    "sinks": {"causal": True, "sinks": True, "deterministic": True},
}
DENSE_CALLS = list(product(METHODS, OPTIONS))

LENGTHS = documents([0, 1, 1, 18, 20, 41])
PACKED_METHODS = [(LENGTHS, method) for method in METHODS]
PACKED_OPTIONS = OPTIONS | {"short": {"window_size": (4, 0), "sinks": True}}
PACKED_CALLS = list(product(METHODS, PACKED_OPTIONS))
FEW_KERNELS = "causal", "window", "sinks"
"""Options that are enough on GPUs, where each is several kernels to compile."""


def cases(layouts, calls):
    """Parametrize a test with all calls on groups of the CPU in turn, and with few on two GPUs."""
    groups = list(product(SIZES[:0:-1], layouts))
    rows = [("cpu", *groups[i % len(groups)], *one) for i, one in enumerate(calls)]
    rows += [("cpu", 1, layouts[0], *one) for one in calls if one[1] == "sinks"]
    rows += [("cuda", 2, layouts[0], *one) for one in calls if one[1] in FEW_KERNELS]
    marked = [
        pytest.param(
            *row,
            id="-".join(map(str, (*row[:2], type(row[2]).__name__, *row[3:]))),
            marks=pytest.mark.gpu if row[0] == "cuda" else (),
        )
        for row in rows
    ]
    return pytest.mark.parametrize("ranks, size, layout, method, name", marked, indirect=["ranks"])


def most_gpus() -> int:
    """Return how many GPUs the tests use; skip them unless there are two."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, torch sees {count}")
    return 4 if count >= 4 else 2


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request, tmp_path_factory):
    count, backend = (NUM_RANKS, "gloo") if request.param == "cpu" else (most_gpus(), "nccl")
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), count, backend)
    yield ranks
    ranks.stop()


ON_CPU = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)
ON_GPUS = pytest.mark.parametrize(
    "ranks", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def operands_of(batch, seqlen, heads_kv, heads=HEADS, head_dims=None, device="cpu"):
    """Return q, k, v, gradients of out and of the log-sum-exp, and sinks."""
    head_dim, head_dim_v = head_dims or HEAD_DIMS[torch.device(device).type]
    q = seeded(batch, seqlen, heads, head_dim)
    k = seeded(batch, seqlen, heads_kv, head_dim, seed=1)
    v = seeded(batch, seqlen, heads_kv, head_dim_v, seed=2)
    d_out = seeded(batch, seqlen, heads, head_dim_v, seed=3)
    d_lse = seeded(batch, heads, seqlen, seed=4).float()
    return [x.to(device) for x in (q, k, v, d_out, d_lse, seeded(heads, seed=5).float())]


def both_passes(function, q, k, v, d_out, d_lse, sinks, options):
    """Return out, the log-sum-exp, and the gradients of q, k, v and the sinks."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    if options.get("sinks"):
        options = options | {"sinks": inputs[3]}
    else:
        del inputs[3]
    out, lse = function(*inputs[:3], return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), inputs, (d_out, d_lse))


@functools.cache
def in_one_process(device, shape, options, ends):
    """Return operands, and the results of one process with options, pairs of names and values.
    With ends, of packed sequences."""
    operands = operands_of(*shape, device=device)
    if ends == (0,):
        return operands, both_passes(fa3.flash_attn_func, *operands, dict(options))
    operands = [x[0] for x in operands[:5]] + operands[5:]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    named = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"} | {f"max_seqlen_{x}": 41 for x in "qk"}
    return operands, both_passes(fa3.flash_attn_varlen_func, *operands, dict(options) | named)


@functools.cache
def mesh_of_two(device):
    """Return a mesh of 2 x 2 ranks."""
    return DeviceMesh(device, torch.arange(4).view(2, 2), mesh_dim_names=("keys", "heads"))


def compare(group, layout, method, shape, options, knows_length=False, in_mesh=False):
    """Return the largest difference from one process of each result, over its largest value."""
    ends = layout.cu_seqlens
    operands, results = in_one_process(device_of(group), shape, tuple(options.items()), ends)
    dim, over_ranks = (1, flash_attn_func) if ends == (0,) else (0, flash_attn_varlen_func)
    expected = list(results)
    for i, (x, at) in enumerate(zip(expected[:5], (0, 1, 0, 0, 0), strict=True)):
        expected[i] = layout.shard(x, dim + at, group)
    *split, sinks = operands
    split = [layout.shard(x, dim + at, group) for x, at in zip(split, (0, 0, 0, 0, 1), strict=True)]
    over = mesh_of_two(device_of(group).type) if in_mesh else group
    named = {"layout": layout, "method": method, "group": over}
    if knows_length:
        named["seqlen"] = shape[1]
    results = list(both_passes(over_ranks, *split, sinks, options | named))
    if options.get("sinks"):
        torch.distributed.all_reduce(results[5], group=group)
    for mine, alone in zip(results, expected, strict=True):
        assert mine.shape == alone.shape and mine.dtype == alone.dtype
    return [
        ((mine - alone).abs().max() / alone.abs().max()).item() if alone.numel() else 0.0
        for mine, alone in zip(results, expected, strict=True)
    ]


@cases([zigzag, contiguous], DENSE_CALLS)
def test_both_passes_are_as_in_one_process(ranks, size, layout, method, name):
    for errors in ranks.run(size, compare, layout, method, (2, 41, 2), OPTIONS[name], size == 2):
        assert max(errors) < 0.02, errors


@cases([LENGTHS], PACKED_CALLS)
def test_documents_are_as_in_one_process(ranks, size, layout, method, name):
    options = PACKED_OPTIONS[name]
    for errors in ranks.run(size, compare, layout, method, (1, 41, 2), options, size == 2):
        assert max(errors) < 0.02, errors


IN_MESH = [
    (zigzag, "gather", "causal"),
    (zigzag, "ring", "causal"),
    (contiguous, "gather", "window"),
    (contiguous, "ring", "sinks"),
    (LENGTHS, "gather", "short"),
    (LENGTHS, "ring", "causal"),
]


@ON_CPU
@pytest.mark.parametrize("layout, method, name", IN_MESH)
def test_two_methods_in_a_mesh(ranks, layout, method, name):
    """One key/value head, so that ranks have copies of it."""
    options = PACKED_OPTIONS[name]
    for errors in ranks.run(4, compare, layout, method, (1, 41, 1), options, True, True):
        assert max(errors) < 0.02, errors


def call_in_mesh_wrongly(group):
    """Return the refusals of a method, of heads that do not divide, and of a mesh without names."""
    q, three = seeded(1, 8, 4, 16), seeded(1, 8, 3, 16)
    named = {"layout": zigzag, "group": mesh_of_two("cpu"), "seqlen": 32}
    nameless = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    return [
        refusal(flash_attn_func, q, q, q, method="ulysses", **named),
        refusal(flash_attn_func, three, three, three, **named),
        refusal(flash_attn_func, q, q, q, **named | {"group": nameless}),
    ]


@ON_CPU
def test_what_a_mesh_refuses(ranks):
    starts = "method must be gather, ring or auto", "heads_q must be a multiple of 2", "group must"
    for texts in ranks.run(4, call_in_mesh_wrongly):
        for text, start in zip(texts, starts, strict=True):
            assert text.startswith(f"ValueError: {start}"), text


@pytest.mark.timeout(120)
def test_eight_ranks(tmp_path):
    """More than key/value heads, and chunks of two or three rows."""
    ranks = Ranks(tmp_path, 8)
    calls = product((zigzag, LENGTHS), METHODS)
    try:
        for layout, method in calls:
            shape = (1, 41, 2, 8)
            for errors in ranks.run(8, compare, layout, method, shape, {"causal": True}):
                assert max(errors) < 0.02, (method, errors)
    finally:
        ranks.stop()


def compare_with_float64(group, method, size):
    """Return rms errors of out, dQ, dK and dV against float64, over one process's errors."""
    *inputs, d_out, _, _ = operands_of(1, size, 4, 8, (64, 64), device_of(group))

    def results(function, tensors, gradient, **options):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    def exact(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    right = results(exact, [x.double() for x in inputs], d_out.double())
    alone = results(fa3.flash_attn_func, inputs, d_out, causal=True)
    mine, gradient = ([zigzag.shard(x, group=group) for x in xs] for xs in (inputs, [d_out]))
    named = {"layout": zigzag, "method": method, "group": group, "causal": True}
    ours = results(flash_attn_func, mine, *gradient, **named)
    ratios = []
    for one, other, true in zip(ours, alone, right, strict=True):
        square = (one - zigzag.shard(true, group=group)).square().sum()
        torch.distributed.all_reduce(square, group=group)
        ratios.append((square / (other - true).square().sum()).sqrt().item())
    return ratios


@pytest.mark.parametrize("method, most", [("gather", 1.02), ("ulysses", 1.02), ("ring", 1.05)])
def test_errors_are_a_process_s(ranks, method, most):
    seqlen = 512 if ranks.backend == "gloo" else 2048
    ratios = ranks.run(ranks.count, compare_with_float64, method, seqlen)[0]
    assert max(ratios[:2]) <= most and max(ratios[2:]) <= 1.05, ratios


@pytest.mark.parametrize(
    "method, seqlen", [("gather", 1), ("ring", 5), ("ulysses", 1), ("gather", 5), ("ring", 1)]
)
def test_any_length_will_do(ranks, method, seqlen):
    for errors in ranks.run(ranks.count, compare, zigzag, method, (1, seqlen, 2), {"causal": True}):
        assert max(errors) < 0.02, errors


@pytest.mark.parametrize("method, heads_kv", [("gather", 1), ("ring", 4), ("ulysses", 1)])
def test_ranks_may_be_more_than_key_value_heads(ranks, method, heads_kv):
    for errors in ranks.run(ranks.count, compare, zigzag, method, (1, 24, heads_kv), {}):
        assert max(errors) < 0.02, errors


def compare_with_slopes(group, method, options):
    device = device_of(group)
    q, k, v, *_ = operands_of(2, 19, 2, device=device)
    options = options | {"alibi_slopes": seeded(2, HEADS, seed=6).float().abs().to(device)}
    alone = zigzag.shard(fa3.flash_attn_func(q, k, v, **options), group=group)
    q, k, v = (zigzag.shard(x, group=group) for x in (q, k, v))
    over = flash_attn_func(q, k, v, layout=zigzag, method=method, group=group, **options)
    return (over - alone).abs().max().item()


@pytest.mark.parametrize("method, options", [("gather", {"causal": True}), ("ulysses", {})])
def test_slopes_belong_to_heads(ranks, method, options):
    assert max(ranks.run(ranks.count, compare_with_slopes, method, options)) < 0.02


def compare_documents_with_slopes(group, method, cu_seqlens):
    """Return the largest error for documents that each have slopes; some are empty."""
    layout, named, seqlen = documents(cu_seqlens), {"causal": True}, cu_seqlens[-1]
    named["alibi_slopes"] = seeded(len(cu_seqlens) - 1, HEADS, seed=6).float().abs()
    whole = [x[0] for x in operands_of(1, seqlen, 2)[:3]]
    ends = torch.tensor(cu_seqlens, dtype=torch.int32)
    alone = fa3.flash_attn_varlen_func(*whole, ends, ends, seqlen, seqlen, **named)
    mine = [layout.shard(x, 0, group) for x in whole]
    with torch.device("meta"):  # whatever the default device is
        over = flash_attn_varlen_func(*mine, layout=layout, method=method, group=group, **named)
    errors = over - layout.shard(alone, 0, group)
    return errors.abs().max().item() if errors.numel() else 0.0


@ON_CPU
@pytest.mark.parametrize("size, cu_seqlens", [(2, (0, 5, 5, 6, 30, 41)), (4, (0, 2, 2)), (2, (0,))])
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_slopes_belong_to_documents(ranks, method, size, cu_seqlens):
    """Of four ranks, two have no rows; there may be no documents."""
    assert max(ranks.run(size, compare_documents_with_slopes, method, cu_seqlens)) < 0.02


def decode(group):
    """Return the largest errors of out and the log-sum-exp; the last rank may have no keys."""
    device = device_of(group)
    q, sinks = seeded(3, 1, HEADS, 64).to(device), seeded(HEADS, seed=5).float().to(device)
    k, v = (seeded(3, 40, 2, dim, seed=dim).to(device) for dim in (64, 48))
    appended = seeded(3, 1, 2, 64, seed=7).to(device), seeded(3, 1, 2, 48, seed=8).to(device)
    lengths = torch.tensor([40, 17, 30], dtype=torch.int32, device=device)
    options = {"sinks": sinks, "softcap": 5.0, "causal": True, "return_lse": True}
    whole = [torch.cat((x, x[:, :1]), 1) for x in (k, v)]
    expected = fa3.flash_attn_with_kvcache(q, *whole, *appended, cache_seqlens=lengths, **options)
    # The rank that has the last keys of most sequences gets all new tokens.
    rank, room = group.rank(), 40 // group.size() + 1
    starts, own = rank * (room - 1), [x.new_zeros(3, room, *x.shape[2:]) for x in (k, v)]
    for part, x in zip(own, (k, v), strict=True):
        part[:, : room - 1] = x[:, starts : starts + room - 1]
    held = (lengths - starts).clamp(0, room - 1)
    new = appended if rank == 0 else ()
    results = flash_attn_with_kvcache(q, *own, *new, cache_seqlens=held, group=group, **options)
    return [(a - b).abs().max().item() for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("size", SIZES[1:])
def test_keys_of_a_cache_may_be_split(ranks, size):
    for errors in ranks.run(size, decode):
        assert errors[0] < 0.02 and errors[1] < 0.01, errors


def decode_wrongly(group):
    q, cache = seeded(1, 2, 2, 16), seeded(1, 8, 2, 16)
    nothing = [x[:0] for x in (q, cache, cache)]
    assert flash_attn_with_kvcache(*nothing, group=group).shape == (0, 2, 2, 16)
    wrong = {"causal": True}, {"window_size": (4, -1)}, {"s_aux": torch.ones(2)}
    return [refusal(flash_attn_with_kvcache, q, cache, cache, group=group, **x) for x in wrong]


@ON_CPU
def test_what_a_split_cache_refuses(ranks):
    (texts,) = ranks.run(1, decode_wrongly)
    for text, name in zip(texts, ("causal and", "causal and", "s_aux"), strict=True):
        assert text.startswith(f"NotImplementedError: {name}")


BRIEF = torch.ones(1, 3, 3, 16, dtype=torch.bfloat16)


class Everything(fa3.Mask):
    """Hides nothing."""


WRONG = {
    "heads": ({}, "ulysses", "ValueError: rank 0: heads_q must be a multiple of 4 ranks, got 3"),
    "method": ({"method": "star"}, "", "ValueError: rank 1: method must be one of"),
    "layout": ({"layout": contiguous}, "", "ValueError: layout must be the same on all ranks"),
    "documents": ({"layout": documents([0, 7])}, "", "ValueError: rank 1: layout must be"),
    "no layout": ({"layout": "zigzag"}, "", "TypeError: rank 1: layout must be fa3.distributed"),
    "causal": ({"causal": True}, "", "ValueError: causal must be the same on all ranks, got False"),
    "window": ({"window_size": (-2, 0)}, "", "ValueError: rank 1: window_size must be two"),
    "rows": ({"q": (1, 5, 3, 16), "k": (1, 5, 3, 16)}, "", "ValueError: rank 1 must have 4 of 15"),
    "keys": ({"k": (1, 5, 3, 16)}, "", "ValueError: rank 1: k must have shape (1, 3, 3, 16)"),
    "values": ({"v": BRIEF[:, :2]}, "", "ValueError: rank 1: v must have shape (1, 3, 3, 16)"),
    "rank": ({"v": BRIEF[0]}, "", "ValueError: rank 1: v must have 4 dimensions, got (3, 3, 16)"),
    "value heads": ({"v": BRIEF[:, :, :2]}, "", "ValueError: rank 1: v must have shape (1, 3, "),
    "strides": ({"q": BRIEF.mT.contiguous().mT}, "", "ValueError: rank 1: q must be contiguous"),
    "seqlen": ({"seqlen": "13"}, "", "TypeError: rank 1: seqlen must be an integer, got '13'"),
    "short": ({"seqlen": 5}, "", "ValueError: seqlen must be the same on all ranks, got None on"),
    "shape": ({"q": (1, 3, 6, 16)}, "", "ValueError: q must be the same on all ranks, got torch"),
    "ring slopes": (
        {"alibi_slopes": (3,)}, "ring", "NotImplementedError: rank 1: alibi_slopes is not supp"
    ),
    "dropout": ({"dropout_p": 0.5}, "", "NotImplementedError: rank 1: dropout_p is not supported"),
    "mask": ({"mask": Everything()}, "", "NotImplementedError: rank 1: mask is not supported"),
    "slopes": (
        {"alibi_slopes": (3,)}, "", "NotImplementedError: rank 1: alibi_slopes is not supp"
    ),
    "slopes of 5 heads": (
        {"alibi_slopes": (5,)}, "", "ValueError: rank 1: alibi_slopes must have shape (3,) to go"
    ),
    "sinks": ({"sinks": torch.ones(2)}, "", "ValueError: rank 1: sinks must have shape (3,) to go"),
    "float32": ({"q": torch.ones(1, 3, 3, 16)}, "", "TypeError: rank 1: q must be torch.bf"),
    "meta": ({"q": BRIEF.to("meta")}, "", "ValueError: rank 1: q must be a CPU or CUDA tensor"),
    "dtype": ({"v": torch.ones(1, 3, 3, 16).half()}, "", "TypeError: rank 1: v must be torch.bfl"),
    "scale": ({"softmax_scale": [1.0]}, "", "TypeError: rank 1: softmax_scale must be a float, "),
    "lse": ({"return_lse": 3}, "", "TypeError: rank 1: return_lse must be a bool, got 3"),
}  # fmt: skip
"""What rank 1 does otherwise, the method of all, and what all say."""


def call_wrongly(group, changed, method):
    rows = sum(map(len, zigzag.chunks(13, group.size())[group.rank()]))
    named = {"q": (1, rows, 3, 16), "k": (1, rows, 3, 16)}
    named |= changed if group.rank() == 1 else {}
    device = device_of(group)
    named = {name: seeded(*x).to(device) if name in "qk" and type(x) is tuple else x
             for name, x in named.items()}  # fmt: skip
    if "alibi_slopes" in named:
        named["alibi_slopes"] = torch.ones(named["alibi_slopes"], device=device)
    named = {"layout": zigzag, "method": method or "gather", "group": group} | named
    return refusal(flash_attn_func, **({"v": named["k"]} | named))


@ON_CPU
@pytest.mark.parametrize("changed, method, message", WRONG.values(), ids=WRONG)
def test_all_ranks_raise_the_same(ranks, changed, method, message):
    texts = ranks.run(ranks.count, call_wrongly, changed, method)
    assert len(set(texts)) == 1
    assert texts[0].startswith(message)


def call_with_length_known(group):
    """Return how many messages about arguments a call sends whose length is known."""
    q, asked = seeded(1, 6, 4, 16), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_object", lambda *x: asked.append(x))
        call = partial(flash_attn_func, q, q, q, layout=zigzag, group=group, seqlen=12)
        for _ in range(3):
            call(causal=True, window_size=(1, 0))
        assert refusal(call, causal=1, window_size=(1, 0)).startswith("TypeError: causal must be")
        assert refusal(call, causal=True, window_size=(True, 0)).startswith("TypeError: window_s")
    return len(asked)


@ON_CPU
def test_ranks_that_know_the_length_compare_nothing(ranks):
    assert ranks.run(2, call_with_length_known) == [0, 0]


def call_again(group, method):
    """Return how often calls are prepared whose tensors differ in what they hold only."""
    misses = []
    for seed in range(3):
        whole = seeded(1, 12, 4, 16, seed=seed)
        q = zigzag.shard(whole, group=group).requires_grad_()
        out = flash_attn_func(
            q, q, q, layout=zigzag, group=group, causal=True, seqlen=12, method=method
        )
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
        other = whole.clone().requires_grad_()
        alone = fa3.flash_attn_func(other, other, other, causal=True)
        (expected,) = torch.autograd.grad(alone, other, torch.ones_like(alone))
        assert (dq - zigzag.shard(expected, group=group)).abs().max() < 0.1
        misses.append(attention.prepare.cache_info().misses)
    return misses[2] - misses[0]


@ON_CPU
@pytest.mark.parametrize("method", METHODS)
def test_a_call_like_an_earlier_one_is_not_prepared(ranks, method):
    assert ranks.run(2, call_again, method) == [0, 0]


WRONG_PACKED = {
    "layout": ({"layout": zigzag}, "ValueError: layout must be documents(cu_seqlens) for fl"),
    "shape": ({"q": (1, 41, 4, 16)}, "ValueError: q must have 3 dimensions"),
    "seqlen": ({"seqlen": 40}, "ValueError: seqlen must be 41, where cu_seqlens ends, got 40"),
}


def call_packed_wrongly(group):
    texts = []
    for changed, _ in WRONG_PACKED.values():
        named = {"layout": LENGTHS, "group": group, "q": (41, 4, 16), "seqlen": 41} | changed
        q = seeded(*named.pop("q"))
        texts.append(refusal(flash_attn_varlen_func, q, q, q, **named))
    return texts


@pytest.mark.parametrize("ends", [None, 5, [0, 1.5], [False, True], [[0]], [1, 2], [0, 3, 2], []])
def test_where_documents_end(ends):
    with pytest.raises((TypeError, ValueError), match="cu_seqlens must be"):
        documents(ends)
    assert repr(documents(np.array([0, 3]))) == repr(documents(torch.tensor([0, 3])))


@ON_CPU
def test_what_documents_refuse(ranks):
    (texts,) = ranks.run(1, call_packed_wrongly)
    for text, (_, message) in zip(texts, WRONG_PACKED.values(), strict=True):
        assert text.startswith(message)


def call_with_length(group, seqlen, rows):
    q = seeded(1, rows, 4, 16).to(device_of(group))
    return refusal(flash_attn_func, q, q, q, layout=zigzag, group=group, seqlen=seqlen)


def test_a_wrong_length_is_refused(ranks):
    (text,) = ranks.run(1, call_with_length, 9, 8)
    assert text == "ValueError: q must have 9 of 9 rows by Zigzag(), got 8"
    (text,) = ranks.run(1, call_with_length, 1, 8)
    assert text == "ValueError: seqlen must be 8, the rows of all ranks, got 1"


def measure_tiny(group, cell):
    options = bench.Namespace(cpu=True, only=None, rounds=1, graphs=False)
    with ExitStack() as stack:
        return bench.measure(cell, options, device_of(group), stack)


@ON_CPU
@pytest.mark.parametrize("cell", bench.TINY, ids=lambda cell: cell.name)
def test_the_benchmark_measures_all_methods(ranks, cell, tmp_path):
    rows = ranks.run(ranks.count, measure_tiny, cell)[0]
    named = {
        "dense": [bench.ALONE, *bench.METHODS],
        "documents": [bench.ALONE, "gather", "ulysses"],
        "decode": [bench.ALONE, "decode"],
    }
    assert [row.provider for row in rows] == named[cell.kind]
    assert all(row.us > 0 and row.max_error < 0.05 and not row.reason for row in rows)
    bench.write(rows, bench.Namespace(cpu=True, out=tmp_path))
    assert len((tmp_path / bench.CSV_NAME).read_text().splitlines()) == len(rows) + 1


def attend_by_torch(group):
    """Return the largest errors of torch's context parallelism on fa3 in both passes."""
    device, cell = device_of(group), bench.Cell("", "dense", "both", 512, (4, 4), 64)
    whole = operands_of(1, 512, 4, device=device)[:3]
    flash = bench.PEERS["torch-fa3"]
    with ExitStack() as stack:
        call = bench.torch_call(cell, [zigzag.shard(x, group=group) for x in whole], stack, flash)
        dq = call()
        assert torch.nn.attention.current_flash_attention_impl() == "fa3"
    leaves = [x.requires_grad_() for x in whole]
    out = fa3.flash_attn_func(*leaves, causal=True)
    (alone,) = torch.autograd.grad(out, leaves[:1], torch.ones_like(out))
    return (zigzag.shard(alone, group=group) - dq).abs().max().item()


@ON_GPUS
def test_torch_splits_a_sequence_on_fa3(ranks):
    assert max(ranks.run(ranks.count, attend_by_torch)) < 0.02


def captured(group, method):
    """Return the largest error of both passes, captured and replayed with other tensors."""
    q, k, v, other, *_ = operands_of(1, 512, 2, device=device_of(group))
    first, second = (
        [zigzag.shard(x, group=group) for x in tensors] for tensors in ((q, k, v), (other, v, k))
    )
    attend = partial(flash_attn_func, layout=zigzag, group=group, method=method, causal=True)

    def both(*tensors):
        out = attend(*tensors, seqlen=512)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    first, second = ([x.requires_grad_() for x in tensors] for tensors in (first, second))
    expected = both(*second)
    both(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = both(*first)
    with torch.no_grad():
        for x, y in zip(first, second, strict=True):
            x.copy_(y)
    graph.replay()
    return max((x - y).abs().max().item() for x, y in zip(results, expected, strict=True))


@ON_GPUS
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_call_may_be_replayed(ranks, method):
    assert max(ranks.run(ranks.count, captured, method)) < 0.05


def run_example(group):
    return context_parallel.example(str(device_of(group)), 133, group)


def test_the_example_of_the_documentation(ranks):
    assert max(ranks.run(2, run_example)) < 0.02


def checkpointed(group):
    """Return the largest differences of gradients with and without a checkpoint."""
    whole = operands_of(1, 32, 2, device=device_of(group))[:3]
    grads = []
    for wrap in (lambda attend, *x: attend(*x), partial(checkpoint, use_reentrant=False)):
        leaves = [zigzag.shard(x, group=group).requires_grad_() for x in whole]
        attend = partial(flash_attn_func, layout=zigzag, group=group, causal=True, method="ring")
        grads.append(torch.autograd.grad(wrap(attend, *leaves).float().square().sum(), leaves))
    return [(one - other).abs().max().item() for one, other in zip(*grads, strict=True)]


def test_a_checkpoint_attends_again(ranks):
    for errors in ranks.run(2, checkpointed):
        assert max(errors) < 0.02


def attend_compiled(group):
    q, k, v = (zigzag.shard(x, group=group) for x in operands_of(1, 16, 2)[:3])
    attend = partial(flash_attn_func, layout=zigzag, group=group, causal=True)
    compiled = torch.compile(lambda *x: 2 * attend(*x), backend="eager")
    return torch.equal(compiled(q, k, v), 2 * attend(q, k, v))


@ON_CPU
@pytest.mark.compiles
def test_torch_compile_leaves_the_graph(ranks):
    assert all(ranks.run(2, attend_compiled))


def attend_to_dtensors(group):
    """Return what DTensors raise, and the largest errors of both passes through `local_map`."""
    mesh = DeviceMesh.from_group(group, "cpu")
    x = operands_of(1, 16, 4)[0]
    other, placements = x.clone().requires_grad_(), [Shard(1)]
    local = zigzag.shard(x, group=group)
    q = DTensor.from_local(local, mesh, placements).requires_grad_()
    attend = partial(flash_attn_func, layout=zigzag, group=group, causal=True)
    over = local_map(attend, placements, (placements,) * 3, device_mesh=mesh)
    out = over(q, q, q)
    assert out.placements == tuple(placements) and out.shape == q.shape
    (dq,) = torch.autograd.grad(out.sum(), q)
    alone = fa3.flash_attn_func(other, other, other, causal=True)
    (expected,) = torch.autograd.grad(alone.sum(), other)
    pairs = (out.to_local(), alone), (dq.to_local(), expected)
    errors = [(zigzag.shard(whole, group=group) - x).abs().max().item() for x, whole in pairs]
    return refusal(attend, q, q, q), max(errors)


@ON_CPU
def test_dtensors_go_through_local_map(ranks):
    for text, error in ranks.run(2, attend_to_dtensors):
        assert text.startswith("NotImplementedError: rank 0: q must lie in memory, got a DTensor")
        assert text.endswith("Pass what its .to_local() returns")
        assert error < 0.1


def wait_in_vain(group):
    if group.rank() == 1:
        os._exit(0)
    q = seeded(1, 4, 4, 16)
    return refusal(flash_attn_func, q, q, q, layout=zigzag, group=group)


def test_a_rank_that_ends_is_an_error(tmp_path):
    ranks = Ranks(tmp_path, 2)
    ranks.connections[1].send((2, wait_in_vain, ()))
    ranks.connections[0].send((2, wait_in_vain, ()))
    assert ranks.connections[0].poll(SECONDS), "a rank hangs"
    assert ranks.connections[0].recv() == (
        True,
        "RuntimeError: rank 0: another rank did not answer within the group's timeout; it has "
        "ended, or it calls something else",
    )
    ranks.stop()


def strided(group, method):
    """Return the largest errors with slices of one tensor, and with v that is k."""
    x = seeded(2, 24, 6, 32)[..., 8:24]
    mine, errors = zigzag.shard(x, group=group), []
    mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
    for pick in (lambda x: x.split([4, 1, 1], 2), lambda x: (x[:, :, :4], *[x[:, :, 4:]] * 2)):
        over = partial(flash_attn_func, layout=zigzag, group=group, method=method)
        pairs = []
        for leaf, attend in ((x, fa3.flash_attn_func), (mine, over)):
            leaf = leaf.detach().requires_grad_()
            out = attend(*pick(leaf), causal=True, deterministic=True)
            pairs.append([out, *torch.autograd.grad(out.float().square().sum(), leaf)])
        whole, part = pairs
        for one, other in zip(whole, part, strict=True):
            errors.append((zigzag.shard(one, group=group) - other).abs().max().item())
    return errors


@ON_CPU
@pytest.mark.parametrize("method", METHODS)
def test_tensors_may_be_slices_and_shared(ranks, method):
    for errors in ranks.run(2, strided, method):
        assert max(errors) < 0.1, errors


class Striped(SequenceLayout):
    def chunks(self, seqlen, num_ranks):
        runs = [range(seqlen)[i : i + 3] for i in range(0, 9 * num_ranks, 3)]
        runs[-1] = range(runs[-1].start, seqlen)
        return tuple(tuple(runs[rank::num_ranks]) for rank in range(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", [zigzag, contiguous, Striped(), LENGTHS], ids=type)
def test_parts_bring_what_is_seen(layout, num_ranks):
    """All ranks of exchanges by themselves: rows that are numbers."""
    windows = (-1, 0), (-1, -1), (3, 0), (0, 0), (2, 4), (-1, 2), (5, -1)
    lengths, kind = ((41,), PACKED) if layout is LENGTHS else ((0, 1, 2, 7, 16, 33), DENSE)
    for seqlen, window, by_ring in product(lengths, windows, (False, True)):
        chunks, ends = layout.chunks(seqlen, num_ranks), (0, seqlen)
        if layout is LENGTHS:
            chunks, ends, _ = layout.one_by_one(num_ranks)
        held = [torch.tensor([row for one in x for row in one]) for x in chunks]
        seen, pairs = [[] for _ in range(seqlen)], 0
        part = KeyPart(Options(Window(*window), kind=kind), None, False)
        own, steps = steps_of(chunks, ends, (), part, by_ring)
        assert by_ring or max(map(len, own)) < 4  # not one for each document
        for keys, parts in ((held, own), *((moved_alone(x, held), parts) for x, parts in steps)):
            for rank in range(num_ranks):
                add_seen(seen, parts[rank], held[rank], keys[rank])
                pairs += sum(map(pairs_of, parts[rank]))
        assert pairs == sum(map(len, seen))
        for query, keys in enumerate(seen):
            end = bisect_right(ends, query)
            first, last = ends[end - 1], ends[end]
            first = first if window[0] < 0 else max(query - window[0], first)
            last = last if window[1] < 0 else min(query + window[1] + 1, last)
            assert sorted(keys) == list(range(first, last))


def add_seen(seen, parts, held, keys):
    """Add the rows that a rank's queries see in these parts, by bottom-right alignment."""
    for part in parts:
        queries, there = held[part.rows].tolist(), keys[part.keys].tolist()
        left, right = part.options.window
        for rows, count in part.lengths:
            for i, query in enumerate(queries[:rows]):
                place = i + count - rows
                first = 0 if left < 0 else max(place - left, 0)
                last = count if right < 0 else min(max(place + right + 1, 0), count)
                seen[query] += there[first:last]
            queries, there = queries[rows:], there[count:]
        assert not queries and not there


def moved_alone(exchange, held):
    """Return what each rank has in the end, if all rows arrive."""
    placed = [torch.full((total,), -1) for total in exchange.totals]
    for source, target, rows, places in exchange.moves:
        placed[target][places] = held[source][rows]
    assert not any((x == -1).any() for x in placed)
    return placed


PLANS = [
    (zigzag, 2, {"causal": True}, "gather"),
    (zigzag, 8, {"causal": True}, "ulysses"),
    (zigzag, 3, {"causal": True}, "gather"),
    (contiguous, 2, {"window_size": (100, 5), "has_slopes": True}, "ulysses"),
    (documents([0, 4096, 5000, 8192]), 2, {"window_size": (100, 5)}, "gather"),
]


@pytest.mark.parametrize("layout, ranks, options, method", PLANS)
def test_plans(layout, ranks, options, method):
    best = plan(layout, 8192, ranks, 32, 8, 128, **options)
    assert best.method == method and 0 < best.efficiency <= 1
    assert str(best).startswith(f"{method} over {ranks} ranks, efficiency 0.")
    window = options.get("window_size", (-1, 0 if options.get("causal") else -1))
    rows = torch.arange(8192)
    first, last = torch.zeros(8192), torch.full((8192,), 8191)
    if layout.cu_seqlens != (0,):
        ends = torch.tensor(layout.cu_seqlens)
        at = torch.searchsorted(ends, rows, right=True)
        first, last = ends[at - 1], ends[at] - 1
    first = first.clamp(min=0) if window[0] < 0 else torch.maximum(first, rows - window[0])
    last = last if window[1] < 0 else torch.minimum(last, rows + window[1])
    total = 32 * int((last - first + 1).sum())
    assert abs(sum(best.pairs) - total) < ranks
    for name in METHODS:
        try:
            one = plan(layout, 8192, ranks, 32, 8, 128, method=name, **options)
        except (ValueError, NotImplementedError):
            continue
        assert one.method == name and (name == "ring" or one.efficiency <= best.efficiency)


def test_one_rank_receives_nothing():
    for method in METHODS:
        one = plan(zigzag, 1000, 1, 4, 2, 64, causal=True, method=method)
        assert one.received_mib == (0, 0) and one.efficiency == pytest.approx(1)


BAD_PLANS = [
    ({"heads_q": 3}, ValueError, "heads_q must be a multiple of heads_kv, got 3 and 2"),
    ({"num_ranks": 0}, ValueError, "num_ranks must be 1 or more, got 0"),
    ({"num_ranks": "2"}, TypeError, "num_ranks must be an integer, got '2'"),
    ({"heads_kv": []}, TypeError, "heads_kv must be an integer, got list"),
    ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
    ({"seqlen": -1}, ValueError, "seqlen must be 0 or more, got -1"),
    ({"layout": "zigzag"}, TypeError, "layout must be fa3.distributed.zigzag, .*got 'zigzag'"),
    ({"method": "star"}, ValueError, "method must be one of .*'ulysses'.*, got 'star'"),
    ({"gbps": 0}, ValueError, "gbps must be positive, got 0"),
]


@pytest.mark.parametrize("changed, error, message", BAD_PLANS)
def test_wrong_plans_are_refused(changed, error, message):
    sizes = {"seqlen": 1000, "num_ranks": 2, "heads_q": 4, "heads_kv": 2, "head_dim": 64}
    with pytest.raises(error, match=message):
        plan(**({"layout": zigzag} | sizes | changed))


class SharedMemory:
    """Memory of ranks that are processes on the CPU, whose copies are made at once."""

    def __init__(self, patch, folder):
        self.folder, self.memories = folder, {}
        for name in ("Event", "Stream", "set_stream", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *_: MagicMock())
        patch.setattr(transfer.SharedMemory, "of", self.memory)
        patch.setattr(transfer.driver, "cuStreamWriteValue32", self.write)
        patch.setattr(transfer, "shares_memory", lambda *_: True)

    @staticmethod
    def write(_, address, value, flags):
        """Write a word that a rank waits for, which it must have taken before."""
        word = ctypes.c_uint32.from_address(address)
        assert word.value == 0
        word.value = value
        return (0,)

    def memory(self, group, number, size):
        """Return what stays of a group, a number and a size, in files that ranks share."""
        if (group, number, size) not in self.memories:
            names = [
                f"{self.folder}/{group.size()}-{number}-{size}-{i}" for i in range(group.size())
            ]
            boxes = [torch.from_file(x, True, size, dtype=torch.uint8) for x in names]
            pads = [torch.from_file(f"{x}-said", True, 16, dtype=torch.int32) for x in names]
            # Who opens a file that has no size yet writes its first byte, maybe after others' rows.
            torch.distributed.barrier(group)

            def get_buffer(rank, shape, dtype, offset):
                begin, end = (n * dtype.itemsize for n in (offset, offset + math.prod(shape)))
                return boxes[rank][begin:end].view(dtype).view(shape)

            def wait_signal(source, channel, _):
                place = group.size() * channel + source
                begin = time.monotonic()
                while not pads[group.rank()][place]:
                    assert time.monotonic() - begin < 20, f"nothing came from rank {source}"
                    time.sleep(1e-4)
                pads[group.rank()][place] = 0

            handle = SimpleNamespace(
                get_buffer=get_buffer,
                barrier=lambda *_: torch.distributed.barrier(group),
                wait_signal=wait_signal,
                signal_pad_ptrs=[pad.data_ptr() for pad in pads],
                rank=group.rank(),
                world_size=group.size(),
            )
            self.memories[group, number, size] = transfer.SharedMemory(
                boxes[group.rank()], handle, 0, MagicMock()
            )
        return self.memories[group, number, size]


def call_by_copies(group, folder, method):
    """Return errors of calls that ranks prepare differently, and of one after a call that fails."""
    whole, errors = operands_of(1, 41, 2, device=device_of(group))[:3], []
    expected = zigzag.shard(fa3.flash_attn_func(*whole, causal=True), group=group)
    mine, *kv = (zigzag.shard(x, group=group) for x in whole)
    call = partial(
        flash_attn_func, layout=zigzag, group=group, seqlen=41, method=method, causal=True
    )
    with pytest.MonkeyPatch.context() as patch:
        if not mine.is_cuda:
            SharedMemory(patch, folder)
        attention.prepare.cache_clear()
        for i in range(5):
            x = mine.clone()
            if i == 1 and group.rank() == 0:
                x = mine.repeat(1, 1, 2, 1)[:, :, :4]  # with other strides on one rank
            if i == 3:
                with pytest.MonkeyPatch.context() as failing, pytest.raises(ValueError):
                    failing.setattr(KeyPart, "forward", Mock(side_effect=ValueError))
                    call(x, *kv)
            # What is made in inference mode must serve other calls, too.
            with torch.inference_mode(i == 0):
                errors.append((call(x, *kv) - expected).abs().max().item())
        attention.prepare.cache_clear()
    return errors


@pytest.mark.parametrize("method", METHODS)
def test_copies_take_turns_where_ranks_differ_or_fail(ranks, tmp_path, method):
    for errors in ranks.run(2, call_by_copies, tmp_path, method):
        assert max(errors) < 0.02, errors


def compare_by_copies(group, folder, *arguments):
    """Return what `compare` does, in three calls, with rows copied between ranks."""
    with pytest.MonkeyPatch.context() as patch:
        SharedMemory(patch, folder)
        attention.prepare.cache_clear()
        errors = [max(compare(group, *arguments)) for _ in range(3)]
        attention.prepare.cache_clear()
    return errors


def compare_by_messages(group, method):
    """Return what `compare` does, with messages where ranks could share memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "shares_memory", lambda *_: False)
        attention.prepare.cache_clear()
        errors = compare(group, zigzag, method, (2, 41, 2), {"causal": True})
        attention.prepare.cache_clear()
    return errors


@ON_GPUS
@pytest.mark.parametrize("method", METHODS)
def test_messages_bring_what_copies_bring(ranks, method):
    for errors in ranks.run(2, compare_by_messages, method):
        assert max(errors) < 0.02, errors


COPIED = [
    *product([(2, 1, 41), (4, 2, 41), (2, 1, 1)], [(zigzag, method) for method in METHODS]),
    *product([(2, 1, 41), (4, 1, 41)], PACKED_METHODS),
]


@ON_CPU
@pytest.mark.parametrize("sizes, called", COPIED)
def test_copies_bring_what_messages_bring(ranks, tmp_path, sizes, called):
    """A single row is where a view of memory that is written again is as good as a copy."""
    size, *shape = *sizes, 1
    for errors in ranks.run(
        size, compare_by_copies, tmp_path, *called, tuple(shape), {"causal": True}
    ):
        assert max(errors) < 0.02, errors


@ON_CPU
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_a_ring_may_skip_hops(ranks, tmp_path, heads_kv):
    """Of four ranks, only neighbours see each other's keys, by hops one and three.
    With one key/value head the keys are kept."""
    called = zigzag, "ring", (1, 41, heads_kv), {"window_size": (3, 0)}
    for errors in ranks.run(4, compare_by_copies, tmp_path, *called):
        assert max(errors) < 0.02, errors
