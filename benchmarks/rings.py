"""Calls of ring-flash-attn over ranks, on kernels of FlashAttention-4 in CuTe DSL.

ring-flash-attn imports FlashAttention-2. A module in its place calls FlashAttention-4.
"""

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
OPTIONS = "softmax_scale", "causal", "window_size_left", "window_size_right"
RESULTS = "dq", "dk", "dv", "deterministic"
UNUSED = "dropout_p", "alibi_slopes", "return_softmax"


def with_arguments(call: Callable, names: Sequence[str]) -> Callable:
    """Return a function with arguments of these names, which ring-flash-attn looks up."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def function(**named: Any) -> Any:
        assert not any(named.pop(name, None) for name in UNUSED)
        for name in ("window_size_left", "window_size_right"):
            named[name] = None if named[name] < 0 else named[name]
        return call(**named)

    named: Any = function
    named.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return named


def load() -> types.ModuleType:
    """Import ring-flash-attn with kernels of FlashAttention-4."""
    # It reads this when it is imported: without it, processes cannot compile for each other.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    kernels = importlib.import_module("flash_attn.cute.interface")

    def forward(**named: Any) -> tuple:
        out, lse, *_ = kernels._flash_attn_fwd(return_lse=True, **named)
        return out, lse, None, None

    def backward(softmax_lse: torch.Tensor, **named: Any) -> None:
        kernels._flash_attn_bwd(lse=softmax_lse, **named)

    module = types.ModuleType("flash_attn.flash_attn_interface")
    for kind, lengths in (("", ()), ("varlen_", LENGTHS)):
        names = ("q", "k", "v", *lengths, *OPTIONS, *UNUSED)
        calls = {"forward": with_arguments(forward, names)}
        names = ("dout", "out", "softmax_lse", *names[:-1], *RESULTS)
        calls["backward"] = with_arguments(backward, names)
        vars(module).update({f"_flash_attn_{kind}{name}": call for name, call in calls.items()})
    sys.modules.setdefault(module.__name__, module)
    # It does not import with Transformers 5 otherwise.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    return importlib.import_module("ring_flash_attn")


def zigzag_call() -> Callable:
    """Return attention of one sequence, whose rows are dealt out as `zigzag` does."""
    attend = load().zigzag_ring_flash_attn_func
    return lambda q, k, v: attend(q, k, v, causal=True)


def llama3_call(cu_seqlens: Sequence[int], stride: int, device: torch.device) -> Callable:
    """Return attention of documents, whose rows are dealt out as `contiguous` does.
    Keys of so many heads are gathered at a time."""
    rings, where = load(), (dist.get_rank(), dist.get_world_size())
    ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    *lengths, keys = rings.llama3_flash_attn_prepare_cu_seqlens(ends, True, *where)
    attend = rings.llama3_flash_attn_varlen_func
    return lambda q, k, v: attend(q, k, v, *lengths, stride, keys, causal=True)
