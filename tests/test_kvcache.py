"""`flash_attn_with_kvcache`: values that lie on a GPU, shared pages and inference tensors."""

import runpy

import pytest
import torch
from invalid_arguments import WRONG_VALUES
from kvcache_problems import CacheProblem, make_call
from kvcache_reference import check_call
from pairs import pairs
from test_kvcache_results import MODES, assert_same_bits, partial_results, run, unread
from valid_calls import INDEXED, PAGED, PLAIN, RAGGED, OnGpu, changed
from varlen_problems import integers

from fa3 import flash_attn_func
from fa3 import settings as fa3_settings
from fa3.calls import assertions as calls_assertions
from fa3.calls.call import NAMES_BY_KIND, OF_INTEGERS, AttentionCall, describe_tensors
from fa3.calls.combine import flash_attn_combine
from fa3.calls.kvcache import flash_attn_with_kvcache
from fa3.calls.options import CACHED
from fa3.calls.values import HostValues, values_on_host


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


def seen_by_host(call: dict) -> HostValues:
    """Return what the host sees of a call's integer tensors."""
    tensors = tuple(map(call.get, NAMES_BY_KIND[CACHED]))
    described = describe_tensors(CACHED, tensors)
    return values_on_host(AttentionCall.of(described, CACHED), tensors[OF_INTEGERS])


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_the_environment_turns_assertions_on(value, enabled, monkeypatch):
    monkeypatch.setitem(fa3_settings.SETTINGS, "FA3_ASSERTIONS", value)
    assert runpy.run_path(calls_assertions.__file__)["ASSERTIONS"] is enabled


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_what_is_on_a_gpu_is_not_read(problem, monkeypatch):
    call = make_call(problem)
    monkeypatch.setattr(OnGpu, "tolist", lambda tensor: pytest.fail("was read"))
    counts = None if problem.ragged else list(problem.counts)
    seen = seen_by_host(unread(call))
    assert seen == HostValues(None, counts, None, None, None)


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_assertions_read_it_back(problem, assertions):
    call = make_call(problem)
    assert seen_by_host(unread(call)) == seen_by_host(call)


MARGIN = 1 << 16
"""Elements around a tensor that is watched."""


def watched(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of a tensor with NaN around it, and all of that memory."""
    memory = tensor.new_full((tensor.numel() + 2 * MARGIN,), torch.nan)
    copy = memory[MARGIN:-MARGIN].view(tensor.shape)
    return copy.copy_(tensor), memory


@pytest.mark.parametrize(("problem", "changes"), WRONG_VALUES)
def test_nothing_is_written_outside_of_the_cache(problem, changes, where):
    call = changed(make_call(problem, device=where), changes)
    call["out"] = torch.zeros_like(call["q"])
    memories = []
    for name in ("k_cache", "v_cache", "out"):
        call[name], memory = watched(call[name])
        memories.append(memory)
    flash_attn_with_kvcache(**unread(call))
    for memory in memories:
        assert memory[:MARGIN].isnan().all() and memory[-MARGIN:].isnan().all()


@pairs(
    value=(-(2**31), -5000, 2**31 - 1),
    argument=("cache_seqlens", "cache_leftpad"),
    page_size=(None, 16),
    mode=tuple(MODES),
)
def test_lengths_and_paddings_count_as_if_cut(value, argument, page_size, mode, where):
    problem = CacheProblem((300, 30), 2, page_size=page_size, leftpads=(3, 0), room=1000)
    call = make_call(problem, device=where)
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    if page_size is not None:
        call["page_table"] = call["page_table"].clamp(0, call["k_cache"].shape[0] - 1)
    wrong = changed(call, {argument: lambda x: torch.full_like(x, value)})
    cut = changed(wrong, {argument: lambda x: x.clamp(0, problem.capacity)})
    assert_same_bits(run(unread(wrong), **MODES[mode]), run(unread(cut), **MODES[mode]))


def test_assertions_let_right_calls_through(assertions):
    call = make_call(INDEXED)
    check_call(call, *run(unread(call)))


def test_assertions_cannot_be_captured(assertions, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = make_call(PLAIN)
    complaint = "^cache_seqlens cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS"
    with pytest.raises(RuntimeError, match=complaint):
        flash_attn_with_kvcache(**unread(call))
    run(call)


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
