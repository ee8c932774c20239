"""What a compiled kernel is made of: the compiler's log, and its cubin as `nvdisasm` prints it.

The `nvidia-cuda-nvdisasm` package carries the program; no CUDA toolkit is needed.
"""

import contextlib
import importlib.metadata
import math
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from fa3.kernels.kernel_base import KernelBase
from fa3.running.compiler import OPTIONS, compiled

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
WORD = re.compile(r"\.word\s+0x([0-9a-f]+)")


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel with its machine code and the compiler's log."""

    # The callable; takes the arguments of the kernel's `__call__` except the stream.
    entry: Callable
    cubin: bytes  # the machine code
    # Registers, spills and warnings as ptxas prints them; empty with version 4.7 of the DSL, which
    # hands on none.
    ptxas_log: str


def compile_kernel(kernel: KernelBase) -> CompiledKernel:
    """Compile a kernel without the cache; keep its machine code and the compiler's remarks."""
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder, "remarks.yaml")
        outputs = ("--keep-cubin", "--dump-dir", folder, "--remark-output", str(remarks))
        entry = compiled(kernel, f"{OPTIONS} {shlex.join(outputs)} remarks{{ptx}}")
        return CompiledKernel(entry, entry.__cubin__, remarks.read_text())


@dataclass(frozen=True)
class CubinReport:
    """Resources and instructions of the one kernel in a cubin."""

    registers: int  # registers a thread has at launch; setmaxnreg moves them between warpgroups
    stack_bytes: int  # local memory of a thread. A kernel that spills has some.
    threads: int  # threads of a CTA
    # The SASS in program order, predicate and operands included.
    instructions: tuple[str, ...] = field(repr=False)

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each opcode occurs, modifiers included."""
        return Counter(opcode(text) for text in self.instructions)

    def count(self, *prefixes: str) -> int:
        """Return how many opcodes start with one of the prefixes."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefixes))


def inspect(cubin: bytes) -> CubinReport:
    """Read the one kernel in a cubin; raise ValueError if it has others, or is none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), file.name], capture_output=True, text=True)
    if done.returncode or done.stdout.count("EIATTR_REGCOUNT") != 1:
        raise ValueError(f"needs an ELF file with the code of one kernel: {done.stderr.strip()}")
    text = done.stdout
    return CubinReport(
        registers=attribute_of(text, "REGCOUNT")[0],
        stack_bytes=attribute_of(text, "FRAME_SIZE")[0],
        threads=math.prod(attribute_of(text, "REQNTID")),
        instructions=tuple(INSTRUCTION.findall(text)),
    )


def attribute_of(text: str, attribute: str) -> list[int]:
    """Return the numbers of a kernel's attribute."""
    _, _, after = text.partition(f"EIATTR_{attribute}\n")
    return [int(word, 16) for word in WORD.findall(after.partition("//---")[0])]


def opcode(instruction: str) -> str:
    """The opcode of a SASS instruction, without its predicate."""
    match = OPCODE.match(instruction)
    if match is None:
        raise ValueError(f"not an instruction: {instruction!r}")
    return match[1]


@cache
def nvdisasm() -> Path:
    """Return where the disassembler is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(NVDISASM_PACKAGE) or []:
            if file.name == "nvdisasm":
                return Path(file.locate())
    raise ModuleNotFoundError(
        f"reading machine code (SASS) needs nvdisasm: pip install {NVDISASM_PACKAGE} "
        "(part of the dev extra)"
    )
