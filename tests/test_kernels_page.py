"""docs/kernels.md says which kernel serves which call: its numbers and its examples."""

import re
from pathlib import Path

import pytest

import fa3
from fa3.calls.packed_calls import plan_varlen
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning import joined, short_queries, tilings
from fa3.planning.decode import DecodePlan, Sizes, choose_cut
from fa3.planning.gpu import H200
from fa3.planning.grouped import GroupedPlan
from fa3.planning.joined import PackedSizes
from fa3.planning.planner import plan_dense
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
    heads = known.heads
    call = plan_varlen(SPEC, CAUSAL, heads, heads_kv, False, False, H200, 0)
    packs_sequences, _, most, has_long = call.route(known, has_gradients, None, True)
    if packs_sequences:
        return "forward, shared tiles"
    if most and has_long:
        return f"decode up to {most} queries, forward for the others"
    return "decode" if most else "forward"


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
    assert short_queries.MOST_SHORT_ROWS == 128
    assert [short_queries.short_queries(ratio) for ratio in (1, 2, 4, 128, 256)] == [
        64, 64, 32, 1, 1,
    ]  # fmt: skip
    assert short_queries.FEWEST_EARLIER_KEYS == 4096
    assert short_queries.IDLE_SHARE == 0.5
    assert FEWEST_ROWS == 128
    assert joined.MOST_SHARED_TILE_KEYS == 256
    assert joined.MultiSequencePlan.of(SPEC, False, False, H200).config.tile_m // 2 == 64
    assert SMALLEST_BOX == 8
    assert tilings.FIXED_FLOPS == 15e9
    assert {row.config.tile_m for row in tilings.TILINGS} == {128, 192}
