"""Every pair of head sizes on a Hopper GPU: output and gradients against fp32, dense and packed."""

from itertools import pairwise

import pytest
import torch
from pairs import pairs
from problems import poisoned_allocations
from reference import dense

import fa3
from fa3.problem import Window

SIZES = range(8, 257, 8)
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


@pytest.mark.parametrize("head_dim_v", SIZES)
@pytest.mark.parametrize("head_dim", SIZES)
def test_output_and_gradients(head_dim, head_dim_v, device):
    generator = torch.Generator(device).manual_seed(head_dim * 256 + head_dim_v)
    shapes = (
        (SEQLEN_Q, HEADS_Q, head_dim),
        (SEQLEN_K, HEADS_KV, head_dim),
        (SEQLEN_K, HEADS_KV, head_dim_v),
        (SEQLEN_Q, HEADS_Q, head_dim_v),
    )
    *operands, d_out = (
        torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes
    )
    leaves = [x.requires_grad_() for x in operands]
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in (CU_Q, CU_K))
    with poisoned_allocations():
        dense = fa3.flash_attn_func(*(x[None] for x in leaves), causal=True)[0]
        of_dense = [dense, *torch.autograd.grad(dense, leaves, d_out)]
        packed = fa3.flash_attn_varlen_func(*leaves, cu_q, cu_k, SEQLEN_Q, SEQLEN_K, causal=True)
        of_packed = [packed, *torch.autograd.grad(packed, leaves, d_out)]
    whole = [((0, SEQLEN_Q), (0, SEQLEN_K))]
    sequences = list(zip(pairwise(CU_Q), pairwise(CU_K), strict=True))
    for kind, found, bounds in (("dense", of_dense, whole), ("packed", of_packed, sequences)):
        expected = exact(*(x.detach() for x in operands), d_out, bounds)
        for name, ours, true in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            error = ((ours.float() - true).norm() / true.norm()).item()
            assert error < LARGEST_ERROR, f"{kind} {name}: relative error {error:.3g}"


pytestmark = pytest.mark.gpu

NOTHING = 1e-4
"""Gradients of q and k at most: dP - delta is a difference of fp32 sums in another order."""

ONE_KEY_HEADS_Q, ONE_KEY_HEADS_KV = 4, 2


def options_of(name: str, device) -> dict:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    return {"softcap": {"softcap": 15.0}, "alibi": {"alibi_slopes": slopes}, "plain": {}}[name]


def check(run, q, k, v, expected: torch.Tensor):
    """Assert that a call gives the values, and no gradient to q and k."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with poisoned_allocations():
        out = run(*leaves)
        dq, dk, _ = torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert torch.equal(out, expected)
    assert dq.abs().max() <= NOTHING and dk.abs().max() <= NOTHING


def operands(rows, head_dim: int, dtype, device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(head_dim)
    return [
        torch.randn(*rows, heads, head_dim, generator=generator, device=device).to(dtype)
        for heads in (ONE_KEY_HEADS_Q, ONE_KEY_HEADS_KV, ONE_KEY_HEADS_KV)
    ]


def values(v: torch.Tensor) -> torch.Tensor:
    """The value that each query head sees."""
    return v.detach().repeat_interleave(ONE_KEY_HEADS_Q // ONE_KEY_HEADS_KV, dim=-2)


@pairs(
    name=("softcap", "alibi", "plain"),
    head_dim=(64, 96, 128, 256),
    dtype=(torch.bfloat16, torch.float16),
    length=(1, 130, 700),
)
def test_window_of_one_key(name, head_dim, dtype, length, device):
    q, k, v = operands((2, length), head_dim, dtype, device)
    options = options_of(name, device)
    check(
        lambda *leaves: fa3.flash_attn_func(*leaves, window_size=(0, 0), **options),
        q, k, v, values(v),
    )  # fmt: skip


@pairs(name=("softcap", "plain"), head_dim=(64, 128, 256), num_splits=(0, 1, 3), used=(1, 200))
def test_decoding_with_one_visible_key(name, head_dim, num_splits, used, device):
    q = operands((3, 1), head_dim, torch.bfloat16, device)[0]
    _, k, v = operands((3, 512), head_dim, torch.bfloat16, device)
    lengths = torch.full((3,), used, dtype=torch.int32, device=device)
    options = options_of(name, device) | {"num_splits": num_splits}
    out = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, window_size=(0, 0), **options
    )
    assert torch.equal(out, values(v[:, used - 1 : used]))
