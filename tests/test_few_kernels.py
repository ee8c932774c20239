"""How many kernels a server of Llama-3-8B meets, over calls of all sizes: on CPU tensors, with what
would compute them left out.

The tensors are never written, so they take no memory however large the caches are.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fa3
from fa3.calls import decode, forward, mixed, varlen_call
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning import tilings
from fa3.planning.gpu import H100, H200
from fa3.planning.planner import plan_forward
from fa3.problem import Problem
from fa3.reference.cache import HostAppend
from fa3.running.compiler import key_of
from fa3.schedules import SplitTiles, TileList
from fa3.schedules.marked import RecomputeTiles
from fa3.tools import warmup
from fa3.tools.models import CALLS, CAUSAL, PAGE_SIZES, PRESETS

MODEL = PRESETS["llama3-8b"]

MOST_BATCH, LONGEST, MOST_TOKENS = 256, 1 << 17, 1 << 20
"""Sequences of a call, tokens of a sequence, and tokens of a call, at most."""

PAGE_SIZE = 64


def between(draw: random.Random, least: int, most: int) -> int:
    """Draw a number, as often between 1 and 2 as between 1000 and 2000."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def ends_of(counts: list[int]) -> torch.Tensor:
    """Where sequences with so many rows end."""
    return int32([0, *counts]).cumsum(0, dtype=torch.int32)


def queries(*rows: int) -> torch.Tensor:
    return bfloat16(*rows, MODEL.heads_q, MODEL.head_dim)


def keys(*rows: int) -> torch.Tensor:
    return bfloat16(*rows, MODEL.heads_kv, MODEL.head_dim)


@pytest.fixture
def met(monkeypatch):
    """Note the kernels of all calls, which compute nothing."""
    found: dict = {}

    def of_plan(plan, *rest):
        found.update((launch.kernel, None) for launch in plan.launches())

    def of_cache(plan, *rest):
        found.update((launch.kernel, None) for launch in plan.launches)

    def of_packed(plan, *rest, **options):
        found.update(dict.fromkeys((*plan.kernels(), plan.tile_table())))

    def of_joined(plan, window, operands, *rest):
        found.update(dict.fromkeys((*plan.kernels(), plan.joined_table())))

    monkeypatch.setattr(forward, "execute", of_plan)
    monkeypatch.setattr(decode, "execute_decode", of_cache)
    monkeypatch.setattr(varlen_call, "execute_decode", of_cache)
    monkeypatch.setattr(mixed, "execute_varlen", of_packed)
    monkeypatch.setattr(varlen_call, "execute_varlen", of_packed)
    monkeypatch.setattr(varlen_call, "execute_joined", of_joined)
    monkeypatch.setattr(
        HostAppend, "__call__", lambda self, *given: found.update({self.kernel: None})
    )
    return found


@pytest.fixture(scope="module")
def compiled():
    """What `warmup` compiles for the model."""
    rotary = warmup.rotary_of(MODEL, "halves", MODEL.dtype)
    return set(warmup.kernels_of(MODEL, warmup.CALLS, (0, PAGE_SIZE), rotary))


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

EXPECTED = {"vLLM": 6, "pages": 6, "no pages": 6, "packed prompts": 8}
"""The kernels that each of them meets; docs/environment.md names them."""


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_meets_few_kernels(server, gpu, met, compiled, monkeypatch):
    monkeypatch.setattr(forward, "H200", gpu)
    forward.prepare_forward.cache_clear()
    draw = random.Random(0)
    for call, count in SERVERS[server]:
        for _ in range(count):
            call(draw)
    forward.prepare_forward.cache_clear()
    assert len({key_of(kernel) for kernel in met}) == EXPECTED[server]
    assert met.keys() <= compiled


def test_the_documentation_counts_what_is_compiled(monkeypatch):
    monkeypatch.setattr(warmup, "known_gpus", lambda: [H200, H100])
    page = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    written = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    rotary = warmup.rotary_of(MODEL, "halves")
    made = {call: set(warmup.kernels_of(MODEL, (call,), PAGE_SIZES, rotary)) for call in CALLS}
    assert {call: int(count) for call, count in written.items()} == {
        call: len(kernels) for call, kernels in made.items()
    }
    assert f"has {len(set().union(*made.values()))} kernels in all" in page
    guide = (Path(__file__).parents[1] / "docs" / "decoding.md").read_text()
    assert f"compiles {len(made['cache'] | made['dense'])} kernels" in guide


def draw_problem(draw: random.Random) -> Problem:
    """Draw a causal problem with more keys than queries, and heads of 128 that share keys."""
    seqlen_k = between(draw, 1, LONGEST)
    seqlen_q = between(draw, 1, min(seqlen_k, 8192))
    batch = between(draw, 1, min(MOST_BATCH, MOST_TOKENS // seqlen_k))
    spec = warmup.spec_of(MODEL, CAUSAL)
    return Problem(spec, batch, seqlen_q, seqlen_k, draw.choice((1, 8)), 4, CAUSAL)


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_heads_that_share_keys_run_in_pairs_with_three_kernels(gpu):
    draw = random.Random(1)
    found = {
        launch.kernel
        for problem in (draw_problem(draw) for _ in range(1000))
        for launch in plan_forward(problem, gpu).launches()
    }
    assert len(found) == 3
    assert {(kernel.schedule_type, kernel.config.cluster_h) for kernel in found} == {
        (TileList, 2),
        (SplitTiles, 2),
        (RecomputeTiles, 1),
    }


def test_short_calls_and_long_ones_have_one_kernel(monkeypatch):
    """Each launch says which reference; unless no call may have a fixed one."""
    problems = [
        Problem(warmup.spec_of(MODEL, CAUSAL), 1, tokens, tokens, 8, 4, CAUSAL)
        for tokens in (512, 8192)
    ]
    short, long = map(plan_forward, problems)
    assert short.kernel() == long.kernel() and short.kernel().has_online_and_fixed
    assert (short.config.fixed_reference, long.config.fixed_reference) == (False, True)
    assert (short.online_max, long.online_max) == (1, 0)
    assert len(short.launches()) == 1 and len(long.launches()) == 2
    again = long.launches()[1].kernel
    assert not again.has_online_and_fixed and long.again.online_max is None
    alone = plan_forward(problems[0], config=ForwardConfig(128, 128), schedule="list")
    assert not alone.kernel().has_online_and_fixed and alone.online_max is None
    half = replace(problems[0], spec=replace(problems[0].spec, dtype="float16"))
    assert not plan_forward(half).kernel().has_online_and_fixed
    monkeypatch.setattr(tilings, "REFERENCE", "following")
    assert not plan_forward(problems[1]).kernel().has_online_and_fixed
