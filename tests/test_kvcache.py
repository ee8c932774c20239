"""What `flash_attn_with_kvcache` refuses on the CPU, and what it makes of values on a GPU."""

import runpy

import pytest
import torch
from kvcache_bad_values import (
    BAD_VALUES,
    BAD_VALUES_OF_TENSORS,
    INDEXED,
    PAGED,
    PLAIN,
    RAGGED,
    OnGpu,
    changed,
    integers,
    naming,
)
from kvcache_problems import CacheProblem, make_call
from kvcache_reference import as_bits, check_call
from pairs import pairs
from test_kvcache_results import MODES, assert_same_bits, partial_results, run, unread

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

# ---------------------------------------------------------------------------------- bad input

BAD_TENSORS = [
    (PLAIN, "q", lambda x: x[0], ValueError, ["4 dim", "(2, 4, 64)"]),
    (PLAIN, "q", lambda x: x.float(), TypeError, ["bfloat16 or", "float32"]),
    (PLAIN, "q", lambda x: x[:, :, :3], ValueError, ["multiple", "3", "2"]),
    (PLAIN, "q", lambda x: x[..., :60], ValueError, ["head_dim 60", "multiples of 8", "256"]),
    (PLAIN, "k_cache", lambda x: x.tolist(), TypeError, ["Tensor", "list"]),
    (PLAIN, "k_cache", lambda x: x.half(), TypeError, ["bfloat16 like q", "float16"]),
    (PLAIN, "k_cache", lambda x: x[..., :32], ValueError, ["64", "32"]),
    (PLAIN, "k_cache", lambda x: x.to("meta"), ValueError, ["cpu like q", "meta"]),
    (PLAIN, "k_cache", lambda x: x.transpose(1, 3).contiguous().transpose(1, 3), ValueError,
     ["contiguous", "last"]),
    (PLAIN, "k_cache", lambda x: x[:1].expand_as(x), ValueError, ["overlap", "strides"]),
    (PLAIN, "v_cache", lambda x: x[:, :-1], ValueError, ["shape", "k_cache"]),
    (PLAIN, "v_cache", lambda x: x[..., :60], ValueError, ["head_dim 60", "multiples of 8"]),
    (PLAIN, "k", lambda x: x[:1], ValueError, ["(2, 2, 2, 64)", "(1, 2, 2, 64)"]),
    (PLAIN, "k", lambda x: x[:, :, :1], ValueError, ["(2, 2, 2, 64)"]),
    (PLAIN, "k", lambda x: x.half(), TypeError, ["bfloat16"]),
    (PLAIN, "k", lambda x: x[0], ValueError, ["4 dim"]),
    (PLAIN, "k", lambda x: None, ValueError, ["given with v"]),
    (PLAIN, "v", lambda x: None, ValueError, ["given with k"]),
    (PLAIN, "v", lambda x: x[:, :1], ValueError, ["(2, 2, 2, 64)", "(2, 1, 2, 64)"]),
    (PLAIN, "rotary_cos", lambda x: None, ValueError, ["given with rotary_sin"]),
    (PLAIN, "rotary_sin", lambda x: x[:-1], ValueError, ["rotary_cos", "shape"]),
    (PLAIN, "rotary_sin", lambda x: x.float(), TypeError, ["like rotary_cos"]),
    (PLAIN, "rotary_cos", lambda x: x.double(), TypeError, ["float32", "float64"]),
    (PLAIN, "rotary_cos", lambda x: x[None], ValueError, ["2 dim"]),
    (PLAIN, "rotary_cos", lambda x: x.to("meta"), ValueError, ["cpu", "meta"]),
    (PLAIN, "cache_seqlens", lambda x: x.long(), TypeError, ["int32", "int64"]),
    (PLAIN, "cache_seqlens", lambda x: x[:1], ValueError, ["(2,)", "(1,)"]),
    (PLAIN, "cache_seqlens", lambda x: [20, 30], TypeError, ["Tensor", "list"]),
    (PLAIN, "cache_seqlens", lambda x: 20.0, TypeError, ["Tensor", "20.0"]),
    (PLAIN, "cache_seqlens", lambda x: None, ValueError, ["given with k"]),
    (PLAIN, "cache_seqlens", lambda x: x.to("meta"), ValueError, ["CPU", "meta"]),
    (PLAIN, "cache_seqlens", lambda x: x.repeat_interleave(2)[::2], ValueError, ["contiguous"]),
    (PAGED, "k_cache", lambda x: x[:, :0], ValueError, ["pages of 1 token or more", "page_table"]),
    (PAGED, "page_table", lambda x: x.long(), TypeError, ["int32"]),
    (PAGED, "page_table", lambda x: x[0], ValueError, ["2 dim"]),
    (PAGED, "page_table", lambda x: x[:1], ValueError, ["2 rows", "1"]),
    (PAGED, "page_table", lambda x: x.T.contiguous().T, ValueError, ["contiguous"]),
    (INDEXED, "cache_batch_idx", lambda x: x[:1], ValueError, ["(2,)"]),
    (INDEXED, "cache_leftpad", lambda x: x.float(), TypeError, ["int32"]),
    (RAGGED, "cu_seqlens_k_new", lambda x: x[:2], ValueError, ["(3,)", "(2,)"]),
    (RAGGED, "k", lambda x: x[None], ValueError, ["3 dim"]),
]  # fmt: skip


def refused(problem, changes: dict, error, complaint: str, where="cpu") -> None:
    """Assert that a changed call is refused with a complaint, before anything is written."""
    call = make_call(problem, device=where)
    caches = call["k_cache"].clone(), call["v_cache"].clone()
    for name, change in changes.items():
        changes[name] = change(call.get(name)) if callable(change) else change
    with pytest.raises(error, match=complaint):
        flash_attn_with_kvcache(**(call | changes))
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        assert torch.equal(as_bits(cache), as_bits(call[name]))


@pytest.mark.parametrize(("problem", "argument", "change", "error", "fragments"), BAD_TENSORS)
def test_bad_tensors(problem, argument, change, error, fragments):
    refused(problem, {argument: change}, error, naming(argument, fragments))


@pytest.mark.parametrize(("problem", "argument", "change", "fragments"), BAD_VALUES)
def test_bad_values(problem, argument, change, fragments):
    refused(problem, {argument: change}, ValueError, naming(argument, fragments))


BAD_ARGUMENTS = [
    ("softmax_scale", 0.0, ValueError),
    ("softmax_scale", "1", TypeError),
    ("window_size", (-2, 0), ValueError),
    ("window_size", (1.5, 0), TypeError),
    ("window_size", 5, TypeError),
    ("num_splits", -1, ValueError),
    ("num_splits", 1.5, TypeError),
    ("sm_margin", -1, ValueError),
    ("sm_margin", 132, ValueError),
    ("softcap", -1.0, ValueError),
    ("softcap", "1", TypeError),
    ("alibi_slopes", torch.ones(3), ValueError),
    ("alibi_slopes", torch.ones(4).bfloat16(), TypeError),
    ("sinks", torch.ones(3), ValueError),
    ("sinks", torch.ones(4).half(), TypeError),
    ("out", torch.empty(2, 2, 4, 32).bfloat16(), ValueError),
    ("out", torch.empty(2, 2, 4, 64), TypeError),
    ("pack_gqa", False, NotImplementedError),
    ("attention_chunk", 64, NotImplementedError),
    ("qv", torch.zeros(2, 2, 4, 64), NotImplementedError),
    ("q_descale", torch.ones(2, 2), NotImplementedError),
    ("k_descale", torch.ones(2, 2), NotImplementedError),
    ("v_descale", torch.ones(2, 2), NotImplementedError),
    ("max_seqlen_q", 2, ValueError),
    ("max_seqlen_q", 2.0, TypeError),
    ("rotary_seqlens", integers(3, -3), ValueError),
]


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    BAD_ARGUMENTS,
    ids=lambda value: "tensor" if isinstance(value, torch.Tensor) else None,
)
def test_bad_arguments(argument, value, error):
    refused(PLAIN, {argument: value}, error, argument)


def test_arguments_that_do_not_fit_each_other():
    def first_31(table):
        return table[:31]

    refused(
        PLAIN,
        {"rotary_cos": first_31, "rotary_sin": first_31},
        ValueError,
        "^rotary_cos has 31 positions, sequence 1 needs 32",
    )
    refused(INDEXED, {"cache_batch_idx": None}, ValueError, "^k_cache must have 2 rows")
    refused(PAGED, {"page_table": lambda table: table[:, :1]}, ValueError, "^cache_seqlens must be")
    refused(
        PAGED,
        {"page_table": lambda table: table[:1].repeat(2, 1), "cache_seqlens": integers(20, 20)},
        ValueError,
        "^page_table must not give page .* to sequences 0 and 1, which both append to it",
    )


@pytest.mark.parametrize(
    ("pages", "seqlens", "complaint"),
    [
        ([[0, 1], [0, 2]], (4, 10), "one has tokens and the other appends"),
        ([[0, 1], [2, 0]], (14, 30), "both append to it"),
        ([[0, 0], [1, 2]], (15, 3), "one has tokens and the other appends"),
        ([[3, 3], [1, 2]], (30, 3), "one has tokens and the other appends"),
    ],
)
def test_nobody_appends_where_tokens_are(pages, seqlens, complaint):
    refused(
        PAGED,
        {
            "page_table": torch.tensor(pages, dtype=torch.int32),
            "cache_seqlens": integers(*seqlens),
        },
        ValueError,
        f"^page_table must not give page .* to sequences .*{complaint}",
    )


def test_pages_that_are_only_read_may_be_shared():
    call = make_call(PAGED)
    call["page_table"] = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    call["cache_seqlens"] = integers(16, 20)
    for name in ("k_cache", "v_cache"):
        call[name] = torch.randn_like(call[name])
    out, lse, caches = run(call)
    check_call(call, out, lse, caches)


def test_an_output_of_a_merge_must_not_overlap_itself():
    parts, lses = partial_results(2)
    out = torch.empty(1, *parts.shape[2:]).expand(parts.shape[1:])
    with pytest.raises(ValueError, match=r"^out must not overlap itself"):
        flash_attn_combine(parts, lses, out)
    with pytest.raises(TypeError, match=r"^out must be a torch.Tensor"):
        flash_attn_combine(parts, lses, [1])


def test_what_needs_new_tokens_is_refused_without():
    call = make_call(PLAIN)
    del call["k"], call["v"]
    with pytest.raises(ValueError, match=r"^rotary_cos must be None without k"):
        flash_attn_with_kvcache(**call)


@pytest.mark.parametrize(
    ("columns", "fragment"), [(4, "rotary_dim of 8"), (12, "rotary_dim of 24"), (40, "64")]
)
def test_bad_rotary_dims(columns, fragment):
    table = torch.ones(64, 64).bfloat16()[:, :columns]
    call = make_call(PLAIN) | {"rotary_cos": table, "rotary_sin": table}
    with pytest.raises(ValueError, match=r"^rotary_cos has") as caught:
        flash_attn_with_kvcache(**call)
    assert fragment in str(caught.value)


def test_gradients_are_refused():
    call = make_call(PLAIN)
    with pytest.raises(ValueError, match=r"^k_cache requires grad"):
        flash_attn_with_kvcache(**(call | {"k_cache": call["k_cache"].requires_grad_()}))


# -------------------------------------------------------------------- values that lie on a GPU


@pytest.fixture
def assertions(monkeypatch):
    """Have what says that it is on a GPU read back; no graph is being captured."""
    monkeypatch.setattr(calls_assertions, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


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
    seen = seen_by_host(unread(call))
    assert seen == HostValues(None, counts, None, None, None)


@pytest.mark.parametrize("problem", [INDEXED, PAGED, RAGGED], ids=["indexed", "paged", "ragged"])
def test_assertions_read_it_back(problem, assertions):
    call = make_call(problem)
    assert seen_by_host(unread(call)) == seen_by_host(call)


@pytest.mark.parametrize(("problem", "argument", "change", "fragments"), BAD_VALUES_OF_TENSORS)
def test_assertions_refuse_what_is_refused_on_the_cpu(
    problem, argument, change, fragments, where, monkeypatch
):
    monkeypatch.setattr(calls_assertions, "ASSERTIONS", True)
    if where == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = changed(make_call(problem, device=where), argument, change)
    refused(problem, unread(call), ValueError, naming(argument, fragments), where)


def test_assertions_refuse_short_rotary_tables(assertions):
    call = make_call(PLAIN)
    tables = {name: call[name][:31] for name in ("rotary_cos", "rotary_sin")}
    complaint = "^rotary_cos has 31 positions, sequence 1 needs 32"
    refused(PLAIN, unread(call) | tables, ValueError, complaint)


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
    wrong = changed(call, argument, lambda x: torch.full_like(x, value))
    cut = changed(wrong, argument, lambda x: x.clamp(0, problem.capacity))
    assert_same_bits(run(unread(wrong), **MODES[mode]), run(unread(cut), **MODES[mode]))


def test_assertions_let_right_calls_through(assertions):
    call = make_call(INDEXED)
    check_call(call, *run(unread(call)))


def test_assertions_cannot_be_captured(assertions, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = make_call(PLAIN)
    complaint = "^cache_seqlens cannot be read back while a CUDA graph is captured: FA3_ASSERTIONS"
    refused(PLAIN, unread(call), RuntimeError, complaint)
    run(call)


@pytest.mark.parametrize("argument", ["out", "k_cache", "v_cache"])
def test_inference_tensors_are_written_in_inference_mode_only(argument):
    call = make_call(CacheProblem((20, 30), 2, (2, 2)))
    with torch.inference_mode():
        written = call.get(argument, call["q"]).clone()
        flash_attn_with_kvcache(**(call | {argument: written.clone()}))
    complaint = f"^{argument} must not be an inference tensor"
    refused(CacheProblem((20, 30), 2, (2, 2)), {argument: written}, ValueError, complaint)


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
