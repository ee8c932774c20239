"""Invalid arguments are named, before anything is written, also after a call that was right."""

import re

import invalid_arguments as table
import pytest
import torch
from valid_calls import CALLS, Case, OnGpu, cases, changed

from fa3.calls import assertions

INTEGERS = [*table.VALUES, *table.VALUES_OF_CACHES]
ROWS = [
    *table.TENSORS, *table.OUTPUTS, *INTEGERS, *table.OPTIONS, *table.SIZES, *table.METADATA,
    *table.FLASH_ATTENTION_3, *table.PLANS,
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
    return tensor.detach().as_subclass(torch.Tensor).nan_to_num(nan=7.0)


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
    monkeypatch.setattr(assertions, "ASSERTIONS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    function, make = CALLS[case.call]
    call = changed(make(), case.changes)
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.int32:
            call[name] = value.as_subclass(OnGpu)
    check_refused(case, function, call)
