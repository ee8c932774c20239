"""The append kernel, compiled for sm_90a and read back as machine code. No GPU is needed."""

from dataclasses import replace

import pytest
from machine_code import inspect

from fa3.kernels.append import THREADS, Append, Rotary
from fa3.running.compiler import compile_kernel

PLAIN = Append(
    "bfloat16", 128, 128, paged=False, batch_indexed=False, ragged=False, rotary=None
)  # fmt: skip

KERNELS = {
    "plain": PLAIN,
    "8-256": replace(PLAIN, head_dim=8, head_dim_v=256),
    "pairs-of-some": replace(PLAIN, paged=True, rotary=Rotary(64, True, "float32")),
    "halves-of-some": replace(PLAIN, dtype="float16", rotary=Rotary(16, False, "float32")),
    "packed": replace(
        PLAIN, rotary=Rotary(128, False, "bfloat16"), packed=True, turned=True, writes_lengths=True
    ),
    "everything": replace(
        PLAIN,
        paged=True,
        batch_indexed=True,
        ragged=True,
        rotary=Rotary(128, False, "float32"),
        writes_lengths=True,
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name):
    kernel = KERNELS[name]
    compiled = compile_kernel(kernel)
    report = inspect(compiled.cubin)
    count = report.opcodes
    assert report.threads == THREADS and report.stack_bytes == 0
    assert not [opcode for opcode in count if opcode.startswith(("STL", "LDL"))]
    # Four CTAs fit on an SM.
    assert report.registers <= 64
    # Everything of 16 bits moves 16 bytes at a time; k, v and with a rotary embedding q.
    assert count["STG.E.128"] == (2 if kernel.rotary is None else 3)
    assert not [opcode for opcode in count if opcode.startswith(("LDG.E.U16", "STG.E.U16"))]
    # Waits for the kernel before, and lets the one behind be launched.
    assert count["ACQBULK"] == 1 and count["PREEXIT"] == 1


def test_kernels_differ_in_repr():
    assert len({repr(kernel) for kernel in KERNELS.values()}) == len(KERNELS)
