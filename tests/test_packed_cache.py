"""Packed queries with keys in a cache or in pages: each sequence against its keys alone.

Calls are those of `flash_attn_with_kvcache`, and of `flash_attn_varlen_func` with a page table:
these have scores and masks of the user's, and `seqused_q`.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_checks import captured
from pairs import pairs
from problems import poisoned_allocations
from score_problems import Documents, Recipe, RelativeBias
from test_latest import operand
from test_split import records
from varlen_problems import (
    VarlenProblem,
    attend,
    check_call,
    check_varlen,
    check_wrong_ends,
    integers,
    make_call,
    note_attending,
    on_cache,
    on_pages,
    random_problem,
    unused,
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
from fa3.problem import NO_BOUND, AttentionSpec, Problem
from fa3.scores.masks import Band

FAMILIES = 10
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

CUTS = {}, {}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}


def check(
    problem: VarlenProblem, page_size: int | None, where, seed: int = 0,
    change: Callable = on_cache, capacity: int = 0, **options,
) -> None:  # fmt: skip
    """Check a call with the keys of a problem in a cache, or in pages of `on_pages`."""
    change = partial(change, page_size=page_size, capacity=capacity)
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
        check(drawn(seed, 300), page_size, where, seed, partial(on_cache, is_indexed=True), **cut)


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
    check_wrong_ends(call, **options | {"max_seqlen_q": 50})


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
    assert plan.memory.cleared == plan.workspace.numbers_of_records > 0
    # Elsewhere every record has a CTA that writes it.
    assert plan_of(True).memory.cleared == plan_of(False, num_splits=3).memory.cleared == 0


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
    ("heads", "most"), [(1, MOST_RAGGED_ROWS), (128, MOST_FORWARD_TILES // 128 * FEWEST_ROWS - 1)]
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


# ------------------------------------------------------------------------------------ keys in pages

FUNCTIONS = (
    {"score": "relative"}, {"mask": "prefix"}, {"score": "gate", "mask": "span"},
    {"mask": "documents"}, {},
)  # fmt: skip
"""What of a recipe is the user's. A call without has `seqused_q`, as some of the others have."""


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls_on_pages(family, where):
    for number, longest in enumerate((150,) if where == "cpu" else (700, 40, 40)):
        seed = family + number * FAMILIES
        draw = random.Random(seed)
        problem = random_problem(seed, DTYPES[family % 2], family, longest)
        functions = FUNCTIONS[family % len(FUNCTIONS)]
        given = {"score": None, "mask": None} | functions
        counts = None
        if family % 3 == 0 or not functions:
            counts = tuple(
                draw.choice((-3, 0, n, 2 * n, draw.randint(0, n))) for n in problem.seqlens_q
            )
        problem = replace(problem, used_q=counts, recipe=problem.recipe._replace(**given))
        check(problem, (16, 64, 5, 24)[family % 4], where, seed, on_pages)


STEP = VarlenProblem(
    (140, 1, 0, 70, 5, 1, 40),
    (200, 300, 40, 70, 0, 1, 100),
    heads_kv=2,
    group=4,
    head_dim=128,
    causal=True,
    spare=5,
)
"""Chunks of prompts beside sequences that decode: both kernels attend."""

USED = (130, 1, 0, 40, 5, 0, 9)


@pairs(
    page_size=[16, 64, 5],
    functions=FUNCTIONS,
    used=[None, USED],
    window=[(NO_BOUND, NO_BOUND), (100, 0)],
    dtype=DTYPES,
)
def test_a_step_of_an_engine(page_size, functions, used, window, dtype, where):
    recipe = Recipe(**functions)
    problem = replace(STEP, used_q=used, recipe=recipe, window=window, dtype=dtype)
    check(problem, page_size, where, change=on_pages)


@pytest.mark.parametrize("functions", [FUNCTIONS[2], {}], ids=str)
def test_calls_of_the_decode_kernel_alone(functions, where, monkeypatch):
    attending = note_attending(monkeypatch)
    recipe = Recipe(sinks="float32", **functions)
    problem = VarlenProblem((60, 3, 0), (300, 130, 40), (60, 2, 0), recipe=recipe, causal=True)
    for options in ({"num_splits": 3}, {"sm_margin": 8}, {"capacity": FEWEST_EARLIER_KEYS}):
        attending.clear()
        check(problem, 16, where, change=on_pages, **options)
        assert attending and "forward" not in attending


@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"recipe": Recipe(20.0)}], ids=str)
def test_chunks_with_huge_scores(options, device):
    """The fixed row max of long sequences fails, and their rows are computed once more."""
    problem = VarlenProblem(
        (300, 2, 200), (900, 500, 200), heads_kv=2, group=4, head_dim=128, causal=True
    )
    problem = replace(problem, **options)
    call = make_call(problem, 0, device)
    call |= {name: 40 * call[name] for name in "qk"}
    out = fa3.flash_attn_varlen_func(**on_pages(problem, call, 16))
    for rows in problem.rows:
        at_q, at_k = (slice(one.start, one.stop) for one in rows)
        q, k, v = call["q"][None, at_q], call["k"][None, at_k], call["v"][None, at_k]
        expected = fa3.flash_attn_func(
            q, k, v, causal=True, window_size=problem.window, softcap=problem.recipe.softcap
        )
        torch.testing.assert_close(out[None, at_q], expected, rtol=2e-2, atol=2e-2)


@pairs(page_size=[5, 16, 64], functions=[{}, {"score": "relative", "mask": "prefix"}])
def test_pages_before_a_window_may_hold_anything(page_size, functions, where):
    """An engine frees them, and others write there; NaN times a weight of 0 would be NaN."""
    for queries in ((200, 300, 1), (1, 3, 0)):
        lengths, left = (700, 650, 90), 100
        problem = VarlenProblem(
            queries, lengths, heads_kv=2, group=4, causal=True, window=(left, 0),
            recipe=Recipe(**functions),
        )  # fmt: skip
        call = make_call(problem, 0, where)
        paged = on_pages(problem, call, page_size)
        for row, count, length in zip(paged["page_table"], queries, lengths, strict=True):
            freed = max(0, length - max(1, count) - left) // page_size
            paged["k"][row[:freed].long()] = torch.nan
            paged["v"][row[:freed].long()] = torch.nan
            if where != "cpu":
                row[:freed] = -1
        out, lse = fa3.flash_attn_varlen_func(**paged, return_lse=True)
        check_varlen(problem, call, out, lse)


LAYOUTS = {
    "one after the other": lambda n, page, heads, dim: empty(2, n, page, heads, dim),
    "in turns": lambda n, page, heads, dim: empty(n, 2, page, heads, dim).transpose(0, 1),
    "by head": lambda n, page, heads, dim: empty(2, n, heads, page, dim).transpose(2, 3),
    "in turns, by head": lambda n, page, heads, dim: (
        empty(n, 2, heads, page, dim).transpose(0, 1).transpose(2, 3)
    ),
    "side by side, by head": lambda n, page, heads, dim: empty(n, heads, page, 2, dim).permute(
        3, 0, 2, 1, 4
    ),
}
"""How engines lay keys and values in memory, as (2, pages, page_size, heads, head_dim)."""


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize("queries", [(1, 3, 0), (200, 300, 1)], ids=["short", "long"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_caches_as_engines_lay_them(page_size, queries, where):
    problem = VarlenProblem(queries, (700, 650, 90), heads_kv=2, group=4, causal=True)
    call = make_call(problem, 0, where)
    for layout in LAYOUTS.values():
        paged = on_pages(problem, call, page_size)
        with torch.device(where):
            cache = layout(*paged["k"].shape)
        for name, part in zip("kv", cache, strict=True):
            paged[name] = part.copy_(paged[name])
        check_varlen(problem, call, *attend(paged))


def test_a_captured_graph_serves_other_lengths(device):
    problem = replace(STEP, used_q=USED, recipe=Recipe(score="relative", mask="documents"))
    call = make_call(problem, 0, device)
    paged = on_pages(problem, call, 16)
    given = {name: paged[name] for name in ("cu_seqlens_q", "seqused_q", "seqused_k")}
    kept = {name: tensor.clone() for name, tensor in given.items()}
    given["seqused_q"].zero_()
    given["seqused_k"].zero_()
    fa3.flash_attn_varlen_func(**paged)
    graph, (out, lse) = captured(lambda: fa3.flash_attn_varlen_func(**paged, return_lse=True))
    for name, tensor in kept.items():
        given[name].copy_(tensor)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    graph.replay()
    check_varlen(problem, call, out, lse)
    untouched = unused(problem, len(out), device)
    assert out[untouched].isnan().all() and lse[:, untouched].isnan().all()


# ---------------------------------------------------------------------------- what is refused


@pytest.fixture
def paged() -> dict:
    problem = VarlenProblem((3, 2), (9, 4), heads_kv=2, group=2)
    return on_pages(problem, make_call(problem), 16)


@pytest.mark.compiles
def test_complaints_are_told_while_a_graph_is_traced(paged):
    run = torch.compile(fa3.flash_attn_varlen_func, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="cu_seqlens_q must be None while a graph is traced"):
        run(**paged)


def test_one_split_is_one_split():
    """As in a call on a cache: what a sequence gets does not depend on those beside it."""
    problems = [VarlenProblem((60, 50)[:n], (9000, 5000)[:n], heads_kv=1, group=2) for n in (1, 2)]
    both = on_pages(problems[1], make_call(problems[1]), 16)
    alone = both | {
        "q": both["q"][:60], "cu_seqlens_q": both["cu_seqlens_q"][:2],
        "page_table": both["page_table"][:1], "seqused_k": both["seqused_k"][:1],
    }  # fmt: skip
    same = [
        torch.equal(*(fa3.flash_attn_varlen_func(**x, num_splits=n)[:60] for x in (alone, both)))
        for n in (0, 1)
    ]
    assert same == [False, True]


def test_the_most_queries_are_of_those_that_are_used(paged):
    used = {"seqused_q": integers(2, 9), "max_seqlen_q": 2}
    fa3.flash_attn_varlen_func(**paged | used)


def test_functions_of_one_call_are_not_those_of_the_next(paged):
    """Calls that are alike but for them are told apart."""
    ids = torch.arange(9, dtype=torch.int32).repeat(2, 1)
    plain = fa3.flash_attn_varlen_func(**paged)
    masked = [fa3.flash_attn_varlen_func(**paged | {"mask": Documents(ids, ids)}) for _ in range(3)]
    scored = [
        fa3.flash_attn_varlen_func(**paged | {"score": RelativeBias(table, reach=2)})
        for table in (torch.zeros(4, 5), torch.randn(4, 5), torch.randn(4, 5))
    ]
    assert torch.equal(masked[0], masked[2]) and not torch.equal(masked[0], plain)
    torch.testing.assert_close(scored[0], plain)
    assert not torch.equal(scored[1], scored[2])
    assert torch.equal(plain, fa3.flash_attn_varlen_func(**paged))
