"""What a compiled kernel is made of, read from its cubin without a CUDA toolkit.

Registers, stack and threads stand in the ELF's `.nv.info` sections. Instructions come from
`nvdisasm`, which the `nvidia-cuda-nvdisasm` package carries; it is needed only where they are read.
"""

import contextlib
import importlib.metadata
import math
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

# Attributes of .nv.info, as `cuobjdump --dump-elf` names them, and their format with a payload.
EIATTR_REQNTID, EIATTR_FRAME_SIZE, EIATTR_REGCOUNT, EIFMT_SIZED = 0x10, 0x11, 0x2F, 0x04

SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class CubinReport:
    """Resources and instructions of the one kernel in a cubin."""

    registers: int  # registers a thread has at launch; setmaxnreg moves them between warpgroups
    stack_bytes: int  # local memory of a thread. A kernel that spills has some.
    threads: int  # threads of a CTA
    cubin: bytes = field(repr=False)

    @cached_property
    def instructions(self) -> tuple[str, ...]:
        """The SASS in program order, predicate and operands included; needs nvdisasm."""
        return tuple(INSTRUCTION.findall(disassemble(self.cubin)))

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each opcode occurs, modifiers included."""
        return Counter(opcode(text) for text in self.instructions)

    def count(self, *prefixes: str) -> int:
        """Return how many opcodes start with one of the prefixes."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefixes))


def inspect(cubin: bytes) -> CubinReport:
    """Read the resources of the one kernel in a cubin; raise ValueError if it has others."""
    sections = elf_sections(cubin)
    resources = dict(attributes(sections[".nv.info"]))
    kernels = [name for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"expected a cubin with one kernel, got {len(kernels)}")
    launch = dict(attributes(sections[".nv.info." + kernels[0].removeprefix(".text.")]))
    # The payload of a per-function attribute is (symbol, value); there is one function.
    return CubinReport(
        registers=struct.unpack("<II", resources[EIATTR_REGCOUNT])[1],
        stack_bytes=struct.unpack("<II", resources[EIATTR_FRAME_SIZE])[1],
        threads=math.prod(struct.unpack("<III", launch[EIATTR_REQNTID])),
        cubin=cubin,
    )


def opcode(instruction: str) -> str:
    """The opcode of a SASS instruction, without its predicate."""
    found = OPCODE.match(instruction)
    if found is None:
        raise ValueError(f"not an instruction: {instruction!r}")
    return found[1]


def elf_sections(elf: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit ELF file by name."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [SECTION_HEADER.unpack_from(elf, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    sections = {}
    for name, kind, _, _, offset, size, *_ in headers:
        end = elf.index(b"\0", names + name)
        occupies_file = kind != 8  # SHT_NOBITS
        sections[elf[names + name : end].decode()] = elf[offset : offset + size * occupies_file]
    return sections


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the (attribute, payload) pairs of a `.nv.info` section that have a payload."""
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == EIFMT_SIZED:
            yield attribute, info[offset : offset + value]
            offset += value


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


def disassemble(cubin: bytes) -> str:
    """The cubin as nvdisasm prints it, code only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
