"""Which kernels calls of many lengths load on a GPU, with a compiler that only notes them."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_checks import forget_prepared_calls
from test_latest import operand, packed_operands
from varlen_problems import ends_of, signature_with

import fa3
from fa3.calls import devices, execution, prepare
from fa3.calls.call import AttentionCall
from fa3.calls.execution import PackedCall
from fa3.calls.options import PACKED as PACKED_KEYS
from fa3.calls.options import Options
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning import routes, tilings
from fa3.planning.costs import H100, H200
from fa3.planning.decode import DecodePlan
from fa3.planning.planner import plan_dense, plan_forward
from fa3.planning.routes import (
    BOTH,
    BOTH_SPLIT,
    CACHE,
    DECODE,
    FORWARD,
    PACKED,
    SPLIT,
    PackedSizes,
    Signature,
    choose_route,
    launches_of_route,
)
from fa3.primitives.cache_blocks import SMALLEST_BOX, CacheLayout
from fa3.problem import Problem, Window
from fa3.running.compiler import key_of
from fa3.schedules.stream_k import NoSplit
from fa3.scores.masks import Band
from fa3.tools import warmup
from fa3.tools.models import CALLS, CAUSAL, PAGE_SIZES, PRESETS, Model, causal_window

PAGE_SIZE = 64

QUERIES = (4096, 1000, 129, 128, 100, 64, 33, 32, 17, 16, 2, 1)
"""The most queries of a sequence: fewer and more than the decode kernel's share of a batch has."""

KEYS = (64, 128, 256, 4096, 8192, 1 << 17)  # tokens that a sequence has room for

BATCHES = (1, 7, 64)

MODELS = {
    **PRESETS,
    "both sides": Model(16, 4, 64, 64, windows=(Window(127, 128),)),
    "all keys": Model(8, 8, 64, 128, windows=(Window(),)),
    "sliding, MQA": Model(8, 1, 256, 256, windows=(causal_window(512),), softcap=30.0),
    "FP8": Model(128, 8, 128, 128, "float8_e4m3fn", has_fp8_cache=True),
}


@pytest.fixture
def loaded(monkeypatch) -> Iterator[dict]:
    """Note every kernel that is loaded."""
    found: dict = {}

    def load(kernel):
        found[kernel] = None
        return lambda *arguments: None

    gpu = SimpleNamespace(multi_processor_count=H200.num_sms, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for module in (execution, prepare):
        monkeypatch.setattr(module, "load_kernel", load)
    monkeypatch.setattr(devices, "gpu_of", lambda device: H200)
    # It would make a tensor on the GPU.
    monkeypatch.setattr(prepare, "scales_on", lambda *arguments: None)
    forget_kernels()
    yield found
    forget_kernels()


def forget_kernels() -> None:
    execution.packed_call.cache_clear()
    execution.decode_alone.cache_clear()


def dtype_of(model: Model) -> torch.dtype:
    return getattr(torch, model.dtype)


def prepare_on_pages(model: Model, window: Window, batch: int, queries: int, keys: int):
    """Prepare a step of vLLM."""
    dtype = dtype_of(model)
    cache, of_v = (
        operand(500, PAGE_SIZE, model.heads_kv, size, dtype=dtype, device="cuda:0")
        for size in (model.head_dim, model.head_dim_v)
    )
    integers = {
        "seqused_k": (batch,), "page_table": (batch, keys // PAGE_SIZE),
        "cu_seqlens_q": (batch + 1,),
    }  # fmt: skip
    given = {
        "q": operand(1, model.heads_q, model.head_dim, dtype=dtype, device="cuda:0"),
        "k": cache,
        "v": of_v,
        **{
            name: operand(*shape, dtype=torch.int32, device="cuda:0")
            for name, shape in integers.items()
        },
    }
    if model.sinks:
        given["sinks"] = operand(model.heads_q, dtype=dtype, device="cuda:0")
    options = Options(window, model.softcap, max_seqlen_q=queries)
    return prepare.prepare_call.__wrapped__(AttentionCall(**given, max_seqlen_q=queries), options)


@pytest.mark.parametrize("name", MODELS)
def test_steps_on_pages_load_what_warm_up_compiles(name, loaded):
    model = MODELS[name]
    compiled = set(warmup.kernels_of(model, ("paged",), (PAGE_SIZE,), None))
    for window, *sizes in product(model.windows, BATCHES, QUERIES, KEYS):
        kernels = prepare_on_pages(model, window, *sizes).run.__self__
        if isinstance(kernels, PackedCall):
            kernels.prepared(SPLIT, 0)
            early = set(loaded)
            kernels.find(PackedSizes(1, model.heads_q, sizes[1], 0, *sizes[1:]))
            assert loaded.keys() == early, (window, *sizes)
        assert loaded.keys() <= compiled, (window, *sizes)
    assert len(loaded) > (1 if model.is_fp8 else 2)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_load_what_warm_up_compiles(name, loaded):
    """Whatever kernel a call takes once its lengths are known, too."""
    model = MODELS[name]
    compiled = set(warmup.kernels_of(model, ("packed",), (0,), None))
    dtype, device = dtype_of(model), torch.device("cuda:0")
    for window in model.windows:
        q, k, v = (
            operand(1, heads, size, dtype=dtype, device=device)
            for heads, size in (
                (model.heads_q, model.head_dim),
                (model.heads_kv, model.head_dim),
                (model.heads_kv, model.head_dim_v),
            )
        )
        described = packed_operands(
            q=q, k=k, v=v, sinks=operand(model.heads_q, dtype=dtype, device=device)
            if model.sinks else None,
        )  # fmt: skip
        options = Options(window, model.softcap, kind=PACKED_KEYS)
        execution.packed_call.cache_clear()
        call = prepare.prepare_call.__wrapped__(described, options).run.__self__
        if model.is_fp8:
            call = call.attend_transposed.__self__
        call.prepared(SPLIT, 0)
        for queries, overlaps_forward in product(() if model.is_fp8 else QUERIES, (False, True)):
            call.prepared(BOTH if overlaps_forward else DECODE, queries)
        assert loaded.keys() <= compiled, window
    assert len(loaded) > (3 if model.is_fp8 else 4)


MODEL = PRESETS["llama3-8b"]

MOST_BATCH, LONGEST, MOST_TOKENS = 256, 1 << 17, 1 << 20
"""Sequences of a call, tokens of a sequence, and tokens of a call, at most."""


def between(draw: random.Random, least: int, most: int) -> int:
    """Draw a number, as often between 1 and 2 as between 1000 and 2000."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def queries(*rows: int) -> torch.Tensor:
    return bfloat16(*rows, MODEL.heads_q, MODEL.head_dim)


def keys(*rows: int) -> torch.Tensor:
    return bfloat16(*rows, MODEL.heads_kv, MODEL.head_dim)


@pytest.fixture
def met(monkeypatch):
    """Note the kernels of all calls, which compute nothing."""
    found: dict = {}

    def of_plan(plan, *rest, **named):
        found.update((launch.kernel, None) for launch in plan.launches())

    def of_packed(call, values):
        route, _ = call.find(call.sizes(values))
        # Few calls have the kernels for tiles that the GPU splits.
        name = {SPLIT: FORWARD, BOTH_SPLIT: BOTH}.get(route.name, route.name)
        launches = launches_of_route(call.signature, name, route.most_queries)
        found.update((launch.kernel, None) for launch in launches)

    monkeypatch.setattr(execution, "execute", of_plan)
    monkeypatch.setattr(execution, "execute_decode", of_plan)
    monkeypatch.setattr(PackedCall, "attend", of_packed)
    monkeypatch.setattr(
        prepare, "append_tokens", lambda kernel, *given: found.update({kernel: None})
    )
    forget_prepared_calls()
    yield found
    forget_prepared_calls()


@pytest.fixture(scope="module")
def compiled() -> dict[str, set]:
    """What `warmup` compiles for the model on an H200 and an H100, by the kind of calls."""
    rotary = warmup.rotary_of(MODEL, "halves")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "known_gpus", lambda: [H200, H100])
        return {call: set(warmup.kernels_of(MODEL, (call,), PAGE_SIZES, rotary)) for call in CALLS}


def prefill(draw: random.Random) -> None:
    """Prompts of one length."""
    seqlen = between(draw, 1, LONGEST)
    batch = between(draw, 1, min(MOST_BATCH, MOST_TOKENS // seqlen))
    fa3.flash_attn_func(queries(batch, seqlen), *(keys(batch, seqlen) for _ in "kv"), causal=True)


def packed_prefill(draw: random.Random) -> None:
    """Prompts of different lengths."""
    longest = between(draw, 1, LONGEST)
    batch = between(draw, 1, min(MOST_BATCH, MOST_TOKENS // longest))
    counts = [between(draw, 1, longest) for _ in range(batch)]
    ends, total = ends_of(counts), sum(counts)
    fa3.flash_attn_varlen_func(
        queries(total), keys(total), keys(total), ends, ends, max(counts), max(counts), causal=True
    )


def with_cache(draw: random.Random, page_size: int | None) -> None:
    """New tokens of every sequence, one or a part of a prompt, appended with their embedding."""
    capacity = between(draw, PAGE_SIZE, LONGEST)
    batch = between(draw, 1, min(MOST_BATCH, MOST_TOKENS // capacity))
    new = draw.choice((1, between(draw, 1, min(4096, capacity))))
    lengths = [between(draw, 1, capacity - new + 1) - 1 for _ in range(batch)]
    rows, table = (batch, capacity), None
    if page_size is not None:
        pages = -(-capacity // page_size)
        rows, table = (batch * pages, page_size), torch.arange(batch * pages).int()
        table = table.view(batch, pages)
    fa3.flash_attn_with_kvcache(
        queries(batch, new), *(keys(*rows) for _ in "kv"), *(keys(batch, new) for _ in "kv"),
        rotary_cos=bfloat16(capacity, MODEL.head_dim // 2),
        rotary_sin=bfloat16(capacity, MODEL.head_dim // 2),
        cache_seqlens=int32(lengths), page_table=table, causal=True, rotary_interleaved=False,
        return_lse=draw.random() < 0.5,
    )  # fmt: skip


def mixed_batch(draw: random.Random) -> None:
    """A step of vLLM: some requests decode, others are at some part of their prompt."""
    batch = between(draw, 1, MOST_BATCH)
    prompts = draw.choice((0, between(draw, 1, batch), batch))
    counts = [between(draw, 1, 4096) for _ in range(prompts)] + [1] * (batch - prompts)
    lengths = [between(draw, count, LONGEST) for count in counts]
    pages = -(-LONGEST // PAGE_SIZE)
    # Whose pages these are does not matter to a call that only reads them.
    caches = keys(1, PAGE_SIZE), keys(1, PAGE_SIZE)
    fa3.flash_attn_varlen_func(
        queries(sum(counts)), *caches, ends_of(counts), None, max(counts), max(lengths),
        seqused_k=int32(lengths), causal=True, page_table=int32([[0] * pages]).repeat(batch, 1),
        out=queries(sum(counts)),
    )  # fmt: skip


SERVERS = {
    "vLLM": ((mixed_batch, 60),),
    "pages": ((prefill, 300), (lambda draw: with_cache(draw, PAGE_SIZE), 80)),
    "no pages": ((prefill, 300), (lambda draw: with_cache(draw, None), 80)),
    "packed prompts": ((packed_prefill, 100), (lambda draw: with_cache(draw, PAGE_SIZE), 80)),
}
"""Ways to serve: kinds of calls, and how many of them are made."""

EXPECTED = {"vLLM": 6, "pages": 14, "no pages": 14, "packed prompts": 13}
"""The kernels that each of them meets; docs/environment.md names them."""


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_meets_few_kernels(server, met, compiled):
    draw = random.Random(0)
    for call, count in SERVERS[server]:
        for _ in range(count):
            call(draw)
    assert len({key_of(kernel) for kernel in met}) == EXPECTED[server]
    assert met.keys() <= set().union(*compiled.values())


def test_the_documentation_counts_what_is_compiled(compiled):
    page = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    assert {call: int(count) for call, count in written.items()} == {
        call: len(kernels) for call, kernels in compiled.items()
    }
    assert f"has {len(set().union(*compiled.values()))} kernels in all" in page
    guide = (Path(__file__).parents[1] / "docs" / "decoding.md").read_text()
    assert f"compiles {len(compiled['cache'] | compiled['dense'])} kernels" in guide


def test_long_calls_have_a_second_launch_and_short_ones_an_online_softmax():
    problems = [
        Problem(warmup.spec_of(MODEL, CAUSAL), 1, tokens, tokens, 8, 4, CAUSAL)
        for tokens in (512, 8192)
    ]
    short, long = map(plan_forward, problems)
    assert (short.config.fixed_row_max, long.config.fixed_row_max) == (False, True)
    assert len(short.launches()) == 1 and len(long.launches()) == 2


TEXT = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
EXAMPLES = re.findall(r"^\| ((?:dense|packed), [^|]*) \| ([^|]*) \|$", TEXT, re.MULTILINE)

SPEC = fa3.AttentionSpec("bfloat16", 128, 128, Band.of(CAUSAL))


def dense(batch: int, queries: int, keys: int) -> str:
    """Return what serves a dense call with heads 32/8."""
    plan = plan_dense(Problem(SPEC, batch, queries, keys, 8, 4, CAUSAL), H200)
    if isinstance(plan, DecodePlan):
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
        ({}, {}, routes.FORWARD, 0),
        ({}, {"total_q": 4097}, routes.BOTH, 32),
        ({}, {"batch": 1, "total_q": 512, "max_seqlen_k": 1023}, routes.DECODE, 512),
        ({}, {"batch": 1, "total_q": 512, "max_seqlen_k": 1024}, routes.FORWARD, 0),
        ({}, {"total_q": 0}, routes.NOTHING, 0),
        ({}, {"max_seqlen_k": 0}, routes.ZEROS, 0),
        ({}, {"max_seqlen_q": 32}, routes.DECODE, 32),
        ({}, {"batch": 1, "total_q": 200}, routes.BOTH_SPLIT, 32),
        ({}, {"batch": 16, "total_q": 527}, routes.BOTH_SPLIT, 32),
        ({}, {"batch": 33, "total_q": 544}, routes.BOTH, 32),
        ({}, {"batch": 32, "total_q": 1055}, routes.BOTH, 32),
        ({}, {"batch": 32, "total_q": 1055, "max_seqlen_k": 16384}, routes.BOTH_SPLIT, 32),
        ({}, {"batch": 1, "total_q": 1152, "max_seqlen_k": 16384}, routes.BOTH, 32),
        ({}, {"batch": 1, "total_q": 200, "max_seqlen_q": 200}, routes.SPLIT, 0),
        ({}, {"batch": 1, "total_q": 200, "max_seqlen_q": 64}, routes.DECODE, 64),
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


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("queries", "heads_kv", "ratio", "keys"),
    [
        (1, 8, 4, 1 << 15), (4, 8, 4, 1 << 15), (5, 8, 4, 1 << 15), (3, 8, 4, 512), (4, 8, 4, 512),
        (64, 8, 4, 512), (64, 8, 4, 576), (64, 16, 1, 1 << 15), (128, 16, 1, 1 << 15),
        (512, 1, 8, 1 << 15),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"appends": True}, {"is_packed": True}])
def test_parts_are_merged_where_the_page_says(batch, queries, heads_kv, ratio, keys, options):
    problem = Problem(SPEC, batch, queries, keys, heads_kv, ratio, CAUSAL)
    plan = DecodePlan.of(problem, H200, CacheLayout(), **options)
    rows, parts = min(64, queries * ratio), min(132 // heads_kv, -(-keys // 64))
    tiles, few = plan.sizes.num_tiles, rows * parts <= 512
    is_whole = keys <= 512 and rows >= 16 and tiles <= 132 and "is_packed" not in options
    is_busy = -tiles % 132 <= (tiles + -tiles % 132) / 8 and not options
    inside = (few and rows <= 16) or (is_busy and (few or batch == 1))
    assert isinstance(plan.cut, NoSplit) == ("Tiles stay whole" in plan.explain()) == is_whole
    assert plan.merges_inside == (inside and not is_whole)
    assert (len(plan.launches()) == 1) == (inside or is_whole)


def test_the_page_has_the_numbers_of_the_code():
    text = " ".join(TEXT.split())
    rows = " or ".join(str(n) for n in sorted({row.config.tile_m for row in tilings.TILINGS}))
    assert routes.IDLE_SHARE == 0.5
    for phrase in (
        f"a tile is {rows} queries of one head",
        f"From {tilings.FIXED_FLOPS / 1e9:g} GFLOP on, calls in 16 bits",
        f"The *short limit* is {routes.MOST_SHORT_ROWS} divided by the query heads",
        f"make `total_q / {FEWEST_ROWS}` tiles for each query head",
        f"`max_seqlen_k` up to {routes.MOST_SHARED_TILE_KEYS}, more sequences",
        f"share no divisor of at least {SMALLEST_BOX}",
        "is at most half of the SMs",
        f"or what a window leaves of it, is at least {routes.FEWEST_EARLIER_KEYS}.",
    ):
        assert phrase in text, phrase
    limits = [
        Signature(PACKED, SPEC, CAUSAL, ratio, 1, H200).short_limit for ratio in (1, 2, 4, 128, 256)
    ]
    assert limits == [64, 64, 32, 1, 1]
    assert signature_with(SPEC).shared_tiling.tile_m // 2 == 64
