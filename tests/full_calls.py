"""Calls on CPU tensors that have all of their tensors, some of which must be refused."""

import torch
from kvcache_problems import CacheProblem, make_call
from problems import make_operands, make_problem
from score_problems import Near, Times

import fa3


def attention() -> dict:
    """Return the tensors of a call that has all of them."""
    q, k, v = make_operands(make_problem(1, 20, 20, 2))
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.empty_like(q),
        "alibi_slopes": torch.ones(2),
        "sinks": torch.ones(2),
        "score.of_head": torch.ones(2),
        "mask.reach": torch.full((2,), 20).int(),
    }


def attend(tensors: dict):
    tensors = dict(tensors)
    score, mask = Times(tensors.pop("score.of_head")), Near(tensors.pop("mask.reach"))
    return fa3.flash_attn_func(**tensors, score=score, mask=mask)


def packed() -> dict:
    """Return the tensors of a call on packed sequences that has all of them."""
    tensors = attention()
    tensors |= {name: tensors[name][0].clone() for name in ("q", "k", "v", "out")}
    ends, used = (torch.tensor(counts, dtype=torch.int32) for counts in ([0, 8, 20], [8, 12]))
    lengths = {name: ends.clone() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return tensors | lengths | {name: used.clone() for name in ("seqused_q", "seqused_k")}


def attend_packed(tensors: dict):
    tensors = dict(tensors, max_seqlen_q=12, max_seqlen_k=12)
    score, mask = Times(tensors.pop("score.of_head")), Near(tensors.pop("mask.reach"))
    return fa3.flash_attn_varlen_func(**tensors, score=score, mask=mask)


def cached() -> dict:
    """Return the tensors of a call on a cache that has all of them."""
    problem = CacheProblem(
        (20, 3), 2, (2, 1), ragged=True, page_size=16, rotary=(32, True, "float32"),
        leftpads=(1, 0), batch_idx=(1, 0), rows=3, alibi=1, sinks="float32",
    )  # fmt: skip
    call = make_call(problem)
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    return tensors | {"out": torch.empty_like(call["q"])}


def combined() -> dict:
    return {
        "out_partial": torch.ones(2, 1, 4, 2, 64),
        "lse_partial": torch.ones(2, 1, 4, 2),
        "out": torch.ones(1, 4, 2, 64),
    }


def lengths() -> dict:
    return {
        "cache_seqlens": torch.tensor([20, 3], dtype=torch.int32),
        "cu_seqlens_k_new": torch.tensor([0, 1, 2], dtype=torch.int32),
        "cache_leftpad": torch.tensor([1, 0], dtype=torch.int32),
    }


CALLS = {
    "attend": (attend, attention),
    "varlen": (attend_packed, packed),
    "cache": (lambda tensors: fa3.flash_attn_with_kvcache(**tensors), cached),
    "combine": (lambda tensors: fa3.flash_attn_combine(**tensors), combined),
    "metadata": (
        lambda tensors: fa3.get_scheduler_metadata(2, 1, 64, 2, 2, 64, **tensors),
        lengths,
    ),
}


def calls_of_q() -> dict:
    """Return functions of the first tensor of each call that launches something, and the tensor."""
    found = {}
    for call in ("attend", "varlen", "cache", "combine"):
        run, make = CALLS[call]
        (first, q), *rest = make().items()
        found[call] = outputs_of(run, dict(rest), first), q
    return found


def outputs_of(run, rest: dict, first: str):
    """Return a function from a call's first tensor to its output."""

    def output_of(tensor: torch.Tensor) -> torch.Tensor:
        result = run({first: tensor} | rest)
        return result[0] if isinstance(result, tuple) else result

    return output_of
