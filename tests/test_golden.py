"""Launches are those of the golden file, and what golden files do."""

import golden
import pytest
import torch
from drawn_calls import KINDS, entry_of
from fake_gpu import noting_launches
from machine_code import KernelReport, figures

from fa3.calls.options import DENSE, PACKED, Options
from fa3.distributed.alone import KeyPart
from fa3.problem import Window


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_launches(kind, request):
    with noting_launches() as notes:
        entry = entry_of(kind, notes)
    golden.check(golden.LAUNCHES, request.node, entry)


@pytest.mark.parametrize(("kind", "lengths"), [(DENSE, ((24, 24),)), (PACKED, ((20, 20), (4, 4)))])
def test_kernels_take_what_parts_of_ranks_give(kind, lengths):
    part = KeyPart(Options(Window(-1, 0), has_gradient=True, kind=kind), None, False)
    shape = (1, 24, 2, 64) if kind == DENSE else (24, 2, 64)
    part.lengths, (q, *rest) = lengths, torch.ones(4, *shape, dtype=torch.bfloat16)
    with noting_launches() as notes:
        out, lse = part.forward((q, *rest[:2], None), (None, None))
        part.backward((q, *rest[:2], out, lse, q, None), (None, None), None, fp32_dkv=True)
    assert len(notes.launches) >= 2


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
