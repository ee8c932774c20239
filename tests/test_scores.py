"""Scores, masks and sinks on the CPU and on a Hopper GPU, against dense attention in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from gradients import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs, places
from problems import (
    CAUSAL,
    attend,
    make_operands,
    make_problem,
    poisoned_allocations,
    problems,
    run_plan,
)
from reference import check_attention
from score_problems import NOTHING, RECIPES, STRUCTURES, Recipe, Span, Stairs, modify, random_dense
from test_forward import SCHEDULE_TYPES, SMALL_CONFIGS, SMALL_GPU, SMALL_TILES

import fa3
from fa3.calls import values as calls_values
from fa3.planning.planner import plan_forward
from fa3.problem import Problem, Window
from fa3.reference.walker import steps

SMALL_HEAD_DIMS = st.sampled_from([32, 40, 64])
EVERYTHING = Recipe(5.0, 2, "float32", "relative", "documents")


def check(problem: Problem, arguments: dict, operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a call, and check what comes of it."""
    window = problem.window
    out, lse = attend(*operands, window, **arguments)
    tolerance = 1e-4 if out.is_cuda else 2e-5
    check_attention(out, lse, *operands, window=window, lse_tolerance=tolerance, **arguments)
    return out, lse


# ------------------------------------------------------------------------------- combinations


@settings(max_examples=80)
@given(
    problems(1, 260, SMALL_HEAD_DIMS),
    RECIPES,
    st.sampled_from(SMALL_CONFIGS),
    st.sampled_from(SCHEDULE_TYPES),
    st.integers(0, 1000),
)
def test_combinations_match_dense_attention(problem, recipe, config, schedule, seed):
    q, k, v = make_operands(problem, seed)
    arguments = recipe.make(problem, q, seed)
    modified, modifiers = modify(problem, q, arguments)
    plan = plan_forward(modified, SMALL_GPU, config, schedule)
    out, lse = run_plan(plan, q, k, v, 0.125, modifiers.tensors)
    check_attention(out, lse, q, k, v, 0.125, problem.window, lse_tolerance=2e-5, **arguments)


# -------------------------------------------------------------------------------------- edges


@places(
    "softcap,window,dtype",
    cpu=[(softcap, Window(), "bfloat16") for softcap in (0.01, 1.0, 30.0, 1e4)],
    gpu=zip(
        (1.0, 5.0, 5.5, 30.0, 60.0, 61.0, 1e4),
        itertools.cycle((Window(), CAUSAL)),
        itertools.cycle(("bfloat16", "bfloat16", "float16")),
    ),
)
def test_softcap_bounds_large_logits(softcap, window, dtype, where):
    problem = make_problem(1, 140, 200)
    if where != "cpu":
        problem = make_problem(2, 700, 900, 2, 1, 128, window, dtype)
    q, k, v = make_operands(problem, device=where)
    _, lse = check(
        problem, NOTHING | {"softcap": softcap}, (q * 8, k * 8 if where == "cpu" else k, v)
    )
    most = softcap * (1 + 2**-11 * (where != "cpu")) + math.log(problem.seqlen_k)
    assert (lse <= most + 1e-4 * (where != "cpu")).all()


SINKS = (-math.inf, -1e30, -1e4, -5.0, 0.0, 20.0, 1e4, 1e30)


@pairs(softcap=(0.0, 20.0), window=(Window(), CAUSAL))
def test_extreme_sinks(window, softcap, where):
    """With a bounded softcap the softmax has no reference that would follow the scores."""
    for sink in SINKS:
        problem = make_problem(1, 230, 150, 2, window=window)
        if where != "cpu":
            problem = make_problem(2, 500, 300, 2, 1, 128, window)
        q, k, v = make_operands(problem, device=where)
        sinks = torch.tensor([sink, 1.0], device=where)
        out, lse = check(problem, NOTHING | {"sinks": sinks, "softcap": softcap}, (q, k, v))
        plain, plain_lse = attend(q, k, v, window, softcap=softcap)
        if sink == -math.inf or (where == "cpu" and sink < -1000):
            seen = plain_lse[:, 0].isfinite()
            assert sink != -math.inf or torch.equal(seen, lse[:, 0].isfinite())
            torch.testing.assert_close(lse[:, 0][seen], plain_lse[:, 0][seen])
            torch.testing.assert_close(out[:, :, 0], plain[:, :, 0], rtol=0.01, atol=1e-5)
        if sink >= 1e4:
            assert (out[:, :, 0] == 0).all()
            assert where != "cpu" or (lse[:, 0] == sinks[0]).all()


@pytest.mark.parametrize("queries", [1, 230])
def test_a_sink_that_is_nan_is_seen(queries):
    q, k, v = make_operands(make_problem(1, queries, 150, 2))
    sinks = torch.tensor([math.nan, 1.0])
    for out, lse in (
        fa3.flash_attn_func(q, k, v, sinks=sinks, return_lse=True),
        fa3.flash_attn_with_kvcache(q, k, v, sinks=sinks, return_lse=True),
    ):
        assert out[:, :, 0].isnan().all() and lse[:, 0].isnan().all()
        assert out[:, :, 1].isfinite().all() and lse[:, 1].isfinite().all()


def test_a_mask_that_hides_everything(where):
    problem = make_problem(1, 500, 900, 2, 1, 64 if where == "cpu" else 128)
    begin, end = torch.tensor([[0, 700], [0, 300]], device=where).int()
    sinks = torch.tensor([0.5, -1.0], device=where)
    for sink, least in ((None, sinks.new_full((2,), -math.inf)), (sinks, sinks)):
        arguments = NOTHING | {"mask": Span(begin, end), "sinks": sink}
        out, lse = check(problem, arguments, make_operands(problem, device=where))
        assert (out == 0).all() and (lse == least[:, None]).all()


# ------------------------------------------------------------------------------------- ranges


class Unlimited(Span):
    """The same mask without a word about its ranges."""

    def key_range(self, rows):
        return 0, rows.seqlen_k

    def open_range(self, rows):
        return 0, 0


def walked(problem: Problem, mask: fa3.Mask):
    """Return the steps of a problem with a mask."""
    q, _, _ = make_operands(problem)
    modified, modifiers = modify(problem, q, NOTHING | {"mask": mask})
    plan = plan_forward(modified, SMALL_GPU, SMALL_TILES)
    return list(steps(plan, modifiers.tensors))


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(300, 0)], ids=str)
def test_ranges_change_no_bit(window, where):
    """Blocks that a mask says it hides, or shows, are as if it had not said so."""
    problem = make_problem(1, 1000, 1000, 2, 1, 64 if where == "cpu" else 128, window)
    operands = make_operands(problem, device=where)
    begin, end = torch.tensor([[130, 700], [800, 701]], device=where).int()
    results = [
        check(problem, NOTHING | {"mask": mask(begin, end)}, operands) for mask in (Span, Unlimited)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=str)
def test_ranges_spare_blocks(window):
    """Keys 64-160 of the first head, 90-95 of the second, in blocks of 32."""
    problem = make_problem(1, 256, 256, 2, window=window)
    begin, end = torch.tensor([64, 90]).int(), torch.tensor([160, 95]).int()
    blocks = {
        (step.segment.tile.head, step.rows.start): step.blocks
        for step in walked(problem, Span(begin, end))
    }
    assert blocks[0, 128] == ((2, 2, 5, 5) if window == Window() else (2, 2, 4, 5))
    assert blocks[0, 0] == ((2, 2, 5, 5) if window == Window() else (2, 2, 2, 4))
    assert blocks[1, 0] == blocks[1, 128] == (2, 2, 2, 3)
    assert all(
        step.blocks.begin == 0 and step.blocks.full_begin == step.blocks.full_end
        for step in walked(problem, Unlimited(begin, end))
    )


@places(
    "head_dim,schedules",
    cpu=[(64, (None,))],
    gpu=[(head_dim, ("dynamic", "list", "single")) for head_dim in (64, 128, 256)],
)
def test_warpgroups_whose_keys_begin_far_apart(head_dim, schedules, where):
    """One lets more blocks go by than there are stages, while the producer still has to load them
    before it can tell which tile is next."""
    length, step = (900, 250) if where == "cpu" else (4096, 700)
    problem = make_problem(2, 300, length, 2, 2, head_dim)
    q, k, v = make_operands(problem, device=where)
    for schedule in schedules:
        out, lse = attend(q, k, v, mask=Stairs(step), schedule=schedule)
        check_attention(out, lse, q, k, v, mask=Stairs(step))


BUILT_IN = Recipe(20.0, 1, "q")


@pytest.mark.parametrize("number", range(STRUCTURES))
def test_random_combinations(number, device):
    """Four calls of a structure, and the gradients of four shorter ones."""
    for turn in range(4):
        seed = number + turn * STRUCTURES
        problem, recipe = random_dense(seed)
        operands = make_operands(problem, seed, device)
        arguments = recipe.make(problem, operands[0], seed, (1.0, 0.05, -0.05)[turn % 3])
        out, lse = attend(*operands, problem.window, **arguments)
        check_attention(out, lse, *operands, window=problem.window, **arguments)
        with poisoned_allocations():
            alone = fa3.flash_attn_func(*operands, window_size=problem.window, **arguments)
        assert torch.equal(alone, out)
        problem, recipe = random_dense(seed, longest=1100)
        operands = make_operands(problem, seed, device)
        arguments = recipe._replace(score=None).make(problem, operands[0], seed)
        weights = ((1, 0), (1, 1), (0, 1))[turn % 3]
        check_gradients(*operands, problem.window, weights, seed, **arguments)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("head_dim", "window"), [(64, Window()), (128, CAUSAL), (64, Window(3000, 0))], ids=str
)
def test_steep_alibi_over_long_sequences(head_dim, window, device):
    """Biases down to -16384, and a slope that still tells keys apart at that distance."""
    problem = make_problem(1, 16384, 16384, 2, head_dim=head_dim, window=window)
    slopes = torch.tensor([1.0, 2.0**-10], device=device)
    check(problem, NOTHING | {"alibi_slopes": slopes}, make_operands(problem, device=device))


def in_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy inside of a buffer of NaN, or of huge integers."""
    poison = torch.nan if tensor.is_floating_point() else 1 << 30
    buffer = tensor.new_full([size + 16 for size in tensor.shape], poison)
    view = buffer[(slice(8, -8),) * tensor.ndim]
    return view.copy_(tensor)


def poisoned(arguments: dict) -> dict:
    """Move every tensor of a call's modifiers into poison."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return in_poison(value)
        if isinstance(value, fa3.Score | fa3.Mask):
            tensors = {n: t for n, t in vars(value).items() if isinstance(t, torch.Tensor)}
            return replace(value, **{name: in_poison(t) for name, t in tensors.items()})
        return value

    return {name: move(value) for name, value in arguments.items()}


@pytest.mark.parametrize(
    ("recipe", "window"),
    [
        (BUILT_IN, CAUSAL),
        (EVERYTHING, Window(100, 30)),
        (Recipe(score="gate", mask="span"), CAUSAL),
        (Recipe(mask="prefix"), Window(100, 30)),
    ],
)
def test_nothing_outside_is_read(recipe, window, device):
    for lengths in ((1, 1), (130, 70), (200, 333)):
        problem = make_problem(2, *lengths, 2, 2, 64, window)
        operands = [in_poison(tensor) for tensor in make_operands(problem, device=device)]
        arguments = recipe.make(problem, operands[0])
        out, lse = attend(*operands, window, **poisoned(arguments))
        check_attention(out, lse, *operands, window=window, **arguments)


# ------------------------------------------------------------------------ scores that are too large

ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.fixture(params=[False, True])
def asserts(request, monkeypatch):
    """Whether assertions are on."""
    monkeypatch.setattr(calls_values, "ASSERTIONS", request.param)
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
    out = fa3.flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 0, 0)
    assert out.shape == q[0].shape
