"""Right calls of all public functions, and what makes them wrong."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import NamedTuple

import torch
import varlen_problems
from kvcache_problems import CacheProblem, make_call
from problems import make_operands, make_problem
from varlen_problems import VarlenProblem, integers

import fa3
from fa3 import interface
from fa3.kernels.forward_launch import ForwardConfig
from fa3.problem import Window

PLAIN = CacheProblem((20, 30), 2, (2, 2), group=2, heads_kv=2, rotary=(32, True, "bfloat16"))
PAGED = CacheProblem((20, 30), 2, (2, 2), group=2, heads_kv=2, page_size=16)
INDEXED = CacheProblem((20, 30), 2, (2, 2), batch_idx=(2, 0), rows=3, leftpads=(3, 0))
RAGGED = CacheProblem((20, 30), 2, (2, 3), ragged=True)
UNCHANGED = CacheProblem((20, 30), 1, group=2, heads_kv=2)
PROBLEMS = {"cache": PLAIN, "paged": PAGED, "indexed": INDEXED, "ragged": RAGGED}
VARLEN = VarlenProblem((7, 0, 1, 13), (9, 5, 0, 6), heads_kv=2, group=2)
STATE = torch.tensor([3])
CACHES = "k_cache", "v_cache"
PACKED_OPERANDS = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"


def dense() -> dict:
    return dict(zip("qkv", make_operands(make_problem(2, 20, 30, 2, 2, 64)), strict=True))


def varlen() -> dict:
    return varlen_problems.make_call(VARLEN)


def pages() -> dict:
    """Packed queries, with keys in three pages of 16."""
    return {
        "q": torch.zeros(5, 4, 64).bfloat16(), "cu_seqlens_q": integers(0, 3, 5),
        "max_seqlen_q": 3, "max_seqlen_k": 20, "seqused_k": integers(3, 20),
        "cu_seqlens_k": None, "page_table": integers(0, 1, 2, 0).view(2, 2),
        **{name: torch.zeros(3, 16, 2, 64).bfloat16() for name in "kv"},
    }  # fmt: skip


def packed() -> dict:
    """Packed queries, and caches of which sequences use 4 and 7 tokens."""
    caches = torch.randn(2, 2, 8, 2, 64).bfloat16()
    return {
        "q": torch.randn(4, 2, 64).bfloat16(), "k_cache": caches[0], "v_cache": caches[1],
        "cache_seqlens": integers(4, 7), "cu_seqlens_q": integers(0, 2, 4), "max_seqlen_q": 2,
    }  # fmt: skip


def packed_new() -> dict:
    new = {name: torch.zeros(3, 2, 64).bfloat16() for name in "kv"}
    return packed() | new | {"cache_seqlens": integers(2, 5), "cu_seqlens_k_new": integers(0, 2, 3)}


def to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num().to(torch.float8_e4m3fn)


def in_fp8(call: dict, names: Iterable[str] = "qkv") -> dict:
    """Return the call with some tensors in FP8."""
    return call | {name: to_fp8(call[name]) for name in names}


def combine() -> dict:
    return {"out_partial": torch.zeros(3, 2, 5, 4, 64), "lse_partial": torch.zeros(3, 2, 5, 4)}


def metadata() -> dict:
    sizes = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 64, "headdim": 128}
    return sizes | {"num_heads_q": 8, "num_heads_kv": 8, "cache_seqlens": integers(30, 40)}


def packed_metadata() -> dict:
    """The metadata of `varlen`."""
    call = varlen()
    sizes = {"batch_size": 4, "max_seqlen_q": 13, "max_seqlen_k": 9, "headdim": 64}
    sizes |= {"num_heads_q": 4, "num_heads_kv": 2, "cache_seqlens": None}
    return sizes | {name: call[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}


def metadata_of_varlen(**changes) -> fa3.SchedulerMetadata:
    return fa3.get_scheduler_metadata(**packed_metadata() | changes)


def metadata_of_cache(**changes) -> fa3.SchedulerMetadata:
    sizes = {"max_seqlen_q": 2, "headdim": 64, "num_heads_q": 4, "num_heads_kv": 2}
    lengths = {"cache_seqlens": integers(20, 30), "max_seqlen_k_new": 2}
    return fa3.get_scheduler_metadata(**metadata() | sizes | lengths | changes)


def metadata_of_packed(**changes) -> fa3.SchedulerMetadata:
    lengths = {"cache_seqlens": integers(4, 7), "cu_seqlens_q": integers(0, 2, 4)}
    return metadata_of_cache(**lengths | {"num_heads_q": 2, "max_seqlen_k_new": 0} | changes)


def backward() -> dict:
    call = dense()
    out, lse = fa3.flash_attn_func(**call, return_lse=True)
    gradients = {f"d{name}": torch.zeros_like(tensor) for name, tensor in call.items()}
    return call | gradients | {"dout": out, "out": out, "softmax_lse": lse}


def gradients() -> dict:
    """A call of the backward pass by itself."""
    call = dense()
    out, lse = fa3.flash_attn_func(**call, return_lse=True)
    return call | {"d_out": out, "out": out, "lse": lse}


def shapes() -> dict:
    return {"q": (1, 70, 4, 64), "k": (1, 90, 2, 64), "v": (1, 90, 2, 64)}


PROBLEM = make_problem(1, 300, 300, 2, 2, 64, Window(right=0))

CALLS = {
    "dense": (fa3.flash_attn_func, dense),
    "varlen": (fa3.flash_attn_varlen_func, varlen),
    "pages": (fa3.flash_attn_varlen_func, pages),
    **{
        name: (fa3.flash_attn_with_kvcache, partial(make_call, problem))
        for name, problem in PROBLEMS.items()
    },
    "packed": (fa3.flash_attn_with_kvcache, packed),
    "packed_new": (fa3.flash_attn_with_kvcache, packed_new),
    "fp8": (fa3.flash_attn_func, lambda: in_fp8(dense())),
    "fp8_varlen": (fa3.flash_attn_varlen_func, lambda: in_fp8(varlen())),
    "fp8_cache": (
        fa3.flash_attn_with_kvcache,
        lambda: in_fp8(make_call(UNCHANGED), CACHES) | {"k_descale": torch.ones(2, 2)},
    ),
    "combine": (fa3.flash_attn_combine, combine),
    "metadata": (fa3.get_scheduler_metadata, metadata),
    "packed_metadata": (fa3.get_scheduler_metadata, packed_metadata),
    "dropout_mask": (
        fa3.dropout_mask,
        lambda: {
            "rng_state": STATE, "dropout_p": 0.5,
            **dict.fromkeys(("batch", "heads", "seqlen_q", "seqlen_k"), 1),
        },
    ),
    "qkv": (
        interface.flash_attn_qkvpacked_func,
        lambda: {"qkv": torch.zeros(2, 20, 8, 64).bfloat16(), "num_heads_q": 4},
    ),
    "forward": (interface._flash_attn_forward, dense),
    "backward": (interface._flash_attn_backward, backward),
    "gradients": (fa3.flash_attn_backward, gradients),
    "quantize": (fa3.quantize, dense),
    "quantize_packed": (
        fa3.quantize, lambda: {n: x for n, x in varlen().items() if n in PACKED_OPERANDS}
    ),
    "problem": (fa3.Problem.of, shapes),
    "plan": (fa3.plan_forward, lambda: {"problem": PROBLEM}),
}  # fmt: skip
"""Name -> function and its arguments."""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cpu = False


# ------------------------------------------------------------------------------------ changes


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts 8 bytes after an aligned address."""
    elements = 8 // tensor.itemsize
    memory = tensor.new_empty(tensor.numel() + elements)
    return memory[elements:].view(tensor.shape).copy_(tensor)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view into rows that are 4 columns longer."""
    return torch.nn.functional.pad(tensor, (0, 4))[..., : tensor.shape[-1]]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which the last two dimensions lie the other way round."""
    return tensor.mT.contiguous().mT


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first row, with a stride that does not matter to it."""
    return tensor[:1].as_strided((1, *tensor.shape[1:]), (3, *tensor.stride()[1:]))


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, which are not next to each other."""
    return tensor.repeat_interleave(2)[::2]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor whose memory was given back, as FSDP does."""
    memory = tensor.new_empty(64 + tensor.stride(0) * len(tensor))
    view = memory.as_strided(tensor.shape, tensor.stride(), 64)
    memory.untyped_storage().resize_(0)
    return view


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def in_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def all_on_meta(call: dict) -> dict:
    return {name: on_meta(x) for name, x in call.items() if isinstance(x, torch.Tensor)}


def rows(count: int, heads: int = 1, head_dim: int = 8) -> torch.Tensor:
    """Return many rows that are one in memory."""
    return torch.zeros(head_dim).bfloat16().expand(count, heads, head_dim)


def of_sizes(seqlen_q: int, seqlen_k: int, heads: int = 1) -> dict:
    """Return q, k and v of long sequences."""
    return {"q": rows(seqlen_q, heads)[None], **dict.fromkeys("kv", rows(seqlen_k, heads)[None])}


def of_totals(total_q: int, total_k: int, heads: int = 1) -> dict:
    """Return packed q, k and v with many rows, of which a sequence has one."""
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), integers(0, 1))
    lengths |= {"max_seqlen_q": 1, "max_seqlen_k": 1}
    return lengths | {"q": rows(total_q, heads), **dict.fromkeys("kv", rows(total_k, heads))}


def rotary(positions: int, columns: int) -> dict:
    table = torch.ones(positions, 64).bfloat16()[:, :columns]
    return {"rotary_cos": table, "rotary_sin": table}


def shared(pages: tuple[int, ...], seqlens: tuple[int, ...]) -> dict:
    """Return a page table of two sequences, and their lengths."""
    return {"page_table": integers(*pages).view(2, 2), "cache_seqlens": integers(*seqlens)}


def problem(**changes) -> dict:
    """Return the planner's problem with other fields, also of its spec."""
    fields = fa3.Problem.__dataclass_fields__
    of_spec = {name: changes.pop(name) for name in [*changes] if name not in fields}
    return {"problem": replace(PROBLEM, spec=replace(PROBLEM.spec, **of_spec), **changes)}


def config(**changes) -> dict:
    return {"config": replace(ForwardConfig(128, 64), **changes)}


class Nothing(fa3.Mask):
    """Hides nothing."""


# ------------------------------------------------------------------------------------ rows to cases


class Case(NamedTuple):
    """A call, what is changed in it, and what is raised.

    Fields:
        changes: arguments, or functions of the arguments' values.
    """

    call: str
    changes: dict
    error: type[Exception]
    message: str

    @property
    def pattern(self) -> str:
        """What the message matches from its beginning."""
        words, end, _ = self.message.partition("$")
        return ".*".join(map(re.escape, words.split("..."))) + ("$" if end else "")


def each(calls: str, arguments: str, error: type, words: str, *values: tuple) -> Iterator[tuple]:
    """Yield a row for each (value, what is said of it)."""
    for value, came in values:
        yield calls, arguments, value, error, words.format(came)


def cases(table: Iterable[tuple]) -> Iterator[Case]:
    """Yield the cases of a table's rows."""
    for calls, arguments, change, *rest in table:
        error, words = rest if len(rest) > 1 else (ValueError, *rest)
        names = [arguments] if isinstance(change, dict) else arguments.split()
        for call in calls.split():
            for name in names:
                changes = change if isinstance(change, dict) else {name: change}
                message = f"{name}{words}" if words.startswith("...") else f"{name} {words}"
                yield Case(call, changes, error, message)


def changed(call: dict, changes: dict) -> dict:
    """Return the call with other values, on the device of q if they are tensors."""
    values = {
        name: value(call.get(name)) if isinstance(value, FunctionType) else value
        for name, value in changes.items()
    }
    if isinstance(call.get("q"), torch.Tensor) and call["q"].is_cuda:
        values = {
            name: value.to(call["q"].device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
    return call | values
