"""Device memory that launches share: counters, parts, tables, captures.

Kernels find counters at zero and leave them at zero. A call owns its counters from before its first
launch until it has issued its last one:

    loan = stream_memory.lend(prepared, stream)
    ...                                       # launches
    stream_memory.take_back(loan)

Then the next call on the same stream may have them, since its launches run later. A call of another
thread in between gets other counters, and an interrupted call's counters are not used again.
A loan also has memory of parts, segments and tables: to allocate each anew takes the host 1 us.

In a captured graph, launches of one stream run one after another, but the graph may overlap
anything else: each capture has its own counters. What captured launches read is held by
`Capture.kept`. The graph owns a CUDA user object, which posts a semaphore once the graph and its
instances are gone. The next capture reads the semaphore, so no Python code runs on CUDA's threads.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

SEMAPHORE_BYTES = 64  # bytes allocated for a `sem_t`, which is smaller


@dataclass(slots=True)
class Capture:
    """A graph that is being captured or was captured."""

    gone: int  # address of a semaphore that CUDA posts when the graph is gone
    # Tensors that the graph's launches read, by `id`; they live as long as the graph.
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    # Stream handle -> the memory of that stream.
    memory: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: driver.CUgraph) -> "Capture":
        """The capture of a graph; a semaphore tells when it is gone."""
        libc = c_library()
        # Freed only once posted: CUDA may post it after the interpreter is gone.
        gone = libc.calloc(1, SEMAPHORE_BYTES)
        libc.sem_init(gone, 0, 0)
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        owner = driver_values(driver.cuUserObjectCreate(gone, driver.CUhostFn(post), 1, no_sync))
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        driver_values(driver.cuGraphRetainUserObject(graph, owner, 1, move))
        return cls(gone)

    def is_gone(self) -> bool:
        """Whether nothing can run the graph any more."""
        posted = ctypes.c_int()
        c_library().sem_getvalue(self.gone, ctypes.byref(posted))
        return posted.value > 0


LIVE: dict[int, Capture] = {}  # captures by CUDA's capture number, which is unique in a process

LOCK = threading.RLock()  # of `LIVE`. A finalizer may run, and call attention, while it is held.


LEGACY = 0  # the handle of the default stream, which cannot be captured
PER_THREAD = 2  # the handle of `cudaStreamPerThread`, which means a different stream in each thread


def current_device() -> int:
    """The index of torch's current GPU; `torch.cuda.current_device` takes 0.13 us more."""
    return torch._C._cuda_getDevice()


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream; `torch.cuda.current_stream` takes 1 us."""
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


def make_in_thread(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A lasting tensor of the current stream, made in another thread.
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
    status, number, graph, *_ = driver_values(driver.cuStreamGetCaptureInfo(stream))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    number = int(number)
    with LOCK:
        capture = LIVE.get(number)
        if capture is None:
            free_ended_graphs()
            capture = LIVE[number] = Capture.of(graph)
        return capture


def free_ended_graphs() -> None:
    """Free the memory of graphs that are gone."""
    for number, capture in list(LIVE.items()):
        if capture.is_gone():
            del LIVE[number]
            c_library().free(capture.gone)


def driver_values(result: tuple):
    """Return a driver call's values without its status; RuntimeError if it failed."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA does not tell how a graph is captured: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def c_library() -> ctypes.CDLL:
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
        """Copy a table to the GPU; wait for the copy alone.
        Raises RuntimeError while a CUDA graph is captured."""
        if is_capturing(device):
            raise RuntimeError(
                "q, k and v have sizes that were not planned before, and its tile order cannot "
                "be copied to the GPU while a CUDA graph is captured: call once before capturing"
            )
        # The current stream may have a long queue of work.
        with torch.cuda.stream(idle_stream(device)):
            return cls(make_in_thread(lambda: torch.tensor(table, device=device), device))

    def on(self, stream: int, capture: Capture | None) -> torch.Tensor:
        """The table for a launch on torch's current stream, of handle `stream`."""
        if capture is not None:
            capture.kept[id(self.numbers)] = self.numbers
        elif stream not in self.streams:
            self.numbers.record_stream(torch.cuda.current_stream(self.numbers.device))
            if stream != PER_THREAD:
                self.streams.add(stream)
        return self.numbers


# ------------------------------------------------------------------------ memory of streams

RESERVE = 1 << 18
"""Counters that a device sets aside for captures at a time. A graph that needs more allocates and
zeroes its own."""

FEWEST = 1 << 12  # fewest numbers to allocate, so that later, larger calls seldom need new ones
ALIGNED = 4  # counters in 16 bytes, as kernels want them to be aligned
MOST_STREAMS = 256  # most streams whose memory is kept
MOST_FOUND = 64  # most prepared calls that a loan knows: sizes of packed calls are endless


@dataclass(slots=True)
class Reserve:
    """Zeroed counters of one device for captures, allocated before.
    Memory allocated during a capture belongs to torch, which takes it back when that ends."""

    free: torch.Tensor | None = None
    # A finalizer may run, and call attention, while it is held.
    lock: threading.RLock = field(default_factory=threading.RLock)
    is_low: bool = True  # whether few are left, so that calls outside of captures should fill it

    def fill(self, device: torch.device) -> None:
        """Allocate zeroed counters. Must not be called during a capture."""
        if device.type == "cuda":
            idle = idle_stream(device)
            with self.lock, torch.cuda.stream(idle):
                make = partial(torch.zeros, RESERVE, dtype=torch.int32, device=device)
                zeros = make_in_thread(make, device)
                # A graph may run on any stream, so the zeros must be written now.
                idle.synchronize()
                self.free = zeros
        self.is_low = False

    def take(self, count: int) -> torch.Tensor | None:
        """Counters for a capture; None if too few are left."""
        count = -(-count // ALIGNED) * ALIGNED
        with self.lock:
            if self.free is None or len(self.free) < count:
                return None
            taken, self.free = self.free[:count], self.free[count:]
            self.is_low = len(self.free) < RESERVE // 2
            return taken


@dataclass(slots=True)
class Loan:
    """Memory that one call at a time has for its launches."""

    # Tensors by their names in launches: counters, and others, which hold any numbers.
    counters: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    # What the launches of each `Prepared` find here, by name: also its table and its numbers.
    values: dict[Any, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class StreamMemory:
    """The memory that launches on one stream share."""

    device: torch.device
    reserve: Reserve  # of the device; filled by calls that are not captured
    capture: Capture | None = None  # that the stream takes part in
    free: list[Loan] = field(default_factory=list)  # no call's. Appending and popping are atomic.

    def lend(self, prepared: Any, stream: int) -> Loan:
        """Memory for a `Prepared` on torch's current stream, of handle `stream`.
        Its counters are zero; in captures, whenever the graph runs."""
        if self.reserve.is_low and self.capture is None:
            self.reserve.fill(self.device)
        try:
            loan = self.free.pop()
        except IndexError:
            loan = Loan()
        if prepared in loan.values:
            return loan
        memory, values = prepared.memory, dict(prepared.numbers or ())
        if len(loan.values) == MOST_FOUND:
            loan.values.clear()
        if prepared.table is not None:
            values[prepared.name_of_table] = prepared.table.on(stream, self.capture)
        for present, needed in (loan.counters, memory.counters), (loan.others, memory.kept):
            for name, count, *dtype in needed:
                if name not in present or len(present[name]) < count:
                    # Values of other calls would keep the memory that is replaced.
                    loan.values.clear()
                    present[name] = self.new(count, *dtype)
                values[name] = present[name][:count] if dtype else present[name]
        if "counters" in values:
            # The decode kernel takes an address.
            values["address_of_counters"] = values["counters"].data_ptr()
        loan.values[prepared] = values
        return loan

    def new(self, count: int, dtype: str | None = None) -> torch.Tensor:
        """Memory that no call had before: counters, or numbers of a dtype."""
        kind = torch.empty if dtype else torch.zeros
        make = partial(kind, dtype=getattr(torch, dtype or "int32"), device=self.device)
        if self.capture is None:
            return make_in_thread(partial(make, max(count, FEWEST)), self.device)
        taken = None if dtype else self.reserve.take(count)
        if taken is None:
            # The graph zeroes counters itself whenever it runs.
            return make(count)
        self.capture.kept[id(taken)] = taken
        return taken

    def take_back(self, loan: Loan) -> None:
        """Take back the memory of a call whose launches are issued."""
        if self.capture is not None:
            # Other memory is the graph's, and torch uses it again by itself.
            counters, kept = loan.counters.items(), self.capture.kept
            loan = Loan({name: one for name, one in counters if id(one) in kept})
        self.free.append(loan)


BY_STREAM: dict[tuple[torch.device, int], StreamMemory] = {}
RESERVES: dict[torch.device, Reserve] = {}


NEW_STREAM = threading.RLock()  # held while streams come and go; finalizers may come back to it


def memory_of(device: torch.device, stream: int, capture: Capture | None) -> StreamMemory:
    """The memory of a stream, or of a stream of a capture."""
    if capture is not None:
        reserve = RESERVES.setdefault(device, Reserve())
        return capture.memory.setdefault(stream, StreamMemory(device, reserve, capture))
    if stream == PER_THREAD:
        stream = -threading.get_ident()
    memory = BY_STREAM.get((device, stream))
    if memory is None:
        with NEW_STREAM:
            while len(BY_STREAM) >= MOST_STREAMS:
                # Forget the stream that came first, if nothing gets in between. Torch reuses freed
                # memory on the same stream only, so it may be freed at any time. A finalizer may
                # run in here and bring a stream of its own; then the dictionary is another one.
                with contextlib.suppress(RuntimeError, StopIteration):
                    BY_STREAM.pop(next(iter(BY_STREAM)), None)
            reserve = RESERVES.setdefault(device, Reserve())
            memory = BY_STREAM.setdefault((device, stream), StreamMemory(device, reserve))
    return memory
