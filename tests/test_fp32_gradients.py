"""dK and dV in fp32: the sums before they are rounded, stored or added to what is there."""

import pytest
import torch
from problems import poisoned_allocations

import fa3
from fa3.interface import _flash_attn_backward

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [
    pytest.param((200, 300, 4, 1, 64, 64), id="shared key tiles"),
    pytest.param((100, 150, 2, 2, 128, 72), id="one query head"),
    pytest.param((130, 130, 4, 2, 256, 256), id="wide"),
    pytest.param((64, 40, 2, 1, 192, 128), id="fewer keys"),
]
CU_Q, CU_K = 3, 5
"""Divisors: the first of two packed sequences has this part of the rows."""


def make_call(shape, where, is_packed):
    seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v = shape
    generator = torch.Generator(where).manual_seed(sum(shape))
    sizes = (
        (seqlen_q, heads_q, head_dim),
        (seqlen_k, heads_kv, head_dim),
        (seqlen_k, heads_kv, head_dim_v),
        (seqlen_q, heads_q, head_dim_v),
    )
    tensors = [torch.randn(x, generator=generator, device=where).bfloat16() for x in sizes]
    lengths = {}
    if is_packed:
        for name, rows, part in (("q", seqlen_q, CU_Q), ("k", seqlen_k, CU_K)):
            ends = torch.tensor([0, rows // part, rows], dtype=torch.int32, device=where)
            lengths |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": rows}
    else:
        tensors = [tensor[None] for tensor in tensors]
    *operands, d_out = tensors
    function = fa3.flash_attn_varlen_func if is_packed else fa3.flash_attn_func
    out, lse = function(*operands, **lengths, causal=True, return_lse=True)
    return (d_out, *operands, out, lse), lengths


def gradients(tensors, lengths, dtype, filled=float("nan"), **options):
    """Return dq, dk and dv, dk and dv of a dtype, written over `filled`."""
    dq = torch.full_like(tensors[1], float("nan"))
    dk, dv = (torch.full_like(x, filled, dtype=dtype) for x in tensors[2:4])
    with poisoned_allocations():
        _flash_attn_backward(*tensors, **lengths, dq=dq, dk=dk, dv=dv, is_causal=True, **options)
    return dq, dk, dv


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", WHERE)
def test_rounded_they_are_those_in_16_bits(shape, is_packed, deterministic, where):
    """But for rounding: the fp32 kernel may sum in another order than the kernel in 16 bits."""
    call = make_call(shape, where, is_packed)
    expected = gradients(*call, torch.bfloat16, deterministic=deterministic)
    dq, *dkv = gradients(*call, torch.float32, deterministic=deterministic)
    for exact, rounded in zip(dkv, expected[1:], strict=True):
        assert exact.dtype == torch.float32 and exact.isfinite().all()
        torch.testing.assert_close(exact.bfloat16(), rounded, rtol=2**-7, atol=1e-3)
        # They are no rounded numbers.
        assert (exact != exact.bfloat16()).float().mean() > 0.5
    torch.testing.assert_close(dq, expected[0], rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("where", WHERE)
def test_they_are_added_to_what_is_there(is_packed, where):
    call = make_call((200, 300, 4, 1, 64, 64), where, is_packed)
    dq, dk, dv = gradients(*call, torch.float32, deterministic=True)
    same, *sums = gradients(
        *call, torch.float32, filled=3.0, deterministic=True, accumulate_dkv=True
    )
    assert torch.equal(dq, same)
    for added, alone in zip(sums, (dk, dv), strict=True):
        assert torch.equal(added, alone + 3.0)


@pytest.mark.parametrize("where", WHERE)
def test_no_keys_add_nothing(where):
    call = make_call((20, 0, 2, 1, 64, 64), where, is_packed=False)
    dq, dk, dv = gradients(*call, torch.float32, filled=1.0, accumulate_dkv=True)
    assert (dq == 0).all() and dk.numel() == dv.numel() == 0


@pytest.mark.parametrize(
    ("dtypes", "options", "message"),
    [
        ((torch.float32, torch.bfloat16), {}, "dv must be torch.float32 like dk, got torch.bf"),
        (
            (torch.float16, torch.float16),
            {},
            "dk must be torch.bfloat16 like k, or torch.float32, got",
        ),
        (
            (torch.bfloat16, torch.bfloat16),
            {"accumulate_dkv": True},
            "dk must be torch.float32 with accumulate_dkv, got torch.bfloat16",
        ),
        ((torch.float32, torch.float32), {"accumulate_dkv": 1}, "accumulate_dkv must be a bool"),
    ],
)
def test_wrong_dtypes(dtypes, options, message):
    tensors, _ = make_call((20, 30, 2, 1, 64, 64), "cpu", is_packed=False)
    dq = torch.empty_like(tensors[1])
    dk, dv = (torch.zeros_like(x, dtype=t) for x, t in zip(tensors[2:4], dtypes, strict=True))
    with pytest.raises(TypeError, match=message):
        _flash_attn_backward(*tensors, dq=dq, dk=dk, dv=dv, is_causal=True, **options)
    assert (dk == 0).all() and (dv == 0).all()
