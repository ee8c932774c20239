"""Scores, masks and sinks on the CPU: the executor against dense attention in float64."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_operands, make_problem, run_plan, windows
from reference import check_attention, dense
from score_problems import NOTHING, RECIPES, Gate, Recipe, RelativeBias, Span, Stairs, modify

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.gpu import Gpu
from fa3.planning.planner import plan_forward
from fa3.problem import Problem, Window
from fa3.reference.forward import steps
from fa3.schedules import SingleTile, StaticPersistent, TileList
from fa3.scores.masks import Rows

CAUSAL = Window(right=0)
SMALL_GPU = Gpu("small", num_sms=6, l2_bytes=1 << 17)
SMALL_TILES = ForwardConfig(128, 32)
CONFIGS = (SMALL_TILES, ForwardConfig(192, 48), ForwardConfig(128, 16, cluster_m=2))
EVERYTHING = Recipe(5.0, 2, "float32", "relative", "documents")
ALONE = (
    Recipe(softcap=20.0),
    Recipe(alibi_rank=1),
    Recipe(alibi_rank=2),
    Recipe(sinks="float32"),
    Recipe(sinks="q"),
    Recipe(score="relative"),
    Recipe(score="gate"),
    Recipe(mask="documents"),
    Recipe(mask="prefix"),
    Recipe(mask="span"),
)


@st.composite
def problems(draw) -> Problem:
    return make_problem(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.integers(1, 260)),
        seqlen_k=draw(st.integers(1, 260)),
        num_heads_kv=draw(st.integers(1, 2)),
        qhead_per_kvhead=draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([32, 40, 64])),
        window=draw(windows(largest=280)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
    )


def run(problem: Problem, arguments: dict, seed: int = 0, config=SMALL_TILES, schedule=None):
    """Execute a modified problem, and check the result."""
    q, k, v = make_operands(problem, seed)
    modified, modifiers = modify(problem, q, arguments)
    plan = plan_forward(modified, SMALL_GPU, config, schedule)
    out, lse = run_plan(plan, q, k, v, 0.125, modifiers.tensors)
    check_attention(out, lse, q, k, v, 0.125, problem.window, lse_tolerance=2e-5, **arguments)
    return out, lse


def call(problem: Problem, arguments: dict, operands=None):
    """Call the public function on a problem, and check the result."""
    q, k, v = operands or make_operands(problem)
    window = problem.window
    out, lse = fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, **arguments)
    check_attention(out, lse, q, k, v, window=window, lse_tolerance=2e-5, **arguments)
    return out, lse


# ------------------------------------------------------------------------------- combinations


@settings(max_examples=80)
@given(
    problems(),
    RECIPES,
    st.sampled_from(CONFIGS),
    st.sampled_from([SingleTile, StaticPersistent, TileList]),
    st.integers(0, 1000),
)
def test_combinations_match_dense_attention(problem, recipe, config, schedule, seed):
    arguments = recipe.make(problem, make_operands(problem)[0], seed)
    run(problem, arguments, seed, config, schedule)


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(40, 0), Window(30, 50)], ids=str)
@pytest.mark.parametrize("recipe", [*ALONE, EVERYTHING], ids=str)
def test_calls(recipe, window, poisoned_memory):
    problem = make_problem(2, 150, 230, 2, 2, window=window)
    q, _, _ = make_operands(problem)
    call(problem, recipe.make(problem, q))


@pytest.mark.parametrize("recipe", ALONE, ids=str)
def test_each_changes_the_output(recipe):
    """Combinations that change nothing would test nothing."""
    problem = make_problem(1, 150, 230, 2)
    q, k, v = make_operands(problem)
    arguments = recipe.make(problem, q)
    if arguments["softcap"]:
        arguments["softcap"] = 1.0
    plain, plain_lse = dense(q, k, v)
    out, lse = dense(q, k, v, **arguments)
    assert (out - plain).abs().max() > 0.02
    assert (lse - plain_lse).abs().max() > 0.02


def test_causal_is_the_window_of_alibi():
    """Behind the diagonal the bias needs no absolute value; the results are the same."""
    q, k, v = make_operands(make_problem(2, 100, 140, 2))
    slopes = torch.rand(2)
    out = fa3.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    same = fa3.flash_attn_func(q, k, v, window_size=(-1, 0), alibi_slopes=slopes)
    assert torch.equal(out, same)


def test_softcap_comes_before_the_biases():
    """A bias that is not capped moves the log-sum-exp as far as it is large."""
    problem = make_problem(1, 100, 140, 2)
    table = torch.full((2, 41), 100.0)
    arguments = NOTHING | {"softcap": 2.0, "score": RelativeBias(table, 20)}
    _, lse = call(problem, arguments)
    assert ((lse - 100 - math.log(140)).abs() <= 2).all()


# -------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("softcap", [0.01, 1.0, 30.0, 1e4])
def test_softcap_bounds_large_logits(softcap):
    problem = make_problem(1, 140, 200)
    q, k, v = make_operands(problem)
    _, lse = call(problem, NOTHING | {"softcap": softcap}, (q * 8, k * 8, v))
    assert (lse <= softcap + math.log(200)).all()


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(100, 0), Window(70, 30)], ids=str)
def test_slopes_may_be_negative(window):
    problem = make_problem(2, 150, 230, 2, 2, window=window)
    call(problem, NOTHING | {"alibi_slopes": torch.tensor([-0.5, -0.01, 0.0, 0.5])})


@pytest.mark.parametrize("sink", [-math.inf, -1e4, -1e30, 0.0, 1e4, 1e30])
@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=str)
def test_extreme_sinks(sink, window, poisoned_memory):
    problem = make_problem(1, 230, 150, 2, window=window)
    q, k, v = make_operands(problem)
    out, lse = call(problem, NOTHING | {"sinks": torch.tensor([sink, 1.0])}, (q, k, v))
    plain, plain_lse = fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True)
    if sink < -1000:
        seen = plain_lse[:, 0].isfinite()
        assert torch.equal(out[:, :, 0], plain[:, :, 0])
        torch.testing.assert_close(lse[:, 0][seen], plain_lse[:, 0][seen])
    if sink > 1000:
        assert (out[:, :, 0] == 0).all() and (lse[:, 0] == torch.tensor(sink)).all()


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


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -math.inf])])
def test_rows_without_keys(sinks, poisoned_memory):
    problem = make_problem(1, 230, 150, 2, window=CAUSAL)
    out, lse = call(problem, NOTHING | {"sinks": sinks})
    hidden = lse[:, :, :80]
    assert (out[:, :80] == 0).all()
    expected = torch.full((2, 1), -math.inf) if sinks is None else sinks[:, None]
    assert (hidden == expected).all()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_a_mask_that_hides_everything(sinks, poisoned_memory):
    problem = make_problem(1, 150, 230, 2)
    nothing = Span(torch.tensor([0, 5]).int(), torch.tensor([0, 3]).int())
    out, lse = call(problem, NOTHING | {"mask": nothing, "sinks": sinks})
    expected = torch.full((2, 1), -math.inf) if sinks is None else sinks[:, None]
    assert (out == 0).all() and (lse == expected).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_empty_tensors(sizes, poisoned_memory):
    problem = make_problem(**({"batch": 2, "num_heads_kv": 3} | sizes))
    q, _, _ = make_operands(problem)
    call(problem, EVERYTHING.make(problem, q))


def test_a_score_may_hide():
    """-inf from a score is a mask: whole blocks and rows of it, too."""

    @dataclass(frozen=True)
    class Hide(fa3.Score):
        mask: Span

        @cute.jit
        def score(self, logit, at):
            return logit if self.mask.visible(at) else -cutlass.Float32.inf

        def reference(self, logits, at):
            return logits.masked_fill(~self.mask.reference(at), -torch.inf)

    problem = make_problem(1, 150, 230, 2)
    span = Span(torch.tensor([70, 5]).int(), torch.tensor([170, 3]).int())
    out, lse = call(problem, NOTHING | {"score": Hide(span)})
    masked, masked_lse = call(problem, NOTHING | {"mask": span})
    assert torch.equal(out, masked) and torch.equal(lse, masked_lse)
    assert (lse[:, 1] == -math.inf).all()


def test_tensors_may_have_any_strides():
    problem = make_problem(2, 90, 130, 2, 2)
    q, _, _ = make_operands(problem)
    arguments = EVERYTHING.make(problem, q)
    slopes, sinks, table = (
        arguments["alibi_slopes"], arguments["sinks"], arguments["score"].table
    )  # fmt: skip
    strided = arguments | {
        "alibi_slopes": slopes.T.contiguous().T,
        "sinks": sinks.repeat_interleave(3)[::3],
        "score": RelativeBias(table.T.contiguous().T, 20),
    }
    for a, b in zip(call(problem, arguments), call(problem, strided), strict=True):
        assert torch.equal(a, b)


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


@settings(max_examples=40)
@given(problems(), st.integers(0, 1000))
def test_ranges_change_no_bit(problem, seed):
    q, _, _ = make_operands(problem)
    span = Recipe(mask="span").make(problem, q, seed)["mask"]
    limited = run(problem, NOTHING | {"mask": span}, seed)
    unlimited = run(problem, NOTHING | {"mask": Unlimited(span.begin, span.end)}, seed)
    for a, b in zip(limited, unlimited, strict=True):
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


def test_ranges_are_asked_for_the_rows_of_a_tile():
    asked = []

    @dataclass(frozen=True)
    class Recorder(fa3.Mask):
        tensor: torch.Tensor

        def visible(self, at):
            return at.key >= 0

        def key_range(self, rows):
            assert isinstance(self.tensor[0], int)
            asked.append(rows)
            return 0, rows.seqlen_k

    problem = make_problem(2, 200, 90, 1, 2)
    walked(problem, Recorder(torch.zeros(1).int()))
    expected = {
        Rows(batch, head, first, last, 200, 90)
        for batch in range(2)
        for head in range(2)
        for first, last in ((0, 127), (128, 199))
    }
    assert set(asked) == expected


def test_without_tensors_the_steps_are_those_of_the_window():
    problem = make_problem(1, 256, 256, 2, window=CAUSAL)
    q, _, _ = make_operands(problem)
    span = Span(torch.tensor([64, 64]).int(), torch.tensor([96, 96]).int())
    modified, _ = modify(problem, q, NOTHING | {"mask": span})
    plan = plan_forward(modified, SMALL_GPU, SMALL_TILES)
    assert [step.blocks for step in steps(plan)] == [
        (blocks.begin, blocks.begin, blocks.begin, blocks.end)
        for blocks in (step.blocks for step in steps(plan_forward(problem, SMALL_GPU, SMALL_TILES)))
    ]


@settings(max_examples=20)
@given(problems(), st.integers(0, 100))
def test_a_gate_that_is_open_everywhere_is_none(problem, seed):
    """A score of the user's that changes nothing gives what no score gives, to rounding."""
    q, k, v = make_operands(problem, seed)
    gate = Gate(torch.ones(problem.num_heads_q), hides_odd=False)
    out, lse = fa3.flash_attn_func(q, k, v, score=gate, return_lse=True)
    plain, plain_lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, plain_lse)
    torch.testing.assert_close(out, plain, rtol=0.02, atol=0.01)


def test_ranges_that_depend_on_the_rows():
    problem = make_problem(1, 200, 900, 2, 1, 64)
    q, k, v = make_operands(problem)
    mask = Stairs(250)
    out, lse = fa3.flash_attn_func(q, k, v, mask=mask, return_lse=True)
    check_attention(out, lse, q, k, v, mask=mask)
