"""`fa3.quantize` on the CPU and on a Hopper GPU, and how exact attention in FP8 is."""

import math

import pytest
import torch
from fake_gpu import noting_launches
from gpu_checks import captured
from machine_code import report_of
from pairs import pairs
from problems import poisoned_allocations
from reference import dense

import fa3
from fa3.calls.quantize import means_of
from fa3.kernels.quantize import LEAST_SCALE, Quantize, mixed_columns
from fa3.problem import Window
from fa3.reference.quantize import in_key_order, rotate_rows
from fa3.running import compiler

E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(E4M3).max
FOR_PACKED = [{}, {"hadamard": True}, {"smooth_k": True}, {"hadamard": True, "smooth_k": True}]
OPTIONS = [*FOR_PACKED, {"transpose_v": True}]

HEADS = [(64, 64), (96, 160), (128, 128), (192, 128), (224, 32), (256, 256)]


def drawn(*shape: int, seed=0, dtype=torch.bfloat16, where="cpu", factor=9.0) -> torch.Tensor:
    """Draw normal values; every third column of the last head is multiplied by a factor."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows[..., -1:, ::3] *= factor
    return rows.to(dtype).to(where)


def made_of(q, k, v, *ends, **options) -> fa3.calls.quantize.Quantized:
    """Quantize into NaN memory; assert what all results have in common."""
    with poisoned_allocations():
        made = fa3.quantize(q, k, v, *ends, **options)
    if "transpose_v" in options:
        v = in_key_order(v)
    for tensor, codes in zip((q, k, v), made[:3], strict=True):
        assert codes.dtype == E4M3 and codes.shape == tensor.shape and codes.is_contiguous()
    for scale in made[3:]:
        assert scale.dtype == torch.float32 and scale.shape[1] == k.shape[-2]
        assert (scale > 0).all()
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS)
def test_rounds_with_the_largest_magnitude(dtype, heads):
    shapes = (2, 150, 6, heads[0]), (2, 333, 2, heads[0]), (2, 333, 2, heads[1])
    tensors = [drawn(*x, seed=i, dtype=dtype) for i, x in enumerate(shapes)]
    made = made_of(*tensors)
    for tensor, codes, scale in zip(tensors, made[:3], made[3:], strict=True):
        by_head = tensor.float().unflatten(2, (2, -1))
        assert torch.equal(scale, by_head.abs().amax((1, 3, 4)) / MOST)
        scaled = by_head * (1 / scale)[:, None, :, None, None]
        right = scaled.clamp(-MOST, MOST).to(E4M3).flatten(2, 3)
        assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 192, 224, 256])
def test_rotation_keeps_products(columns):
    rows = torch.randn(2, 7, columns, generator=torch.Generator().manual_seed(1)).double()
    with torch.device("meta"):  # whatever the default device is
        turned = rotate_rows(rows) * mixed_columns(columns) ** -0.5
    torch.testing.assert_close(turned @ turned.mT, rows @ rows.mT)
    one = torch.eye(columns, dtype=torch.float64)[0]
    # One outlier is spread over a block.
    assert (rotate_rows(one).abs() == (torch.arange(columns) < mixed_columns(columns))).all()


@pytest.mark.parametrize("head_dim", [96, 128])
def test_attention_is_the_same(head_dim, where):
    for options in OPTIONS:
        shapes = (2, 300, 4, head_dim), (2, 300, 2, head_dim), (2, 300, 2, 64)
        q, k, v = (drawn(*x, seed=i, where=where, factor=1.0) for i, x in enumerate(shapes))
        k += drawn(1, 1, 2, head_dim, seed=7, where=where, factor=1.0)
        made = made_of(q, k, v, **options)
        with torch.device("meta"):  # whatever the default device is
            out, lse = fa3.flash_attn_func(**made._asdict(), causal=True, return_lse=True)
        right, right_lse = dense(*(x.double() for x in (q, k, v)), head_dim**-0.5, Window(right=0))
        if options.get("smooth_k"):
            shift = k.mean(1, dtype=torch.float32).repeat_interleave(2, 1)[:, None] * q
            right_lse = right_lse - shift.double().sum(3).transpose(1, 2) * head_dim**-0.5
        assert (out - right).pow(2).mean() <= 0.12**2 * right.pow(2).mean()
        assert (lse - right_lse).pow(2).mean().sqrt() <= 0.2


def test_packed_sequences_are_as_one_by_one(where):
    for options in FOR_PACKED:
        lengths = [5, 300, 0, 129, 1]
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(where)
        q, k, v = (drawn(440, h, 64, seed=i, where=where) for i, h in enumerate((4, 2, 2)))
        # These rows belong to no sequence.
        for tensor in (q, k, v):
            tensor[435:] = torch.nan
        made = made_of(q, k, v, ends, ends, **options)
        for n, (begin, end) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
            rows = [x[None, begin:end] for x in (q, k, v)]
            one = made_of(*rows, **options)
            for i in range(3):
                codes = made[i][None, begin:end], one[i]
                if options.get("smooth_k") and i == 1 and begin < end:
                    # Means are summed up in another order.
                    assert (codes[0].float() - codes[1].float()).abs().mean() <= 1e-2
                    torch.testing.assert_close(made[3 + i][n], one[3 + i][0])
                elif begin < end:
                    assert torch.equal(*(x.view(torch.uint8) for x in codes))
                    assert torch.equal(made[3 + i][n], one[3 + i][0])
        out = fa3.flash_attn_varlen_func(
            *made[:3], ends, ends, 300, 300,
            **dict(zip(("q_descale", "k_descale", "v_descale"), made[3:], strict=True)),
        )  # fmt: skip
        assert not out[:435].isnan().any()


def test_means_leave_out_rows_of_no_sequence():
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    k = drawn(9, 2, 32)
    k[7:] = torch.nan
    right = torch.stack([k[:3].float().mean(0), torch.zeros(2, 32), k[3:7].float().mean(0)])
    torch.testing.assert_close(means_of(k, ends), right)


def test_zeros_and_extreme_values(where):
    q, k, v = (torch.zeros(1, 40, 2, 64, dtype=torch.bfloat16, device=where) for _ in range(3))
    k[0, 3, 1, 5], v[0, 7, 0, 9] = 3e38, -1e-30
    made = made_of(q, k, v)
    assert (made.q_descale == LEAST_SCALE).all() and (made.v_descale == LEAST_SCALE).all()
    assert made.k.float()[0, 3, 1, 5] == MOST and made.k.float().count_nonzero() == 1
    out = fa3.flash_attn_func(**made._asdict())
    assert not out.float().any()


def outliers(*shape: int, seed: int) -> torch.Tensor:
    """Draw normal values, and with probability 0.001 add one of deviation 10."""
    is_large = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 10)) < 0.001
    normal, large = (drawn(*shape, seed=i, dtype=torch.float32, factor=1) for i in (seed, seed + 5))
    return normal + 10 * large * is_large


def on_hard_data(kind: str) -> list[torch.Tensor]:
    """Draw q, k and v, (1, 512, 2, 128), as docs/fp8.md says."""
    normal = [drawn(1, 512, 2, 128, seed=i, dtype=torch.float32, factor=1.0) for i in range(3)]
    q, k, v = normal
    if kind == "outliers":
        q, k, v = (outliers(1, 512, 2, 128, seed=i) for i in range(3))
    elif kind == "growing keys":
        k = k * torch.linspace(0.1, 8, 512)[:, None, None]
    elif kind == "logits x8":
        q = q * 8
    elif kind == "biased keys":
        k = k + 4 * drawn(1, 1, 2, 128, seed=3, factor=1.0)
    elif kind == "a sink of +20":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, 0] = 0.0
        k[:, 0, :, 0] = 20 * math.sqrt(128) / 4
    return [x.bfloat16() for x in (q, k, v)]


ERRORS = {
    "normal": ({}, 4.1e-3),
    "outliers": ({"hadamard": True}, 9.5e-3),
    "growing keys": ({}, 8.5e-2),
    "logits x8": ({}, 9.8e-2),
    "a sink of +20": ({}, 2.9e-2),
    "biased keys": ({"smooth_k": True}, 4.3e-3),
}
"""Data -> the options that suit it, and the largest root mean square error with 512 keys."""


def test_errors_on_hard_data(where):
    for kind, (options, most) in ERRORS.items():
        q, k, v = (x.to(where) for x in on_hard_data(kind))
        right, _ = dense(*(x.double() for x in (q, k, v)), 128**-0.5, Window())
        errors = [
            (fa3.flash_attn_func(**made_of(q, k, v, **way)._asdict()) - right).pow(2).mean().sqrt()
            for way in ({}, options)
        ]
        # Options help, if there are any.
        assert errors[1] <= most and (not options or errors[1] < 0.75 * errors[0]), kind


def test_needles_are_found(where):
    """Each query's own key among many has a value that the output must be the most like."""
    count, keys = (256, 1 << 17) if where == "cuda" else (64, 4096)
    q, k, v = (
        drawn(1, n, 2, 128, seed=n, where=where, factor=1.0) for n in (count, keys, keys + 1)
    )
    v = v[:, :keys].contiguous()
    at = torch.randperm(keys, generator=torch.Generator().manual_seed(0))[:count].to(where)
    score = math.log(keys) / 2  # for a weight of 1 / sqrt(keys)
    k[:, at] = q * (score * 128**0.5 / q.float().pow(2).sum(3, keepdim=True)).to(q.dtype)

    def share(out: torch.Tensor) -> float:
        likeness = torch.einsum("bqhd,bnhd->bhqn", out.float(), v[:, at].float())
        return (likeness.argmax(3) == torch.arange(count, device=where)).float().mean().item()

    right = share(fa3.flash_attn_func(q, k, v))
    assert right > 0.8
    for options in OPTIONS:
        made = made_of(q, k, v, **options)
        assert share(fa3.flash_attn_func(**made._asdict())) >= right - 0.02


@pytest.mark.gpu
@pairs(options=OPTIONS, heads=HEADS, dtype=(torch.bfloat16, torch.float16))
def test_gpu_as_cpu(options, heads, dtype):
    for seqlen in (1, 63, 2000):
        shapes = (
            (3, seqlen, 12, heads[0]),
            (3, 2 * seqlen, 4, heads[0]),
            (3, 2 * seqlen, 4, heads[1]),
        )
        tensors = [drawn(*x, seed=i, dtype=dtype) for i, x in enumerate(shapes)]
        right, made = made_of(*tensors, **options), made_of(*(x.cuda() for x in tensors), **options)
        again = made_of(*(x.cuda() for x in tensors), **options)
        for i in range(3):
            if options.get("smooth_k") and i == 1:
                # Means are summed up in another order.
                torch.testing.assert_close(made[3 + i].cpu(), right[3 + i])
                assert (made[i].cpu().float() - right[i].float()).abs().mean() <= 1e-2
            else:
                assert torch.equal(made[3 + i].cpu(), right[3 + i])
                assert torch.equal(made[i].cpu().view(torch.uint8), right[i].view(torch.uint8))
            assert torch.equal(made[i].view(torch.uint8), again[i].view(torch.uint8))


@pytest.mark.gpu
def test_strides_graphs_and_long_sequences():
    qkv = drawn(2, 9000, 3 * 4, 128, where="cuda")
    tensors = qkv.unflatten(2, (3, 4)).unbind(2)
    right = made_of(*(x.contiguous() for x in tensors))
    made = made_of(*tensors)
    graph, results = captured(lambda: fa3.quantize(*tensors))
    for _ in range(2):
        graph.replay()
    for one, two, three in zip(right, made, results, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        assert torch.equal(one.view(torch.uint8), three.view(torch.uint8))


def test_empty_calls(where):
    for batch, seqlen, heads in ((0, 5, 2), (2, 0, 2), (2, 5, 0)):
        tensors = (drawn(max(batch, 1), seqlen, max(heads, 1), 64, where=where) for _ in range(3))
        made = made_of(*(x[:batch, :, :heads] for x in tensors))
        assert made.q_descale.shape == (batch, heads)


def test_calls_without_heads_need_no_kernel():
    """The DSL has no tensors without rows."""
    with noting_launches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "LOADED", {})
        patch.setattr(compiler, "from_disk", pytest.fail)
        rows = torch.empty(2, 5, 0, 64, dtype=torch.bfloat16)
        made = fa3.quantize(rows, rows, rows)
        assert made.q.shape == rows.shape and made.q_descale.shape == (2, 0)


@pytest.mark.compiles
@pytest.mark.parametrize(("is_full", "has_vt"), [(False, False), (False, True), (True, False)])
def test_machine_code(is_full, has_vt):
    report = report_of(Quantize("bfloat16", 128, 128, 4 if is_full else 1, *[is_full] * 3, has_vt))
    # A thread loads all of its vectors at once: before both visits of q, k and v, and in each.
    assert report.count("LDG.E.128") == 3 * 3 * 4
    assert report.count("F2FP.SATFINITE.E4M3") == 3 * 4 * 8 // 2
    assert (report.count("SHFL.BFLY") > 0) == is_full
    # A thread writes 8 bytes at once, but 4 of V^T.
    assert report.count("STG.E.64") == (2 if has_vt else 3) * 4
