"""Options of all public calls: accepted for what they mean, or refused by name."""

import functools
import re

import numpy as np
import pytest
import torch
from problems import make_operands, make_problem

import fa3

Q, K, V = make_operands(make_problem(1, 20, 20, 2))
CACHE = {
    "q": Q[:, :2],
    "k_cache": K,
    "v_cache": V,
    "cache_seqlens": torch.tensor([7], dtype=torch.int32),
}
PARTS = torch.zeros(2, 1, 4, 2, 64), torch.zeros(2, 1, 4, 2)
ENDS = torch.tensor([0, 8, 20], dtype=torch.int32)
PACKED = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 12, "max_seqlen_k": 12}
CALLS = {
    "attend": functools.partial(fa3.flash_attn_func, Q, K, V),
    "varlen": functools.partial(fa3.flash_attn_varlen_func, Q[0], K[0], V[0], **PACKED),
    "cache": functools.partial(fa3.flash_attn_with_kvcache, **CACHE),
    "combine": functools.partial(fa3.flash_attn_combine, *PARTS),
    "metadata": functools.partial(
        fa3.get_scheduler_metadata, 1, 2, 20, 2, 2, 64, cache_seqlens=CACHE["cache_seqlens"]
    ),
}
FLAGS = {
    "attend": ("causal", "deterministic", "return_lse", "return_attn_probs"),
    "varlen": ("causal", "deterministic", "return_lse", "return_attn_probs", "return_softmax_lse"),
    "cache": (
        "causal",
        "rotary_interleaved",
        "return_softmax_lse",
        "batch_invariant",
        "return_lse",
    ),
    "metadata": ("causal", "has_softcap"),
}
COUNTS = {
    "attend": ("attention_chunk", "num_splits", "sm_margin"),
    "varlen": ("attention_chunk", "num_splits", "sm_margin", "max_seqlen_q", "max_seqlen_k"),
    "cache": ("attention_chunk", "num_splits", "sm_margin"),
    "metadata": (
        "attention_chunk", "num_splits", "sm_margin", "max_seqlen_k_new", "page_size", "headdim_v"
    ),
}  # fmt: skip
REALS = dict.fromkeys(("attend", "varlen", "cache"), ("softmax_scale", "softcap"))
TENSORS = {
    "attend": ("alibi_slopes", "sinks", "out"),
    "varlen": (
        "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "alibi_slopes", "sinks", "out"
    ),
    "cache": (
        "k", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "page_table",
        "alibi_slopes", "sinks", "out",
    ),
    "combine": ("out",),
    "metadata": ("cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad"),
}  # fmt: skip
UNSUPPORTED = {
    "attend": ("qv", "q_descale", "k_descale", "v_descale"),
    "varlen": ("qv", "q_descale", "k_descale", "v_descale"),
    "cache": (
        "qv",
        "q_descale", "k_descale", "v_descale",
    ),
}  # fmt: skip
A_TENSOR = torch.tensor(1)


class Nothing(fa3.Mask):
    """Hides nothing."""


BAD = [
    *(
        (call, name, value, TypeError, f"^{name} must be a bool, got {came}")
        for call, names in FLAGS.items()
        for name in names
        for value, came in (("no", "'no'"), (1, "1"), (0.0, "0.0"), (None, "None"), ([], "list"),
                            (A_TENSOR == 1, "Tensor"))
    ),
    *(
        (call, name, value, TypeError, f"^{name} must be an integer, got {came}")
        for call, names in COUNTS.items()
        for name in names
        for value, came in ((True, "True"), (1.0, "1.0"), ("1", "'1'"), (A_TENSOR, "Tensor"))
    ),
    *(
        (call, name, -1, ValueError, f"^{name} must be .*got -1$")
        for call, names in COUNTS.items()
        for name in names
    ),
    *(
        (call, name, value, TypeError, f"^{name} must be a float, got {came}")
        for call, names in REALS.items()
        for name in names
        for value, came in ((True, "True"), ("1", "'1'"), (1j, "1j"), (A_TENSOR, "Tensor"))
    ),
    *(
        (call, name, value, ValueError, f"^{name} must be .*positive and finite in .*, got {came}")
        for call, names in REALS.items()
        for name in names
        for value, came in ((-1, "-1"), (np.float32("nan"), "nan"), (np.inf, "inf"),
                            (10**400, "inf"))
    ),
    *(
        (call, name, value, TypeError, f"^{name} must be a torch.Tensor, got {came}")
        for call, names in TENSORS.items()
        for name in names
        for value, came in (([1.0], "list"), (1, "int"), (np.ones(3), "ndarray"))
    ),
    *(
        (call, name, value, NotImplementedError, f"^{name} must be None, got .*: {how}$")
        for call, names in UNSUPPORTED.items()
        for name in names
        for how in ("only FP8 tensors need it" if "descale" in name else "it is not supported",)
        for value in (A_TENSOR, np.ones(2), False, 0, "x")
    ),
    *(
        (call, "window_size", value, error, "^window_size must be two integers .*got " + came)
        for call in ("attend", "varlen", "cache", "metadata")
        for value, error, came in (
            ((True, False), TypeError, "True"),
            ((1, 0.0), TypeError, "0.0"),
            ("ab", TypeError, "'a'"),
            ((A_TENSOR, 0), TypeError, "Tensor"),
            (A_TENSOR, TypeError, "Tensor"),
            ({3, 0}, TypeError, "set"),
            (None, TypeError, "None"),
            (3, TypeError, "3"),
            ((3,), ValueError, r"\(3,\)"),
            ((3, -2), ValueError, r"\(3, -2\)"),
        )
    ),
    *(
        (call, "pack_gqa", value, TypeError, "^pack_gqa must be a bool, got ")
        for call in ("attend", "varlen", "cache", "metadata")
        for value in ("x", 0, 1.0, A_TENSOR)
    ),
    *(
        (call, "attention_chunk", 64, NotImplementedError, "^attention_chunk must be 0 or None.*64")
        for call in ("attend", "varlen", "cache", "metadata")
    ),
    *(
        (call, "num_splits", 2, NotImplementedError, "^num_splits must be 0 or 1 here, got 2: the")
        for call in ("attend", "varlen")
    ),
    ("attend", "sm_margin", 132, ValueError, "^sm_margin must be from 0 to 131, got 132"),
    ("varlen", "sm_margin", 132, ValueError, "^sm_margin must be from 0 to 131, got 132"),
    ("varlen", "score", Q, TypeError, "^score must be a fa3.Score, got Tensor"),
    ("varlen", "mask", True, TypeError, "^mask must be a fa3.Mask, got bool"),
    ("attend", "softmax_scale", 0, ValueError, "^softmax_scale .*dropout_p.*by name"),
    ("attend", "score", Q, TypeError, "^score must be a fa3.Score, got Tensor"),
    ("attend", "mask", True, TypeError, "^mask must be a fa3.Mask, got bool"),
    ("attend", "schedule", ([],), TypeError, "^schedule must be hashable"),
    ("attend", "schedule", True, TypeError, "^schedule must be "),
    *(
        (call, name, base, TypeError, f"^{name} must be a fa3.{base.__name__}, got the class "
         f"{base.__name__}. Pass an object of a class that is derived from it$")
        for call in ("attend", "varlen")
        for name, base in (("mask", fa3.Mask), ("score", fa3.Score))
    ),
    ("attend", "mask", Nothing, TypeError, r"the class Nothing. Pass an object: Nothing\(...\)$"),
    ("attend", "plan", fa3.Plan, TypeError, "^plan must come from .*, got the class Plan$"),
    ("attend", "plan", Q, TypeError, "^plan must come from fa3.plan_forward, got Tensor$"),
    ("attend", "schedule", Q, TypeError, "^schedule must be .*, got Tensor$"),
    ("attend", "alibi_slopes", torch.Tensor, TypeError, "^alibi_.* got the class Tensor$"),
    ("cache", "scheduler_metadata", fa3.SchedulerMetadata, TypeError, "the class SchedulerMetad"),
    ("attend", "causal", 1, TypeError, "got 1$"),
    ("attend", "causal", None, TypeError, "got None$"),
    ("attend", "softmax_scale", -1.0, ValueError, "got -1.0$"),
    ("varlen", "causal", (1, 2), TypeError, "got tuple$"),
    ("varlen", "seqused_q", [3], TypeError, "got list$"),
    ("attend", "plan", "list", TypeError, "^plan must come from fa3.plan_forward, got 'list'"),
    ("cache", "cache_seqlens", True, TypeError, "^cache_seqlens must be an integer or .* got True"),
    ("cache", "cache_seqlens", 7.0, TypeError, "^cache_seqlens must be an integer or .* got 7.0"),
    ("cache", "cache_seqlens", [7], TypeError, "^cache_seqlens must be an integer or .* got list"),
    ("cache", "cache_seqlens", 10**12, ValueError, "^cache_seqlens must be from 0 to 20"),
    *(
        ("cache", name, None, TypeError, f"^{name} must be a torch.Tensor, got NoneType")
        for name in ("q", "k_cache", "v_cache")
    ),
    ("cache", "scheduler_metadata", 1, TypeError, "^scheduler_metadata must come from"),
    ("combine", "out_dtype", "float32", TypeError, "^out_dtype must be .* got 'float32'"),
    ("combine", "out_dtype", [], TypeError, "^out_dtype must be a torch.dtype, got list"),
    ("combine", "out_dtype", torch.int8, TypeError, "^out_dtype must be float32, bfloat16 or"),
    ("combine", "lse_partial", None, TypeError, "^lse_partial must be .* got NoneType"),
    ("metadata", "cache_seqlens", True, TypeError, "^cache_seqlens must be an integer or"),
    ("metadata", "cache_seqlens", "7", TypeError, "^cache_seqlens must be an integer or"),
    ("metadata", "qkv_dtype", "bfloat16", TypeError, "^qkv_dtype must be torch.bfloat16 or"),
    ("metadata", "qkv_dtype", [], TypeError, "^qkv_dtype must be torch.bfloat16 or"),
]  # fmt: skip


def shown(value) -> str | None:
    return type(value).__name__ if isinstance(value, torch.Tensor | np.ndarray | int) else None


def with_argument(call: str, name: str, value) -> functools.partial:
    """Bind an argument, also one that the call has by position."""
    if name == "lse_partial":
        return functools.partial(fa3.flash_attn_combine, PARTS[0], value)
    return functools.partial(CALLS[call], **{name: value})


@pytest.mark.parametrize(("call", "name", "value", "error", "complaint"), BAD, ids=shown)
def test_bad_options(call, name, value, error, complaint):
    with pytest.raises(error) as caught:
        with_argument(call, name, value)()
    assert type(caught.value) is error and re.search(complaint, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("call", "name", "value", "same"),
    [
        *((call, "causal", np.True_, True) for call in FLAGS),
        *((call, "window_size", [np.int64(3), 2], (3, 2)) for call in FLAGS),
        *((call, "sm_margin", np.int32(4), 4) for call in FLAGS),
        *((call, "softcap", np.float32(3), 3.0) for call in REALS),
        *((call, "softcap", 3, 3.0) for call in REALS),
        *((call, "softmax_scale", np.float32(0.5), 0.5) for call in REALS),
        *((call, "softmax_scale", 1, 1.0) for call in REALS),
        *(("attend", "num_splits", value, 0) for value in (1, np.int64(1))),
        ("attend", "pack_gqa", False, None),
        ("varlen", "num_splits", np.int64(0), 1),
        *(
            (call, "pack_gqa", value, None)
            for call in ("varlen", "cache", "metadata")
            for value in (True, False)
        ),
        ("varlen", "max_seqlen_q", np.int64(13), 12),
        ("cache", "num_splits", np.int64(3), 3),
        ("cache", "cache_seqlens", np.int64(7), 7),
        ("metadata", "cache_seqlens", np.int64(7), 7),
        ("metadata", "page_size", np.int64(16), 16),
        ("metadata", "num_splits", np.int64(3), 3),
    ],
    ids=str,
)
def test_other_types_that_mean_the_same(call, name, value, same):
    given, plain = with_argument(call, name, value)(), with_argument(call, name, same)()
    assert torch.equal(given, plain) if isinstance(plain, torch.Tensor) else given == plain


@pytest.mark.parametrize(
    ("call", "value", "accepted"),
    [("varlen", True, False), ("paged", False, True), ("cache", False, True),
     ("metadata", False, True)],
)  # fmt: skip
def test_query_heads_that_share_are_packed_as_the_call_does(call, value, accepted):
    heads = torch.cat((Q, Q), dim=2)
    pages = {"cu_seqlens_k": None, "seqused_k": ENDS[1:], "page_table": ENDS[:2, None] * 0}
    varlen = fa3.flash_attn_varlen_func
    calls = {
        "varlen": functools.partial(varlen, heads[0], K[0], V[0], **PACKED),
        "paged": functools.partial(varlen, heads[0], K, V, **PACKED | pages),
        "cache": functools.partial(CALLS["cache"], q=heads[:, :2]),
        "metadata": functools.partial(fa3.get_scheduler_metadata, 1, 2, 20, 4, 2, 64, 7),
    }
    complaint = f"^pack_gqa must be None or {accepted} here, got {value}: the query heads of a key"
    with pytest.raises(NotImplementedError, match=complaint):
        calls[call](pack_gqa=value)
    calls[call](pack_gqa=accepted)


@pytest.mark.parametrize("call", ["attend", "varlen", "cache"])
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("causal", True, 1.0), ("causal", False, 0), ("window_size", (1, 0), (True, False)),
     ("sm_margin", 1, True), ("sm_margin", 0, 0.0)],
)  # fmt: skip
def test_what_was_remembered_lets_no_other_type_through(call, name, good, bad):
    with_argument(call, name, good)()
    with pytest.raises(TypeError, match=f"^{name} must be"):
        with_argument(call, name, bad)()


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ((0.0,), ValueError, "^softmax_scale"),
        ((0.0, None, True), TypeError, "^causal must be a bool, got None"),
        ((0.1, 0.125), TypeError, "^causal must be a bool, got 0.125"),
        ((0.1, 1, True), TypeError, "^causal must be a bool, got 1"),
    ],
)
def test_the_order_of_flash_attention_2_is_told_from_that_of_3(arguments, error, complaint):
    with pytest.raises(error, match=complaint + ".*by position.*-2's dropout_p.*by name"):
        fa3.flash_attn_func(Q, K, V, *arguments)


def test_a_plan_that_does_not_fit_is_told_in_what():
    plan = fa3.plan_forward(make_problem(2, 20, 20, 1))
    expected = "plan was made for batch 2, num_heads_kv 1; the call has batch 1, num_heads_kv 2"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        fa3.flash_attn_func(Q, K, V, plan=plan)


def test_a_plan_has_its_own_sms():
    plan = fa3.plan_forward(make_problem(1, 20, 20, 2))
    with pytest.raises(ValueError, match=r"^sm_margin must be 0 when plan is given"):
        fa3.flash_attn_func(Q, K, V, plan=plan, return_lse=True, sm_margin=4)


def test_ends_of_new_tokens_are_ignored_without_new_tokens():
    out = fa3.flash_attn_with_kvcache(**CACHE)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    assert torch.equal(fa3.flash_attn_with_kvcache(**CACHE, cu_seqlens_k_new=ends), out)


@pytest.mark.parametrize("right", [-1, 0, 1, 9])
def test_causal_sets_the_right_bound(right):
    window = {"causal": True, "window_size": (5, right)}
    plain = {"window_size": (5, 0)}
    for call in ("attend", "varlen", "cache"):
        assert torch.equal(CALLS[call](**window), CALLS[call](**plain))
    assert CALLS["metadata"](**window) == CALLS["metadata"](**plain)


@pytest.mark.parametrize("name", ["problem", "gpu", "config"])
def test_a_plan_of_a_tensor_does_not_print_it(name):
    given = {"problem": make_problem(1, 20, 20, 2)} | {name: Q}
    with pytest.raises(TypeError, match=f"^{name} must be a .*, got Tensor$"):
        fa3.plan_forward(**given)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize("where", ["tensors", "known", "metadata", "pages"])
def test_no_sequence_uses_fewer_than_no_rows(name, where):
    used = torch.tensor([3, -2], dtype=torch.int32)
    call, options = CALLS["varlen"], {name: used}
    if where == "known":
        options |= {f"{end}_cpu": ENDS for end in ("cu_seqlens_q", "cu_seqlens_k")}
        options[f"{name}_cpu"] = used
    if where == "metadata":
        name = name if name == "seqused_q" else "cache_seqlens"
        options = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "cache_seqlens": None, name: used}
        call = functools.partial(fa3.get_scheduler_metadata, 2, 12, 12, 2, 2, 64)
    if where == "pages":
        call = functools.partial(fa3.flash_attn_varlen_func, Q[0], K, V, **PACKED)
        options = {"cu_seqlens_k": None, "seqused_k": ENDS[:2], "page_table": ENDS[:2, None] * 0}
        options[name] = used
    with pytest.raises(ValueError, match=f"^(seqused_k|{name})(_cpu)? must be .*0.*, got -2"):
        call(**options)
