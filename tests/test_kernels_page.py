"""docs/kernels.md says which kernel serves which call: its numbers and its examples."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import fa3
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning import routes, tilings
from fa3.planning.decode import DecodePlan, Sizes, choose_cut
from fa3.planning.gpu import H200
from fa3.planning.grouped import GroupedPlan
from fa3.planning.planner import plan_dense
from fa3.planning.ragged import RaggedPlan
from fa3.planning.routes import CACHE, PACKED, PackedSizes, Signature, choose_route
from fa3.primitives.cache_blocks import SMALLEST_BOX, CacheLayout
from fa3.problem import Problem, Window
from fa3.scores.masks import Band

TEXT = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
EXAMPLES = re.findall(r"^\| ((?:dense|packed), [^|]*) \| ([^|]*) \|$", TEXT, re.MULTILINE)

CAUSAL = Window(right=0)
SPEC = fa3.AttentionSpec("bfloat16", 128, 128, Band.of(CAUSAL))


def dense(batch: int, queries: int, keys: int) -> str:
    """Return what serves a dense call with heads 32/8."""
    plan = plan_dense(Problem(SPEC, batch, queries, keys, 8, 4, CAUSAL), H200)
    if isinstance(plan, GroupedPlan):
        return "decode"
    return {"list": "forward, list of tiles", "split": "forward, split tiles"}[plan.schedule.name]


def packed(sizes: tuple[int, ...], heads_kv: int = 8, has_gradients: bool = False) -> str:
    """Return what serves a packed call."""
    known = PackedSizes(*sizes)
    heads = known.heads, heads_kv
    signature = Signature(PACKED, SPEC, CAUSAL, *heads, H200, has_gradients=has_gradients)
    name, most, _ = choose_route(signature, known)
    return {
        routes.SHARED: "forward, shared tiles",
        routes.BOTH: f"decode up to {most} queries, forward for the others",
    }.get(name, name)


CHUNK = 1, 8, 512, 1 << 15, 512, 1 << 15
SERVED = {
    "dense, 4 x 4096 queries on 4096 keys, heads 32/8": lambda: dense(4, 4096, 4096),
    "dense, 1 x 640 queries on 8192 keys, heads 32/8": lambda: dense(1, 640, 8192),
    "dense, 1 x 1 query on 32768 keys, heads 32/8": lambda: dense(1, 1, 1 << 15),
    "dense, 8 x 4 queries on 1024 keys, heads 32/8": lambda: dense(8, 4, 1024),
    "packed, 16 x 1024, heads 32/8": lambda: packed((16, 32, 1 << 14, 1 << 14, 1024, 1024)),
    "packed, 8192 x 34, heads 32/8": lambda: packed((8192, 32, 8192 * 34, 8192 * 34, 34, 34)),
    "packed, 7 chunks of 512 and 64 x 1 query on 8192 keys, heads 32/8": lambda: packed(
        (71, 32, 7 * 512 + 64, 71 * 8192, 512, 8192)
    ),
    "packed, 64 x 1 query on 8192 keys, heads 32/8": lambda: packed(
        (64, 32, 64, 64 * 8192, 1, 8192)
    ),
    "packed, 1 x 512 queries on 32768 keys, heads 8/1": lambda: packed(CHUNK, 1),
    "packed, 1 x 512 queries on 32768 keys, heads 8/1, with gradients": lambda: packed(
        CHUNK, 1, True
    ),
}


def test_the_page_has_these_examples():
    assert [label for label, _ in EXAMPLES] == list(SERVED)


@pytest.mark.parametrize("call", routes.RULES)
def test_the_tables_are_the_rules_of_the_code(call):
    """In the same order. To write a table again, print `rows_of_page`."""
    table = "\n".join(rows_of_page(call))
    assert f"\n| --- | --- |\n{table}\n\n" in TEXT.replace("|---|---|", "| --- | --- |")


def rows_of_page(call: str) -> list[str]:
    """Return the rows of the table for a kind of calls."""
    return [f"| {rule.reason} | {rule.name} |" for rule in routes.RULES[call]]


STEP = Signature(CACHE, SPEC, CAUSAL, 32, 8, H200, cache=CacheLayout(64))
OF_STEP = PackedSizes(8, 32, 4096, 0, 512, 8192)


@pytest.mark.parametrize(
    ("fields", "sizes", "name", "most"),
    [
        ({}, {}, routes.BOTH, 32),
        ({}, {"fewest_q": 32}, routes.BOTH, 32),
        ({}, {"fewest_q": 33}, routes.FORWARD, 0),
        ({}, {"total_q": 0}, routes.NOTHING, 0),
        ({}, {"max_seqlen_k": 0}, routes.ZEROS, 0),
        ({}, {"max_seqlen_q": 32}, routes.DECODE, 32),
        ({}, {"batch": 1, "total_q": 200}, routes.DECODE, 256),
        ({}, {"batch": 1, "total_q": 200, "max_seqlen_k": 4095}, routes.BOTH, 32),
        ({"has_packed_queries": False}, {}, routes.DECODE, 512),
        ({"num_splits": 1}, {}, routes.DECODE, 512),
        ({"batch_invariant": True}, {}, routes.DECODE, 512),
        ({"sm_margin": 4}, {}, routes.DECODE, 512),
        ({"cache": CacheLayout(5)}, {}, routes.DECODE, 512),
        ({"cache": CacheLayout(64, left_padded=True)}, {}, routes.DECODE, 512),
        ({"cache": CacheLayout(64, batch_indexed=True)}, {}, routes.DECODE, 512),
    ],
    ids=str,
)
def test_calls_on_a_cache_follow_the_rules(fields, sizes, name, most):
    route = choose_route(replace(STEP, **fields), OF_STEP._replace(**sizes))
    assert (route.name, route.most_queries) == (name, most)
    assert str(most or "") in route.explain() or name == routes.DECODE


@pytest.mark.parametrize(("label", "kernel"), EXAMPLES)
def test_examples_are_served_as_the_page_says(label, kernel):
    assert SERVED[label]() == kernel


@pytest.mark.parametrize(
    ("queries", "heads_kv", "ratio", "keys", "options"),
    [
        (8, 8, 4, 1 << 15, {}),
        (9, 8, 4, 1 << 15, {}),
        (8, 8, 4, 1 << 15, {"appends": True}),
        (9, 8, 4, 1 << 15, {"appends": True}),
        (1, 8, 4, 1 << 15, {"is_packed": True}),
        (512, 8, 4, 512, {}),
        (512, 8, 4, 576, {}),
        (512, 1, 8, 1 << 15, {}),
    ],
)
def test_parts_are_merged_where_the_page_says(queries, heads_kv, ratio, keys, options):
    sizes = Sizes(4, queries, heads_kv, ratio, keys)
    cut = choose_cut(sizes, sizes.bounds(CAUSAL), H200.num_sms, **options)
    is_packed = options.get("is_packed", False)
    plan = DecodePlan(SPEC, CacheLayout(), sizes, sizes.bounds(CAUSAL), cut, 132, is_packed)
    rows, parts = min(64, queries * ratio), min(132 // heads_kv, -(-keys // 64))
    assert plan.merges_inside == (rows * parts <= 512) == (len(plan.launches) == 1)


def test_numbers_are_those_of_the_code():
    assert routes.MOST_SHORT_ROWS == 128
    limits = [
        Signature(PACKED, SPEC, CAUSAL, ratio, 1, H200).short_limit for ratio in (1, 2, 4, 128, 256)
    ]
    assert limits == [64, 64, 32, 1, 1]
    assert routes.FEWEST_EARLIER_KEYS == 4096
    assert routes.IDLE_SHARE == 0.5
    assert FEWEST_ROWS == 128
    assert routes.MOST_SHARED_TILE_KEYS == 256
    assert RaggedPlan(SPEC, False, False, H200).shared_config.tile_m // 2 == 64
    assert SMALLEST_BOX == 8
    assert tilings.FIXED_FLOPS == 15e9
    assert {row.config.tile_m for row in tilings.TILINGS} == {128, 192}
