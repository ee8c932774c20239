"""Calls of every kind on a GPU that takes notes: a list that is the same every time."""

import dataclasses
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from fake_gpu import Notes
from problems import make_problem
from varlen_problems import ends_of, integers

import fa3
from docs.examples.prefix_lm import PrefixLM
from docs.examples.relative_bias import RelativeBias
from fa3.problem import Window
from fa3.running import memory
from fa3.schedules import SCHEDULES

HEAD_DIMS = [(64, 64), (128, 128), (128, 128), (192, 128), (256, 256), (72, 72)]
WINDOWS = [(-1, -1), (100, 0), (0, 0), (300, 50), (-1, 40), (128, -1)]

MOST_COPIED = 1 << 20
"""Numbers of a gradient that a call may copy."""


class Call(NamedTuple):
    """A call; it wants the gradients of some of its arguments."""

    function: Callable
    arguments: dict
    differentiated: tuple[str, ...] = ()


class Draw(random.Random):
    """Draws calls; `notes` knows which tensors are on the host."""

    notes: Notes

    def pick(self, *choices):
        return choices[self.randrange(len(choices))]

    def maybe(self, likelihood: float = 0.25) -> bool:
        return self.random() < likelihood

    def on_host(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The same numbers in a tensor that is on the host."""
        return None if tensor is None else self.notes.keep_on_host(tensor.clone())

    def tensor(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A contiguous tensor, or one half of another."""
        if self.maybe(0.1):
            return torch.empty(*shape[:-1], 2, shape[-1], dtype=dtype)[..., 1, :]
        return torch.empty(shape, dtype=dtype)


class Heads(NamedTuple):
    """Heads and columns of a call."""

    q: int
    kv: int
    dim: int
    dim_v: int
    dtype: torch.dtype

    @classmethod
    def drawn(cls, draw: Draw) -> "Heads":
        kv = draw.pick(1, 2, 8)
        dims, dtype = draw.choice(HEAD_DIMS), draw.pick(*[torch.bfloat16] * 7, torch.float16)
        return cls(kv * draw.pick(1, 1, 4, 8), kv, *dims, dtype)

    def operands(self, draw: Draw, queries: tuple, keys: tuple) -> dict[str, torch.Tensor]:
        """q, k and v with these sizes before their heads."""
        return {
            "q": draw.tensor(*queries, self.q, self.dim, dtype=self.dtype),
            "k": draw.tensor(*keys, self.kv, self.dim, dtype=self.dtype),
            "v": draw.tensor(*keys, self.kv, self.dim_v, dtype=self.dtype),
        }


def scores(draw: Draw, heads: Heads, batch: int) -> dict:
    """Options that change scores or hide keys."""
    options: dict = {"causal": draw.maybe(0.5)}
    if draw.maybe():
        options["window_size"] = draw.choice(WINDOWS)
    if draw.maybe(0.15):
        options["softcap"] = 15.0
    if draw.maybe(0.15):
        shape = draw.pick((heads.q,), (batch, heads.q))
        options["alibi_slopes"] = torch.empty(shape, dtype=torch.float32)
    if draw.maybe(0.15):
        options["sinks"] = torch.empty(heads.q, dtype=draw.pick(torch.float32, heads.dtype))
    if draw.maybe():
        options["softmax_scale"] = 0.25
    return options


def outputs(draw: Draw, heads: Heads, queries: tuple) -> dict:
    """Options about what a call returns, and where."""
    options: dict = {"return_lse": True} if draw.maybe() else {}
    if draw.maybe(0.2):
        options["out"] = draw.tensor(*queries, heads.q, heads.dim_v, dtype=heads.dtype)
    return options


def user_functions(draw: Draw, heads: Heads, batch: int) -> dict:
    """A score or a mask of the user's."""
    if draw.maybe(0.5):
        return {"mask": PrefixLM(integers(*[50] * batch))}
    return {"score": RelativeBias(torch.empty(heads.q, 33), 16)}


def dropout(draw: Draw) -> dict:
    rng_state = {"rng_state": torch.tensor([3])} if draw.maybe(0.5) else {}
    return {"dropout_p": draw.pick(0.1, 0.5)} | rng_state


def dense_sizes(draw: Draw) -> tuple[int, int, int]:
    """Sequences, queries and keys."""
    queries = draw.pick(1, 7, 64, 300, 1000, 4096)
    return draw.pick(1, 2, 4), queries, draw.pick(queries, 128, 1000, 8192)


def backwards(tiles: list) -> list:
    """A schedule of the user's."""
    return tiles[::-1]


def planned(draw: Draw, heads: Heads, sizes: tuple[int, int, int]) -> dict:
    """A plan of the user's, and what it is for."""
    batch, queries, keys = sizes
    window = Window(right=draw.pick(-1, 0)).tighten(queries, keys)
    problem = make_problem(
        batch, queries, keys, heads.kv, heads.q // heads.kv, heads.dim, window,
        str(heads.dtype).removeprefix("torch."), heads.dim_v,
    )  # fmt: skip
    plan = fa3.plan_forward(problem, schedule=draw.pick(None, "static"))
    return {"plan": plan, "causal": window.right == 0}


def dense(draw: Draw) -> Call:
    heads, (batch, queries, keys) = Heads.drawn(draw), dense_sizes(draw)
    arguments = heads.operands(draw, (batch, queries), (batch, keys))
    arguments |= scores(draw, heads, batch) | outputs(draw, heads, (batch, queries))
    kind = draw.pick("plain", "plain", "schedule", "plan", "margin", "pack", "function", "dropout")
    if kind == "schedule":
        arguments["schedule"] = draw.choice([*sorted(SCHEDULES), backwards])
    elif kind == "plan":
        arguments = heads.operands(draw, (batch, queries), (batch, keys))
        arguments |= planned(draw, heads, (batch, queries, keys))
    elif kind == "margin":
        arguments["sm_margin"] = draw.pick(8, 32)
    elif kind == "pack":
        arguments["pack_gqa"] = draw.maybe(0.5)
    elif kind == "function":
        arguments |= user_functions(draw, heads, batch)
    elif kind == "dropout":
        arguments |= dropout(draw)
    return Call(fa3.flash_attn_func, arguments)


def differentiated(draw: Draw, arguments: dict) -> tuple[str, ...]:
    """The tensors of a call whose gradients are wanted."""
    names = ("q", "k", "v") if draw.maybe(0.8) else ("k",)
    return (*names, "sinks") if "sinks" in arguments and draw.maybe(0.5) else names


def dense_backward(draw: Draw) -> Call:
    heads, (batch, queries, keys) = Heads.drawn(draw), dense_sizes(draw)
    arguments = heads.operands(draw, (batch, queries), (batch, keys))
    arguments |= scores(draw, heads, batch) | {"deterministic": draw.maybe()}
    arguments["return_lse"] = draw.maybe()
    if draw.maybe():
        arguments |= dropout(draw)
    return Call(fa3.flash_attn_func, arguments, differentiated(draw, arguments))


def packed_lengths(draw: Draw) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence."""
    batch = draw.pick(1, 3, 8, 40)
    keys = [draw.pick(0, 1, 50, 128, 700, 3000) for _ in range(batch)]
    kind = draw.pick("same", "decode", "short", "chunks", "tiny", *["chunk of a long prompt"] * 2)
    if kind == "tiny":
        keys = [draw.randint(1, 64) for _ in range(400)]
    elif kind == "chunk of a long prompt":
        keys = [32768, 1000][: draw.pick(1, 2)]
    queries = {
        "same": keys,
        "tiny": keys,
        "decode": [1] * batch,
        "short": [draw.pick(0, 1, 4, 8) for _ in keys],
        "chunks": [min(n, draw.pick(1, 64, 512)) for n in keys],
        "chunk of a long prompt": [512] * len(keys),
    }[kind]
    return queries, keys


def packed_arguments(draw: Draw) -> tuple[Heads, dict, bool]:
    """What packed calls with and without gradients take; and whether the host sees lengths."""
    heads, (queries, keys) = Heads.drawn(draw), packed_lengths(draw)
    arguments = heads.operands(draw, (sum(queries),), (sum(keys),))
    arguments |= {
        "cu_seqlens_q": ends_of(queries),
        "cu_seqlens_k": ends_of(keys),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
        "num_splits": draw.pick(0, 1),
    }
    if draw.maybe(0.2):
        arguments["seqused_q"] = integers(*(n // 2 for n in queries))
    if draw.maybe(0.2):
        arguments["seqused_k"] = integers(*(n // 2 for n in keys))
    arguments |= scores(draw, heads, len(keys))
    return heads, arguments, draw.maybe(0.5)


def packed(draw: Draw) -> Call:
    heads, arguments, is_on_host = packed_arguments(draw)
    arguments |= outputs(draw, heads, (len(arguments["q"]),))
    kind = draw.pick("plain", "plain", "metadata", "margin", "function", "dropout")
    batch = len(arguments["cu_seqlens_q"]) - 1
    if kind == "metadata":
        arguments["scheduler_metadata"] = packed_metadata(draw, heads, arguments, is_on_host)
    elif kind == "margin":
        arguments["sm_margin"] = 16
    elif kind == "function":
        arguments |= user_functions(draw, heads, batch)
    elif kind == "dropout":
        arguments |= dropout(draw)
    return Call(fa3.flash_attn_varlen_func, arguments)


def packed_metadata(draw: Draw, heads: Heads, call: dict, is_on_host: bool) -> object:
    """Metadata of a packed call, made from its lengths on the host or on the GPU."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    lengths = {
        name: draw.on_host(call.get(name)) if is_on_host else call.get(name) for name in names
    }
    return fa3.get_scheduler_metadata(
        len(call["cu_seqlens_q"]) - 1, call["max_seqlen_q"], call["max_seqlen_k"], heads.q,
        heads.kv, heads.dim, lengths.pop("seqused_k"), heads.dtype, heads.dim_v,
        causal=call["causal"], window_size=call.get("window_size", (-1, -1)),
        has_softcap="softcap" in call, num_splits=call["num_splits"], **lengths,
    )  # fmt: skip


def packed_backward(draw: Draw) -> Call:
    _, arguments, _ = packed_arguments(draw)
    arguments |= {"deterministic": draw.maybe(), "return_lse": draw.maybe()}
    if draw.maybe():
        arguments |= dropout(draw)
    return Call(fa3.flash_attn_varlen_func, arguments, differentiated(draw, arguments))


def cache_arguments(draw: Draw, heads: Heads, lengths: list[int], page_size: int | None) -> dict:
    """A cache with room for more than these lengths, and its page table if it has pages."""
    batch, capacity = len(lengths), max(lengths) + draw.pick(0, 1000, 60000) + 600
    rows, arguments = (batch, capacity), {}
    if page_size is not None:
        pages = -(-capacity // page_size)
        rows = (batch * pages, page_size)
        arguments["page_table"] = torch.empty(batch, pages, dtype=torch.int32)
    dims = {"k_cache": heads.dim, "v_cache": heads.dim_v}
    return arguments | {
        name: draw.tensor(*rows, heads.kv, dim, dtype=heads.dtype) for name, dim in dims.items()
    }


def appended(draw: Draw, heads: Heads, new: tuple) -> dict:
    """New tokens, and perhaps a rotary embedding."""
    arguments = {
        "k": draw.tensor(*new, heads.kv, heads.dim, dtype=heads.dtype),
        "v": draw.tensor(*new, heads.kv, heads.dim_v, dtype=heads.dtype),
    }
    if draw.maybe(0.6):
        shape, dtype = (70000, draw.pick(16, 32)), draw.pick(heads.dtype, torch.float32)
        for name in ("rotary_cos", "rotary_sin"):
            arguments[name] = torch.empty(shape, dtype=dtype)
        arguments["rotary_interleaved"] = draw.maybe(0.5)
    return arguments


def splits(draw: Draw) -> dict:
    """Options about how keys are cut."""
    return draw.pick(
        {}, {}, {}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True},
        {"sm_margin": 16},
    )  # fmt: skip


def cache_metadata(draw: Draw, heads: Heads, call: dict, queries: int) -> object:
    """Metadata of a call on a cache, made from its lengths on the host."""
    return fa3.get_scheduler_metadata(
        len(call["cache_seqlens"]), queries, 70000, heads.q, heads.kv, heads.dim,
        draw.on_host(call["cache_seqlens"]), heads.dtype, heads.dim_v,
        draw.on_host(call.get("cu_seqlens_q")),
        page_size=call["k_cache"].shape[1] if "page_table" in call else None,
        causal=call["causal"], window_size=call.get("window_size", (-1, -1)),
        has_softcap="softcap" in call,
    )  # fmt: skip


def decode(draw: Draw) -> Call:
    """Equal numbers of queries on a cache, with or without an append."""
    heads, batch, queries = Heads.drawn(draw), draw.pick(1, 3, 64), draw.pick(1, 1, 4, 200)
    lengths = [draw.randint(queries, 8000) for _ in range(batch)]
    arguments = {"q": draw.tensor(batch, queries, heads.q, heads.dim, dtype=heads.dtype)}
    arguments |= cache_arguments(draw, heads, lengths, draw.pick(None, 1, 16, 64, 256))
    arguments |= scores(draw, heads, batch) | outputs(draw, heads, (batch, queries)) | splits(draw)
    arguments["cache_seqlens"] = integers(*lengths)
    kind = draw.pick("device", "device", "host", "number", "metadata")
    if kind == "host":
        arguments["cache_seqlens"] = draw.on_host(arguments["cache_seqlens"])
    elif kind == "number":
        arguments["cache_seqlens"] = lengths[0]
    if "page_table" not in arguments and draw.maybe(0.2):
        arguments["cache_batch_idx"] = integers(*range(batch))
    if draw.maybe(0.15):
        arguments["cache_leftpad"] = integers(*[1] * batch)
    if draw.maybe(0.4):
        new = (batch, queries)
        if draw.maybe(0.2):
            new = (batch * queries,)
            arguments["cu_seqlens_k_new"] = ends_of([queries] * batch)
        arguments |= appended(draw, heads, new)
    elif kind == "metadata" and not {"num_splits", "sm_margin"} & arguments.keys():
        arguments["scheduler_metadata"] = cache_metadata(draw, heads, arguments, queries)
    return Call(fa3.flash_attn_with_kvcache, arguments)


def mixed_lengths(draw: Draw) -> tuple[list[int], list[int]]:
    """Queries and keys of sequences that decode or are at a part of their prompt."""
    batch = draw.pick(1, 4, 64)
    queries = [draw.pick(1, 1, 1, 5, 512) for _ in range(batch)]
    return queries, [n + draw.randint(0, 5000) for n in queries]


def mixed(draw: Draw) -> Call:
    """Packed queries on a cache."""
    heads, (queries, lengths) = Heads.drawn(draw), mixed_lengths(draw)
    total, batch, ends = sum(queries), len(queries), ends_of(queries)
    arguments = {
        "q": draw.tensor(total, heads.q, heads.dim, dtype=heads.dtype),
        "cu_seqlens_q": ends,
        "max_seqlen_q": max(queries),
        "cache_seqlens": integers(*lengths),
    }
    arguments |= cache_arguments(draw, heads, lengths, draw.pick(None, 16, 64, 128))
    arguments |= scores(draw, heads, batch) | outputs(draw, heads, (total,)) | splits(draw)
    if draw.maybe(0.3):
        arguments |= appended(draw, heads, (total,)) | {"cu_seqlens_k_new": ends}
        if "rotary_cos" in arguments and draw.maybe(0.5):
            arguments["rotary_seqlens"] = integers(*lengths)
    elif not {"num_splits", "sm_margin"} & arguments.keys() and draw.maybe(0.5):
        arguments["scheduler_metadata"] = cache_metadata(draw, heads, arguments, max(queries))
    return Call(fa3.flash_attn_with_kvcache, arguments)


def paged(draw: Draw) -> Call:
    """Packed queries on pages, as vLLM calls them."""
    heads, (queries, lengths) = Heads.drawn(draw), mixed_lengths(draw)
    cache = cache_arguments(draw, heads, lengths, draw.pick(1, 16, 64))
    arguments = {
        "q": draw.tensor(sum(queries), heads.q, heads.dim, dtype=heads.dtype),
        "k": cache["k_cache"],
        "v": cache["v_cache"],
        "page_table": cache["page_table"],
        "cu_seqlens_q": ends_of(queries),
        "cu_seqlens_k": None,
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(lengths),
        "seqused_k": integers(*lengths),
    }
    arguments |= scores(draw, heads, len(queries)) | outputs(draw, heads, (sum(queries),))
    kind = draw.pick("plain", "plain", "used", "splits", "margin", "function")
    if kind == "used":
        arguments["seqused_q"] = integers(*queries)
    elif kind == "splits":
        arguments["num_splits"] = draw.pick(1, 4)
    elif kind == "margin":
        arguments["sm_margin"] = 8
    elif kind == "function":
        arguments |= user_functions(draw, heads, len(queries))
    return Call(fa3.flash_attn_varlen_func, arguments)


def combine(draw: Draw) -> Call:
    """A merge of parts."""
    sizes = draw.pick(1, 2, 9), draw.pick(1, 3), draw.pick(1, 100), draw.pick(1, 8)
    head_dim = draw.pick(64, 128, 256)
    arguments = {
        "out_partial": torch.empty(*sizes, head_dim),
        "lse_partial": torch.empty(sizes),
        "out_dtype": draw.pick(None, torch.float32, torch.bfloat16),
    }
    return Call(fa3.flash_attn_combine, arguments)


def empty(draw: Draw) -> Call:
    """A call without queries, keys or sequences."""
    heads, (batch, queries, keys) = Heads.drawn(draw), draw.pick((0, 5, 5), (2, 0, 5), (2, 5, 0))
    options = scores(draw, heads, batch) | {"return_lse": True}
    if draw.maybe(0.4):
        arguments = heads.operands(draw, (batch, queries), (batch, keys)) | options
        wanted = differentiated(draw, arguments) if draw.maybe(0.5) else ()
        return Call(fa3.flash_attn_func, arguments, wanted)
    if draw.maybe(0.5):
        arguments = heads.operands(draw, (batch * queries,), (batch * keys,)) | options
        arguments |= {
            "cu_seqlens_q": ends_of([queries] * batch),
            "cu_seqlens_k": ends_of([keys] * batch),
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
        }
        wanted = differentiated(draw, arguments) if draw.maybe(0.5) else ()
        return Call(fa3.flash_attn_varlen_func, arguments, wanted)
    found = heads.operands(draw, (batch, queries), (batch, keys)) | options
    found |= {"k_cache": found.pop("k"), "v_cache": found.pop("v")}
    return Call(fa3.flash_attn_with_kvcache, found | {"cache_seqlens": integers(*[keys] * batch)})


KINDS: dict[Callable[[Draw], Call], int] = {
    dense: 60,
    dense_backward: 40,
    packed: 60,
    packed_backward: 30,
    decode: 50,
    mixed: 30,
    paged: 20,
    combine: 5,
    empty: 15,
}
"""Kinds of calls, and how many of each."""


def tensors_of(arguments: dict) -> dict[str, torch.Tensor]:
    """The tensors of a call by name, with those of the user's score and mask."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, fa3.Score | fa3.Mask):
            fields = dataclasses.fields(value)
            found |= tensors_of({f"{name}.{one.name}": getattr(value, one.name) for one in fields})
    return found


def make(call: Call, notes: Notes, draw: Draw) -> dict:
    """Make a call; return what the golden file has of it."""
    arguments, wanted = call.arguments, call.differentiated
    for name in wanted:
        arguments[name] = arguments[name].detach().requires_grad_()
    notes.begin(tensors_of(arguments))
    returned = call.function(**arguments)
    returned = returned if isinstance(returned, tuple) else (returned,)
    results = dict(zip(("result", "lse"), returned, strict=False))
    if wanted:
        # Not always of all that is returned; now and then laid out as `sum` lays them out.
        count = draw.randint(1, len(returned))
        given = [
            one.new_empty(()).expand_as(one)
            if one.numel() < MOST_COPIED and draw.maybe(0.2)
            else torch.empty_like(one)
            for one in returned[:count]
        ]
        notes.know({f"d_{name}": one for name, one in zip(results, given, strict=False)})
        inputs = [arguments[name] for name in wanted]
        found = torch.autograd.grad(returned[:count], inputs, given)
        results |= {f"d{name}": one for name, one in zip(wanted, found, strict=True)}
    assert all(one.free for one in memory.BY_STREAM.values()), "a loan was not taken back"
    return notes.entry(results)


def entry_of(kind: Callable[[Draw], Call], notes: Notes) -> dict:
    """Make all calls of a kind; return what the golden file has of them."""
    draw = Draw(kind.__name__)
    draw.notes = notes
    notes.kernels.clear()
    calls = {}
    for number in range(1, KINDS[kind] + 1):
        call = kind(draw)
        calls[f"call {number}"] = make(call, notes, draw)
    return {name: text for text, name in notes.kernels.items()} | calls
