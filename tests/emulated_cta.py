"""A CTA on the CPU: runs a kernel's Python with a thread for each thread of the CTA.

Modules are loaded once more with a DSL that does nothing but exchange values between the lanes of a
warp. It has what kernels that make tables use.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np

WARP = 32
HERE = threading.local()
"""The present thread: its CTA, index, lane and warp."""


class Memory:
    """A tensor of integers; kernels get Python's."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.shape = numbers, numbers.shape

    def __getitem__(self, index) -> int:
        return int(self.numbers[index])

    def __setitem__(self, index, value: int) -> None:
        self.numbers[index] = value

    def fill(self, value: int) -> None:
        self.numbers[:] = value

    @property
    def iterator(self) -> "Pointer":
        return Pointer(self.numbers, 0)


class Pointer:
    """The address of an integer of a tensor."""

    def __init__(self, numbers: np.ndarray, place: int) -> None:
        self.numbers, self.place = numbers, place

    def __add__(self, count: int) -> "Pointer":
        return Pointer(self.numbers, self.place + count)

    def align(self, size: int) -> "Pointer":
        assert self.place * 4 % size == 0
        return self

    def tensor(self, size: int) -> Memory:
        assert 0 <= self.place <= len(self.numbers) - size
        return Memory(self.numbers[self.place : self.place + size])


class Warp:
    """A warp, all threads of which exchange values at once."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(WARP), [0] * WARP

    def exchange(self, value) -> list:
        self.values[HERE.lane] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Cta:
    """A CTA of so many threads."""

    def __init__(self, threads: int) -> None:
        self.barrier, self.memory = threading.Barrier(threads), {}
        self.warps = [Warp() for _ in range(threads // WARP)]

    def run(self, kernel: Callable[[], None]) -> None:
        """Run a kernel in all threads; raise the first error."""
        errors = []

        def one(thread: int) -> None:
            HERE.cta, HERE.thread, HERE.lane, HERE.count = self, thread, thread % WARP, 0
            HERE.warp = self.warps[thread // WARP]
            try:
                kernel()
            except Exception as error:
                errors.append(error)
                for barrier in (self.barrier, *(warp.barrier for warp in self.warps)):
                    barrier.abort()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(WARP * len(self.warps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: type(error) is threading.BrokenBarrierError):
            raise error


class Allocator:
    """Gives all threads of a CTA the same shared memory."""

    def allocate_tensor(self, _, shape, byte_alignment: int) -> Memory:
        HERE.count += 1
        return HERE.cta.memory.setdefault(HERE.count, Memory(np.full(shape, -1)))


def shuffle_up(value, distance: int, mask_and_clamp: int) -> int:
    values = HERE.warp.exchange(value)
    return values[HERE.lane - distance] if HERE.lane >= distance else value


def modules() -> dict[str, ModuleType]:
    """Return the DSL that does nothing."""
    cutlass, cute, dsl = map(
        ModuleType, ("cutlass", "cutlass.cute", "fa3.primitives.shared_memory")
    )
    unchanged, nothing = (lambda value: value), (lambda: None)
    arch = SimpleNamespace(
        thread_idx=lambda: (HERE.thread, 0, 0), lane_idx=lambda: HERE.lane,
        griddepcontrol_launch_dependents=nothing, griddepcontrol_wait=nothing,
        sync_threads=lambda: HERE.cta.barrier.wait(), make_warp_uniform=unchanged,
        shuffle_sync=lambda value, lane: HERE.warp.exchange(value)[lane],
        shuffle_sync_up=shuffle_up, warp_reduction_sum=lambda n: sum(HERE.warp.exchange(n)),
        warp_redux_sync=lambda value, kind: {"max": max}[kind](HERE.warp.exchange(value)),
    )  # fmt: skip
    vars(cute).update(
        arch=arch, jit=unchanged, kernel=unchanged, Tensor=Memory, Pointer=Pointer,
        make_layout=unchanged, make_tensor=Pointer.tensor,
        make_rmem_tensor=lambda size, _: Memory(np.zeros(size, np.int64)),
        autovec_copy=lambda source, target: np.copyto(target.numbers, source.numbers),
    )  # fmt: skip
    vars(cutlass).update(
        cute=cute, Int32=int, Float32=float, Boolean=bool, Constexpr=object, max=max, min=min,
        const_expr=unchanged, range_constexpr=range, range=lambda *ends, unroll=None: range(*ends),
    )  # fmt: skip
    vars(dsl).update(SmemAllocator=Allocator)
    return {"cutlass": cutlass, "cutlass.cute": cute, "fa3.primitives.shared_memory": dsl}


def load(*names: str) -> list[ModuleType]:
    """Load modules, each with those before it, for a CTA on the CPU."""
    known = modules()
    for name in names:
        path = importlib.util.find_spec(name).origin
        known[name] = ModuleType(name)
        saved = {one: sys.modules.get(one) for one in known}
        sys.modules.update(known)
        try:
            with open(path) as file:
                exec(compile(file.read(), path, "exec"), vars(known[name]))
        finally:
            sys.modules.update({one: old for one, old in saved.items() if old is not None})
    return [known[name] for name in names]
