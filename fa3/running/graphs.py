"""Tables in device memory, and what a captured CUDA graph keeps.

Captured launches read this memory whenever the graph runs; `Capture.kept` holds it. The graph owns
a CUDA user object, which posts a semaphore once the graph and its instances are gone. The next
capture reads the semaphore, so no Python code runs on CUDA's threads.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

SEMAPHORE_BYTES = 64  # bytes allocated for a `sem_t`, which is smaller


@dataclass(slots=True)
class Capture:
    """A graph that is being captured or was captured."""

    gone: int  # address of a semaphore that CUDA posts when the graph is gone
    # Tensors that the graph's launches read, by `id`.
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    # Stream handle -> the counters of that stream (`fa3.running.counters`).
    counters: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: driver.CUgraph) -> "Capture":
        """The capture of a graph; a semaphore tells when it is gone."""
        libc = library()
        # Freed only once posted: CUDA may post it after the interpreter is gone.
        gone = libc.calloc(1, SEMAPHORE_BYTES)
        libc.sem_init(gone, 0, 0)
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        owner = succeeded(driver.cuUserObjectCreate(gone, driver.CUhostFn(post), 1, no_sync))
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        succeeded(driver.cuGraphRetainUserObject(graph, owner, 1, move))
        return cls(gone)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive as long as the graph."""
        self.kept[id(tensor)] = tensor

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether this keeps a tensor alive."""
        return id(tensor) in self.kept

    def is_gone(self) -> bool:
        """Whether nothing can run the graph any more."""
        posted = ctypes.c_int()
        library().sem_getvalue(self.gone, ctypes.byref(posted))
        return posted.value > 0


LIVE: dict[int, Capture] = {}  # captures by CUDA's capture number, which is unique in a process

LOCK = threading.Lock()


LEGACY = 0  # the handle of the default stream, which cannot be captured
PER_THREAD = 2  # the handle of `cudaStreamPerThread`, which means a different stream in each thread


def current_device() -> int:
    """The index of torch's current GPU; `torch.cuda.current_device` takes 0.13 us more."""
    return torch._C._cuda_getDevice()


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream on a GPU; `torch.cuda.current_stream` takes 1 us."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream on a device is captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def idle_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own, whose work waits for no other stream."""
    return torch.cuda.Stream(device)


def made_apart(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor of the current stream that stays, made in a thread of its own.
    A memory pool that the present thread allocates from takes no part in it: pools of compiled
    graphs must be empty when a graph is done."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> torch.Tensor:
        with torch.cuda.stream(stream):
            made = make()
            if stream.cuda_stream == PER_THREAD:
                # The caller's launches would not wait for what this thread's stream does.
                stream.synchronize()
            return made

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(on_stream).result()


def capture_of(stream: int) -> Capture | None:
    """Return the capture that the current stream takes part in, or None."""
    if stream == LEGACY or not torch._C._cuda_isCurrentStreamCapturing():
        return None
    status, number, graph, *_ = succeeded(driver.cuStreamGetCaptureInfo(stream))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    number = int(number)
    with LOCK:
        capture = LIVE.get(number)
        if capture is None:
            forget_the_gone()
            capture = LIVE[number] = Capture.of(graph)
        return capture


def forget_the_gone() -> None:
    """Free the memory of graphs that are gone."""
    for number, capture in list(LIVE.items()):
        if capture.is_gone():
            del LIVE[number]
            library().free(capture.gone)


def succeeded(result: tuple):
    """Return the values of a driver call without its status; RuntimeError if it failed."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA does not tell how a graph is captured: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def library() -> ctypes.CDLL:
    """The C library of this process."""
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = (ctypes.c_void_p,)
    libc.sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    return libc


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table in device memory, kept until its last launch has ended."""

    numbers: torch.Tensor
    # Handles of the streams with launches that read the table.
    streams: set[int] = field(default_factory=set)

    @classmethod
    def upload(cls, table: np.ndarray, device: torch.device) -> "Table":
        """Copy a table to the GPU; wait for the copy but for no other work.
        Raises RuntimeError while a CUDA graph is captured."""
        if is_capturing(device):
            raise RuntimeError(
                "q, k and v have sizes that were not planned before, and its tile order cannot "
                "be copied to the GPU while a CUDA graph is captured: call once before capturing"
            )
        # The current stream may have a long queue of work.
        with torch.cuda.stream(idle_stream(device)):
            return cls(made_apart(lambda: torch.tensor(table, device=device), device))

    def on(self, stream: int, capture: Capture | None) -> torch.Tensor:
        """The table, for a launch on torch's current stream; `stream` is the stream's handle."""
        if capture is not None:
            capture.keep(self.numbers)
        elif stream not in self.streams:
            self.numbers.record_stream(torch.cuda.current_stream(self.numbers.device))
            self.streams.add(stream)
        return self.numbers
