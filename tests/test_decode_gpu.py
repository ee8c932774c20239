"""Decode attention on a Hopper GPU, against dense attention in float64.

All memory that a call must not read or use is NaN: the caches outside of the sequences' keys, the
workspace and the outputs. Entries of page tables for pages that no key lies in are no pages.
"""

import math
import random
from typing import NamedTuple

import pytest
import torch
from pairs import pairs
from problems import DTYPES, poisoned_allocations
from reference import check_attention, dense

from fa3.calls.cache_call import CacheCall, CacheTensors, describe_tensors
from fa3.calls.decode import modifiers_of, prepare_decode
from fa3.primitives.cache_blocks import CacheTables
from fa3.problem import NO_BOUND, Window
from fa3.reference.varlen import RaggedOperands

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
GARBAGE = (-1, 1 << 30, -(1 << 31))


class CacheOperands(NamedTuple):
    """The tensors of a call, as `CacheTensors` names them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    cache_seqlens: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Case(NamedTuple):
    """A call and what it is: see `make_case`."""

    operands: CacheOperands
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_case(
    seqlens,
    seqlen_q=1,
    heads=(8, 2),
    head_dims=(128, 128),
    capacity=None,
    page_size=None,
    batch_indexed=False,
    leftpads=None,
    dtype="bfloat16",
    device="cuda",
    seed=0,
) -> Case:
    """Draw a call: (query heads, key/value heads) and (head_dim, head_dim_v)."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = random.Random(seed)
    batch, (heads_q, heads_kv), (head_dim, head_dim_v) = len(seqlens), heads, head_dims
    capacity = capacity or max(*seqlens, 1)
    kind = {"dtype": DTYPES[dtype], "device": device}

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype])

    q = normal(batch, seqlen_q, heads_q, head_dim)
    rows = batch + 3 if batch_indexed else batch
    batch_idx = draw.sample(range(rows), batch) if batch_indexed else list(range(batch))
    page_table = None
    if page_size is None:
        shape = rows, capacity
    else:
        pages = -(-capacity // page_size)
        shape = rows * pages + 2, page_size
        order = torch.tensor(draw.sample(range(shape[0]), rows * pages), device=device)
        page_table = order.view(rows, pages).to(torch.int32)
    k_cache = torch.full((*shape, heads_kv, head_dim), torch.nan, **kind)
    v_cache = torch.full((*shape, heads_kv, head_dim_v), torch.nan, **kind)
    keys, values = [], []
    for b, seqlen in enumerate(seqlens):
        begin = min(leftpads[b], seqlen) if leftpads else 0
        k, v = normal(seqlen, heads_kv, head_dim), normal(seqlen, heads_kv, head_dim_v)
        keys.append(k[None, begin:])
        values.append(v[None, begin:])
        at = torch.arange(begin, seqlen, device=device)
        if page_size is None:
            k_cache[batch_idx[b], at], v_cache[batch_idx[b], at] = k[begin:], v[begin:]
        else:
            page = page_table[batch_idx[b]][at // page_size].long()
            k_cache[page, at % page_size], v_cache[page, at % page_size] = k[begin:], v[begin:]
            unused = page_table[batch_idx[b], -(-seqlen // page_size) :]
            unused.copy_(torch.tensor([draw.choice(GARBAGE) for _ in unused], dtype=torch.int32))

    def as_int32(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    operands = CacheOperands(
        q,
        k_cache,
        v_cache,
        torch.full((batch, seqlen_q, heads_q, head_dim_v), torch.nan, **kind),
        torch.full((batch, heads_q, seqlen_q), torch.nan, device=device),
        as_int32(seqlens),
        as_int32(batch_idx) if batch_indexed else None,
        as_int32(leftpads) if leftpads else None,
        page_table,
    )
    return Case(operands, keys, values)


def attend_with_cache(operands: CacheOperands, scale: float, window: Window, **options) -> None:
    """Prepare a call and run it."""
    given = {name: getattr(operands, name, None) for name in CacheTensors._fields}
    described = describe_tensors(CacheTensors(**given)._replace(out=None))
    call = prepare_decode(CacheCall.of(described), window, **options)
    call.attend(
        RaggedOperands(*operands[:5], None, None, None, operands.cache_seqlens),
        CacheTables(operands.cache_batch_idx, operands.cache_leftpad, operands.page_table),
        modifiers_of(operands.alibi_slopes, operands.sinks),
        scale,
    )


def attend(operands: CacheOperands, window=CAUSAL, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels with NaN in the outputs and the workspace."""
    operands.out.fill_(torch.nan)
    operands.lse.fill_(torch.nan)
    scale = operands.q.shape[-1] ** -0.5
    with poisoned_allocations():
        attend_with_cache(operands, scale, window, **options)
    return operands.out, operands.lse


def check_case(case: Case, window=CAUSAL, **options) -> None:
    out, lse = attend(case.operands, window, **options)
    for b, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.operands.q[b : b + 1]
        if k.shape[1] == 0:
            assert (out[b] == 0).all() and (lse[b] == -math.inf).all()
        else:
            check_attention(out[b : b + 1], lse[b : b + 1], q, k, v, window=window)


MODES = {
    "stream": {},
    "whole": {"num_splits": 1},
    "splits": {"num_splits": 5},
    "invariant": {"batch_invariant": True},
}


@pytest.fixture(params=MODES, ids=str)
def mode(request) -> dict:
    return MODES[request.param]


@pytest.mark.parametrize("seqlens", [(1,), (63, 64, 65), (1000, 1, 0, 4097), (0,), (0, 0, 5)])
def test_lengths(seqlens, mode, device):
    check_case(make_case(seqlens), **mode)


@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (128, 1), (10, 2)])
def test_heads(heads, mode, device):
    check_case(make_case((700, 90), heads=heads), **mode)


@pairs(
    # Several tiles of rows: those of the middle see other key blocks than the first and the last.
    {"seqlen_q": 40, "window": CAUSAL, "mode": MODES["stream"]},
    {"seqlen_q": 40, "window": Window(100, 3), "mode": MODES["splits"]},
    seqlen_q=(3, 8, 17, 40),
    window=(Window(), CAUSAL, Window(100, 3), Window(left=70)),
    mode=tuple(MODES.values()),
)
def test_several_queries(seqlen_q, window, mode, device):
    check_case(make_case((300, 1, 64, seqlen_q), seqlen_q), window, **mode)


@pairs(
    head_dims=((256, 256), (72, 200), (192, 128), (64, 256), (8, 8)),
    mode=tuple(MODES.values()),
    dtype=tuple(DTYPES),
)
def test_head_dims(head_dims, dtype, mode, device):
    check_case(make_case((513, 129), 2, head_dims=head_dims, dtype=dtype), **mode)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed, device):
    draw, mode = random.Random(seed), list(MODES.values())[seed % len(MODES)]
    longest = draw.choice((5, 100, 1000, 9000))
    seqlens = [draw.randint(0, longest) for _ in range(draw.choice((1, 3, 17, 70)))]
    seqlen_q = draw.choice((1, 1, 2, 5, 20))
    page_size = draw.choice((None, None, 1, 7, 16, 64, 128))
    case = make_case(
        seqlens,
        seqlen_q,
        draw.choice(((4, 1), (8, 2), (3, 3))),
        draw.choice(((64, 64), (128, 128))),
        capacity=longest + draw.choice((0, 77)),
        page_size=page_size,
        batch_indexed=draw.random() < 0.3,
        leftpads=[draw.randint(0, longest) for _ in seqlens] if draw.random() < 0.3 else None,
        seed=seed,
    )
    window = draw.choice((Window(), CAUSAL, Window(draw.randint(0, 300), 0), Window(50, 2)))
    check_case(case, window, **mode)


def test_long_sequences_are_shared_by_all_ctas(mode, device):
    check_case(make_case((40000,), heads=(16, 1)), **mode)
    check_case(make_case((30000, 20, 100, 9000), 8, heads=(8, 2)), **mode)


@pytest.mark.parametrize("batch", [33, 1000, 1025, 3000])
def test_many_sequences(batch, mode, device):
    draw = random.Random(batch)
    seqlens = [draw.choice((0, 1, 70, 200)) for _ in range(batch)]
    case = make_case(seqlens, heads=(2, 1), head_dims=(64, 64))
    out, lse = attend(case.operands, **mode)
    for b in draw.sample(range(batch), 33):
        if seqlens[b]:
            check_attention(
                out[b : b + 1], lse[b : b + 1], case.operands.q[b : b + 1], case.keys[b],
                case.values[b], window=CAUSAL,
            )  # fmt: skip
    assert not out.isnan().any() and not lse.isnan().any()
    empty = torch.tensor(seqlens, device=device) == 0
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("page_size", [7, 16, 24, 192])
def test_pages(page_size, mode, device):
    """Beside those of `test_kvcache_gpu`: most are no powers of two."""
    check_case(make_case((1, 500, 0, 64, 4096 + 17), page_size=page_size), **mode)
    check_case(make_case((333, 65), 4, page_size=page_size, batch_indexed=True), **mode)


@pytest.mark.parametrize("page_size", [None, 16])
def test_left_padding(page_size, mode, device):
    leftpads = (0, 1, 63, 64, 100, 700)
    seqlens = (200, 500, 64, 65, 1000, 500)
    check_case(make_case(seqlens, 2, page_size=page_size, leftpads=leftpads), **mode)


@pytest.mark.parametrize("page_size", [None, 4, 64])
def test_a_window_does_not_read_what_it_has_left_behind(page_size, device):
    """Pages before the window may be gone."""
    case = make_case((3000, 130), heads=(4, 1), page_size=page_size)
    if page_size:
        for b, seqlen in enumerate((3000, 130)):
            gone = max(0, seqlen - 101) // page_size
            case.operands.page_table[b, :gone] = GARBAGE[1]
    check_case(case, Window(100, 0))


def test_lengths_beyond_the_cache_are_cut_off(mode, device):
    case = make_case((128, 128), capacity=128)
    case.operands.cache_seqlens.fill_(1 << 20)
    check_case(case, **mode)


def test_strides(device):
    """Caches that are parts of larger tensors, (batch, heads, seqlen, head_dim) underneath."""
    case = make_case((500, 77))
    operands = case.operands

    def rearranged(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    operands = operands._replace(
        q=rearranged(operands.q),
        k_cache=rearranged(operands.k_cache),
        v_cache=rearranged(operands.v_cache),
        out=rearranged(operands.out),
    )
    check_case(case._replace(operands=operands))


def test_the_lse_is_optional(mode, device):
    case = make_case((5000, 3))
    out, _ = attend(case.operands, **mode)
    without = torch.full_like(out, torch.nan)
    operands = case.operands._replace(lse=None, out=without)
    attend_with_cache(operands, operands.q.shape[-1] ** -0.5, CAUSAL, **mode)
    assert torch.equal(out, without)


def test_repeated_calls_give_the_same_bits(mode, device):
    case = make_case((9000, 40, 700), 2)
    out, lse = (t.clone() for t in attend(case.operands, **mode))
    for _ in range(20):
        again, again_lse = attend(case.operands, **mode)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("page_size", [None, 16])
def test_batch_invariance(page_size, device):
    """A sequence's bits depend neither on its neighbours nor on its place nor on the SMs."""
    mode = {"batch_invariant": True}
    seqlens = (5000, 40, 700, 0, 4096)
    case = make_case(seqlens, 2, page_size=page_size)
    out, lse = (t.clone() for t in attend(case.operands, **mode))
    out_margin, _ = attend(case.operands, sm_margin=33, **mode)
    assert torch.equal(out, out_margin)
    for b in range(len(seqlens)):
        operands = case.operands._replace(
            q=case.operands.q[b : b + 1].contiguous(),
            out=torch.empty_like(out[b : b + 1]),
            lse=torch.empty_like(lse[b : b + 1]),
            cache_seqlens=case.operands.cache_seqlens[b : b + 1].contiguous(),
            cache_batch_idx=torch.tensor([b], dtype=torch.int32, device=device),
        )
        alone, alone_lse = attend(operands, **mode)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


def test_a_captured_graph_stays_right_while_lengths_grow(mode, device):
    case = make_case((2000, 1500), capacity=2000)
    operands = case.operands
    attend(operands, **mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_with_cache(operands, operands.q.shape[-1] ** -0.5, CAUSAL, **mode)
    for lengths in ((0, 1), (1, 64), (65, 700), (1999, 3), (2000, 1500)):
        operands.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        operands.out.fill_(torch.nan)
        graph.replay()
        for b, n in enumerate(lengths):
            exact, exact_lse = dense(
                operands.q[b : b + 1], case.keys[b][:, :n], case.values[b][:, :n], window=CAUSAL
            )
            torch.testing.assert_close(operands.out[b : b + 1].double(), exact, rtol=0, atol=0.02)
            torch.testing.assert_close(
                operands.lse[b : b + 1].double(), exact_lse, rtol=1e-6, atol=1e-4
            )


def test_large_scores(mode, device):
    """Keys that grow: the reference of the softmax moves in every block."""
    case = make_case((3000,), heads=(4, 1))
    factor = torch.linspace(0.1, 8, 3000, device=device)[None, :, None, None]
    keys = [(k * factor).to(k.dtype) for k in case.keys]
    case.operands.k_cache[:, :3000] = keys[0]
    check_case(case._replace(keys=keys), **mode)


@pytest.mark.parametrize("window", [CAUSAL, Window(300, 0)])
def test_softcap_alibi_and_sinks(window, mode, device):
    case = make_case((1500, 20, 0), 3)
    heads = case.operands.q.shape[2]
    slopes = torch.rand(heads, device=device)
    sinks = torch.randn(heads, device=device)
    operands = case.operands._replace(alibi_slopes=slopes, sinks=sinks)
    out, lse = attend(operands, window, softcap=2.0, **mode)
    for b, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        exact, exact_lse = modified(operands.q[b], k[0], v[0], window, 2.0, slopes, sinks)
        torch.testing.assert_close(out[b].double(), exact, rtol=0, atol=0.02)
        # tanh is approximate.
        torch.testing.assert_close(lse[b].double(), exact_lse, rtol=0, atol=5e-3)


def modified(q, k, v, window, softcap, slopes, sinks):
    """Attention of one sequence with softcap, ALiBi and sinks in float64."""
    seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv, _ = k.shape
    q, k, v, slopes, sinks = (t.double() for t in (q, k, v, slopes, sinks))
    k, v = (t.repeat_interleave(heads // heads_kv, dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
    logits = softcap * (logits / softcap).tanh()
    query = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    distance = query - torch.arange(seqlen_k, device=q.device)
    logits = logits - slopes[:, None, None] * distance.abs()
    hidden = distance < -window.right
    if window.left != NO_BOUND:
        hidden |= distance > window.left
    logits = logits.masked_fill(hidden, -torch.inf)
    sink = sinks[:, None, None].expand(-1, seqlen_q, 1)
    lse = torch.cat([logits, sink], dim=-1).logsumexp(-1)
    return torch.einsum("hqk,khd->qhd", (logits - lse[..., None]).exp(), v), lse
