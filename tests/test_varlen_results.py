"""`flash_attn_varlen_func` on the CPU and on a Hopper GPU: results, and what is left alone."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from free_counters import used_counters
from pairs import places
from problems import make_problem
from score_problems import Recipe
from varlen_problems import (
    WRONG_ENDS,
    VarlenProblem,
    attend,
    check_beside_what_is_not_finite,
    check_call,
    check_graph,
    check_varlen,
    check_wrong_ends,
    integers,
    make_call,
    random_problem,
    unused,
)

import fa3
from fa3 import flash_attn_varlen_func
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.ragged import RaggedPlan
from fa3.problem import Window

RAGGED = VarlenProblem((70, 0, 1, 130), (90, 5, 0, 64), heads_kv=2, group=2)
USED = replace(RAGGED, used_q=(70, 9, 0, 100), used_k=(10, -1, 3, 999), spare=5)

SIZES = 64, 128, 256


def run(problem: VarlenProblem, seed: int = 0, **changes):
    """Make a call and check what comes of it."""
    call = make_call(problem, seed) | changes
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    check_varlen(problem, call, out, lse)
    return out, lse


# -------------------------------------------------------------------------------------- results


FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""


@places(
    "seed,family,longest",
    cpu=[(seed, seed // 2, 150) for seed in range(120)],
    gpu=[(seed, seed % FAMILIES, 40 if seed % 3 else 700) for seed in range(3 * FAMILIES)],
)
def test_random_calls(seed, family, longest, where):
    check_call(
        random_problem(seed, ("bfloat16", "float16")[seed % 2], family, longest), where, seed
    )


@pytest.mark.parametrize("problem", [RAGGED, USED], ids=["all", "used"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (10, 3)},
        {"window": (0, 0)},
        {"window": (20, -1)},
        {"window": (-1, 5)},
        {"window": (1 << 40, 1 << 40)},
        {"window": (9, 1 << 40), "causal": True},
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"head_dim": 64, "head_dim_v": 256},
        {"head_dim": 8, "head_dim_v": 40},
        {"group": 1, "heads_kv": 3},
        {"group": 6, "heads_kv": 1},
        {"dtype": "float16", "softmax_scale": 0.7},
        {"recipe": Recipe(softcap=5.0, alibi_rank=1, sinks="q"), "causal": True},
        {"recipe": Recipe(alibi_rank=2, sinks="float32")},
        {"recipe": Recipe(score="gate", mask="prefix", alibi_rank=2), "window": (40, 40)},
        {"recipe": Recipe(score="relative", mask="documents")},
    ],
    ids=str,
)
def test_options(problem, options):
    run(replace(problem, **options))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 40), (40, 300), (300, 300), (1, 300)])
@pytest.mark.parametrize("window", [(-1, 0), (-1, 7), (25, 0)])
def test_bands_are_aligned_with_the_last_token_of_each_sequence(seqlen_q, seqlen_k, window):
    run(VarlenProblem((3, seqlen_q, 17), (9, seqlen_k, 4), window=window))


def test_used_lengths_are_those_of_shorter_sequences():
    call = make_call(replace(RAGGED, causal=True))
    given = {"seqused_q": integers(7, 0, 1, 40), "seqused_k": integers(20, 2, 0, 50)}
    out = flash_attn_varlen_func(**call, **given)
    rows_q, rows_k = (slice(71, 111), slice(95, 145))
    alone = call["q"][None, rows_q], call["k"][None, rows_k], call["v"][None, rows_k]
    assert torch.equal(out[rows_q], fa3.flash_attn_func(*alone, causal=True)[0])


@dataclass(frozen=True)
class Lengths(fa3.Score):
    """Notes where it is asked."""

    seen: tuple = ()

    def score(self, logit, at):
        return logit

    def reference(self, logits, at):
        PLACES.append((at.batch, at.seqlen_q, at.seqlen_k, int(at.query.max()), int(at.key.max())))
        return logits


PLACES = []


def test_functions_see_the_sequence_and_places_inside_of_it():
    PLACES.clear()
    flash_attn_varlen_func(**make_call(USED) | {"score": Lengths()})
    assert set(PLACES) == {(0, 70, 10, 69, 9), (3, 100, 64, 99, 63)}


def test_sinks_of_queries_that_see_no_key():
    problem = replace(RAGGED, recipe=Recipe(sinks="q"), window=(-1, 0))
    call = make_call(problem)
    out, lse = flash_attn_varlen_func(**call, return_lse=True)
    assert (out[70] == 0).all() and torch.equal(lse[:, 70], call["sinks"].float())


def test_views():
    packed = torch.randn(120, 3, 2, 64).half()
    call = make_call(VarlenProblem((50, 70), (50, 70), heads_kv=2, dtype="float16"))
    call |= dict(zip("qkv", packed.unbind(1), strict=True))
    copies = {name: call[name].clone(memory_format=torch.contiguous_format) for name in "qkv"}
    heads_first = {name: call[name].transpose(0, 1).contiguous().transpose(0, 1) for name in "qkv"}
    out = flash_attn_varlen_func(**call)
    assert torch.equal(out, flash_attn_varlen_func(**call | copies))
    assert torch.equal(out, flash_attn_varlen_func(**call | heads_first))


# ------------------------------------------------------------------------------- what is left alone


def test_rows_that_are_not_used_are_neither_read_nor_written(poisoned_memory):
    """Those of the drawn tensors are NaN."""
    call = make_call(USED)
    given = torch.full((206, 4, 64), 7.0).bfloat16()
    out, lse = flash_attn_varlen_func(**call, out=given, return_lse=True)
    assert out is given
    rows = unused(USED, 206)
    assert rows.any() and (out[rows] == 7.0).all()
    clean = {name: call[name].nan_to_num() for name in "qkv"}
    same, same_lse = flash_attn_varlen_func(**call | clean, return_lse=True)
    assert torch.equal(out[~rows], same[~rows]) and torch.equal(lse[:, ~rows], same_lse[:, ~rows])


@places(
    "causal,head_dim", cpu=[(False, 64), (True, 64)], gpu=itertools.product((False, True), SIZES)
)
def test_what_is_not_finite_does_not_reach_long_neighbours(causal, head_dim, where):
    """Key blocks reach into the next sequence, and rows of a tile into the next one's too. Shared
    tiles are in test_varlen_packing."""
    lengths = (300, 129, 70, 200, 333, 1, 130, 90)
    if where != "cpu":
        lengths = (300, 129, 700, 1, 500, 64, 333, 2000, 95, 128, 257, 640)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, causal=causal
    )
    check_beside_what_is_not_finite(problem, where)


def test_out_between_the_elements_of_another_tensor():
    call = make_call(RAGGED)
    wide = torch.full((201, 4, 128), torch.nan).bfloat16()
    out = wide[..., 64:]
    wide[..., :64] = call["q"]
    assert flash_attn_varlen_func(**call | {"q": wide[..., :64]}, out=out) is out
    assert torch.equal(out, flash_attn_varlen_func(**call))
    assert torch.equal(wide[..., :64], call["q"])


@pytest.mark.parametrize(
    "problem",
    [
        VarlenProblem((), ()),
        VarlenProblem((), (), spare=6),
        VarlenProblem((0, 0), (3, 0)),
        VarlenProblem((20, 0, 4), (0, 0, 0)),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(9, 3, 99), recipe=Recipe(sinks="q")),
        VarlenProblem((20, 0, 4), (0, 0, 0), used_q=(-4, 3, 2**31 - 1), spare=3),
        VarlenProblem((20, 4), (5, 6), heads_kv=0),
        VarlenProblem((20, 4), (5, 6), used_k=(0, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_tensors(problem, causal, poisoned_memory):
    call = make_call(problem) | {"causal": causal}
    spare = 0 if sum(problem.seqlens_k) else problem.spare
    call |= {name: call[name][spare:] for name in "kv"}
    given = torch.full((len(call["q"]), call["q"].shape[1], 64), 7.0).bfloat16()
    out, lse = flash_attn_varlen_func(**call, out=given, return_lse=True)
    check_varlen(problem, call, out, lse)
    assert (out[unused(problem, len(out))] == 7.0).all()
    assert flash_attn_varlen_func(**call).shape == out.shape


def test_gradients_may_be_on_if_they_are_not_asked_for():
    call = make_call(RAGGED)
    call["q"].requires_grad_()
    with torch.no_grad():
        out = flash_attn_varlen_func(**call)
    assert not out.requires_grad


@places(
    "causal,head_dim,length",
    cpu=[(False, 128, 50), (True, 64, 50)],
    gpu=itertools.product((False, True), SIZES, (2000,)),
)
def test_equal_lengths_have_the_bits_of_a_dense_call(causal, head_dim, length, where):
    batch, lengths = 4, (length,) * 4
    problem = VarlenProblem(lengths, lengths, heads_kv=1, group=2, head_dim=head_dim, causal=causal)
    call = make_call(problem, 0, where)
    out, lse = attend(call)
    window = Window(right=0) if causal else Window()
    dense = make_problem(batch, length, length, 1, 2, head_dim, window)
    config = RaggedPlan(dense.spec, False, False, H200).config
    plan = plan_forward(dense, config=config, schedule="list")
    q, k, v = (call[name].view(batch, length, -1, head_dim) for name in "qkv")
    expected, expected_lse = fa3.flash_attn_func(
        q, k, v, window_size=window, plan=plan, return_lse=True
    )
    assert torch.equal(out, expected.view(out.shape))
    assert torch.equal(lse, expected_lse.transpose(0, 1).reshape(lse.shape))


def test_a_graph_serves_other_lengths(device):
    problems = [VarlenProblem(lengths, lengths, causal=True) for lengths in ((300, 5), (150, 155))]
    check_graph(problems, device, max_seqlen_q=305, max_seqlen_k=305)


@pytest.mark.parametrize("ends", WRONG_ENDS)
def test_wrong_lengths_touch_nothing_outside(ends, device):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, device)
    check_wrong_ends(call, ends)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_tiles(causal, head_dim, device):
    lengths = (127, 128, 129, 1, 0, 255, 64, 300, 2, 192)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, causal=causal
    )
    check_call(problem, device)


@pytest.mark.parametrize("rows", [1, 2])
def test_tensors_of_few_rows(rows, device):
    check_call(VarlenProblem((rows,), (1,), causal=True), device)
    check_call(VarlenProblem((1,), (rows,)), device)


def test_many_short_sequences(device):
    draw = random.Random(0)
    lengths = tuple(draw.randint(0, 16) for _ in range(3000))
    check_call(VarlenProblem(lengths, lengths, causal=True, heads_kv=2), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [1, 8, 40])
def test_rows_whose_reference_fails_are_computed_again(factor, head_dim, device):
    lengths = (700, 0, 130, 1, 64, 333)
    problem = VarlenProblem(
        lengths, lengths[::-1], heads_kv=2, group=2, head_dim=head_dim, causal=True
    )
    call = make_call(problem, 0, device)
    # Queries of some sequences only, so that some tiles fail in part, some wholly, some not.
    call["q"][::3] *= factor
    for _ in range(2):
        out, lse = attend(call)
        check_varlen(problem, call, out, lse)
    assert not used_counters()
