"""A softmax with a fixed reference: which calls take it, and what comes of it on a Hopper GPU."""

import itertools
import math
import random
from dataclasses import replace

import problems
import pytest
import torch
from gpu_checks import captured, used_counters
from pairs import pairs
from problems import CAUSAL, DTYPES, attend, make_operands, make_problem
from reference import check_attention, dense, visible
from score_problems import RelativeBias

import fa3
from fa3.calls.execution import attend_by, launcher
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning import tilings
from fa3.planning.costs import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import FIXED_FLOPS, choose_config
from fa3.primitives.softmax import RowMax
from fa3.primitives.wgmma import REGISTERS, ROWS, ROWS_OF_WARP
from fa3.problem import FP8, Problem, Window
from fa3.schedules import SCHEDULES, TileList
from fa3.schedules.recompute import ANY, MOST_WARPS, RecomputeMask
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

LARGE = make_problem(4, 4096, 4096, 4, 4, 128, CAUSAL)
HALF = replace(LARGE, spec=replace(LARGE.spec, dtype="float16"))
SLOPES = torch.zeros(16)
BIAS = RelativeBias(torch.zeros(16, 33), reach=16)


def with_scores(problem: Problem, *scores) -> Problem:
    return replace(problem, spec=replace(problem.spec, scores=tuple(map(Template.of, scores))))


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_large_calls_get_it(schedule):
    assert plan_forward(LARGE, schedule=schedule).config.fixed_row_max


def test_plans_say_so_and_small_calls_do_not(monkeypatch):
    small, plan = make_problem(1, 1024, 1024, 1, 8, 128, CAUSAL), plan_forward(LARGE)
    assert small.flops < FIXED_FLOPS < LARGE.flops
    assert not plan_forward(small).config.fixed_row_max
    assert plan.name.endswith("fixed row max")
    assert plan.predict().launch_us > H200.costs.launch_us
    config = ForwardConfig(128, 128, q_stages=2, cluster_m=2, fixed_row_max=True)
    assert config.recompute == ForwardConfig(128, 128, q_stages=2)  # needs no cluster
    monkeypatch.setattr(tilings, "ROW_MAX", "online")
    assert not plan_forward(LARGE).config.fixed_row_max


def test_float16_has_it_and_fp8_does_not():
    assert plan_forward(HALF).config.fixed_row_max
    fp8 = replace(HALF, spec=replace(HALF.spec, dtype=FP8, other_out="float16"))
    assert not plan_forward(fp8).config.fixed_row_max
    config = replace(choose_config(fp8, H200), fixed_row_max=True)
    with pytest.raises(ValueError, match="fixed_row_max must be False in FP8"):
        plan_forward(fp8, config=config)


def test_scores_get_it_that_are_bounded_or_leave_logits_where_they_are():
    for score in (Alibi(SLOPES, is_causal=True), Alibi(SLOPES, is_causal=False), Softcap(50.0)):
        assert plan_forward(with_scores(LARGE, score)).config.fixed_row_max
    few, many, to_both_sides = Softcap(5.0), Softcap(61.0), Alibi(SLOPES, is_causal=False)
    capped = LARGE, Softcap(50.0), to_both_sides
    for refused in ((LARGE, few), (LARGE, many), capped, (LARGE, BIAS), (HALF, to_both_sides)):
        assert not plan_forward(with_scores(*refused)).config.fixed_row_max


def test_a_reference_of_0_where_nothing_overflows_or_somebody_looks():
    online_max, fixed = ForwardConfig(128, 128), ForwardConfig(128, 128, fixed_row_max=True)
    for dtype, config, bound, expected in (
        ("bfloat16", online_max, 5.0, RowMax.ZERO),
        ("bfloat16", online_max, 6.0, RowMax.ONLINE),
        ("bfloat16", fixed, 6.0, RowMax.ZERO),
        ("bfloat16", fixed, math.inf, RowMax.FIXED),
        ("float16", fixed, 5.0, RowMax.ZERO),
        ("float16", fixed, 6.0, RowMax.RISING),
    ):
        spec = replace(LARGE.spec, dtype=dtype)
        assert Forward(spec, config, TileList).format.row_max(bound) is expected


def test_a_tile_has_no_more_warps_than_there_are_marks_for():
    assert max(REGISTERS) * ROWS // ROWS_OF_WARP <= MOST_WARPS


WAYS = (
    ("single", {}),
    ("static", {"cluster_m": 2}),
    ("list", {}),
    ("list", {"cluster_h": 2}),
    ("dynamic", {}),
    ("split", {}),
    ("split", {"cluster_h": 2}),
)
"""Schedules and clusters."""


def plan_of(problem: Problem, schedule: str = "list", fixed: bool = True, **cluster):
    return problems.plan_of(problem, schedule, fixed_row_max=fixed, **cluster)


def first_launch(plan, q, k, v, alibi_slopes=None) -> tuple[set, torch.Tensor, torch.Tensor]:
    """What the first launch of a call marks, as (batch, head, query), and what it writes."""
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = q.new_full((batch, heads, seqlen_q), torch.nan, dtype=torch.float32)
    prepared, found = attend_by(plan, q.device).__self__, set()

    def look(*arguments):
        (words,) = (a for a in arguments[7:] if isinstance(a, torch.Tensor))
        marks = RecomputeMask(words, plan.recompute.schedule.order)
        numbers = words[: marks.size].tolist()
        for index in range(marks.order.num_tiles):
            tile, of_tile = marks.order.tile(index), set()
            for warp in range(MOST_WARPS):
                bits = numbers[marks.rows(index, warp)]
                first = tile.m_block * plan.config.tile_m + warp * ROWS_OF_WARP
                of_tile |= {first + row for row in range(ROWS_OF_WARP) if bits >> row & 1}
            assert bool(of_tile) == bool(numbers[marks.group(index // 32)] >> index % 32 & 1)
            found.update((tile.batch, tile.head, row) for row in of_tile)
        assert bool(found) == bool(numbers[ANY])
        words.zero_()

    modifiers = None if alibi_slopes is None else (alibi_slopes,)
    look = launcher(look, plan.launches()[1].arguments)
    values = {
        "q": q, "k": k, "v": v, "o": out, "address_of_lse": lse.data_ptr(), "modifiers": modifiers,
        "softmax_scale": q.shape[3] ** -0.5, "descales": None,
    }  # fmt: skip
    replace(prepared, launchers=(prepared.launchers[0], look)).run(values)
    return found, out, lse


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window"),
    [
        *((dtype, 128, window) for dtype in DTYPES for window in (Window(), CAUSAL)),
        *((dtype, *one) for dtype in DTYPES for one in ((64, Window(300, 40)), (256, CAUSAL))),
        *(("bfloat16", 128, Window(300, 40)), ("bfloat16", 96, CAUSAL)),
        ("bfloat16", 192, Window()),
    ],
)
def test_ordinary_scores(dtype, head_dim, window, device):
    problem = make_problem(2, 1100, 1500, 2, 2, head_dim, window, dtype)
    q, k, v = make_operands(problem, device=device)
    seen = {}
    for schedule, cluster in WAYS if head_dim == 128 else WAYS[::3]:
        plan = plan_of(problem, schedule, **cluster)
        assert not first_launch(plan, q, k, v)[0]
        out, lse = attend(q, k, v, window, plan=plan)
        # Parts have row maxima of their own, and pairs of rows those from the pair's first block.
        key = plan.name if schedule == "split" else plan.config.cluster_m
        if key not in seen:
            check_attention(out, lse, q, k, v, window=window)
        expected = seen.setdefault(key, (out, lse))
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]), plan.name
    assert not used_counters()


@pytest.mark.parametrize(
    ("logit", "dtype", "head_dim", "schedule", "cluster"),
    [
        *((120, "bfloat16", 128, *way) for way in WAYS),
        *((120, "bfloat16", size, *WAYS[number]) for size in (64, 256) for number in (1, 4, 5)),
        *((logit, "float16", 128, *WAYS[1]) for logit in (9, 20, 80, 120)),
        *((logit, "float16", size, *WAYS[5]) for logit in (20, 120) for size in (64, 256)),
    ],
)
def test_tiles_whose_scores_outgrow_the_reference_are_computed_again(
    logit, dtype, head_dim, schedule, cluster, device
):
    problem = make_problem(2, 900, 1300, 2, 2, head_dim, dtype=dtype)
    q, k, v = make_operands(problem, device=device)
    rows = {(0, 5, 1), (0, 600, 3), (1, 899, 0), (1, 301, 2)}
    for batch, row, head in rows:
        toward = q[batch, row, head].float()
        k[batch, 7 + row % 50, head // 2] = logit * head_dim**0.5 / toward.norm() ** 2 * toward
    plan = plan_of(problem, schedule, **cluster)
    failed, first, first_lse = first_launch(plan, q, k, v)
    assert failed == {(batch, head, row) for batch, row, head in rows if logit == 120}
    online_max, follows_lse = attend(q, k, v, Window(), plan=plan_of(problem, fixed=False))
    for _ in range(2):
        out, lse = attend(q, k, v, Window(), plan=plan)
        check_attention(out, lse, q, k, v, lse_tolerance=3e-4)
        for batch, head, row in failed:
            first[batch, row, head] = online_max[batch, row, head]
            first_lse[batch, head, row] = follows_lse[batch, head, row]
        # Of the rows that did not fail no bit has changed.
        assert torch.equal(out, first) and torch.equal(lse, first_lse)
        assert not used_counters()


def test_keys_that_are_not_there_are_no_guess(device):
    """All logits are near -60; the zeros behind the last key would have logits of 0."""
    for seqlen_k in (255, 256, 257, 4095):
        problem = make_problem(1, 300, seqlen_k, 1, 2, 128)
        q, k, v = make_operands(problem, device=device)
        q, k = q.abs() + 1, k * 0.05 - 60 / (2**0.5 * 128**0.5 * 1.3)
        plan = plan_of(problem)
        assert not first_launch(plan, q, k, v)[0]
        out, lse = attend(q, k, v, Window(), plan=plan)
        assert lse.max() < -20
        check_attention(out, lse, q, k, v, lse_tolerance=1e-3)


@pytest.mark.parametrize(("head_dim", "cluster"), [(64, {}), (128, {}), (128, {"cluster_m": 2})])
def test_rows_that_see_nothing_of_their_tiles_first_block(head_dim, cluster, device):
    for offset in (0, 1, 63, 127, 128, 300):
        problem = make_problem(1, 700, 700 + offset, 1, 2, head_dim, CAUSAL)
        q, k, v = make_operands(problem, device=device)
        plan = plan_of(problem, **cluster)
        assert not first_launch(plan, q, k, v)[0]
        out, lse = attend(q, k, v, CAUSAL, plan=plan)
        check_attention(out, lse, q, k, v, window=CAUSAL)


@pairs(fixed=(True, False), head_dim=(64, 128), alibi=(False, True), dtype=DTYPES)
def test_no_bit_depends_on_keys_that_a_row_does_not_see(fixed, head_dim, alibi, dtype, device):
    problem = make_problem(1, 1024, 1024, 2, 2, head_dim, CAUSAL, dtype)
    modifiers = {"alibi_slopes": torch.rand(4, device=device)} if alibi else {}
    if alibi:
        problem = with_scores(problem, Alibi(SLOPES[:2], is_causal=True))
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, fixed=fixed)
    out, lse = attend(q, k, v, CAUSAL, plan=plan, **modifiers)
    generator = torch.Generator(device).manual_seed(1)
    for first, change in itertools.product((601, 1000), (1.0, 30.0, 3000.0, float("nan"))):
        other = k.clone()
        noise = torch.randn(k[:, first:].shape, device=device, generator=generator)
        other[:, first:] = (noise * change).to(k.dtype)
        changed, changed_lse = attend(q, other, v, CAUSAL, plan=plan, **modifiers)
        assert torch.equal(out[:, :first], changed[:, :first])
        assert torch.equal(lse[..., :first], changed_lse[..., :first])
        assert not torch.equal(out[:, first:], changed[:, first:])


@pytest.mark.parametrize("softcap", [0.0, 60.0])
def test_values_of_any_size(softcap, device, always_fixed):
    for power, logits in itertools.product((-110, -90, 30, 60, 100, 120), (-40.0, 0.0, 46.0)):
        problem = make_problem(1, 300, 700, 1, 2, 128)
        q, k, v = make_operands(problem, device=device)
        # Scores of about 0 in the last block, and of `logits` before.
        q, k = q.abs() + 1, k * 0.05
        k[:, :500] += logits / (1.3 * 128**0.5 * 1.4)
        v = v * 2.0**power
        out, lse = attend(q, k, v, Window(), softcap=softcap)
        expected, expected_lse = attend(q, k, v * 2.0**-power, Window(), softcap=softcap)
        assert out.isfinite().all()
        torch.testing.assert_close(
            out.double() * 2.0**-power, expected.double(), rtol=2e-2, atol=4e-3
        )
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
        check_attention(
            expected, expected_lse, q, k, v * 2.0**-power, softcap=softcap, lse_tolerance=2e-2
        )
        assert not used_counters()


@pairs(window=(Window(), CAUSAL, Window(600, -1)), fixed=(True, False), dtype=DTYPES)
def test_visible_scores_of_minus_infinity(fixed, window, dtype, device):
    """The last keys are as good as hidden, also where they are all of a row's first blocks."""
    for count, low in itertools.product((1, 128, 256, 300), (0.0, -2000.0)):
        problem = make_problem(1, 640, 640, 1, 2, 128, window, dtype)
        q, k, v = make_operands(problem, device=device)
        q[..., 0] = 1
        k[..., 0] = low  # scores that vanish beside the row max 0
        k[:, -count:, :, 0] = -torch.inf
        out, lse = attend(q, k, v, window, plan=plan_of(problem, fixed=fixed))
        seen = visible(640, 640, window, device)
        seen[:, -count:] = False
        scores = (
            torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat(1, 1, 2, 1)) * 128**-0.5
        )
        scores = scores.masked_fill(~seen, -torch.inf)
        exact_lse = scores.logsumexp(-1)
        weights = (scores - exact_lse.masked_fill(exact_lse.isinf(), 0.0)[..., None]).exp()
        exact = torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat(1, 1, 2, 1))
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        assert not used_counters()


@pairs(window=(Window(), CAUSAL, Window(200, 0)), dtype=DTYPES)
def test_keys_without_a_guess(window, dtype, device):
    """Those that it is taken from have scores of -inf, in every block; others see to the row."""
    problem = make_problem(1, 384, 640, 1, 2, 128, window, dtype)
    for high in (0.0, -300.0, 300.0):
        q, k, v = make_operands(problem, device=device)
        q, k = q.abs() + 1, k * 0.05 + high / (1.8 * 128**0.5)
        q[..., 0], k[..., 0] = 1, 0
        k[:, torch.arange(640) % 128 < 32, :, 0] = -torch.inf
        expected = attend(q, k, v, window, plan=plan_of(problem, fixed=False))
        out, lse = attend(q, k, v, window, plan=plan_of(problem))
        assert out.isfinite().all() and lse.isfinite().all()
        torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-3)
        assert not used_counters()


@pairs(
    window=(Window(), CAUSAL, Window(70, -1), Window(100, 10)),
    tiling=((64, {}), (128, {"cluster_m": 2}), (256, {})),
    fixed=(True, False),
)
def test_warpgroups_without_a_block_in_common(window, tiling, fixed, device):
    """Some skip blocks at the begin or at the end, some lie past the last query."""
    head_dim, cluster = tiling
    for seqlen_q in (1, 60, 64, 65, 200, 577):
        tight = window.tighten(seqlen_q, seqlen_q + 190)
        problem = make_problem(2, seqlen_q, seqlen_q + 190, 1, 2, head_dim, tight)
        q, k, v = make_operands(problem, device=device)
        for schedule in ("list", "split"):
            plan = plan_of(problem, schedule, fixed, **cluster)
            out, lse = attend(q, k, v, tight, plan=plan)
            check_attention(out, lse, q, k, v, window=tight)


def test_values_as_large_as_the_sum_of_all_keys_allows(device):
    """The online softmax overflows here; sums of the fixed one are small: no row fails."""
    problem = make_problem(1, 256, 1024, 1, 2, 128)
    q, k, v = make_operands(problem, device=device)
    q, v = q * 0, v * 0 + 2.0**120
    v[..., 0] = 0
    plan = plan_of(problem)
    assert not first_launch(plan, q, k, v)[0]
    out, _ = attend(q, k, v, Window(), plan=plan)
    assert (out[..., 1:] == 2.0**120).all() and (out[..., 0] == 0).all()


def test_sinks_far_above_the_first_keys(device, always_fixed):
    problem = make_problem(1, 128, 512, 1, 2, 128)
    q, k, v = make_operands(problem, device=device)
    q, k = q.abs() + 1, k * 0.01
    k[:, :300] += 86 / (1.8 * 128**0.5)
    sinks = torch.tensor([104.0, 20.0], device=device)
    out, lse = attend(q, k, v * 2.0**15, Window(), sinks=sinks)
    check_attention(out, lse, q, k, v * 2.0**15, sinks=sinks, lse_tolerance=1e-2)
    assert out[:, :, 0].count_nonzero() > 0.9 * out[:, :, 0].numel()


def test_sums_that_vanish(device):
    """ALiBi: the guess is without biases, which put the keys that a row sees far below it."""
    problem = make_problem(1, 128, 256, 1, 2, 128)
    problem = with_scores(problem, Alibi(SLOPES[:2], is_causal=False))
    q, k, v = make_operands(problem, device=device)
    slopes = torch.tensor([1.0, 0.0], device=device)
    q, k = q.abs() + 5, -k.abs() - 2
    k[:, 128] *= -1  # one of the keys that the guess is taken from
    plan = plan_of(problem)
    for power in (0, -100):
        failed, *_ = first_launch(plan, q, k, v * 2.0**power, slopes)
        # Such small values are looked at again under any guess.
        assert {head for _, head, _ in failed} == ({0} if power == 0 else {0, 1})
        out, _ = attend(q, k, v * 2.0**power, Window(), plan=plan, alibi_slopes=slopes)
        exact, _ = dense(q, k, v * 2.0**power, alibi_slopes=slopes)
        error = (out.double() - exact).abs().max() * 2.0**-power
        assert error <= 2.0**-7 * v.abs().max()


def test_a_graph_marks_and_wipes_out(device):
    problem = make_problem(1, 700, 900, 2, 2, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    plan = plan_of(problem, "dynamic")
    attend(q, k, v, CAUSAL, plan=plan)
    graph, (out, lse) = captured(
        lambda: fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, plan=plan)
    )
    for factor in (1, 100, 1, 100, 100, 1):
        q2, k2, _ = make_operands(problem, seed=factor, device=device)
        q.copy_(q2 * factor), k.copy_(k2)
        assert bool(first_launch(plan, q, k, v)[0]) == (factor > 1)
        out.fill_(torch.nan)
        graph.replay()
        check_attention(out, lse, q, k, v, window=CAUSAL, lse_tolerance=1e-3)


@pytest.mark.parametrize("seed", range(32))
def test_random_calls(seed, device, always_fixed):
    draw = random.Random(seed)
    heads_kv, ratio = draw.choice(((1, 1), (2, 1), (1, 4), (2, 3)))
    seqlen_q, seqlen_k = draw.randint(1, 1200), draw.randint(1, 1500)
    left, right = (draw.choice((-1, draw.randint(0, 600))) for _ in range(2))
    window = draw.choice((Window(), CAUSAL, Window(left, right).tighten(seqlen_q, seqlen_k)))
    head_dim, dtype = draw.choice((64, 128, 256, 8 * draw.randint(1, 32))), [*DTYPES][seed % 2]
    batch = draw.randint(1, 3)
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, ratio, head_dim, window, dtype)
    q, k, v = make_operands(problem, seed, device)
    q = q * draw.choice((1, 1, 1, 5, 100))
    modifiers = {}
    if draw.random() < 0.4:
        steepest = draw.choice((0.01, 0.2, 1.0))
        modifiers["alibi_slopes"] = steepest * torch.rand(heads_kv * ratio, device=device)
    if draw.random() < 0.3:
        modifiers["sinks"] = 3 * torch.randn(heads_kv * ratio, device=device)
    out, lse = attend(q, k, v, window, **modifiers)
    check_attention(out, lse, q, k, v, window=window, lse_tolerance=1e-3, **modifiers)
    assert not used_counters()
