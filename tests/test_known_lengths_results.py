"""Lengths that the host knows: results, streams, graphs, copies and other lengths."""

import copy
import pickle
import random
from dataclasses import replace

import pytest
import torch
from cuda_graphs import captured
from free_counters import used_counters
from pairs import places
from problems import poisoned_allocations
from test_known_lengths import (
    MIXED,
    cached_call,
    metadata_of,
    metadata_of_cache,
    on_host,
)
from varlen_problems import (
    VarlenProblem,
    check_varlen,
    integers,
    make_call,
    random_problem,
    unused,
)

from fa3 import flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata

# ------------------------------------------------------------------------------------- results


class OfThisProcess:
    """Stands for a kernel that was loaded, which nobody can copy."""

    def __reduce_ex__(self, protocol: int):
        raise TypeError("cannot be pickled")


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda metadata: pickle.loads(pickle.dumps(metadata)),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_have_the_lengths_and_no_kernels(way):
    call = make_call(MIXED)
    metadata = metadata_of(call)
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    lengths = metadata.lengths
    metadata.fitting = OfThisProcess()
    lengths.latest = OfThisProcess(), 0, True, None
    lengths.route = OfThisProcess(), False, None
    lengths.tables = {(OfThisProcess(), None): None}
    found = COPIES[way](metadata)
    assert found.fitting is None and found.calls == metadata.calls
    if way != "copy":
        assert found.lengths is not lengths and not found.lengths.tables
        assert torch.equal(flash_attn_varlen_func(**call, scheduler_metadata=found), expected)


def test_metadata_of_equal_queries_can_be_copied():
    metadata = get_scheduler_metadata(2, 1, 64, 4, 2, 64, integers(3, 64))
    for way in COPIES.values():
        assert way(metadata) == metadata


FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""

SKEWED = VarlenProblem(
    (700, 5, 0, 1300, 130, 64), (700, 900, 3, 1300, 4000, 64), heads_kv=2, group=2, causal=True,
    head_dim=128,
)  # fmt: skip

CHUNK = VarlenProblem((500,), (9000,), group=8, causal=True, head_dim=128)
"""Has few tiles, which metadata cuts."""


def on_cpu(call: dict) -> dict:
    """The call with its lengths on the CPU, as metadata wants them."""
    return {
        name: value.cpu().clamp(min=0)
        if name.startswith(("cu_seq", "seqused", "cache_seq"))
        else value
        for name, value in call.items()
    }


def made_for(call: dict, **options):
    return metadata_of(on_cpu(call), **options)


def run(call: dict, **given):
    """Call into NaN memory."""
    with poisoned_allocations():
        return flash_attn_varlen_func(**call, **given, return_lse=True)


def check_same(problem: VarlenProblem, where, seed: int = 0, **options) -> None:
    """Assert that calls of three layers with metadata, and one with lengths, have a call's bits."""
    call = make_call(problem, seed, where)
    out, lse = run(call)
    rows, metadata = ~unused(problem, len(out), where), made_for(call, **options)
    for given in (*[{"scheduler_metadata": metadata}] * 3, on_host(on_cpu(call))):
        again, of_again = run(call, **given)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(of_again[:, rows], lse[:, rows])
    assert not used_counters()


@places(
    "seed,family,longest",
    cpu=[(seed, seed // 2, 150) for seed in range(60)],
    gpu=[(seed, seed % FAMILIES, 40 if seed % 3 else 700) for seed in range(2 * FAMILIES)],
)
def test_calls_have_the_bits_of_calls_without(seed, family, longest, where):
    problem = random_problem(seed, ("bfloat16", "float16")[seed % 2], family, longest)
    # By rows of no sequence, the plain call may take other kernels.
    options = {} if where == "cpu" else {"num_splits": 1}
    check_same(replace(problem, spare=0), where, seed, **options)


def test_decode_rows_beside_long_ones():
    check_same(MIXED, "cpu")


@places(
    "problem",
    cpu=[replace(MIXED, seqlens_k=MIXED.seqlens_q)],
    gpu=[replace(SKEWED, seqlens_k=SKEWED.seqlens_q)],
)
def test_gradients(problem, where):
    gradients = []
    for given in ({}, made_for, lambda call: on_host(on_cpu(call))):
        call = make_call(problem, 0, where)
        if given is made_for:
            given = {"scheduler_metadata": made_for(call)}
        elif given:
            given = given(call)
        leaves = [call[name].requires_grad_() for name in "qkv"]
        out = flash_attn_varlen_func(**call, **given, deterministic=True)
        gradients.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for found in gradients[1:]:
        assert all(map(torch.equal, gradients[0], found))


@pytest.mark.parametrize(
    "lengths_q", [(100, 1, 40, 1), (100, 90, 80, 70), (3, 1, 1, 2)], ids=["mixed", "long", "short"]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_calls_on_pages(lengths_q, page_size, where):
    call = cached_call(lengths_q, (300, 90, 80, 500), page_size, where)
    call["max_seqlen_q"] = 128
    metadata = metadata_of_cache(on_cpu(call), page_size=page_size)
    assert metadata.lengths.tables or where == "cpu"
    out = flash_attn_with_kvcache(**call)
    for _ in range(3):
        assert torch.equal(out, flash_attn_with_kvcache(**call, scheduler_metadata=metadata))
    assert len(metadata.lengths.tables) == (where != "cpu") and not used_counters()
    packed = {name: call[name] for name in ("q", "page_table", "causal", "max_seqlen_q")}
    packed |= {"k": call["k_cache"], "v": call["v_cache"], "seqused_k": call["cache_seqlens"]}
    packed |= {"cu_seqlens_q": call["cu_seqlens_q"], "cu_seqlens_k": None, "max_seqlen_k": 500}
    assert torch.equal(out, flash_attn_varlen_func(**packed, scheduler_metadata=metadata))


def test_new_tokens_count():
    call = cached_call((40, 1), (300, 90))
    room = integers(200, 80)
    new = {"k": torch.randn(2, 5, 2, 64).bfloat16(), "v": torch.randn(2, 5, 2, 64).bfloat16()}
    call |= {"cache_seqlens": room, **new}
    metadata = metadata_of_cache(call, max_seqlen_k_new=5)
    assert metadata.lengths.longest_k == 205
    out = flash_attn_with_kvcache(**call)
    assert torch.equal(out, flash_attn_with_kvcache(**call, scheduler_metadata=metadata))
    wrong = metadata_of_cache(call, max_seqlen_k_new=4)
    with pytest.raises(
        ValueError, match=r"^scheduler_metadata was made for cache_seqlens with 204"
    ):
        flash_attn_with_kvcache(**call, scheduler_metadata=wrong)


@pytest.mark.parametrize("problem", [SKEWED, MIXED], ids=["skewed", "mixed"])
def test_results_are_those_of_dense_attention(problem, device):
    call = make_call(problem, 0, device)
    out, lse = run(call, scheduler_metadata=made_for(call))
    check_varlen(problem, call, out, lse)


@pytest.mark.parametrize("problem", [SKEWED, CHUNK], ids=["skewed", "chunk"])
def test_rows_whose_reference_fails_are_computed_again(problem, device):
    """Tiles are whole, and cut."""
    call = make_call(problem, 0, device)
    call["q"][::3] *= 40
    metadata = made_for(call)
    for _ in range(3):
        out, lse = run(call, scheduler_metadata=metadata)
        check_varlen(problem, call, out, lse)
    assert not used_counters()


def test_two_streams_at_once(device):
    call = make_call(SKEWED, 0, device)
    expected = run(call)
    metadata = made_for(call)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(device) for _ in range(3)], []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(
                flash_attn_varlen_func(**call, scheduler_metadata=metadata, return_lse=True)
            )
    torch.cuda.synchronize()
    for pair in found:
        assert all(map(torch.equal, pair, expected))
    assert not used_counters()


def test_captured_graphs(device):
    """Two graphs of three layers share a table, replayed beside each other and plain calls."""
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    metadata = made_for(call)
    run(call, scheduler_metadata=metadata)
    given, graphs, outs = call | {"scheduler_metadata": metadata}, [], []
    for _ in range(2):
        graph, results = captured(lambda: [flash_attn_varlen_func(**given) for _ in range(3)])
        graphs.append(graph)
        outs += results
    # The graphs keep their table.
    given.clear()
    del metadata
    streams = [torch.cuda.Stream(device) for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(7.0)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        plain = flash_attn_varlen_func(**call)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*outs, plain))


def test_a_graph_that_is_captured_before_there_is_a_table_makes_its_own(device):
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    lengths = on_host(on_cpu(call))
    graph, out = captured(lambda: flash_attn_varlen_func(**call, **lengths))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(4))
def test_other_lengths_than_planned_touch_nothing_outside(seed, device):
    """Undefined what they give, but it lies in out."""
    call = make_call(SKEWED, 0, device)
    metadata, draw = made_for(call), random.Random(seed)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        total = int(call[name][-1])
        cuts = sorted(draw.randint(-9, 2 * total) for _ in range(len(call[name]) - 1))
        call[name] = integers(0, *cuts, device=device)
    rows = len(call["q"])
    around = torch.full((3 * rows, *call["q"].shape[1:]), 7.0, device=device).bfloat16()
    flash_attn_varlen_func(**call, out=around[rows : 2 * rows], scheduler_metadata=metadata)
    torch.cuda.synchronize()
    assert (around[:rows] == 7).all() and (around[2 * rows :] == 7).all()
    assert not used_counters()


def test_metadata_of_ever_new_lengths_keeps_no_memory(device):
    draw = random.Random(0)

    def sweep(turns: int) -> int:
        for _ in range(turns):
            lengths = tuple(draw.randint(1, 400) for _ in range(9))
            problem = VarlenProblem(lengths, lengths, causal=True)
            call = make_call(problem, 0, device) | {"max_seqlen_q": 400, "max_seqlen_k": 400}
            flash_attn_varlen_func(**call, scheduler_metadata=made_for(call))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    sizes = [sweep(100) for _ in range(4)]
    assert sizes[-1] - sizes[0] < 1 << 20


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"]
)
def test_copies_of_metadata_that_was_used(way, device):
    call = make_call(CHUNK, device=device)
    metadata = metadata_of(on_cpu(call))
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    found = way(metadata)
    assert metadata.lengths.tables and not found.lengths.tables
    assert torch.equal(flash_attn_varlen_func(**call, scheduler_metadata=found), expected)
    assert found.lengths.tables
