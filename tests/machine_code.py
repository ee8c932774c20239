"""What tests of machine code share."""

import hashlib
import re

import cutlass
import golden

from fa3.tools import cubin
from fa3.tools.cubin import CubinReport

HAS_LOG = not cutlass.__version__.startswith("4.7.")
"""Whether the DSL hands on what ptxas prints. Without it spills and serialised WGMMAs are seen in
the instructions only."""

CONSTANT = re.compile(r"(c\[0x\w+\])\[[^]]*\]")
"""An operand in a constant bank: its offset follows from the order of a kernel's arguments."""


def inspect(code: bytes) -> CubinReport:
    """Read a cubin as `fa3.tools.cubin` does, and note it for the golden file."""
    report = cubin.inspect(code)
    golden.OF_TEST[f"kernel {len(golden.OF_TEST) + 1}"] = figures(report)
    return report


def figures(report: CubinReport) -> dict[str, str | int]:
    """Return what the golden file has of a kernel."""
    text = "\n".join(CONSTANT.sub(r"\1", one) for one in report.instructions)
    return {
        "sass": hashlib.sha256(text.encode()).hexdigest()[:16],
        "registers": report.registers,
        "spills": report.spill_instructions,
        "instructions": len(report.instructions),
    }


def check_ptxas_log(log: str) -> None:
    """ptxas had nothing to warn about, such as WGMMAs that it serialised (C75..)."""
    assert bool(re.search(r"\bUsed \d+ registers", log)) == HAS_LOG, log
    assert not re.findall(r"C75\d\d", log), log
