"""`flash_attn_with_kvcache` on CPU tensors: results, the cache, and errors a caller can fix."""

import math
import runpy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invalid_arguments import WRONG_VALUES
from kvcache_problems import CacheProblem, make_call, random_problem
from kvcache_reference import as_bits, check_call, expected
from valid_calls import INDEXED, PAGED, PLAIN, RAGGED, OnGpu, changed
from varlen_problems import integers

from fa3 import flash_attn_func
from fa3 import settings as fa3_settings
from fa3.calls import assertions as calls_assertions
from fa3.calls.cache_call import (
    OF_INTEGERS,
    CacheCall,
    CacheTensors,
    HostValues,
    describe_tensors,
    values_on_host,
)
from fa3.calls.combine import flash_attn_combine
from fa3.calls.kvcache import flash_attn_with_kvcache
from fa3.calls.scheduler_metadata import get_scheduler_metadata

DTYPES = ("bfloat16", "float16")


def run(call: dict, **options):
    """Call the function on copies of the caches; return out, LSE and the caches."""
    caches = call["k_cache"].clone(), call["v_cache"].clone()
    arguments = call | dict(zip(("k_cache", "v_cache"), caches, strict=True)) | options
    out, lse = flash_attn_with_kvcache(**arguments, return_lse=True)
    return out, lse, caches


def check(problem: CacheProblem, seed: int = 0, **options) -> None:
    call = make_call(problem, seed)
    check_call(call, *run(call, **options))


# ------------------------------------------------------------------------------------ results


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.sampled_from(DTYPES))
def test_random_calls(seed, dtype):
    check(random_problem(seed, dtype, seed, lengths=(0, 1, 20, 300)), seed)


@pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {"sm_margin": 100}])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_the_cut_changes_rounding_only(options, seqlen_q):
    problem = CacheProblem((700, 3, 0, 299), seqlen_q, heads_kv=2, group=4, causal=True)
    check(problem, **options)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("page_size", [None, 1, 2, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 127, 128, 129])
def test_lengths(seqlen, page_size, append):
    counts = (1, 1) if append else None
    check(CacheProblem((seqlen, 5), counts=counts, page_size=page_size, causal=True))


@pytest.mark.parametrize("seqlen_q", [1, 2, 17, 64, 65, 80])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_rows_of_a_head_may_take_several_tiles(seqlen_q, group):
    check(CacheProblem((300, 10), seqlen_q, group=group, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", ["same", "float32"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(dtype, table_dtype, interleaved, causal):
    """Queries turn to positions of their own only under a mask that tells them apart."""
    table_dtype = dtype if table_dtype == "same" else table_dtype
    rotary = (32, interleaved, table_dtype)
    check(CacheProblem((50, 0, 7), 4, (4, 4, 4), dtype=dtype, rotary=rotary, causal=causal))


def test_queries_turn_without_new_tokens():
    check(CacheProblem((50, 7), 3, (0, 0), rotary=(64, True, "bfloat16")))


def test_left_padding_hides_keys_and_moves_none():
    problem = CacheProblem((50, 40), 3, leftpads=(50, 11), alibi=1, window=(20, 0))
    check(problem)
    call = make_call(problem)
    _, lse, _ = run(call)
    assert (lse[0] == -math.inf).all()


def test_sequences_may_share_a_row():
    problem = CacheProblem((30, 60, 0), batch_idx=(2, 2, 0), rows=4)
    check(problem)


def test_a_row_of_the_page_table_may_be_chosen():
    problem = CacheProblem((30, 60), counts=(2, 2), batch_idx=(3, 1), rows=5, page_size=16)
    check(problem)


def test_ragged_tokens():
    problem = CacheProblem((30, 0, 9), 2, (0, 7, 1), ragged=True, rotary=(16, False, "bfloat16"))
    check(problem)


@pytest.mark.parametrize("sinks", ["float32", "bfloat16"])
def test_sinks_join_the_denominator(sinks):
    problem = CacheProblem((30, 0), group=4, sinks=sinks)
    check(problem)
    call = make_call(problem)
    out, lse, _ = run(call)
    assert (out[1] == 0).all() and torch.equal(lse[1, :, 0], call["sinks"].float())


@pytest.mark.parametrize("seqlen", [0, 30, 37])
def test_a_length_may_be_one_number(seqlen):
    problem = CacheProblem((37, 37), room=0)
    call = make_call(problem)
    tensor = call | {"cache_seqlens": torch.full((2,), seqlen, dtype=torch.int32)}
    for a, b in zip(run(tensor), run(call, cache_seqlens=seqlen), strict=True):
        assert all(map(torch.equal, map(as_bits_of, a), map(as_bits_of, b)))
    if seqlen == 37:
        everything = run(call, cache_seqlens=None)
        assert torch.equal(everything[0], run(tensor)[0])


def as_bits_of(tensor):
    return as_bits(tensor) if tensor.element_size() == 2 else tensor


def test_returns():
    call = make_call(CacheProblem((30, 9), group=4, head_dim_v=96))
    out = flash_attn_with_kvcache(**call)
    assert isinstance(out, torch.Tensor) and out.is_contiguous() and out.shape == (2, 1, 4, 96)
    same, lse = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert torch.equal(out, same) and lse.shape == (2, 4, 1) and lse.dtype == torch.float32
    given = torch.full_like(out, torch.nan)
    assert flash_attn_with_kvcache(**call, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize(
    "problem",
    [
        CacheProblem((3, 4), seqlen_q=0, counts=(2, 2)),
        CacheProblem((0, 0), room=0),
        CacheProblem((0, 0), room=0, page_size=16),
        CacheProblem((0, 0), room=0, sinks="float32"),
        CacheProblem((3, 4), heads_kv=0),
    ],
    ids=str,
)
def test_empty_tensors(problem, poisoned_memory):
    call = make_call(problem)
    out, lse, caches = run(call)
    exact = expected(**call)
    assert torch.equal(out.double(), exact.out) and torch.equal(lse.double(), exact.lse)
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        assert torch.equal(as_bits(cache), as_bits(getattr(exact, name)))


@pytest.mark.parametrize(
    "problem",
    [
        CacheProblem((5, 9), counts=(1, 1), page_size=16),
        CacheProblem((5, 9), page_size=16, sinks="float32"),
        CacheProblem((5, 9), counts=(1, 1), batch_idx=(1, 0), rows=2),
    ],
    ids=["pages", "sinks", "rows"],
)
def test_a_cache_without_pages_or_rows(problem, poisoned_memory):
    """Lengths on a GPU may say that there is something in it."""
    call = make_call(problem)
    empty = {name: call[name][:0] for name in ("k_cache", "v_cache")}
    out, lse, _ = run(call | integers_on_gpu(call) | empty)
    sinks = call.get("sinks", torch.tensor([-math.inf]))
    assert (out == 0).all() and (lse == sinks[:, None]).all()


def test_a_page_table_without_rows(poisoned_memory):
    call = make_call(CacheProblem((5, 9), batch_idx=(1, 0), rows=2, page_size=16))
    empty = {"page_table": call["page_table"][:0]}
    out, lse, _ = run(call | integers_on_gpu(call | empty))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_arguments_that_go_by_two_names():
    call = make_call(CacheProblem((5, 9), page_size=16))
    call["sinks"] = torch.zeros(call["q"].shape[2])
    names = {"page_table": "block_table", "sinks": "s_aux"}
    other_names = {names.get(name, name): x for name, x in call.items()}
    out = flash_attn_with_kvcache(**other_names)
    assert torch.equal(out, flash_attn_with_kvcache(**call))
    assert not torch.equal(out, flash_attn_with_kvcache(**call | {"sinks": None}))
    for name, other in names.items():
        with pytest.raises(ValueError, match=f"^{other} must be None with {name}, for which it is"):
            flash_attn_with_kvcache(**call, **{other: call[name]})
    with pytest.raises(TypeError, match=r"^sinks must be a torch\.Tensor, got list"):
        flash_attn_with_kvcache(**call | {"sinks": None}, s_aux=[0.0])


def test_an_empty_batch():
    call = make_call(CacheProblem((3, 4), counts=(1, 1)))
    names = ("q", "k", "v", "cache_seqlens", "k_cache", "v_cache")
    empty = call | {name: call[name][:0] for name in names}
    out, lse, _ = run(empty)
    assert out.shape == (0, 1, 1, 64) and lse.shape == (0, 1, 1)
    for seqlen in (-5, 1 << 31):
        with pytest.raises(ValueError, match=rf"^cache_seqlens must be from 0 .* got {seqlen}$"):
            run(empty, cache_seqlens=seqlen)


def test_another_default_device_changes_nothing():
    call = make_call(CacheProblem((150, 9), 2, (2, 2), page_size=16, rotary=(32, False, "float32")))
    before = run(call, num_splits=3, cache_seqlens=9)
    torch.set_default_device("meta")
    try:
        after = run(call, num_splits=3, cache_seqlens=9)
        metadata = get_scheduler_metadata(2, 2, 200, 8, 1, 64, 9)
        full = flash_attn_func(call["q"], call["k"], call["v"])
    finally:
        torch.set_default_device(None)
    for a, b in zip(before, after, strict=True):
        assert all(map(torch.equal, map(as_bits_of, a), map(as_bits_of, b)))
    assert metadata == get_scheduler_metadata(2, 2, 200, 8, 1, 64, 9)
    assert torch.equal(full, flash_attn_func(call["q"], call["k"], call["v"]))


@pytest.mark.parametrize("argument", ["out", "k_cache", "v_cache"])
def test_inference_tensors_are_written_in_inference_mode_only(argument):
    call = make_call(CacheProblem((20, 30), 2, (2, 2)))
    with torch.inference_mode():
        written = call.get(argument, call["q"]).clone()
        flash_attn_with_kvcache(**(call | {argument: written.clone()}))
    complaint = f"^{argument} must not be an inference tensor"
    with pytest.raises(ValueError, match=complaint):
        flash_attn_with_kvcache(**(call | {argument: written}))


def test_outputs_of_other_calls_may_be_inference_tensors_in_inference_mode_only():
    call = make_call(CacheProblem((20, 30)))
    qkv = call["q"], call["k_cache"], call["v_cache"]
    out_partial, lse_partial = partial_results()
    with torch.inference_mode():
        out, merged = torch.empty_like(qkv[0]), torch.empty_like(out_partial[0])
        flash_attn_func(*qkv, out=out)
        flash_attn_combine(out_partial, lse_partial, out=merged)
    with pytest.raises(ValueError, match=r"^out must not be an inference tensor"):
        flash_attn_func(*qkv, out=out)
    with pytest.raises(ValueError, match=r"^out must not be an inference tensor"):
        flash_attn_combine(out_partial, lse_partial, out=merged)


@pytest.mark.parametrize("batch_idx", [None, (2, 0)])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("group", [1, 8])
def test_batch_invariance(group, page_size, batch_idx):
    """A sequence gives the same bits alone and anywhere among others."""
    options = {"group": group, "heads_kv": 2, "page_size": page_size, "causal": True}
    problem = CacheProblem((900, 41, 0, 333, 128), 3, **options)
    call = make_call(problem)
    out, lse, _ = run(call, batch_invariant=True)
    by_sequence = ["q", "cache_seqlens", "page_table" if page_size else "k_cache"]
    by_sequence += [] if page_size else ["v_cache"]
    for chosen in ([0], [3], [3, 0], [4, 3, 2, 1, 0], [1, 1, 0, 1]):
        few = call | {name: call[name][chosen] for name in by_sequence}
        few_out, few_lse, _ = run(few, batch_invariant=True)
        assert torch.equal(few_out, out[chosen]) and torch.equal(few_lse, lse[chosen])


# -------------------------------------------------------------------------------------- merge


def partial_results(num_splits=3, batch=2, seqlen=5, heads=4, head_dim=64):
    """Draw parts of which some are hidden; one row is hidden altogether."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(num_splits, batch, seqlen, heads, head_dim, generator=generator)
    lse = 5 * torch.randn(num_splits, batch, heads, seqlen, generator=generator).transpose(2, 3)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -torch.inf
    lse[:, 0, 0, 0] = -torch.inf
    return out, lse


@pytest.mark.parametrize("num_splits", [1, 2, 40])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_combine(num_splits, out_dtype):
    parts, lses = partial_results(num_splits)
    out, lse = flash_attn_combine(parts, lses, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.float32)
    exact = lses.double().logsumexp(0)
    shares = (lses.double() - exact).exp().nan_to_num(0.0)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)
    merged = (shares[..., None] * parts.double()).sum(0)
    torch.testing.assert_close(out, merged.to(out.dtype), rtol=1e-2, atol=1e-5)
    assert (out[0, 0, 0] == 0).all() and lse[0, 0, 0] == -math.inf
    given = torch.full_like(out, torch.nan)
    assert flash_attn_combine(parts, lses, given)[0] is given
    assert torch.equal(given, out)


def test_parts_of_a_call_combine_to_the_call():
    """Attention to the first and to the other keys, merged, is attention to all of them."""
    call = make_call(CacheProblem((100, 130), room=0))
    out, lse, _ = run(call)
    halves = [
        call | {"cache_seqlens": integers(40, 50)},
        call | {"cache_leftpad": integers(40, 50)},
    ]
    parts, lses = zip(*(run(half)[:2] for half in halves), strict=True)
    merged, merged_lse = flash_attn_combine(
        torch.stack(parts).float(), torch.stack(lses).transpose(2, 3)
    )
    torch.testing.assert_close(merged, out.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(merged_lse.transpose(1, 2), lse)


def test_pages_that_are_only_read_may_be_shared():
    call = make_call(PAGED)
    call["page_table"] = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    call["cache_seqlens"] = integers(16, 20)
    for name in ("k_cache", "v_cache"):
        call[name] = torch.randn_like(call[name])
    out, lse, caches = run(call)
    check_call(call, out, lse, caches)


# -------------------------------------------------------------------- values that lie on a GPU


@pytest.fixture
def assertions(monkeypatch):
    """Have what says that it is on a GPU read back; no graph is being captured."""
    monkeypatch.setattr(calls_assertions, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def integers_on_gpu(call: dict) -> dict:
    """Return the call's integer tensors, said to be on a GPU."""
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    return {
        name: tensor.as_subclass(OnGpu)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.int32
    }


def seen_by_host(call: dict) -> HostValues:
    """Return what the host sees of a call's integer tensors."""
    tensors = tuple(map(call.get, CacheTensors._fields))
    return values_on_host(CacheCall.of(describe_tensors(tensors)), tensors[OF_INTEGERS])


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_turns_assertions_on(value, enabled, monkeypatch):
    monkeypatch.setitem(fa3_settings.SETTINGS, "FA3_ASSERTIONS", value)
    assert runpy.run_path(calls_assertions.__file__)["ASSERTIONS"] is enabled


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_what_is_on_a_gpu_is_not_read(problem, monkeypatch):
    call = make_call(problem)
    monkeypatch.setattr(OnGpu, "tolist", lambda tensor: pytest.fail("was read"))
    counts = None if problem.ragged else list(problem.counts)
    seen = seen_by_host(call | integers_on_gpu(call))
    assert seen == HostValues(None, counts, None, None, None)


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_assertions_read_it_back(problem, assertions):
    call = make_call(problem)
    assert seen_by_host(call | integers_on_gpu(call)) == seen_by_host(call)


@pytest.mark.parametrize(("problem", "changes"), WRONG_VALUES)
def test_whatever_it_is_a_call_ends(problem, changes):
    call = changed(make_call(problem), changes)
    out, lse, _ = run(call | integers_on_gpu(call))
    assert out.shape == call["q"].shape and lse.shape == out.shape[0:3:2] + out.shape[1:2]


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("argument", ["cache_seqlens", "cache_leftpad"])
@pytest.mark.parametrize("value", [-(2**31), -5000, 2**31 - 1])
def test_lengths_and_paddings_count_as_if_cut(value, argument, page_size, options):
    problem = CacheProblem((300, 30), 2, page_size=page_size, leftpads=(3, 0), room=100)
    call = make_call(problem)
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    if page_size is not None:
        call["page_table"] = call["page_table"].clamp(0, call["k_cache"].shape[0] - 1)
    wrong = changed(call, {argument: lambda x: torch.full_like(x, value)})
    cut = changed(wrong, {argument: lambda x: x.clamp(0, problem.capacity)})
    out, lse, _ = run(wrong | integers_on_gpu(wrong), **options)
    same_out, same_lse, _ = run(cut | integers_on_gpu(cut), **options)
    assert torch.equal(out, same_out) and torch.equal(lse, same_lse)


@pytest.mark.parametrize("page_size", [None, 16])
def test_what_does_not_fit_the_cache_is_dropped(page_size):
    problem = CacheProblem(
        (30, 9, 0), 2, (4, 4, 4), page_size=page_size, room=0, rotary=(32, True, "bfloat16")
    )
    call = make_call(problem)
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    capacity = problem.capacity
    if page_size is not None:
        pages = torch.arange(3 * (capacity // page_size), dtype=torch.int32)
        call["page_table"] = pages.view(3, -1)
        for name in ("k_cache", "v_cache"):
            call[name] = torch.randn(len(pages), page_size, 1, 64).bfloat16()
    call["cache_seqlens"] = integers(capacity - 1, capacity + 100, -5)
    # A position behind the rotary tables uses their last row.
    short = {name: call[name][:20] for name in ("rotary_cos", "rotary_sin")}
    long = {name: torch.cat((t, t[-1:].expand(200, -1))) for name, t in short.items()}
    check_call(call | long, *run(call | short | integers_on_gpu(call)))


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (
            CacheProblem((3, 4), 1, (2, 2), batch_idx=(1, 0), rows=2),
            {"cache_batch_idx": integers(-1, 2)},
        ),
        (
            CacheProblem((3, 4), 1, (2, 2), page_size=16),
            {"page_table": integers(-1, 1 << 20).view(2, 1)},
        ),
    ],
    ids=["rows", "pages"],
)
def test_tokens_without_a_place_are_dropped(problem, changes):
    call = make_call(problem) | changes
    _, _, caches = run(call | integers_on_gpu(call))
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        assert torch.equal(as_bits(cache), as_bits(call[name]))


def test_assertions_let_right_calls_through(assertions):
    call = make_call(INDEXED)
    check_call(call, *run(call | integers_on_gpu(call)))


def test_assertions_cannot_be_captured(assertions, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = make_call(PLAIN)
    complaint = "^cache_seqlens cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS"
    with pytest.raises(RuntimeError, match=complaint):
        flash_attn_with_kvcache(**call | integers_on_gpu(call))
    run(call)
