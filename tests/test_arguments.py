"""Options of all public calls: accepted for what they mean, or refused by name."""

import numpy as np
import pytest
import torch
from valid_calls import CALLS, dense, packed
from varlen_problems import integers

import fa3

ATTEND = "dense", "varlen", "cache"


def run(name: str, **changes):
    """Make a right call with other arguments."""
    function, make = CALLS[name]
    torch.manual_seed(0)
    return function(**make() | changes)


def assert_same(call: str, changes: dict, others: dict) -> None:
    result, same = run(call, **changes), run(call, **others)
    assert torch.equal(result, same) if isinstance(same, torch.Tensor) else result == same


@pytest.mark.parametrize(
    ("calls", "name", "value", "same"),
    [
        ((*ATTEND, "metadata"), "causal", np.True_, True),
        ((*ATTEND, "metadata"), "window_size", [np.int64(3), 2], (3, 2)),
        ((*ATTEND, "metadata"), "sm_margin", np.int32(4), 4),
        (ATTEND, "softcap", np.float32(3), 3.0),
        (ATTEND, "softcap", 3, 3.0),
        (ATTEND, "softmax_scale", np.float32(0.5), 0.5),
        (ATTEND, "softmax_scale", 1, 1.0),
        (("dense",), "num_splits", 1, 0),
        (("dense",), "num_splits", np.int64(1), 0),
        (("dense",), "pack_gqa", False, None),
        (("varlen",), "num_splits", np.int64(0), 1),
        (("cache", "packed", "metadata"), "pack_gqa", True, None),
        (("packed", "metadata"), "pack_gqa", False, None),
        (("varlen",), "max_seqlen_q", np.int64(14), 13),
        (("cache", "metadata"), "num_splits", np.int64(3), 3),
        (("pages",), "pack_gqa", True, None),
        (("varlen",), "pack_gqa", False, None),
        (("cache", "metadata"), "cache_seqlens", np.int64(7), 7),
        (("metadata",), "page_size", np.int64(16), 16),
    ],
    ids=str,
)
def test_other_types_that_mean_the_same(calls, name, value, same):
    for call in calls:
        assert_same(call, {name: value}, {name: same})


@pytest.mark.parametrize("call", ATTEND)
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("causal", True, 1.0), ("causal", False, 0), ("window_size", (1, 0), (True, False)),
     ("sm_margin", 1, True), ("sm_margin", 0, 0.0)],
)  # fmt: skip
def test_what_was_remembered_lets_no_other_type_through(call, name, good, bad):
    run(call, **{name: good})
    with pytest.raises(TypeError, match=f"^{name} must be"):
        run(call, **{name: bad})


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
        fa3.flash_attn_func(*dense().values(), *arguments)


def test_ends_of_new_tokens_are_ignored_without_new_tokens():
    call = packed()
    out = fa3.flash_attn_with_kvcache(**call)
    ends = integers(0, 1, 3)
    assert torch.equal(fa3.flash_attn_with_kvcache(**call, cu_seqlens_k_new=ends), out)


@pytest.mark.parametrize("right", [-1, 0, 1, 9])
@pytest.mark.parametrize("call", [*ATTEND, "metadata"])
def test_causal_sets_the_right_bound(call, right):
    assert_same(call, {"causal": True, "window_size": (5, right)}, {"window_size": (5, 0)})
