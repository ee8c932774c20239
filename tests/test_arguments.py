"""Options of all public calls: accepted for what they mean, or refused by name."""

import re

import invalid_arguments as table
import numpy as np
import pytest
import torch
from valid_calls import CALLS, Case, OnGpu, cases, changed, dense, packed
from varlen_problems import integers

import fa3
from fa3.calls import values as calls_values

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


@pytest.mark.parametrize(
    ("call", "name", "other"),
    [
        *((call, "sinks", "s_aux") for call in ("varlen", "cache")),
        *((call, "page_table", "block_table") for call in ("pages", "paged")),
    ],
)
def test_arguments_that_go_by_two_names(call, name, other):
    value = torch.zeros(4) if name == "sinks" else CALLS[call][1]()[name]
    assert_same(call, {name: value}, {name: None, other: value})
    if name == "sinks":
        assert not torch.equal(run(call, sinks=value), run(call))
    with pytest.raises(ValueError, match=f"^{other} must be None with {name}, for which it is"):
        run(call, **{name: value, other: value})
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got list"):
        run(call, **{name: None, other: [0.0]})


def test_ends_of_new_tokens_are_ignored_without_new_tokens():
    call = packed()
    out = fa3.flash_attn_with_kvcache(**call)
    ends = integers(0, 1, 3)
    assert torch.equal(fa3.flash_attn_with_kvcache(**call, cu_seqlens_k_new=ends), out)


@pytest.mark.parametrize("right", [-1, 0, 1, 9])
@pytest.mark.parametrize("call", [*ATTEND, "metadata"])
def test_causal_sets_the_right_bound(call, right):
    assert_same(call, {"causal": True, "window_size": (5, right)}, {"window_size": (5, 0)})


INTEGERS = [*table.VALUES, *table.VALUES_OF_CACHES]
ROWS = [
    *table.TENSORS, *table.OUTPUTS, *INTEGERS, *table.OPTIONS, *table.SIZES, *table.METADATA,
    *table.FLASH_ATTENTION_3, *table.PASSES, *table.IN_FP8, *table.PLANS,
]  # fmt: skip


def ids(rows: list[Case]) -> list[str]:
    return [f"{case.call} {case.message.partition(' ')[0]}" for case in rows]


def contents(call: dict) -> list[torch.Tensor]:
    """The tensors of a call that lie in memory, without tensors of a million rows in one place."""
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    strided = [one for one in tensors if one.layout == torch.strided and not one.is_nested]
    on_cpu = [one for one in strided if one.device.type == "cpu" and one.untyped_storage().nbytes()]
    return [one for one in on_cpu if one.numel() < 1 << 20]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor has, with a number for NaN."""
    return tensor.detach().as_subclass(torch.Tensor).double().nan_to_num(nan=7.0)


def check_refused(case: Case, function, call: dict) -> None:
    """Assert that a call is refused with the case's words, and that it writes nothing."""
    tensors = contents(call)
    before = [bits(tensor).clone() for tensor in tensors]
    with pytest.raises(case.error) as caught:
        function(**call)
    assert type(caught.value) is case.error
    assert re.match(case.pattern, str(caught.value), re.DOTALL), (case.message, str(caught.value))
    assert all(map(torch.equal, before, map(bits, tensors)))


CASES = [*cases(ROWS)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_what_is_invalid_is_named(case):
    """Also when what is remembered of right calls would fit."""
    function, make = CALLS[case.call]
    call = make()
    wrong = changed(call, case.changes)
    check_refused(case, function, wrong)
    for _ in range(2):
        function(**call)
    check_refused(case, function, wrong)


ON_GPU = [case for case in cases(INTEGERS) if not {*case.changes} <= {"max_seqlen_q"}]


@pytest.mark.parametrize("case", ON_GPU, ids=ids(ON_GPU))
def test_assertions_name_it_too(case, monkeypatch):
    """They read back what is on a GPU."""
    monkeypatch.setattr(calls_values, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    function, make = CALLS[case.call]
    call = changed(make(), case.changes)
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32:
            call[name] = value.as_subclass(OnGpu)
    check_refused(case, function, call)
