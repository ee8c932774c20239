"""Who is measured: ours and the peers that can be imported, each at its best.

A provider says whether it `supports` a cell and `prepare`s its calls. Where a peer has several
ways to run, prepare gives them all by name and the harness keeps the fastest. Out of the box
every call takes and gives (batch, seqlen, heads, head_dim).
"""

import functools
import importlib
import importlib.metadata
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch

from benchmarks.shapes import Cell, window_size

Call = Callable[[], torch.Tensor]


class Tensors(NamedTuple):
    """One set of inputs, each (batch, seqlen, heads, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Provider(Protocol):
    """Something that computes attention.

    Fields:
        name: how results call it.
        version: of the package behind it.
        is_peer: whether ours is compared against it.
    """

    name: str
    version: str
    is_peer: bool

    def supports(self, cell: Cell) -> str | None:
        """The reason why a cell cannot run; None if it can."""

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        """The calls that compute a cell, by the name of what sets them apart."""


class Ours:
    """This package through its public function, with options of it."""

    name = "fa3"
    is_peer = False

    def __init__(self, name: str = "fa3", **options: object) -> None:
        self.name, self.options = name, options
        package = importlib.import_module("fa3")
        self.attend = package.flash_attn_func
        self.version = package.__version__

    def supports(self, cell: Cell) -> str | None:
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        call = functools.partial(
            self.attend, *tensors, causal=cell.causal, window_size=window_size(cell),
            softcap=cell.softcap, **self.options,
        )  # fmt: skip
        return {importlib.import_module("benchmarks.problems").plan_name(cell): call}


class Variant:
    """Ours by another way: a function(cell, q, k, v) that returns a call."""

    is_peer = False

    def __init__(self, name: str, target: str) -> None:
        module, _, function = target.partition(":")
        self.name = name
        self.version = target
        self.make = getattr(importlib.import_module(module), function)

    def supports(self, cell: Cell) -> str | None:
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        return {"": self.make(cell, *tensors)}


class Fa3Cpp:
    """FlashAttention-3 in C++ (package fa3-fwd): splits chosen by itself, or none."""

    name = "fa3-cpp"
    is_peer = True

    def __init__(self) -> None:
        self.attend = importlib.import_module("fa3_fwd_interface").flash_attn_func
        self.version = importlib.metadata.version("fa3_fwd")

    def supports(self, cell: Cell) -> str | None:
        if cell.dtype != "bfloat16":
            return f"the package is built without {cell.dtype}"
        if cell.window_left >= 0:
            return "the package is built without local attention"
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        attend = functools.partial(self.attend, *tensors, causal=cell.causal, softcap=cell.softcap)
        return {
            "auto splits": functools.partial(attend, num_splits=0),
            "1 split": functools.partial(attend, num_splits=1),
        }


class Fa4Cute:
    """FlashAttention-4 in CuTe DSL (package flash-attn-4), with options of it."""

    name = "fa4-cute"
    is_peer = True

    def __init__(self, name: str = "fa4-cute", **options: object) -> None:
        self.name, self.options = name, options
        # It reads this when it is imported: without it, processes cannot compile for each other.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        self.attend = importlib.import_module("flash_attn.cute").flash_attn_func
        self.version = importlib.metadata.version("flash_attn_4")

    def supports(self, cell: Cell) -> str | None:
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        window = (cell.window_left, 0) if cell.window_left >= 0 else (None, None)

        def call() -> torch.Tensor:
            out, _ = self.attend(
                *tensors,
                causal=cell.causal,
                window_size=window,
                softcap=cell.softcap,
                **self.options,
            )
            return out

        return {"": call}


class Cudnn:
    """cuDNN through PyTorch's scaled_dot_product_attention.

    PyTorch aligns is_causal to the top left, so a causal mask of other than square shape goes in
    as a bias, as a user would have to do.
    """

    name = "cudnn"
    is_peer = True

    def __init__(self) -> None:
        if not torch.backends.cudnn.is_available():
            raise ImportError("PyTorch has no cuDNN")
        self.version = str(torch.backends.cudnn.version())

    def supports(self, cell: Cell) -> str | None:
        if cell.window_left >= 0:
            return "PyTorch has no sliding window for it"
        if cell.softcap:
            return "PyTorch has no softcap for it"
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        # The only user of scaled_dot_product_attention here: settle for the process what
        # torch.nn.attention.sdpa_kernel would set and reset at every call.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
        square = cell.seqlen_q == cell.seqlen_k
        bias = None
        if cell.causal and not square and cell.seqlen_q > 1:
            bias = torch.full(
                (cell.seqlen_q, cell.seqlen_k),
                -math.inf,
                dtype=tensors.q.dtype,
                device=tensors.q.device,
            ).triu_(cell.seqlen_k - cell.seqlen_q + 1)
        attend = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            *(tensor.transpose(1, 2) for tensor in tensors),
            attn_mask=bias,
            is_causal=cell.causal and square,
            enable_gqa=cell.heads_q != cell.heads_kv,
        )
        return {"": lambda: attend().transpose(1, 2)}


class TileLang:
    """A tuned forward kernel written in TileLang, see `benchmarks.tilelang_forward`."""

    name = "tilelang"
    is_peer = True

    def __init__(self) -> None:
        self.kernels = importlib.import_module("benchmarks.tilelang_forward")
        self.version = importlib.metadata.version("tilelang")

    def supports(self, cell: Cell) -> str | None:
        return self.kernels.unsupported(cell)

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        return {
            config.name: functools.partial(self.kernels.build(cell, config), *tensors)
            for config in self.kernels.configs(cell)
        }


PROVIDERS: dict[str, Callable[[], Provider]] = {
    kind.name: kind for kind in (Ours, Fa3Cpp, Fa4Cute, Cudnn, TileLang)
}

COMPILED = (Fa3Cpp.name, Cudnn.name)
"""Peers whose kernels come compiled."""


def find(
    names: Iterable[str], kinds: Mapping[str, Callable[[], Provider]] = PROVIDERS
) -> tuple[list[Provider], dict[str, str]]:
    """Import providers of some kinds by name.

    Returns:
        Those that could be imported, and for each other one the reason.
    """
    found, missing = [], {}
    for name in names:
        try:
            found.append(kinds[name]())
        except (ImportError, OSError) as error:
            missing[name] = str(error)
    return found, missing
