"""Rows that see one key, on a Hopper GPU: the output is V with the same bits, dQ and dK are 0.

P of that key is any number unless the softmax tracks the row maximum. In 16 bits it is another
number than its fp32 sum.
"""

import pytest
import torch
from pairs import pairs
from problems import poisoned_allocations

import fa3

pytestmark = pytest.mark.gpu

NOTHING = 1e-4
"""Gradients of q and k at most: dP - delta is a difference of fp32 sums in another order."""

HEADS_Q, HEADS_KV = 4, 2


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
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]


def values(v: torch.Tensor) -> torch.Tensor:
    """The value that each query head sees."""
    return v.detach().repeat_interleave(HEADS_Q // HEADS_KV, dim=-2)


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


@pairs(
    name=("softcap", "alibi", "plain"),
    head_dim=(64, 96, 128, 256),
    lengths=((1, 1), (1,) * 50, (1, 300, 1)),
    longest=(1, 300),
)
def test_packed_sequences_of_one_key(name, head_dim, lengths, longest, device):
    """Sequences of one row; a longer one beside them has a window of one key, too."""
    q, k, v = operands((sum(lengths),), head_dim, torch.bfloat16, device)
    ends = torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
    longest = max(longest, *lengths)
    options = options_of(name, device)
    check(
        lambda *leaves: fa3.flash_attn_varlen_func(
            *leaves, ends, ends, longest, longest, window_size=(0, 0), **options
        ),
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
