"""Options of all public calls: accepted for what they mean, or refused by name."""

import functools

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
A_TENSOR = torch.tensor(1)


def with_argument(call: str, name: str, value) -> functools.partial:
    """Bind an argument, also one that the call has by position."""
    if name == "lse_partial":
        return functools.partial(fa3.flash_attn_combine, PARTS[0], value)
    return functools.partial(CALLS[call], **{name: value})


@pytest.mark.parametrize(
    ("call", "name", "value", "same"),
    [
        *((call, "causal", np.True_, True) for call in CALLS if call != "combine"),
        *((call, "window_size", [np.int64(3), 2], (3, 2)) for call in CALLS if call != "combine"),
        *((call, "sm_margin", np.int32(4), 4) for call in CALLS if call != "combine"),
        *((call, "softcap", np.float32(3), 3.0) for call in ("attend", "varlen", "cache")),
        *((call, "softcap", 3, 3.0) for call in ("attend", "varlen", "cache")),
        *((call, "softmax_scale", np.float32(0.5), 0.5) for call in ("attend", "varlen", "cache")),
        *((call, "softmax_scale", 1, 1.0) for call in ("attend", "varlen", "cache")),
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
