"""Merging attention over parts of the keys: validate and launch."""

import functools
import math
from collections.abc import Callable

import torch

from fa3.calls import operators
from fa3.calls.devices import gpu_of
from fa3.calls.eager import is_traced
from fa3.calls.operands import DIMENSIONS, DTYPES, Operand, check_apart, check_writable, describe
from fa3.complaints import shown
from fa3.kernels.combine import Combine, CombineArguments
from fa3.problem import REMEMBERED
from fa3.reference.walker import merge_outputs
from fa3.running.compiler import load_kernel
from fa3.settings import check_settings

MAX_COMBINED_HEAD_DIM = 512

MOST_COMBINED = 1 << 30
"""Parts, and rows of each, that 32 bits count with the steps of a walk over them."""

COMBINE_CTAS = 16  # CTAs of the kernel that merges, for each SM


@operators.registers
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all.

    Args:
        out_partial: (num_splits, batch, seqlen, heads, head_dim), float32: outputs, each
            normalised by itself; head_dim a multiple of 8 up to 512.
        lse_partial: (num_splits, batch, seqlen, heads), float32: their log-sum-exps, natural
            logarithm, in any strides. A part with -inf counts nothing; its output must not be NaN.
        out: (batch, seqlen, heads, head_dim) tensor that receives the output; must not share
            memory with the parts.
        out_dtype: of the output: torch.float32, torch.bfloat16 or torch.float16; out's, or
            float32 if there is none.

    Returns:
        out, and the log-sum-exp (batch, seqlen, heads), float32, which lies in memory as
        (batch, heads, seqlen). All parts hidden give 0 and -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`.

    Source: Dao et al., Flash-Decoding.
    """
    traced = is_traced(out_partial)
    out_described = None if out is None or traced else describe("out", out)
    if out_dtype is None:
        out_dtype = torch.float32 if out is None else out.dtype
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {shown(out_dtype)}")
    if traced:
        parts = {"out_partial": out_partial, "lse_partial": lse_partial}
        operators.refuse_gradients(parts)
        made, lse = operators.COMBINE(**parts, out=out, out_dtype=out_dtype)
        return made if out is None else out, lse
    partial = describe("out_partial", out_partial)
    partial_lse = describe("lse_partial", lse_partial, alignment=1)
    call = prepare_combine(partial, partial_lse, out_described, out_dtype)
    if out is not None:
        check_writable("out", out)
        tensors = {"out": out, "out_partial": out_partial, "lse_partial": lse_partial}
        check_apart(("out",), tensors)
    _, batch, seqlen, heads, _ = out_partial.shape
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype)
    lse = out_partial.new_empty(batch, heads, seqlen)
    if call is not None:
        kernel, sets = call
        arguments = CombineArguments(
            out, lse.data_ptr(), dense_o=out_partial, dense_lse=lse_partial, sets=sets
        )
        kernel(*arguments)
    else:
        merged, merged_lse = merge_outputs(list(zip(out_partial, lse_partial, strict=True)))
        out.copy_(merged)
        lse.copy_(merged_lse.transpose(1, 2))
    return out, lse.transpose(1, 2)


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_combine(
    partial: Operand, lse: Operand, out: Operand | None, out_dtype: torch.dtype
) -> tuple[Callable, int] | None:
    """Validate a merge; return its kernel and CTAs, or None without launch."""
    check_settings()
    partial.check_rank("out_partial", ("num_splits", *DIMENSIONS))
    partial.check_dtype("out_partial", torch.float32)
    if partial.device.type not in ("cpu", "cuda"):
        raise ValueError(f"out_partial must be a CPU or CUDA tensor, got {partial.device}")
    partial.check_layout("out_partial")
    partial.check_head_dim("out_partial", most=MAX_COMBINED_HEAD_DIM)
    *rows, head_dim = partial.shape
    if rows[0] == 0:
        raise ValueError("out_partial must have a part to merge, got none")
    for what, count in (("parts", rows[0]), ("rows", math.prod(rows[1:]))):
        if count > MOST_COMBINED:
            raise ValueError(f"out_partial must have at most {MOST_COMBINED} {what}, got {count}")
    lse.check_dtype("lse_partial", torch.float32)
    lse.check_shape("lse_partial", tuple(rows), "out_partial")
    lse.check_device("lse_partial", "out_partial", partial)
    if out_dtype not in (torch.float32, *DTYPES):
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    if out is not None:
        out.check_shape("out", tuple(partial.shape[1:]), "out_partial")
        out.check_layout("out")
        out.check_no_overlap("out")
        if out.dtype != out_dtype:
            raise TypeError(f"out must be {out_dtype} like out_dtype, got {out.dtype}")
        out.check_device("out", "out_partial", partial)
    if partial.device.type == "cpu" or 0 in rows:
        return None
    element = str(out_dtype).removeprefix("torch.")
    kernel = load_kernel(Combine(element, head_dim, None, None))
    most = COMBINE_CTAS * gpu_of(partial.device).num_sms
    return kernel, min(math.prod(rows[1:]), most)
