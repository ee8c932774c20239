"""Compiled kernels: the only call of cute.compile, and the cache in front of it on disk.

A kernel is compiled once for (spec, config, schedule type), with tensors of unknown sizes and
strides. The object file is kept under `cache_dir()`, keyed by those three and a fingerprint of
everything that shapes the code; processes that want the same kernel wait for one of them to
compile it. No GPU is needed to compile.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute

from fa3.kernels.forward import ELEMENT_TYPES, Config, Forward
from fa3.problem import AttentionSpec
from fa3.schedules import TileList

ENTRY = "fa3_forward"
OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel with what the compiler said of it.

    Fields:
        entry: the callable: (q, k, v, out, lse, scale, window left and right,
            heads per section, clusters, table of the schedule).
        cubin: the machine code.
        ptxas_log: registers, spills and warnings as ptxas prints them.
    """

    entry: Callable
    cubin: bytes
    ptxas_log: str


def cache_dir() -> Path:
    """Where compiled kernels are kept: $FA3_CACHE_DIR, else a folder in the user's cache."""
    if path := os.environ.get("FA3_CACHE_DIR"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa3"


@functools.cache
def fingerprint() -> str:
    """Digest of everything beside the key that shapes the code: sources and tool versions."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        digest.update(importlib.metadata.version(package).encode())
    digest.update(platform.machine().encode())
    return digest.hexdigest()


def fake_arguments(spec: AttentionSpec, schedule_type: type) -> list:
    """Arguments with the types of a call and no sizes; equal sizes share a symbol."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype = ELEMENT_TYPES[spec.dtype]

    def tensor(seqlen, heads, head_dim: int):
        # TMA takes strides that are multiples of 16 bytes.
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (batch, seqlen, heads, head_dim)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)

    lse = cute.runtime.make_fake_compact_tensor(
        cutlass.Float32, (batch, heads_q, seqlen_q), stride_order=(2, 1, 0)
    )
    table = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),))
    return [
        tensor(seqlen_q, heads_q, spec.head_dim),
        tensor(seqlen_k, heads_kv, spec.head_dim),
        tensor(seqlen_k, heads_kv, spec.head_dim_v),
        tensor(seqlen_q, heads_q, spec.head_dim_v),
        lse if spec.write_lse else None,
        cutlass.Float32(0.0),
        *(cutlass.Int32(0) for _ in range(4)),
        table if schedule_type is TileList else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def compile_kernel(spec: AttentionSpec, config: Config, schedule_type: type) -> CompiledKernel:
    """Compile a kernel with its machine code and the compiler's remarks, past the cache."""
    remarks = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(remarks):
        entry = cute.compile(
            Forward(spec, config, schedule_type),
            *fake_arguments(spec, schedule_type),
            options=f"{OPTIONS} --keep-cubin --dump-dir {folder} remarks{{ptx}}",
        )
    return CompiledKernel(entry, entry.__cubin__, remarks.getvalue())


@functools.cache
def load_kernel(spec: AttentionSpec, config: Config, schedule_type: type) -> Callable:
    """The kernel's callable: from memory, else from disk, else compiled and kept."""
    key = repr((spec, config, schedule_type.__qualname__, fingerprint()))
    path = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compiled = cute.compile(
                Forward(spec, config, schedule_type),
                *fake_arguments(spec, schedule_type),
                options=OPTIONS,
            )
            unfinished = path.with_suffix(".tmp")
            compiled.export_to_c(object_file_path=str(unfinished), function_name=ENTRY)
            unfinished.rename(path)
    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)
