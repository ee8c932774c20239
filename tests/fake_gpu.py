"""A GPU that only takes notes: what calls launch on it, without a GPU.

Inside of `noting_launches` tensors in the CPU's memory say that they are on a GPU, kernels are not
compiled, and a launch notes its kernel and its arguments. Everything else is fa3 as it is.
"""

import contextlib
import functools
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa3.calls.options import LATEST
from fa3.running import compiler, memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30
)

LOWEST_ADDRESS = 1 << 33
"""Integers from here on are addresses."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int32: "i32"}

SHORT = ("False", "0"), ("True", "1"), ("None", "_"), (", ", ",")
"""What stands for parts of a kernel's repr in a golden file."""

NEW, COPIED = "new", "copied"
"""Roles of tensors that fa3 allocates; the content of copied ones counts."""


class Owner(NamedTuple):
    """A tensor that arguments may point into, and what it is to the call."""

    role: str
    tensor: torch.Tensor


class Notes(TorchDispatchMode):
    """What the present call launches.

    Attributes:
        launches: kernels and what they were given.
        counters: how many were made.
        owners: the tensors that are known: the call's own, and what it allocates.
        names: of the call's own tensors, and of what it returns.
        kernels: the name of each kernel of all calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, str] = {}
        self.on_host: dict[int, torch.Tensor] = {}
        self.owners: list[Owner] = []
        self.begin({})

    def begin(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begin with a call on these tensors."""
        memory.BY_STREAM.clear()
        self.names = set(tensors)
        self.launches: list[tuple[object, tuple]] = []
        self.counters: list[int] = []
        self.numbers: dict[int, int] = {}
        # Tables that were copied for earlier calls are used again.
        copied = [one for one in self.owners if one.role == COPIED]
        self.owners = [Owner(*item) for item in tensors.items()] + copied

    def know(self, tensors: dict[str, torch.Tensor]) -> None:
        """Know more tensors of the call, before all others."""
        self.names |= tensors.keys()
        self.owners[:0] = (Owner(*item) for item in tensors.items())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Allocate on the CPU, and know all that is allocated."""
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
        made = function(*args, **kwargs)
        if isinstance(made, torch.Tensor) and not made.is_meta:
            if device == CPU and "full" in str(function):
                # The only one that fa3 allocates on the host. Others have the default device.
                self.keep_on_host(made)
            role = COPIED if "copy" in str(function) else NEW
            if self.owner(made.data_ptr()) is None:
                self.owners.append(Owner(role, made))
        return made

    def keep_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor say that it is on the CPU."""
        self.on_host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        real = torch._C.TensorBase.device.__get__(tensor)
        if real != CPU or tensor.untyped_storage().data_ptr() in self.on_host:
            return real
        return GPU

    def owner(self, address: int) -> Owner | None:
        """The tensor that begins at an address, else one whose memory has it."""
        inside = None
        for one in self.owners:
            if one.tensor.data_ptr() == address and address:
                return one
            memory = one.tensor.untyped_storage()
            if 0 <= address - memory.data_ptr() < memory.nbytes():
                inside = inside or one
        return inside

    def name_of(self, kernel: object) -> str:
        """A name of a kernel, which does not change when fields or modules are renamed."""
        text = re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", repr(kernel))
        text = re.sub(r"\b\w+=", "", text)
        for long, short in SHORT:
            text = text.replace(long, short)
        kind = kernel.entry_name.removeprefix("fa3_")
        return self.kernels.setdefault(text, f"{kind} {len(self.kernels) + 1}")

    def described(self, value: object) -> object:
        """An argument as a golden file has it."""
        if isinstance(value, torch.Tensor):
            role, owner = self.place(value.data_ptr())
            if role == COPIED:
                return f"{COPIED} {shape_of(value)} {zlib.crc32(value.numpy().tobytes()):08x}"
            is_known = role in self.names and shape_of(value) == shape_of(owner)
            return role if is_known else f"{role} {shape_of(value)}"
        if isinstance(value, tuple):
            return [self.described(one) for one in value]
        if type(value) is int and value >= LOWEST_ADDRESS:
            return f"&{self.place(value)[0]}"
        return float(f"{value:.6g}") if isinstance(value, float) else value

    def place(self, address: int) -> tuple[str, torch.Tensor | None]:
        """Whose memory an address is in and how far behind its begin; and the tensor."""
        owner = self.owner(address)
        if owner is None:
            return "empty", None
        role, tensor = owner
        if role == NEW:
            # What a call allocates for itself is told apart by numbers.
            role += f" {self.numbers.setdefault(id(tensor), len(self.numbers) + 1)}"
        ahead = address - tensor.data_ptr()
        return f"{role}{ahead:+}" if ahead else role, tensor

    def entry(self, results: dict[str, torch.Tensor]) -> dict:
        """What the golden file has of the call that was made, which returned these."""
        self.know(results)
        launches = []
        for kernel, given in self.launches:
            arguments = kernel.arguments_type(*given)._asdict()
            named = {
                name: self.described(value)
                for name, value in sorted(arguments.items())
                if value is not None
            }
            launches.append({"kernel": self.name_of(kernel), **named})
        returned = {role: shape_of(tensor) for role, tensor in results.items()}
        return {"launches": launches, "counters": self.counters, "returns": returned}


def shape_of(tensor: torch.Tensor) -> str:
    """Dtype and shape of a tensor, and its strides if it is not contiguous."""
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    strides = "" if tensor.is_contiguous() else f" by {list(tensor.stride())}"
    return f"{dtype}{list(tensor.shape)}{strides}".replace(", ", ",")


def takes(compiled: object, given: object) -> bool:
    """Whether a kernel takes an argument: None, a number, or tensors of its shape."""
    if isinstance(compiled, tuple) and isinstance(given, tuple):
        return len(compiled) == len(given) and all(map(takes, compiled, given))
    if not isinstance(given, torch.Tensor):
        return type(compiled) is type(given) or isinstance(given, int | float)
    sizes = zip(getattr(compiled, "shape", [0]), given.shape, strict=True)
    return all(one == other for one, other in sizes if isinstance(one, int))


class Kernels(dict):
    """Stands for `compiler.LOADED`: loads whatever kernel is asked for."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def __missing__(self, kernel: object) -> Callable:
        *compiled, _ = kernel.arguments()

        def launch(*given: object) -> None:
            assert takes(tuple(compiled), given), (kernel, given)
            self.notes.launches.append((kernel, given))

        return launch


class Here(contextlib.nullcontext):
    """Stands for a ThreadPoolExecutor: works in the thread that asks."""

    def __init__(self, *_: object) -> None:
        super().__init__(self)

    def submit(self, work: Callable) -> Future:
        future: Future = Future()
        future.set_result(work())
        return future


def forget_calls() -> None:
    """Empty fa3's caches, which know kernels and devices of other calls."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fa3":
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    LATEST.clear()


@contextlib.contextmanager
def noting_launches() -> Iterator[Notes]:
    """Let tensors be on a GPU that takes notes."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    cuda = {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "device": contextlib.nullcontext,
        "get_device_properties": lambda device: PROPERTIES,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "stream": contextlib.nullcontext,
        "Stream": lambda device: stream,
    }
    new = memory.StreamMemory.new

    def new_noted(self, count: int, dtype: str | None = None) -> torch.Tensor:
        made = new(self, count, dtype)
        if dtype is None:
            notes.counters.append(count)
            notes.owners.insert(0, Owner("counters", made))
        return made

    forget_calls()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(memory, "ThreadPoolExecutor", Here)
        patch.setattr(memory, "BY_STREAM", {})
        patch.setattr(memory, "RESERVES", {})
        notes = Notes()
        patch.setattr(compiler, "LOADED", Kernels(notes))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr(memory.StreamMemory, "new", new_noted)
        of_tensor = {
            "device": notes.device_of,
            "is_cuda": lambda tensor: notes.device_of(tensor) == GPU,
            "is_cpu": lambda tensor: notes.device_of(tensor) == CPU,
        }
        for name, get in of_tensor.items():
            patch.setattr(torch.Tensor, name, property(get), raising=False)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        with notes:
            yield notes
    forget_calls()
