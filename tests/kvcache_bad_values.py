"""What lies in the integer tensors of a call and does not fit, and what is said of it."""

import re
from dataclasses import replace

import torch
from kvcache_problems import CacheProblem

PLAIN = CacheProblem((20, 30), 2, (2, 2), group=2, heads_kv=2, rotary=(32, True, "bfloat16"))
PAGED = CacheProblem((20, 30), 2, (2, 2), group=2, heads_kv=2, page_size=16)
INDEXED = CacheProblem((20, 30), 2, (2, 2), batch_idx=(2, 0), rows=3, leftpads=(3, 0))
RAGGED = CacheProblem((20, 30), 2, (2, 3), ragged=True)


def integers(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_VALUES = [
    (PLAIN, "cache_seqlens", integers(20, 40), ["from 0 to 39", "40", "sequence 1"]),
    (PLAIN, "cache_seqlens", integers(-1, 3), ["from 0 to 39", "-1", "sequence 0"]),
    (PLAIN, "cache_seqlens", integers(20, 38), ["room for k", "sequence 1", "38", "2", "39"]),
    (PLAIN, "cache_seqlens", 38, ["room for k", "38"]),
    (PLAIN, "cache_seqlens", 40, ["from 0 to 39", "40"]),
    (PAGED, "page_table", lambda x: x.clone().fill_(-1), ["pages from 0", "-1", "(0, 0)"]),
    (PAGED, "page_table", lambda x: x + 100, ["pages from 0", "(0, 0)"]),
    (INDEXED, "cache_batch_idx", integers(0, 3), ["from 0 to 2", "3", "sequence 1"]),
    (INDEXED, "cache_batch_idx", integers(-1, 0), ["from 0 to 2", "-1", "sequence 0"]),
    (INDEXED, "cache_batch_idx", integers(1, 1), ["repeat", "got 1 2 times"]),
    (INDEXED, "cache_leftpad", integers(21, 0), ["from 0", "20", "21", "sequence 0"]),
    (INDEXED, "cache_leftpad", integers(0, -1), ["from 0", "-1", "sequence 1"]),
    (RAGGED, "cu_seqlens_k_new", integers(0, 2, 4), ["from 0 to k's 5", "[0, 2, 4]"]),
    (RAGGED, "cu_seqlens_k_new", integers(1, 2, 5), ["from 0 to k's 5", "[1, 2, 5]"]),
    (RAGGED, "cu_seqlens_k_new", integers(0, 6, 5), ["from 0 to k's 5", "[0, 6, 5]"]),
    (RAGGED, "cache_seqlens", integers(20, 38), ["room for k", "sequence 1", "gets 3"]),
]

BAD_VALUES_OF_TENSORS = [case for case in BAD_VALUES if not isinstance(case[2], int)]
"""Those that can lie on a GPU."""

FAR_VALUES = [
    (replace(INDEXED, page_size=16), "cache_leftpad", integers(-7, 2**31 - 1)),
    (replace(INDEXED, page_size=16), "cache_batch_idx", integers(-(2**31), 2**31 - 1)),
    (replace(PAGED, page_size=1), "page_table", lambda x: x - 2**30),
    (PLAIN, "cache_seqlens", integers(-(2**31), 2**31 - 1)),
    (RAGGED, "cu_seqlens_k_new", integers(2 - 2**31, 1, 5)),
]
"""Those that lead far away: (problem, argument, change)."""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cpu = False


def changed(call: dict, argument: str, change) -> dict:
    """Return the call with another value of an argument, on the device of q if it is a tensor."""
    value = change(call.get(argument)) if callable(change) else change
    if isinstance(value, torch.Tensor):
        value = value.to(call["q"].device)
    return call | {argument: value}


def naming(argument: str, fragments: list[str]) -> str:
    """Build a pattern for messages that begin with the argument and contain the fragments."""
    return f"^{argument} " + "".join(f"(?=.*{re.escape(fragment)})" for fragment in fragments)
