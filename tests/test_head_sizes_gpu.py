"""Head sizes on a Hopper GPU: output and gradients against fp32, dense and packed."""

from itertools import pairwise

import pytest
import torch
from problems import poisoned_allocations
from reference import dense

import fa3
from fa3.problem import Window

PADDED = range(32, 257, 32)  # columns that heads take in shared memory

SIZES = [
    (PADDED[i] - 8 * (j % 4), PADDED[j] - 8 * (i % 4), (i // 4 + j // 4) % 2 == 1)
    for i in range(len(PADDED))
    for j in range(len(PADDED))
]
"""Sizes (of q and k, of v), and whether sequences are packed: each padded size with each other one,
and each of 32 sizes once dense and once packed."""

SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV = 100, 150, 2, 1
CU_Q, CU_K = (0, 37, SEQLEN_Q), (0, 70, SEQLEN_K)
"""Two packed sequences of these rows."""

LARGEST_ERROR = 0.015
"""Relative, of a whole tensor; 16-bit rounding alone gives 0.002 to 0.008."""


def exact(q, k, v, d_out, bounds) -> list[torch.Tensor]:
    """Compute output and gradients of causal attention in fp32, sequence by sequence."""
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    q, k, v = (x[None] for x in leaves)
    outs = [
        dense(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], window=Window(right=0), dtype=torch.float32)[0]
        for (q0, q1), (k0, k1) in bounds
    ]
    out = torch.cat(outs, dim=1)[0]
    return [out, *torch.autograd.grad(out, leaves, d_out.float())]


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize(("head_dim", "head_dim_v", "is_packed"), SIZES)
def test_output_and_gradients(head_dim, head_dim_v, is_packed, device):
    """The dtypes take turns."""
    dtype = (torch.bfloat16, torch.float16)[(head_dim + head_dim_v) // 8 % 2]
    generator = torch.Generator(device).manual_seed(head_dim * 256 + head_dim_v)
    shapes = (
        (SEQLEN_Q, HEADS_Q, head_dim),
        (SEQLEN_K, HEADS_KV, head_dim),
        (SEQLEN_K, HEADS_KV, head_dim_v),
        (SEQLEN_Q, HEADS_Q, head_dim_v),
    )
    *operands, d_out = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes
    )
    leaves = [x.requires_grad_() for x in operands]
    bounds = [((0, SEQLEN_Q), (0, SEQLEN_K))]
    with poisoned_allocations():
        if is_packed:
            bounds = list(zip(pairwise(CU_Q), pairwise(CU_K), strict=True))
            ends = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (CU_Q, CU_K))
            out = fa3.flash_attn_varlen_func(*leaves, *ends, SEQLEN_Q, SEQLEN_K, causal=True)
        else:
            out = fa3.flash_attn_func(*(x[None] for x in leaves), causal=True)[0]
        found = [out, *torch.autograd.grad(out, leaves, d_out)]
    expected = exact(*(x.detach() for x in operands), d_out, bounds)
    for name, ours, true in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = ((ours.float() - true).norm() / true.norm()).item()
        assert error < LARGEST_ERROR, f"{name}: relative error {error:.3g}"
