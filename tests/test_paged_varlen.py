"""`flash_attn_varlen_func` on pages with scores and masks of the user's, and with `seqused_q`."""

import random
from dataclasses import replace

import pytest
import torch
from gpu_checks import captured
from pairs import pairs
from score_problems import Documents, Recipe, RelativeBias
from varlen_problems import (
    VarlenProblem,
    attend,
    check_call,
    check_varlen,
    integers,
    make_call,
    note_attending,
    on_pages,
    random_problem,
    unused,
)

import fa3
from fa3.planning.routes import FEWEST_EARLIER_KEYS
from fa3.problem import NO_BOUND

FAMILIES = 10
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

FUNCTIONS = (
    {"score": "relative"}, {"mask": "prefix"}, {"score": "gate", "mask": "span"},
    {"mask": "documents"}, {},
)  # fmt: skip
"""What of a recipe is the user's. A call without has `seqused_q`, as some of the others have."""


def check(
    problem: VarlenProblem, page_size: int, where, seed: int = 0, capacity: int = 0, **options
) -> None:
    """Check a call with the keys of a problem in pages."""

    def change(problem: VarlenProblem, call: dict) -> dict:
        return on_pages(problem, call, page_size, capacity)

    check_call(problem, where, seed, change, **options)


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls(family, where):
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
        check(problem, (16, 64, 5, 24)[family % 4], where, seed)


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
    check(problem, page_size, where)


@pytest.mark.parametrize("functions", [FUNCTIONS[2], {}], ids=str)
def test_calls_of_the_decode_kernel_alone(functions, where, monkeypatch):
    attending = note_attending(monkeypatch)
    recipe = Recipe(sinks="float32", **functions)
    problem = VarlenProblem((60, 3, 0), (300, 130, 40), (60, 2, 0), recipe=recipe, causal=True)
    for options in ({"num_splits": 3}, {"sm_margin": 8}, {"capacity": FEWEST_EARLIER_KEYS}):
        attending.clear()
        check(problem, 16, where, **options)
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
