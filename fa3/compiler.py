"""Compiled kernels: the only call of cute.compile, and the cache in front of it on disk.

A kernel is an immutable object that says all that shapes its code, and it is compiled once, with
tensors of unknown sizes and strides. The object file is kept under `cache_dir()`, keyed by the
kernel and a fingerprint of our sources and tools; processes that want the same kernel wait for
one of them to compile it. No GPU is needed to compile.
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
from typing import Protocol

import cutlass.cute as cute

from fa3.diagnostics import explain

OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"


class Kernel(Protocol):
    """What is compiled: hashable, with a repr that tells two different kernels apart.

    Fields:
        entry_name: name of the host function in the object file.
        is_storable: whether repr and fingerprint say all that shapes the code, so that the
            kernel may be kept on disk.
    """

    entry_name: str
    is_storable: bool

    def arguments(self) -> list:
        """Arguments with the types of a call and no sizes; equal sizes share a symbol."""

    def __call__(self, *arguments) -> None:
        """The host function: a `cute.jit` method that launches the kernel."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel with what the compiler said of it.

    Fields:
        entry: the callable; takes what the kernel's `__call__` takes, without the stream.
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


def compiled(kernel: Kernel, options: str) -> Callable:
    """Compile a kernel.

    Raises:
        ValueError: a score or a mask of the user's does not compile.
    """
    try:
        return cute.compile(kernel, *kernel.arguments(), options=options)
    except Exception as error:
        # Only kernels with functions of the user's are not kept on disk.
        explained = None if kernel.is_storable else explain(error, kernel.spec)
        if explained is None:
            raise
        raise explained from error


def compile_kernel(kernel: Kernel) -> CompiledKernel:
    """Compile a kernel with its machine code and the compiler's remarks, past the cache."""
    remarks = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(remarks):
        entry = compiled(kernel, f"{OPTIONS} --keep-cubin --dump-dir {folder} remarks{{ptx}}")
    return CompiledKernel(entry, entry.__cubin__, remarks.getvalue())


@functools.cache
def load_kernel(kernel: Kernel) -> Callable:
    """The kernel's callable: from memory, else from disk, else compiled and kept."""
    if not kernel.is_storable:
        return compiled(kernel, OPTIONS)
    key = repr((kernel, fingerprint()))
    path = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".tmp")
            compiled(kernel, OPTIONS).export_to_c(
                object_file_path=str(unfinished), function_name=kernel.entry_name
            )
            unfinished.rename(path)
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return getattr(module, kernel.entry_name)
