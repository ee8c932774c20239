"""Scores that the softmax cannot take: refused with FA3_ASSERTIONS=1."""

import pytest
import torch

import fa3
from fa3.calls import assertions

ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.fixture(params=[False, True])
def asserts(request, monkeypatch):
    """Whether assertions are on."""
    monkeypatch.setattr(assertions, "ASSERTIONS", request.param)
    return request.param


def dense(q, k, v, **options):
    return fa3.flash_attn_func(q[None], k[None], v[None], **options)[0]


def packed(q, k, v, **options):
    return fa3.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 4, 4, **options)


@pytest.mark.parametrize("run", [dense, packed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_that_are_too_large(run, dtype, asserts):
    """The largest row of q and the largest row of k decide, after scaling."""
    q, k, v = (torch.randn(7, 2, 64).to(dtype) for _ in range(3))
    q[5, 1], k[2, 0] = 0.0, 0.0
    # 2**24 = 4096 * 4096; the scale is 1 / 8.
    q[5, 1, 0], k[2, 0, 0] = 4096.0, 8 * 4096.0
    run(q, k, v)
    q[5, 1, 1] = 1024.0
    run(q, k, v, softcap=30.0)
    run(q, k, v, softmax_scale=0.1)
    if not asserts:
        run(q, k, v)
        return
    with pytest.raises(
        ValueError, match=r"^scores must be at most 16777216, got rows .* 1\.73e\+07"
    ):
        run(q, k, v)


def test_rows_that_are_not_used_do_not_count(asserts):
    q, k, v = (torch.randn(9, 2, 64).bfloat16() for _ in range(3))
    for rows in (q[2], q[7:], k[6], k[7:]):
        rows.fill_(1e30)
    used_q, used_k = torch.tensor([2, 4]).int(), torch.tensor([3, 3]).int()
    fa3.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 4, 4, seqused_q=used_q, seqused_k=used_k)


def test_nothing_to_compute(asserts):
    q, k = torch.randn(1, 4, 2, 64).bfloat16(), torch.randn(1, 0, 2, 64).bfloat16()
    assert not fa3.flash_attn_func(q, k, k).any()
    ends = torch.zeros(1, dtype=torch.int32)
    assert not fa3.flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 0, 0)[:0].any()
