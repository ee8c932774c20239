"""Launches are those of the golden file, and what golden files do."""

import golden
import pytest
from drawn_calls import KINDS, entry_of
from fake_gpu import noting_launches
from machine_code import KernelReport, figures


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_launches(kind, request):
    with noting_launches() as notes:
        entry = entry_of(kind, notes)
    golden.check(golden.LAUNCHES, request.node, entry)


def test_machine_code_is_compared():
    """Tests that compile do it; here is said why not, since they pass all the same."""
    if reason := golden.why_not_compared():
        pytest.skip(reason)


def report(*instructions: str) -> KernelReport:
    made = KernelReport(128, 0, 128, b"")
    vars(made)["instructions"] = instructions  # otherwise read from the cubin
    return made


def test_only_offsets_in_constant_banks_do_not_count():
    found = figures(report("LDC R1, c[0x0][0x28]", "FADD R1, R2, c[0x3][R4+0x10]"))
    assert found == figures(report("LDC R1, c[0x0][0x38]", "FADD R1, R2, c[0x3][0x14]"))
    assert found != figures(report("LDC R2, c[0x0][0x28]", "FADD R1, R2, c[0x3][R4+0x10]"))
    assert found != figures(report("LDC R1, c[0x1][0x28]", "FADD R1, R2, c[0x3][R4+0x10]"))
    assert found["registers"] == 128 and found["instructions"] == 2 and found["spills"] == 0
    assert figures(report("STL [R1], R2", "LDL R3, [R1]"))["spills"] == 2
