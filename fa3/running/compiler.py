"""Compiles and loads kernels for `fa3.calls` and `fa3.tools`: cute.compile's only caller.

A kernel is an immutable object whose fields determine its code. It is compiled with tensors of
unknown sizes and strides, once in a process and, through `code_cache`, once on a machine.
Compiling needs no GPU. Every function may be called from several threads.
"""

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute

from fa3.kernels.kernel_base import KernelBase
from fa3.running import code_cache
from fa3.scores.diagnostics import explain

ARCH = "sm_90a"  # what kernels are compiled for

OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCH}"

DSL_SETTINGS = sorted(
    (name, value)
    for name, value in os.environ.items()
    if name.startswith("CUTE_DSL_") and name != "CUTE_DSL_ARCH"
)
"""The DSL's settings from the environment, read once. OPTIONS override the architecture."""

COMPILING = threading.RLock()
"""Held while a kernel is compiled or loaded: the DSL keeps its state in globals."""

# A fork waits for the lock. Otherwise the child would inherit half a compilation and a held lock.
os.register_at_fork(
    before=COMPILING.acquire, after_in_parent=COMPILING.release, after_in_child=COMPILING.release
)


LOADED: dict[KernelBase, Callable] = {}  # the callables of all kernels that this process has loaded


def compiled(kernel: KernelBase, options: str) -> Any:
    """Compile a kernel; raise ValueError if a user's score or mask fails."""
    try:
        with COMPILING:
            return cute.compile(kernel, *kernel.arguments(), options=options)
    except Exception as error:
        # Kernels that are not storable are those with users' functions, which `explain` knows.
        explained = None if kernel.is_storable else explain(error, kernel.spec)  # type: ignore[attr-defined]
        if explained is None:
            raise
        raise explained from error


def load_kernel(kernel: KernelBase) -> Callable:
    """Return a kernel's callable: from memory, from disk, or compiled and kept."""
    try:
        return LOADED[kernel]
    except KeyError:
        pass
    with COMPILING:
        # Another thread may have loaded the kernel meanwhile.
        if kernel not in LOADED:
            LOADED[kernel] = from_disk(kernel) if kernel.is_storable else compiled(kernel, OPTIONS)
        return LOADED[kernel]


def from_disk(kernel: KernelBase) -> Callable:
    """The callable from the object on disk, which is compiled if missing."""
    with file_in_memory() as path:
        Path(path).write_bytes(object_code(kernel))
        module = cute.runtime.load_module(path, enable_tvm_ffi=True)
    return getattr(module, kernel.entry_name)


def object_code(kernel: KernelBase) -> bytes:
    """A kernel's object from disk, not loaded; compiled if missing."""

    def exported() -> bytes:
        compilation = compiled(kernel, OPTIONS)
        with file_in_memory() as path:
            compilation.export_to_c(object_file_path=path, function_name=kernel.entry_name)
            return Path(path).read_bytes()

    return code_cache.load_or_make(key_of(kernel), exported)


def is_on_disk(kernel: KernelBase) -> bool:
    """Whether a process would find the kernel compiled."""
    return code_cache.has_object(key_of(kernel))


def key_of(kernel: KernelBase) -> str:
    """All that determines a kernel's code, except fa3's sources."""
    # Imported here, since it takes 20 ms and only compiling needs it.
    import tvm_ffi

    tools = (cutlass.__version__, cutlass.CUDA_VERSION, tvm_ffi.__version__, platform.machine())
    return repr((kernel, OPTIONS, DSL_SETTINGS, tools))


@contextlib.contextmanager
def file_in_memory() -> Iterator[str]:
    """The path of an empty file in memory, which the DSL needs."""
    descriptor = os.memfd_create("fa3")
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
