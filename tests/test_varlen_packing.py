"""Short packed sequences that share tiles: which calls do, the tables, and attention."""

import random
from dataclasses import replace

import pytest
import torch
from gpu_checks import used_counters
from varlen_problems import (
    VarlenProblem,
    check_beside_what_is_not_finite,
    check_call,
    check_graph,
    check_wrong_ends,
    make_call,
    random_short_problem,
    share_tiles,
    signature_with,
)

import fa3
from docs.examples.prefix_lm import PrefixLM
from fa3.planning.costs import H200
from fa3.planning.routes import (
    MOST_SHARED_TILE_KEYS,
    PACKED,
    PackedSizes,
    Signature,
    suits_shared_tiles,
)
from fa3.planning.tilings import TILINGS
from fa3.primitives.wgmma import ROWS
from fa3.problem import AttentionSpec, Window
from fa3.scores.masks import Band, Intersection
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template

SPEC = AttentionSpec("bfloat16", 64, 64, Band(right=True))

SHORT = VarlenProblem(
    (3, 0, 16, 1, 34, 9, 34, 34, 2, 60), (3, 4, 16, 0, 34, 40, 20, 34, 130, 1), heads_kv=2, group=2
)
USED = replace(
    SHORT, used_q=(3, 9, 10, 0, 99, 9, -1, 34, 1, 30), used_k=(1, 4, 16, 7, 20, -3, 20, 3, 99, 1),
    spare=70,
)  # fmt: skip


@pytest.fixture
def sharing(device, monkeypatch) -> torch.device:
    """Have all calls whose sequences may share tiles do so; the GPU that the test runs on."""
    share_tiles(monkeypatch, lambda signature, _: signature.shared_tiling is not None)
    return device


# -------------------------------------------------------------------------------------- results

FAMILIES = 10
"""Sets of options that change the generated code; the dtypes take turns."""

FEW_KEYS = 32
"""Sequences with fewer keys are checked one by one, and many have but a row or two."""

MIXED = tuple(length for _ in range(40) for length in range(17))
EVEN = (34,) * 300


def check(problem: VarlenProblem, where, seed: int = 0) -> None:
    check_call(problem, where, seed, few_keys=FEW_KEYS)


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls(family, sharing):
    """Rows that are not used are NaN, so many rows are marked and computed twice."""
    for seed, longest in zip(range(family, 3 * FAMILIES, FAMILIES), (16, 40, 64), strict=True):
        dtype = ("bfloat16", "float16")[family % 2]
        check(random_short_problem(seed, dtype, family, longest), sharing, seed)
        assert not used_counters()


@pytest.mark.parametrize(
    ("causal", "head_dim"), [(False, 64), (True, 64), (True, 128), (False, 256)]
)
def test_what_is_not_finite_does_not_reach_other_sequences(causal, head_dim, sharing):
    for lengths in (MIXED, EVEN):
        sizes = {"heads_kv": 2, "group": 2, "head_dim": head_dim}
        problem = VarlenProblem(lengths, lengths, **sizes, causal=causal)
        check_beside_what_is_not_finite(problem, sharing)


def test_gradients_of_sequences_that_share_tiles(sharing, monkeypatch):
    call = make_call(replace(SHORT, causal=True), 0, sharing)
    inputs = [call[name].requires_grad_() for name in "qkv"]

    def gradients():
        out, lse = fa3.flash_attn_varlen_func(**call, return_lse=True)
        return torch.autograd.grad(out.float().square().sum() + lse[lse.isfinite()].sum(), inputs)

    shared = gradients()
    share_tiles(monkeypatch, lambda *_: False)
    torch.testing.assert_close(shared, gradients(), rtol=0.02, atol=0.02)


# --------------------------------------------------------------------------------- which calls do

MODIFIED = {
    "softcap": (replace(SPEC, scores=(Template.of(Softcap(5.0)),)), True),
    "sinks": (replace(SPEC, sinks="float32"), True),
    "alibi": (replace(SPEC, scores=(Template.of(Alibi(torch.zeros(4), True)),)), False),
    "mask": (
        replace(SPEC, mask=Intersection(Band(), Template.of(PrefixLM(torch.zeros(2).int())))),
        False,
    ),
}


@pytest.mark.parametrize("name", MODIFIED)
def test_what_asks_for_places_in_a_sequence_does_not_share_tiles(name):
    spec, may_share = MODIFIED[name]
    tiling = signature_with(spec, has_used_q=True, has_used_k=True).shared_tiling
    assert (tiling is not None) == may_share


def sizes(batch: int, seqlen_q: int, seqlen_k: int, heads: int = 16) -> PackedSizes:
    return PackedSizes(batch, heads, batch * seqlen_q, batch * seqlen_k, seqlen_q, seqlen_k)


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        (sizes(8192, 16, 16), True),
        (sizes(8192, 8, 8), True),
        (sizes(8192, 34, 34), True),
        (sizes(8192, 1, 200), True),
        (sizes(200, 8, 8), True),
        # One wave of tiles either way.
        (sizes(8, 8, 8), False),
        # 128 rows would wait for 128 times 200 keys, in too few tiles.
        (sizes(128, 1, 200), False),
        (sizes(8192, 65, 65), False),
        (sizes(8192, 1, MOST_SHARED_TILE_KEYS + 1), False),
        # One long sequence among many.
        (sizes(8192, 8, 8)._replace(max_seqlen_q=4000, max_seqlen_k=4000), False),
    ],
)
def test_many_short_sequences_share_tiles(given, shares):
    signature = Signature(PACKED, SPEC, Window(right=0), 16, 4, H200)
    assert suits_shared_tiles(signature, given) == shares


def test_the_choice_follows_from_what_the_host_knows(monkeypatch):
    asked = []
    share_tiles(monkeypatch, lambda _, given: bool(asked.append(given)))
    call = make_call(USED) | {"max_seqlen_q": 1 << 40, "max_seqlen_k": 132}
    fa3.flash_attn_varlen_func(**call)
    assert asked == [PackedSizes(10, 4, 263, 352, 263, 132)]


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_head_size_has_a_tiling_of_two_halves(tiling):
    spec = replace(SPEC, head_dim=tiling.head_dim, head_dim_v=tiling.head_dim_v)
    signature = signature_with(spec)
    config = signature.shared_tiling
    assert config.tile_m == 2 * ROWS and not config.fixed_row_max
    config.validate(signature.shared_spec)


# ------------------------------------------------------------------------------------- on a GPU

AROUND_TILES = (
    *(VarlenProblem((1,) * rows, (3,) * rows, group=2) for rows in (1, 63, 64, 65, 127, 128, 129)),
    VarlenProblem((1, 2, 0, 3) * 50, (200, 1, 90, 255) * 50, causal=True),
)
"""Rows that end around tiles and halves, and few queries of many keys."""


def test_rows_around_tiles_and_halves(sharing):
    for problem in AROUND_TILES:
        check(problem, sharing)


def test_a_graph_serves_other_lengths(sharing):
    draw, total, problems = random.Random(0), 200 * 16, []
    for _ in range(3):
        lengths = tuple(draw.randint(0, 16) for _ in range(200))
        spare = total - sum(lengths)
        problems.append(VarlenProblem(lengths, lengths, spare=spare, causal=True, heads_kv=2))
    check_graph(problems, sharing, every=50, max_seqlen_q=16, max_seqlen_k=16)


def test_wrong_lengths_touch_nothing_outside(sharing):
    call = make_call(VarlenProblem((100,) * 3, (100,) * 3, causal=True), 0, sharing)
    call["v"][::7] = torch.nan
    check_wrong_ends(call)
