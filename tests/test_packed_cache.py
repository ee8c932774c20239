"""Packed queries with keys in a cache: each sequence against attention to its keys alone."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from problems import poisoned_allocations
from test_latest import operand
from test_split import records
from varlen_problems import (
    WRONG_ENDS,
    VarlenProblem,
    check_call,
    check_wrong_ends,
    integers,
    make_call,
    note_attending,
    on_cache,
    random_problem,
)

import fa3
from fa3.calls import operands
from fa3.calls.call import MOST_FORWARD_TILES, MOST_RAGGED_ROWS, AttentionCall
from fa3.calls.prepare import prepare_call
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning import routes
from fa3.planning.costs import H200
from fa3.planning.decode import DecodePlan
from fa3.planning.routes import FEWEST_EARLIER_KEYS
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import AttentionSpec, Problem
from fa3.scores.masks import Band

FAMILIES = 10
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

CUTS = {}, {}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}


def check(
    problem: VarlenProblem, page_size: int | None, where, seed: int = 0, capacity: int = 0,
    is_indexed: bool = False, **options,
) -> None:  # fmt: skip
    """Check a call with the keys of a problem in a cache."""

    def change(problem: VarlenProblem, call: dict) -> dict:
        return on_cache(problem, call, page_size, capacity, is_indexed)

    check_call(problem, where, seed, change, **options)


def drawn(seed: int, longest: int) -> VarlenProblem:
    problem = random_problem(seed, DTYPES[seed % 2], seed % FAMILIES, longest)
    recipe = problem.recipe._replace(score=None, mask=None)
    return replace(problem, used_q=None, used_k=None, recipe=recipe)


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls(family, where):
    for seed in range(family, 60 if where == "cpu" else 40, FAMILIES):
        page_size = (None, 16, 64, 5)[family % 4]
        cut = random.Random(seed).choice(CUTS)
        check(drawn(seed, 300), page_size, where, seed, is_indexed=True, **cut)


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_chunks(family, where):
    """As engines call it: sequences have at least as many keys as queries."""
    for seed in (family,) if where == "cpu" else (family, family + FAMILIES):
        problem, draw = drawn(seed, 400), random.Random(seed)
        keys = tuple(n + draw.choice((0, draw.randint(0, 600))) for n in problem.seqlens_q)
        page_size = (None, 16, 24, 64, 256)[family % 5]
        check(replace(problem, seqlens_k=keys), page_size, where, seed)


def test_few_tiles_are_the_decode_kernels(where, monkeypatch):
    """Where the forward kernel would leave SMs idle, in a cache with room for many keys."""
    attending = note_attending(monkeypatch)
    monkeypatch.setattr(routes, "LITTLE_WORK", 0)
    for queries, heads, are_few in (
        *(((64,), 8, True), ((60, 0, 1), 16, True)),
        *(((60, 5, 60), 24, False), ((300,), 8, False)),
    ):
        attending.clear()
        keys = tuple(3 * count + (100 if where == "cpu" else 1000) for count in queries)
        problem = VarlenProblem(queries, keys, heads_kv=2, group=heads // 2, causal=True)
        check(problem, None, where, capacity=FEWEST_EARLIER_KEYS, max_seqlen_q=max(queries))
        if are_few:
            (alone,) = attending
            assert max(queries) <= alone < 1 << 13
        else:
            assert "forward" in attending


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}], ids=str)
def test_wrong_ends_touch_nothing_outside(options, device):
    problem = VarlenProblem((20,) * 3, (500, 30, 200), heads_kv=2, group=2)
    call = on_cache(problem, make_call(problem, 0, device), None)
    for ends in WRONG_ENDS:
        check_wrong_ends(call, ends, **options | {"max_seqlen_q": 50})


def plan_of(is_packed: bool, **options) -> DecodePlan:
    problem = Problem(AttentionSpec("bfloat16", 64, 64, Band()), 3, 40, 1000, 2, 4)
    return DecodePlan.of(problem, H200, CacheLayout(16), is_packed=is_packed, **options)


def test_records_of_row_blocks_that_a_sequence_does_not_have_are_zero(monkeypatch):
    """The merge reads all records; a walk writes those of the row blocks that there are."""
    plan = plan_of(True, num_splits=3)
    blocks, of_rows = [(0, 16), (0, 3), (0, 9)], [3, 1, 2]
    sizes = plan.sizes
    work = plan.cut, blocks, sizes.num_m_blocks, sizes.heads_kv, plan.num_ctas
    written = records(*work, of_rows=of_rows)
    numbers = [record for record, _, _ in written]
    count = plan.workspace.num_records
    assert len(set(numbers)) == len(numbers) < count and max(numbers) < count
    assert plan.clears_records
    assert plan.memory.cleared == plan.workspace.numbers_of_records > 0
    # Elsewhere every record has a CTA that writes it.
    assert not plan_of(True).clears_records and not plan_of(False, num_splits=3).clears_records


NEW = 5
"""Tokens that each sequence gets in an `appending_call` of equally many."""


def appending_call(where, size: float = 1.0, is_ragged: bool = False, is_turned: bool = False):
    """A call that appends with a rotary embedding, for sequences with chunks and without.

    Args:
        size: of queries and keys.
        is_ragged: whether each sequence gets as many tokens as it has queries.
        is_turned: whether positions of the embedding count from other lengths.
    """
    torch.manual_seed(0)
    queries, lengths = (300, 2, 200), (900, 500, 190)
    if is_ragged:
        queries, lengths = (3, 0, 1, 70), (5, 9, 0, 40)
    heads_kv, head_dim = 2, 64 if is_ragged else 128
    new = (sum(queries),) if is_ragged else (len(queries), NEW)

    def normal(*shape: int) -> torch.Tensor:
        return (size * torch.randn(shape, device=where)).bfloat16()

    ends = integers(0, *queries, device=where).cumsum(0, dtype=torch.int32)
    angle = torch.rand(1300, 16 if is_ragged else head_dim // 2, device=where)
    call = {
        "q": normal(sum(queries), 4 * heads_kv, head_dim),
        "k_cache": normal(len(queries), 960, heads_kv, head_dim),
        "v_cache": normal(len(queries), 960, heads_kv, head_dim) / size,
        "k": normal(*new, heads_kv, head_dim), "v": normal(*new, heads_kv, head_dim) / size,
        "cache_seqlens": integers(*lengths, device=where), "cu_seqlens_q": ends,
        "max_seqlen_q": max(queries),
        "rotary_cos": angle.cos().bfloat16(), "rotary_sin": angle.sin().bfloat16(),
    }  # fmt: skip
    if is_ragged:
        call["cu_seqlens_k_new"] = ends
    if is_turned:
        call["rotary_seqlens"] = integers(7, 2, 0, 100, device=where)
    return call


def of_sequence(call: dict, sequence: int) -> dict:
    """What a call asks for one of its sequences, as a call without packed queries."""
    call, rows = dict(call), slice(*call["cu_seqlens_q"][sequence : sequence + 2].tolist())
    by_row = ["k_cache", "v_cache", "cache_seqlens", "rotary_seqlens"]
    packed = ["q", "k", "v"] if call.pop("cu_seqlens_k_new", None) is not None else ["q"]
    del call["cu_seqlens_q"], call["max_seqlen_q"]
    for name in call.keys() & {*by_row, "k", "v"} - {*packed}:
        call[name] = call[name][sequence : sequence + 1].clone()
    return call | {name: call[name][None, rows] for name in packed}


RAGGED = {"is_ragged": True}, {"is_ragged": True, "is_turned": True}


@pytest.mark.parametrize(
    ("kind", "causal", "interleaved"),
    [
        ({}, True, True),
        ({"size": 40.0}, True, True),
        *itertools.product(RAGGED, (False, True), (False, True)),
    ],
    ids=str,
)
def test_sequences_are_as_alone(kind, causal, interleaved, where):
    """With huge scores the fixed row max of long sequences fails, and their rows are computed
    once more, from the same rotated queries."""
    call = appending_call(where, **kind) | {"causal": causal, "rotary_interleaved": interleaved}
    ends = call["cu_seqlens_q"].tolist()
    alone = [of_sequence(call, sequence) for sequence in range(len(ends) - 1)]
    with poisoned_allocations():
        out, lse = fa3.flash_attn_with_kvcache(**call, return_lse=True)
    for sequence, given in enumerate(alone):
        rows = slice(*ends[sequence : sequence + 2])
        # By the decode kernel.
        expected, expected_lse = fa3.flash_attn_with_kvcache(**given, return_lse=True, num_splits=1)
        torch.testing.assert_close(out[None, rows], expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[None, :, rows], expected_lse, rtol=1e-3, atol=1e-2)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(call[name][sequence], given[name][0])


@pytest.mark.parametrize("kind", ["", "pages", "appends"])
def test_equal_queries_are_as_packed(kind, where, monkeypatch):
    """Without cu_seqlens_q, from 65 queries on; as long as their rows lie as packed ones do."""
    monkeypatch.setattr(routes, "LITTLE_WORK", 0)
    prepare_call.cache_clear()
    torch.manual_seed(0)
    batch, queries, shape = 3, 100, (4, 64)
    call = {
        "cache_seqlens": integers(500, 3, 190, device=where), "causal": True, "return_lse": True,
        "q": torch.randn(batch, queries, *shape, device=where).bfloat16(),
    }  # fmt: skip
    pages = (10, 64) if kind == "pages" else (batch, 640)
    caches = torch.randn(2, *pages, 2, 64, device=where).bfloat16()
    if kind == "pages":
        call["page_table"] = integers(*range(10), device=where).expand(batch, -1)
    if kind == "appends":
        call["k"], call["v"] = torch.randn(2, batch, queries, 2, 64, device=where).bfloat16()
        call["rotary_cos"], call["rotary_sin"] = torch.randn(2, 800, 32, device=where).bfloat16()
    ends = torch.arange(0, batch * queries + 1, queries, device=where, dtype=torch.int32)
    packed = {"q": call["q"].flatten(0, 1), "cu_seqlens_q": ends, "max_seqlen_q": queries}
    attending, outputs, written = note_attending(monkeypatch), [], []
    apart = call["q"].new_empty(batch, queries + 1, *shape)[:, :queries]
    apart.copy_(call["q"])
    for change in ({}, packed, {"q": apart}):
        written.append(caches.clone())
        with poisoned_allocations():
            k_and_v = dict(zip(("k_cache", "v_cache"), written[-1], strict=True))
            outputs.append(fa3.flash_attn_with_kvcache(**k_and_v, **call | change))
    (out, lse), (packed_out, packed_lse), (apart_out, apart_lse) = outputs
    assert attending == ["forward", "forward", queries]
    assert torch.equal(out.flatten(0, 1), packed_out)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    torch.testing.assert_close(out, apart_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, apart_lse, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(written[0], other) for other in written[1:])


@pytest.mark.parametrize(
    ("heads", "most"),
    [(1, MOST_RAGGED_ROWS), (128, MOST_FORWARD_TILES // 128 * FEWEST_ROWS - 1)],
)
def test_queries_are_packed_as_long_as_32_bits_count_rows_and_tiles(heads, most):
    cache = operand(1, 8, 1, 8)
    for rows in (most, most + 1):
        call = AttentionCall(operand(1, rows, heads, 8), cache, cache)
        assert call.may_be_packed == (rows == most)


def test_positions_of_a_rotary_embedding_count_from_where_they_are_said_to():
    """As if the cache were that long, for keys and queries alike."""
    torch.manual_seed(0)
    cache, angle = torch.randn(1, 64, 1, 32).bfloat16(), torch.rand(64, 16)
    q, k = (torch.randn(1, 2, 1, 32).bfloat16() for _ in range(2))
    tables = {"rotary_cos": angle.cos().bfloat16(), "rotary_sin": angle.sin().bfloat16()}
    lengths, turns = torch.tensor([5]).int(), torch.tensor([30]).int()
    moved, there = cache.clone(), cache.clone()
    fa3.flash_attn_with_kvcache(
        q, moved, cache.clone(), k, k, cache_seqlens=lengths, rotary_seqlens=turns, causal=True,
        **tables,
    )  # fmt: skip
    fa3.flash_attn_with_kvcache(
        q, there, cache.clone(), k, k, cache_seqlens=turns, causal=True, **tables
    )
    assert torch.equal(moved[:, 5:7], there[:, 30:32])


# --------------------------------------------------------------------------------------- totals


def call_of_total(total: int, device: str = "cpu", **options) -> dict:
    """A call of two sequences with two queries and one, of which q may have more rows."""
    caches = torch.randn(2, 2, 8, 2, 64, device=device).bfloat16()
    integers = {"cache_seqlens": [4, 7], "cu_seqlens_q": [0, 2, 3]}
    return {
        "q": torch.randn(5, 2, 64, device=device).bfloat16()[:total],
        "k_cache": caches[0], "v_cache": caches[1], "max_seqlen_q": 2,
        **{name: torch.tensor(of, device=device).int() for name, of in integers.items()}, **options,
    }  # fmt: skip


def test_no_total_is_remembered(where):
    draw, memory = random.Random(0), torch.randn(2, 400, 2, 64, device=where).bfloat16()
    others = call_of_total(3, where, alibi_slopes=torch.ones(2, device=where))
    del others["q"]
    prepare_call.cache_clear()
    expected = fa3.flash_attn_with_kvcache(memory[0, :3], **others)
    fa3.flash_attn_with_kvcache(memory[0, :3], **others, out=memory[1, :3])
    remembered = operands.check_of_addresses, operands.share_bytes
    before = [one.cache_info().currsize for one in remembered]
    for _ in range(100):
        q = memory[0, : draw.randint(3, 400)]
        out = memory[1, : len(q)] if draw.random() < 0.5 else None
        found, lse = fa3.flash_attn_with_kvcache(q, **others, out=out, return_lse=True)
        assert found.shape == q.shape and lse.shape == (2, len(q))
        assert torch.equal(found[:3], expected)
    assert prepare_call.cache_info().currsize == 2  # with out and without
    assert [one.cache_info().currsize for one in remembered] == before


def test_a_total_of_0(where):
    none = torch.zeros(3, device=where).int()
    for call in (call_of_total(3, where), call_of_total(0, where, cu_seqlens_q=none)):
        out, lse = fa3.flash_attn_with_kvcache(**call, return_lse=True)
        assert out.shape == call["q"].shape and lse.shape == (2, len(call["q"]))


def test_caches_of_packed_calls_share_no_memory():
    new = {name: torch.zeros(3, 2, 64).bfloat16() for name in "kv"}
    call = call_of_total(4, **new, cu_seqlens_k_new=torch.tensor([0, 2, 3]).int())
    call["cache_seqlens"] -= 2
    fa3.flash_attn_with_kvcache(**call)
    for name, other, tensor in (
        ("k_cache", "v_cache", call["k_cache"]),
        ("v_cache", "k", call["v_cache"][0, 2:5]),
        ("k_cache", "q", call["k_cache"][1, 4:]),
    ):
        with pytest.raises(ValueError, match=f"^{name} must not overlap {other}"):
            fa3.flash_attn_with_kvcache(**call | {other: tensor})
    with pytest.raises(ValueError, match=r"^out must not overlap v_cache"):
        fa3.flash_attn_with_kvcache(**call, out=call["v_cache"][1, :4])
