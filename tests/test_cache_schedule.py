"""Scheduler metadata: what is decided, what is checked, and that calls follow it."""

from dataclasses import replace

import pytest
import torch
from kvcache_problems import CacheProblem, make_call
from kvcache_reference import check_call
from valid_calls import OnGpu

from fa3.calls import assertions as calls_assertions
from fa3.calls import decode as calls
from fa3.calls.kvcache import flash_attn_with_kvcache, prepare_cache_call
from fa3.calls.scheduler_metadata import get_scheduler_metadata
from fa3.planning import decode
from fa3.problem import Window
from fa3.schedules.stream_k import FixedSplit, NoSplit


def metadata(seqlens, seqlen_q=1, heads=(8, 8), **options):
    batch, longest = len(seqlens), max(seqlens) + options.get("max_seqlen_k_new", 0)
    lengths = torch.tensor(seqlens, dtype=torch.int32)
    return get_scheduler_metadata(batch, seqlen_q, longest, *heads, 128, lengths, **options)


@pytest.mark.parametrize(
    ("seqlens", "heads", "whole"),
    [
        ([4096] * 132, (8, 1), True),
        ([4096] * 264, (8, 8), True),
        ([4096] * 40, (8, 1), False),
        ([131072] + [128] * 131, (8, 1), False),
        ([64] * 4, (8, 1), True),
        ([0, 0], (8, 1), True),
    ],
)
def test_tiles_stay_whole_where_they_keep_all_sms_busy(seqlens, heads, whole):
    assert metadata(seqlens, heads=heads).keeps_tiles_whole == whole


def test_a_window_bounds_the_work():
    seqlens = [131072] + [128] * 131
    assert metadata(seqlens, heads=(8, 1), window_size=(127, 0)).keeps_tiles_whole


def test_new_tokens_and_padding_count():
    few = [64] * 4
    assert not metadata(few, heads=(8, 1), max_seqlen_k_new=10_000).keeps_tiles_whole
    long, padding = [10_000] * 4, torch.tensor([9_990] * 4, dtype=torch.int32)
    assert metadata(long, heads=(8, 1), cache_leftpad=padding).keeps_tiles_whole
    ends = torch.tensor([0, 10_000, 10_000, 10_000, 10_000], dtype=torch.int32)
    options = {"cu_seqlens_k_new": ends, "max_seqlen_k_new": 10_000}
    assert not metadata(few, heads=(8, 1), **options).keeps_tiles_whole


def test_what_was_asked_for_stays():
    made = metadata([4096] * 132, heads=(8, 1), num_splits=3, sm_margin=8)
    assert not made.keeps_tiles_whole
    assert made.options(0, 0, False) == made.options(3, 8, False) == (3, 8)
    with pytest.raises(ValueError, match=r"^num_splits must be 0 or, .* 3, got 2"):
        made.options(2, 0, False)
    with pytest.raises(ValueError, match=r"^sm_margin must be 0 or, .* 8, got 1"):
        made.options(0, 1, False)


def test_batch_invariance_does_not_look_at_the_lengths():
    made = metadata([4096] * 132, heads=(8, 1))
    assert made.options(0, 0, False) == (1, 0)
    assert made.options(0, 0, True) == (0, 0)


def made_for(call: dict, **options):
    q, k_cache, v_cache = call["q"], call["k_cache"], call["v_cache"]
    pages = call.get("page_table")
    defaults = {
        "qkv_dtype": q.dtype,
        "headdim_v": v_cache.shape[3],
        "page_size": None if pages is None else k_cache.shape[1],
        "causal": call["causal"],
        "window_size": call["window_size"],
        "has_softcap": bool(call["softcap"]),
        "max_seqlen_k_new": call["k"].shape[1] if "k" in call else 0,
    }
    sizes = (*q.shape[:2], 1 << 20, q.shape[2], k_cache.shape[2], q.shape[3])
    return get_scheduler_metadata(*sizes, call["cache_seqlens"], **(defaults | options))


@pytest.mark.parametrize(("num_splits", "cut"), [(0, NoSplit), (1, NoSplit), (3, FixedSplit)])
def test_calls_follow_it(num_splits, cut, monkeypatch):
    problem = CacheProblem(
        (200, 0, 131), 2, (2, 2, 2), page_size=16, group=4, head_dim_v=96, causal=True, softcap=9.0
    )
    call = make_call(problem)
    cuts = []

    def choose_cut(*arguments):
        cuts.append(decode.choose_cut(*arguments))
        return cuts[-1]

    monkeypatch.setattr(calls, "choose_cut", choose_cut)
    prepare_cache_call.cache_clear()
    caches = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    made = made_for(call, num_splits=num_splits)
    out, lse = flash_attn_with_kvcache(**(call | caches), scheduler_metadata=made, return_lse=True)
    check_call(call, out, lse, tuple(caches.values()))
    assert [type(cut) for cut in cuts] == [cut]


@pytest.mark.parametrize("assertions", [False, True])
def test_lengths_on_a_gpu_decide_nothing(assertions, monkeypatch):
    monkeypatch.setattr(calls_assertions, "ASSERTIONS", assertions)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lengths = torch.full((132,), 4096, dtype=torch.int32).as_subclass(OnGpu)
    made = get_scheduler_metadata(132, 1, 4096, 8, 1, 128, lengths)
    assert made == replace(metadata([4096] * 132, heads=(8, 1)), keeps_tiles_whole=False)


def test_assertions_check_lengths_on_a_gpu(monkeypatch):
    lengths = torch.tensor([30, 40], dtype=torch.int32).as_subclass(OnGpu)
    arguments = 2, 1, 39, 8, 8, 128, lengths
    get_scheduler_metadata(*arguments)
    monkeypatch.setattr(calls_assertions, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match=r"^max_seqlen_k must be .* 40, .* got 39"):
        get_scheduler_metadata(*arguments)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^cache_seqlens cannot be read back while .* captured"):
        get_scheduler_metadata(*arguments)


def test_the_window_is_folded():
    assert metadata([30], causal=True).window == Window(right=0)


@pytest.mark.parametrize(
    ("seqlen_q", "ratio", "heads_kv", "keys"),
    [
        (1, 4, 8, {1000: 256, 3000: 512, 9000: 512}),
        (4, 4, 1, {1000: 256, 3000: 256, 9000: 320, 40_000: 512}),
        (8, 4, 8, {1000: 2048, 9000: 2048}),
        (64, 8, 1, {1000: 2048, 9000: 2048}),
    ],
)
def test_batch_invariant_units_follow_from_a_sequence_and_its_heads(
    seqlen_q, ratio, heads_kv, keys
):
    for batch, capacity, num_ctas in ((1, 50_000, 132), (33, 100_000, 60)):
        sizes = decode.Sizes(batch, seqlen_q, heads_kv, ratio, capacity)
        cut = decode.choose_cut(sizes, Window(), num_ctas, 0, True)
        blocks = {length: -(-length // decode.TILE_N) for length in keys}
        assert {n: cut.unit(blocks[n]) * decode.TILE_N for n in keys} == keys
        most = max(-(-n // cut.unit(n)) for n in range(1, sizes.most_blocks(Window()) + 1))
        assert cut.max_parts == most


def test_a_forced_split_is_kept_in_the_batch_invariant_mode():
    sizes = decode.Sizes(2, 1, 8, 4, 10_000)
    forced = decode.choose_cut(sizes, Window(), 132, 3, True)
    assert forced == decode.choose_cut(sizes, Window(), 132, 3, False)
    assert forced != decode.choose_cut(sizes, Window(), 132, 0, True)
