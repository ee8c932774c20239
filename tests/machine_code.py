"""What tests of machine code share."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator

import cutlass
import golden

from benchmarks import cubin
from benchmarks.cubin import CubinReport, compile_kernel, opcode
from fa3.kernels.kernel_base import KernelBase

REGISTERS_OF_SM = 65536

WAIT_WGMMA = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")

HAS_LOG = not cutlass.__version__.startswith("4.7.")
"""Whether the DSL hands on what ptxas prints. Without it spills and serialised WGMMAs are seen in
the instructions only."""

CONSTANT = re.compile(r"(c\[0x\w+\])\[[^]]*\]")
"""An operand in a constant bank: its offset follows from the order of a kernel's arguments."""


class Opcodes:
    """An attribute of a report: how many instructions have these opcodes."""

    def __init__(self, *prefixes: str) -> None:
        self.prefixes = prefixes

    def __get__(self, report: CubinReport, owner: type) -> int:
        return report.count(*self.prefixes)


class KernelReport(CubinReport):
    """A report with the counts that tests look at."""

    wgmma = Opcodes("HGMMA")
    # As many waits as WGMMAs mean that the compiler serialised these.
    wgmma_waits = Opcodes("WARPGROUP.DEPBAR")
    tma_stores = Opcodes("UTMASTG")
    spill_instructions = Opcodes("STL", "LDL")

    @property
    def multicast_loads(self) -> int:
        """TMA loads into the shared memory of several CTAs of a cluster."""
        return sum(n for name, n in self.opcodes.items() if re.match("UTMALDG.*MULTICAST", name))

    @property
    def tma_loads(self) -> int:
        """TMA loads into a CTA's own shared memory."""
        return self.count("UTMALDG") - self.multicast_loads

    def under_wgmma(self) -> Iterator[Counter[str]]:
        """Yield the opcodes of each stretch of code that runs while one WGMMA group is in flight.

        A stretch begins where the code waits for all groups but the youngest. It ends at the last
        wait for that one before the next WGMMA: an earlier one stands in a branch that few take.
        """
        begin = end = None
        for i, text in enumerate(self.instructions):
            if wait := WAIT_WGMMA.search(text):
                if wait[1] == "0":
                    end = i
                else:
                    begin, end = i, None
            elif "HGMMA" in text:
                if begin is not None and end is not None:
                    yield Counter(opcode(t) for t in self.instructions[begin:end])
                begin = None


def inspect(code: bytes) -> KernelReport:
    """Read a cubin as `benchmarks.cubin` does, and note it for the golden file."""
    report = KernelReport(**vars(cubin.inspect(code)))
    golden.OF_TEST[f"kernel {len(golden.OF_TEST) + 1}"] = figures(report)
    return report


def report_of(kernel: KernelBase, ctas_of_sm: int = 1, most_spills: int = 0) -> KernelReport:
    """Compile a kernel and return its report: its registers do, and ptxas had no complaint."""
    compiled = compile_kernel(kernel)
    report = inspect(compiled.cubin)
    # ptxas had nothing to warn about, such as WGMMAs that it serialised (C75..).
    log = compiled.ptxas_log
    assert bool(re.search(r"\bUsed \d+ registers", log)) == HAS_LOG, log
    assert not re.findall(r"C75\d\d", log), log
    assert report.spill_instructions <= most_spills
    assert report.stack_bytes == 0 or most_spills
    assert ctas_of_sm * report.registers * report.threads <= REGISTERS_OF_SM
    return report


def figures(report: KernelReport) -> dict[str, str | int]:
    """Return what the golden file has of a kernel."""
    text = "\n".join(CONSTANT.sub(r"\1", one) for one in report.instructions)
    return {
        "sass": hashlib.sha256(text.encode()).hexdigest()[:16],
        "registers": report.registers,
        "spills": report.spill_instructions,
        "instructions": len(report.instructions),
    }
