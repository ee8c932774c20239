"""The problem of a dense call that is only posed: by tensors or by their shapes."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fa3.calls.call import AttentionCall, check_tensors, placed_tensors
from fa3.calls.modifiers import functions_of
from fa3.calls.operands import ALIGNMENT, DTYPES, FP8_DTYPE, Operand, check_rank, describe
from fa3.calls.options import DENSE, checked_options, integer
from fa3.problem import FP8, HEAD_DIM_UNIT, Problem


def problem_posed_by(
    operands: Sequence[torch.Tensor | Sequence[int]],  # q, k and v
    dtype: str | None,
    modifiers: Sequence[Any],  # alibi_slopes, sinks, score and mask
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    dropout_p: float,
) -> Problem:
    """The problem of a call; `Problem.of` says what the arguments are."""
    q, k, v = (posed_operand(*one, dtype) for one in zip("qkv", operands, strict=True))
    slopes, sinks, score, mask = modifiers
    values = causal, softcap, 0, 0, 0, False, False, False, dropout_p, None, None
    options = checked_options(DENSE, (False, *[None] * 5), window_size, values).options
    check_rank("q", q)
    slopes, sinks = (
        None if tensor is None else describe(name, tensor, 1, name == "sinks")
        for name, tensor in (("alibi_slopes", slopes), ("sinks", sinks))
    )
    functions, _ = functions_of(q, score, mask)
    described = placed_tensors(q=q, k=k, v=v, alibi_slopes=slopes, sinks=sinks)
    call = AttentionCall.of(described, DENSE)
    check_tensors(call)
    return call.problem(options._replace(functions=functions))


def posed_operand(name: str, given: torch.Tensor | Sequence[int], dtype: str | None) -> Operand:
    """A tensor as it is described, or one on the CPU with this shape and aligned rows."""
    if isinstance(given, torch.Tensor):
        if dtype is not None:
            raise ValueError(
                f"dtype must be None with tensors, which have their own, got {dtype!r}"
            )
        return describe(name, given, ALIGNMENT, True)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a torch.Tensor or a shape, got {type(given).__name__}")
    shape = tuple(integer(name, size, 0) for size in given)
    types = {known: kind for kind, known in (DTYPES | {FP8_DTYPE: FP8}).items()}
    if dtype is not None and dtype not in types:
        raise ValueError(f"dtype must be one of {list(types)}, got {dtype!r}")
    rows = *shape[:-1], -(-shape[-1] // HEAD_DIM_UNIT) * HEAD_DIM_UNIT if shape else 0
    strides = tuple(math.prod(rows[dim + 1 :]) for dim in range(len(shape)))
    return Operand(shape, strides, types[dtype or "bfloat16"], torch.device("cpu"))
