"""Packed sequences with few queries beside others: which kernel has which, and what comes of it."""

import random
from dataclasses import replace

import pytest
import torch
from pairs import places
from score_problems import Recipe
from varlen_problems import (
    LENGTHS_OF_GRAPHS,
    VarlenProblem,
    check_call,
    check_graph,
    check_wrong_ends,
    forget_routes,
    integers,
    make_call,
    note_attending,
    random_problem,
    unused,
)

import fa3
from docs.examples.prefix_lm import PrefixLM
from fa3.integrations import torch as integration
from fa3.planning import routes
from fa3.planning.costs import H200
from fa3.planning.routes import FEWEST_EARLIER_KEYS, PACKED, PackedSizes, Signature, choose_route
from fa3.problem import NO_BOUND, AttentionSpec, Window
from fa3.scores.masks import Band

FAMILIES = 11
"""Sets of options that change the generated code; every other one is in float16."""

DTYPES = "bfloat16", "float16"


@pytest.fixture
def with_few_keys(monkeypatch, no_shared_tiles):
    """Have the decode kernel beside the other even where keys are few; nothing shares tiles."""
    monkeypatch.setattr(routes, "FEWEST_EARLIER_KEYS", 1)
    forget_routes(monkeypatch)


def mixed_problem(seed: int, dtype: str, longest: int, most_sequences: int) -> VarlenProblem:
    """Draw any combination of options, with sequences on both sides of what is short."""
    problem = random_problem(seed, dtype, seed % FAMILIES, longest)
    code, draw = random.Random(f"{seed % FAMILIES} {dtype}"), random.Random(f"{seed} {dtype}")
    group = code.choice((1, 2, 4, 5, 8))
    most = signature_of(heads_q=group, heads_kv=1).short_limit
    queries, keys = [], []
    for _ in range(draw.choice((1, 3, most_sequences))):
        queries.append(draw.choice((0, 1, 1, 2, most, most + 1, draw.randint(1, 150))))
        keys.append(draw.choice((0, 1, 64, queries[-1], draw.randint(0, longest))))

    def counts(lengths: list[int], given) -> tuple[int, ...] | None:
        if given is None:
            return None
        return tuple(draw.choice((-1, 10**6, draw.randint(0, n), n, n)) for n in lengths)

    # Enough keys for any choice, in a sequence without queries.
    queries.append(0)
    keys.append(sum(queries) + 1)
    return replace(
        problem, seqlens_q=tuple(queries), seqlens_k=tuple(keys), group=group,
        used_q=counts(queries, problem.used_q), used_k=counts(keys, problem.used_k),
    )  # fmt: skip


@places(
    "seed,num_splits,dtype,longest,most_sequences",
    cpu=[(seed, num_splits, "bfloat16", 150, 6) for seed in range(20) for num_splits in (0, 1)],
    gpu=[(n, 0, DTYPES[n % 2], 3000, 40) for n in range(FAMILIES)],
)
@pytest.mark.usefixtures("with_few_keys")
def test_random_calls(seed, num_splits, dtype, longest, most_sequences, where):
    """On a GPU three of a family, of which one is split."""
    check_random(seed, num_splits, dtype, longest, most_sequences, where)
    if where != "cpu":
        for other in (seed + FAMILIES, seed + 2 * FAMILIES):
            check_random(other, 1, dtype, 150, most_sequences, where)


def check_random(seed: int, num_splits: int, dtype: str, longest, most_sequences, where) -> None:
    """Check a call; every other one has keys that are not finite."""
    problem = mixed_problem(seed, dtype, longest, most_sequences)
    check_call(problem, where, seed, is_poisoned=seed % 2 == 1, num_splits=num_splits)


@pytest.fixture
def attending(monkeypatch):
    return note_attending(monkeypatch)


FEW = VarlenProblem((60, 0, 40), (520, 5, 30), heads_kv=1, group=4, causal=True, spare=3)
"""The keys of the last sequence are fewer than its queries, some of which see none."""


@pytest.fixture
def with_fewer_keys(monkeypatch):
    """Have keys split where sequences may have 400: what runs on the CPU takes long for more."""
    monkeypatch.setattr(routes, "FEWEST_EARLIER_KEYS", 400)
    forget_routes(monkeypatch)


@pytest.mark.usefixtures("with_fewer_keys")
@pytest.mark.parametrize(
    "problem",
    [
        FEW,
        replace(FEW, causal=False, window=(450, 7), recipe=Recipe(20.0, sinks="q")),
        replace(FEW, used_q=(50, 0, 99), used_k=(500, 9, 3), recipe=Recipe(alibi_rank=2)),
        replace(FEW, window=(350, 0), head_dim=192, head_dim_v=128, heads_kv=2, group=3),
    ],
    ids=["causal", "window, softcap, sinks", "used, ALiBi", "window, (192, 128)"],
)
def test_all_sequences_of_few_tiles_are_the_decode_kernels(problem, attending):
    check_call(problem, num_splits=0)
    (most,) = attending
    assert most in (66 // 4 * 128, 66 // 6 * 128)


@pytest.mark.usefixtures("with_fewer_keys")
def test_what_keeps_few_tiles_whole(attending):
    """One split, few keys in reach of any query, SMs that are reserved, and gradients."""
    check_call(FEW, num_splits=1)
    assert attending == ["beside", "forward"]
    whole = [
        {"num_splits": 1}, {"seqused_k": integers(399, 5, 30), "max_seqlen_k": 399},
        {"window_size": (319, 0)}, {"sm_margin": 4}, {"dropout_p": 0.5},
        {"mask": PrefixLM(integers(9, 9, 9))},
    ]  # fmt: skip
    for options in whole:
        attending.clear()
        fa3.flash_attn_varlen_func(**make_call(FEW) | options)
        assert attending[-1] == "forward"
    call = make_call(FEW)
    call["q"].requires_grad_()
    attending.clear()
    fa3.flash_attn_varlen_func(**call)
    assert attending == ["forward"]


@pytest.mark.usefixtures("with_fewer_keys")
def test_metadata_says_whether_keys_are_split(attending):
    call = make_call(FEW)
    for num_splits, expected in ((0, [66 // 4 * 128]), (1, ["beside", "forward"])):
        attending.clear()
        metadata = fa3.get_scheduler_metadata(
            3, 60, 520, 4, 1, 64, None, torch.bfloat16, 64, call["cu_seqlens_q"], causal=True,
            cu_seqlens_k=call["cu_seqlens_k"], num_splits=num_splits,
        )  # fmt: skip
        fa3.flash_attn_varlen_func(**call, scheduler_metadata=metadata)
        assert attending == expected
        # A call that is not to split does not, whatever its metadata would let it.
        attending.clear()
        fa3.flash_attn_varlen_func(**call, scheduler_metadata=metadata, num_splits=1)
        assert attending == ["beside", "forward"]


@pytest.mark.usefixtures("with_fewer_keys")
def test_torch_says_whether_keys_are_split(attending):
    call = make_call(replace(FEW, causal=False))
    given = integration.AtenArguments(
        *(call[name] for name in "qkv"), cum_seq_q=call["cu_seqlens_q"],
        cum_seq_k=call["cu_seqlens_k"], max_q=call["max_seqlen_q"], max_k=call["max_seqlen_k"],
    )  # fmt: skip
    for num_splits, expected in ((None, [66 // 4 * 128]), (1, ["beside", "forward"])):
        attending.clear()
        integration.attend_into(given._replace(num_splits=num_splits), torch.empty_like(call["q"]))
        assert attending == expected


# ----------------------------------------------------------------------------------- decisions


def signature_of(
    heads_q: int = 32, heads_kv: int = 8, window: Window = Window(right=0), **fields
) -> Signature:
    spec = AttentionSpec("bfloat16", 128, 128, Band.of(window))
    return Signature(PACKED, spec, window, heads_q, heads_kv, H200, **fields)


def sizes(batch: int, total_q: int, total_k: int, longest_q: int) -> PackedSizes:
    return PackedSizes(batch, 32, total_q, total_k, longest_q, 8192)


SIZES = {
    "decode": (sizes(64, 64, 64 * 8192, 1), 1),
    "few drafted tokens": (sizes(64, 64 * 5, 64 * 8192, 5), 5),
    "beside chunks": (sizes(71, 64 + 7 * 512, 10**6, 512), 32),
    "beside one chunk, few keys": (sizes(5, 100, 100 + FEWEST_EARLIER_KEYS - 1, 96), 0),
    "beside one chunk, some keys": (sizes(5, 100, 100 + FEWEST_EARLIER_KEYS, 96), 32),
    "own keys": (sizes(64, 64 * 30, 64 * 30, 30), 0),
    "own keys, long": (sizes(64, 10**5, 10**5, 4000), 0),
    "equal chunks": (sizes(8, 8 * 512, 10**6, 512), 0),
    "more blocks than 32 bits count": (sizes(1 << 21, 1 << 21, 1 << 29, 1), 0),
}


@pytest.mark.parametrize("case", SIZES)
def test_which_sequences_are_the_decode_kernels(case):
    of_call, expected = SIZES[case]
    assert choose_route(signature_of(num_splits=1), of_call).most_queries == expected


CHUNK = PackedSizes(1, 8, 512, 1 << 15, 512, 1 << 15)

FEW_TILES = {
    "a chunk": (CHUNK, NO_BOUND, 1024),
    "a long window": (CHUNK, 5000, 1024),
    "a short window": (CHUNK, FEWEST_EARLIER_KEYS - 513, 0),
    "few keys": (CHUNK._replace(max_seqlen_k=FEWEST_EARLIER_KEYS - 1), NO_BOUND, 0),
    "half of the SMs": (CHUNK._replace(total_q=1023, max_seqlen_q=1023), NO_BOUND, 1024),
    "more than half": (CHUNK._replace(total_q=1024, max_seqlen_q=1024), NO_BOUND, 0),
    "a prompt of 2k": (PackedSizes(1, 8, 2048, 2048, 2048, 2048), NO_BOUND, 0),
    "some sequences": (CHUNK._replace(batch=4), NO_BOUND, 1024),
    "many sequences": (CHUNK._replace(batch=5), NO_BOUND, 0),
    "more blocks than 32 bits count": (
        CHUNK._replace(batch=2, total_k=1 << 29, max_seqlen_k=1 << 29), NO_BOUND, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FEW_TILES)
def test_where_the_decode_kernel_has_all_sequences(case):
    of_call, left, expected = FEW_TILES[case]
    signature = signature_of(8, 1, Window(left, 0))
    assert routes.queries_if_few_tiles(signature, of_call) == expected


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_decoding_beside_long_sequences(head_dims, device):
    """Once more with neighbours whose keys and values are not finite."""
    queries, keys = (*(1,) * 31, 3, 32, 33), range(700, 4100, 100)
    for long in ((), (200,), (513, 40, 0, 2000)):
        problem = VarlenProblem(
            (*queries, *long), (*keys, *long), heads_kv=2, group=4, causal=True, spare=3,
            head_dim=head_dims[0], head_dim_v=head_dims[1],
        )  # fmt: skip
        check_call(problem, device)
        check_call(problem, device, is_poisoned=True)


def test_long_sequences_have_the_bits_that_they_have_alone(device):
    problem = VarlenProblem(
        (1, 700, 1, 40), (5000, 900, 3000, 300), heads_kv=2, group=4, causal=True
    )
    call = make_call(problem, 0, device)
    out = fa3.flash_attn_varlen_func(**call)
    for sequence in (1, 3):
        queries, keys = problem.rows[sequence]
        of_q, of_k = (slice(rows.start, rows.stop) for rows in (queries, keys))
        alone = call | {
            "q": call["q"][of_q], "k": call["k"][of_k], "v": call["v"][of_k],
            "cu_seqlens_q": integers(0, len(queries), device=device),
            "cu_seqlens_k": integers(0, len(keys), device=device), "max_seqlen_q": len(queries),
        }  # fmt: skip
        assert torch.equal(out[of_q], fa3.flash_attn_varlen_func(**alone))


def test_a_graph_serves_other_lengths(device):
    """Sequences become short, long and empty."""
    lengths = (
        ((1, 200, 1, 98), (4000, 300, 900, 800)), ((300, 0, 0, 0), (400, 0, 5600, 0)),
        ((1, 1, 149, 149), (50, 5000, 200, 750)), ((32, 33, 34, 201), (32, 3300, 2467, 201)),
    )  # fmt: skip
    problems = [VarlenProblem(*of, heads_kv=2, group=4, causal=True) for of in lengths]
    check_graph(problems, device, max_seqlen_q=300, max_seqlen_k=5600)


@pytest.mark.usefixtures("with_few_keys")
@pytest.mark.parametrize(("longest", "num_splits"), [(1, 1), (300, 1), (300, 0)])
def test_wrong_lengths_touch_nothing_outside(longest, num_splits, device):
    call = make_call(VarlenProblem((100,) * 3, (300,) * 3, group=4, causal=True), 0, device)
    check_wrong_ends(call, max_seqlen_q=longest, num_splits=num_splits)


CHUNKS = VarlenProblem(
    (60, 5, 60), (9000, 0, 5000), heads_kv=1, group=8, head_dim=128, spare=3, causal=True
)
"""Short chunks of prompts, whose tiles are few; a sequence has queries and no keys."""

ROWS_63 = replace(CHUNKS, seqlens_q=(63,), seqlens_k=(20_000,), heads_kv=2)


@pytest.mark.usefixtures("no_shared_tiles")
@pytest.mark.parametrize(
    "problem",
    [
        CHUNKS,
        replace(CHUNKS, seqlens_q=(64,), seqlens_k=(1 << 15,)),
        replace(ROWS_63, causal=False, window=(4100, 60), recipe=Recipe(softcap=20.0)),
        replace(ROWS_63, dtype="float16", head_dim=64, recipe=Recipe(alibi_rank=2)),
        replace(CHUNKS, head_dim=256, recipe=Recipe(sinks="float32")),
        replace(CHUNKS, head_dim=192, head_dim_v=128, used_q=(50, 9, 40), used_k=(8000, 9, 100)),
    ],
    ids=["chunks", "64 of 32k", "window, softcap", "ALiBi", "sinks, 256", "used, (192, 128)"],
)
def test_chunks_of_few_tiles(problem, attending, device):
    """Once more with neighbours whose keys and values are not finite, and into memory given."""
    check_call(problem, device, num_splits=0)
    check_call(problem, device, is_poisoned=True, num_splits=0)
    call = make_call(problem, 0, device) | {"num_splits": 0}
    expected, used = fa3.flash_attn_varlen_func(**call), ~unused(problem, len(call["q"]), device)
    out = torch.full_like(torch.cat((expected, expected), dim=1), torch.nan)
    given = out[:, : expected.shape[1]]
    assert fa3.flash_attn_varlen_func(**call, out=given) is given
    assert torch.equal(given[used], expected[used]) and given[~used].isnan().all()
    assert out[:, expected.shape[1] :].isnan().all()
    assert len(attending) == 4 and set(attending) == {66 // expected.shape[1] * 128}


def test_a_graph_of_few_tiles_serves_other_lengths(attending, device):
    """A sequence has all rows, none, or none that sees a key."""
    lengths = (
        ((60, 5, 60), (9000, 0, 5000)), ((64, 61, 0), (7000, 7000, 0)),
        ((1, 64, 60), (1, 13_999, 0)), ((0, 64, 61), (50, 200, 13_750)),
    )  # fmt: skip
    problems = [replace(CHUNKS, seqlens_q=of_q, seqlens_k=of_k, spare=0) for of_q, of_k in lengths]
    options = {"max_seqlen_q": 64, "max_seqlen_k": 14_000, "num_splits": 0}
    check_graph(problems, device, names=LENGTHS_OF_GRAPHS, **options)
    assert attending == [1024, 1024]
