"""`quantize`: q, k and v from 16 bits to FP8, with descales."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from fa3.calls.call import (
    AttentionCall,
    check_tensors,
    check_totals,
    describe_tensors,
    prepare_without_lengths,
)
from fa3.calls.eager import cannot_be_traced, is_traced
from fa3.calls.operands import DTYPES, FP8_DTYPE
from fa3.calls.operators import refuse_gradients
from fa3.calls.options import DENSE, PACKED, Options, flag
from fa3.calls.values import check_lengths, is_visible
from fa3.kernels.quantize import Quantize, visits
from fa3.primitives.ragged_lengths import key_groups
from fa3.problem import FP8_HEAD_DIM_UNIT, KEYS_OF_GROUP, REMEMBERED
from fa3.reference.quantize import quantize_rows
from fa3.running.compiler import load_kernel
from fa3.settings import check_settings


class Quantized(NamedTuple):
    """What `quantize` returns: arguments of calls in FP8, by their names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    smooth_k: bool = False,
    hadamard: bool = False,
    transpose_v: bool = False,
) -> Quantized:
    """Quantize q, k and v to FP8 (e4m3), by sequence and head.

    A descale is the largest magnitude that it stands for, divided by 448, the largest number in
    e4m3, in float32; at least 2**-44. Query heads of one key/value head share a descale. Runs on
    the current stream of the tensors' GPU, in one kernel; the host reads nothing.

        fa3.flash_attn_func(**fa3.quantize(q, k, v)._asdict(), causal=True)

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), bfloat16 or float16; head_dim a multiple of 32 up
            to 256. Or packed, (total_q, heads_q, head_dim). Finite.
        k: (batch, seqlen_k, heads_kv, head_dim), or packed; like q.
        v: (batch, seqlen_k, heads_kv, head_dim_v), or packed; like q.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32, of packed sequences, as
            `flash_attn_varlen_func` takes them.
        smooth_k: whether each sequence and head of k loses its mean over the keys, in float32. That
            subtracts softmax_scale * (q . mean) from all scores of a query: out stays the same, and
            the log-sum-exp is smaller by that much. Not with softcap, sinks or a score of your own,
            which do not allow it.
        hadamard: whether q and k are rotated: some columns are negated, always the same ones, then
            blocks of columns go through a Hadamard transform that keeps lengths. A block is as long
            as the largest power of two that divides head_dim. Scores stay the same, and outliers
            are spread over a block.
        transpose_v: whether v is written as V^T, in the layout that docs/conventions.md describes,
            so that `flash_attn_func` does not write it first. Not with packed sequences.

    Returns:
        q, k and v in float8_e4m3fn, contiguous, and q_descale, k_descale and v_descale,
        (batch, heads_kv), float32, as a named tuple. Rows that belong to no sequence hold anything.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; and in a graph.

    Source: Shah et al., FlashAttention-3 (arXiv 2407.08608); Zhang et al., SageAttention
        (arXiv 2410.02367).
    """
    smooth_k, hadamard = flag("smooth_k", smooth_k), flag("hadamard", hadamard)
    transpose_v = flag("transpose_v", transpose_v)
    if is_traced(q):
        raise cannot_be_traced()
    refuse_gradients({"q": q, "k": k, "v": v})
    ends = cu_seqlens_q, cu_seqlens_k
    is_packed = not (cu_seqlens_q is cu_seqlens_k is None)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if is_packed and transpose_v:
        raise NotImplementedError("transpose_v must be False with packed sequences, got True")
    described = describe_tensors(tensors, Options(kind=PACKED if is_packed else DENSE))
    kernel = prepare_without_lengths(prepare_quantize, described, smooth_k, hadamard, transpose_v)
    batch = q.shape[0]
    if is_packed:
        batch, totals = cu_seqlens_q.shape[0] - 1, (batch, k.shape[0])
        check_totals(tensors, batch, True)
        if is_visible(cu_seqlens_q):
            check_lengths((*ends, None, None), totals, totals)
    means = means_of(k, cu_seqlens_k) if smooth_k else None
    descales = q.new_empty(3, batch, k.shape[-2], dtype=torch.float32)
    shapes = [x.shape for x in (q, k, v)]
    if transpose_v:
        groups = key_groups(v.shape[1])
        shapes[2] = torch.Size((batch, *v.shape[2:], groups, KEYS_OF_GROUP))
    codes = (torch.empty(shape, dtype=FP8_DTYPE, device=q.device) for shape in shapes)
    quantized = Quantized(*codes, *descales)
    if kernel is None and descales.numel():
        quantize_rows(q, quantized.q, quantized.q_descale, None, hadamard, cu_seqlens_q)
        quantize_rows(k, quantized.k, quantized.k_descale, means, hadamard, cu_seqlens_k)
        quantize_rows(v, quantized.v, quantized.v_descale, None, False, cu_seqlens_k)
    elif descales.numel():
        rows = sum(x.numel() // x.shape[-1] for x in (q, k, v))
        ctas, ahead = visits(rows // descales.numel(), q.shape[-1], descales.numel())
        largest = torch.zeros(descales.numel(), ctas, dtype=torch.int32, device=q.device)
        call = q, k, v, *quantized[:3], tuple(descales), largest, means, *ends, ahead
        with torch.cuda.device(q.device):
            kernel(*call)
    return quantized


def means_of(k: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """The means of the keys of sequences, (batch, heads_kv, head_dim) float32."""
    if ends is None:
        return k.mean(1, dtype=torch.float32)
    row = torch.arange(k.shape[0], dtype=ends.dtype, device=k.device)
    # Rows of no sequence come before the first or after the last.
    number = torch.searchsorted(ends, row, right=True)
    sums = k.new_zeros(len(ends) + 1, *k.shape[1:], dtype=torch.float32)
    sums.index_add_(0, number, k.float())
    counts = ends.clamp(max=len(row)).diff().clamp(min=1)
    return sums[1:-1] / counts[:, None, None]


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_quantize(
    call: AttentionCall, smooth_k: bool, hadamard: bool, transpose_v: bool
) -> Callable | None:
    """Validate a call and load its kernel.

    It is None on the CPU, and without heads, which the DSL does not take.
    """
    check_settings()
    call.q.check_dtype("q", *DTYPES)
    check_tensors(call)
    call.q.check_head_dim("q", FP8_HEAD_DIM_UNIT, " in FP8")
    call.v.check_head_dim("v", FP8_HEAD_DIM_UNIT, " in FP8")
    if call.heads_q < call.heads_kv:
        raise ValueError(f"q must have heads like k, got shape {tuple(call.q.shape)}")
    if call.q.device.type == "cpu" or not call.heads_q:
        return None
    group = call.heads_q // call.heads_kv
    head_dims = call.head_dim, call.head_dim_v
    kinds = group, call.is_packed, smooth_k, hadamard, transpose_v
    return load_kernel(Quantize(DTYPES[call.q.dtype], *head_dims, *kinds))
