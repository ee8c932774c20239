"""Attention with q, k and v in FP8, on the CPU and on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch
from fake_gpu import noting_launches
from gpu_checks import captured, forget_prepared_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_code import report_of
from problems import poisoned_allocations
from reference import dense, visible

import fa3
from docs.examples.relative_bias import RelativeBias
from fa3.kernels.forward_launch import ForwardConfig
from fa3.kernels.transpose import Transpose
from fa3.planning import tilings
from fa3.planning.planner import plan_forward
from fa3.problem import FP8, AttentionSpec, Problem, Window
from fa3.reference.quantize import in_key_order
from fa3.scores.masks import Band
from fa3.scores.scores import Alibi
from fa3.scores.templates import Template
from fa3.settings import SETTINGS

E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(E4M3).max
NAMES = "q_descale", "k_descale", "v_descale"

SHARE = 1.3
"""A result's error may be this times the error of the same attention with P rounded to e4m3. Block
by block P is rounded with other maxima."""

TYPICAL = 0.034  # the error of linear codes of P, relative to normal values
LARGEST = 256.0  # what a row's largest probability is multiplied by before it is rounded to e4m3
SHARE_OF_LSE = 5e-4  # largest relative error of a log-sum-exp: FP8 sums have 13 bits or so
SMALL, SMALL_OF_LINEAR = 2e-3, 0.05
"""Largest errors of natural log-sum-exps, of scores of a usual size: with exponentials, and with
codes that are linear in the score, which stand for up to 6% too much."""


def is_linear() -> bool:
    return SETTINGS["FA3_FP8_EXP"] == "linear"


def drawn(*shape: int, seed: int, where: str) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(where)


def in_fp8(tensor: torch.Tensor, heads_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to e4m3 with a scale for each batch entry and key/value head."""
    by_head = tensor.unflatten(2, (heads_kv, -1)).float()
    scale = by_head.abs().amax(dim=(1, 3, 4)).clamp(min=1e-6) / MOST
    values = (by_head / scale[:, None, :, None, None]).clamp(-MOST, MOST).to(E4M3)
    return values.flatten(2, 3), scale


def call_of(q, k, v, **scales) -> tuple[dict, list[torch.Tensor]]:
    """The FP8 call on these tensors, and q, k and v as they count, in float64."""
    heads_kv, call, exact = k.shape[2], {}, []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        values, scale = in_fp8(tensor, heads_kv)
        call[name], call[f"{name}_descale"] = values, scale
        group = tensor.shape[2] // heads_kv
        exact.append(values.double() * scale.double().repeat_interleave(group, 1)[:, None, :, None])
    return call, exact


def rounded(q, k, v, window: Window, scale: float) -> torch.Tensor:
    """Attention in float64 but for P, which is rounded to e4m3 below the row's maximum."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    seen = visible(q.shape[1], k.shape[1], window, q.device)
    logits = logits.masked_fill(~seen, -torch.inf)
    p = (logits - logits.amax(3, keepdim=True).clamp(min=-1e300)).exp()
    in_e4m3 = (p * LARGEST).float().to(E4M3).double() / LARGEST
    if is_linear():
        x = p.log2() + 7.75
        codes = torch.maximum(8 * (x + 7), 2 * (x + 9)).clamp(min=0).round()
        in_e4m3 = p = codes.to(torch.uint8).view(E4M3).double()
    return torch.einsum("bhqk,bkhd->bqhd", in_e4m3 / p.sum(3, keepdim=True).clamp(min=1e-30), v)


def rms(tensor: torch.Tensor) -> float:
    return tensor.double().pow(2).mean().sqrt().item()


def check(q, k, v, window=Window(), tolerance=SMALL, **arguments) -> None:
    """Assert that FP8 calls into NaN memory err about as rounding P to e4m3 does."""
    (call, exact), scale = call_of(q, k, v), q.shape[3] ** -0.5
    right, right_lse = dense(*exact, scale, window, **arguments)
    floor = TYPICAL * rms(right)
    tolerance = max(tolerance, SMALL_OF_LINEAR * is_linear())
    if not arguments:
        floor = rms(rounded(*exact, window, scale) - right)
    arguments |= {"window_size": window, "return_lse": True}
    for v in (call["v"], transposed(call["v"])):
        with poisoned_allocations():
            out, lse = fa3.flash_attn_func(**call | {"v": v}, **arguments)
        assert out.dtype == torch.bfloat16 and not out.isnan().any()
        assert rms(out - right) <= SHARE * floor + 2.0**-9 * rms(right)
        torch.testing.assert_close(lse.double(), right_lse, rtol=SHARE_OF_LSE, atol=tolerance)


def transposed(v: torch.Tensor) -> torch.Tensor:
    """V^T of v in e4m3, as `fa3.quantize` writes it."""
    return in_key_order(v.view(torch.uint8)).contiguous().view(E4M3)


@pytest.fixture(params=["linear", "exact", "one_level"])
def changes(request, monkeypatch):
    """Have the planner take other configs, as the environment says."""
    kind, rows = request.param, tilings.TILINGS_IN_FP8
    if kind != "linear":
        rows = (row._replace(config=replace(row.config, **{kind: True})) for row in rows)
    monkeypatch.setattr(tilings, "TILINGS_IN_FP8", tuple(rows))
    monkeypatch.setitem(SETTINGS, "FA3_FP8_EXP", "exact" if kind == "exact" else "linear")
    forget_prepared_calls()
    yield kind
    forget_prepared_calls()


HEADS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (32, 32), (64, 224)]


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "window"),
    [
        (*heads, window)
        for number, heads in enumerate(HEADS)
        for window in ((Window(-1, 0), Window(), Window(70, 30)), (Window(-1, 0),))[number > 3]
    ],
)
def test_head_sizes_and_windows(head_dim, head_dim_v, window, where):
    shapes = (2, 150, 4, head_dim), (2, 333, 2, head_dim), (2, 333, 2, head_dim_v)
    check(*(drawn(*shape, seed=i, where=where) for i, shape in enumerate(shapes)), window)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "window"),
    [(*heads, (Window(-1, 0), Window(3000, 30))[n % 2]) for n, heads in enumerate(HEADS)],
)
def test_sums_of_many_blocks(changes, head_dim, head_dim_v, window):
    """Keys grow towards the first, which is loaded last: references follow, and O."""
    shapes = (2, 150, 4, head_dim), (2, 4333, 2, head_dim), (2, 4333, 2, head_dim_v)
    q, k, v = (drawn(*shape, seed=i, where="cuda") for i, shape in enumerate(shapes))
    k *= torch.linspace(3, 0.1, 4333, device="cuda")[:, None, None]
    check(q, k, v, window, tolerance=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_means_of_many_equal_values(head_dim):
    """Every sum of some keys is added to O, and once."""
    q, k = (torch.zeros(1, n, 1, head_dim, device="cuda").to(E4M3) for n in (64, 1 << 16))
    v = torch.ones_like(k, dtype=torch.float32).to(E4M3)
    assert (fa3.flash_attn_func(q, k, v, causal=True).float() - 1).abs().max() <= 1e-2
    # So many heads that a CTA has all keys. Sums of values of one sign become too small.
    q, k = q.expand(-1, -1, 264, -1).contiguous(), k[:, : 1 << 14]
    v = (drawn(*k.shape, seed=0, where="cuda").clamp(-3, 3) / 6 + 1).to(E4M3)
    assert (fa3.flash_attn_func(q, k, v) / v.double().mean(1, True) - 1).mean().abs() <= 1e-2


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(0, 400), st.sampled_from(HEADS), st.data())
def test_random_calls(where, seqlen_q, seqlen_k, heads, data):
    head_dim, head_dim_v = heads
    group, heads_kv, batch = (data.draw(st.integers(1, most)) for most in (4, 3, 3))
    window = Window(data.draw(st.integers(-1, 200)), data.draw(st.integers(-1, 100)))
    q = drawn(batch, seqlen_q, heads_kv * group, head_dim, seed=1, where=where)
    k = drawn(batch, seqlen_k, heads_kv, head_dim, seed=2, where=where)
    v = drawn(batch, seqlen_k, heads_kv, head_dim_v, seed=3, where=where)
    if 0 in (seqlen_q, seqlen_k):
        tensors = (x.to(E4M3) for x in (q, k, v))
        out, lse = fa3.flash_attn_func(*tensors, window_size=window, return_lse=True)
        assert not out.float().any() and (lse == -torch.inf).all()
    else:
        check(q, k, v, window)


@pytest.mark.parametrize("name", ["softcap", "alibi_slopes", "sinks", "score"])
def test_scores_and_sinks(name, where):
    arguments = {
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]).to(where),
        "sinks": torch.tensor([20.0, 0.0, -3.0, 1.0]).to(where),
        "score": RelativeBias(2 * drawn(4, 33, seed=7, where=where), 16),
    }
    shapes = (2, 200, 4, 128), (2, 300, 2, 128), (2, 300, 2, 128)
    tensors = (drawn(*shape, seed=i, where=where) for i, shape in enumerate(shapes))
    # The softcap's tanh is approximate.
    check(*tensors, Window(-1, 0), tolerance=2e-2, **{name: arguments[name]})


def test_hard_values(changes, where):
    """Outliers as FlashAttention-3 draws them, keys that grow, and logits of other sizes."""
    for kind in ("outliers", "growing", "shrinking", "negative", "large", "small", "equal"):
        q, k, v = (drawn(1, 512, 2, 128, seed=i, where=where) for i in range(3))
        if kind == "outliers":
            masks = (drawn(1, 512, 2, 128, seed=i + 5, where=where) for i in range(3))
            q, k, v = (x + 10 * y * (y.abs() > 3.29) for x, y in zip((q, k, v), masks, strict=True))
        elif kind in ("growing", "shrinking"):
            ends = (0.1, 8) if kind == "growing" else (8, 0.1)
            k = k * torch.linspace(*ends, 512, device=where)[:, None, None]
        elif kind == "negative":
            q, k = -q.abs(), k.abs()
        else:
            q = q * {"large": 8.0, "small": 1e-3, "equal": 0.0}[kind]
        check(q, k, v, Window(-1, 0), tolerance=1e-2)


def test_a_nan_is_no_hidden_score(changes):
    q, k, v = (drawn(1, 9, 1, 32, seed=i, where="cpu") for i in range(3))
    q[0, 3] = torch.nan
    for one in fa3.flash_attn_func(*(x.to(E4M3) for x in (q, k, v)), return_lse=True):
        assert one.isnan().view(9, -1).all(1).tolist() == [i == 3 for i in range(9)]


@pytest.mark.parametrize(("above", "error"), [(9, 0.04), (10, 0.04), (11, 0.18)])
def test_one_score_far_above_others(above, error, changes, where):
    """It comes first, and its value is 0: the others' values are the output."""
    q, k, v = (drawn(1, n, 2, 64, seed=i, where=where) for i, n in enumerate((64, 4096, 4096)))
    q[..., 0], k[..., 0], v = 8.0, 0.0, v + 1
    q[..., 1:] *= 0.9
    k[:, -1], v[:, -1], k[:, -1, :, 0] = 0.0, 0.0, above
    call, exact = call_of(q, k, v)
    right, right_lse = dense(*exact, 64**-0.5, Window())
    out, lse = fa3.flash_attn_func(**call, return_lse=True, schedule="single")
    error += 0.04 * (changes == "one_level")  # Sums of values of one sign are too small.
    assert rms(out - right) <= error * rms(right) * (1.0 if is_linear() else 0.25)
    assert (lse - right_lse).abs().max() <= (SMALL_OF_LINEAR if is_linear() else 5e-3)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_as_one_by_one(head_dim, causal, where):
    ends, used = (
        torch.tensor(x).int().to(where) for x in ((0, 5, 305, 305, 434, 435), (5, 290, 0, 129, 1))
    )
    q, k, v = (
        drawn(heads, 435, head_dim, seed=i, where=where).to(E4M3).transpose(0, 1)
        for i, heads in enumerate((4, 2, 2))
    )
    k.view(torch.uint8)[295:305] = v.view(torch.uint8)[295:305] = 0x7F  # NaN that does not count
    scales = {name: drawn(5, 2, seed=9, where=where).abs() + 0.5 for name in NAMES}
    with poisoned_allocations():
        out, lse = fa3.flash_attn_varlen_func(
            q, k, v, ends, ends, 300, 300, None, used, causal=causal, return_lse=True, **scales
        )
    assert out.dtype == torch.bfloat16
    for i in (0, 1, 3, 4):  # all that have rows
        begin, end = ends[i : i + 2].tolist()
        keys = slice(begin, begin + used[i])
        one, one_lse = fa3.flash_attn_func(
            q[None, begin:end], k[None, keys], v[None, keys], causal=causal, return_lse=True,
            **{name: scale[i : i + 1] for name, scale in scales.items()},
        )  # fmt: skip
        assert rms(out[begin:end] - one[0]) <= 0.02 * rms(one)
        torch.testing.assert_close(lse[:, begin:end], one_lse[0], rtol=1e-5, atol=SMALL)


def test_scales_may_be_views_and_may_be_left_out(where):
    q, k, v = (drawn(2, 100, 4, 64, seed=i, where=where).to(E4M3) for i in range(3))
    scales = {name: torch.full((1, 1), 0.5, device=where).expand(2, 4) for name in NAMES}
    out = fa3.flash_attn_func(q, k, v, **scales)
    for given_scales, value in ((scales, 0.5), ({}, 1.0)):
        full = {name: torch.full((2, 4), value, device=where) for name in NAMES}
        assert torch.equal(*(fa3.flash_attn_func(q, k, v, **x) for x in (given_scales, full)))
    into = torch.empty(2, 100, 4, 64, dtype=torch.bfloat16, device=where)
    assert fa3.flash_attn_func(q, k, v, **scales, out=into) is into and torch.equal(into, out)


@pytest.mark.parametrize("kind, size", [(torch.half, 64), (torch.float, 64), (torch.float, 256)])
def test_the_output_may_be_of_another_type(kind, size, where):
    dtype, shape = E4M3 if kind is torch.half else torch.bfloat16, (2, 100, 4, size)
    q, k, v = (drawn(*shape, seed=i, where=where).to(dtype) for i in range(3))
    right = fa3.flash_attn_func(q, k, v, causal=True)
    poisoned = torch.full(shape, torch.nan, dtype=kind, device=where)
    out = fa3.flash_attn_func(q, k, v, causal=True, out=poisoned.clone())
    rows, ends = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 100, 200])
    call, out_of_rows = (*rows, *[ends.int().to(where)] * 2, 100, 100), poisoned.flatten(0, 1)
    fa3.flash_attn_varlen_func(*call, causal=True, out=out_of_rows)
    for found in (out, out_of_rows.view(shape)):
        assert 0 < (found - right).abs().max() <= 2.0**-7 * right.abs().max()


@pytest.mark.parametrize(("is_packed", "has_vt"), [(False, False), (False, True), (True, False)])
def test_torch_compile(is_packed, has_vt, where):
    q, k, v = (drawn(200, 4, 64, seed=i, where=where).to(E4M3) for i in range(3))
    ends = torch.tensor([0, 60, 200], dtype=torch.int32, device=where)
    scales = {name: torch.full((2 if is_packed else 1, 4), 0.5, device=where) for name in NAMES}

    def attend(q, k, v, **scales):
        if is_packed:
            call = q, k, v, ends, ends, 140, 140
            return fa3.flash_attn_varlen_func(*call, return_lse=True, **scales)
        return fa3.flash_attn_func(q[None], k[None], v, return_lse=True, **scales)

    v = v if is_packed else transposed(v[None]) if has_vt else v[None]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(q, k, v, **scales), attend(q, k, v, **scales), strict=True):
        assert torch.equal(one, other)


def test_calls_without_sequences_need_no_kernel():
    """The mean number of keys of a sequence would be a division by zero."""
    rows, ends = torch.zeros(5, 4, 64).to(E4M3), torch.zeros(1).int()
    with noting_launches() as notes:
        fa3.flash_attn_varlen_func(rows, rows, rows, ends, ends, 5, 5)
        assert not notes.launches


def test_problems_of_shapes():
    shapes, q = [(2, 100, 4, 64)] * 3, torch.zeros(2, 100, 4, 64).to(E4M3)
    assert Problem.of(*shapes, causal=True, dtype=FP8) == Problem.of(q, q, q, causal=True)


@pytest.mark.gpu
def test_schedules_graphs_and_pairs_of_ctas():
    q, k, v = (drawn(1, 700, 4, 128, seed=i, where="cuda") for i in range(3))
    call, _ = call_of(q, k, v)
    right = fa3.flash_attn_func(**call, causal=True)
    for schedule in ("single", "dynamic", "list", "split"):
        out = fa3.flash_attn_func(**call, causal=True, schedule=schedule)
        is_split = schedule == "split"
        assert rms(out - right) <= 0.02 * rms(right) * is_split, schedule
    graph, out = captured(lambda: fa3.flash_attn_func(**call, causal=True))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, right)
    gpu = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    pairs = ForwardConfig(128, 128, q_stages=2, cluster_m=2)
    plan = plan_forward(Problem.of(call["q"], call["k"], call["v"]), gpu, config=pairs)
    assert torch.equal(fa3.flash_attn_func(**call, plan=plan), fa3.flash_attn_func(**call))


@pytest.mark.compiles
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_machine_code(head_dims, changes):
    spec = AttentionSpec(FP8, *head_dims, Band(right=True), other_out="bfloat16")
    # Slopes give each row a shift of its own.
    if changes != "linear" and head_dims == (128, 128):
        spec = replace(spec, scores=(Template.of(Alibi(torch.zeros(4), True)),))
    problem = Problem(spec, 2, 1024, 1024, 16, 1, Window(-1, 0))
    config = tilings.general_tiling(spec)
    assert report_of(plan_forward(problem, config=config).kernel(), 1).count("QGMMA") > 0
    if changes == "linear":  # The kernel before: a thread has four keys of 8 columns each time.
        report = report_of(Transpose(head_dims[0]), 8)
        assert report.count("LDG.E.64") == 4 and report.count("STG.E") == 8
